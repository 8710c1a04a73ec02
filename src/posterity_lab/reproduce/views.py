"""Views of each experiment: a table with the paper's numbers and ours, then figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, TypeAlias

import torch

from posterity.diagnostics import Histogram
from posterity.predict import MODES
from posterity_lab import figures, report
from posterity_lab.errors import PruningCurve
from posterity_lab.report import Part, Picture, Table
from posterity_lab.reproduce import (
    blundell_views,
    doubt_views,
    incremental_views,
    sparse_views,
    vogn_views,
)
from posterity_lab.reproduce.groups import Group, columns, settings, within
from posterity_lab.reproduce.records import Record

View: TypeAlias = Callable[[Sequence[Group]], list[Part]]

_MODES = {"single": "single networks", "average": "averaged", "mean": "mean weights", "vote": "vote"}
# A method has the same colour in all figures of streams.
_SLOTS = {"bgd": 0, "sgd": 1, "adam": 2, "si": 3, "ewc": 4, "vcl": 5, "bong": 6, "vogn": 1, "vogn-told": 3}


def errors(found: Sequence[Group]) -> list[Part]:
    """Table 1: test error by every way of inference."""
    header = ["setting", "paper, %", *(f"{name}, %" for name in _MODES.values()), "epochs", "runs", "time"]
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
    caption = "Test error. The paper's number is to be compared with that of single networks"
    return [Table(caption, header, rows), *_mode_pictures(found)]


def accuracies(found: Sequence[Group]) -> list[Part]:
    """Figure 3: test accuracy by every way of inference, at the end and during training."""
    rows = [
        [
            group.title,
            *(group.spread(partial(_accuracy, mode)) for mode in _MODES),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", *(f"{name}, %" for name in _MODES.values()), "epochs", "runs", "time"]
    parts: list[Part] = [Table("Test accuracy at the end", header, rows)]
    for setting in settings(found):
        lines = dict[str, tuple[list[float], list[float]]]()
        drawn, (axes,) = report.figure()
        for group in within(found, setting):
            epochs = [each["epoch"] for each in group.whole[0]["metrics"]["curve"]]
            for mode in ("vote", "single", "mean") if group.method == "bgd" else ("mean",):
                name = f"{group.name}, {_MODES[mode]}" if group.method == "bgd" else group.name
                curves = [[1 - each[mode] for each in record["metrics"]["curve"]] for record in group.whole]
                lines[name] = columns(curves)
                # Separately: methods may have been trained for different times.
                report.lines(axes, epochs, {name: lines[name]}, [len(lines) - 1])
        if lines:
            report.close_up(axes, lines)
            axes.set(xlabel="epoch", ylabel="test accuracy")
            parts.append(report.picture(drawn, f"{setting}: test accuracy as training goes on."))
    return parts


def pruning(fraction: float, found: Sequence[Group]) -> list[Part]:
    """Tables 2 and 3: error after removing a share of the weights over the error before."""

    def at(record: Record, mode: str = "single") -> float:
        curve = record["metrics"]["pruning"][mode]
        return float(curve["errors"][curve["fractions"].index(fraction)])

    def left(group: Group) -> str:
        curve = group.whole[0]["metrics"]["pruning"]["single"]
        return f"{curve['weights'][curve['fractions'].index(fraction)]:,}"

    rows = [
        [
            group.title,
            group.paper,
            "–" if 0.0 in group.values(_unpruned) else group.spread(lambda r: at(r) / _unpruned(r), 2, 1),
            group.spread(_unpruned),
            group.spread(at),
            left(group) if group.whole else "–",
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "ratio, paper", "ratio, ours", "error before, %", "after, %", "weights left"]
    caption = f"Test error with {fraction:.0%} of the weights removed; sampled networks each for itself"
    curves = {
        group.title: [_curve(record) for record in group.whole]
        for group in found
        if group.whole and 0.0 not in group.values(_unpruned)
    }
    parts: list[Part] = [Table(caption, [*header, "epochs", "runs", "time"], rows)]
    if curves:
        drawn, (axes,) = report.figure()
        figures.error_ratios(axes, dict(list(curves.items())[: len(report.COLOURS)]))
        parts.append(report.picture(drawn, "Error over the error before pruning; bands show ± one sd."))
    return parts


def forgetting(found: Sequence[Group]) -> list[Part]:
    """Figure 1: average accuracy over the tasks so far."""
    return [
        _streams_table(found),
        *(
            _seen_picture(within(found, setting), setting)
            for setting in settings(found)
            if within(found, setting)
        ),
    ]


def each_task(found: Sequence[Group]) -> list[Part]:
    """Figure 4: accuracy on every task after the last."""
    parts: list[Part] = [_streams_table(found)]
    for setting in settings(found):
        own = within(found, setting)
        if not own:
            continue
        drawn, (axes,) = report.figure()
        last = {
            group.name: columns([record["metrics"]["matrix"][-1] for record in group.whole]) for group in own
        }
        count = len(next(iter(last.values()))[0])
        slots = [_SLOTS[group.method] for group in own]
        report.bars(axes, [f"task {number + 1}" for number in range(count)], last, slots)
        axes.set_ylabel("test accuracy at the end")
        parts.append(report.picture(drawn, "Accuracy on each task after the last; bars show ± one sd."))
    return parts


def stds(found: Sequence[Group]) -> list[Part]:
    """Figure 2: histograms of the standard deviations."""
    rows, pictures = [], list[Part]()
    for group in found:
        for record in group.whole:
            start, spread = record["config"]["std_init"], record["metrics"]["std"]
            edges = torch.tensor(spread["edges"], dtype=torch.float64)
            counts = {name: torch.tensor(each) for name, each in spread["counts"].items()}
            middle, total = (edges[1:] * edges[:-1]).sqrt(), torch.stack(list(counts.values())).sum(0)
            shares = [
                float((total * chosen).sum() / total.sum())
                for chosen in (
                    middle < start / 2,
                    (middle >= start / 2) & (middle <= 2 * start),
                    middle > 2 * start,
                )
            ]
            where = f"{group.title}, seed {record['seed']}"
            rows.append([where, f"{start:g}", *(f"{100 * share:.1f}" for share in shares), group.epochs])
            drawn, (axes,) = report.figure(height=max(3.3, 0.4 * len(counts)))
            figures.histograms(axes, Histogram(edges, counts), "standard deviation σ of a weight", start)
            pictures.append(report.picture(drawn, f"{where}: σ of the weights of every tensor at the end."))
    header = ["run", "start", "below half of it, %", "between, %", "above twice, %", "epochs"]
    return [Table("Share of the weights by their σ", header, rows), *pictures]


def theorems(found: Sequence[Group]) -> list[Part]:
    """Theorem 1 and Corollary 1: the checks, and the figure that shows them."""
    words = {
        "smallest_bound_ratio": "smallest E[g·eps] / (m·σ) where m-strongly convex (at least 1)",
        "convex_falls": "σ falls at every step where convex",
        "concave_grows": "σ grows at every step where concave",
        "curvature_within_3_errors": "weights whose E[g·eps] / σ is within 3 s.e. of the Hessian",
        "curvature_correlation": "correlation of the two",
    }
    rows = [
        [text, _said(record["metrics"][key])]
        for group in found
        for record in group.whole
        for key, text in words.items()
    ]
    picture = report.picture(
        figures.bgd_theory(), "σ over the steps of BGD, and curvature seen by sampling; computed exactly."
    )
    return [Table("What the theory says", ["", "found"], rows), picture]


VIEWS: Mapping[str, View] = {
    "bgd-table1": errors,
    "bgd-table2": partial(pruning, 0.95),
    "bgd-figure1": forgetting,
    "bgd-figure2": stds,
    "bgd-figure3": accuracies,
    "bgd-table3": partial(pruning, 0.9),
    "bgd-figure4": each_task,
    "bgd-theory": theorems,
    "vogn-table": vogn_views.scores,
    "vogn-ablation": vogn_views.ablation,
    "vogn-permuted": forgetting,
    "vogn-toy": vogn_views.plane,
    "bbb-table1": blundell_views.errors,
    "bbb-pruning": blundell_views.pruning,
    "incremental-mnist": incremental_views.parts,
    "incremental-cifar10": incremental_views.parts,
    "incremental-pretrained": incremental_views.parts,
    "bbb-regression": doubt_views.regression,
    "bbb-bandit": doubt_views.regret,
    "uncertainty-samples": doubt_views.networks,
    "sparse-lenet": sparse_views.compressed,
    "sparse-groups": sparse_views.groups,
    "sparse-pictures": sparse_views.pictures,
    "sparse-vgg": sparse_views.wide,
    "sparse-random-labels": sparse_views.labels,
}


def _error(mode: str, record: Record) -> float:
    return float(record["metrics"]["errors"][mode])


def _accuracy(mode: str, record: Record) -> float:
    return 1.0 - _error(mode, record)


def _unpruned(record: Record) -> float:
    return float(record["metrics"]["pruning"]["single"]["unpruned"])


def _curve(record: Record) -> PruningCurve:
    curve = record["metrics"]["pruning"]["single"]
    return PruningCurve(
        tuple(curve["fractions"]), tuple(curve["weights"]), tuple(curve["errors"]), curve["unpruned"]
    )


def _mode_pictures(found: Sequence[Group]) -> list[Picture]:
    pictures = []
    for setting in settings(found):
        own = {group.method: group for group in within(found, setting)}
        if "bgd" not in own:
            continue
        modes = [{mode: _error(mode, record) for mode in MODES} for record in own["bgd"].whole]
        others = {
            group.name: group.values(partial(_error, "single"))
            for method, group in own.items()
            if method != "bgd"
        }
        drawn, (axes,) = report.figure()
        figures.mode_comparison(axes, modes, others)
        caption = f"Width {setting}: BGD by every way of inference, the others by single networks."
        pictures.append(report.picture(drawn, caption))
    return pictures


def _streams_table(found: Sequence[Group]) -> Table:
    def summary(key: str, record: Record) -> float:
        return float(record["metrics"]["summary"][key])

    rows = [
        [
            group.title,
            group.spread(partial(summary, "average_accuracy")),
            group.spread(partial(summary, "forgetting")),
            group.spread(partial(summary, "forward_transfer")),
            group.spread(partial(summary, "nll"), 3, 1.0),
            group.spread(partial(summary, "ece"), 3, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "accuracy, %", "forgetting, %", "forward transfer, %", "NLL", "ECE"]
    caption = "Averages over all tasks, after the last"
    return Table(caption, [*header, "epochs a task", "runs", "time"], rows)


def _seen_picture(own: Sequence[Group], setting: str) -> Picture:
    drawn, (axes,) = report.figure()
    lines = {
        group.name: columns(
            [
                [fmean(row[: number + 1]) for number, row in enumerate(record["metrics"]["matrix"])]
                for record in group.whole
            ]
        )
        for group in own
    }
    numbers = list(range(1, len(next(iter(lines.values()))[0]) + 1))
    report.lines(axes, numbers, lines, [_SLOTS[group.method] for group in own])
    report.close_up(axes, lines)
    axes.set(xlabel="tasks learned so far", ylabel="test accuracy", xticks=numbers)
    return report.picture(drawn, f"{setting}: average over the tasks seen so far; bands show ± one sd.")


def _said(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.4g}"
