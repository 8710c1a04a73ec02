"""One net on one data set: the trainings behind tables 1 to 3 and figures 2 and 3 of the BGD paper.

A training records test errors by every way of inference, errors after pruning, and histograms of stds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posterity import Factorised
from posterity.compress import point_mass
from posterity.diagnostics import histogram
from posterity.predict import MODES
from posterity_lab.errors import mode_errors, pruning_curve
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, grid
from posterity_lab.reproduce.training import Training, fit
from posterity_lab.run_files import POSTERIOR, save_posterior

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
_NETWORKS = 10  # sampled networks in a test


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net, and test it.

    Example:
        >>> import tempfile
        >>> cell = mnist_cells(quick=True)[0]
        >>> unit = Unit("mnist", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = train(unit, "cpu", Path(folder), lambda done, total, what: None)
        >>> outcome.n, sorted(outcome.metrics["errors"])
        (360, ['average', 'mean', 'single', 'vote'])
    """
    training = fit(unit, device, cache, show, errors)
    return Outcome(found(training, cache), len(training.test))


def learned(training: Training) -> tuple[Factorised, int]:
    """The learned posterior, and the number of networks to draw: one for a single set of weights."""
    posterior = training.method.posterior()
    if posterior is None:
        return point_mass(training.model), 1
    return posterior, training.unit.config.get("networks", _NETWORKS)


def errors(training: Training) -> dict[str, float]:
    """Test error by every way of inference."""
    posterior, networks = learned(training)
    by_mode = mode_errors(training.model, posterior, training.test.x, training.test.y, samples=networks)
    return {str(mode): error for mode, error in by_mode.items()}


def found(training: Training, cache: Path) -> dict[str, Any]:
    """Metrics of a finished training, whose posterior is saved to a folder."""
    model, method, curve = training.model, training.method, training.curve
    posterior, networks = learned(training)
    save_posterior(cache / POSTERIOR, posterior)
    at = training.test.x, training.test.y
    pruning = {
        mode: asdict(pruning_curve(model, posterior, *at, FRACTIONS, samples=networks, mode=mode))
        for mode in ("single", "average")
    }
    last = {key: value for key, value in curve[-1].items() if key != "epoch"}
    pruned = pruning["single"]["errors"][FRACTIONS.index(training.unit.config.get("to_prune", 0.95))]
    return {
        "accuracy": 1.0 - last["single"],
        "pruned_accuracy": 1.0 - pruned,
        "errors": last,
        "pruning": pruning,
        "curve": curve,
        "std": None if method.posterior() is None else _spread(posterior),
    }


def _spread(posterior: Factorised) -> dict[str, Any]:
    spread = histogram(posterior.std())
    edges = [float(f"{edge:.5g}") for edge in spread.edges.tolist()]
    return {"edges": edges, "counts": {name: each.tolist() for name, each in spread.counts.items()}}


def mnist_cells(quick: bool) -> list[Cell]:
    """Tables 1 and 2: MLPs on 50,000 images of MNIST, pixels in [0, 1], batches of 128, 600 epochs.

    Example:
        >>> {cell.setting for cell in mnist_cells(quick=False)} == {"400", "800", "1200", "1200 to prune"}
        True
    """
    base = {"data": "mnist", "mean": 0.0, "std": 1.0, "batch_size": 128, "epochs": 600, "held_out": 10_000}
    widths = {"400": 0.05, "800": 0.05, "1200": 0.04}
    trial = {"tested_on": "held-out images", "epochs": 60}
    samples, passes = 10, 1800
    if quick:
        base |= {"data": "digits", "epochs": 8, "batch_size": 64, "held_out": 287}
        widths, trial["epochs"], samples, passes = {"16": 0.05, "24": 0.05}, 1, 5, 1
    base |= {"tested_on": "test"}
    # The best stds of short trials are worse in long runs.
    longer = trial if quick else {**trial, "epochs": 200}
    cells = []
    for width, std_init in widths.items():
        common = {**base, "net": f"mlp-{width}-{width}"}
        bgd = {"std_init": std_init, "lr": 1.0, "mc_samples": samples}
        bbb = {"std_init": 0.02, "lr": 1e-3}
        prior = {"prior_std": round(math.exp(-2), 4)}
        methods: dict[str, tuple[dict[str, float], list[dict[str, float]]]] = {
            "bgd": ({**bgd, "passes": passes}, _pairs(std_init, 1.0, ((1.0, 1.0), (0.75, 1.0), (0.75, 1.8)))),
            "bbb": (
                {**bbb, **prior},
                grid(prior_std=[1.0, round(math.exp(-1), 4), prior["prior_std"]], lr=[1e-3, 3e-4]),
            ),
            "sgd": ({"lr": 0.1, "momentum": 0.0}, grid(lr=[0.01, 0.03, 0.1, 0.3])),
        }
        cells += [
            Cell(width, method, {**common, **values}, own, longer if method == "bgd" else trial)
            for method, (values, own) in methods.items()
        ]
    return cells + _to_prune(width, std_init, common, samples, quick)


def _to_prune(width: str, std_init: float, common: dict[str, Any], samples: int, quick: bool) -> list[Cell]:
    """Nets of table 2, chosen only by their error after pruning, which need not have the lowest error.

    Every method has four trials, with as many epochs as its runs.
    """
    common = {**common, "to_prune": 0.95, "epochs": common["epochs"] if quick else 200}
    # Larger stds prune better, as long as those of the output layer keep the first steps stable.
    tried = _pairs(std_init, 1.0, ((2.0, 1.0), (2.5, 1.0), (3.0, 1.0), (3.0, 0.5)))
    bbb = {"std_init": 0.02, "lr": 1e-3}
    narrow = [round(math.exp(power), 6) for power in (-6, -7)]
    mixture = {"weight": 0.5, "std_wide": 1.0, "std_narrow": narrow[0]}
    methods: dict[str, tuple[dict[str, float], list[dict[str, float]]]] = {
        "bgd": ({**tried[0], "std_last": 0.01, "mc_samples": samples}, tried),
        "bbb": ({**bbb, "prior_std": 1.0}, grid(prior_std=[1.0, round(math.exp(-2), 4)], lr=[1e-3, 3e-4])),
        "bbb-mixture": ({**bbb, **mixture}, grid(weight=[0.25, 0.5], std_narrow=narrow)),
        "sgd": ({"lr": 0.1, "momentum": 0.0}, grid(lr=[0.01, 0.03, 0.1, 0.3])),
    }
    trial = {"tested_on": "held-out images"}
    return [
        Cell(f"{width} to prune", method, {**common, **values}, own, trial, "pruned_accuracy")
        for method, (values, own) in methods.items()
    ]


def _pairs(std: float, lr: float, shares: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    """Values to try for BGD, relative to a std and an η: the best one depends on the other."""
    return [{"std_init": round(std * first, 4), "lr": round(lr * second, 4)} for first, second in shares]


def cifar10_cells(quick: bool) -> list[Cell]:
    """Figures 2 and 3 and table 3: VGG11 on CIFAR-10, cropped and flipped at random, batches of 128.

    The paper's settings: BGD σ 0.015 and η 6 without BatchNorm; SGD 0.01, divided by ten every quarter,
    momentum 0.9; 400 epochs. A net to be pruned starts with larger σ, except in the output layer, and uses
    two weight samples per step instead of ten: more epochs in the same time.

    Example:
        >>> sorted({cell.config["epochs"] for cell in cifar10_cells(quick=False)})
        [100, 400]
    """
    base: dict[str, Any] = {
        "data": "cifar10",
        "mean": 0.473,
        "std": 0.251,
        "batch_size": 128,
        "epochs": 400,
        "augment": True,
    }
    settings = {"vgg11": (0.015, 6.0), "vgg11-bn": (0.011, 8.0)}
    held_out, trial_epochs, samples = 5_000, 20, 10
    if quick:
        base |= {"data": "digits", "pad": 16, "mean": 0.3, "std": 0.4, "epochs": 3}
        settings, held_out, trial_epochs, samples = {"lenet5": (0.02, 1.0)}, 287, 1, 2
    trial = {"tested_on": "held-out images", "held_out": held_out, "epochs": trial_epochs}
    cells = []
    for net, (std_init, lr) in settings.items():
        common = {**base, "net": net, "held_out": 0, "tested_on": "test"}
        bgd = {"std_init": std_init, "lr": lr, "mc_samples": samples}
        stds = [round(std_init * f, 4) for f in (0.7, 1.0, 1.4)]
        cells += [
            Cell(net, "bgd", {**common, **bgd}, grid(std_init=stds, lr=[lr / 2, lr]), trial),
            Cell(
                net,
                "sgd",
                {**common, "lr": 0.01, "momentum": 0.9, "milestones": [0.25, 0.5, 0.75]},
                grid(lr=[0.01, 0.03, 0.1]),
                trial,
            ),
        ]
    net, (std_init, lr) = next(iter(settings.items()))
    # Chosen by their error after pruning, by as many trials each.
    tried = _pairs(std_init, lr, ((1.0, 1.0), (1.4, 0.5), (1.4, 0.25), (1.7, 0.17)))
    common = {**common, "net": net, "to_prune": 0.9, "epochs": 3 if quick else 100}
    longer = trial if quick else {**trial, "epochs": 40}
    prune: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {
        "bgd": ({**tried[0], "std_last": 0.01, "mc_samples": 2}, tried),
        "sgd": (
            {"lr": 0.01, "momentum": 0.9, "milestones": [0.25, 0.5, 0.75]},
            grid(lr=[0.003, 0.01, 0.03, 0.1]),
        ),
    }
    cells += [
        Cell(f"{net} to prune", method, {**common, **values}, own, longer, "pruned_accuracy")
        for method, (values, own) in prune.items()
    ]
    return cells


_METRICS = (
    "accuracy",
    "pruned_accuracy",
    *(f"errors.{mode}" for mode in MODES),
    *(f"pruning.single.{key}" for key in ("fractions", "weights", "errors", "unpruned")),
    "curve",
    "std",
)
MNIST = Study("bgd-mnist", mnist_cells, train, _METRICS)
CIFAR10 = Study("bgd-cifar10", cifar10_cells, train, _METRICS)
