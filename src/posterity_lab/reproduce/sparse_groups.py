"""Whole units removed by group priors and by L0 gates, and the cost of a net without them.

Louizos, Ullrich, Welling: "Bayesian Compression for Deep Learning", NIPS 2017, as in a lecture (Chirkova:
"Stochastic variational inference and Bayesian neural networks"). Unneeded units are really removed, so a net
is counted, tested and timed as it would be used. Compression by pruning is the number of all weights over
those in the smaller net; compression by bits is 32 bits for each of all weights over the rounded bits of the
remaining ones. The error after rounding is measured after rounding.

The authors choose a threshold for every layer by eye. Here training images choose it: the lowest of a few log
α for which the error on these images rises only little; one for all layers, or one for each layer in the
settings with the authors' bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posterity import Factorised, metrics, predict, prune
from posterity.compress import measure, quantise, shrink
from posterity_lab.data import Split
from posterity_lab.reproduce import artefact, sparse
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit
from posterity_lab.reproduce.training import fit

BOUNDED = "bounded"


def train(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train a unit's net, prune it, and remove the pruned units.

    Example:
        >>> import tempfile
        >>> cell = cells(quick=True)[0]
        >>> unit = Unit("sparse-groups", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = train(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> len(found["architecture"])
        3
    """
    training = fit(unit, device, cache, show, sparse.scores)
    net, posterior = sparse.pruned(training)
    learned = training.method.posterior()
    cut: float | dict[str, float] | None = None
    if learned is not None:
        choose = by_layer if unit.config.get("by_layer") else in_one
        cut, posterior = choose(net, learned, training.train, unit.config["cuts"], unit.config["rise"])
    artefact.keep(cache, unit, net, posterior)
    found = {**sparse.summary(training), **smaller(net, posterior, training.test, unit.config["seconds"])}
    return Outcome({**found, "log_alpha": cut}, len(training.test))


def in_one(
    net: nn.Module, posterior: Factorised, train: Split, cuts: Sequence[float], rise: float
) -> tuple[float, Factorised]:
    """The lowest log α that raises the error on training images by at most ``rise``; otherwise the highest.

    Example:
        >>> import torch
        >>> from posterity import DiagonalGaussian
        >>> net = nn.Linear(2, 2, bias=False)
        >>> q = Factorised({"weight": DiagonalGaussian(10.0 * torch.eye(2), 1.0)})
        >>> train = Split(torch.eye(2), torch.arange(2))
        >>> in_one(net, q, train, [3.0, 0.0, -3.0, -9.0], rise=0.1)[0]  # at -9 nothing would be left
        -3.0
    """
    names = [name for name, mean in posterior.mean().items() if mean.dim() > 1]
    return _lowest(net, posterior, names, train, cuts, _error(net, posterior, train) + rise)


def by_layer(
    net: nn.Module, posterior: Factorised, train: Split, cuts: Sequence[float], rise: float
) -> tuple[dict[str, float], Factorised]:
    """The same for each matrix or convolution in turn, from the last one, each with its share of ``rise``.

    Example:
        >>> import torch
        >>> from posterity import DiagonalGaussian
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> sizes = {"0.weight": 10.0, "1.weight": 1e3}
        >>> q = Factorised({name: DiagonalGaussian(s * torch.eye(2), 1.0) for name, s in sizes.items()})
        >>> by_layer(net, q, Split(torch.eye(2), torch.arange(2)), [0.0, -3.0, -9.0], rise=0.1)[0]
        {'1.weight': -9.0, '0.weight': -3.0}
    """
    allowed = _error(net, posterior, train)
    names = [name for name, mean in posterior.mean().items() if mean.dim() > 1]
    found = {}
    for name in reversed(names):
        allowed += rise / len(names)
        found[name], posterior = _lowest(net, posterior, [name], train, cuts, allowed)
    return found, posterior


def _lowest(
    net: nn.Module,
    posterior: Factorised,
    names: Sequence[str],
    train: Split,
    cuts: Sequence[float],
    allowed: float,
) -> tuple[float, Factorised]:
    """The lowest threshold of some tensors with an allowed error; otherwise the highest."""
    spared = [name for name in posterior.mean() if name not in names]
    for cut in sorted(cuts):
        found = prune(posterior, log_alpha=cut, spare=spared)
        if _error(net, found, train) <= allowed:
            return cut, found
    return cut, found


def smaller(net: nn.Module, posterior: Factorised, test: Split, seconds: float) -> dict[str, Any]:
    """The net without dead units: its layers, weights, bits, errors, and times next to the whole net's.

    Args:
        net: A plain net.
        posterior: The pruned posterior of its weights.
        test: Test data.
        seconds: How long to time a batch.

    Example:
        >>> import torch
        >>> from posterity_lab.baselines.sparse import without_zeros
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> _ = net[2].weight.data[:, 0].zero_()
        >>> test = Split(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
        >>> found = smaller(net, without_zeros(net), test, 0.01)
        >>> found["architecture"], found["by_pruning"]
        ([4, 2], 1.5)
    """
    sizes = {name: kept.numel() for name, kept in posterior.kept().items() if kept.dim() > 1}
    total = sum(sizes.values())
    try:
        small = shrink(net, posterior, test.x[:2])
    except ValueError as error:  # a layer would be empty
        nothing = ("error_small", "by_pruning", "bits", "by_bits", "error_rounded", "before", "after")
        return {**dict.fromkeys(nothing), "architecture": [], "refused": str(error)}
    kept = sparse.weights(small.posterior)
    return {
        "architecture": architecture(small.posterior),
        "error_small": _error(small.module, small.posterior, test),
        "by_pruning": total / max(1, sum(kept.values())),
        **_rounded(small.module, small.posterior, test, total),
        "before": asdict(measure(net, test.x[:128], seconds=seconds)),
        "after": asdict(measure(small.module, test.x[:128], seconds=seconds)),
        "refused": None,
    }


def architecture(posterior: Factorised) -> list[int]:
    """Numbers of used output maps of every convolution, and of used inputs of every linear layer.

    The paper writes LeNet-5 like this: 20-50-800-500 whole, 8-13-88-13 with GNJ.

    Example:
        >>> from posterity.compress import point_mass
        >>> architecture(point_mass(nn.Sequential(nn.Conv2d(1, 20, 5), nn.Linear(800, 500))))
        [20, 800]
    """
    masks: list[Tensor] = [kept for kept in posterior.kept().values() if kept.dim() > 1]
    return [int((mask.flatten(1).any(1) if mask.dim() > 2 else mask.any(0)).sum()) for mask in masks]


def _rounded(net: nn.Module, posterior: Factorised, test: Split, total: int) -> dict[str, Any]:
    """Bits of every tensor of weights, the compression with them, and the error after rounding."""
    leaves = {name: posterior.block(name) for name, kept in posterior.kept().items() if kept.dim() > 1}
    if not all(bool((leaf.std()[leaf.kept] > 0).all()) for leaf in leaves.values()):
        return {"bits": None, "by_bits": None, "error_rounded": None}  # without stds there is no step
    found = quantise(Factorised(leaves))
    used = sum(bits * int(found.posterior.kept()[name].sum()) for name, bits in found.bits.items())
    return {
        "bits": found.bits,
        "by_bits": 32 * total / max(1, used),
        "error_rounded": _error(net, found.posterior, test),
    }


def _error(net: nn.Module, posterior: Factorised, test: Split) -> float:
    return 1.0 - metrics.accuracy(predict(net, posterior, test.x, mode="mean").probs, test.y)


def cells(quick: bool) -> list[Cell]:
    """Both LeNets by every way of removing units, and by the removal of single weights for comparison.

    In the ``bounded`` settings groups are trained as by their authors: stds of the first layer have an upper
    bound, pixels are in [-1, 1], and the KL rises over half of the training.

    Example:
        >>> sorted({cell.setting for cell in cells(quick=False)})
        ['300-100', '300-100 bounded', 'lenet5', 'lenet5 bounded']
    """
    found = []
    for setting, (own, _) in sparse.nets_of(quick).items():
        common = {**sparse.base(quick), **own, "seconds": 0.01 if quick else 0.5}
        chosen = {"cuts": [float(cut) for cut in range(-5, 4)], "rise": 0.001}
        # Of the weights given their scales, and of the scales: log σ² = −9.
        scaled = {**common, **chosen, "std_init": 0.011109}
        if setting != "lenet5":
            found += [Cell(setting, method, scaled) for method in ("gnj", "ghs")]
        first, highest = ("0.weight", 0.5) if setting == "lenet5" else ("1.weight", 0.2)
        authors: dict[str, Any] = {"mean": 0.5, "std": 0.5, "centred": False, "kl_delay": 0.0, "kl_rise": 0.5}
        authors |= {"max_stds": {first: highest}, "by_layer": True}
        bounded = {key: value for key, value in {**scaled, **authors}.items() if key != "mean_std"}
        found += [Cell(f"{setting} {BOUNDED}", method, bounded) for method in ("gnj", "ghs")]
        found += [
            Cell(setting, "l0", {**common, "strength": 0.1}),
            Cell(setting, "sparse-vd", {**common, **chosen}),
        ]
    return found


GROUPS = Study(
    "sparse-groups",
    cells,
    train,
    (
        "error",
        "compression",
        "architecture",
        "by_pruning",
        "by_bits",
        "error_rounded",
        "before",
        "after",
        "curve",
    ),
)
