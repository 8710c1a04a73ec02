"""Views of the experiments of the VOGN paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes

from posterity_lab import bench, report
from posterity_lab.report import COLOURS, Part, Table
from posterity_lab.reproduce import toy
from posterity_lab.reproduce.groups import Group, columns, within
from posterity_lab.reproduce.learners import NAMES
from posterity_lab.reproduce.records import Record

# The columns of the paper's row, in order: name, key, digits, scale.
_PAPERS = (
    ("train, %", "train_accuracy", 2, 100.0),
    ("test, %", "accuracy", 2, 100.0),
    ("NLL", "nll", 3, 1.0),
    ("ECE", "ece", 3, 1.0),
    ("AUROC", "auroc", 3, 1.0),
)
_GREY = "#555555"


def scores(found: Sequence[Group]) -> list[Part]:
    """The table on CIFAR-10: accuracy and calibration, then the cost."""
    header = ["setting"]
    for name, *_ in _PAPERS:
        header += [f"{name}, paper", "ours"]
    rows, times = [], []
    machine, steps = _steps()
    for group in found:
        paper = _paper(group)
        row = [group.title]
        for printed, (_, key, digits, scale) in zip(paper, _PAPERS, strict=False):
            row += [printed, group.spread(partial(_value, key), digits, scale)]
        rows.append([*row, _outside(group)])
        adam = next((each for each in found if (each.setting, each.method) == (group.setting, "adam")), None)
        seconds = _alone(group).spread(partial(_value, "epoch_seconds"), 3, 1.0)
        ratios = [
            _paper_ratio(group, adam),
            _ratio(group, adam) or steps.get((group.setting, group.name), "–"),
        ]
        times.append([group.title, seconds, *ratios, group.epochs, group.runs, group.time])
    caption = (
        "Predictions averaged over sampled networks, where there are several. AUROC: confidence tells right "
        "predictions from wrong ones; SVHN: entropy tells test images from SVHN's"
    )
    columns_of_time = ["setting", "s per epoch", "over Adam's, paper", "ours", "epochs", "runs", "time"]
    parts: list[Part] = [Table(caption, [*header, "AUROC, SVHN"], rows)]
    about = "Time of an epoch of training, tests left out, where a run had the machine to itself"
    if steps:
        about += f"; else over Adam's is of steps side by side (posterity bench vogn_table, {machine})"
    parts.append(Table(about, columns_of_time, times))
    missing = {
        record["metrics"]["outside"]
        for group in found
        for record in group.whole
        if record["metrics"]["outside_auroc"] is None and record["metrics"]["outside"] is not None
    }
    return [*parts, *(f"Without another data set to tell apart: {why}." for why in sorted(missing))]


def ablation(found: Sequence[Group]) -> list[Part]:
    """Momentum and BatchNorm: accuracy during training."""
    rows = [
        [
            group.title,
            group.spread(partial(_value, "accuracy")),
            group.spread(partial(_value, "nll"), 3, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    parts: list[Part] = [
        Table(
            "Test accuracy and NLL at the end", ["setting", "test, %", "NLL", "epochs", "runs", "time"], rows
        )
    ]
    drawn, (axes,) = report.figure()
    lines = {}
    for slot, group in enumerate(each for each in found if each.whole):
        epochs = [each["epoch"] for each in group.whole[0]["metrics"]["curve"]]
        curves = [[each["accuracy"] for each in record["metrics"]["curve"]] for record in group.whole]
        lines[group.setting] = columns(curves)
        report.lines(axes, epochs, {group.setting: lines[group.setting]}, [slot])
    report.close_up(axes, lines)
    axes.set(xlabel="epoch", ylabel="test accuracy")
    return [*parts, report.picture(drawn, "Test accuracy of VOGN as training goes on.")]


def plane(found: Sequence[Group]) -> list[Part]:
    """Two classes in the plane: decision boundaries of the mean and of sampled networks, and uncertainty."""
    own = {group.method: group.whole[0] for group in within(found, "moons")}
    rows = [
        [
            group.title,
            group.spread(partial(_value, "accuracy"), 1),
            group.spread(partial(_value, "nll"), 3, 1.0),
        ]
        for group in found
    ]
    drawn, (borders, *maps) = report.figure(panels=1 + len(own), height=3.6, width=4.0)
    for slot, (method, record) in enumerate(own.items()):
        colour = COLOURS[slot]
        for rows_of_one in record["metrics"]["samples"]:
            _border(borders, record, rows_of_one, colour, 0.7, 0.35)
        _border(borders, record, record["metrics"]["mean"], colour, 2.0, 1.0)
        borders.plot([], [], color=colour, label=_name(found, method))
    borders.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(own), frameon=False)
    for axes, (method, record) in zip(maps, own.items(), strict=True):
        probs = toy.unpacked(record["metrics"]["average"])
        entropy = -(probs.xlogy(probs) + (1 - probs).xlogy(1 - probs))
        axes.contourf(*_axes(record), entropy.T.numpy(), levels=10, cmap="Greys", vmin=0.0, vmax=0.7)
        axes.set_title(f"entropy, {_name(found, method)}")
    for axes in (borders, *maps):
        _points(axes, next(iter(own.values())))
    caption = (
        "Left: borders of the mean weights (thick) and of ten sampled networks (thin). Right: entropy of the "
        "averaged prediction, darker where there is more doubt."
    )
    table = Table("On the points themselves", ["setting", "accuracy, %", "NLL"], rows)
    return [table, report.picture(drawn, caption)]


def _value(key: str, record: Record) -> float:
    return float(record["metrics"][key])


def _paper(group: Group) -> list[str]:
    """The paper's numbers for a group: one for each column, and the time of an epoch."""
    printed = group.paper.split(" / ")
    return printed if len(printed) == len(_PAPERS) + 1 else ["–"] * (len(_PAPERS) + 1)


def _paper_ratio(group: Group, adam: Group | None) -> str:
    both = [] if adam is None else [_paper(each)[-1] for each in (group, adam)]
    return "–" if not both or "–" in both else f"{float(both[0]) / float(both[1]):.1f}"


def _ratio(group: Group, adam: Group | None) -> str | None:
    both = [] if adam is None else [_alone(each) for each in (group, adam)]
    if not both or not all(each.whole for each in both):
        return None
    mine, its = (fmean(each.values(partial(_value, "epoch_seconds"))) for each in both)
    return f"{mine / its:.1f}"


def _steps() -> tuple[str, dict[tuple[str, str], str]]:
    """By setting and method, the time of a step over Adam's from a benchmark's record, and the machine."""
    path = next(iter(sorted(bench.RESULTS.glob("vogn_table-*.json"))), None)
    if path is None:
        return "", {}
    record = json.loads(path.read_text(encoding="utf-8"))
    place = record["environment"]
    ratios = {
        (row["case"], ratio["of"]): f"{ratio['value']:.1f}"
        for row in record["rows"]
        for ratio in row["ratios"]
    }
    own = {(row["case"], NAMES["adam"]): "1.0" for row in record["rows"]}
    return place["gpu"] or place["processor"], {**own, **ratios}


def _alone(group: Group) -> Group:
    """Only the runs that shared their machine with no other, so that their times count."""
    places = ((each, each["environment"]) for each in group.whole)
    alone = [each for each, place in places if place.get("jobs", 1) == 1 and not place.get("shared")]
    return replace(group, whole=alone)


def _outside(group: Group) -> str:
    found = [record["metrics"]["outside_auroc"] for record in group.whole]
    return "–" if None in found else group.spread(partial(_value, "outside_auroc"), 3, 1.0)


def _name(found: Sequence[Group], method: str) -> str:
    return next(group.name for group in found if group.method == method)


def _axes(record: Record) -> tuple[list[float], list[float]]:
    """The points of a grid along both axes."""
    low, high = toy.bounds(toy.made(record["config"]["points"]).x)
    count = len(record["metrics"]["mean"])
    both = [
        [float(a + (b - a) * at / (count - 1)) for at in range(count)] for a, b in zip(low, high, strict=True)
    ]
    return both[0], both[1]


def _border(axes: Axes, record: Record, rows: Sequence[str], colour: str, width: float, alpha: float) -> None:
    probs = toy.unpacked(rows).T.numpy()
    if probs.min() < 0.5 < probs.max():  # otherwise there is no boundary, and matplotlib warns
        axes.contour(*_axes(record), probs, levels=[0.5], colors=[colour], linewidths=width, alpha=alpha)


def _points(axes: Axes, record: Record) -> None:
    points = toy.made(record["config"]["points"])
    for label, marker in enumerate("os"):
        x = points.x[points.y == label]
        axes.scatter(
            x[:, 0].tolist(),
            x[:, 1].tolist(),
            s=14,
            marker=marker,
            facecolor="white",
            edgecolor=_GREY,
            zorder=3,
        )
