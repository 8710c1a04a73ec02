"""Tasks in a row: figures 1 and 4 of the BGD paper, and permuted MNIST by VOGN.

A killed run goes on after the last whole task.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity_lab import continual, data, nets
from posterity_lab.reproduce.learners import Autocast, learner
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, Values, grid
from posterity_lab.reproduce.training import prepared
from posterity_lab.streams import Tasks, cifar, held_out, normalised, own_head, permuted, split, stream

_Methods = dict[str, tuple[dict[str, Any], list[dict[str, float]]]]
_HORIZON = 10  # tasks, by what trials of fewer are judged


def learn(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Learn the unit's stream, and test on every task whenever one is over.

    Args:
        unit: What to do.
        device: Where.
        cache: Folder for the checkpoint.
        show: Is told when the stream is over; on the way `continual.run` has a bar of its own.

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
    tasks = _tasks(config, unit.seed, device)
    shape = tasks.items[0].train.x.shape[1:]
    model = nets.initialise(nets.build(config["net"], shape, tasks.classes), unit.seed)
    model = (model if config["net"].startswith("mlp") else Autocast(model)).to(device)
    mask = None if tasks.heads is None else partial(own_head, heads=tasks.heads)
    num_data = len(tasks.items[0].train)
    method = learner(unit.method, config, model, num_data=num_data, seed=unit.seed, mask=mask)
    sizes = {key: config[key] for key in ("epochs", "batch_size", "overlap")}
    torch.manual_seed(unit.seed)  # of dropout
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
        "lasting_accuracy": lasting(scores.accuracy),
        "matrix": [[round(value, 5) for value in row] for row in scores.accuracy.tolist()],
        "summary": summary,
    }
    return Outcome(metrics, sum(len(task.test) for task in tasks.items))


def lasting(accuracy: Tensor) -> float:
    """The average accuracy to expect after ten tasks, from what the tasks so far have lost to later ones.

    By its average alone, three tasks would choose what learns fastest, whatever it forgets. Weights drift
    away from where a task left them, further with every later one, and near a minimum the loss grows with
    the square of the way: a task is taken to lose c·n² to n later tasks.

    Args:
        accuracy: Rows for ends of tasks, columns for tasks.

    Example:
        >>> lasting(torch.tensor([[0.96, 0.1, 0.1], [0.958, 0.96, 0.1], [0.952, 0.958, 0.96]]))
        0.903
    """
    learned = accuracy.diag()
    later = torch.arange(len(accuracy) - 1, -1, -1)  # tasks that came after each
    drift = (learned - accuracy[-1]).sum() / later.square().sum()
    ahead = torch.arange(_HORIZON, dtype=accuracy.dtype).square().mean()
    return round(float(learned.mean() - drift * ahead), 5)


def _tasks(config: Values, seed: int, device: str) -> Tasks:
    """The tasks of a stream; in a trial, the first few of them, tested on held-out images."""
    if config["stream"] == "permuted":
        tasks = permuted(prepared(config, device), config["tasks"], seed)
    elif config["stream"] == "split":
        tasks = split(prepared(config, device), config["tasks"], "task")
    else:
        both = [
            normalised(data.load(name, device=device), config["mean"], config["std"])
            for name in ("cifar10", "cifar100")
        ]
        tasks = cifar(both[0], both[1], groups=config["tasks"] - 1)
    return held_out(tasks, config["held_out"], seed=0) if config["held_out"] else tasks


def _baselines() -> _Methods:
    """What BGD is compared with; the last three are told of boundaries."""
    return {
        "sgd": ({"lr": 0.01, "momentum": 0.0}, grid(lr=[0.003, 0.01, 0.03, 0.1])),
        "adam": ({"lr": 1e-4}, grid(lr=[3e-5, 1e-4, 3e-4, 1e-3])),
        "si": ({"lr": 1e-3, "strength": 0.3}, grid(lr=[3e-4, 1e-3], strength=[0.1, 0.3, 1.0, 3.0])),
        "ewc": ({"lr": 1e-3, "strength": 100.0}, grid(lr=[3e-4, 1e-3], strength=[10.0, 100.0, 1000.0])),
        "vcl": (
            {"lr": 1e-3, "std_init": 0.02, "kl_factor": 1.0},
            grid(std_init=[0.02, 0.05], kl_factor=[0.1, 1.0]),
        ),
    }


def permuted_cells(quick: bool) -> list[Cell]:
    """Figure 1: ten tasks of permuted MNIST, one head, ten epochs a task, and the same with tasks that fade.

    Images are padded to 32x32 and scaled as in the authors' code, which decides how much BGD retains. So do
    large stds, from which it diverges within ten steps unless those of the output layer are small. Trials are
    the first three tasks of other permutations, a tenth of their training images held out, judged by
    :func:`lasting`.

    Example:
        >>> sorted({cell.method for cell in permuted_cells(quick=False) if "fading" in cell.setting})
        ['adam', 'bgd', 'sgd']
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
    widths, samples = (
        {"200": [0.07, 0.09], "400": [0.06, 0.08], "1000": [0.05, 0.07], "2000": [0.03, 0.05]},
        10,
    )
    trial: dict[str, float] = {"tasks": 3, "held_out": 0.1}
    if quick:
        base |= {"data": "digits", "pad": 0, "mean": 0.3, "std": 0.4, "tasks": 3, "epochs": 2}
        base["batch_size"] = 64
        widths, samples = {"24": [0.03]}, 5
        trial |= {"tasks": 2, "epochs": 1}
    cells = []
    for width, stds in widths.items():
        common = {**base, "net": f"mlp-{width}-{width}"}
        bgd = {"std_init": stds[0], "std_last": 0.01, "lr": 0.2, "mc_samples": samples, "mode": "mean"}
        methods = {"bgd": (bgd, grid(std_init=stds, lr=[0.2, 0.3, 0.5])), **_baselines()}
        for method, (values, own) in methods.items():
            # The others' trials are those of one width.
            at = width if method == "bgd" or quick else "400"
            cells.append(Cell(width, method, {**common, **values}, own, trial, "lasting_accuracy", at))
            if method in ("bgd", "sgd", "adam"):  # without boundaries there is none to be told of
                fading = {**common, **values, "overlap": 0.25}
                cells.append(Cell(f"{width} fading", method, fading, own, trial, "lasting_accuracy", at))
    # The paper's method at all widths first: a run that is cut short has what matters.
    return sorted(cells, key=lambda cell: (cell.method != "bgd", "fading" in cell.setting))


def small_permuted_cells(quick: bool) -> list[Cell]:
    """Ten tasks of permuted MNIST by nets of 2x100: VOGN told of boundaries, VOGN and BGD that are not.

    Images are unpadded, and scaled to mean 0 and std 1, with which more is kept than with pixels in [0, 1].

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
    setting, samples = "100", 10
    trial: dict[str, float] = {"tasks": 3, "held_out": 0.1}
    if quick:
        base |= {"data": "digits", "tasks": 2, "epochs": 2, "batch_size": 64}
        setting, samples = "24", 3
        trial |= {"epochs": 1}
    # One batch's curvature, as the table on CIFAR-10 has it, would be noise to hand on.
    vogn = {"momentum": 0.9, "beta2": 0.99, "damping": 1e-3, "prior_precision": 1.0, "mc_samples": samples}
    # Half as long as the others: what is handed on fills so small a net, and every step drives it away.
    told = {**vogn, "lr": 3e-4, "prior_precision": 10.0, "strength": 3.0, "mc_samples": min(samples, 4)}
    told |= {"epochs": base["epochs"] // 2}
    methods: _Methods = {
        "vogn-told": (told, grid(strength=[3.0, 10.0])),
        "vogn": (
            {**vogn, "lr": 1e-4, "augmentation": 1.0},
            grid(lr=[3e-5, 1e-4, 3e-4], beta2=[0.99, 0.9999]),
        ),
        "bgd": (
            {"std_init": 0.1, "std_last": 0.01, "lr": 0.2, "mc_samples": samples, "mode": "mean"},
            grid(std_init=[0.08, 0.1, 0.12], lr=[0.2, 0.3]),
        ),
    }
    common = {**base, "net": f"mlp-{setting}-{setting}"}
    trials = dict.fromkeys(methods, trial)
    trials["vogn-told"] = {**trial, "tasks": base["tasks"]}  # three do not show how the net fills up
    return [
        Cell(setting, method, {**common, **values}, own, trials[method], "lasting_accuracy")
        for method, (values, own) in methods.items()
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
    "lasting_accuracy",
    "matrix",
    *(f"summary.{key}" for key in ("average_accuracy", "forgetting", "forward_transfer", "nll", "ece")),
)
PERMUTED = Study("bgd-permuted", permuted_cells, learn, _METRICS)
SMALL_PERMUTED = Study("vogn-permuted", small_permuted_cells, learn, _METRICS)
SEQUENCE = Study("bgd-sequence", sequence_cells, learn, _METRICS)
