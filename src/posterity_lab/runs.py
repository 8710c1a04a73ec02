"""A training run: started, killed, resumed to the same bits, and read back from its folder.

Everything random in a run is a function of its seed and of the counts of epochs and steps, so a checkpoint
needs no generator's state.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from posterity import Factorised, metrics
from posterity.distributed import World
from posterity_lab import data, methods, nets, record
from posterity_lab.config import Config
from posterity_lab.data import Dataset, Split
from posterity_lab.disk import append, locked, replace, strangers
from posterity_lab.methods import Method
from posterity_lab.processes import agreed, restarted, together
from posterity_lab.run_files import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    POSTERIOR,
    diverged,
    places,
    posterior_is,
    read_checkpoint,
    read_metrics,
    refuse_edited,
    restore,
    save,
    save_posterior,
    stored,
    write_place,
)
from posterity_lab.run_files import resume as go_on

ROW = "the run"  # in the count of looks at test data: a folder has one run


def train(config: Config, folder: Path, resume: bool = False) -> list[dict[str, Any]]:
    """Train as the config says and leave everything in ``folder``; returns the metrics of every epoch.

    Processes that torchrun has started each take their part of every batch, and learn what one would. All
    read the folder; the first alone writes to it, and has the metrics.

    Args:
        config: What to do.
        folder: A new or empty folder, or the one of the run to resume.
        resume: Go on after the run's last whole epoch, to the very result of an uninterrupted one; a
            finished run is left as it is. So it is done where torchrun starts processes anew after a fault.

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
    resume = resume or (restarted() and (folder / CONFIG).exists())
    with together(config.device) as world, ExitStack() as held:
        with agreed(world):
            if world.rank == 0:
                _refuse(config, folder, resume)
                held.enter_context(locked(folder))
                _refuse(config, folder, resume)  # another process may have begun in between
            start = _start(config, folder, world)
        with agreed(world):
            _refuse_unlike(config, folder, world, None if start is None else len(start.history))
        if world.rank == 0:
            return _finished(folder, config) if start is None else _train(config, folder, start)
        if start is not None:
            _follow(config, start)
        return []


class _Start(NamedTuple):
    """What a run goes on from.

    Attributes:
        training: What to train on.
        held_out: What to take each epoch's metrics on.
        sizes: Of the data, as the checkpoint has them.
        model: The net.
        method: What trains it.
        history: Metrics of its whole epochs.
        earlier: Records of its parts.
        processes: That take part in it.
    """

    training: Split
    held_out: Split
    sizes: dict[str, Any]
    model: nn.Module
    method: Method
    history: list[dict[str, Any]]
    earlier: list[dict[str, Any]]
    processes: int


def _start(config: Config, folder: Path, world: World) -> _Start | None:
    """A run at its last whole epoch, in this process; None of one that is finished."""
    nets.recipe(config.net)  # a misspelled net is refused before minutes of loading
    _check_device(config.device)
    checkpoint = read_checkpoint(folder, config, config.device)
    if checkpoint is not None and checkpoint["epoch"] >= config.epochs:
        return None
    dataset = data.load(config.data, device=config.device)
    training, held_out = _splits(dataset, config.validation)
    _refuse_few(len(training), config.batch_size, world.size)
    sizes: dict[str, Any] = {
        "shape": list(dataset.test.x.shape[1:]),
        "classes": dataset.classes,
        "num_data": len(training),
    }
    model, method = _learner(config, **sizes)
    if checkpoint is not None:
        go_on(method, checkpoint, folder)
    history = read_metrics(folder, 0 if checkpoint is None else int(checkpoint["epoch"]))
    earlier = places(folder)
    refuse_edited(folder, history, earlier)
    return _Start(training, held_out, sizes, model, method, history, earlier, world.size)


def _refuse_few(images: int, batch_size: int, processes: int) -> None:
    """Raise if the last batch, the smallest, has fewer images than there are processes."""
    last = images % batch_size or batch_size
    if last < processes:
        raise ValueError(
            f"{images} images in batches of {batch_size} leave {last} for the last, and there are "
            f"{processes} processes: choose another batch_size, or fewer processes"
        )


def _refuse_unlike(config: Config, folder: Path, world: World, epochs: int | None) -> None:
    """Raise in all processes if they have other configs, or have read another checkpoint."""
    mine = {**dataclasses.asdict(config), "last epoch": epochs}
    try:
        world.refuse_others(mine, "the run's", f"start all alike, and let all read the same {folder}")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _follow(config: Config, start: _Start) -> None:
    """The part of every process but the first, which tells of errors that all have."""
    try:
        for epoch in range(len(start.history), config.epochs):
            _epoch(start.method, start.training, config, epoch, lambda **_: None)
    except FloatingPointError:
        raise SystemExit(2) from None


def _train(config: Config, folder: Path, start: _Start) -> list[dict[str, Any]]:
    training, held_out, sizes, model, method, history, earlier, processes = start
    done = len(history)
    made, settings = record.Provenance(config.device, seeds=[config.seed]), dataclasses.asdict(config)

    def note(**more: Any) -> None:
        digests = {"config": record.digest(settings), "metrics": record.digest(history)}
        count = {"looks": record.looks(folder, ROW, config.seed)}
        write_place(folder, made, earlier, processes=processes, **digests, **count, **more)

    # The config first: a folder that has it can be resumed, one that has not is as good as empty.
    replace(folder / CONFIG, json.dumps(settings, indent=2))
    if not config.validation and not done:
        record.look(folder, ROW, config.seed, settings)
    note()
    replace(folder / METRICS, "".join(json.dumps(each) + "\n" for each in history))
    steps = -(-len(training) // config.batch_size)
    with _bar() as bar:
        shown = _shown(history, config)
        task = bar.add_task("", total=config.epochs * steps, completed=done * steps, **shown)
        for epoch in range(done, config.epochs):
            begun = time.perf_counter()
            try:
                loss = _epoch(method, training, config, epoch, partial(bar.update, task, advance=1))
                seconds = round(time.perf_counter() - begun, 3)
                scores = _scores(model, method, held_out, config)
            except FloatingPointError as error:
                kept = (
                    f"{folder / CHECKPOINT} is that of epoch {epoch}" if epoch else "no epoch was completed"
                )
                message = f"{error} ({kept}; --resume would repeat this: train in another folder)"
                note(diverged=message)
                raise FloatingPointError(message) from error
            line: dict[str, Any] = {
                "epoch": epoch + 1,
                "step": (epoch + 1) * steps,
                "train_loss": loss,
                "seconds": seconds,
                **scores,
            }
            history.append(line)
            bar.update(task, **_shown(history, config))
            # Metrics first: a resumed run can cut a line too many, but not make up one too few.
            append(folder / METRICS, line)
            state = {"epoch": epoch + 1, "method": method.state_dict()}
            save(folder / CHECKPOINT, {"config": settings, **sizes, **state})
    if (posterior := method.posterior()) is not None:
        save_posterior(folder / POSTERIOR, posterior)
    note()
    return history


@dataclass(frozen=True, eq=False)
class Run:
    """What a run learned, at its last whole epoch.

    Attributes:
        config: As the run was trained, but for the device.
        model: The network, on the config's device.
        posterior: Over the model's weights; None if the method learns weights alone.
        shape: Of one input.
    """

    config: Config
    model: nn.Module
    posterior: Factorised | None
    shape: list[int]


def load_run(folder: Path, device: str | None = None) -> Run:
    """A run from its checkpoint, without the data that it was trained on.

    Args:
        folder: Where `train` left the run.
        device: Where to put it, if not where it was trained.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history = train(Config(net="mlp-8", data="digits", epochs=1), Path(folder) / "run")
        ...     run = load_run(Path(folder) / "run")
        >>> run.config.method, run.shape, len(run.posterior.blocks)
        ('bgd', [1, 8, 8], 4)
    """
    trained = stored(folder)
    config = trained if device is None else dataclasses.replace(trained, device=device)
    _check_device(config.device)
    checkpoint = read_checkpoint(folder, trained, config.device)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {folder} has no whole epoch yet: continue it with --resume")
    sizes = {key: checkpoint[key] for key in ("shape", "classes", "num_data")}
    model, method = _learner(config, **sizes)
    restore(method, checkpoint, folder)
    return Run(config, model, method.posterior(), sizes["shape"])


def _finished(folder: Path, config: Config) -> list[dict[str, Any]]:
    """The metrics of a run that is done; a posterior that was lost or damaged since is written again."""
    history, path = read_metrics(folder, config.epochs), folder / POSTERIOR
    refuse_edited(folder, history, places(folder))
    posterior = load_run(folder).posterior
    if posterior is not None and not posterior_is(path, posterior):
        if path.exists():
            warnings.warn(f"{path} was damaged: it is written again from {CHECKPOINT}", stacklevel=3)
        save_posterior(path, posterior)
    return history


def _refuse(config: Config, folder: Path, resume: bool) -> None:
    if not resume:
        if (folder / CONFIG).exists():
            if diverged(folder):
                lower = " or ".join(key for key in ("lr", "std_init") if key in config.settings)
                raise ValueError(
                    f"{folder} holds a run that diverged: train in another folder with a lower {lower}"
                )
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume or name another folder"
            )
        if folder.exists() and (not folder.is_dir() or strangers(folder)):
            raise ValueError(f"{folder} is not an empty folder: name a new one")
        return
    before, after = dataclasses.asdict(stored(folder)), dataclasses.asdict(config)
    for key, value in before.items():
        if after[key] != value:
            raise ValueError(
                f"the run in {folder} has {key} = {value}, not {after[key]}: resume it with the same config, "
                "or name another folder"
            )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used on this machine: try cpu") from error


def _learner(config: Config, shape: Sequence[int], classes: int, num_data: int) -> tuple[nn.Module, Method]:
    model = nets.initialise(nets.build(config.net, shape, classes), config.seed).to(config.device)
    return model, methods.build(config, model, num_data)


def _scores(model: nn.Module, method: Method, held_out: Split, config: Config) -> dict[str, Any]:
    """What the network can do now, on images that it did not learn from."""
    found = methods.predictions(model, method.posterior(), held_out.x, config)
    probs = found.probs
    if not bool(torch.isfinite(probs).all()):  # the epoch's last step went too far
        raise FloatingPointError("the predictions are not finite: lower lr")
    return {
        "split": "validation" if config.validation else "test",
        "accuracy": metrics.accuracy(probs, held_out.y),
        "nll": metrics.nll(found, held_out.y),
        "ece": metrics.ece(probs, held_out.y),
    }


def _splits(dataset: Dataset, validation: int) -> tuple[Split, Split]:
    """What to train on, and what to take each epoch's metrics on."""
    count = len(dataset.train)
    if count == 0:
        raise ValueError(f"{dataset.name} is for testing only: train on another data set")
    if count <= validation:
        raise ValueError(f"{dataset.name} has {count} training images: hold out fewer than {validation}")
    if validation == 0:
        return dataset.train, dataset.test
    # One order for all seeds: runs that differ in their seed alone may share a validation set.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return dataset.train.subset(order[validation:]), dataset.train.subset(order[:validation])


def _epoch(method: Method, training: Split, config: Config, epoch: int, show: Callable[..., None]) -> float:
    """One pass over the training images; the mean of their losses, each at the time of its step."""
    world, total, seen = World(None), 0.0, 0
    for x, y in data.batches(training, config.batch_size, seed=config.seed, epoch=epoch):
        own = (each.tensor_split(world.size)[world.rank] for each in (x, y))
        total += float(method.step(*own)) * len(y)
        seen += len(y)
        show(epoch=epoch + 1, loss=f"{total / seen:.4f}")
    return total / seen


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


def looked(folder: Path, config: Config) -> dict[str, int] | None:
    """Count that a run is evaluated on test data; None where its folder cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     looked(Path(folder), Config())
        {'configs': 1, 'evaluations': 1}
    """
    try:
        return record.look(folder, ROW, config.seed, dataclasses.asdict(config))
    except OSError:
        return None
