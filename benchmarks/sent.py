"""Tables of the data that processes send in a step, and of IVON's accuracy if it sends less, from records."""

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


# A model of ResNet-50 on ImageNet, 32 images a GPU as in VOGN's paper, from ResNet-18 on 128 of CIFAR-10.
# Parameters; multiply-adds of a forward pass by image, in 1e9: He et al. 2016, Table 1, and counted.
RESNET50 = 25_557_032
OPERATIONS = 32 * 3.8 / (128 * 0.555)


def record(folder: Path, name: str, device: str = "cpu") -> dict[str, Any]:
    """A complete record."""
    found: dict[str, Any] = json.loads((folder / f"{name}-{device}.json").read_text())
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


def captured(folder: Path, name: str) -> tuple[float, float]:
    """Milliseconds of a rule's captured step of ResNet-18 on one H200, and of Adam's beside it."""
    rows = record(folder, name, "h200")["rows"]
    (row,) = [row for row in rows if row["case"].endswith("K = 1, resnet18, one graph")]
    ours, adam = (row["columns"][column]["value"] for column in ("compile_step", "Adam in a CUDA graph"))
    return ours, adam


def projected(folder: Path = RESULTS) -> str:
    """A model of ``compile_step`` on 128 GPUs, in multiples of Adam's step.

    Ours sends when the backward pass is done. Adam's all-reduce runs beside it, and is hidden as far as the
    step is long, or not at all: these are the ends of each span.
    """
    found = record(folder, "scale")
    (row,) = [row for row in found["rows"] if row["case"] == "resnet18, 128 processes"]
    links, lines = row["model_ms"]["Adam, ddp"], []
    nets = {"ResNet-18": (1.0, 1.0), "ResNet-50": (OPERATIONS, RESNET50 / row["parameters"])}
    for net, (longer, larger) in nets.items():
        for rule in ("ivon", "ivon-10", "vogn"):
            ours, adam = (longer * ms for ms in captured(folder, f"{rule.split('-')[0]}_step"))
            spans = []
            for link, gradient in links.items():
                total = ours + larger * row["model_ms"][f"{rule}, mesh"][link]
                adams = adam + larger * gradient, max(adam, larger * gradient)
                spans.append(_span({f"{total / each:.2f}" for each in adams}))
            lines.append([net, RULES[rule], *spans])
    return table(["net", "rule", *links], lines)


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
