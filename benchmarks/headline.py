"""The README's table of speed, made from the committed records.

    posterity bench headline           # prints it
    posterity bench headline --write   # puts it into the README, between its two marks

One line for every ratio that has a target, of the precision and layout in which ours is the fastest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from posterity_lab.bench import FOLDER, RESULTS

README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- from benchmarks/results: begin -->\n", "<!-- from benchmarks/results: end -->\n"


def fastest(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every case the row in which ours is the fastest, among those with targets."""
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


def table(folder: Path = RESULTS) -> str:
    """Markdown of all complete records, and where they come from."""
    lines, sources = ["| what | where | | beside | ratio |", "|---|---|---|---|---|"], []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        rows = fastest(record)
        if not rows or not record["complete"]:
            continue
        unit = record["unit"].split()[0]
        for row in rows:
            for ratio in row["ratios"]:
                if ratio["met"] is not None:
                    of, to = (
                        f"{name} {number(row['columns'][name]['value'])} {unit}"
                        for name in (ratio["of"], ratio["to"])
                    )
                    where = f"{hardware(record)}, {row['setting']}"
                    lines.append(f"| {row['case']} | {where} | {of} | {to} | {ratio['value']:.3g} |")
        place = record["environment"]
        cells = [cell for row in rows for cell in row["columns"].values()]
        rounds = min(cell["rounds"] for cell in cells)
        commit, dirty, _ = (place["commit"] or "unknown").partition("-dirty")
        sources.append(
            f"- [{path.name}](benchmarks/results/{path.name}): {record['statistic']} of {rounds} rounds, "
            f"torch {place['torch']}, commit {commit[:7]}{' with changes' if dirty else ''}"
        )
    return "\n".join([*lines, "", *sources]) + "\n"


def written(readme: str, content: str) -> str:
    """The README with this table between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no place for the table: add the lines {BEGIN!r} and {END!r}")
    return before + BEGIN + content + END + after


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--write", action="store_true", help="put it into the README")
    if options.parse_args().write:
        README.write_text(written(README.read_text(), table()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
