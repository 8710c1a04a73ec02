"""Runs the units of experiments: finished units are skipped, interrupted ones resume, the remaining time is
shown."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from statistics import fmean
from typing import final

import torch
from rich.console import Console

from posterity_lab.disk import locked
from posterity_lab.hints import hint
from posterity_lab.processes import launched, own_gpu
from posterity_lab.record import Provenance, look, looks
from posterity_lab.reproduce.experiments import EXPERIMENTS, experiment, study
from posterity_lab.reproduce.learners import arithmetic
from posterity_lab.reproduce.records import Record, choice, found, read_all, trials, write
from posterity_lab.reproduce.study import Cell, Experiment, Outcome, Study, Unit
from posterity_lab.run_files import CHECKPOINT
from posterity_lab.workers import pool

RESULTS = Path("results")
QUICK = Path("runs") / "reproduce-quick"
_EVERY = 10.0  # seconds between lines about a unit


def reproduce(
    *names: str,
    out: Path | None = None,
    quick: bool = False,
    device: str | None = None,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
    settings: Sequence[str] = (),
    epochs: int | None = None,
    tune: bool = False,
    jobs: int = 1,
) -> list[Record]:
    """Run the units of experiments that have no record yet, and return all of their records.

    Args:
        names: Names from `EXPERIMENTS`. Several share their jobs, and common units run once.
        out: Folder of the results; ``results`` if not given, ``runs/reproduce-quick`` for quick ones.
        quick: Small nets on scikit-learn's digits, in about a minute; the numbers then mean nothing.
        device: ``"cuda"`` or ``"cpu"``; a GPU if there is one.
        seeds: Seeds to run; by default those of the study.
        methods: Methods to run; by default all.
        settings: Settings to run; by default all.
        epochs: Epochs in place of the paper's; they become part of the record.
        tune: Run the trials on held-out data instead of the experiment.
        jobs: Units at a time, each in its own process. Small nets leave most of a GPU idle; NVIDIA's
            MPS lets processes share it.

    Raises:
        ValueError: There is no such experiment, method or setting, or there is a record of another config.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = reproduce("bgd-theory", out=Path(folder), quick=True)
        >>> records[0]["metrics"]["convex_falls"]
        True
    """
    if not names:
        raise ValueError(f"name an experiment, such as {next(iter(EXPERIMENTS))!r}")
    asked = [experiment(name) for name in names]
    folder = out or (QUICK if quick else RESULTS)
    place = _device(device)
    studies = {each.study.name: each.study for each in asked}
    cells = _cells(asked, quick, methods, settings)
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be a whole number of at least 1, not {epochs}")
    if jobs < 1:
        raise ValueError(f"jobs must be a whole number of at least 1, not {jobs}")
    units = [
        unit
        for study in studies.values()
        for unit in plan(study, cells[study.name], folder, _seeds(study, quick, seeds), epochs, tune)
    ]
    units.sort(key=lambda unit: unit.seed)
    done = {unit.full_name: found(unit, folder) for unit in units}  # all are checked before any is run
    told = _Told(Console(stderr=True), [record for record in done.values() if record is not None], jobs)
    first = launched()[0] == 0
    for number, unit in enumerate(units):
        if done[unit.full_name] is not None and first:
            told.begin(unit, number + 1, len(units), "done before")
    for unit, record in _records(units, done, folder, place, told, jobs):
        done[unit.full_name] = record
        mine, processes = launched()
        left = [each for number, each in enumerate(units, 1) if number % processes == mine]
        told.end(record, [each for each in left if done[each.full_name] is None])
    return [record for record in done.values() if record is not None]


def _records(
    units: Sequence[Unit],
    done: Mapping[str, Record | None],
    out: Path,
    device: str,
    told: _Told,
    jobs: int,
) -> Iterator[tuple[Unit, Record]]:
    """Run the units that have no record, and yield each with its record when it is done.

    Processes of torchrun take units in turn, by their numbers among all units, since other processes may have
    written records in the meantime.
    """
    mine, processes = launched()
    waiting = [
        (number, unit)
        for number, unit in enumerate(units, 1)
        if done[unit.full_name] is None and number % processes == mine
    ]
    if jobs == 1:
        for number, unit in waiting:
            told.begin(unit, number, len(units), unit.chosen)
            yield unit, _run(study(unit.study), unit, out, device, told, jobs)
        return
    with pool(jobs) as workers:
        running = {
            workers.submit(_work, unit, out, device, number, len(units), jobs): unit
            for number, unit in waiting
        }
        for each in as_completed(running):
            yield running[each], each.result()


def _work(unit: Unit, out: Path, device: str, number: int, total: int, jobs: int) -> Record:
    """Run a unit in its own process."""
    os.environ["TERM"] = "dumb"  # progress bars of several processes would overwrite each other
    told = _Told(Console(stderr=True))
    told.begin(unit, number, total, unit.chosen)
    return _run(study(unit.study), unit, out, device, told, jobs)


def plan(
    study: Study, cells: Sequence[Cell], out: Path, seeds: Sequence[int], epochs: int | None, tune: bool
) -> list[Unit]:
    """The units of some cells, with the values that trials have chosen.

    Seeds are the outer loop: an interrupted run has one seed of everything, not all seeds of one cell.
    """
    changed = {} if epochs is None else {"epochs": epochs}
    if tune:
        own = [cell for cell in cells if cell.tuned == cell.setting]
        return [
            Unit(**{**vars(unit), "config": {**unit.config, **changed}})
            for cell in own
            for unit in trials(study, cell)
        ]
    records = read_all(study, out)
    chosen = [(cell, *choice(cell, records)) for cell in cells]
    return [
        Unit(study.name, cell.setting, cell.method, seed, {**cell.config, **values, **changed}, how)
        for seed in seeds
        for cell, values, how in chosen
    ]


def _run(study: Study, unit: Unit, out: Path, device: str, told: _Told, jobs: int) -> Record:
    cache = unit.cache(out)
    own_gpu(device)
    with locked(cache):
        return _held(study, unit, out, cache, device, told, jobs)


def _held(study: Study, unit: Unit, out: Path, cache: Path, device: str, told: _Told, jobs: int) -> Record:
    """Run a unit whose folder is locked."""
    resumed, diverged = (cache / CHECKPOINT).exists(), None
    made, start = Provenance(device, jobs=jobs, seeds=[unit.seed]), time.perf_counter()
    seen = None
    if study.tested and unit.trial is None:
        row = f"{unit.study}/{unit.setting} {unit.method}"
        # Before the run: an interrupted one may have used test data already.
        seen = looks(out, row, unit.seed) if resumed else look(out, row, unit.seed, unit.config)
    with arithmetic(device):
        try:
            outcome = study.run(unit, device, cache, told.progress)
        except FloatingPointError as error:
            outcome, diverged = Outcome({}, 0), str(error)
        finally:
            gc.collect()  # captured steps hold a whole step's memory, in reference cycles
            if device == "cuda":
                # Otherwise the next unit's settings count as recompilations, which have a limit.
                torch.compiler.reset()
                torch.cuda.empty_cache()
    record = write(
        unit,
        out,
        outcome,
        seconds=time.perf_counter() - start,
        resumed=resumed,
        device=device,
        place=made.content(),
        looks=seen,
        diverged=diverged,
    )
    (cache / CHECKPOINT).unlink(missing_ok=True)  # by far the largest file, and no longer needed
    return record


def _cells(
    asked: Sequence[Experiment], quick: bool, methods: Sequence[str], settings: Sequence[str]
) -> dict[str, list[Cell]]:
    """The wanted cells of each study, each of them once."""
    found = {
        (each.study.name, cell.setting, cell.method): cell for each in asked for cell in each.cells(quick)
    }
    told = " and ".join(each.name for each in asked) + (" has" if len(asked) == 1 else " have")
    for what, names, known in (
        ("method", methods, {method: None for _, _, method in found}),
        ("setting", settings, {setting: None for _, setting, _ in found}),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{told} no {what} {name!r}{hint(name, known)}")
    chosen: dict[str, list[Cell]] = {each.study.name: [] for each in asked}
    for (of, setting, method), cell in found.items():
        if (not methods or method in methods) and (not settings or setting in settings):
            chosen[of].append(cell)
    if not any(chosen.values()):
        raise ValueError(f"{told} none of these methods in these settings: leave one of them out")
    return chosen


def _seeds(study: Study, quick: bool, seeds: Sequence[int]) -> Sequence[int]:
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"seeds must be whole numbers of at least 0, not {min(seeds)}")
    return tuple(dict.fromkeys(seeds)) or (study.seeds[:1] if quick else study.seeds)


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA GPU: choose --device cpu")
    return device


@final
class _Told:
    """Prints the running unit and the remaining time, in lines that suit a log."""

    def __init__(self, console: Console, records: Sequence[Record] = (), jobs: int = 1) -> None:
        self._console, self._jobs = console, jobs
        self._taken: dict[tuple[str, str], list[float]] = {}
        for record in records:
            self._take(record)
        self._start = self._last = time.perf_counter()
        self._first: tuple[float, int] | None = None

    def begin(self, unit: Unit, number: int, total: int, state: str) -> None:
        self._first, self._last = None, time.perf_counter()
        self._print(f"[{number}/{total}] {unit.full_name} ({state})")

    def progress(self, done: int, total: int, what: str) -> None:
        now = time.perf_counter()
        if self._first is None:  # the first epoch includes compilation and capture
            self._first = now, done
        elif now - self._last > _EVERY or done == total:
            begun, before = self._first
            left = (now - begun) / max(done - before, 1) * (total - done)
            self._print(f"  {what} {done}/{total}, about {_span(left)} left of this unit")
            self._last = now

    def end(self, record: Record, rest: Sequence[Unit]) -> None:
        self._take(record)
        known = [fmean(each) for each in self._taken.values()]
        left = sum(fmean(self._taken.get((unit.setting, unit.method), known)) for unit in rest) / self._jobs
        score = record["metrics"].get("accuracy")
        result = record["diverged"] or (f"accuracy {score:.2%}" if score is not None else "done")
        what = f"{record['setting']} {record['method']} seed {record['seed']}: {result}"
        self._print(f"  {what}, {_span(record['seconds'])}; about {_span(left)} left for {len(rest)} units")

    def _take(self, record: Record) -> None:
        self._taken.setdefault((record["setting"], record["method"]), []).append(float(record["seconds"]))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
