"""Records: one small JSON file per unit, written at its end; damaged ones are refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from posterity_lab import record as records
from posterity_lab.reproduce.study import TRIAL_SEED, Cell, Outcome, Study, Unit, Values

Record: TypeAlias = dict[str, Any]

_KEYS: dict[str, type | tuple[type, ...]] = {
    "study": str,
    "setting": str,
    "method": str,
    "seed": int,
    "config": dict,
    "chosen": str,
    "trial": (dict, type(None)),
    "diverged": (str, type(None)),
    "metrics": dict,
    "n": int,
    "seconds": (int, float),
    "resumed": bool,
    "device": str,
    "environment": dict,
}


def path_of(unit: Unit, out: Path) -> Path:
    """The path of a unit's record.

    Example:
        >>> path_of(Unit("mnist", "400", "bgd", 0, {}, ""), Path("results")).as_posix()
        'results/mnist/400-bgd-seed0.json'
    """
    return out / unit.study / f"{unit.name}.json"


def write(
    unit: Unit,
    out: Path,
    outcome: Outcome,
    *,
    seconds: float,
    resumed: bool,
    device: str,
    place: dict[str, Any],
    looks: dict[str, int] | None = None,
    diverged: str | None = None,
) -> Record:
    """Seal and write a unit's record, completely or not at all.

    Args:
        unit: The unit.
        out: Folder of the results.
        outcome: Its result.
        seconds: Its time.
        resumed: Whether it was resumed from a checkpoint.
        device: Its device.
        place: The content of `posterity_lab.record.Provenance`.
        looks: How often the row was evaluated on test data, including this time; None if it was not.
        diverged: Why there is no result.
    """
    record: Record = {
        "study": unit.study,
        "setting": unit.setting,
        "method": unit.method,
        "seed": unit.seed,
        "config": dict(unit.config),
        "chosen": unit.chosen,
        "trial": None if unit.trial is None else dict(unit.trial),
        "diverged": diverged,
        "metrics": outcome.metrics,
        "n": outcome.n,
        "seconds": round(seconds, 2),
        "resumed": resumed,
        "device": device,
        "looks": looks,
        "environment": place,
    }
    path = path_of(unit, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    return records.write(path, record)


def read(path: Path) -> Record:
    """Read a record; damaged ones are refused by name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "half.json"
        ...     _ = path.write_text('{"study": "mnist"')
        ...     try:
        ...         read(path)
        ...     except ValueError as error:
        ...         print(str(error).replace(folder, "results"))
        results/half.json is damaged (it is not JSON): delete it and run its unit again
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not JSON") from None
    if not isinstance(record, dict):
        raise _damaged(path, f"it holds a {type(record).__name__}, not an object")
    for key, kind in _KEYS.items():
        if key not in record:
            raise _damaged(path, f"it has no {key!r}")
        if not isinstance(record[key], kind):
            raise _damaged(path, f"its {key!r} is {record[key]!r}")
    if path.stem != _unit(record).name:
        raise _damaged(path, f"it is the record of {_unit(record).name}")
    if not records.fits(record):
        raise _damaged(path, "its content was changed: it does not fit its digest")
    return record


def read_all(study: Study, out: Path) -> list[Record]:
    """All records of a study, in the order of their names, each with all of the study's metrics."""
    records = []
    for path in sorted((out / study.name).glob("*.json")):
        record = read(path)
        for name in study.metrics if record["diverged"] is None else ():
            value = record["metrics"]
            for key in name.split("."):
                if not isinstance(value, dict) or key not in value:
                    raise _damaged(path, f"its metrics have no {name!r}")
                value = value[key]
        records.append(record)
    return records


def found(unit: Unit, out: Path) -> Record | None:
    """The unit's record; None if it was not run yet.

    Raises:
        ValueError: There is one, of another config.
    """
    path = path_of(unit, out)
    if not path.exists():
        return None
    record = read(path)
    now = json.loads(json.dumps(dict(unit.config)))
    for key in sorted({*now, *record["config"]}):
        before, after = record["config"].get(key), now.get(key)
        if before != after:
            raise ValueError(
                f"{path} was run with {key} = {before}, not {after}: move it away, or name another --out"
            )
    return record


def trials(study: Study, cell: Cell) -> list[Unit]:
    """One unit for every entry of the cell's grid.

    Example:
        >>> cell = Cell("400", "sgd", {"lr": 0.1, "epochs": 9}, ({"lr": 0.1}, {"lr": 0.01}), {"epochs": 2})
        >>> study = Study("mnist", lambda quick: [cell], lambda *work: Outcome({}, 1))
        >>> [(unit.name, unit.config["epochs"]) for unit in trials(study, cell)]
        [('trial-400-sgd-lr0.1', 2), ('trial-400-sgd-lr0.01', 2)]
    """
    return [
        Unit(
            study.name,
            cell.setting,
            cell.method,
            TRIAL_SEED,
            {**cell.config, **cell.trial, **values},
            "a trial",
            values,
        )
        for values in cell.grid
    ]


def tried(cell: Cell, records: Sequence[Record]) -> list[Record]:
    """The trials that decide a cell's values."""
    return [
        record
        for record in records
        if record["trial"] is not None and (record["setting"], record["method"]) == (cell.tuned, cell.method)
    ]


def choice(cell: Cell, records: Sequence[Record]) -> tuple[Values, str]:
    """The values that trials chose for a cell, and how, in words; the defaults without trials."""
    own = tried(cell, records)
    whole = [record for record in own if record["diverged"] is None]
    if not whole:
        return {}, "the default; no trials were run"
    scores = [float(record["metrics"][cell.score]) for record in whole]
    top = max(scores)
    best, same = whole[scores.index(top)], scores.count(top)
    values = ", ".join(f"{key} {value:g}" for key, value in best["trial"].items())
    rank = "the best" if same == 1 else f"the first of {same} that are best"
    how = f"{values}: {rank} by {cell.score.replace('_', ' ')} of {len(own)} trials on held-out data"
    if len(own) < len(cell.grid):
        how += f" ({len(cell.grid)} are in the grid)"
    return best["trial"], how


def _unit(record: Record) -> Unit:
    keys = ("study", "setting", "method", "seed", "config", "chosen", "trial")
    return Unit(**{key: record[key] for key in keys})


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged ({why}): delete it and run its unit again")
