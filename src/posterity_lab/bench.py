"""Benchmarks: finding and running their scripts, measuring columns side by side, keeping the record.

The scripts are in the folder ``benchmarks`` of a checkout, one per question. All columns of a row are
measured in one run on one machine, round by round in turn, so that a drifting clock meets all of them alike.
The record is written after every row: a run that is killed leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import torch

from posterity_lab.hints import hint
from posterity_lab.record import Provenance, fits, look, write

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = FOLDER / "results"

# Steps before anything is timed: they compile, capture and fill caches.
_WARM_UP = 3


def names() -> list[str]:
    """The benchmarks that there are: every script of the folder that can be run.

    Example:
        >>> "train_step" in names()
        True
    """
    scripts = [
        path for path in sorted(FOLDER.glob("*.py")) if 'if __name__ == "__main__"' in path.read_text()
    ]
    if not scripts:
        raise ValueError(f"there are no benchmarks in {FOLDER}: run them in a checkout of the source")
    return [path.stem for path in scripts]


def run(name: str, options: Sequence[str]) -> None:
    """Run a benchmark's script as Python would, with these options.

    Args:
        name: One of :func:`names`.
        options: As on the script's command line.

    Example:
        >>> run("train_step", ["--device", "cpu", "--widths", "400"])  # doctest: +SKIP
    """
    known = names()
    if name not in known:
        raise ValueError(f"there is no benchmark {name!r}{hint(name, known)}")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(FOLDER / f"{name}.py"), *options]
    sys.path.insert(0, str(FOLDER))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Example:
        >>> parser("How long?").parse_args(["--rounds", "3"]).rounds
        3
    """
    options = argparse.ArgumentParser(description=description.partition("\n")[0])
    options.add_argument("--device", type=_device, choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--rounds", type=positive, default=5, help="rounds; their median is reported")
    options.add_argument("--round-seconds", type=float, default=0.2, help="how long one column's round is")
    options.add_argument("--row-seconds", type=float, default=20.0, help="after this, no third round begins")
    options.add_argument(
        "--out", type=Path, help="the record; benchmarks/results/NAME-HARDWARE.json if not given"
    )
    return options


def _device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this machine has no CUDA GPU: choose cpu")
    return text


def positive(text: str) -> int:
    """An option's value that must be a whole number of at least 1.

    Example:
        >>> positive("12")
        12
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


@dataclass(frozen=True)
class Column:
    """One thing to measure.

    Attributes:
        step: What is timed.
        setting: Its precision, and its layout where images have one.
        steps: Steps in a round; as many as fill it where not given.
        warm_up: What to run before, in place of some steps.

    Example:
        >>> Column(lambda: None, "fp32").steps is None
        True
    """

    step: Callable[[], object]
    setting: str
    steps: int | None = None
    warm_up: Callable[[], object] | None = None


@dataclass(frozen=True)
class Ratio:
    """What is compared: one column over another, with a target where there is one.

    Example:
        >>> times = {"loop": {"value": 3}, "ours": {"value": 1}}
        >>> Ratio("loop", "ours", at_least=2).of_columns(times)["met"]
        True
    """

    of: str
    to: str
    at_least: float | None = None
    at_most: float | None = None

    def of_columns(self, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The ratio's value, and whether the target is met (None where there is none)."""
        value = columns[self.of]["value"] / columns[self.to]["value"]
        met = None
        if self.at_least is not None or self.at_most is not None:
            met = (self.at_least or 0.0) <= value <= (self.at_most or float("inf"))
        return {**asdict(self), "value": value, "met": met}


def measure(
    columns: Mapping[str, Column], device: str, rounds: int, round_seconds: float, row_seconds: float
) -> dict[str, dict[str, Any]]:
    """Milliseconds per step of every column: median, lowest and highest over rounds taken in turn.

    Args:
        columns: What to measure, by name.
        device: ``"cuda"`` waits for the GPU before and after every round.
        rounds: At most so many; two at least (one where one is asked for).
        round_seconds: Length of a round; it has one step at least.
        row_seconds: No third round begins after this time.

    Example:
        >>> times = measure({"sum": Column(lambda: sum(range(9)), "fp32")}, "cpu", 3, 1e-4, 1.0)
        >>> times["sum"]["lowest"] <= times["sum"]["value"]
        True
    """
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(step: Callable[[], object], steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return (time.perf_counter() - start) / steps

    counts = {}
    for name, column in columns.items():
        for _ in range(_WARM_UP):
            (column.warm_up or column.step)()
        counts[name] = column.steps or max(1, round(round_seconds / max(seconds(column.step, 2), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in columns}
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - start > row_seconds:
            break
        for name, column in columns.items():
            times[name].append(1000.0 * seconds(column.step, counts[name]))
    return {
        name: {
            "value": median(taken),
            "lowest": min(taken),
            "highest": max(taken),
            "rounds": len(taken),
            "steps": counts[name],
            "setting": columns[name].setting,
        }
        for name, taken in times.items()
    }


@final
class Record:
    """What a benchmark found: written to a file after every row, shown as a table at the end.

    Args:
        name: The benchmark's.
        options: From :func:`parser`: everything but ``out`` becomes the record's ``config``.
        unit: Of every column's numbers.
        ours: The column that ratios in the table are taken to.
        statistic: What a column's number is of its rounds.

    Example:
        >>> Record("train_step", parser("").parse_args([]), "ms per step", "compile_step").rows
        []
    """

    def __init__(
        self, name: str, options: argparse.Namespace, unit: str, ours: str, statistic: str = "median"
    ) -> None:
        self.name, self.unit, self.ours, self.statistic = name, unit, ours, statistic
        self.config = {
            key: value if isinstance(value, int | float | list | None) else str(value)
            for key, value in vars(options).items()
            if key != "out"
        }
        self.path: Path = options.out or RESULTS / f"{name}-{_hardware(options.device)}.json"
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(
                f"the record cannot be written to {self.path}: choose a file in a folder that exists"
            )
        self.rows: list[dict[str, Any]] = []
        self._open = True
        self.notes: list[str] = []
        seeds = getattr(options, "seeds", [options.seed] if "seed" in options else [])
        self._made = Provenance(options.device, jobs=getattr(options, "jobs", 1), seeds=seeds)

    def resume(self, *same: str) -> None:
        """Keep the rows that the file has already: a run that was stopped goes on.

        Args:
            same: Options that must be as they were.
        """
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if not fits(found):
            raise ValueError(
                f"{self.path} was changed and does not fit its digest: choose another file, or delete it"
            )
        for name in same:
            before, now = (config.get(name) for config in (found["config"], self.config))
            if before != now:
                raise ValueError(
                    f"{self.path} was made with {name} {before}, not {now}: choose another file, or delete it"
                )
        self.rows, self._open = found["rows"], not found["complete"]

    def note(self, sentence: str) -> None:
        """Say something that a reader of the numbers must know, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            print(sentence, flush=True)

    def look(self, row: str, seed: int, config: Mapping[str, Any]) -> dict[str, int]:
        """Count that a row is evaluated on test data; see `posterity_lab.record.look`."""
        return look(self.path.parent, f"{self.name}/{row}", seed, config)

    def add(
        self,
        case: str,
        setting: str,
        columns: Mapping[str, Mapping[str, Any]],
        ratios: Sequence[Ratio] = (),
        **more: Any,
    ) -> None:
        """Take a row: print it, and write the record with it.

        Args:
            case: What was measured, such as ``"MLP 2x400"``.
            setting: Precision and layout that the row is about.
            columns: What :func:`measure` gave.
            ratios: What is compared; one whose column was not measured is left out.
            more: What else belongs to the row, as JSON takes it.
        """
        found = [ratio.of_columns(columns) for ratio in ratios if {ratio.of, ratio.to} <= set(columns)]
        row = {"case": case, "setting": setting, **more, "columns": dict(columns), "ratios": found}
        self.rows.append(row)
        self._open = True
        self._write(complete=False)
        cells = [f"{name} {column['value']:.4g}" for name, column in columns.items()]
        cells += [
            f"{each['of']} / {each['to']} {each['value']:.3g} {_verdict(each)}".rstrip() for each in found
        ]
        print(f"{case}, {setting} [{self.unit}]: {'; '.join(cells)}", flush=True)

    def close(self, table: str | None = None) -> None:
        """All rows are there: mark the record complete, and show it, or a table in place of all columns.

        A complete record that was resumed and got no row stays as its runs have left it.
        """
        if self._open:
            self._write(complete=True)
        if table is None:
            show(self.content(complete=True))
        else:
            print(table)
        print(f"record: {self.path}")

    def content(self, complete: bool) -> dict[str, Any]:
        """The record as JSON takes it."""
        return {
            "benchmark": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "statistic": self.statistic,
            "complete": complete,
            "config": self.config,
            "rows": self.rows,
            "notes": self.notes,
            "environment": self._made.content(),
        }

    def _write(self, complete: bool) -> None:
        write(self.path, self.content(complete))


def show(record: Mapping[str, Any]) -> None:
    """Print a record: every column with its ratio to ours, then every target.

    Example:
        >>> show({"benchmark": "none", "unit": "ms", "ours": "a", "rows": []})  # doctest: +SKIP
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("a table needs rich: pip install 'posterity[lab]'; the numbers are above and in the record")
        return
    # Not the terminal's width: a log, which has none, would be cut to 80 signs.
    console = Console(width=140, highlight=False) if not sys.stdout.isatty() else Console(highlight=False)
    table = Table(
        "case",
        "column",
        "setting",
        record["unit"],
        "lowest to highest",
        "rounds x steps",
        title=record["benchmark"],
    )
    table.add_column(f"ratio to {record['ours']}")
    targets = Table("case", "setting", "ratio", "value", "target", title="ratios and targets")
    for row in record["rows"]:
        ours = row["columns"].get(record["ours"], {}).get("value")
        for name, cell in row["columns"].items():
            table.add_row(
                row["case"],
                name,
                cell["setting"],
                f"{cell['value']:.4g}",
                f"{cell['lowest']:.4g} to {cell['highest']:.4g}" if cell["rounds"] else "",
                f"{cell['rounds']} x {cell['steps']}" if cell["rounds"] else "",
                f"{cell['value'] / ours:.2f}" if ours else "",
            )
        table.add_section()
        for ratio in row["ratios"]:
            what = f"{ratio['of']} / {ratio['to']}"
            targets.add_row(row["case"], row["setting"], what, f"{ratio['value']:.2f}", _verdict(ratio))
    for each in (table, targets):
        if each.rows:
            console.print(each)


def _verdict(ratio: Mapping[str, Any]) -> str:
    """A ratio's target and whether it is met; empty where there is none."""
    bounds = [("≥", ratio["at_least"]), ("≤", ratio["at_most"])]
    aim = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    return f"({aim}: {'met' if ratio['met'] else 'missed'})" if aim else ""


def _hardware(device: str) -> str:
    """The GPU's model, or cpu: records of different hardware do not overwrite each other."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
