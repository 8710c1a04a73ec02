"""Two classes in the plane: decision boundaries and uncertainty of Adam and VOGN.

Grids of probabilities are kept as rows of two-digit numbers, in per cent, so that a record stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from posterity import metrics, predict
from posterity.compress import point_mass
from posterity_lab import data, nets
from posterity_lab.data import Split
from posterity_lab.reproduce.learners import learner
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit
from posterity_lab.reproduce.training import temper

_SIDE = 41  # points along each side of a grid
_DRAWN = 10  # sampled networks whose boundaries are drawn


def draw(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train on the unit's points, and evaluate the plane around them.

    Args:
        unit: The unit to run.
        device: Device of the computation.
        cache: Not used, since a run takes seconds.
        show: Called at the end.

    Example:
        >>> cell = cells(quick=True)[0]
        >>> unit = Unit("toy", cell.setting, cell.method, 0, cell.config, "")
        >>> found = draw(unit, "cpu", Path(), lambda done, total, what: None).metrics
        >>> unpacked(found["average"]).shape, len(found["samples"])
        (torch.Size([41, 41]), 1)
    """
    config = unit.config
    points = made(config["points"]).to(device)
    model = nets.initialise(nets.build(config["net"], [2], 2), unit.seed).to(device)
    method = learner(unit.method, config, model, num_data=len(points), seed=unit.seed)
    number, steps = 0, -(-len(points) // config["batch_size"]) * config["epochs"]
    for epoch in range(config["epochs"]):
        for x, y in data.batches(points, config["batch_size"], seed=unit.seed, epoch=epoch):
            temper(method, config, number, steps)
            method.step(x, y)
            number += 1
    posterior = method.posterior()
    networks = 1 if posterior is None else config["networks"]
    posterior = point_mass(model) if posterior is None else posterior
    low, high = bounds(points.x)
    plane = torch.cartesian_prod(
        *(torch.linspace(float(a), float(b), _SIDE) for a, b in zip(low, high, strict=True))
    )
    at_mean = predict(model, posterior, plane.to(device), mode="mean").probs[:, 1]
    drawn = predict(model, posterior, plane.to(device), samples=networks, mode="single").sample_probs[..., 1]
    found = predict(model, posterior, points.x, samples=networks).probs
    show(1, 1, "toy")
    grids = {
        "mean": packed(at_mean.view(_SIDE, _SIDE)),
        "average": packed(drawn.mean(0).view(_SIDE, _SIDE)),
        "samples": [packed(each.view(_SIDE, _SIDE)) for each in drawn[:_DRAWN]],
    }
    scores = {"accuracy": metrics.accuracy(found, points.y), "nll": metrics.nll(found, points.y)}
    return Outcome({**scores, **grids}, len(points))


def made(count: int) -> Split:
    """Points of two interleaved half circles, the same for all seeds.

    Example:
        >>> made(10).x.shape
        torch.Size([10, 2])
    """
    from sklearn.datasets import make_moons

    x, y = make_moons(count, noise=0.15, random_state=0)
    return Split(torch.tensor(x, dtype=torch.float32), torch.tensor(y))


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest corner of the evaluated part of the plane.

    Example:
        >>> bounds(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
        (tensor([-1.5000, -0.5000]), tensor([3.5000, 2.5000]))
    """
    return x.min(0).values - 1.5, x.max(0).values + 1.5


def packed(probs: Tensor) -> list[str]:
    """A grid of probabilities as rows of two-digit numbers.

    Example:
        >>> packed(torch.tensor([[0.0, 0.5, 1.0]]))
        ['005099']
    """
    return ["".join(f"{value:02d}" for value in row) for row in (99 * probs).round().int().tolist()]


def unpacked(rows: Sequence[str]) -> Tensor:
    """The inverse of `packed`.

    Example:
        >>> unpacked(["0099"])
        tensor([[0., 1.]])
    """
    return torch.tensor([[int(row[at : at + 2]) / 99 for at in range(0, len(row), 2)] for row in rows])


def cells(quick: bool) -> list[Cell]:
    """Adam and VOGN on the same points, from the same weights.

    Example:
        >>> [cell.method for cell in cells(quick=False)]
        ['adam', 'vogn']
    """
    base = {"points": 100, "net": "mlp-128", "batch_size": 10, "epochs": 100, "networks": 100}
    if quick:
        base |= {"epochs": 5, "networks": 20}
    vogn = {"lr": 1e-2, "momentum": 0.9, "beta2": 0.99, "damping": 1e-4, "augmentation": 1.0}
    vogn |= {"prior_precision": 1.0, "mc_samples": 10, "warmup_start": 0.01, "warmup": 1.0}
    return [Cell("moons", "adam", {**base, "lr": 1e-2}), Cell("moons", "vogn", {**base, **vogn})]


_METRICS = ("accuracy", "nll", "mean", "average", "samples")
TOY = Study("vogn-toy", cells, draw, _METRICS, seeds=(0,), tested=False)
