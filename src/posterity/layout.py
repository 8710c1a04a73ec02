"""Where named blocks lie in one flat buffer, so that one operation serves all of them."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

# Blocks start at multiples of this, so that wide loads are aligned.
_ALIGN = 64
# A program of a kernel has so many places in each quarter of a block.
CHUNK = 128


@final
class Layout:
    """Blocks end to end, with some padding.

    Noise sees a block as four quarters, each of whole rows where it has rows; the last may be cut short.

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
        padded = [-(-size // _ALIGN) * _ALIGN for size in self.sizes]
        *self.starts, self.size = accumulate(padded, initial=0)
        # A vector has as many rows as numbers.
        self.quarters = [quarter(shape[0] if shape else 1) * shape[1:].numel() for shape in self.shapes]
        # Of contiguous tensors; one operation makes a view from them, two would slice and shape.
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self.hashes = [_signed(zlib.crc32(name.encode())) for name in self.names]
        self._tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        # Launches of kernels over the blocks; whoever makes them knows the keys.
        self.launches: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.names)

    def span(self, index: int) -> slice:
        """Where a block lies."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The blocks of a flat buffer."""
        first = flat.storage_offset()
        return [
            flat.as_strided(shape, strides, first + start)
            for shape, strides, start in zip(self.shapes, self._strides, self.starts, strict=True)
        ]

    def stacked(self, flat: Tensor, samples: int) -> list[Tensor]:
        """The blocks, ``[samples, *shape]``, of a buffer of so many times the size."""
        places = zip(self.shapes, self._strides, self.sizes, self.starts, strict=True)
        return [
            flat.as_strided((samples, *shape), (size, *strides), flat.storage_offset() + samples * start)
            for shape, strides, size, start in places
        ]

    def table(self, blocks: Sequence[int], device: torch.device) -> Tensor:
        """What each program that works on the given blocks has: hash of its block's name, first place in the
        quarters, size of a quarter, size and start of the block, number and size of those before it."""
        key = (device, tuple(blocks))
        if key not in self._tables:
            before = accumulate((self.sizes[i] for i in blocks), initial=0)
            rows = [
                [self.hashes[i], at, self.quarters[i], self.sizes[i], self.starts[i], number, past]
                for number, (i, past) in enumerate(zip(blocks, before, strict=False))
                for at in range(0, self.quarters[i], CHUNK)
            ]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64).view(-1, 7).to(device)
        return self._tables[key]


@lru_cache(maxsize=256)
def single(name: str, shape: torch.Size) -> Layout:
    """The layout of one block."""
    return Layout([name], [shape])


def quarter(rows: int) -> int:
    """Rows in the first quarter of so many: a multiple of 4, so that wide loads are aligned."""
    return -(-rows // 16) * 4


def _signed(number: int) -> int:
    """The same 32 bits as a signed number."""
    return number - (number >> 31 << 32)
