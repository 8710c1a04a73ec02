"""Which logits count: one mechanism for the labels trick and for nets with several heads.

A mask is a function of a batch's labels ``[B]`` that gives the logits allowed, ``[C]`` or ``[B, C]``. The
others are −∞, so that they have no probability and get no gradient.

* ``partial(present, classes=10)``: the labels trick of class-incremental streams, in training only.
* ``partial(own_head, heads=tasks.heads)``: one output layer whose parts are the heads of the tasks. Labels of
  different tasks differ, so a label says which head its example belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Mask: TypeAlias = Callable[[Tensor], Tensor]


def present(y: Tensor, classes: int) -> Tensor:
    """The labels that occur in a batch.

    Example:
        >>> present(torch.tensor([2, 0, 2]), classes=4)
        tensor([ True, False,  True, False])
    """
    return torch.zeros(classes, dtype=torch.bool, device=y.device).index_fill(0, y, True)


def own_head(y: Tensor, heads: Tensor) -> Tensor:
    """For each example, the labels of the head that its own label is on.

    Args:
        y: Labels of a batch.
        heads: Number of the head that each class is on, on the labels' device.

    Example:
        >>> own_head(torch.tensor([1, 3]), heads=torch.tensor([0, 0, 1, 1]))
        tensor([[ True,  True, False, False],
                [False, False,  True,  True]])
    """
    return heads == heads[y][:, None]


def restricted(logits: Tensor, allowed: Tensor) -> Tensor:
    """The logits ``[..., B, C]`` with −∞ where they are not allowed.

    Example:
        >>> restricted(torch.zeros(1, 2), torch.tensor([True, False])).softmax(-1)
        tensor([[1., 0.]])
    """
    return logits.masked_fill(~allowed, float("-inf"))


def masked_loss(mask: Mask | None = None) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The mean cross-entropy of a batch over the logits that a mask allows: a loss for ``compile_step``.

    Example:
        >>> from functools import partial
        >>> loss_fn = masked_loss(partial(present, classes=3))
        >>> loss_fn(nn.Linear(2, 3), torch.ones(4, 2), torch.zeros(4, dtype=torch.long)).item()
        0.0
    """

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        return cross_entropy(logits if mask is None else restricted(logits, mask(y)), y)

    return loss
