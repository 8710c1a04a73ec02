"""Views of the experiments on Bayesian incremental learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.ticker import MaxNLocator

from posterity_lab import report
from posterity_lab.report import COLOURS, Part, Picture, Table
from posterity_lab.reproduce.groups import Group, columns, settings, within
from posterity_lab.reproduce.records import Record

_SCORES = {"accuracy": "test accuracy", "nll": "NLL", "ece": "ECE"}
_TUNED = {"kl_factor": "KL ×", "prior_std": "prior σ", "lr": "lr"}


def parts(found: Sequence[Group]) -> list[Part]:
    """Accuracy, NLL and ECE after the last part, and after each of them."""
    rows = [
        [
            group.title,
            _settings(group),
            group.spread(partial(_last, "accuracy")),
            group.spread(partial(_last, "nll"), 3, 1.0),
            group.spread(partial(_last, "ece"), 3, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "with", "accuracy, %", "NLL", "ECE", "epochs a part", "runs", "time"]
    caption = "On the test set after the last part; joint training has all parts at once"
    return [Table(caption, header, rows), *map(partial(_curves, found), settings(found))]


def _last(key: str, record: Record) -> float:
    return float(record["metrics"][key])


def _settings(group: Group) -> str:
    if not group.whole:
        return "–"
    config = group.whole[0]["config"]
    known = {"prior_std": config.get("prior") == "grid" and group.method == "ffg"}
    return ", ".join(
        f"{name} {config[key]:g}" for key, name in _TUNED.items() if key in config and known.get(key, True)
    )


def _curves(found: Sequence[Group], setting: str) -> Picture:
    drawn, panels = report.figure(panels=len(_SCORES))
    for axes, (key, label) in zip(panels, _SCORES.items(), strict=True):
        for slot, group in enumerate(within(found, setting)):
            runs = [[each[key] for each in record["metrics"]["curve"]] for record in group.whole]
            middle, spread = columns(runs)
            colour = COLOURS[slot % len(COLOURS)]
            if group.method == "joint":
                axes.axhline(middle[-1], color=colour, linestyle="--", label=group.name)
                continue
            at = [each["part"] for each in group.whole[0]["metrics"]["curve"]]
            axes.plot(at, middle, "o-", color=colour, label=group.name)
            low, high = (np.asarray(middle) + sign * np.asarray(spread) for sign in (-1, 1))
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="parts learned so far", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(loc="best", frameon=False)
    caption = (
        f"{setting}: the whole test set after every part; bands show ± one sd, dashed is joint training."
    )
    return report.picture(drawn, caption)
