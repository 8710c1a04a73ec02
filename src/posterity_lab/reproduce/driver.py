"""Running the units of an experiment: what is done is skipped, what was killed goes on, time left is told."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import final

import torch
from rich.console import Console

from posterity_lab.hints import hint
from posterity_lab.record import environment
from posterity_lab.reproduce.experiments import experiment
from posterity_lab.reproduce.learners import arithmetic
from posterity_lab.reproduce.records import Record, choice, found, read_all, trials, write
from posterity_lab.reproduce.study import Cell, Experiment, Outcome, Study, Unit
from posterity_lab.run_files import CHECKPOINT

RESULTS = Path("results")
QUICK = Path("runs") / "reproduce-quick"
_EVERY = 10.0  # seconds between lines about a unit


def reproduce(
    name: str,
    *,
    out: Path | None = None,
    quick: bool = False,
    device: str | None = None,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
    settings: Sequence[str] = (),
    epochs: int | None = None,
    tune: bool = False,
) -> list[Record]:
    """Run what an experiment needs and has no record of; returns all records that it has then.

    Args:
        name: One of `EXPERIMENTS`.
        out: Folder of the results; ``results`` if not given, ``runs/reproduce-quick`` for quick ones.
        quick: Small nets on scikit-learn's digits, in seconds; the numbers then mean nothing.
        device: ``"cuda"`` or ``"cpu"``; a GPU if there is one.
        seeds: What to run; the study's own if none are given.
        methods: Which methods; all if none are given.
        settings: Which settings; all if none are given.
        epochs: Instead of those of the paper; they become part of the record.
        tune: Run the trials on held-out data in place of the experiment.

    Raises:
        ValueError: There is no such experiment, method or setting, or a record of another config is there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = reproduce("bgd-theory", out=Path(folder), quick=True)
        >>> records[0]["metrics"]["convex_falls"]
        True
    """
    asked = experiment(name)
    folder = out or (QUICK if quick else RESULTS)
    place = _device(device)
    cells = _cells(asked, quick, methods, settings)
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be a whole number of at least 1, not {epochs}")
    units = plan(asked.study, cells, folder, _seeds(asked.study, quick, seeds), epochs, tune)
    done = {unit.name: found(unit, folder) for unit in units}  # all are looked at before any is run
    told = _Told(Console(stderr=True), [record for record in done.values() if record is not None])
    for number, unit in enumerate(units):
        record = done[unit.name]
        told.begin(unit, number + 1, len(units), skipped=record is not None)
        if record is None:
            record = done[unit.name] = _run(asked.study, unit, folder, place, told)
        told.end(record, [each for each in units[number + 1 :] if done[each.name] is None])
    return [record for record in done.values() if record is not None]


def plan(
    study: Study, cells: Sequence[Cell], out: Path, seeds: Sequence[int], epochs: int | None, tune: bool
) -> list[Unit]:
    """The units of some cells, with what their trials have chosen.

    Seeds are the outer loop: a run that is cut short has one seed of everything rather than all seeds of one.
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


def _run(study: Study, unit: Unit, out: Path, device: str, told: _Told) -> Record:
    cache = unit.cache(out)
    resumed, diverged = (cache / CHECKPOINT).exists(), None
    place = environment()  # at the start: a unit may outlast an edit of the source
    start = time.perf_counter()

    with arithmetic(device):
        try:
            outcome = study.run(unit, device, cache, told.progress)
        except FloatingPointError as error:
            outcome, diverged = Outcome({}, 0), str(error)
        finally:
            gc.collect()  # captured steps hold the memory of a whole step, and refer to themselves
            if device == "cuda":
                # Else the next unit's settings count as recompilations of this one's, up to a limit.
                torch.compiler.reset()
                torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    record = write(
        unit,
        out,
        outcome,
        seconds=seconds,
        resumed=resumed,
        device=device,
        place=place,
        diverged=diverged,
    )
    (cache / CHECKPOINT).unlink(missing_ok=True)  # many times larger than all else, and of no more use
    return record


def _cells(asked: Experiment, quick: bool, methods: Sequence[str], settings: Sequence[str]) -> list[Cell]:
    cells = asked.cells(quick)
    for what, names, known in (
        ("method", methods, {cell.method: None for cell in cells}),
        ("setting", settings, {cell.setting: None for cell in cells}),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{asked.name} has no {what} {name!r}{hint(name, known)}")
    chosen = [
        cell
        for cell in cells
        if (not methods or cell.method in methods) and (not settings or cell.setting in settings)
    ]
    if not chosen:
        raise ValueError(f"{asked.name} has none of these methods in these settings: leave one of them out")
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
    """Says what is run and how long the rest may take, in lines that a log keeps."""

    def __init__(self, console: Console, records: Sequence[Record]) -> None:
        self._console = console
        self._taken: dict[tuple[str, str], list[float]] = {}
        for record in records:
            self._take(record)
        self._start = self._last = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._skipped = False

    def begin(self, unit: Unit, number: int, total: int, *, skipped: bool) -> None:
        self._skipped, self._first = skipped, None
        self._last = time.perf_counter()
        state = "done before" if skipped else unit.chosen
        self._print(f"[{number}/{total}] {unit.study}/{unit.name} ({state})")

    def progress(self, done: int, total: int, what: str) -> None:
        now = time.perf_counter()
        if self._first is None:  # the first epoch compiles and captures: no measure of the others
            self._first = now, done
        elif now - self._last > _EVERY or done == total:
            begun, before = self._first
            left = (now - begun) / max(done - before, 1) * (total - done)
            self._print(f"  {what} {done}/{total}, about {_span(left)} left of this unit")
            self._last = now

    def end(self, record: Record, rest: Sequence[Unit]) -> None:
        if self._skipped:
            return
        self._take(record)
        known = [fmean(each) for each in self._taken.values()]
        left = sum(fmean(self._taken.get((unit.setting, unit.method), known)) for unit in rest)
        score = record["metrics"].get("accuracy")
        result = record["diverged"] or (f"accuracy {score:.2%}" if score is not None else "done")
        self._print(f"  {result}, {_span(record['seconds'])}; about {_span(left)} left for {len(rest)} units")

    def _take(self, record: Record) -> None:
        self._taken.setdefault((record["setting"], record["method"]), []).append(float(record["seconds"]))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
