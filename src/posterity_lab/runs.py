"""A training run and its folder: started, killed, resumed to the same bits, and read back.

| file | what |
|---|---|
| ``config.json`` | the `Config`, complete |
| ``environment.json`` | versions, commit, hardware and time, also of the sessions before a resume |
| ``metrics.jsonl`` | one object per epoch |
| ``checkpoint.pt`` | model and optimiser after the last whole epoch |
| ``posterior.safetensors`` | the posterior, when all epochs are done |

Everything random in a run is a function of its seed and of the counts of epochs and steps, so a checkpoint
needs no generator's state.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from posterity import Factorised, metrics
from posterity_lab import data, methods, nets
from posterity_lab.config import Config
from posterity_lab.data import Dataset, Split
from posterity_lab.methods import Method
from posterity_lab.record import environment

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
POSTERIOR = "posterior.safetensors"


def train(config: Config, folder: Path, resume: bool = False) -> list[dict[str, Any]]:
    """Train as the config says and leave everything in ``folder``; returns the metrics of every epoch.

    Args:
        config: What to do.
        folder: A new or empty folder, or the one of the run to resume.
        resume: Go on after the run's last whole epoch, to the very result of an uninterrupted one.

    Raises:
        ValueError: The folder holds a run already, or not this one.
        FloatingPointError: The loss is not finite; the checkpoint of the last whole epoch is left.

    Example:
        >>> import tempfile
        >>> config = Config(method="adam", net="mlp-8", data="digits", epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history = train(config, Path(folder) / "run")
        >>> [record["epoch"] for record in history]
        [1]
    """
    _refuse(config, folder, resume)
    nets.recipe(config.net)  # a misspelled net is refused before minutes of loading
    dataset, model = _assemble(config)
    training, held_out = _splits(dataset, config.validation)
    method = methods.build(config, model, len(training))
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, json.dumps(dataclasses.asdict(config), indent=2))
    _replace(folder / ENVIRONMENT, json.dumps(_history(folder), indent=2))
    done = _restore(folder, method, config)
    history = _cut_metrics(folder, done)
    steps = -(-len(training) // config.batch_size)
    with _bar() as bar:
        shown = _shown(history, config)
        task = bar.add_task("", total=config.epochs * steps, completed=done * steps, **shown)
        for epoch in range(done, config.epochs):
            start = time.perf_counter()
            loss = _epoch(method, training, config, epoch, folder, partial(bar.update, task, advance=1))
            seconds = round(time.perf_counter() - start, 3)
            probs = methods.predictions(model, method.posterior(), held_out.x, config).probs
            record: dict[str, Any] = {
                "epoch": epoch + 1,
                "step": (epoch + 1) * steps,
                "train_loss": loss,
                "seconds": seconds,
                "split": "validation" if config.validation else "test",
                "accuracy": metrics.accuracy(probs, held_out.y),
                "nll": metrics.nll(probs, held_out.y),
                "ece": metrics.ece(probs, held_out.y),
            }
            history.append(record)
            bar.update(task, **_shown(history, config))
            # Metrics first: a resumed run can cut a line too many, but not make up one too few.
            _append(folder / METRICS, record)
            _save(folder / CHECKPOINT, {"epoch": epoch + 1, "method": method.state_dict()})
    if (posterior := method.posterior()) is not None:
        posterior.save(folder / POSTERIOR)
    return history


def load_run(folder: Path, device: str | None = None) -> tuple[Config, nn.Module, Factorised | None, Dataset]:
    """Config, model, posterior and data of a run; one that was cut short is read at its checkpoint.

    Args:
        folder: Where `train` left the run.
        device: Where to put it all, if not where it was trained.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history = train(Config(net="mlp-8", data="digits", epochs=1), Path(folder) / "run")
        ...     config, model, posterior, dataset = load_run(Path(folder) / "run")
        >>> config.method, dataset.name, len(posterior.blocks)
        ('bgd', 'digits', 4)
    """
    config = stored(folder)
    config = config if device is None else dataclasses.replace(config, device=device)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"the run in {folder} has no whole epoch yet: continue it with --resume")
    dataset, model = _assemble(config)
    method = methods.build(config, model, len(dataset.train) - config.validation)
    _restore(folder, method, config)
    posterior = method.posterior()
    if posterior is not None and (folder / POSTERIOR).exists():
        posterior = Factorised.load(folder / POSTERIOR, model).to(config.device)
    return config, model, posterior, dataset


def stored(folder: Path) -> Config:
    """The config of the run in a folder.

    Example:
        >>> stored(Path("nowhere"))
        Traceback (most recent call last):
            ...
        FileNotFoundError: there is no run in nowhere: train one there first
    """
    try:
        return Config.from_sources(None, json.loads((folder / CONFIG).read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no run in {folder}: train one there first") from None
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} cannot be read: {error}") from error


def _refuse(config: Config, folder: Path, resume: bool) -> None:
    if not resume:
        if (folder / CONFIG).exists():
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume or name another folder"
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not an empty folder: name a new one")
        return
    before, after = dataclasses.asdict(stored(folder)), dataclasses.asdict(config)
    for key, value in before.items():
        if after[key] != value:
            raise ValueError(
                f"the run in {folder} has {key} = {value}, not {after[key]}: resume it with the same config, "
                "or name another folder"
            )


def _assemble(config: Config) -> tuple[Dataset, nn.Module]:
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {config.device!r} cannot be used on this machine: try cpu") from error
    dataset = data.load(config.data, device=config.device)
    model = nets.initialise(nets.build(config.net, dataset), config.seed).to(config.device)
    return dataset, model


def _splits(dataset: Dataset, validation: int) -> tuple[Split, Split]:
    """What to train on, and what to take each epoch's metrics on."""
    count = len(dataset.train)
    if count == 0:
        raise ValueError(f"{dataset.name} is for testing alone: train on another data set")
    if count <= validation:
        raise ValueError(f"{dataset.name} has {count} training images: hold out fewer than {validation}")
    if validation == 0:
        return dataset.train, dataset.test
    # One order for all seeds: runs that differ in their seed alone may share a validation set.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return dataset.train.subset(order[validation:]), dataset.train.subset(order[:validation])


def _epoch(
    method: Method, training: Split, config: Config, epoch: int, folder: Path, show: Callable[..., None]
) -> float:
    """One pass over the training images; the mean of their losses, each at the time of its step."""
    total, seen = 0.0, 0
    for x, y in data.batches(training, config.batch_size, seed=config.seed, epoch=epoch):
        try:
            total += float(method.step(x, y)) * len(y)
        except FloatingPointError as error:
            kept = f"{folder / CHECKPOINT} is that of epoch {epoch}" if epoch else "no epoch was completed"
            raise FloatingPointError(f"{error} ({kept})") from error
        seen += len(y)
        show(epoch=epoch + 1, loss=f"{total / seen:.4f}")
    return total / seen


def _restore(folder: Path, method: Method, config: Config) -> int:
    """Put the checkpoint, if there is one, into the method; the number of whole epochs."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    try:
        checkpoint = torch.load(path, map_location=config.device, weights_only=True)
    except Exception as error:  # what torch raises depends on where the damage is
        raise ValueError(f"{path} is damaged: train again in another folder") from error
    method.load_state_dict(checkpoint["method"])
    return int(checkpoint["epoch"])


def _cut_metrics(folder: Path, done: int) -> list[dict[str, Any]]:
    """The lines of the epochs that the checkpoint has; later ones, and half a line, are dropped."""
    path = folder / METRICS
    lines = path.read_text().splitlines(keepends=True)[:done] if path.exists() else []
    if len(lines) < done:
        raise ValueError(f"{path} has {len(lines)} of the {done} epochs that {CHECKPOINT} has: put it back")
    _replace(path, "".join(lines))
    return [json.loads(line) for line in lines]


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _save(path: Path, checkpoint: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    _replace(path, buffer.getvalue())


def _replace(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, whenever the process or the machine stops."""
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _history(folder: Path) -> dict[str, Any]:
    """Where this run is made, with the places of the parts before a resume."""
    path = folder / ENVIRONMENT
    before = json.loads(path.read_text()) if path.exists() else None
    earlier = [] if before is None else [*before.pop("earlier"), before]
    return {**environment(), "earlier": earlier}


def _bar() -> Progress:
    return Progress(
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _shown(history: list[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The bar's fields after the epochs so far."""
    last = history[-1] if history else None
    return {
        "epoch": len(history),
        "epochs": config.epochs,
        "loss": "–" if last is None else f"{last['train_loss']:.4f}",
        "accuracy": "–" if last is None else f"{last['accuracy']:.2%}",
    }
