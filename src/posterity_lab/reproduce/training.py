"""Training of one net on one data set by a config: order, augmentation, schedules, checkpoints.

A training is tested and saved after every twentieth of its epochs; an interrupted one resumes from there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posterity import warmup
from posterity_lab import data, nets
from posterity_lab.data import Dataset, Split
from posterity_lab.methods import Method
from posterity_lab.prunable import narrow
from posterity_lab.reproduce.learners import Autocast, learner, scale_lr
from posterity_lab.reproduce.study import Show, Unit, Values
from posterity_lab.run_files import CHECKPOINT, foreign, load, resume, save
from posterity_lab.streams import normalised, padded

_MARGIN = 4  # zeros around a randomly cropped image
_PARTS = 20  # number of tests and checkpoints in a training
_ANEW = "delete it, and the unit begins anew"


@dataclass(frozen=True, eq=False)
class Training:
    """A net at some point of its training.

    Attributes:
        unit: The unit.
        model: The net.
        method: The method that trains it.
        train: Training data.
        test: Test data.
        curve: Scores so far, with their epochs.
        seconds: Time of every epoch so far, without tests.
    """

    unit: Unit
    model: nn.Module
    method: Method
    train: Split
    test: Split
    curve: list[dict[str, Any]]
    seconds: list[float]


def fit(
    unit: Unit,
    device: str,
    cache: Path,
    show: Show,
    scores: Callable[[Training], dict[str, Any]],
    start: Sequence[Tensor] | None = None,
) -> Training:
    """Train a unit's net.

    Args:
        unit: The unit to run. Its config has ``data``, ``net``, ``batch_size``, ``epochs`` and all that the
            functions here and the learner ask for; ``milestones``, shares of the epochs after each of which
            the learning rate is divided by ten; ``warmup``, the share in which the temperature rises linearly
            from ``warmup_start`` to 1; ``passes``, how often BGD counts the data in all; ``bfloat16``, on a
            GPU, where nets other than MLPs use it anyway; ``mean_reach``, for initial weights that are
            uniform between minus this value and this value, or ``mean_std``, for those of `narrow`;
            ``decay_from``, the share of the epochs after which the learning rate falls linearly to 0;
            ``centred``, for images minus their mean; ``labels``, ``"random"`` for random training labels.
        device: Device of the computation.
        cache: Folder for the checkpoint.
        show: Called after every epoch.
        scores: Tests the net.
        start: Initial parameters and buffers, in order.

    Example:
        >>> import tempfile
        >>> config = {"data": "digits", "mean": 0.3, "std": 0.4, "held_out": 0, "tested_on": "test"}
        >>> config |= {"net": "mlp-16", "batch_size": 64, "epochs": 1, "lr": 0.1, "momentum": 0.9}
        >>> unit = Unit("mnist", "16", "sgd", 0, config, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = fit(unit, "cpu", Path(folder), lambda *seen: None, lambda training: {"accuracy": 0.5})
        >>> done.curve
        [{'epoch': 1, 'accuracy': 0.5}]
    """
    config = unit.config
    dataset = prepared(unit, device)
    train, test = splits(dataset, config)
    method = begun(unit.method, config, train, dataset.classes, device, unit.seed, start)
    model = method.model
    training = Training(unit, model, method, train, test, *_resumed(unit, cache, method, device))
    marks = {-(-config["epochs"] * part // _PARTS) for part in range(1, _PARTS + 1)}
    for epoch in range(len(training.seconds), config["epochs"]):
        training.seconds.append(_epoch(training, epoch))
        if epoch + 1 in marks:
            if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
                raise FloatingPointError("weights are not finite: lower lr")
            training.curve.append({"epoch": epoch + 1, **scores(training)})
            cache.mkdir(parents=True, exist_ok=True)
            state = {"seconds": training.seconds, "curve": training.curve, "method": method.state_dict()}
            save(cache / CHECKPOINT, {"unit": _identity(unit), **state})
        last = training.curve[-1] if training.curve else {}
        seen = [f"{key} {value:.4f}" for key, value in last.items() if isinstance(value, float)]
        show(epoch + 1, config["epochs"], ", ".join([*seen, "epoch"]))
    return training


def begun(
    method: str,
    config: Values,
    train: Split,
    classes: int,
    device: str,
    seed: int,
    start: Sequence[Tensor] | None = None,
) -> Method:
    """The method, ready to train a config's net on this data, perhaps from given weights.

    Example:
        >>> config = {"net": "mlp-16", "lr": 0.1, "momentum": 0.9}
        >>> train = Split(torch.zeros(8, 1, 4, 4), torch.zeros(8, dtype=torch.long))
        >>> begun("sgd", config, train, 2, "cpu", 0).model(train.x).shape
        torch.Size([8, 2])
    """
    model = nets.build(config["net"], train.x.shape[1:], classes)
    if "mean_reach" in config:
        nets.uniform(model, config["mean_reach"], seed)
    elif "mean_std" in config:
        narrow(model, config["mean_std"], seed)
    else:
        nets.initialise(model, seed)
    if start is not None:
        model.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
    # Matrix products of an MLP already use tf32; convolutions gain more from bfloat16.
    half = config.get("bfloat16", not config["net"].startswith("mlp"))
    model = (Autocast(model) if half else model).to(device)
    torch.manual_seed(seed)  # for the initial draws of a family
    return learner(method, config, model, num_data=len(train), seed=seed)


def loaded(unit: Unit, name: str, device: str) -> Dataset:
    """A unit's data set, unscaled; for a trial, without its test images.

    All data of a reproduction comes from here, so that no trial can see a test set. Instead, a trial gets the
    training images again, from which its test images are held out.

    Raises:
        ValueError: It is a trial, and its config asks for the test set.

    Example:
        >>> trial = Unit("mnist", "16", "sgd", 100, {"held_out": 287}, "a trial", {"lr": 0.1})
        >>> digits = loaded(trial, "digits", "cpu")
        >>> digits.test is digits.train
        True
    """
    dataset = data.load(name, device=device)
    if unit.trial is None:
        return dataset
    if not unit.config["held_out"] or unit.config.get("tested_on") == "test":
        raise ValueError(f"{unit.name} is a trial, which is given no test set: hold out training images")
    return replace(dataset, test=dataset.train)


def prepared(unit: Unit, device: str) -> Dataset:
    """A unit's data set, padded and scaled by its config."""
    return ready(loaded(unit, unit.config["data"], device), unit.config)


def ready(dataset: Dataset, config: Values) -> Dataset:
    """A data set, padded and scaled by a config."""
    if config.get("pad"):
        dataset = padded(dataset, config["pad"])
    dataset = normalised(dataset, config["mean"], config["std"])
    if config.get("centred"):
        middle = dataset.train.x.mean(0)
        train, test = (replace(each, x=each.x - middle) for each in (dataset.train, dataset.test))
        dataset = replace(dataset, train=train, test=test)
    if config.get("labels") == "random":
        dataset = replace(dataset, train=replace(dataset.train, y=_random(dataset)))
    return dataset


def _random(dataset: Dataset) -> Tensor:
    """Random labels, the same for all seeds."""
    drawn = torch.randint(dataset.classes, (len(dataset.train),), generator=torch.Generator().manual_seed(0))
    return drawn.to(dataset.train.y.device)


def splits(dataset: Dataset, config: Values) -> tuple[Split, Split]:
    """Training data, and test data: held-out training images in a trial, otherwise the test set."""
    # One order for all seeds: no image is training data with one seed and held out with another.
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(0))
    kept, held_out = order[config["held_out"] :], order[: config["held_out"]]
    training = dataset.train.subset(kept)
    return training, dataset.test if config["tested_on"] == "test" else dataset.train.subset(held_out)


def batches(training: Split, config: Values, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one pass, drawn on the data's device; cropped and flipped if the config says so."""
    if not config.get("augment"):
        yield from data.batches(training, config["batch_size"], seed=seed, epoch=epoch)
        return
    count, size = len(training), training.x.shape[-1]
    device, rows = training.y.device, torch.arange(size, device=training.y.device)
    numbers = Split(torch.arange(count, device=device), training.y)
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    offsets = torch.randint(2 * _MARGIN + 1, (count, 2), generator=generator).to(device)
    flipped = torch.randint(2, (count, 1), generator=generator).bool().to(device)
    larger = nn.functional.pad(training.x, [_MARGIN] * 4)
    channels = torch.arange(larger.shape[1], device=device)[None, :, None, None]
    for index, y in data.batches(numbers, config["batch_size"], seed=seed, epoch=epoch):
        down = (offsets[index, :1] + rows)[:, None, :, None]
        across = offsets[index, 1:] + torch.where(flipped[index], rows.flip(0), rows)
        yield larger[index[:, None, None, None], channels, down, across[:, None, None, :]], y


def lr_factor(config: Values, epoch: int) -> float:
    """The factor on the learning rate in an epoch, counted from 0.

    Example:
        >>> [lr_factor({"epochs": 161, "milestones": [0.4969, 0.7453]}, epoch) for epoch in (79, 80, 120)]
        [1.0, 0.1, 0.01]
        >>> [lr_factor({"epochs": 4, "decay_from": 0.5}, epoch) for epoch in range(4)]
        [1.0, 1.0, 0.75, 0.25]
    """
    done = (epoch + 0.5) / config["epochs"]
    if "decay_from" in config:
        return float(min(1.0, (1.0 - done) / (1.0 - config["decay_from"])))
    passed = sum(done > share for share in config.get("milestones", ()))
    return float(round(0.1**passed, passed))


def counted(config: Values, epoch: int) -> float:
    """How often the data counts in an epoch, counted from 0, so that few epochs reach ``passes``.

    Once at first, when gradients are largest, then linearly more often.

    Example:
        >>> [round(counted({"epochs": 4, "passes": 10}, epoch), 3) for epoch in range(4)]
        [1.375, 2.125, 2.875, 3.625]
    """
    more = max(config["passes"] / config["epochs"] - 1.0, 0.0)
    return float(1.0 + 2.0 * more * (epoch + 0.5) / config["epochs"])


def _epoch(training: Training, epoch: int) -> float:
    """Train for one pass, and return its time in seconds."""
    config, method, seed = training.unit.config, training.method, training.unit.seed
    training.model.train()
    torch.manual_seed(_mixed(seed, epoch))  # so that dropout of a resumed run is the same
    scale_lr(method, lr_factor(config, epoch))
    if "passes" in config:  # keep the means' step size
        times = counted(config, epoch)
        for group in method.optimizer.param_groups:
            group["lr"], group["temperature"] = config["lr"] / times, 1.0 / times
    steps = -(-len(training.train) // config["batch_size"])
    wait, start = training.train.x.is_cuda, time.perf_counter()
    for number, (x, y) in enumerate(batches(training.train, config, seed, epoch), start=epoch * steps):
        temper(method, config, number, steps * config["epochs"])
        method.step(x, y)
    if wait:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def temper(method: Method, config: Values, step: int, steps: int) -> None:
    """Set the temperature of a config with a warm-up before a step, counted from 0.

    Example:
        >>> from posterity import IVON
        >>> from posterity_lab.continual import by_rule
        >>> net = nn.Linear(4, 2)
        >>> method = by_rule(net, IVON(net, num_data=8))
        >>> temper(method, {"warmup_start": 0.5, "warmup": 0.1}, step=5, steps=100)
        >>> method.optimizer.param_groups[0]["temperature"]
        0.75
    """
    if "warmup" in config:
        rising = warmup(max(1, round(config["warmup"] * steps)), start=config["warmup_start"])
        for group in method.optimizer.param_groups:
            group["temperature"] = rising(step)


def _resumed(
    unit: Unit, cache: Path, method: Method, device: str
) -> tuple[list[dict[str, Any]], list[float]]:
    path = cache / CHECKPOINT
    if not path.exists():
        return [], []
    state = load(path, device, _ANEW)
    if state.get("unit") != _identity(unit) or not {"curve", "seconds", "method"} <= state.keys():
        raise foreign(path, _ANEW)
    resume(method, state, cache, changing=("steps", "lr", "temperature"))
    return state["curve"], state["seconds"]


def _identity(unit: Unit) -> dict[str, Any]:
    """The properties that all parts of one training share."""
    return {"method": unit.method, "seed": unit.seed, "config": dict(unit.config)}


def _mixed(seed: int, epoch: int) -> int:
    """A seed that differs from that of `data.batches`, for draws other than the order."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} noise".encode(), digest_size=4).digest(), "big")
