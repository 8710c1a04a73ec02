"""Test errors of a posterior: by every way of inference, after pruning, and how well confidence predicts
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from posterity import Factorised, Prediction, metrics, predict, prune
from posterity.compress import sparsity
from posterity.predict import MODES, Mode


def mode_errors(
    model: nn.Module, posterior: Factorised, x: Tensor, y: Tensor, *, samples: int = 10, seed: int = 0
) -> dict[Mode, float]:
    """Test error by averaged probabilities, at the mean, of single networks (their mean), and by vote.

    The networks are drawn once, and the same for all modes.

    Args:
        model: The net.
        posterior: Of its weights.
        x: Test inputs.
        y: Their classes.
        samples: Networks to draw.
        seed: Chooses them.

    Example:
        >>> import torch
        >>> from posterity.compress import point_mass
        >>> net = nn.Linear(2, 2)
        >>> errors = mode_errors(net, point_mass(net), torch.eye(2), net(torch.eye(2)).argmax(-1))
        >>> errors == dict.fromkeys(MODES, 0.0)
        True
    """
    mean = predict(model, posterior, x, mode="mean")
    drawn = predict(model, posterior, x, samples=samples, mode="single", seed=seed)
    return {mode: 1.0 - metrics.accuracy(each.probs, y) for mode, each in _by_mode(drawn, mean).items()}


def scores(drawn: Prediction, mean: Prediction, y: Tensor) -> dict[str, dict[str, float]]:
    """Metrics by mode of inference; one network has nothing to average or to vote.

    Args:
        drawn: By many networks; by one, in mode "mean".
        mean: By the net at the means.
        y: The classes.

    Example:
        >>> import torch
        >>> one = Prediction(torch.eye(3)[None], mode="mean")
        >>> list(scores(one, one, torch.arange(3)))
        ['mean']
    """
    return {
        mode: {
            "accuracy": metrics.accuracy(prediction.probs, y),
            "nll": metrics.nll(prediction, y),
            "brier": metrics.brier(prediction.probs, y),
            "ece": metrics.ece(prediction.probs, y),
        }
        for mode, prediction in _by_mode(drawn, mean).items()
        if mode == "mean" or drawn.mode != "mean"
    }


def _by_mode(drawn: Prediction, mean: Prediction) -> dict[Mode, Prediction]:
    return {mode: mean if mode == "mean" else replace(drawn, mode=mode) for mode in MODES}


def detection(inside: Prediction, outside: Prediction) -> dict[str, dict[str, float]]:
    """How well entropy and mutual information tell what looks odd from what does not.

    Args:
        inside: Of inputs like those that were trained on.
        outside: Of others.

    Example:
        >>> import torch
        >>> sure, unsure = Prediction(9.0 * torch.eye(3)[None]), Prediction(torch.zeros(1, 3, 3))
        >>> detection(sure, unsure)["entropy"]["auroc"]
        1.0
    """
    pairs = {"entropy": (inside.entropy, outside.entropy)}
    if inside.mode != "mean":  # one network never disagrees with itself
        pairs["mutual_information"] = (inside.mutual_information, outside.mutual_information)
    return {
        name: {"auroc": metrics.auroc(*pair), "fpr95": metrics.fpr95(*pair)} for name, pair in pairs.items()
    }


def error_auroc(probs: Tensor, y: Tensor) -> float:
    """How well confidence, the largest probability, tells right predictions from wrong ones; 0.5 is chance.

    Args:
        probs: Class probabilities ``[B, C]``.
        y: The classes.

    Raises:
        ValueError: All predictions are right, or all wrong.

    Example:
        >>> import torch
        >>> error_auroc(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
        1.0
    """
    confidence, label = probs.max(-1)
    return metrics.auroc(1.0 - confidence[label == y], 1.0 - confidence[label != y])


@dataclass(frozen=True)
class PruningCurve:
    """Test error against the share of weights removed.

    Attributes:
        fractions: Shares asked for.
        weights: How many weights were left at each.
        errors: Test error at each.
        unpruned: Test error with all weights.
    """

    fractions: tuple[float, ...]
    weights: tuple[int, ...]
    errors: tuple[float, ...]
    unpruned: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Error after pruning over the error before, as tables 2 and 3 of Zeno et al. 2018 have it."""
        if self.unpruned == 0.0:
            raise ValueError(
                "the net makes no error before pruning, so there is no ratio: see .errors instead"
            )
        return tuple(error / self.unpruned for error in self.errors)


def pruning_curve(
    model: nn.Module,
    posterior: Factorised,
    x: Tensor,
    y: Tensor,
    fractions: Sequence[float],
    *,
    samples: int = 10,
    mode: Mode = "average",
    seed: int = 0,
    pruner: Callable[[Factorised, float], Factorised] = prune,
) -> PruningCurve:
    """Test error after removing each fraction of the weights, without training again.

    Args:
        model: The net.
        posterior: Of its weights; ``point_mass(model)`` for one trained by SGD or Adam, with mode "mean".
        x: Test inputs.
        y: Their classes.
        fractions: Shares to remove, each from the whole net, from 0 to less than 1.
        samples: Networks to draw.
        mode: How their outputs are combined.
        seed: Chooses them.
        pruner: How to prune, such as ``partial(prune, scope="layer", spare="*bias")``.

    Example:
        >>> import torch
        >>> from posterity.compress import point_mass
        >>> net = nn.Linear(4, 2)
        >>> data = torch.randn(6, 4), torch.randint(0, 2, (6,))
        >>> pruning_curve(net, point_mass(net), *data, [0.0, 0.5], mode="mean").weights
        (10, 5)
    """
    for fraction in fractions:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"fractions to remove must be at least 0 and less than 1, not {fraction}")
    sizes = {name: mean.numel() for name, mean in posterior.mean().items()}

    def error(q: Factorised) -> float:
        return 1.0 - metrics.accuracy(predict(model, q, x, samples=samples, mode=mode, seed=seed).probs, y)

    weights, errors = [], []
    for fraction in fractions:
        small = pruner(posterior, fraction)
        gone = sparsity(small)
        weights.append(sum(round((1.0 - gone[name]) * size) for name, size in sizes.items()))
        errors.append(error(small))
    return PruningCurve(tuple(fractions), tuple(weights), tuple(errors), error(posterior))
