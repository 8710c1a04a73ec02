"""Running a method through a stream: learn, test on all tasks whenever one is over, resume after a kill.

The method gets batches. If it has a method ``boundary(data)``, that is called when a task is over. Everything
random is a function of seeds and counts, so a checkpoint needs no generator's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from posterity import Factorised, Prediction, VariationalOptimizer, compile_step, metrics
from posterity.continual import average_accuracy, backward_transfer, forgetting, forward_transfer
from posterity.predict import Mode
from posterity_lab import methods
from posterity_lab.config import Config
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.run_files import CHECKPOINT, load, save
from posterity_lab.run_files import resume as go_on
from posterity_lab.streams import Mask, Stream, masked_loss, own_head, restricted

_SCORES = ("accuracy", "nll", "ece")


@runtime_checkable
class AsksForBoundaries(Protocol):
    """A method that uses task boundaries."""

    def boundary(self, data: Split) -> None:
        """Called when the task with training data ``data`` is over."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the network: a row for every end of a task, a column for every task.

    Attributes:
        accuracy: Share of right labels.
        nll: Mean negative log-likelihood.
        ece: Expected calibration error.
        untrained: Accuracy on every task before anything was learned, ``[tasks]``.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
        >>> Scores(rows, rows, rows, torch.zeros(2)).summary()["forgetting"]
        0.5
    """

    accuracy: Tensor
    nll: Tensor
    ece: Tensor
    untrained: Tensor

    def summary(self) -> dict[str, float]:
        """The numbers for a table: means over tasks at the end, and transfer if there is any."""
        result = {"average_accuracy": average_accuracy(self.accuracy)}
        result |= {"nll": float(self.nll[-1].mean()), "ece": float(self.ece[-1].mean())}
        rows, tasks = self.accuracy.shape
        if rows == tasks > 1:
            result["forgetting"] = forgetting(self.accuracy)
            result["backward_transfer"] = backward_transfer(self.accuracy)
            result["forward_transfer"] = forward_transfer(self.accuracy, self.untrained)
        return result


def run(
    method: Method,
    stream: Stream,
    *,
    mode: Mode = "average",
    samples: int = 10,
    seed: int = 0,
    folder: Path | None = None,
    every: int | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Scores:
    """Learn a stream, and test on every task's test set at the start and whenever a task is over.

    Args:
        method: What learns; its model is on the device of the stream's data.
        stream: What there is to learn.
        mode: How sampled networks are combined in tests, as in ``posterity.predict``; without a posterior,
            the weights themselves are tested.
        samples: Sampled networks in tests.
        seed: Chooses them.
        folder: Where to leave a checkpoint at the end of every task.
        every: Number of batches after which a checkpoint is written, too.
        resume: Resume from the folder's checkpoint, to the exact result of an uninterrupted run; start if
            there is none. The method and the stream must have been built as for the first part.
        progress: Show a progress bar.

    Raises:
        ValueError: The folder holds a run already or another one, or the net has too few outputs.
        FloatingPointError: The method has diverged; the last checkpoint is left.

    Example:
        >>> from posterity import BGD
        >>> from posterity_lab import data, nets, streams
        >>> tasks = streams.permuted(data.load("digits"), tasks=2, seed=0)
        >>> net = nets.mlp(64, [16], tasks.classes)
        >>> stream = streams.stream(tasks, epochs=1, batch_size=128, seed=0)
        >>> scores = run(by_rule(net, BGD(net, std_init=0.05)), stream, samples=2, progress=False)
        >>> scores.accuracy.shape
        torch.Size([2, 2])
    """
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    test = partial(_test, method, stream, mode, Config(eval_samples=samples, seed=seed))
    identity = _identity(method, stream, mode=mode, samples=samples, seed=seed)
    state = _read(folder, identity, resume, stream.tasks.items[0].train.y.device)
    if state is None:
        state = {"batch": 0, "untrained": test()["accuracy"], "rows": []}
    else:
        go_on(method, state, folder or Path())
    rows: list[dict[str, list[float]]] = state["rows"]
    done: int = state["batch"]
    with _bar(progress) as bar:
        shown = bar.add_task("", total=len(stream), completed=done, row=len(rows), of=len(stream.ends))
        for number, (x, y) in enumerate(stream.batches(done), start=done + 1):
            method.step(x, y)
            bar.update(shown, completed=number)
            over = number in stream.ends
            if over:
                if number < len(stream) and isinstance(method, AsksForBoundaries):
                    task = stream.tasks.items[len(rows)]
                    method.boundary(task.seen(task.train))
                rows.append(test())
                bar.update(shown, row=len(rows))
            if folder is not None and (over or (every is not None and number % every == 0)):
                folder.mkdir(parents=True, exist_ok=True)
                so_far = {"batch": number, "untrained": state["untrained"], "rows": rows}
                save(folder / CHECKPOINT, {"identity": identity, "method": method.state_dict(), **so_far})
    matrices = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in _SCORES}
    return Scores(**matrices, untrained=torch.tensor(state["untrained"], dtype=torch.float64))


def by_rule(
    model: nn.Module, optimizer: VariationalOptimizer, mask: Mask | None = None, parts: int = 1
) -> Method:
    """A rule such as BGD or IVON as a method, all weight samples in one pass.

    Args:
        model: What to train.
        optimizer: The rule, which holds the model's parameters.
        mask: Which logits count in training.
        parts: Of a batch, each with weight samples of its own.

    Example:
        >>> from posterity import BGD
        >>> net = nn.Linear(4, 2)
        >>> method = by_rule(net, BGD(net))
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    """
    return _Rule(model, optimizer, mask, parts)


@final
class _Rule(Method):
    def __init__(
        self, model: nn.Module, optimizer: VariationalOptimizer, mask: Mask | None, parts: int
    ) -> None:
        self.model, self.optimizer, self._rule = model, optimizer, optimizer
        self._train_step = compile_step(model, masked_loss(mask), optimizer, parts=parts)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._train_step(x, y)

    def posterior(self) -> Factorised:
        return self._rule.posterior()


def _test(method: Method, stream: Stream, mode: Mode, config: Config) -> dict[str, list[float]]:
    """Every score on every task."""
    result: dict[str, list[float]] = {key: [] for key in _SCORES}
    posterior, classes, heads = method.posterior(), stream.tasks.classes, stream.tasks.heads
    items = stream.tasks.items
    for number, task in enumerate(items):
        same = (
            k for k, each in enumerate(items[:number]) if (each.test, each.view) == (task.test, task.view)
        )
        if (known := next(same, None)) is not None:
            for scores in result.values():
                scores.append(scores[known])
            continue
        data = stream.test(number)
        drawn = methods.predictions(method.model, posterior, data.x, config, mode=mode)
        outputs = drawn.samples.shape[-1]
        if outputs < classes or (heads is not None and outputs != classes):
            raise ValueError(f"the net has {outputs} outputs and the stream {classes} classes: build another")
        if heads is not None:
            drawn = Prediction(restricted(drawn.samples, own_head(data.y, heads)), drawn.mode)
        probs = drawn.probs
        if not bool(torch.isfinite(probs).all()):
            raise FloatingPointError("the predictions are not finite: lower lr")
        result["accuracy"].append(metrics.accuracy(probs, data.y))
        averaged = Prediction(drawn.samples, "average")  # votes are no probabilities
        result["nll"].append(metrics.nll(averaged, data.y))
        result["ece"].append(metrics.ece(averaged.probs, data.y))
    return result


def _identity(method: Method, stream: Stream, **how: Any) -> dict[str, Any]:
    """What two parts of one run have in common."""
    sizes = [len(task.train) for task in stream.tasks.items]
    return {
        "method": type(method).__name__,
        "optimizer": type(method.optimizer).__name__,
        "stream": dict(stream.setting),
        "sizes": sizes,
        "classes": stream.tasks.classes,
        **how,
    }


def _read(
    folder: Path | None, identity: Mapping[str, Any], resume: bool, device: torch.device
) -> dict[str, Any] | None:
    if folder is None:
        if resume:
            raise ValueError("there is nothing to resume from: name the folder of the run")
        return None
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    if not resume:
        raise ValueError(f"{folder} holds a run already: continue it with resume=True or name another folder")
    state = load(path, device)
    if state.get("identity") != identity or not {"batch", "untrained", "rows", "method"} <= state.keys():
        raise ValueError(
            f"{path} is of another method or stream: build both as before, or name another folder"
        )
    return state


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("task {task.fields[row]}/{task.fields[of]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
