"""torch's mean losses: how many terms of the log-likelihood each one averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.layers.calls import LayerCall
from posterity.layers.stacks import inside, samples_axis, stacking


class Notes(NamedTuple):
    """Callbacks of a forward pass.

    Attributes:
        layer: Called with every known layer.
        loss: Called for every mean loss that requires gradients, with its name, its number of terms (NaN if
            it broadcasts both outputs and targets), its value, and its value for a uniform guess.
    """

    layer: Callable[[LayerCall], None]
    loss: Callable[[str, float, Tensor, float], None]


def of_labels(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> float | None:
    """Number of labels that are not ignored, or the sum of their weights; None if it is not a mean."""
    if reduction != "mean" or size_average is not None or reduce is not None:
        return None
    if target.is_floating_point():  # probabilities of classes, whose weights are not in the denominator
        return target.numel() / (target.shape[min(1, target.dim() - 1)] or 1)
    labels = inside(target)
    labels = labels[labels != ignore_index]
    terms = float(len(labels)) if weight is None else float(inside(weight)[labels].sum())
    return terms if samples_axis(target) is None else terms / stacking()[1]


def of_numbers(
    input: Tensor, target: Tensor, *more: Any, reduction: str = "mean", **others: Any
) -> float | None:
    """Number of entries; None if it is not a mean, NaN if it broadcasts both outputs and targets."""
    if reduction != "mean" or others.get("size_average") is not None or others.get("reduce") is not None:
        return None
    both = torch.broadcast_shapes(input.shape, target.shape)  # type: ignore[no-untyped-call]
    return math.nan if both not in (input.shape, target.shape) else float(math.prod(both))


# For each torch loss, a function from the arguments of a call to the number of terms.
TERMS: dict[Any, Callable[..., float | None]] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), of_labels),
    **dict.fromkeys((F.mse_loss, F.gaussian_nll_loss, F.poisson_nll_loss), of_numbers),
    **dict.fromkeys((F.l1_loss, F.smooth_l1_loss, F.huber_loss), of_numbers),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits), of_numbers),
}


def of_a_guess(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The loss of a net that finds all classes equally likely; infinite if that is not known.

    Example:
        >>> of_a_guess(F.cross_entropy, [torch.zeros(5, 10), torch.zeros(5, dtype=torch.long)], {})  # log 10
        2.302585092994046
    """
    weights = [*args[2:3], kwargs.get("weight"), kwargs.get("pos_weight")]
    if any(weight is not None for weight in weights):
        return math.inf
    if func in (F.cross_entropy, F.nll_loss):
        shape = (args[0] if args else kwargs["input"]).shape
        return math.log(shape[min(1, len(shape) - 1)])
    return math.log(2) if func in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits) else math.inf
