"""How noisy is the gradient at sampled weights, by estimator, std and batch size?

    posterity bench gradient_variance
    posterity bench gradient_variance --plot-only benchmarks/results/gradient_variance-cpu.json

Nets trained on digits, with stds of std_scale / sqrt(fan_in) (`variational`'s default is 0.02). Every number
is the variance of the mean loss's gradient with respect to the weights' means, summed over weights: for one
batch with single draws (K = 1), and for random batches at the means, which no estimator can reduce. The plot
is saved next to the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import variational
from posterity_lab.bench import Ratio, Record, parser, positive
from posterity_lab.data import batches, load
from posterity_lab.nets import mlp

ESTIMATORS, BATCHES = ("weight", "local", "flipout"), "random batches"
SCALES, SIZES = [0.02, 0.1, 0.3], [8, 32, 128, 512]


def conv() -> nn.Sequential:
    """Two convolutions with pooling, and one linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


NETS: dict[str, tuple[str, Callable[[], nn.Sequential]]] = {
    "mlp": ("MLP 64-100-100-10", lambda: mlp(64, [100, 100], 10)),
    "conv": ("conv 16-32 (3x3)", conv),
}


def trained(make: Callable[[], nn.Sequential], seed: int, epochs: int, device: str) -> nn.Sequential:
    """A net that has learned digits at its means."""
    torch.manual_seed(seed)
    net, data = make().to(device), load("digits", device=device).train
    opt = torch.optim.Adam(net.parameters())
    for epoch in range(epochs):
        for x, y in batches(data, 32, seed=seed, epoch=epoch):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    return net


def variance(draw: Callable[[], Sequence[Tensor]], draws: int, rounds: int) -> dict[str, Any]:
    """A column: the variance of gradients, summed over weights; median and range over rounds of draws."""
    found = []
    for _ in range(rounds):
        grads = torch.stack([torch.cat([grad.flatten() for grad in draw()]) for _ in range(draws)])
        found.append(grads.double().var(0).sum().item())
    extent = {"lowest": min(found), "highest": max(found)}
    return {"value": median(found), **extent, "rounds": rounds, "steps": draws, "setting": "fp32"}


def columns(net: nn.Sequential, scale: float, size: int, given: argparse.Namespace) -> dict[str, Any]:
    """The variances of one row."""
    data = load("digits", device=given.device).train
    generator = torch.Generator().manual_seed(given.seed)
    batch = data.subset(torch.randperm(len(data), generator=generator)[:size].tolist())
    means, found = list(net.parameters()), {}

    def of_batches() -> Sequence[Tensor]:
        some = data.subset(torch.randint(len(data), (size,), generator=generator).tolist())
        return torch.autograd.grad(F.cross_entropy(net(some.x), some.y), means)

    for estimator in ESTIMATORS:
        model = variational(net, estimator=estimator, std_scale=scale, seed=given.seed)
        found[estimator] = variance(
            lambda model=model: torch.autograd.grad(F.cross_entropy(model(batch.x), batch.y), means),
            given.draws,
            given.rounds,
        )
    found[BATCHES] = variance(of_batches, given.draws, given.rounds)
    return found


def plot(record: dict[str, Any], path: Path) -> None:
    """Variance over the batch size, a panel for each net and std."""
    from posterity_lab.report import COLOURS, figure, picture

    rows = record["rows"]
    cases = list(dict.fromkeys((row["case"], row["scale"]) for row in rows))
    drawn, panels = figure(len(cases), height=3.2, width=2.6)
    for axes, (case, scale) in zip(panels, cases, strict=True):
        own = [row for row in rows if (row["case"], row["scale"]) == (case, scale)]
        sizes = [row["batch"] for row in own]
        styles = zip((*ESTIMATORS, BATCHES), (*COLOURS[:3], "#555555"), "osD^", strict=True)
        for name, colour, marker in styles:
            values = [row["columns"][name]["value"] for row in own]
            axes.plot(sizes, values, marker=marker, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel="batch size", title=f"{case}\nstd_scale {scale:g}")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    panels[0].set_ylabel("variance of the gradient")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncol=len(labels), frameon=False)
    path.write_bytes(picture(drawn, "").svg)


def draw(path: Path) -> None:
    """The plot of a record, beside it."""
    try:
        plot(json.loads(path.read_text()), path.with_suffix(".svg"))
    except ModuleNotFoundError:
        print(f"a plot needs matplotlib: posterity bench gradient_variance --plot-only {path} draws it later")
        return
    print(f"plot: {path.with_suffix('.svg')}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    options.add_argument("--scales", type=float, nargs="+", default=SCALES, help="std_scale of the weights")
    options.add_argument("--batches", type=positive, nargs="+", default=SIZES)
    options.add_argument("--draws", type=positive, default=40, help="in each round; two at least")
    options.add_argument("--epochs", type=positive, default=5, help="before anything is measured")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--plot-only", type=Path, metavar="RECORD", help="draw this record; measure nothing")
    given = options.parse_args()
    if given.plot_only is not None:
        draw(given.plot_only)
        return
    record = Record("gradient_variance", given, "variance of the gradient", "weight")
    for name in given.nets:
        case, make = NETS[name]
        net = trained(make, given.seed, given.epochs, given.device)
        weights = sum(p.numel() for p in net.parameters())
        for scale in given.scales:
            for size in given.batches:
                ratios = [Ratio("weight", "local"), Ratio("weight", "flipout")]
                found = columns(net, scale, size, given)
                more = {"scale": scale, "batch": size, "parameters": weights}
                record.add(case, f"std_scale {scale:g}, batch {size}", found, ratios, **more)
    record.close()
    draw(record.path)


if __name__ == "__main__":
    main()
