"""MNIST by Bayes by Backprop as in its paper: the table of errors, and errors after pruning.

Blundell, Cornebise, Kavukcuoglu, Wierstra: "Weight Uncertainty in Neural Networks", ICML 2015. The paper
gives a grid but not the chosen values, nor the initial stds, nor how networks are combined in the test. The
recipe here is plain SGD on the ELBO, initial stds between 0.03 and 0.05, and averages over a hundred
networks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity import snr
from posterity_lab.reproduce import images
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, Values, grid
from posterity_lab.reproduce.training import Training, fit

SHARES = (0.0, 0.5, 0.75, 0.95, 0.98)  # of weights removed, in the paper's table of pruning
TO_PRUNE = ("to prune by SGD", "to prune by Adam")
# Bins: weights, and signal-to-noise ratios in decibels.
WEIGHTS, DECIBELS = (-0.2, 0.2), (-40.0, 30.0)
_BINS = 70
_PIXELS = round(126 / 255, 4)  # the paper divides pixels by 126


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net; test it whole and pruned, and count its weights by size and by ratio.

    Example:
        >>> import tempfile
        >>> cell = cells(quick=True)[0]
        >>> unit = Unit("bbb-mnist", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = train(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> sorted(found["errors"]), len(found["snr"])
        (['average', 'mean', 'single', 'vote'], 70)
    """
    training = fit(unit, device, cache, show, images.errors)
    found = images.found(training, cache)
    curve = found["pruning"]["average"]
    pruned = [curve["errors"][curve["fractions"].index(share)] for share in SHARES]
    chosen = {
        "averaged_accuracy": 1.0 - found["errors"]["average"],
        "kept_accuracy": 1.0 - sum(pruned) / len(pruned),
        **_histograms(training),
    }
    return Outcome({**found, **chosen}, len(training.test))


def _histograms(training: Training) -> dict[str, Any]:
    """Counts by bin of the weights of one sampled network, and of the ratios |mean| / std."""
    posterior, networks = images.learned(training)
    drawn = posterior.sample(1, seed=training.unit.seed)
    weights = torch.cat([each.flatten() for each in drawn.values()])
    if networks == 1:
        return {"weights": _counts(weights, WEIGHTS), "snr": None}
    ratios = torch.cat([each.flatten() for each in snr(posterior).values()])
    decibels = (10.0 * ratios.log10()).clamp(*DECIBELS)
    return {"weights": _counts(weights, WEIGHTS), "snr": _counts(decibels, DECIBELS)}


def _counts(values: Tensor, ends: tuple[float, float]) -> list[int]:
    """Counts by bin; values outside are left out."""
    found = torch.histc(values.detach().float(), _BINS, *ends)
    return [int(count) for count in found.tolist()]


def edges(ends: tuple[float, float]) -> list[float]:
    """Edges of the bins.

    Example:
        >>> edges((0.0, 7.0))[:2], len(edges((0.0, 7.0)))
        ([0.0, 0.1], 71)
    """
    low, high = ends
    return [low + (high - low) * number / _BINS for number in range(_BINS + 1)]


def cells(quick: bool) -> list[Cell]:
    """Nets of 400, 800 and 1200 units twice: all 60,000 images, 600 epochs, rates divided by ten after half.

    A trial trains on 50,000 images for 60 epochs and is tested on the other 10,000. The best average of a
    hundred networks is chosen. Every method has four trials at every width; each tries pixels in [0, 1] and
    divided by 126.

    Example:
        >>> sorted({cell.method for cell in cells(quick=False)})
        ['bbb', 'bbb-mixture', 'sgd', 'sgd-dropout']
        >>> {len(cell.grid) for cell in cells(quick=False)}
        {9, 4}
    """
    base: dict[str, Any] = {
        "data": "mnist",
        "mean": 0.0,
        "std": _PIXELS,
        "batch_size": 128,
        "epochs": 600,
        "milestones": [0.5],
        "mean_reach": 0.03,
        "networks": 100,
        "held_out": 0,
        "tested_on": "test",
    }
    widths, trial = ["400", "800", "1200"], {"tested_on": "held-out images", "held_out": 10_000}
    short, long = {**trial, "epochs": 60}, {**trial, "epochs": 100}
    if quick:
        base |= {"data": "digits", "batch_size": 64, "epochs": 4, "networks": 5}
        widths, short = ["24"], {**trial, "held_out": 287, "epochs": 1}
        long = short
    # On the mean loss of a batch of 128, a rate of 0.128 is the paper's 1e-3 on the sum.
    descent = {"optimizer": "sgd", "lr": 0.128, "rho": [-3.5, -3.0], "kl_factor": 1.0}
    mixture = {"weight": 0.75, "std_wide": 1.0, "std_narrow": round(math.exp(-8), 6)}
    pixels, narrower = [1.0, _PIXELS], round(math.exp(-1), 4)
    methods: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {
        "bbb-mixture": ({**descent, **mixture}, grid(std=pixels, lr=[0.064, 0.128])),
        "bbb": ({**descent, "prior_std": 1.0}, grid(std=pixels, prior_std=[1.0, narrower])),
        "sgd": ({"lr": 0.1, "momentum": 0.0}, grid(std=pixels, lr=[0.03, 0.1])),
        "sgd-dropout": ({"lr": 0.1, "momentum": 0.0}, grid(std=pixels, lr=[0.1, 0.3])),
    }
    found = []
    for width in widths:
        net = f"mlp-{width}-{width}"
        for method, (values, own) in methods.items():
            named = {"net": f"{net}-dropout" if method == "sgd-dropout" else net}
            cell = Cell(width, method, {**base, **named, **values}, own, short, "averaged_accuracy")
            found.append(cell)
    return found + _to_prune(widths[-1], {**base, "net": net, **mixture}, long)


def _to_prune(width: str, base: Values, trial: Values) -> list[Cell]:
    """The trade-off of low error and few weights: initial stds, and the factor of the KL.

    SGD keeps stds near their initial values; Adam moves them to the prior's unless the KL has a smaller
    factor. The trial with the lowest mean error over `SHARES` is chosen.
    """
    sgd = {**base, "optimizer": "sgd", "lr": 0.128, "std_init": 0.04, "kl_factor": 1.0}
    adam = {**base, "optimizer": "adam", "lr": 1e-3, "std_init": 0.02, "kl_factor": 0.1}
    grids = (
        (sgd, grid(std_init=[0.04, 0.08, 0.15], kl_factor=[0.3, 1.0, 3.0])),
        (adam, grid(std_init=[0.02, 0.05, 0.1], kl_factor=[0.03, 0.1, 0.3])),
    )
    return [
        Cell(f"{width} {name}", "bbb-mixture", config, own, trial, "kept_accuracy")
        for name, (config, own) in zip(TO_PRUNE, grids, strict=True)
    ]


BLUNDELL = Study(
    "bbb-mnist",
    cells,
    train,
    ("averaged_accuracy", "kept_accuracy", "errors.average", "pruning.average.errors", "weights", "snr"),
)
