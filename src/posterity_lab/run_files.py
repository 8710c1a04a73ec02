"""The files of a run's folder: written whole, and read with a word on what to do about a damaged one.

| file | what |
|---|---|
| ``config.json`` | the `Config`, complete |
| ``environment.json`` | the record: source, command, hardware, times, also of the parts before a resume |
| ``metrics.jsonl`` | one object per epoch |
| ``checkpoint.pt`` | model and optimiser after the last whole epoch, and all that is needed to build them |
| ``posterior.safetensors`` | the posterior, when all epochs are done |
| ``looks.jsonl`` | one line for every time that the run was evaluated on test data |
| ``lock`` | the process that writes here, while it does |
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posterity import Factorised
from posterity.disk import replacing
from posterity_lab import record
from posterity_lab.config import Config
from posterity_lab.methods import Method

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
POSTERIOR = "posterior.safetensors"

_ELSE = "train again in another folder"
_SAVED = {"config", "shape", "classes", "num_data", "epoch", "method"}
# How an optimiser computes, which may change from one device to another, not what.
_EXECUTION = ("capturable", "foreach", "fused")
_NUMBERS = ("step", "train_loss", "seconds", "accuracy", "nll", "ece")


def stored(folder: Path) -> Config:
    """The config of the run in a folder.

    Example:
        >>> stored(Path("nowhere"))
        Traceback (most recent call last):
            ...
        FileNotFoundError: there is no run in nowhere: train one there first
    """
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        return Config.from_sources(None, content)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run in {folder}: train one there first") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read (it is nested too deeply): {_ELSE}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): {_ELSE}") from error


def read_checkpoint(folder: Path, config: Config, device: str) -> dict[str, Any] | None:
    """The checkpoint of the run that ``config`` describes; None if it has no whole epoch.

    Example:
        >>> read_checkpoint(Path("nowhere"), Config(), "cpu") is None
        True
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    checkpoint = load(path, device)
    if not checkpoint.keys() >= _SAVED:
        raise foreign(path)
    # An optimiser takes the state of another kind without a word, and fails, or is wrong, later.
    try:
        made = Config(**checkpoint["config"])  # a key that had no meaning for the method then has its default
        sizes = [*checkpoint["shape"], *(checkpoint[key] for key in ("classes", "num_data", "epoch"))]
    except (TypeError, ValueError) as error:
        raise foreign(path) from error
    if made != config or any(type(each) is not int for each in sizes):
        raise foreign(path)
    return checkpoint


def restore(
    method: Method, checkpoint: dict[str, Any], folder: Path, changing: Sequence[str] = ("steps",)
) -> None:
    """Put a checkpoint into a method, which may be on another device than before.

    Args:
        method: Built as for the first part of the run.
        checkpoint: What was saved of it.
        folder: Where it lies.
        changing: Entries of the optimiser's groups that training changes; all others must be as built.

    Example:
        >>> from posterity_lab import methods
        >>> method = methods.build(Config(method="adam"), torch.nn.Linear(4, 2), num_data=8)
        >>> restore(method, {"method": {}}, Path("run"))
        Traceback (most recent call last):
            ...
        ValueError: run/checkpoint.pt is of another run or damaged: train again in another folder
    """
    before = _settings(method)
    try:
        method.load_state_dict(checkpoint["method"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise foreign(folder / CHECKPOINT) from error
    for one, group in zip(before, method.optimizer.param_groups, strict=True):
        group.update({key: one[key] for key in _EXECUTION if key in one})
    for one, other in zip(before, _settings(method), strict=True):
        for key in one:
            if key not in changing and one[key] != other.get(key):
                raise ValueError(
                    f"{folder / CHECKPOINT} has {key} = {other.get(key)}, and the run {one[key]}: {_ELSE}"
                )


def resume(
    method: Method, checkpoint: dict[str, Any], folder: Path, changing: Sequence[str] = ("steps",)
) -> None:
    """Put a checkpoint into the method that is to go on from it; see `restore`.

    Another number of threads than in the part before is warned of: the result is then not bit for bit that
    of an uninterrupted run.
    """
    restore(method, checkpoint, folder, changing)
    before, now = checkpoint["threads"], torch.get_num_threads()
    if before != now and next(method.model.parameters()).device.type == "cpu":
        warnings.warn(
            f"the run in {folder} began with {before} threads and resumes with {now}, which changes "
            f"the last bits of its numbers: set OMP_NUM_THREADS={before} for identical ones",
            stacklevel=2,
        )


def read_metrics(folder: Path, done: int) -> list[dict[str, Any]]:
    """The records of the epochs that the checkpoint has; later ones, and half a line, are left out.

    Example:
        >>> read_metrics(Path("nowhere"), done=0)
        []
    """
    path = folder / METRICS
    # What is not UTF-8 may lie in the half line after a kill, which nobody reads.
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if not done and len(lines) > 1:
        raise ValueError(
            f"{path} has {len(lines)} epochs, but there is no {CHECKPOINT} to resume from: restore "
            f"it, or {_ELSE}"
        )
    lines = lines[:done]
    if len(lines) < done:
        raise ValueError(
            f"{path} has {len(lines)} of the {done} epochs that {CHECKPOINT} has: restore it, or {_ELSE}"
        )
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not _is_record(record) or record["epoch"] != number:
            raise ValueError(f"{path} is damaged in line {number}: restore it, or {_ELSE}")
        records.append(record)
    return records


def _is_record(value: Any) -> bool:
    """Whether this is what a run writes of an epoch."""
    return (
        isinstance(value, dict)
        and {"epoch", "split", *_NUMBERS} <= value.keys()
        and isinstance(value["split"], str)
        and all(type(value[key]) in (int, float) for key in ("epoch", *_NUMBERS))
    )


def places(folder: Path) -> list[dict[str, Any]]:
    """The records of the parts of a run so far, oldest first.

    Example:
        >>> places(Path("nowhere"))
        []
    """
    path = folder / ENVIRONMENT
    if not path.exists():
        return []
    try:
        last = json.loads(path.read_text())
    except (ValueError, RecursionError):
        last = None
    if not isinstance(last, dict) or not isinstance(last.get("earlier"), list) or not record.fits(last):
        raise ValueError(f"{path} is damaged: delete it, or {_ELSE}")
    return [*last.pop("earlier"), last]


def refuse_edited(folder: Path, history: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> None:
    """Raise if metrics do not match the digest in the run's record.

    The record of a part that was killed has the digest of the metrics when that part began.

    Example:
        >>> parts = [{"metrics": record.digest([{"epoch": 1}])}]
        >>> refuse_edited(Path("run"), [{"epoch": 1}, {"epoch": 2}], parts)
        >>> refuse_edited(Path("run"), [{"epoch": 7}], parts)
        Traceback (most recent call last):
            ...
        ValueError: run/metrics.jsonl does not match its digest in environment.json: restore it, or train \
again in another folder
    """
    known = parts[-1].get("metrics") if parts else None
    if known is not None and all(known != record.digest(list(history[:n])) for n in range(len(history) + 1)):
        raise ValueError(
            f"{folder / METRICS} does not match its digest in {ENVIRONMENT}: restore it, or {_ELSE}"
        )


def write_place(
    folder: Path, made: record.Provenance, earlier: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Write the run's record, as it is by now."""
    return record.write(folder / ENVIRONMENT, {**made.content(), **more, "earlier": list(earlier)})


def diverged(folder: Path) -> bool:
    """Whether the last part of the run in the folder ended because the loss was not finite.

    Example:
        >>> diverged(Path("nowhere"))
        False
    """
    try:
        parts = places(folder)
    except ValueError:
        return False
    return bool(parts) and "diverged" in parts[-1]


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint with its digest, whole or not at all."""
    content = {**checkpoint, "threads": torch.get_num_threads()}
    content.pop(record.DIGEST, None)  # of a checkpoint that was read before
    with replacing(path) as unfinished:
        torch.save({**content, record.DIGEST: record.digest(content)}, unfinished)


def load(path: Path, device: str | torch.device, remedy: str = _ELSE) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: Where it lies.
        device: Where to put its tensors.
        remedy: What to do about a damaged one, as the end of a sentence.

    Raises:
        ValueError: It is damaged: its content does not fit its digest.
    """
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        whole = isinstance(checkpoint, dict) and record.fits(checkpoint)
    except OSError:
        raise
    except Exception:  # what torch raises depends on where the damage is, and may advise to trust the file
        raise foreign(path, remedy) from None
    if not whole:
        raise foreign(path, remedy)
    return dict(checkpoint)


def save_posterior(path: Path, posterior: Factorised) -> None:
    """Write a posterior, whole or not at all."""
    with replacing(path) as unfinished:
        posterior.save(unfinished)


def posterior_is(path: Path, posterior: Factorised) -> bool:
    """Whether a file holds this very posterior."""
    try:
        found = Factorised.load(path)
    except (OSError, ValueError):
        return False
    one, other = (record.digest([each.mean(), each.std()]) for each in (found, posterior))
    return one == other


def foreign(path: Path, remedy: str = _ELSE) -> ValueError:
    """The error of a checkpoint that cannot be gone on from."""
    return ValueError(f"{path} is of another run or damaged: {remedy}")


def _settings(method: Method) -> list[dict[str, Any]]:
    """What the groups of the optimiser are set to."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in method.optimizer.param_groups
    ]
