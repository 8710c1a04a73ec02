"""Tables of what processes send in a step, and of what IVON loses if it sends less, from their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import table

from posterity_lab.bench import RESULTS

WAYS = {"ddp": "under DistributedDataParallel", "mesh": "with a mesh"}
RULES = {
    "Adam": "Adam",
    "ivon": "IVON",
    "ivon-10": "IVON, `second_every=10`",
    "vogn": "VOGN",
    "noisy-kfac": "Noisy K-FAC, step with factors",
}
ESTIMATES = {
    "every step": "every step",
    "one of 10": "one of 10",
    "one of 100": "one of 100",
    "bfloat16": "every step, sum in bfloat16",
    "another seed": "every step, another seed of the noise",
}


def record(folder: Path, name: str) -> dict[str, Any]:
    """A complete record."""
    found: dict[str, Any] = json.loads((folder / f"{name}-cpu.json").read_text())
    if not found["complete"]:
        raise ValueError(f"the record of {name} is not complete: run posterity bench {name} again")
    return found


def cell(rows: list[dict[str, Any]], name: str) -> str:
    """Megabytes, as a multiple of Adam's, and all-reduces, in all worlds."""
    if name not in rows[0]["columns"]:
        return "–"
    ratios = {f"{row['columns'][name]['value'] / row['columns']['Adam, ddp']['value']:.2f}" for row in rows}
    megabytes = {f"{row['columns'][name]['value']:.1f}" for row in rows}
    counts = {f"{row['collectives'][name]:g}" for row in rows}
    return f"{_span(ratios)} ({_span(megabytes)} MB, {_span(counts)} all-reduces)"


def _span(found: set[str]) -> str:
    """One text if all worlds have the same."""
    return " to ".join(sorted(found, key=float)[:: max(len(found) - 1, 1)])


def sent(folder: Path = RESULTS) -> str:
    """What each rule sends."""
    rows = record(folder, "scale")["rows"]
    lines = [
        [called, *(cell(rows, f"{rule}, {way}") for way in WAYS)]
        for rule, called in RULES.items()
        if f"{rule}, ddp" in rows[0]["columns"]
    ]
    return table(["", *WAYS.values()], lines)


def second_sum(folder: Path = RESULTS) -> str:
    """NLL, error and stds, by how the Hessian is estimated."""
    rows, lines = record(folder, "second_every")["rows"], []
    for beta2 in dict.fromkeys(row["beta2"] for row in rows):
        own = {row["metric"]: row for row in rows if row["beta2"] == beta2}
        for name, called in ESTIMATES.items():
            nll, error = (own[metric]["columns"][name] for metric in ("NLL", "error in %"))
            apart = own["NLL"]["std_difference"][name]
            lines.append(
                [
                    f"{beta2:g}",
                    called,
                    f"{nll['value']:.3f} ({nll['lowest']:.3f} to {nll['highest']:.3f})",
                    f"{error['value']:.1f} ({error['lowest']:.1f} to {error['highest']:.1f})",
                    f"{apart:.0e}" if apart else "–",
                ]
            )
    return table(["β2", "estimate of the Hessian", "NLL", "error, %", "stds differ by"], lines)
