"""How good is every method with only its required arguments, compared with AdamW and SGD?

    POSTERITY_DATA=... posterity bench first_try --jobs 2
    POSTERITY_DATA=... posterity bench first_try --device cuda --tasks cifar10-resnet20
    posterity bench first_try --tasks digits-mlp digits-cnn --methods adamw ivon --seeds 0

Every task, method and seed runs in its own process. Each result is written to the record at once, and a
second call with the same ``--out`` runs what is missing. Delete the record to run everything again. A step's
time is measured next to AdamW's in the same process. Processes that share a GPU wait for each other, so times
of a record with several ``--jobs`` on a GPU are not shown.

Aim: nothing diverges; every posterior method is within 0.5 points of AdamW's accuracy, or has an RMSE of at
most 1.02 times AdamW's, and has no higher NLL. Means over the seeds that both have. Laplace is compared with
the net that it was fitted to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from tables import spread, table

from posterity_lab.bench import RESULTS, Record, parser, positive
from posterity_lab.record import Provenance

Row = dict[str, Any]
Job = tuple[str, str, int]
# Tables are made where torch's data and nets are not needed, so the names are here, in the tables' order.
TASKS = {
    "digits-mlp": "Digits, MLP 64-100-10",
    "digits-cnn": "Digits, two convolutions with BatchNorm",
    "mnist-mlp": "MNIST, MLP 784-400-400-10",
    "mnist-lenet5": "MNIST, LeNet-5",
    "cifar10-resnet20": "CIFAR-10, ResNet-20 with crops and flips",
    "sequence-transformer": "Synthetic sequences, a transformer of two layers",
    "uci-energy": "UCI energy, MLP of 50 units",
    "uci-wine": "UCI wine quality (red), MLP of 50 units",
    "uci-power": "UCI power plant, MLP of 50 units",
    "permuted-digits": "Five permutations of digits, one after another, MLP 64-100-10",
}
METHODS = {
    "adamw": "AdamW(lr=1e-3)",
    "sgd": "SGD(lr=0.1, momentum=0.9)",
    "bgd": "BGD",
    "bgd-continual": 'BGD(preset="continual")',
    "bong": "BONG",
    "ivon": "IVON",
    "vogn": "VOGN",
    "ogn": "OGN",
    "kfac": "K-FAC",
    "noisy-kfac": "Noisy K-FAC",
    "bbb": "Bayes by Backprop",
    "laplace": "Laplace after AdamW",
}
# Methods that are meant for streams alone; one is given more than required arguments.
ONLY = dict.fromkeys(("bgd-continual", "bong"), "permuted-digits")
POINTS, RATIO = 0.005, 1.02


# One job, in a process of its own.


def work(job: Job, given: argparse.Namespace, out: Path) -> None:
    """Run a trial in this process, and write what it found."""
    from posterity_lab.first_try import trial

    made = Provenance(given.device, seeds=[job[2]])
    row = trial(*job, given.device, given.epochs, given.rounds, given.round_seconds)
    out.write_text(json.dumps({**row, "environment": made.content()}))


def started(job: Job, given: argparse.Namespace) -> Row:
    """A trial's row, from a process for it alone.

    Raises:
        RuntimeError: The process failed, by missing data or too little memory; that is no result.
    """
    task, method, seed = job
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        options = ["--device", given.device, "--rounds", given.rounds, "--round-seconds", given.round_seconds]
        options += [] if given.epochs is None else ["--epochs", given.epochs]
        command = [sys.executable, __file__, "--job", task, method, seed, "--out", out, *options]
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // given.jobs)
        done = subprocess.run(
            [str(each) for each in command],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            check=False,
        )
        if not out.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise RuntimeError(f"{task}, {method}, seed {seed}: {last}")
        row: Row = json.loads(out.read_text())
        return row


# All jobs.


@contextmanager
def bar(total: int) -> Iterator[Callable[[], object]]:
    """A progress bar where rich and a terminal are there; what is given moves it on by one."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        number = progress.add_task("trials", total=total)
        yield lambda: progress.advance(number)


def run(record: Record, jobs: Sequence[Job], given: argparse.Namespace) -> list[str]:
    """Run the jobs, some at once, and add their rows to the record; what could not be run."""
    failed = []
    with ThreadPoolExecutor(given.jobs) as pool, bar(len(jobs)) as advance:
        futures: list[Future[Row]] = [pool.submit(started, job, given) for job in jobs]
        try:
            for future in as_completed(futures):
                try:
                    add(record, future.result())
                except RuntimeError as error:
                    failed.append(str(error))
                    print(f"not run: {error}", flush=True)
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def add(record: Record, row: Row) -> None:
    case = f"{row['task']}, {row['method']}, seed {row['seed']}"
    columns = row.pop("columns")
    # A method's defaults are its config.
    config = {"epochs": row["epochs"], "defaults": (files("posterity") / "presets.toml").read_text()}
    looks = record.look(f"{row['task']}, {row['method']}", row["seed"], config)
    record.add(case, "torch's defaults", columns, looks=looks, **row)
    found = row["failure"] or ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
    print("  " + "; ".join([found, *row["warnings"]]), flush=True)


def job_of(row: Row) -> Job:
    """Which trial a row is of."""
    return row["task"], row["method"], row["seed"]


# The tables.


def rendered(rows: Sequence[Row]) -> str:
    """A table for every task, with every method that was run, and the aim."""
    parts = []
    for task, title in TASKS.items():
        found = [row for row in rows if row["task"] == task]
        if found:
            parts.append(f"### {title}\n\n{described(found)}\n\n{task_table(found)}")
    return "\n".join(parts)


def described(rows: Sequence[Row]) -> str:
    """How long the runs of a task were, and where they ran."""
    row, place = rows[0], rows[0]["environment"]
    where = place["gpu"] if row["device"] == "cuda" else f"{place['threads']} CPU core(s)"
    seeds = len({row["seed"] for row in rows})
    return (
        f"{row['epochs']} epochs, batches of {row['batch_size']}, {row['steps']} steps, {seeds} seed(s), "
        f"{row['test_examples']} test examples, {where}."
    )


def task_table(rows: Sequence[Row]) -> str:
    """Methods in rows."""
    regression = rows[0]["likelihood"] == "regression"
    head = ["method", *(["RMSE", "NLL"] if regression else ["accuracy, %", "NLL", "ECE"])]
    head += [f"at the mean: {'RMSE' if regression else 'accuracy, %'}, NLL", "cost over AdamW", "aim"]
    adamw = {row["seed"]: row for row in rows if row["method"] == "adamw"}
    seeds = len({row["seed"] for row in rows})
    lines = []
    for method, name in METHODS.items():
        found = [row for row in rows if row["method"] == method]
        if found:
            name += f" ({len(found)} of {seeds} seeds)" if len(found) < seeds else ""
            lines.append([name, *cells(found, regression), costs(found), verdict(found, adamw)])
    return table(head, lines)


def cells(rows: Sequence[Row], regression: bool) -> list[str]:
    """The numbers of a method, over the seeds that did not fail."""
    whole = [row for row in rows if row["failure"] is None]
    first = ("rmse", 3, 1.0) if regression else ("accuracy", 1, 100.0)
    wanted = [first, ("nll", 3, 1.0)] + ([] if regression else [("ece", 3, 1.0)])

    def cell(key: str, found: list[Row], name: str, digits: int, scale: float) -> str:
        values = [row[key][name] for row in found]
        if not values:
            return "–"
        # A number that has left all bounds shows how far, without its digits.
        return spread(values, digits, scale) if max(values) < 1000 else f"{mean(values):.1e}"

    means = [row for row in whole if row["at_mean"] is not None]
    at_mean = ", ".join(cell("at_mean", means, *each) for each in wanted[:2]) if means else "–"
    return [*(cell("metrics", whole, *each) for each in wanted), at_mean]


def costs(rows: Sequence[Row]) -> str:
    """Time of training over AdamW's: eager, and on a GPU over that of AdamW in a CUDA graph."""
    found = [row["cost"] for row in rows if row["cost"]]
    names = list(found[0]) if found else []
    return " / ".join(f"{mean(cost[name] for cost in found):.2g}" for name in names) or "–"


def meets(rows: Sequence[Row], adamw: dict[int, Row]) -> list[str]:
    """What a method misses of the aim; nothing where it meets it."""
    missed = [f"seed {row['seed']} {row['failure']}" for row in rows if row["failure"]]
    whole = [row for row in rows if row["failure"] is None and _usable(adamw.get(row["seed"]))]
    if not whole:
        return missed
    mine, other = ({} for _ in range(2))
    for name in whole[0]["metrics"]:
        mine[name] = mean(row["metrics"][name] for row in whole)
        other[name] = mean(_beside(row, adamw)[name] for row in whole)
    if "accuracy" in mine and mine["accuracy"] < other["accuracy"] - POINTS:
        missed.append("accuracy")
    if "rmse" in mine and mine["rmse"] > RATIO * other["rmse"]:
        missed.append("RMSE")
    return [*missed, "NLL"] if mine["nll"] > other["nll"] else missed


def _beside(row: Row, adamw: dict[int, Row]) -> Row:
    """AdamW's metrics; beside Laplace those of the net it was fitted to, since a GPU trains no net twice."""
    found: Row = row["at_mean"] if row["method"] == "laplace" else adamw[row["seed"]]["metrics"]
    return found


def _usable(row: Row | None) -> bool:
    return row is not None and row["failure"] is None


def verdict(rows: Sequence[Row], adamw: dict[int, Row]) -> str:
    """Met, or what was missed, and what the library warned of; only posterior methods have an aim."""
    aim = "–"
    if rows[0]["method"] not in ("adamw", "sgd"):
        missed = meets(rows, adamw)
        aim = "met" if not missed else "missed: " + ", ".join(missed)
    warned = sorted({text for row in rows for text in row["warnings"]})
    return ". ".join([aim, *(f"Warned: {text}" for text in warned)]).replace("|", "\\|")


def first_try(folder: Path = RESULTS) -> str:
    """The tables of this benchmark's records; a task is taken from the record that has most of it."""
    rows: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("first_try-*.json")):
        record = json.loads(path.read_text())
        shared = record["config"]["device"] == "cuda" and record["config"]["jobs"] > 1
        for task in TASKS:
            own = [row | ({"cost": {}} if shared else {}) for row in record["rows"] if row["task"] == task]
            if len(own) > len(rows.get(task, [])):
                rows[task] = own
    return rendered([row for task in rows.values() for row in task]) or "There is no record yet.\n"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epochs", type=positive, help="the task's own if not given")
    options.add_argument("--jobs", type=positive, default=1, help="processes at once")
    options.add_argument("--again", action="store_true", help="also what is in the record, in its place")
    options.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.job is not None:
        task, method, seed = given.job
        work((task, method, int(seed)), given, given.out)
        return
    del given.job
    record = Record("first_try", given, "ms per step", "step")
    try:
        record.resume("device", "epochs")
    except ValueError as error:
        options.error(str(error))
    wanted = [
        (task, method, seed)
        for seed in given.seeds  # one seed of everything comes first
        for task in given.tasks
        for method in given.methods
        if ONLY.get(method, task) == task
    ]
    if given.again:
        record.rows[:] = [row for row in record.rows if job_of(row) not in wanted]
    done = {*map(job_of, record.rows)}
    missing = [job for job in wanted if job not in done]
    print(f"{len(missing)} trials; {len(wanted) - len(missing)} are in {record.path} already", flush=True)
    failed = run(record, missing, given)
    if failed:
        raise SystemExit(f"{len(failed)} trials could not be run; a second call runs them: {failed[0]}")
    record.close(rendered([row for row in record.rows if row["task"] in given.tasks]))


if __name__ == "__main__":
    main()
