"""How many networks a prediction needs, and their uncertainty for rotated digits.

Two plots of a lecture, Chirkova: "Stochastic variational inference and Bayesian neural networks". Accuracy
stops improving after few networks, while the log-likelihood still improves; and a LeNet is certain at every
angle, while sampled networks are uncertain.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from posterity import Prediction, metrics, predict
from posterity_lab.data import Split
from posterity_lab.reproduce import images
from posterity_lab.reproduce.learners import FAMILIES
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, grid
from posterity_lab.reproduce.training import Training, fit
from posterity_lab.run_files import POSTERIOR, save_posterior

COUNTS = (1, 2, 3, 5, 10, 20, 50, 100)
ANGLES = tuple(range(0, 181, 10))
_DIGIT = 3  # the class whose first test image is rotated
_TURNED = 1000  # number of rotated images, of all classes, for averages


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net; test it with increasing numbers of networks, and on rotated images.

    Example:
        >>> import tempfile
        >>> cell = cells(quick=True)[1]
        >>> unit = Unit("doubt", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = train(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> [each["networks"] for each in found["by_networks"]], len(found["digit"]) == len(ANGLES)
        ([1, 2, 3, 5, 10], True)
    """
    training = fit(unit, device, cache, show, _scores)
    posterior, networks = images.learned(training)
    save_posterior(cache / POSTERIOR, posterior)
    logits, y = _drawn(training, training.test.x, networks), training.test.y
    first = training.test.subset((y == _DIGIT).nonzero()[:1, 0])
    found = {
        **{key: training.curve[-1][key] for key in ("accuracy", "nll", "ece")},
        "log_likelihood": -training.curve[-1]["nll"],
        "curve": training.curve,
        "by_networks": [by_networks(logits, y, count) for count in COUNTS if count <= networks],
        "turned": _turned(training, training.test.subset(torch.arange(min(_TURNED, len(y)))), networks),
        "digit": _digit(training, first.x, networks),
    }
    return Outcome(found, len(y))


def by_networks(logits: Tensor, y: Tensor, count: int) -> dict[str, float]:
    """Scores of averages over a number of networks: means over all disjoint groups of that size.

    Args:
        logits: Logits of all networks, ``[S, B, C]``.
        y: The classes.
        count: Networks per group, at most S.

    Example:
        >>> logits = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]])
        >>> by_networks(logits, torch.tensor([0]), 1)["accuracy"]
        0.5
    """
    starts = range(0, len(logits) - count + 1, count)
    groups = [Prediction(logits[start : start + count]) for start in starts]
    return {
        "networks": count,
        "groups": len(groups),
        "accuracy": fmean(metrics.accuracy(group.probs, y) for group in groups),
        "nll": fmean(metrics.nll(group, y) for group in groups),
        "ece": fmean(metrics.ece(group.probs, y) for group in groups),
    }


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images rotated anticlockwise around their centre, filled with the darkest value.

    Example:
        >>> x = torch.rand(1, 1, 4, 4)
        >>> torch.allclose(rotated(x, 90.0), x.rot90(1, (2, 3)), atol=1e-5)
        True
    """
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], device=x.device, dtype=x.dtype)
    places = affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    dark = x.amin()
    return grid_sample(x - dark, places, align_corners=False) + dark


def _drawn(training: Training, x: Tensor, networks: int) -> Tensor:
    """Logits of every network."""
    posterior, _ = images.learned(training)
    found = predict(training.model, posterior, x, samples=networks).samples
    if not bool(torch.isfinite(found).all()):
        raise FloatingPointError("the predictions are not finite: lower lr")
    return found


def _scores(training: Training) -> dict[str, float]:
    _, networks = images.learned(training)
    logits = _drawn(training, training.test.x, min(networks, 10))
    found = by_networks(logits, training.test.y, len(logits))
    return {key: found[key] for key in ("accuracy", "nll", "ece")}


def _turned(training: Training, some: Split, networks: int) -> list[dict[str, float]]:
    """Averages over many images at each angle: accuracy, and measures of uncertainty."""
    found = []
    for angle in ANGLES:
        seen = Prediction(_drawn(training, rotated(some.x, angle), min(networks, 20)))
        found.append(
            {
                "angle": angle,
                "accuracy": metrics.accuracy(seen.probs, some.y),
                "nll": metrics.nll(seen, some.y),
                "entropy": float(seen.entropy.mean()),
                "confidence": float(seen.probs.amax(-1).mean()),
            }
        )
    return found


def _digit(training: Training, x: Tensor, networks: int) -> list[dict[str, list[float]]]:
    """For one image at each angle: each class's average probability, and quartiles over networks."""
    found = []
    levels = torch.tensor([0.25, 0.75], device=x.device)
    for angle in ANGLES:
        probs = Prediction(_drawn(training, rotated(x, angle), networks)).sample_probs[:, 0]
        low, high = probs.quantile(levels, 0)
        found.append({"mean": _rounded(probs.mean(0)), "low": _rounded(low), "high": _rounded(high)})
    return found


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def cells(quick: bool) -> list[Cell]:
    """LeNet-5 on MNIST, twenty epochs: plain with weight decay, and by every family of posteriors.

    The trial with the lowest NLL of ten networks on 10,000 held-out training images is chosen.

    Example:
        >>> cells(quick=False)[0].method
        'adam'
    """
    base: dict[str, Any] = {
        "data": "mnist",
        "mean": 0.1307,
        "std": 0.3081,
        "net": "lenet5",
        "bfloat16": False,
        "batch_size": 128,
        "epochs": 20,
        "milestones": [0.75],
        "networks": 100,
        "held_out": 0,
        "tested_on": "test",
    }
    name, families = "mnist", list(FAMILIES)
    trial = {"tested_on": "held-out images", "held_out": 10_000, "epochs": 10}
    if quick:
        base |= {"data": "digits", "pad": 16, "batch_size": 64, "epochs": 2, "networks": 10}
        name, families, trial = "digits", ["ffg"], {**trial, "held_out": 287, "epochs": 1}
    plain = {**base, "lr": 1e-3, "weight_decay": 1e-4}
    family = {**base, "lr": 1e-3, "std_init": 0.02, "kl_factor": 0.1}
    return [
        Cell(name, "adam", plain, grid(weight_decay=[1e-5, 1e-4, 1e-3]), trial, "log_likelihood"),
        *(
            Cell(name, method, family, grid(kl_factor=[1.0, 0.1, 0.01]), trial, "log_likelihood")
            for method in families
        ),
    ]


_METRICS = ("accuracy", "nll", "ece", "log_likelihood", "by_networks", "turned", "digit", "curve")
DOUBT = Study("uncertainty-samples", cells, train, _METRICS)
