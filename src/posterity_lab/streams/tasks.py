"""Tasks: what there is to learn, checked before anything is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from posterity_lab.data import Split

Examples: TypeAlias = Split | tuple[Tensor, Tensor]
Pair: TypeAlias = tuple[Examples, Examples]


@dataclass(frozen=True, eq=False)
class Task:
    """Training and test data; ``view`` is how this task looks at inputs that it shares with others.

    Example:
        >>> data = Split(torch.eye(2), torch.tensor([0, 1]))
        >>> Task(data, data, view=lambda x: -x).batch(torch.tensor([1]))
        (tensor([[-0., -1.]]), tensor([1]))
    """

    train: Split
    test: Split
    view: Callable[[Tensor], Tensor] | None = None

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The training examples at ``index``, drawn on the device that the data is on."""
        x, y = self.train.x.index_select(0, index), self.train.y.index_select(0, index)
        return (x if self.view is None else self.view(x)), y

    def seen(self, data: Split) -> Split:
        """Training or test data as this task shows them."""
        return data if self.view is None else Split(self.view(data.x), data.y)


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks in their order, whose labels are the outputs of one layer.

    Attributes:
        items: The tasks.
        classes: Outputs (logits) that a net for them needs.
        heads: Number of the head that each class is on, ``[classes]``; None where all share one.

    Raises:
        ValueError: A task is empty, has a label out of range, an input that is not finite, or does not fit
            the others.
    """

    items: Sequence[Task]
    classes: int
    heads: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("a stream needs at least one task: pass pairs of training and test data")
        for number, task in enumerate(self.items, start=1):
            _check(task, number, self.items[0].train.x, self.classes)

    def __len__(self) -> int:
        return len(self.items)


def one_head(pairs: Iterable[Pair], classes: int | None = None) -> Tasks:
    """A user's own tasks, whose labels mean the same in all of them, or are different classes.

    Args:
        pairs: Training and test data of every task, each a `Split` or a tuple of inputs and labels.
        classes: Number of classes; one more than the largest training label if not given.

    Example:
        >>> first = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
        >>> second = torch.ones(4, 2), torch.tensor([2, 1, 2, 1])
        >>> one_head([(first, first), (second, second)]).classes
        3
    """
    items = _items(pairs)
    return Tasks(items, max(map(_classes, items), default=0) if classes is None else classes)


def as_tasks(tasks: Tasks | Iterable[Pair]) -> Tasks:
    """The tasks, or a user's own pairs as by :func:`one_head`."""
    return tasks if isinstance(tasks, Tasks) else one_head(tasks)


def many_heads(pairs: Iterable[Pair]) -> Tasks:
    """Tasks with a head of their own each: the labels of every task begin where those of the last end.

    Args:
        pairs: Training and test data of every task, with labels from 0 in each.

    Example:
        >>> data = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
        >>> tasks = many_heads([(data, data), (data, data)])
        >>> tasks.classes, tasks.heads, tasks.items[1].train.y
        (4, tensor([0, 0, 1, 1]), tensor([2, 3, 2, 3]))
    """
    items, heads = list[Task](), list[int]()
    for number, task in enumerate(_items(pairs), start=1):
        classes, offset = _classes(task), len(heads)
        # Here too: once moved, a label below 0 would be one of the head before.
        _check(task, number, (items[0] if items else task).train.x, classes)
        train, test = (Split(data.x, data.y + offset) for data in (task.train, task.test))
        items.append(Task(train, test))
        heads += [number - 1] * classes
    device = items[0].train.y.device if items else None
    return Tasks(items, len(heads), torch.tensor(heads, device=device))


def _items(pairs: Iterable[Pair]) -> list[Task]:
    items = []
    for number, pair in enumerate(pairs, start=1):
        if not _two(pair):
            raise ValueError(f"task {number} is not a pair of training and test data: pass ((x, y), (x, y))")
        train, test = (_split(each, f"task {number}") for each in pair)
        items.append(Task(train, test))
    return items


def _split(examples: Examples, task: str) -> Split:
    if isinstance(examples, Split):
        return examples
    if not _two(examples) or not all(isinstance(each, Tensor) for each in examples):
        raise ValueError(
            f"{task} needs two tensors, inputs and labels, for training, and two for testing: pass "
            "((x, y), (x, y)), of a TensorDataset its .tensors, of an array torch.as_tensor(array)"
        )
    x, y = examples
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers, not {y.dtype}: convert them with .long()")
    return Split(x, y.long())


def _two(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _classes(task: Task) -> int:
    return max(1, int(task.train.y.max()) + 1) if task.train.y.numel() else 1


def _check(task: Task, number: int, like: Tensor, classes: int) -> None:
    _check_data(task.train, f"task {number}", "training", like, classes)
    _check_data(task.test, f"task {number}", "test", like, classes)


def _check_data(data: Split, task: str, kind: str, like: Tensor, classes: int) -> None:
    if data.y.dim() != 1 or len(data.x) != len(data.y):
        shapes = f"{list(data.x.shape)} and labels {list(data.y.shape)}"
        raise ValueError(f"{task} has {kind} inputs {shapes}: give one label for every input")
    if len(data) == 0:
        raise ValueError(f"{task} has no {kind} examples: leave it out, or give it some")
    if data.x.shape[1:] != like.shape[1:]:
        shapes = f"{list(data.x.shape[1:])}, not {list(like.shape[1:])} as task 1"
        raise ValueError(f"{task} has {kind} inputs of shape {shapes}: one net must take all of them")
    if not data.x.is_floating_point():
        raise ValueError(f"{task} has {kind} inputs of {data.x.dtype}: convert them to floats and scale them")
    if data.x.device != like.device or data.y.device != like.device:
        raise ValueError(f"{task} has {kind} data on another device than {like.device}: move all to one")
    lowest, highest = int(data.y.min()), int(data.y.max())
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{task} has the {kind} label {wrong}, which is not in 0 … {classes - 1}: correct it"
        )
    finite = torch.isfinite(data.x).flatten(1).all(1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise ValueError(f"{task} has {kind} inputs that are not finite, the first at {first}: remove them")
