"""Where named blocks lie in one flat buffer, so that one operation serves all of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

# Blocks start at multiples of this: a chunk of so many numbers lies in one block.
CHUNK = 512


@final
class Layout:
    """Blocks end to end, each padded to whole chunks.

    Args:
        names: Of the blocks.
        shapes: Of the blocks.

    Example:
        >>> layout = Layout(["weight", "bias"], [(2, 3), (2,)])
        >>> [tuple(view.shape) for view in layout.views(torch.zeros(layout.size))]
        [(2, 3), (2,)]
        >>> [tuple(view.shape) for view in layout.stacked(torch.zeros(5 * layout.size), 5)]
        [(5, 2, 3), (5, 2)]
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self.names, self.shapes = list(names), [torch.Size(shape) for shape in shapes]
        self.sizes = [shape.numel() for shape in self.shapes]
        padded = [-(-size // CHUNK) * CHUNK for size in self.sizes]
        *self.starts, self.size = accumulate(padded, initial=0)
        self.hashes = [_signed(zlib.crc32(name.encode())) for name in self.names]
        self._tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def __len__(self) -> int:
        return len(self.names)

    def span(self, index: int) -> slice:
        """Where a block lies."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The blocks of a flat buffer."""
        return [flat[self.span(i)].view(shape) for i, shape in enumerate(self.shapes)]

    def stacked(self, flat: Tensor, samples: int) -> list[Tensor]:
        """The blocks, ``[samples, *shape]``, of a buffer of so many times the size."""
        return [
            flat[samples * start : samples * (start + size)].view(samples, *shape)
            for start, size, shape in zip(self.starts, self.sizes, self.shapes, strict=True)
        ]

    def table(self, blocks: Sequence[int], device: torch.device) -> Tensor:
        """For every chunk of the given blocks: hash of the block's name, position of the chunk in the block,
        size and start of the block, and how many numbers the given blocks before it have."""
        key = (device, tuple(blocks))
        if key not in self._tables:
            before = accumulate((self.sizes[i] for i in blocks), initial=0)
            rows = [
                [self.hashes[i], at, self.sizes[i], self.starts[i], past]
                for i, past in zip(blocks, before, strict=False)
                for at in range(0, self.sizes[i], CHUNK)
            ]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64).view(-1, 5).to(device)
        return self._tables[key]


@lru_cache(maxsize=256)
def single(name: str, shape: torch.Size) -> Layout:
    """The layout of one block."""
    return Layout([name], [shape])


def _signed(number: int) -> int:
    """The same 32 bits as a signed number."""
    return number - (number >> 31 << 32)
