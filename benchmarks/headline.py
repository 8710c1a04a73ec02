"""The tables in README.md and docs/ that are made from committed records.

    posterity bench headline           # prints the README's five rows
    posterity bench headline --write   # rewrites every table between its markers, in README.md and docs/

A test compares the files with the records, so a table cannot be out of date.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import by_gradient
import reproduced
from first_try import first_try
from reproduced import (
    EARLIER,
    LATER,
    NAMES,
    RECORDS,
    RULES,
    WIDTHS,
    Record,
    accuracy,
    beside,
    by_method,
    by_setting,
    calibration,
    error,
    load,
    printed,
    pruned,
    together,
)
from sent import projected, second_sum, sent
from tables import table

from posterity_lab.bench import FOLDER, RESULTS
from posterity_lab.reproduce.experiments import EXPERIMENTS
from posterity_lab.source import recorded

ROOT = FOLDER.parent


def fastest(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of every case in which ours is the fastest, among those with aims."""
    rows: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        if any(ratio["met"] is not None for ratio in row["ratios"]):
            best = rows.setdefault(row["case"], row)
            if row is not best and ours(record, row) < ours(record, best):
                rows[row["case"]] = row
    return list(rows.values())


def ours(record: dict[str, Any], row: dict[str, Any]) -> float:
    return row["columns"][record["ours"]]["value"]


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def hardware(record: dict[str, Any]) -> str:
    place = record["environment"]
    if record["config"]["device"] == "cuda":
        return place["gpu"].removeprefix("NVIDIA ")
    return f"{place['threads']} CPU cores"


def aim(ratio: dict[str, Any]) -> str:
    """What a ratio should be, and whether it is: "≥ 8", or "≤ 5, missed"; a dash without an aim."""
    if ratio["met"] is None:
        return "–"
    wanted = f"≥ {ratio['at_least']:g}" if ratio["at_least"] is not None else f"≤ {ratio['at_most']:g}"
    return wanted if ratio["met"] else f"{wanted}, missed"


def complete(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The complete records of steps that have aims, with the names of their files.

    Of a case that several records of one benchmark have, on hardware of one name, the latest has the rows.
    """
    found = [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    found = [(name, record) for name, record in found if record["complete"] and fastest(record)]
    latest: dict[tuple[str, str, str], str] = {}
    for name, record in sorted(found, key=lambda each: str(each[1]["environment"].get("ended", ""))):
        latest |= {(record["benchmark"], hardware(record), row["case"]): name for row in record["rows"]}
    kept = []
    for name, record in found:
        place = record["benchmark"], hardware(record)
        rows = [row for row in record["rows"] if latest[*place, row["case"]] == name]
        if rows:
            kept.append((name, {**record, "rows": rows}))
    return kept


def line(record: dict[str, Any], row: dict[str, Any], ratio: dict[str, Any]) -> list[str]:
    """A row of the table: both sides of a ratio, with their times or sizes."""
    unit = record["unit"].split()[0]
    sides = (f"{name} {number(row['columns'][name]['value'])} {unit}" for name in (ratio["of"], ratio["to"]))
    return [
        row["case"],
        f"{hardware(record)}, {row['setting']}",
        *sides,
        f"{ratio['value']:.3g}",
        aim(ratio),
    ]


def speed(folder: Path = RESULTS) -> str:
    """Every ratio of each case, in the setting in which ours is the fastest; then the records."""
    head = ["what", "where", "", "over", "ratio", "aim"]
    lines, sources = [], []
    for name, record in complete(folder):
        rows = fastest(record)
        lines += [line(record, row, ratio) for row in rows for ratio in row["ratios"]]
        place = record["environment"]
        rounds = min(cell["rounds"] for row in rows for cell in row["columns"].values())
        sources.append(
            f"- [{name}](../benchmarks/results/{name}): {record['statistic']} of {rounds} rounds, "
            f"torch {place['torch']}, {recorded(place)}\n"
        )
    return table(head, lines) + "\n" + "".join(sources)


def missed(folder: Path = RESULTS) -> str:
    """Every aim that a complete record misses, in any setting."""
    return table(
        ["what", "where", "", "over", "ratio", "aim"],
        [
            line(record, row, ratio)
            for _, record in complete(folder)
            for row in record["rows"]
            for ratio in row["ratios"]
            if ratio["met"] is False
        ],
    )


# Rows of the README: what and the command, ours, all others, the paper's number, how long and how often.


def continual_row(folder: Path) -> list[str]:
    """The narrowest and the widest net of figure 1: BGD is ahead on one, and behind on the other."""
    settings, found = ("200", "2000"), load(folder, "bgd-permuted")
    cells = by_setting(found, settings, accuracy)
    return [
        "Ten permuted MNIST tasks, 2×200 / 2×2000 units: average accuracy after the last, % "
        "(`posterity reproduce bgd-figure1`)",
        f"BGD (not told of switches) {cells['bgd']}",
        beside(cells, "bgd"),
        "only a plot",
        together(by_method(found, settings)),
    ]


def error_row(folder: Path) -> list[str]:
    """Table 1, by both rules."""
    paper, found, earlier = EXPERIMENTS["bgd-table1"].paper, load(folder, LATER), load(folder, EARLIER)
    cells, by_paper = (by_setting(runs, WIDTHS, error("single")) for runs in (found, earlier))
    others = by_setting(load(folder, "bbb-mnist"), WIDTHS, error("single"))
    names = by_method(found, WIDTHS)
    named = {
        f"BGD, {RULES[EARLIER]}": by_method(earlier, WIDTHS)["BGD"],
        f"BGD, {RULES[LATER]}": names.pop("BGD"),
    }
    return [
        "MNIST, 2×400 / 800 / 1200 units: test error of single networks, % "
        "(`posterity reproduce bgd-table1`)",
        f"BGD, {RULES[EARLIER]} {by_paper['bgd']}; {RULES[LATER]} {cells['bgd']}",
        f"{beside(cells, 'bgd')}; in the runs of the next row {beside(others, '')}",
        " / ".join(paper[width, "bgd"] for width in WIDTHS),
        together({**named, **names}),
    ]


def averaged_row(folder: Path) -> list[str]:
    """Bayes by Backprop's own table."""
    paper, found = EXPERIMENTS["bbb-table1"].paper, load(folder, "bbb-mnist")
    cells = by_setting(found, WIDTHS, error("average"))
    ours = {method: cells.pop(method) for method in ("bbb", "bbb-mixture")}
    return [
        "MNIST, 2×400 / 800 / 1200 units: test error by averaged probabilities, % "
        "(`posterity reproduce bbb-table1`)",
        "; ".join(f"{NAMES[method]} {cell}" for method, cell in ours.items()),
        beside(cells, ""),
        "; ".join(" / ".join(paper[width, method] for width in WIDTHS) for method in ours),
        together(by_method(found, WIDTHS)),
    ]


def pruning_row(folder: Path) -> list[str]:
    """Table 2, by the criterion that was fixed beforehand."""
    settings = ("1200 to prune",)
    found = load(folder, LATER)

    def cell(records: list[Record]) -> str:
        before, after, ratio = pruned(records, 0.95)
        return f"{ratio} ({before} → {after} %)"

    cells = by_setting(found, settings, cell)
    return [
        "MNIST, 2×1200 units: error of single networks after removing 95 % of the weights, over the error "
        "before (`posterity reproduce bgd-table2`)",
        f"BGD {cells['bgd']}",
        beside(cells, "bgd"),
        EXPERIMENTS["bgd-table2"].paper[settings[0], "bgd"],
        together(by_method(found, settings)),
    ]


def calibration_row(folder: Path) -> list[str]:
    """ResNet-18 of the VOGN paper's table."""
    found = load(folder, "vogn-cifar10")
    cells = by_setting(found, ("resnet18",), calibration)
    return [
        "CIFAR-10, ResNet-18: accuracy in %, NLL, ECE (`posterity reproduce vogn-table`)",
        f"VOGN {cells['vogn']}",
        beside(cells, "vogn"),
        printed("resnet18", "vogn"),
        together(by_method(found, ("resnet18",))),
    ]


def step_row(folder: Path) -> list[str]:
    """A BGD step of ResNet-18 beside all that was measured with it."""
    record = json.loads((folder / "conv_step-h200.json").read_text())
    (row,) = (row for row in fastest(record) if "resnet18" in row["case"])
    times = {name: f"{name} {number(cell['value'])}" for name, cell in row["columns"].items()}
    mine = times.pop(record["ours"])
    rounds = min(cell["rounds"] for cell in row["columns"].values())
    return [
        f"{row['case']}, {row['setting']}, batch {record['config']['batch']}: ms per step "
        "(`posterity bench conv_step`)",
        mine,
        "; ".join(times.values()),
        "–",
        f"median of {rounds} rounds, {hardware(record)}",
    ]


def headline(results: Path = RECORDS, steps: Path = RESULTS) -> str:
    """The README's rows: continual learning, errors, pruning, calibration, time of a step."""
    rows = [
        continual_row(results),
        error_row(results),
        averaged_row(results),
        pruning_row(results),
        calibration_row(results),
        step_row(steps),
    ]
    return table(["what, and the command", "ours", "beside it", "paper", "runs"], rows)


# The tables of each document, by the name between their marks.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline},
    "docs/first-try.md": {"first-try": first_try},
    "docs/benchmarks.md": {"speed": speed, "missed": missed},
    "docs/results.md": {
        "table 1": reproduced.table1,
        "pruning": reproduced.pruning,
        "permuted": reproduced.permuted,
        "permuted trials": reproduced.permuted_trials,
        "vogn": reproduced.vogn,
        "sparse": reproduced.sparse,
        "units": reproduced.units,
        "trade-off": by_gradient.trade_off,
        "random labels": reproduced.random_labels,
        "blundell": by_gradient.blundell,
        "pruned runs": by_gradient.pruned_runs,
        "best trials": by_gradient.best_trials,
        "pruning trials": by_gradient.pruning_trials,
        "incremental": by_gradient.incremental,
        "bandit": by_gradient.bandit,
        "networks": by_gradient.networks,
        "five epochs": reproduced.five_epochs,
    },
    "docs/trust.md": {"looks": reproduced.looked_at},
    "docs/distributed.md": {
        "eight parts": reproduced.eight_parts,
        "sent": sent,
        "projected": projected,
        "second sum": second_sum,
    },
}


def written(document: str, name: str, content: str) -> str:
    """The document with this table between its marks."""
    begin, end = f"<!-- from records: {name} -->\n", f"<!-- end: {name} -->\n"
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no place for the table {name!r}: add the lines {begin!r} and {end!r}")
    return before + begin + content + end + after


def renewed(document: str) -> str:
    """A document of ``TABLES`` as the records have it."""
    text = (ROOT / document).read_text()
    for name, content in TABLES[document].items():
        text = written(text, name, content())
    return text


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--write", action="store_true", help="rewrite the tables in README.md and docs/")
    if options.parse_args().write:
        for document in TABLES:
            (ROOT / document).write_text(renewed(document))
    else:
        print(headline(), end="")


if __name__ == "__main__":
    main()
