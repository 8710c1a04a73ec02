"""Views of the experiments of Bayes by Backprop's paper on MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from posterity_lab import report
from posterity_lab.report import COLOURS, Part, Picture, Table
from posterity_lab.reproduce import blundell
from posterity_lab.reproduce.groups import Group, columns, settings, within
from posterity_lab.reproduce.records import Record

_MODES = {"average": "averaged", "single": "single networks", "mean": "mean weights"}
_SHARES = [f"{share:.0%}" for share in blundell.SHARES]


def errors(found: Sequence[Group]) -> list[Part]:
    """The table: test errors of averaged networks, single networks and mean weights; and during training."""
    rows = [
        [
            group.title,
            group.paper,
            *(group.spread(partial(_error, mode)) for mode in _MODES),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "paper, %", *(f"{name}, %" for name in _MODES.values()), "epochs", "runs", "time"]
    caption = "Test error. The paper does not say how it combines networks; of a plain net all are the same"
    return [Table(caption, header, rows), *map(partial(_curves, found), settings(found))]


def pruning(found: Sequence[Group]) -> list[Part]:
    """The paper's table of pruning, the trade-off on held-out images, and histograms of weights and SNR."""
    rows = [
        [group.title, group.paper, *_pruned(group), group.epochs, group.runs, group.time] for group in found
    ]
    header = ["setting", "paper, %", *(f"{share} removed" for share in _SHARES), "epochs", "runs", "time"]
    parts: list[Part] = [Table("Test error averaged over networks, %, without retraining", header, rows)]
    tried = [group for group in found if group.tried and group.setting.endswith(blundell.TO_PRUNE)]
    if tried:
        parts += [_frontier_table(tried), _frontier_picture(tried)]
    return parts + _histograms(found)


def _error(mode: str, record: Record) -> float:
    return float(record["metrics"]["errors"][mode])


def _at(share: float, record: Record) -> float:
    curve = record["metrics"]["pruning"]["average"]
    return float(curve["errors"][curve["fractions"].index(share)])


def _pruned(group: Group) -> list[str]:
    return [group.spread(partial(_at, share)) for share in blundell.SHARES]


def _curves(found: Sequence[Group], setting: str) -> Picture:
    drawn, (axes,) = report.figure()
    for slot, group in enumerate(within(found, setting)):
        epochs = [each["epoch"] for each in group.whole[0]["metrics"]["curve"]]
        runs = [[each["average"] for each in record["metrics"]["curve"]] for record in group.whole]
        report.lines(axes, epochs, {group.name: columns(runs)}, [slot])
    axes.set(xlabel="epoch", ylabel="test error")
    axes.set_ylim(0.0, 0.05)
    axes.legend(loc="upper right", frameon=False)
    return report.picture(drawn, f"{setting}: test error, averaged over networks, as training goes on.")


def _values(record: Record) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in record["trial"].items())


def _frontier_table(tried: Sequence[Group]) -> Table:
    rows = [
        [
            f"{group.title}: {_values(record)}",
            *(f"{100 * _at(share, record):.2f}" for share in blundell.SHARES),
        ]
        for group in tried
        for record in group.tried
    ]
    caption = "The trade-off: trials, tested on held-out images; error averaged over networks, %"
    return Table(caption, ["trial", *(f"{share} removed" for share in _SHARES)], rows)


def _frontier_picture(tried: Sequence[Group]) -> Picture:
    """Every trial's error by the removed share, and the lowest of all."""
    drawn, (axes,) = report.figure()
    marks = range(len(blundell.SHARES))
    for slot, group in enumerate(tried):
        curves = [[_at(share, record) for share in blundell.SHARES] for record in group.tried]
        for curve in curves:
            axes.plot(marks, curve, color=COLOURS[slot], linewidth=0.8, alpha=0.4)
        lowest = [min(each) for each in zip(*curves, strict=True)]
        report.lines(axes, list(marks), {f"{group.setting}: lowest": (lowest, [0.0] * len(lowest))}, [slot])
    axes.set_xticks(list(marks), _SHARES)
    axes.set(xlabel="weights removed", ylabel="error on held-out images")
    axes.set_ylim(0.0, 0.06)
    axes.legend(loc="upper left", frameon=False)
    return report.picture(drawn, "Error by the share removed; thin lines are trials, thick ones the lowest.")


def _histograms(found: Sequence[Group]) -> list[Part]:
    parts = list[Part]()
    for setting in settings(found):
        own = within(found, setting)
        if not own:
            continue
        weights = {group.name: group.whole[0]["metrics"]["weights"] for group in own}
        ratios = {group.name: snr for group in own if (snr := group.whole[0]["metrics"]["snr"]) is not None}
        drawn, (left, *right) = report.figure(panels=1 + bool(ratios))
        report.histogram(left, blundell.edges(blundell.WEIGHTS), weights)
        left.set_xlabel("weight")
        for axes in right:
            report.histogram(axes, blundell.edges(blundell.DECIBELS), ratios)
            axes.set_xlabel("10 log₁₀ |μ| / σ")
        parts.append(
            report.picture(drawn, f"{setting}: weights of one network drawn, and signal-to-noise ratios.")
        )
    return parts
