"""Sparse variational dropout: LeNets on MNIST with most weights removed, and labels that mean nothing.

Molchanov, Ashukha, Vetrov: "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017, as in a lecture
(Chirkova: "Stochastic variational inference and Bayesian neural networks"). Errors are those of the
pruned net at its means, without further training. Compression is the number of weights over the number that
stay, without biases, which are never removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posterity import Factorised, metrics, predict
from posterity.compress import point_mass
from posterity_lab import nets
from posterity_lab.baselines import Sparsifying
from posterity_lab.data import Split
from posterity_lab.prunable import narrow
from posterity_lab.reproduce import artefact
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, Values, grid
from posterity_lab.reproduce.training import Training, fit

# The highest error on held-out images of a net that may be chosen: the paper's, by net.
LIMITS = {"mlp-300-100": 0.0192, "lenet5-caffe": 0.0075}
CHOSEN = "chosen"
# Twentieths of a training after which pictures of weights are kept.
_PICTURED = (1, 2, 3, 4, 6, 10, 20)
_PARTS = 20
_PATCH = 100
_PIXELS = round(256 / 255, 6)  # the authors divide pixels by 256


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net, prune it, and test it before and after.

    Example:
        >>> import tempfile
        >>> cell = lenet_cells(quick=True)[0]
        >>> unit = Unit("sparse-lenet", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = train(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> found["weights"], sorted(found["kept"])
        (3056, ['1.weight', '3.weight', '5.weight'])
    """
    training = fit(unit, device, cache, show, scores)
    net, posterior = pruned(training)
    artefact.keep(cache, unit, net, posterior)
    found = {
        **summary(training),
        "train_accuracy": _accuracy(net, posterior, training.train),
        "begun": picture(*_begun(unit, training)),
    }
    return Outcome(found, len(training.test))


def summary(training: Training) -> dict[str, Any]:
    """Results of the last test, remaining weights by tensor, and the score of trials."""
    _, posterior = pruned(training)
    kept = weights(posterior)
    sizes = {name: mean.numel() for name, mean in posterior.mean().items() if name in kept}
    last = {key: value for key, value in training.curve[-1].items() if isinstance(value, float)}
    removed = 1.0 - sum(kept.values()) / sum(sizes.values())
    within = last["error"] <= training.unit.config.get("limit", 1.0)
    return {
        "accuracy": 1.0 - last["error"],
        **last,
        # The share of removed weights, if the error is low enough.
        "removed_within_limit": removed if within else -last["error"],
        "weights": sum(sizes.values()),
        "sizes": sizes,
        "kept": kept,
        "curve": training.curve,
    }


def pruned(training: Training) -> tuple[nn.Module, Factorised]:
    """The net with unneeded weights at zero; a method that removes nothing leaves it whole."""
    if isinstance(training.method, Sparsifying):
        return training.method.pruned()
    return training.model, point_mass(training.model)


def weights(posterior: Factorised) -> dict[str, int]:
    """Number of remaining weights by tensor, without biases and BatchNorm.

    Example:
        >>> weights(point_mass(nn.Linear(3, 2)))
        {'weight': 6}
    """
    return {name: int(kept.sum()) for name, kept in posterior.kept().items() if kept.dim() > 1}


def scores(training: Training) -> dict[str, Any]:
    """Error, NLL, ECE and compression of the pruned net, the whole net's error, and sometimes a picture."""
    net, posterior = pruned(training)
    found = predict(net, posterior, training.test.x, mode="mean")
    if not bool(torch.isfinite(found.samples).all()):
        raise FloatingPointError("the predictions are not finite: lower lr")
    whole = training.method.whole() if isinstance(training.method, Sparsifying) else (net, posterior)
    kept, y = weights(posterior), training.test.y
    total = sum(mean.numel() for name, mean in posterior.mean().items() if name in kept)
    marks = [-(-training.unit.config["epochs"] * part // _PARTS) for part in _PICTURED]
    return {
        "error": 1.0 - metrics.accuracy(found.probs, y),
        "nll": metrics.nll(found, y),
        "ece": metrics.ece(found.probs, y),
        "whole_error": 1.0 - _accuracy(*whole, training.test),
        "compression": total / max(1, sum(kept.values())),
        **({"picture": picture(net, posterior)} if len(training.seconds) in marks else {}),
    }


def picture(net: nn.Module, posterior: Factorised) -> dict[str, Any]:
    """Pictures of weights: kernels of a convolution, weights by pixel, and a patch of a matrix.

    Example:
        >>> seen = picture(net := nn.Linear(9, 4), point_mass(net))
        >>> seen["pixels"], seen["patch"][0]
        ([4, 4, 4, 4, 4, 4, 4, 4, 4], '111111111')
    """
    means, kept = posterior.mean(), posterior.kept()
    first, *others = (name for name, mask in kept.items() if mask.dim() > 1)
    found: dict[str, Any] = {}
    if kept[first].dim() == 4:
        shown = (means[first] * kept[first])[:, 0].detach().cpu()
        found["kernels"] = [[round(value, 3) for value in kernel.flatten().tolist()] for kernel in shown]
    else:
        found["pixels"] = kept[first].sum(0).tolist()
    matrix = kept[next((name for name in others if kept[name].dim() == 2), first)]
    found["patch"] = ["".join("01"[bit] for bit in row) for row in _patch(matrix)]
    return found


def _patch(matrix: Tensor) -> list[list[int]]:
    """The middle of a matrix, at most a hundred by a hundred, ones where a weight stays."""
    rows, columns = (slice(max(0, (size - _PATCH) // 2), (size + _PATCH) // 2) for size in matrix.shape)
    shown: list[list[int]] = matrix[rows, columns].int().tolist()
    return shown


def _begun(unit: Unit, training: Training) -> tuple[nn.Module, Factorised]:
    """The net before training."""
    net = nets.build(unit.config["net"], training.train.x.shape[1:], 10)
    net = narrow(net, unit.config["mean_std"], unit.seed)
    return net, point_mass(net)


def _accuracy(net: nn.Module, posterior: Factorised, split: Split) -> float:
    return metrics.accuracy(predict(net, posterior, split.x, mode="mean").probs, split.y)


def base(quick: bool) -> dict[str, Any]:
    """Settings of all nets: the authors' data, batches and initial stds."""
    found: dict[str, Any] = {
        "data": "mnist",
        "mean": 0.0,
        "std": _PIXELS,
        "centred": True,
        "batch_size": 100,
        "epochs": 200,
        "mean_std": 0.01,
        "bfloat16": False,
        "lr": 1e-3,
        "held_out": 0,
        "tested_on": "test",
    }
    return found | ({"data": "digits", "epochs": 6, "mean_std": 0.1} if quick else {})


def nets_of(quick: bool) -> dict[str, tuple[dict[str, Any], float]]:
    """By setting: the authors' net and schedules, and the paper's compression.

    Example:
        >>> nets_of(quick=False)["300-100"][0]["kl_delay"] * 200
        5.0
    """
    variational = {"std_init": round(math.exp(-5), 6), "kl_factor": 1.0}
    if quick:
        small = {"net": "mlp-32-24", "kl_delay": 0.1, "kl_rise": 0.3, "decay_from": 0.5}
        return {"32-24": ({**small, **variational, "std_init": 0.05, "lr": 0.01}, 4.0)}
    rising = {"kl_delay": 0.025, "kl_rise": 0.075}  # both: with the full KL from the start no weight stays
    mlp = {"net": "mlp-300-100", **rising, "decay_from": 0.5}
    conv = {"net": "lenet5-caffe", **rising, "decay_from": 0.0}
    return {"300-100": ({**mlp, **variational}, 68.0), "lenet5": ({**conv, **variational}, 280.0)}


def lenet_cells(quick: bool) -> list[Cell]:
    """LeNet-300-100 and LeNet-5-Caffe: with the authors' settings, and with what trials chose.

    Nets that are ``chosen`` have trials of 60 epochs on 50,000 images, tested on the other 10,000. Among
    trials with at most the error of the paper's net, the one that removes most weights is chosen; if there is
    none, the one with the lowest error. Trials vary what trades error for weights in each method: the KL's
    factor, the share of weights that magnitude pruning keeps, the price of an open gate.

    Example:
        >>> sorted({cell.setting for cell in lenet_cells(quick=False)})
        ['300-100', '300-100 chosen', 'lenet5', 'lenet5 chosen']
    """
    trial = {"tested_on": "held-out images", "held_out": 10_000, "epochs": 60}
    if quick:
        trial |= {"held_out": 287, "epochs": 2}
    cells = []
    for setting, (own, ratio) in nets_of(quick).items():
        common = {**base(quick), **own, "limit": LIMITS.get(own["net"], 0.5)}
        methods = {
            "sparse-vd": (common, grid(kl_factor=[0.25, 0.5, 1.0, 2.0, 4.0])),
            "sparse-ard": (common, grid(kl_factor=[0.25, 0.5, 1.0, 2.0, 4.0])),
            "magnitude": (
                {**common, "keep": round(1 / ratio, 6)},
                grid(keep=[round(times / ratio, 6) for times in (0.25, 0.5, 1.0, 2.0, 4.0)]),
            ),
            "l0": ({**common, "strength": 0.1}, grid(strength=[0.025, 0.05, 0.1, 0.2, 0.4])),
        }
        cells += [Cell(setting, method, config) for method, (config, _) in methods.items()]
        cells += [
            Cell(f"{setting} {CHOSEN}", method, config, tried, trial, "removed_within_limit")
            for method, (config, tried) in methods.items()
        ]
    return cells


def label_cells(quick: bool) -> list[Cell]:
    """Random labels: MNIST by an MLP, CIFAR-10 by the VGG-like net; with dropout, and with neither.

    Example:
        >>> sorted({cell.setting for cell in label_cells(quick=False)})
        ['300-100', 'vgg-like']
    """
    cells = []
    settings: Mapping[str, Values] = {setting: own for setting, (own, _) in nets_of(quick).items()}
    settings = {name: own for name, own in settings.items() if name != "lenet5"}
    if not quick:
        vgg = {"net": "vgglike", "data": "cifar10", "kl_delay": 0.0, "kl_rise": 0.25, "decay_from": 0.5}
        settings = {**settings, "vgg-like": {**vgg, "std_init": round(math.exp(-5), 6), "kl_factor": 1.0}}
    for setting, own in settings.items():
        common = {**base(quick), **own, "labels": "random"}
        cells += [
            Cell(setting, "sparse-vd", common),
            Cell(setting, "mc-dropout", {**common, "net": f"{own['net']}-dropout"}),
            Cell(setting, "adam", common),
        ]
    return cells


_METRICS = (
    "accuracy",
    "error",
    "nll",
    "ece",
    "whole_error",
    "compression",
    "kept",
    "sizes",
    "weights",
    "curve",
)
LENET = Study("sparse-lenet", lenet_cells, train, _METRICS)
LABELS = Study("sparse-random-labels", label_cells, train, (*_METRICS, "train_accuracy"))
