"""Sequences of tasks: figures 1 and 4 of the BGD paper, and permuted MNIST by VOGN.

An interrupted run resumes after its last whole task.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from posterity_lab import continual, nets
from posterity_lab.reproduce.learners import Autocast, learner
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, grid
from posterity_lab.reproduce.training import loaded, prepared
from posterity_lab.streams import Tasks, cifar, held_out, normalised, own_head, permuted, split, stream

_Methods = dict[str, tuple[dict[str, Any], list[dict[str, float]]]]


def learn(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Learn the unit's stream, and test on all tasks after each one.

    Example:
        >>> import tempfile
        >>> cell = permuted_cells(quick=True)[0]
        >>> unit = Unit("permuted", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = learn(unit, "cpu", Path(folder), lambda done, total, what: None)
        >>> len(outcome.metrics["matrix"]) == cell.config["tasks"]
        True
    """
    config = unit.config
    tasks = _tasks(unit, device)
    shape = tasks.items[0].train.x.shape[1:]
    model = nets.initialise(nets.build(config["net"], shape, tasks.classes), unit.seed)
    model = (model if config["net"].startswith("mlp") else Autocast(model)).to(device)
    mask = None if tasks.heads is None else partial(own_head, heads=tasks.heads)
    num_data = len(tasks.items[0].train)
    method = learner(unit.method, config, model, num_data=num_data, seed=unit.seed, mask=mask)
    sizes = {key: config[key] for key in ("epochs", "batch_size", "overlap")}
    torch.manual_seed(unit.seed)  # for dropout
    scores = continual.run(
        method,
        stream(tasks, seed=unit.seed, **sizes),
        mode=config["mode"],
        seed=unit.seed,
        folder=cache,
        resume=True,
    )
    summary = scores.summary()
    show(1, 1, f"stream, average accuracy {summary['average_accuracy']:.2%}")
    metrics = {
        "accuracy": summary["average_accuracy"],
        "matrix": [[round(value, 5) for value in row] for row in scores.accuracy.tolist()],
        "summary": summary,
    }
    return Outcome(metrics, sum(len(task.test) for task in tasks.items))


def _tasks(unit: Unit, device: str) -> Tasks:
    """The tasks of a stream; in a trial, the first few of them, tested on held-out images."""
    config = unit.config
    if config["stream"] == "permuted":
        tasks = permuted(prepared(unit, device), config["tasks"], unit.seed)
    elif config["stream"] == "split":
        tasks = split(prepared(unit, device), config["tasks"], "task")
    else:
        both = [
            normalised(loaded(unit, name, device), config["mean"], config["std"])
            for name in ("cifar10", "cifar100")
        ]
        tasks = cifar(both[0], both[1], groups=config["tasks"] - 1)
    return held_out(tasks, config["held_out"], seed=0) if config["held_out"] else tasks


def _bgd(quick: bool) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """BGD: stds relative to the root of the fan-in, and η; the output layer has its own initial std."""
    small, std, large = (0.2, 0.3, 0.4) if quick else (1.4, 2.0, 2.9)
    given = {"std_scale": std, "std_last": 0.01, "lr": 0.2, "mode": "mean", "mc_samples": 3 if quick else 10}
    return given, [*grid(std_scale=[small, std, large], lr=[0.2]), {"std_scale": std, "lr": 0.1}]


def _baselines() -> _Methods:
    """Baselines, each with as many trials as BGD; the last three know task boundaries."""
    return {
        "bong": (
            {"lr": 1.0, "consolidate_after": 1000.0, "mode": "mean"},
            grid(lr=[0.3, 1.0], consolidate_after=[1000.0, 4000.0]),
        ),
        "sgd": ({"lr": 0.01, "momentum": 0.0}, grid(lr=[0.003, 0.01, 0.03, 0.1])),
        "adam": ({"lr": 1e-4}, grid(lr=[1e-5, 3e-5, 1e-4, 3e-4])),
        "si": ({"lr": 1e-3, "strength": 0.3}, grid(lr=[1e-3], strength=[0.1, 0.3, 1.0, 3.0])),
        "ewc": ({"lr": 1e-3, "strength": 100.0}, grid(lr=[3e-4, 1e-3], strength=[30.0, 100.0])),
        "vcl": (
            {"lr": 1e-3, "std_init": 0.02, "kl_factor": 1.0},
            grid(std_init=[0.02, 0.05], kl_factor=[0.1, 1.0]),
        ),
    }


def permuted_cells(quick: bool) -> list[Cell]:
    """Figure 1: ten tasks of permuted MNIST, one head, ten epochs a task; also with gradual transitions.

    Images are padded to 32x32 and scaled as in the authors' code, which strongly affects how much BGD
    remembers. So do large stds, with which it diverges within ten steps unless those of the output layer are
    small. A trial is a whole run on other permutations, tested on a held-out tenth of the training images;
    the best average accuracy at its end is chosen. Every method has four trials at every width.

    Example:
        >>> sorted({cell.method for cell in permuted_cells(quick=False) if "fading" in cell.setting})
        ['adam', 'bgd', 'bong', 'sgd']
        >>> {len(cell.grid) for cell in permuted_cells(quick=False)}
        {4}
    """
    base: dict[str, Any] = {
        "stream": "permuted",
        "data": "mnist",
        "pad": 32,
        "mean": 0.1,
        "std": 0.2752,
        "tasks": 10,
        "epochs": 10,
        "batch_size": 128,
        "overlap": 0.0,
        "held_out": 0.0,
        "mode": "average",
    }
    widths, trial = ["200", "400", "1000", "2000"], {"held_out": 0.1}
    if quick:
        base |= {"data": "digits", "pad": 0, "mean": 0.3, "std": 0.4, "tasks": 3, "epochs": 2}
        base["batch_size"] = 64
        widths, trial = ["24"], {**trial, "tasks": 2, "epochs": 1}
    cells = []
    for width in widths:
        common = {**base, "net": f"mlp-{width}-{width}"}
        methods = {"bgd": _bgd(quick), **_baselines()}
        for method, (values, own) in methods.items():
            cells.append(Cell(width, method, {**common, **values}, own, trial))
            if method in ("bgd", "bong", "sgd", "adam"):  # those that need no boundaries
                fading = {**common, **values, "overlap": 0.25}
                cells.append(Cell(f"{width} fading", method, fading, own, trial, tuned_as=width))
    # The paper's method at all widths first, in case the run is interrupted.
    return sorted(cells, key=lambda cell: (cell.method != "bgd", "fading" in cell.setting))


def small_permuted_cells(quick: bool) -> list[Cell]:
    """Ten tasks of permuted MNIST by nets of 2x100: VOGN with boundaries, VOGN and BGD without.

    Images are unpadded, and scaled to mean 0 and std 1, with which methods remember more than with pixels in
    [0, 1]. Trials are those of `permuted_cells`.

    Example:
        >>> [cell.method for cell in small_permuted_cells(quick=False)]
        ['vogn-told', 'vogn', 'bgd']
    """
    base: dict[str, Any] = {
        "stream": "permuted",
        "data": "mnist",
        "pad": 0,
        "mean": 0.1307,
        "std": 0.3081,
        "tasks": 10,
        "epochs": 10,
        "batch_size": 128,
        "overlap": 0.0,
        "held_out": 0.0,
        "mode": "average",
    }
    setting, samples, trial = "100", 10, {"held_out": 0.1}
    if quick:
        base |= {"data": "digits", "tasks": 2, "epochs": 2, "batch_size": 64}
        setting, samples = "24", 3
    # The curvature of one batch, as in the table on CIFAR-10, would be too noisy to hand over.
    vogn = {"momentum": 0.9, "beta2": 0.99, "damping": 1e-3, "prior_precision": 1.0, "mc_samples": samples}
    told = {**vogn, "lr": 3e-4, "prior_precision": 10.0, "strength": 3.0, "mc_samples": min(samples, 4)}
    epochs = base["epochs"]
    methods: _Methods = {
        # Handed-over precision soon fills so small a net, more so with every step: half as many are tried
        # too.
        "vogn-told": (told, grid(strength=[3.0, 10.0], epochs=[epochs // 2, epochs])),
        "vogn": ({**vogn, "lr": 1e-4, "augmentation": 1.0}, grid(lr=[3e-5, 1e-4], beta2=[0.99, 0.9999])),
        "bgd": _bgd(quick),
    }
    common = {**base, "net": f"mlp-{setting}-{setting}"}
    return [
        Cell(setting, method, {**common, **values}, own, trial) for method, (values, own) in methods.items()
    ]


def sequence_cells(quick: bool) -> list[Cell]:
    """Figure 4: CIFAR-10, then five times ten classes of CIFAR-100, a head each, 150 epochs a task.

    Example:
        >>> [cell.method for cell in sequence_cells(quick=False)]
        ['bgd', 'sgd', 'si']
    """
    base: dict[str, Any] = {
        "stream": "cifar",
        "data": "cifar10 and cifar100",
        "net": "conv4",
        "mean": 0.473,
        "std": 0.251,
        "tasks": 6,
        "epochs": 150,
        "batch_size": 256,
        "overlap": 0.0,
        "held_out": 0.0,
        "mode": "vote",
    }
    trial, samples = {"tasks": 3, "epochs": 20, "held_out": 0.1}, 10
    if quick:
        base |= {"stream": "split", "data": "digits", "mean": 0.3, "std": 0.4, "tasks": 2, "epochs": 2}
        trial, samples = {"tasks": 2, "epochs": 1, "held_out": 0.2}, 2
    methods: _Methods = {
        "bgd": (
            {"std_init": 0.019, "lr": 2.0, "mc_samples": samples},
            grid(std_init=[0.013, 0.019, 0.027], lr=[1.0, 2.0]),
        ),
        "sgd": ({"lr": 0.01, "momentum": 0.0}, grid(lr=[0.003, 0.01, 0.03])),
        "si": ({"lr": 1e-3, "strength": 0.01}, grid(lr=[3e-4, 1e-3], strength=[0.01, 0.1])),
    }
    return [
        Cell("sequence", method, {**base, **values}, own, trial) for method, (values, own) in methods.items()
    ]


_METRICS = (
    "accuracy",
    "matrix",
    *(f"summary.{key}" for key in ("average_accuracy", "forgetting", "forward_transfer", "nll", "ece")),
)
PERMUTED = Study("bgd-permuted", permuted_cells, learn, _METRICS)
SMALL_PERMUTED = Study("vogn-permuted", small_permuted_cells, learn, _METRICS)
SEQUENCE = Study("bgd-sequence", sequence_cells, learn, _METRICS)
