"""The demo: what a posterior over the weights is good for, on scikit-learn's digits, in about a minute.

1. Tasks learned one after another by BGD, SGD and Adam, none told of the switches, each tuned on images held
   out of the training set.
2. On plain digits: weights pruned by signal-to-noise ratio, against pruning by magnitude.
3. There too: uncertainty on inputs that are no digits, against the entropy of a plain net.
4. The posterior saved, loaded, and checked to predict the same.

Everything is a list of independent runs, spread over two processes with one thread each: nets this small
gain nothing from more threads.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from posterity_lab import record
from posterity_lab.demo.page import show, write
from posterity_lab.demo.runs import (
    ENTROPY_BINS,
    FIXED,
    FRACTIONS,
    GRIDS,
    PLAIN,
    QUICK,
    STD_BINS,
    Results,
    Sizes,
    plain_run,
    stream_run,
)
from posterity_lab.workers import pool


def run(out: Path, quick: bool = False) -> None:
    """Run the demo, show its tables, and leave its files in ``out``.

    Args:
        out: Folder for ``report.html``, ``results.json``, ``demo.png`` and ``posterior.safetensors``.
        quick: The same with the smallest sizes, in seconds; the numbers then mean nothing.

    Example:
        >>> run(Path("demo"))  # doctest: +SKIP
    """
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if quick else Sizes()
    console = Console()
    results = _compute(sizes, out, console)
    results["seconds"] = round(time.perf_counter() - start, 1)
    results = record.write(out / "results.json", results)
    write(results, out)
    show(results, console)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} seconds")


def _compute(sizes: Sizes, out: Path, console: Console) -> Results:
    made = record.Provenance("cpu", jobs=sizes.workers, seeds=sizes.seeds)
    tuning = {
        (method, value): partial(stream_run, sizes, method, value, sizes.tuning_seed, validation=True)
        for method, (_, values) in GRIDS.items()
        for value in values
    }
    plain = {seed: partial(plain_run, sizes, seed, out) for seed in sizes.seeds}
    finals = len(GRIDS) * len(sizes.seeds)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _pool(sizes.workers) as workers, Progress(*columns, console=console) as bar:
        task = bar.add_task("tuning", total=len(tuning) + len(plain) + finals)
        advance = partial(bar.update, task, advance=1)
        # The long runs first, so that no process waits for the other at the end.
        done = run_all({**plain, **tuning}, workers, advance)
        grids = {
            method: choose(method, {value: done[method, value] for value in values})
            for method, (_, values) in GRIDS.items()
        }
        bar.update(task, description="learning")
        learning = {
            (method, seed): partial(stream_run, sizes, method, grids[method]["chosen"], seed)
            for method in GRIDS
            for seed in sizes.seeds
        }
        streams = run_all(learning, workers, advance)
    return {
        "config": {**asdict(sizes), "fixed": FIXED, "plain": PLAIN},
        "grids": grids,
        "stream": {method: _stream([streams[method, seed] for seed in sizes.seeds]) for method in GRIDS},
        **_plain([done[seed] for seed in sizes.seeds]),
        "environment": made.content(),
    }


def run_all(
    jobs: Mapping[Any, Callable[[], Results]], pool: Executor | None, advance: Callable[[], None]
) -> dict[Any, Results]:
    """The result of every job, by its key; those that the pool cannot run are run in this process.

    Example:
        >>> run_all({"a": dict}, pool=None, advance=lambda: None)
        {'a': {}}
    """
    done: dict[Any, Results] = {}
    if pool is not None:
        try:
            futures = {pool.submit(job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                advance()
        except BrokenProcessPool:
            warnings.warn("worker processes cannot be used here; going on in this one", stacklevel=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for key in jobs.keys() - done.keys():
            done[key] = jobs[key]()
            advance()
    finally:
        torch.set_num_threads(threads)
    return done


def _pool(workers: int) -> AbstractContextManager[Executor | None]:
    if workers == 1:
        return nullcontext()
    return pool(workers, partial(torch.set_num_threads, 1))


def choose(method: str, tried: Mapping[float, Results]) -> Results:
    """The grid of a method as it came out, and the value with the best average accuracy at the end."""
    scores = {value: fmean(outcome["accuracy"][-1]) for value, outcome in tried.items()}
    whole = [value for value, outcome in tried.items() if not outcome["diverged"]] or list(tried)
    return {
        "parameter": GRIDS[method][0],
        "values": list(tried),
        "accuracy": list(scores.values()),
        "diverged": [outcome["diverged"] for outcome in tried.values()],
        "chosen": max(whole, key=scores.__getitem__),
    }


def _stream(outcomes: Sequence[Results]) -> Results:
    """One method's final runs: per task at the end, and on average over the tasks seen as they came."""
    final = [outcome["accuracy"][-1] for outcome in outcomes]
    seen = [
        [fmean(row[: number + 1]) for number, row in enumerate(outcome["accuracy"])] for outcome in outcomes
    ]
    return {
        "accuracy": [outcome["accuracy"] for outcome in outcomes],
        "final": [_spread(column) for column in zip(*final, strict=True)],
        "average": _spread([fmean(row) for row in final]),
        "seen": [_spread(column) for column in zip(*seen, strict=True)],
        "diverged": sum(outcome["diverged"] for outcome in outcomes),
        "ms_per_step": fmean(outcome["ms_per_step"] for outcome in outcomes),
    }


def _plain(outcomes: Sequence[Results]) -> Results:
    """The runs on plain digits: numbers as mean and sd over the seeds, histograms added up."""
    first = outcomes[0]
    return {
        "pruning": {
            "fractions": list(FRACTIONS),
            **{
                method: [
                    _spread(column) for column in zip(*(o["pruning"][method] for o in outcomes), strict=True)
                ]
                for method in first["pruning"]
            },
        },
        "ood": {
            score: {
                name: {key: _spread([o["ood"][score][name][key] for o in outcomes]) for key in values}
                for name, values in sets.items()
            }
            for score, sets in first["ood"].items()
        },
        "entropy": {
            "edges": ENTROPY_BINS.tolist(),
            **{
                method: {name: _added([o["entropy"][method][name] for o in outcomes]) for name in sets}
                for method, sets in first["entropy"].items()
            },
        },
        "std": {"edges": STD_BINS.tolist(), "counts": _added([o["std"] for o in outcomes])},
        "plain_diverged": sum(outcome["diverged"] for outcome in outcomes),
        "reloaded": first["reloaded"],
        "reloaded_accuracy": first["reloaded_accuracy"],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "sd": stdev(values)}


def _added(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]
