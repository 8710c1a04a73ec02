"""The files of a run's folder: written whole, and read with a word on what to do about a damaged one.

| file | what |
|---|---|
| ``config.json`` | the `Config`, complete |
| ``environment.json`` | versions, commit, hardware and time, also of the parts before a resume |
| ``metrics.jsonl`` | one object per epoch |
| ``checkpoint.pt`` | model and optimiser after the last whole epoch, and all that is needed to build them |
| ``posterior.safetensors`` | the posterior, when all epochs are done |
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import torch

from posterity_lab.config import Config
from posterity_lab.methods import Method
from posterity_lab.record import environment

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
POSTERIOR = "posterior.safetensors"

_ELSE = "train again in another folder"
_SAVED = {"config", "shape", "classes", "num_data", "epoch", "method"}
_RECORD = {"epoch", "step", "train_loss", "seconds", "split", "accuracy", "nll", "ece"}


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
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what torch raises depends on where the damage is
        raise _foreign(path) from error
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _SAVED:
        raise _foreign(path)
    # An optimiser takes the state of another kind without a word, and fails, or is wrong, later.
    try:
        made = Config(**checkpoint["config"])  # a key that had no meaning for the method then has its default
    except (TypeError, ValueError) as error:
        raise _foreign(path) from error
    if made != config:
        raise _foreign(path)
    return checkpoint


def restore(method: Method, checkpoint: dict[str, Any], folder: Path) -> None:
    """Put a checkpoint into the method that is to go on from it.

    Example:
        >>> from posterity_lab import methods
        >>> method = methods.build(Config(method="adam"), torch.nn.Linear(4, 2), num_data=8)
        >>> restore(method, {"method": {}}, Path("run"))
        Traceback (most recent call last):
            ...
        ValueError: run/checkpoint.pt is of another run or damaged: train again in another folder
    """
    try:
        method.load_state_dict(checkpoint["method"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _foreign(folder / CHECKPOINT) from error


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
            f"{path} has {len(lines)} epochs, and there is no {CHECKPOINT} to go on from: put it back, or "
            f"{_ELSE}"
        )
    lines = lines[:done]
    if len(lines) < done:
        raise ValueError(
            f"{path} has {len(lines)} of the {done} epochs that {CHECKPOINT} has: put it back, or {_ELSE}"
        )
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() >= _RECORD or record["epoch"] != number:
            raise ValueError(f"{path} is damaged in line {number}: put it back, or {_ELSE}")
        records.append(record)
    return records


def places(folder: Path) -> dict[str, Any]:
    """Where this run is made, with the places of the parts before a resume.

    Example:
        >>> places(Path("nowhere"))["earlier"]
        []
    """
    before = _place(folder)
    earlier = [] if before is None else [*before.pop("earlier"), before]
    return {**environment(), "earlier": earlier}


def diverged(folder: Path) -> bool:
    """Whether the last part of the run in the folder ended because the loss was not finite.

    Example:
        >>> diverged(Path("nowhere"))
        False
    """
    try:
        place = _place(folder)
    except ValueError:
        return False
    return place is not None and "diverged" in place


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line of JSON to a file, safe on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    replace(path, buffer.getvalue())


def replace(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, whenever the process or the machine stops."""
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _place(folder: Path) -> dict[str, Any] | None:
    path = folder / ENVIRONMENT
    if not path.exists():
        return None
    try:
        place = json.loads(path.read_text())
    except ValueError:
        place = None
    if not isinstance(place, dict) or not isinstance(place.get("earlier"), list):
        raise ValueError(f"{path} is damaged: delete it, or {_ELSE}")
    return place


def _foreign(path: Path) -> ValueError:
    return ValueError(f"{path} is of another run or damaged: {_ELSE}")
