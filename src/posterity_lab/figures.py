"""Figures of a posterior's uses and of its training, in the style of `report`.

Each is drawn into axes of `report.figure()`, from data that `errors`, `theory` and `posterity.diagnostics`
compute; nothing else in the lab imports this file, so that matplotlib is loaded only where it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity.diagnostics import Histogram
from posterity.predict import Mode
from posterity_lab import report, theory
from posterity_lab.errors import PruningCurve
from posterity_lab.nets import initialise
from posterity_lab.report import COLOURS

_GREY = "#555555"
_MODES: dict[Mode, str] = {
    "single": "single networks",
    "mean": "mean weights",
    "average": "averaged probabilities",
    "vote": "majority vote",
}


def error_ratios(axes: Axes, curves: Mapping[str, Sequence[PruningCurve]]) -> None:
    """Error after pruning over the error before, against the share of weights removed.

    Both axes are logarithmic, the lower one in the weights that are left.

    Args:
        axes: Where to draw.
        curves: By name, the curve of each run, all with the same fractions; drawn is their mean, with a band
            of one standard deviation.

    Example:
        >>> curve = PruningCurve((0.0, 0.5, 0.9), (100, 50, 10), (0.02, 0.02, 0.05), unpruned=0.02)
        >>> error_ratios(report.figure()[1][0], {"BGD, by SNR": [curve]})
    """
    fractions = next(iter(curves.values()))[0].fractions
    if any(run.fractions != fractions for runs in curves.values() for run in runs):
        raise ValueError("all curves of a figure need the same fractions: compute them alike")
    ratios = {name: np.array([run.ratios for run in runs]) for name, runs in curves.items()}
    left = [1.0 - fraction for fraction in fractions]
    report.lines(axes, left, {name: (each.mean(0).tolist(), _sd(each)) for name, each in ratios.items()})
    axes.axhline(1.0, color=_GREY, linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="weights removed", ylabel="test error / unpruned test error")
    axes.invert_xaxis()
    axes.xaxis.set_major_locator(FixedLocator(left))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * (1 - share):.3g}%"))
    axes.xaxis.set_minor_locator(NullLocator())
    shown = np.concatenate([each.flatten() for each in ratios.values()])
    axes.set_ylim(0.8 * min(shown.min(), 1.0), 1.25 * max(shown.max(), 2.0))
    _label_logs(axes.yaxis)
    axes.legend(loc="upper left", frameon=False)


def mode_comparison(
    axes: Axes, errors: Sequence[Mapping[Mode, float]], references: Mapping[str, Sequence[float]]
) -> None:
    """Test error by every way of inference, and of other nets for comparison.

    Args:
        axes: Where to draw.
        errors: What `mode_errors` gave, for each run.
        references: By name (SGD), the test error of each run.

    Example:
        >>> errors = [{"average": 0.02, "mean": 0.021, "single": 0.025, "vote": 0.02}]
        >>> mode_comparison(report.figure()[1][0], errors, {"SGD": [0.022]})
    """
    rows = {label: [each[mode] for each in errors] for mode, label in _MODES.items()}
    colours = [COLOURS[0]] * len(rows) + [COLOURS[1]] * len(references)
    rows.update({name: list(values) for name, values in references.items()})
    for at, (values, colour) in enumerate(zip(rows.values(), colours, strict=True)):
        axes.plot(values, [at] * len(values), "o", color=colour, alpha=0.45, markeredgewidth=0, clip_on=False)
        axes.plot([fmean(values)], [at], "|", color=colour, markersize=18, markeredgewidth=2.5, clip_on=False)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="test error (dots: runs, bars: their mean)")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def histograms(axes: Axes, spread: Histogram, label: str, start: float | None = None) -> None:
    """One row per tensor, each scaled to its own peak, on a shared logarithmic axis.

    Give the figure a height of about 0.4 inches per tensor.

    Args:
        axes: Where to draw.
        spread: What `posterity.diagnostics.histogram` gave.
        label: What the values are, for the axis.
        start: Where all of them were at the start, if that is one number.

    Example:
        >>> from posterity.diagnostics import histogram
        >>> spread = histogram({"fc.weight": torch.rand(9, 9)})
        >>> histograms(report.figure()[1][0], spread, "standard deviation σ of a weight", start=0.5)
    """
    edges = spread.edges.tolist()
    for at, counts in enumerate(spread.counts.values()):
        heights = 0.85 * counts.double() / counts.max().clamp_min(1)
        # The axis runs downwards, so that the first layer is the top row: rows grow towards smaller values.
        tops = (at - heights.cpu()).numpy()
        axes.stairs(tops, edges, baseline=at, fill=True, color=COLOURS[0], alpha=0.75)
        axes.axhline(at, color=_GREY, linewidth=0.6)
    if start is not None:
        axes.axvline(start, color=_GREY, linestyle="--", linewidth=1, label=f"start, {start:g}")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set_yticks(range(len(spread.counts)), list(spread.counts))
    axes.set(xscale="log", xlabel=label, ylim=(len(spread.counts) - 0.8, -1.05))
    _label_logs(axes.xaxis)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def trajectories(axes: Axes, stds: Mapping[str, Tensor]) -> None:
    """σ of single weights over the steps of BGD, on a logarithmic axis.

    Args:
        axes: Where to draw.
        stds: By name, ``[steps + 1]``.

    Example:
        >>> trajectories(report.figure()[1][0], {"h = 1": torch.ones(3)})
    """
    for colour, (name, std) in zip(COLOURS, stds.items(), strict=False):
        axes.plot(std.tolist(), color=colour, label=name)
    axes.set(yscale="log", xlabel="step", ylabel="σ")
    _label_logs(axes.yaxis)
    axes.legend(frameon=False)


def curvature_scatter(axes: Axes, seen: theory.Curvature) -> None:
    """E[g·eps] / σ against the diagonal of the Hessian, with two standard errors.

    Example:
        >>> one = torch.ones(2)
        >>> curvature_scatter(report.figure()[1][0], theory.Curvature(one, one, 0.1 * one))
    """
    exact = seen.hessian.tolist()
    ends = [min(exact), max(exact)]
    axes.plot(ends, ends, color=_GREY, linestyle="--", linewidth=1, label="equal")
    axes.errorbar(
        exact,
        seen.estimate.tolist(),
        yerr=(2 * seen.error).tolist(),
        fmt="o",
        markersize=3.5,
        color=COLOURS[0],
        elinewidth=0.8,
        label="a weight, ± 2 s.e.",
    )
    axes.set(xlabel="diagonal of the Hessian", ylabel="E[g·eps] / σ")
    axes.legend(loc="upper left", frameon=False)


def bgd_theory(steps: int = 60, pairs: int = 2000) -> Figure:
    """Theorem 1 and Corollary 1 of Zeno et al. 2018 in four panels.

    σ falls where the loss is convex and grows where it is concave, with exact expectations; where it is both,
    σ grows on the hill and falls in the valley; and E[g·eps] / σ is the diagonal of a small net's Hessian.

    Args:
        steps: Of BGD, in the quadratic problems; ten times as many in the double well.
        pairs: Pairs of draws behind each estimate of the last panel.

    Example:
        >>> len(bgd_theory(steps=2, pairs=2).axes)
        4
    """
    drawn, (convex, concave, mixed, scatter) = report.figure(panels=4, width=3.5, height=3.3)
    up = torch.tensor([0.3, 3.0], dtype=torch.float64)
    # Far from the minimum: σ by exact expectations does not depend on the mean, that by an estimate does.
    start = torch.full_like(up, 3.0), torch.full_like(up, 0.5)
    exact = theory.trajectory(theory.quadratic(up.diag()), *start, steps=steps).std
    noisy = theory.trajectory(theory.estimated(lambda w: up * w, samples=10), *start, steps=steps).std
    lines = {f"curvature {h:g}": exact[:, i] for i, h in enumerate(up.tolist())}
    trajectories(convex, {**lines, "0.3, estimated with K = 10": noisy[:, 0]})
    convex.plot(theory.bayes_std(up, start[1], steps=steps), color=_GREY, linestyle=":", linewidth=1)
    convex.plot([], [], color=_GREY, linestyle=":", linewidth=1, label="Bayes' rule")
    convex.legend(loc="upper right", frameon=False)
    convex.set(title="Convex: σ falls", ylim=(0.05, 2.0))

    down = torch.tensor([-0.02, -0.04, -0.06], dtype=torch.float64)
    grown = theory.trajectory(theory.quadratic(down.diag()), 0 * down, 0.5 + 0 * down, steps=steps).std
    trajectories(concave, {f"curvature −{-h:g}": grown[:, i] for i, h in enumerate(down.tolist())})
    concave.set_title("Concave: σ grows")

    place = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)
    well = theory.trajectory(theory.double_well(), place, 0.1 + 0 * place, steps=10 * steps)
    trajectories(mixed, {f"from μ = {m:g}": well.std[:, i] for i, m in enumerate(place.tolist())})
    mixed.set_title("Double well ¼θ⁴ − ½θ²")

    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    initialise(net, seed=0)
    curvature_scatter(
        scatter, theory.curvature(net, x, lambda out: cross_entropy(out, y), std=0.01, pairs=pairs)
    )
    scatter.set_title("Weights of a small net")
    return drawn


def _label_logs(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade, or at each decade where there are many."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _sd(runs: np.ndarray) -> list[float]:
    """Standard deviation over the runs; none of a single one."""
    spread: list[float] = runs.std(0, ddof=min(1, len(runs) - 1)).tolist()
    return spread
