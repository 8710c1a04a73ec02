"""The VGG-like net on CIFAR-10, made sparse: from a net trained with dropout, and by rules from the start.

Molchanov, Ashukha, Vetrov: "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017, figure 3; groups
as in `sparse_groups`. BGD and IVON do not learn sparsity: their posteriors are pruned by signal-to-noise
ratio, by weights and by outputs, and the dense net by magnitude.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from posterity import Factorised, metrics, predict, prune
from posterity_lab.baselines import Sparsifying
from posterity_lab.data import Split
from posterity_lab.reproduce import artefact, images, sparse, sparse_groups
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit
from posterity_lab.reproduce.training import Training, fit

# Shares of weights removed from posteriors that were not trained to be sparse.
FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
_DENSE = "dense"


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net, from a dense one if its method sparsifies a trained net, and prune it.

    Args:
        unit: The unit to run; ``dense_epochs`` are those of the dense net with dropout.
        device: Device of the computation.
        cache: Folder for checkpoints and posterior.
        show: Called after every epoch.

    Example:
        >>> import tempfile
        >>> cell = next(each for each in cells(quick=True) if each.method == "sparse-vd")
        >>> quick = {**cell.config, "epochs": 1, "dense_epochs": 1}
        >>> unit = Unit("sparse-vgg", cell.setting, cell.method, 0, quick, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = train(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> sorted(each["fraction"] for each in found["dense"])[:2]
        [0.0, 0.5]
    """
    start, dense = None, None
    if unit.config.get("dense_epochs"):
        trained = fit(_dense(unit), device, cache / _DENSE, show, sparse.scores)
        start, dense = list(trained.model.state_dict().values()), curves(trained)
    training = fit(unit, device, cache, show, sparse.scores, start)
    net, posterior = sparse.pruned(training)
    artefact.keep(cache, unit, net, posterior)
    learned = isinstance(training.method, Sparsifying)
    found = {
        **sparse.summary(training),
        **sparse_groups.smaller(net, posterior, training.test, unit.config["seconds"]),
        "dense": dense,
        "curves": None if learned else curves(training),
    }
    return Outcome(found, len(training.test))


def curves(training: Training) -> list[dict[str, float]]:
    """Errors of a net at its means as more is removed, by weights and by whole outputs.

    A fraction is the share of removed weights; biases and BatchNorm are spared.
    """
    posterior, _ = images.learned(training)
    flat = [name for name, mean in posterior.mean().items() if mean.dim() < 2]
    last = [name for name, mean in posterior.mean().items() if mean.dim() > 1][-1:]
    found = []
    for fraction in FRACTIONS:
        weights = prune(posterior, fraction, spare=flat)
        # The last layer's outputs are whole classes.
        outputs = prune(posterior, fraction, groups="outputs", spare=[*flat, *last])
        errors = (_error(training.model, each, training.test) for each in (weights, outputs))
        found.append({"fraction": fraction, **dict(zip(("weights", "outputs"), errors, strict=True))})
    return found


def _error(net: nn.Module, posterior: Factorised, test: Split) -> float:
    return 1.0 - metrics.accuracy(predict(net, posterior, test.x, mode="mean").probs, test.y)


def _dense(unit: Unit) -> Unit:
    """The same net with dropout and one set of weights."""
    plain = {"net": f"{unit.config['net']}-dropout", "epochs": unit.config["dense_epochs"], **_PLAIN}
    config = {key: value for key, value in unit.config.items() if key not in ("mean_std", "decay_from")}
    return Unit(unit.study, unit.setting, "adam", unit.seed, {**config, **plain}, unit.chosen, unit.trial)


_PLAIN: dict[str, Any] = {"lr": 1e-3, "weight_decay": 5e-4, "milestones": [0.5, 0.75]}


def cells(quick: bool) -> list[Cell]:
    """Four widths by sparse variational dropout; at width 1 also groups and rules.

    The paper gives the initial stds, log σ² = −15, and the rate, 1e-5, from a net trained with dropout, but
    no number of epochs. Here each of the two parts takes 200.

    Example:
        >>> sorted({cell.setting for cell in cells(quick=False)})
        ['k 0.25', 'k 0.5', 'k 1', 'k 1.5']
    """
    base: dict[str, Any] = {
        "data": "cifar10",
        "mean": 0.473,
        "std": 0.251,
        "augment": True,
        "batch_size": 100,
        "epochs": 200,
        "bfloat16": False,
        "held_out": 0,
        "tested_on": "test",
        "seconds": 0.5,
    }
    widths, main, dense, std = (
        {"k 0.25": "-0.25", "k 0.5": "-0.5", "k 1": "", "k 1.5": "-1.5"},
        "k 1",
        200,
        -7.5,
    )
    if quick:
        base |= {
            "data": "digits",
            "pad": 32,
            "epochs": 2,
            "batch_size": 240,
            "seconds": 0.01,
            "augment": False,
        }
        widths, main, dense, std = {"small": "-0.0625"}, "small", 2, -3.0
    start = {"dense_epochs": dense, "std_init": round(math.exp(std), 7), "lr": 1e-5, "kl_factor": 1.0}
    start |= {"kl_delay": 0.0, "kl_rise": 0.0, "decay_from": 0.0}
    bgd = {"std_init": 0.011, "lr": 8.0 if not quick else 1.0, "mc_samples": 2}
    ivon = {"lr": 0.1, "momentum": 0.9, "beta2": 0.99999, "prior_precision": 50.0, "hess_init": 0.5}
    found = []
    for setting, width in widths.items():
        common = {**base, "net": f"vgglike{width}"}
        found.append(Cell(setting, "sparse-vd", {**common, **start}))
        if setting == main:
            found.append(Cell(setting, "bgd", {**common, **bgd}))
            if not quick:  # as the others are
                found.append(Cell(setting, "gnj", {**common, **start}))
                found.append(
                    Cell(setting, "ivon", {**common, **ivon, "mc_samples": 1, "milestones": [0.5, 0.75]})
                )
    return found


VGG = Study(
    "sparse-vgg",
    cells,
    train,
    (
        "error",
        "compression",
        "kept",
        "sizes",
        "weights",
        "architecture",
        "by_pruning",
        "dense",
        "curves",
        "curve",
    ),
)
