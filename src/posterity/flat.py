"""The layout of named blocks in one flat buffer, so that one operation handles all of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

# Blocks start at multiples of this, so that wide loads are aligned.
ALIGN = 64
# Numbers that a CPU draws from one seed: with fewer, seeding takes time; with more, threads have too little
# to share.
CHUNK = 1 << 17
# Numbers per program of a kernel: four from each Philox counter, one in every quarter of the tile.
TILE = 512


class Piece(NamedTuple):
    """The numbers that a CPU draws from one seed for a block, which may be a slice of a larger one.

    Attributes:
        chunk: Number of the chunk, in the whole block.
        length: Numbers in the chunk; the last one of a block is shorter.
        parts: Begin and end of each run of the numbers in the block, and the run's begin in the chunk.
    """

    chunk: int
    length: int
    parts: list[tuple[int, int, int]]


@final
class Layout:
    """Blocks one after another, with some padding.

    A block may be a slice of a larger one, as a shard is; its noise is then that slice of the whole block's.

    Args:
        names: The blocks' names.
        shapes: The blocks' shapes.
        wholes: Shapes of the blocks' whole tensors, if they are slices.
        offsets: Offsets of the blocks in their whole tensors, along every axis.
        align: Blocks start at multiples of this; with 1 there is no padding.

    Example:
        >>> layout = Layout(["weight", "bias"], [(2, 3), (2,)])
        >>> [tuple(view.shape) for view in layout.views(torch.zeros(layout.size))]
        [(2, 3), (2,)]
        >>> [tuple(view.shape) for view in layout.stacked(torch.zeros(5 * layout.size), 5)]
        [(5, 2, 3), (5, 2)]
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        wholes: Sequence[Sequence[int]] | None = None,
        offsets: Sequence[Sequence[int]] | None = None,
        align: int = ALIGN,
    ) -> None:
        self.names, self.shapes = list(names), [torch.Size(shape) for shape in shapes]
        self.sizes = [shape.numel() for shape in self.shapes]
        padded = [-(-size // align) * align for size in self.sizes]
        *self.starts, self.size = accumulate(padded, initial=0)
        # Of contiguous tensors; one operation makes a view from them, two would slice and shape.
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self.hashes = [zlib.crc32(name.encode()) for name in self.names]
        self._wholes = self.shapes if wholes is None else [torch.Size(whole) for whole in wholes]
        firsts = offsets or [(0,) * len(shape) for shape in self.shapes]
        self._runs = list(map(_runs, self.shapes, self._wholes, firsts))
        self._tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        # Cached kernel launches over the blocks, by keys of their users.
        self.launches: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.names)

    def span(self, index: int) -> slice:
        """A block's span in the buffer."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The blocks of a flat buffer."""
        first = flat.storage_offset()
        return [
            flat.as_strided(shape, strides, first + start)
            for shape, strides, start in zip(self.shapes, self._strides, self.starts, strict=True)
        ]

    def stacked(self, flat: Tensor, samples: int) -> list[Tensor]:
        """The blocks, ``[samples, *shape]``, of a buffer that is ``samples`` times as large."""
        places = zip(self.shapes, self._strides, self.sizes, self.starts, strict=True)
        return [
            flat.as_strided((samples, *shape), (size, *strides), flat.storage_offset() + samples * start)
            for shape, strides, size, start in places
        ]

    @cached_property
    def pieces(self) -> list[tuple[int, Piece]]:
        """The pieces that a CPU draws, by block number, the longest first: the chunks that a block
        touches."""
        found = []
        for block, whole in enumerate(self._wholes):
            for at, parts in groupby(self._windows(block, CHUNK), key=itemgetter(0)):
                runs = [(begin, end, begin - place) for _, place, begin, end in parts]
                found.append((block, Piece(at // CHUNK, min(CHUNK, whole.numel() - at), runs)))
        return sorted(found, key=lambda each: -each[1].length)

    def table(self, blocks: Sequence[int], device: torch.device) -> Tensor:
        """One row for each program that works on the given blocks: hash of its block's name, its first
        counter, place of that counter's first number in the block, begin and end of its part of the block,
        size and start of the block, number and size of the blocks before it."""
        key = (device, tuple(blocks))
        if key not in self._tables:
            before = accumulate((self.sizes[i] for i in blocks), initial=0)
            rows = [
                (self.hashes[i], at // 4, *part, self.sizes[i], self.starts[i], number, past)
                for number, (i, past) in enumerate(zip(blocks, before, strict=False))
                for at, *part in self._windows(i, TILE)
            ]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64).view(-1, 9).to(device)
        return self._tables[key]

    def _windows(self, block: int, width: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts of a block by windows of so many numbers of its whole: where the window begins there,
        where in the block that would be, and begin and end of the part in the block."""
        firsts, length = self._runs[block]
        for low, first in zip(range(0, self.sizes[block], length or 1), firsts, strict=False):
            for at in range(first - first % width, first + length, width):
                place = at - first + low
                yield at, place, max(place, low), min(place + width, low + length)


def concatenate(layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, in one node of autograd's graph.

    Args:
        layout: Of them, without padding.
        tensors: Of its shapes.

    Example:
        >>> concatenate(of_shapes(((2, 1), (1,))), [torch.ones(2, 1), torch.zeros(1)])
        tensor([1., 1., 0.])
    """
    joined: Tensor = _Concatenate.apply(layout, *tensors)  # type: ignore[no-untyped-call]
    return joined


def apart(layout: Layout, flat: Tensor) -> tuple[Tensor, ...]:
    """The inverse of :func:`concatenate`; leading dimensions stay.

    Example:
        >>> [part.shape for part in apart(of_shapes(((2, 1), (1,))), torch.zeros(5, 3))]
        [torch.Size([5, 2, 1]), torch.Size([5, 1])]
    """
    parts: tuple[Tensor, ...] = _Apart.apply(layout, flat)  # type: ignore[no-untyped-call]
    return parts


@lru_cache(maxsize=256)
def of_shapes(shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of blocks without names, and without padding."""
    return Layout([""] * len(shapes), shapes, align=1)


@lru_cache(maxsize=256)
def of_names(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of whole blocks."""
    return Layout(names, shapes)


@final
class _Concatenate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(layout: Layout, *tensors: Tensor) -> Tensor:
        return torch.cat([each.reshape(-1) for each in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layout.views(grad.contiguous())


@final
class _Apart(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(layout: Layout, flat: Tensor) -> tuple[Tensor, ...]:
        lead = flat.shape[:-1]
        parts = torch.split(flat, layout.sizes, -1)
        return tuple(part.view(lead + shape) for part, shape in zip(parts, layout.shapes, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sizes, ctx.lead = inputs[0].sizes, inputs[1].shape[:-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        unused = [size for grad, size in zip(grads, ctx.sizes, strict=True) if grad is None]
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return None, None
        zeros = like.new_zeros(*ctx.lead, max(unused, default=0))  # autograd would make some for each part
        parts = [
            zeros[..., :size] if grad is None else grad.reshape(*ctx.lead, -1)
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return None, torch.cat(parts, -1)


def largest(numbers: Tensor) -> Tensor:
    """The size of the largest of some numbers; NaN if one is.

    Example:
        >>> largest(torch.tensor([1.0, -3.0]))
        tensor(3.)
    """
    if not numbers.numel():
        return numbers.new_zeros(())
    if numbers.is_cuda:
        size: Tensor = torch.linalg.vector_norm(numbers, math.inf)
    else:
        low, high = torch.aminmax(numbers)  # a CPU takes twenty times as long for that norm
        size = torch.maximum(high, -low)
    return size


@lru_cache(maxsize=256)
def single(name: str, shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]) -> Layout:
    """The layout of one block."""
    return Layout([name], [shape], [whole], [offset])


def _runs(shape: Sequence[int], whole: Sequence[int], offset: Sequence[int]) -> tuple[list[int], int]:
    """The begin of each contiguous run of a slice in its whole block, and the length of a run."""
    axes = list(zip(shape, whole, offset, strict=False))
    inside = all(0 <= first <= full - size for size, full, first in axes)
    if not (inside and len(axes) == len(shape) == len(whole) == len(offset)):
        raise ValueError(
            f"a slice of shape {tuple(shape)} at {tuple(offset)} is not in a block of shape {tuple(whole)}"
        )
    firsts, length, stride = [0], 1, 1
    for size, full, first in reversed(axes):
        if length == stride:  # whole so far: neighbours along this axis follow each other
            firsts, length = [first * stride], length * size
        else:
            firsts = [(first + i) * stride + inner for i in range(size) for inner in firsts]
        stride *= full
    return firsts, length
