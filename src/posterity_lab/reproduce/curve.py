"""A noisy curve, known in an interval: predictions of sampled networks where there is no data.

Blundell et al. 2015, figure 5: y = x + 0.3 sin 2π(x + ε) + 0.3 sin 4π(x + ε) + ε, with ε ~ N(0, 0.02²) and x
from [0, 0.5].
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity import predict
from posterity.compress import point_mass
from posterity_lab import baselines, data, nets
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.reproduce.learners import backprop
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, grid

SEEN = (0.0, 0.5)  # where the data lies
SHOWN = (-0.4, 1.2)  # where the networks are evaluated
_AWAY = 0.3  # distance from the data that counts as away
_POINTS = 81


def draw(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Train on the unit's points, and evaluate networks on both sides of them.

    Args:
        unit: The unit to run.
        device: Device of the computation.
        cache: Not used, since a run takes seconds.
        show: Called after every tenth of the epochs.

    Example:
        >>> cell = cells(quick=True)[0]
        >>> unit = Unit("curve", cell.setting, cell.method, 0, cell.config, "")
        >>> found = draw(unit, "cpu", Path(), lambda done, total, what: None).metrics
        >>> sorted(found["shown"]), len(found["shown"]["median"])
        (['high', 'low', 'median', 'networks'], 81)
    """
    config, seed = unit.config, unit.seed
    # A trial has other points, for training and for testing.
    train, test = (
        points(config[key], seed=2 * seed + number) for number, key in enumerate(("points", "held_out"))
    )
    train, test = train.to(device), test.to(device)
    method = _learner(unit, device, len(train))
    for epoch in range(config["epochs"]):
        for x, y in data.batches(train, config["batch_size"], seed=seed, epoch=epoch):
            method.step(x, y)
        if (epoch + 1) % max(1, config["epochs"] // 10) == 0:
            show(epoch + 1, config["epochs"], "epoch")
    at = torch.linspace(*SHOWN, _POINTS)
    drawn, tested = (_outputs(method, x.to(device), config["networks"]).cpu() for x in (at[:, None], test.x))
    low, median, high = drawn.quantile(torch.tensor([0.25, 0.5, 0.75]), 0)
    spread = high - low
    inside = (at >= SEEN[0]) & (at <= SEEN[1])
    away = (at < SEEN[0] - _AWAY) | (at > SEEN[1] + _AWAY)
    within, beyond = (float(spread[chosen].mean()) for chosen in (inside, away))
    found = {
        "log_likelihood": _log_likelihood(tested, test.y.cpu(), config["noise"]),
        "rmse": float((tested.mean(0) - test.y[:, 0].cpu()).square().mean().sqrt()),
        "spread_inside": within,
        "spread_away": beyond,
        "growth": beyond / within if within > 0 else None,
    }
    lines = {"low": low, "median": median, "high": high, "networks": drawn[:10]}
    shown = {key: [_rounded(each) for each in value] for key, value in lines.items()}
    return Outcome({**found, "shown": shown}, len(test))


def points(count: int, seed: int) -> Split:
    """Points of the curve, with one ε each.

    Example:
        >>> points(5, seed=0).x.shape, points(5, seed=0).y.shape
        (torch.Size([5, 1]), torch.Size([5, 1]))
    """
    generator = torch.Generator().manual_seed(seed)
    x = SEEN[0] + (SEEN[1] - SEEN[0]) * torch.rand(count, 1, generator=generator)
    return Split(x, curve(x, 0.02 * torch.randn(count, 1, generator=generator)))


def curve(x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """The curve at x, for a value of ε.

    Example:
        >>> curve(torch.tensor([0.0, 0.25]))
        tensor([0.0000, 0.5500])
    """
    waves = 0.3 * torch.sin(2 * math.pi * (x + noise)) + 0.3 * torch.sin(4 * math.pi * (x + noise))
    return x + waves + noise


def normal(out: Tensor, y: Tensor, noise: float) -> Tensor:
    """Mean negative log-likelihood of targets with Gaussian noise, without its constant.

    Example:
        >>> normal(torch.tensor([[1.0]]), torch.tensor([[0.0]]), noise=0.5)
        tensor(2.)
    """
    return 0.5 * ((out - y) / noise).square().mean()


def _learner(unit: Unit, device: str, num_data: int) -> Method:
    config = unit.config
    model = nets.initialise(nets.build(config["net"], [1], 1), unit.seed).to(device)

    def nll(out: Tensor, y: Tensor) -> Tensor:
        return normal(out, y, config["noise"])

    if unit.method == "adam":
        return baselines.adam(model, lr=config["lr"], nll=nll)
    return backprop(unit.method, config, model, num_data=num_data, seed=unit.seed, nll=nll)


def _outputs(method: Method, x: Tensor, networks: int) -> Tensor:
    """Each network's output for every input; a plain net is one network."""
    posterior = method.posterior()
    if posterior is None:
        return predict(method.model, point_mass(method.model), x, mode="mean").samples[..., 0]
    return predict(method.model, posterior, x, samples=networks).samples[..., 0]


def _log_likelihood(drawn: Tensor, y: Tensor, noise: float) -> float:
    """Mean log-density of targets under the mixture of all networks."""
    logs = -0.5 * ((drawn - y[:, 0]) / noise).square() - math.log(noise * math.sqrt(2 * math.pi))
    return float((logs.logsumexp(0) - math.log(len(drawn))).mean())


def _rounded(values: Tensor) -> Any:
    if values.dim():
        return [_rounded(each) for each in values]
    return round(float(values), 4)


def cells(quick: bool) -> list[Cell]:
    """Nets of 2x100 units on 300 points, all at once: Bayes by Backprop with both priors, and a plain net.

    A trial learns other points; the best log-likelihood of held-out points from the interval of the data is
    chosen. The noise of y that comes from ε inside the sines is about 0.06.

    Example:
        >>> [cell.method for cell in cells(quick=False)]
        ['bbb-mixture', 'bbb', 'adam']
    """
    base: dict[str, Any] = {
        "net": "mlp-100-100",
        "points": 300,
        "held_out": 1000,
        "batch_size": 300,
        "epochs": 2000,
        "noise": 0.06,
        "networks": 200,
    }
    if quick:
        base |= {"epochs": 20, "networks": 20}
    descent = {"lr": 3e-3, "std_init": 0.02, "kl_factor": 1.0}
    mixture = {"weight": 0.5, "std_wide": 1.0, "std_narrow": round(math.exp(-6), 6)}
    wide = grid(std_wide=[1.0, 2.0], std_init=[0.02, 0.1])
    narrow = grid(prior_std=[0.3, 1.0], std_init=[0.02, 0.1])
    return [
        Cell("curve", "bbb-mixture", {**base, **descent, **mixture}, wide, {}, "log_likelihood"),
        Cell("curve", "bbb", {**base, **descent, "prior_std": 1.0}, narrow, {}, "log_likelihood"),
        Cell("curve", "adam", {**base, "lr": 3e-3}, grid(lr=[1e-3, 3e-3, 1e-2]), {}, "log_likelihood"),
    ]


_METRICS = ("log_likelihood", "rmse", "spread_inside", "spread_away", "growth", "shown")
CURVE = Study("bbb-regression", cells, draw, _METRICS, seeds=(0, 1, 2))
