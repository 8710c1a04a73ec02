"""Streams: when each task is shown.

A stream is drawn in blocks of batches. What a block draws is a function of the seed and the block's number,
made by a CPU generator, so it is the same on every device, and a pass can begin anywhere. The indices of a
block go to the data's device at once; no batch waits for the host.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from posterity_lab.data import Split
from posterity_lab.streams.tasks import Pair, Tasks, as_tasks

Batch: TypeAlias = tuple[Tensor, Tensor]

# Batches of a fading stream that are drawn at once.
_BLOCK = 100


class _Drawn(NamedTuple):
    """Examples of a block in their order: their tasks, their places there, and the sizes of the batches."""

    task: Tensor
    place: Tensor
    sizes: Tensor


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches in their order, the same at every pass, with what evaluation needs beside them.

    Attributes:
        tasks: What is learned.
        ends: Number of batches after which each task's own data is over; of a joint stream, only the last.
        setting: What decides the batches, given the data.

    Example:
        >>> from posterity_lab.data import load
        >>> from posterity_lab.streams import permuted
        >>> shown = stream(permuted(load("digits"), tasks=2, seed=0), epochs=1, batch_size=500, seed=0)
        >>> [len(y) for x, y in shown], len(shown), shown.ends
        ([500, 500, 437, 500, 500, 437], 6, [3, 6])
        >>> [len(y) for x, y in shown.batches(start=5)]
        [437]
    """

    tasks: Tasks
    ends: list[int]
    setting: Mapping[str, float]
    _bounds: list[int]
    _draw: Callable[[int, Generator], _Drawn]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def __len__(self) -> int:
        return self._bounds[-1]

    @property
    def tests(self) -> list[Split]:
        """Test set of every task, as the task shows it."""
        return [self.test(task) for task in range(len(self.tasks))]

    def test(self, task: int) -> Split:
        """Test set of one task, counted from 0."""
        return self.tasks.items[task].seen(self.tasks.items[task].test)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number ``start`` on; those before it are not drawn."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must lie in 0 … {len(self)}, not {start}")
        return self._pass(start)

    def _pass(self, start: int) -> Iterator[Batch]:
        for block in range(bisect_right(self._bounds, start) - 1, len(self._bounds) - 1):
            yield from self._block(block, max(start - self._bounds[block], 0))

    def _block(self, block: int, skip: int) -> Iterator[Batch]:
        task, place, sizes = self._draw(block, _generator(int(self.setting["seed"]), block))
        groups = len(sizes) * len(self.tasks)
        key = torch.repeat_interleave(torch.arange(len(sizes)), sizes) * len(self.tasks) + task
        counts = torch.bincount(key, minlength=groups).view(len(sizes), -1).tolist()
        index = place[key.argsort(stable=True)].to(self.tasks.items[0].train.y.device)
        position = sum(map(sum, counts[:skip]))
        for wanted in counts[skip:]:
            pieces = list[Batch]()
            for number, count in enumerate(wanted):
                if count:
                    pieces.append(self.tasks.items[number].batch(index[position : position + count]))
                    position += count
            x, y = (
                torch.cat(column) if len(column) > 1 else column[0] for column in zip(*pieces, strict=True)
            )
            yield x, y


def stream(
    tasks: Tasks | Iterable[Pair], *, epochs: int, batch_size: int, seed: int, overlap: float = 0.0
) -> Stream:
    """Tasks one after another or, with an overlap, fading into each other.

    Args:
        tasks: What to show; a user's own pairs of training and test data are taken as by ``one_head``.
        epochs: Passes over the training data of each task before the next begins; with an overlap, as many
            batches as these passes have.
        batch_size: Examples per batch; without an overlap the last of an epoch may have fewer.
        seed: Of the order of the examples.
        overlap: 0, or the part of a task (at most ½) for which it reaches into each neighbour. Every example
            of a batch then draws its task from the probabilities of :func:`trapezoids`, and its place in the
            task at random. The BGD authors' continuous stream has ¼.

    Example:
        >>> one, two = ((torch.full((4, 2), float(k)), torch.tensor([0, 1, 0, 1])) for k in range(2))
        >>> [float(x[0, 0]) for x, y in stream([(one, one), (two, two)], epochs=2, batch_size=4, seed=0)]
        [0.0, 0.0, 1.0, 1.0]
    """
    shown = as_tasks(tasks)
    _check(epochs, batch_size)
    sizes = [len(task.train) for task in shown.items]
    steps = [-(-size // batch_size) for size in sizes]
    ends = list(accumulate(epochs * each for each in steps))

    def epoch(block: int, generator: Generator) -> _Drawn:
        task = block // epochs
        place = torch.randperm(sizes[task], generator=generator)
        return _Drawn(torch.full_like(place, task), place, _sizes(sizes[task], batch_size))

    setting = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "overlap": overlap}
    if overlap:
        bounds = [*range(0, ends[-1], _BLOCK), ends[-1]]
        return Stream(shown, ends, setting, bounds, _fading(sizes, trapezoids(ends, overlap), batch_size))
    bounds = [0, *accumulate(each for each in steps for _ in range(epochs))]
    return Stream(shown, ends, setting, bounds, epoch)


def joint(tasks: Tasks | Iterable[Pair], *, epochs: int, batch_size: int, seed: int) -> Stream:
    """All tasks at once, their examples shuffled together: what a learner could do if nothing ever changed.

    Args:
        tasks: What to show.
        epochs: Passes over the training data of all tasks.
        batch_size: Examples per batch; the last of an epoch may have fewer.
        seed: Of the order of the examples.

    Example:
        >>> one, two = ((torch.full((4, 2), float(k)), torch.tensor([0, 1, 0, 1])) for k in range(2))
        >>> shown = joint([(one, one), (two, two)], epochs=1, batch_size=8, seed=0)
        >>> [float(x[:, 0].mean()) for x, y in shown], shown.ends
        ([0.5], [1])
    """
    shown = as_tasks(tasks)
    _check(epochs, batch_size)
    sizes = [len(task.train) for task in shown.items]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    place = torch.cat([torch.arange(size) for size in sizes])

    def epoch(block: int, generator: Generator) -> _Drawn:
        order = torch.randperm(len(owner), generator=generator)
        return _Drawn(owner[order], place[order], _sizes(len(owner), batch_size))

    steps = -(-len(owner) // batch_size)
    setting = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "joint": 1}
    return Stream(shown, [epochs * steps], setting, list(range(0, epochs * steps + 1, steps)), epoch)


def trapezoids(ends: Sequence[int], overlap: float) -> Tensor:
    """Probability of every task at every batch of a fading stream, ``[batches, tasks]``; rows sum to 1.

    Around the end of a task its probability falls on a straight line from 1 to 0, while that of the next one
    rises. The line begins ``overlap`` times the shorter of the two tasks before the end, and is over as long
    after it.

    Args:
        ends: Number of batches after which each task would end without an overlap.
        overlap: Part of a task for which it reaches into its neighbour.

    Example:
        >>> trapezoids([4, 8], overlap=0.25)[2:7, 1]
        tensor([0.0000, 0.0000, 0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """
    if not 0 < overlap <= 0.5:
        raise ValueError(f"overlap must be 0, or greater and at most 0.5, not {overlap:g}")
    batch = torch.arange(ends[-1], dtype=torch.float64)
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # Probability that a task or a later one is drawn: 1 for the first, a ramp around the start of each other.
    begun = [torch.ones_like(batch)]
    for end, before, after in zip(ends, lengths, lengths[1:], strict=False):
        reach = overlap * min(before, after)
        begun.append(((batch - end + reach) / (2 * reach)).clamp(0.0, 1.0))
    begun.append(torch.zeros_like(batch))
    return torch.stack([one - other for one, other in pairwise(begun)], dim=1)


def _fading(sizes: list[int], probs: Tensor, batch_size: int) -> Callable[[int, Generator], _Drawn]:
    def draw(block: int, generator: Generator) -> _Drawn:
        rows = probs[block * _BLOCK : (block + 1) * _BLOCK]
        task = torch.multinomial(rows, batch_size, replacement=True, generator=generator).flatten()
        share = torch.rand(len(task), generator=generator, dtype=torch.float64)
        place = (share * torch.tensor(sizes)[task]).long()
        return _Drawn(task, place, torch.full((len(rows),), batch_size))

    return draw


def _sizes(examples: int, batch_size: int) -> Tensor:
    return torch.tensor([min(batch_size, examples - start) for start in range(0, examples, batch_size)])


def _generator(seed: int, block: int) -> Generator:
    # As `data.batches`: the CPU generator keeps only the low 32 bits of a seed, so both numbers are hashed.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {block}".encode(), digest_size=4).digest(), "big")
    return Generator().manual_seed(mixed)


def _check(epochs: int, batch_size: int) -> None:
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size must be at least 1, not {epochs} and {batch_size}")
