"""Streams: data that arrives batch by batch while what it is about changes underneath.

A method sees a stream's batches and nothing else. Where the tasks change, and the test set of each task, are
there for the one who evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from posterity_lab.data import Dataset, Split, batches

Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches in their order, the same at every pass, with what evaluation needs beside them.

    Attributes:
        batches: Starts a pass over the stream.
        tests: Test set of every task.
        ends: Number of batches after which each task's own data is over.

    Example:
        >>> from posterity_lab.data import load
        >>> stream = permuted(load("digits"), tasks=2, epochs=1, batch_size=500, seed=0)
        >>> [len(y) for x, y in stream], len(stream), stream.ends
        ([500, 500, 437, 500, 500, 437], 6, [3, 6])
    """

    batches: Callable[[], Iterator[Batch]]
    tests: list[Split]
    ends: list[int]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def __len__(self) -> int:
        return self.ends[-1]


def permuted(dataset: Dataset, tasks: int, epochs: int, batch_size: int, seed: int) -> Stream:
    """Tasks that show the same images with their pixels rearranged, one arrangement per task.

    The first task is the data as it is. Labels stay, so one output layer serves all tasks.

    Args:
        dataset: What to rearrange.
        tasks: Number of arrangements.
        epochs: Passes over the training images of each task before the next begins.
        batch_size: Images per batch; the last of an epoch may have fewer.
        seed: Of the arrangements and of the order of the images.

    Example:
        >>> from posterity_lab.data import load
        >>> digits = load("digits")
        >>> first, second = permuted(digits, tasks=2, epochs=1, batch_size=32, seed=0).tests
        >>> bool((first.x == digits.test.x).all()), bool((second.x == digits.test.x).all())
        (True, False)
    """
    if tasks < 1 or epochs < 1 or batch_size < 1:
        raise ValueError(
            f"tasks, epochs and batch_size must be at least 1, not {tasks}, {epochs} and {batch_size}"
        )
    if len(dataset.train) == 0:
        raise ValueError(f"{dataset.name} has no training images, so nothing can be learned from it")
    generator = torch.Generator().manual_seed(seed)
    pixels = dataset.test.x[0].numel()
    orders = [torch.arange(pixels)]
    orders += [torch.randperm(pixels, generator=generator) for _ in range(tasks - 1)]

    def passes() -> Iterator[Batch]:
        for task, order in enumerate(orders):
            for epoch in range(task * epochs, (task + 1) * epochs):
                for x, y in batches(dataset.train, batch_size, seed=seed, epoch=epoch):
                    yield _rearranged(x, order), y

    steps = epochs * -(-len(dataset.train) // batch_size)
    return Stream(
        batches=passes,
        tests=[Split(_rearranged(dataset.test.x, order), dataset.test.y) for order in orders],
        ends=[steps * (task + 1) for task in range(tasks)],
    )


def _rearranged(x: Tensor, order: Tensor) -> Tensor:
    return x.flatten(1)[:, order.to(x.device)].view_as(x)
