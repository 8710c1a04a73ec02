"""The evidence lower bound per example, with an explicit scale of the KL.

The loss of every gradient method is

    mean NLL of the batch + factor · KL(q ‖ p) / num_data

so that a whole epoch counts the KL once when ``factor`` is 1. A factor is a number (KL down-scaling) or a
function of the step: :func:`blundell` and :func:`warmup` give two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast
from weakref import WeakMethod

import torch
from torch import Tensor

from posterity.arguments import NUMBER, TENSOR, WHOLE, Kind, described, is_number, takes

Factor: TypeAlias = float | Callable[[int], float]
# The entry of a KL's node in the autograd graph: unlike an attribute of the tensor it is not saved with it.
_HEARD_BY = "posterity_heard_by"
_FACTOR = Kind("a number, or a function of the step", lambda factor: is_number(factor) or callable(factor))


@takes(nll=TENSOR, divergence=TENSOR, num_data=NUMBER, factor=_FACTOR, step=WHOLE)
def elbo(
    nll: Tensor, divergence: Tensor, *, num_data: int, factor: Factor = 1.0, step: int | None = None
) -> Tensor:
    """The negative ELBO per example: the loss to minimise.

    Args:
        nll: Mean negative log-likelihood of the batch, at sampled weights.
        divergence: KL(q ‖ p), summed over weights.
        num_data: Training examples.
        factor: Scale of the KL against 1 / num_data, or a function of the step that gives it.
        step: Number of the batch since the start, from 0; needed if ``factor`` is a function.

    Example:
        >>> import torch
        >>> elbo(torch.tensor(0.5), torch.tensor(100.0), num_data=1000)
        tensor(0.6000)
    """
    refuse_num_data(num_data)
    if divergence.dim() and divergence.shape != nll.shape:
        raise ValueError(
            f"the divergence must be one number, summed over weights, not of shape {list(divergence.shape)}"
        )
    if nll.numel() != 1 and divergence.shape != nll.shape:
        raise ValueError(f"nll must be one number, the mean of the batch, not of shape {list(nll.shape)}")
    if nll.requires_grad and nll.numel() == 1 and not torch.compiler.is_compiling():
        method = _notes(divergence).get(_HEARD_BY)
        if method is not None and (hear := method()) is not None:
            hear(nll)
    return nll + (factor_at(factor, step) / num_data) * divergence


def heard_by(divergence: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
    """The same KL, with a method that ``elbo`` calls with the NLL while the method's object is alive."""
    _notes(divergence)[_HEARD_BY] = WeakMethod(hear)
    return divergence


def _notes(tensor: Tensor) -> dict[str, Any]:
    """The metadata dict of a tensor's autograd node; an empty one if it has none."""
    # torch's types take the property for a method.
    return {} if tensor.grad_fn is None else cast(dict[str, Any], tensor.grad_fn.metadata)


def refuse_num_data(num_data: int) -> None:
    """Raise if the number of examples is below 1."""
    if not 1 <= num_data < math.inf:
        raise ValueError(f"num_data must be at least 1, not {num_data}")


def factor_at(factor: Factor, step: int | None) -> float:
    """The KL's factor at a step, a number of 0 or more."""
    if callable(factor):
        if step is None:
            raise ValueError("factor is a function of the step: pass step=, the number of the batch")
        factor = factor(step)
        if not is_number(factor):
            raise TypeError(f"factor must give a number at every step, not {described(factor)}")
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor must be 0 or more, and finite, not {factor}: it scales the KL")
    return factor


@takes(num_batches=WHOLE)
def blundell(num_batches: int) -> Callable[[int], float]:
    """Blundell et al. 2015, eq. (9): batch i of M weighs the KL by 2^(M−i) / (2^M − 1), early ones most.

    Example:
        >>> factor = blundell(3)  # times num_batches, since elbo() divides by num_data
        >>> [round(factor(step) / 3 * 7) for step in range(3)]
        [4, 2, 1]
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, not {num_batches}")

    @takes(step=WHOLE)
    def factor(step: int) -> float:
        return num_batches * 0.5 ** (step % num_batches + 1) / (1.0 - 0.5**num_batches)

    return factor


@takes(steps=WHOLE, delay=WHOLE, start=NUMBER, end=NUMBER)
def warmup(steps: int, *, delay: int = 0, start: float = 0.0, end: float = 1.0) -> Callable[[int], float]:
    """``start`` for ``delay`` steps, then a straight line to ``end`` over ``steps`` more.

    As a factor of the KL it may start at 0; a temperature must start above it.

    Example:
        >>> [warmup(4, delay=2)(step) for step in (0, 2, 4, 6, 100)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if not (0 <= start < math.inf and 0 <= end < math.inf):
        raise ValueError(f"start and end must be 0 or more, and finite, not {start} and {end}")

    @takes(step=WHOLE)
    def factor(step: int) -> float:
        return start + (end - start) * min(max((step - delay) / steps, 0.0), 1.0)

    return factor
