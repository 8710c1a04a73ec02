"""Pure functions of predictive probabilities.

``probs`` is ``[B, C]``, or ``[S, B, C]`` for single sampled networks, whose metrics are then averaged over S.
Metrics that torchmetrics has come from there (extra ``metrics``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from posterity.arguments import WHOLE, described, is_dense, takes


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy, in bins of equal width.

    Attributes:
        edges: Borders of the bins, ``[bins + 1]``.
        count: Predictions in each bin.
        confidence: Their mean confidence; NaN for an empty bin.
        accuracy: Their accuracy; NaN for an empty bin.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def accuracy(probs: Tensor, target: Tensor) -> float:
    """Share of inputs whose most probable class is the right one.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
        0.5
    """
    return float((_checked(probs, target).argmax(-1) == target).double().mean())


class HasLogProbs(Protocol):
    """A prediction with log-probabilities."""

    @property
    def log_probs(self) -> Tensor:
        """``[B, C]``, or ``[S, B, C]``."""
        ...


def nll(probs: Tensor | HasLogProbs, target: Tensor) -> float:
    """Mean negative log-probability of the right class, in nats.

    Args:
        probs: Probabilities, in which one that underflowed to 0 counts as the smallest number, 87 nats in
            single precision; or a prediction, whose logits are exact.
        target: Labels ``[B]``.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1])), 4)
        0.6931
        >>> from posterity import Prediction
        >>> nll(Prediction(torch.tensor([[[0.0, 200.0]]])), torch.tensor([0]))
        200.0
    """
    if isinstance(probs, Tensor):
        logs = _checked(probs, target).clamp_min(torch.finfo(probs.dtype).tiny).log()
    else:
        if not hasattr(probs, "log_probs"):
            raise TypeError(f"nll() takes probabilities or a prediction, not {described(probs)}")
        logs = probs.log_probs
        _checked(logs.exp(), target)
    return float(-logs.gather(-1, target.long().expand(logs.shape[:-1])[..., None]).mean())


def brier(probs: Tensor, target: Tensor) -> float:
    """Brier score: squared distance of the probabilities to the one-hot label, summed over classes.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
        0.5
    """
    probs = _checked(probs, target)
    hot = torch.nn.functional.one_hot(target.long(), probs.shape[-1]).to(probs.dtype)
    return float((probs - hot).square().sum(-1).mean())


@takes(bins=WHOLE)
def ece(probs: Tensor, target: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over bins of equal width.

    Example:
        >>> round(ece(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 4)
        0.2
    """
    tables = [reliability(each, target, bins) for each in _checked(probs, target)]
    gaps = [(table.count * (table.confidence - table.accuracy).abs()).nansum() for table in tables]
    return float(torch.stack(gaps).mean() / len(target))


@takes(bins=WHOLE)
def reliability(probs: Tensor, target: Tensor, bins: int = 15) -> Reliability:
    """The table behind ``ece`` and behind a reliability diagram.

    Example:
        >>> reliability(torch.tensor([[0.8, 0.2]]), torch.tensor([0]), bins=2).count
        tensor([0, 1])
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    probs = _checked(probs, target)
    confidence, label = probs.flatten(0, 1).max(-1)
    right = (label == target.repeat(len(probs))).to(confidence.dtype)
    edges = torch.linspace(0.0, 1.0, bins + 1, device=probs.device, dtype=confidence.dtype)
    index = torch.bucketize(confidence, edges[1:-1], right=True)
    count = torch.bincount(index, minlength=bins)
    return Reliability(
        edges,
        count,
        torch.bincount(index, confidence, bins) / count,
        torch.bincount(index, right, bins) / count,
    )


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well a score (entropy, mutual information) separates outside inputs from inside ones: 0.5 is
    chance.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.9]))
        1.0
    """
    return float(_functional().binary_auroc(*_scores(inside, outside)))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of inside inputs flagged when the threshold catches 95 % of the outside ones; lower is better.

    Example:
        >>> fpr95(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.9]))
        0.0
    """
    specificity, _ = _functional().binary_specificity_at_sensitivity(
        *_scores(inside, outside), min_sensitivity=0.95
    )
    return 1.0 - float(specificity)


def _checked(probs: Tensor, target: Tensor) -> Tensor:
    """``[S, B, C]``, after checking probabilities and targets."""
    for given in (probs, target):
        if not is_dense(given):
            raise TypeError(f"metrics take tensors, such as prediction.probs, not {described(given)}")
    if probs.dim() not in (2, 3) or target.dim() != 1 or probs.shape[-2] != len(target):
        raise ValueError(
            f"probs must be [B, C] or [S, B, C] with targets [B], not {tuple(probs.shape)} and "
            f"{tuple(target.shape)}"
        )
    if len(target) == 0:
        raise ValueError("a metric of no inputs is undefined: pass at least one")
    probs = probs if probs.dtype == torch.float64 else probs.float()
    if not bool(((probs.sum(-1) - 1).abs() < 1e-2).all()) or bool((probs < 0).any()):
        raise ValueError("probs must be finite, not negative and sum to 1: pass probabilities, not logits")
    if bool((target < 0).any()) or bool((target >= probs.shape[-1]).any()):
        raise ValueError(f"targets must lie in 0 … {probs.shape[-1] - 1}")
    # If one is rounded above 1, torchmetrics would take all of them for logits.
    return (probs if probs.dim() == 3 else probs[None]).clamp_max(1.0)


def _scores(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    for given in (inside, outside):
        if not is_dense(given) or given.dim() != 1:
            raise TypeError(f"scores must be tensors with one number for each input, not {described(given)}")
    scores = torch.cat([inside, outside])
    if not len(inside) or not len(outside):
        raise ValueError(
            "the scores of one of the two sets are empty: pass some of inputs inside and some of inputs "
            "outside the distribution"
        )
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("out-of-distribution scores must be finite")
    labels = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)]).int()
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, which ties large ones; ranks are safe.
    ranks = torch.unique(scores, return_inverse=True)[1].double() / len(scores)
    return ranks, labels


def _functional() -> Any:
    try:
        import torchmetrics.functional.classification as functional
    except ImportError as error:
        raise ImportError("this metric needs torchmetrics: pip install 'posterity[metrics]'") from error
    return functional
