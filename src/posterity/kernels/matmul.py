"""A Triton kernel: a linear layer whose weights are stacked over samples.

Its backward products are torch's own, which are as fast; forward, torch copies the bias first and splits
small products badly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# One for each multiprocessor of an H200. Larger tiles read their operands fewer times, as long as there are
# enough of them.
_ENOUGH_PROGRAMS = 132


class Tile(NamedTuple):
    """The output of one program, ``[rows, columns]``, the part of the sum per step, and compiler options.

    Sizes are powers of two from 16 on.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


# The first one with enough programs is used, otherwise the last one.
_TILES = (Tile(64, 128, 32), Tile(64, 64, 32, stages=4), Tile(64, 32, 64))


# The batch is often ragged, so its size must not cause a new compilation. Widths and strides are fixed for a
# layer, and if they are multiples of 16 four values can be loaded at once.
@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, columns, depth, x_sample, x_row, weight_sample, weight_row, bias_sample,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # Programs that share a tile of the weights are neighbours, so that it is read from memory once.
    top = tl.program_id(0) * ROWS
    sample = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, DEPTH)
    row_inside, column_inside = top + row < rows, column < columns
    x += sample * x_sample + top.to(tl.int64) * x_row
    weight += sample * weight_sample
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + along
        inside = at < depth
        left = tl.load(
            x + row[:, None] * x_row + at[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            weight + at[:, None] + column[None, :] * weight_row,
            mask=inside[:, None] & column_inside[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision="tf32")
    if BIASED:
        value = tl.load(bias + sample * bias_sample + column, mask=column_inside, other=0.0)
        acc += value.to(tl.float32)[None, :]
    out += (sample * rows + top) * columns
    tl.store(
        out + row[:, None] * columns + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


def multiplies(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether kernels support such a product with torch's settings: halves, or float32 as tf32."""
    dtype = x.dtype if dtype is None else dtype
    if dtype == torch.float32:
        return x.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return x.is_cuda and dtype in (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """``x Wᵀ + b`` under every sample's weights, ``[K, B, O]``; float32 is multiplied as tf32.

    Args:
        x: Inputs ``[K, B, I]``, or ``[B, I]`` for all samples.
        weight: Weights ``[K, O, I]``.
        bias: Biases ``[K, O]``.
        tile: The work of each program; by default chosen from the shape.
    """
    x, weight = _inner(x), _inner(weight)
    samples, columns, depth = weight.shape
    rows = x.shape[-2]
    x = x.expand(samples, rows, depth)
    bias = None if bias is None else _inner(bias)
    out = x.new_empty(samples, rows, columns)
    if tile is None:
        tile = _choose(samples, rows, columns, depth)
    _linear[triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), samples](
        x, weight, bias, out, rows, columns, depth,
        *x.stride()[:2], *weight.stride()[:2], 0 if bias is None else bias.stride(0),
        BIASED=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _inner(tensor: Tensor) -> Tensor:
    """The tensor with its last axis contiguous in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _choose(samples: int, rows: int, columns: int, depth: int) -> Tile:
    for tile in _TILES:
        tile = tile._replace(
            rows=_at_most(tile.rows, rows),
            columns=_at_most(tile.columns, columns),
            depth=_at_most(tile.depth, depth),
        )
        if samples * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= _ENOUGH_PROGRAMS:
            break
    return tile


def _at_most(size: int, there: int) -> int:
    """A tile's size, or if it is less, the smallest power of two from 16 on that covers everything."""
    return min(size, max(16, triton.next_power_of_2(there)))
