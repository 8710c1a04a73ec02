"""Views of the experiments on uncertainty: the toy curve, the mushrooms, and the number of networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes

from posterity_lab import report
from posterity_lab.report import COLOURS, Part, Picture, Table
from posterity_lab.reproduce import curve, doubt
from posterity_lab.reproduce.groups import Group, columns, settings, within
from posterity_lab.reproduce.records import Record

_GREY = "#555555"
_SHARE = 0.05  # a class that is never more probable than this is left out of a figure


def regression(found: Sequence[Group]) -> list[Part]:
    """The toy curve: median and quartiles of the networks, and how much wider they are away from the data."""
    rows = [
        [
            group.title,
            group.spread(partial(_value, "log_likelihood"), 3, 1.0),
            group.spread(partial(_value, "rmse"), 3, 1.0),
            group.spread(partial(_value, "spread_inside"), 3, 1.0),
            group.spread(partial(_value, "spread_away"), 3, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "log-likelihood", "RMSE", "quartiles apart, at the data", "away from it"]
    caption = "New points of the curve, and how far apart the networks' quartiles are"
    parts: list[Part] = [Table(caption, [*header, "epochs", "runs", "time"], rows)]
    whole = [group for group in found if group.whole]
    if whole:
        drawn, panels = report.figure(panels=len(whole), height=3.4, width=4.0)
        for axes, group in zip(panels, whole, strict=True):
            _curve(axes, group)
        words = (
            "Median (thick) and quartiles (shaded) of sampled networks, ten of them (thin), the data (dots)"
        )
        parts.append(report.picture(drawn, f"{words} and the curve without noise (dashed); seed 0."))
    return parts


def _curve(axes: Axes, group: Group) -> None:
    record = group.whole[0]
    shown, config = record["metrics"]["shown"], record["config"]
    at = torch.linspace(*curve.SHOWN, len(shown["median"]))
    points = curve.points(config["points"], seed=2 * record["seed"])
    axes.plot(points.x[:, 0], points.y[:, 0], ".", color=_GREY, markersize=2.5, alpha=0.5)
    axes.plot(at, curve.curve(at), "--", color=_GREY, linewidth=1)
    for network in shown["networks"]:
        axes.plot(at, network, color=COLOURS[0], linewidth=0.6, alpha=0.35)
    axes.fill_between(at.numpy(), shown["low"], shown["high"], color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(at, shown["median"], color=COLOURS[0], linewidth=2)
    axes.set(title=group.name, xlabel="x", ylim=(-1.2, 1.6))


def regret(found: Sequence[Group]) -> list[Part]:
    """Mushrooms: cumulative regret of every agent."""
    rows = [
        [
            group.title,
            group.spread(partial(_value, "regret"), 0, 1.0),
            group.spread(partial(_value, "regret_per_mushroom"), 3, 1.0),
            group.spread(_late, 3, 1.0),
            str(group.whole[0]["n"]) if group.whole else "–",
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "regret", "a mushroom", "a mushroom, last tenth", "mushrooms", "runs", "time"]
    parts: list[Part] = [Table("What an oracle gets more, in all", header, rows)]
    drawn, (axes,) = report.figure()
    for slot, group in enumerate(group for group in found if group.whole):
        middle, spread = columns([record["metrics"]["curve"] for record in group.whole])
        step = group.whole[0]["config"]["interactions"]
        at = [step * (number + 1) for number in range(len(middle))]
        _line(axes, at, middle, spread, COLOURS[slot], group.name)
    axes.set(xlabel="mushrooms", ylabel="cumulative regret")
    axes.legend(loc="upper left", frameon=False)
    return [*parts, report.picture(drawn, "Cumulative regret; bands show ± one sd.")]


def _late(record: Record) -> float:
    """Regret per mushroom in the last tenth."""
    regrets = [0.0, *record["metrics"]["curve"]]
    epochs = max(1, (len(regrets) - 1) // 10)
    return float((regrets[-1] - regrets[-1 - epochs]) / (epochs * record["config"]["interactions"]))


def networks(found: Sequence[Group]) -> list[Part]:
    """Scores by the number of networks, and predictions for rotated images."""
    rows = [
        [
            group.title,
            str(count),
            group.spread(partial(_by_networks, count, "accuracy")),
            group.spread(partial(_by_networks, count, "nll"), 4, 1.0),
            group.spread(partial(_by_networks, count, "ece"), 4, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
        for count in (_counts(group.whole[0]) if group.whole else ())
    ]
    header = ["setting", "networks", "accuracy, %", "NLL", "ECE", "epochs", "runs", "time"]
    caption = "Test set, by averages over so many networks; each a mean over all groups that there are"
    parts: list[Part] = [Table(caption, header, rows)]
    for setting in settings(found):
        own = within(found, setting)
        if own:
            parts += [_growing(own, setting), _turning(own, setting), _digit(own, setting)]
    return parts


def _growing(own: Sequence[Group], setting: str) -> Picture:
    drawn, panels = report.figure(panels=2)
    for axes, key, label in zip(panels, ("accuracy", "nll"), ("test accuracy", "NLL"), strict=True):
        for slot, group in enumerate(own):
            counts = _counts(group.whole[0])
            runs = [[each[key] for each in record["metrics"]["by_networks"]] for record in group.whole]
            middle, spread = columns(runs)
            if len(counts) == 1:
                axes.axhline(middle[0], color=COLOURS[slot], linestyle="--", label=group.name)
            else:
                _line(axes, counts, middle, spread, COLOURS[slot], group.name)
        axes.set(xscale="log", xlabel="networks", ylabel=label)
        axes.set_xticks(doubt.COUNTS, [str(count) for count in doubt.COUNTS])
        axes.minorticks_off()
    panels[0].legend(loc="best", frameon=False)
    return report.picture(drawn, f"{setting}: averages over ever more networks; dashed is a plain net.")


def _turning(own: Sequence[Group], setting: str) -> Picture:
    words = {"accuracy": "accuracy", "entropy": "mean entropy", "nll": "NLL"}
    drawn, panels = report.figure(panels=len(words))
    for axes, (key, label) in zip(panels, words.items(), strict=True):
        for slot, group in enumerate(own):
            runs = [[each[key] for each in record["metrics"]["turned"]] for record in group.whole]
            _line(axes, doubt.ANGLES, *columns(runs), COLOURS[slot], group.name)
        axes.set(xlabel="turned by, degrees", ylabel=label)
    panels[0].legend(loc="best", frameon=False)
    return report.picture(drawn, f"{setting}: the first test images, turned; bands show ± one sd.")


def _digit(own: Sequence[Group], setting: str) -> Picture:
    """One image: the probability of each class by the angle."""
    drawn, panels = report.figure(panels=len(own), height=3.4, width=4.0)
    for axes, group in zip(panels, own, strict=True):
        angles = group.whole[0]["metrics"]["digit"]
        means = np.array([each["mean"] for each in angles])
        shown = [number for number in range(means.shape[1]) if means[:, number].max() > _SHARE]
        for slot, number in enumerate(shown):
            low, high = (np.array([each[key][number] for each in angles]) for key in ("low", "high"))
            colour = COLOURS[slot % len(COLOURS)]
            style = "-" if slot < len(COLOURS) else ":"
            axes.plot(doubt.ANGLES, means[:, number], style, color=colour, label=str(number))
            axes.fill_between(doubt.ANGLES, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=group.name, xlabel="turned by, degrees", ylabel="probability", ylim=(0, 1.02))
        axes.legend(loc="upper right", frameon=False, ncols=2, title="class", fontsize=8)
    words = "the first test image of its class, turned, and the probability of every class"
    return report.picture(drawn, f"{setting}: {words}; bands are quartiles over networks, seed 0.")


def _line(
    axes: Axes, at: Sequence[float], middle: Sequence[float], spread: Sequence[float], colour: str, name: str
) -> None:
    values, margin = np.asarray(middle), np.asarray(spread)
    axes.plot(at, values, color=colour, marker="o", markersize=3, label=name)
    axes.fill_between(at, values - margin, values + margin, color=colour, alpha=0.18, linewidth=0)


def _value(key: str, record: Record) -> float:
    return float(record["metrics"][key])


def _counts(record: Record) -> list[int]:
    return [each["networks"] for each in record["metrics"]["by_networks"]]


def _by_networks(count: int, key: str, record: Record) -> float:
    return float(next(each[key] for each in record["metrics"]["by_networks"] if each["networks"] == count))
