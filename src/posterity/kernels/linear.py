"""Triton kernels: the products of a linear layer whose weights are stacked over samples.

The gradients with respect to the weights are never stored: :func:`linear_moments` adds each sample's to the
two sums that learning needs while it is still in registers, beside the noise made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.noise import address
from posterity.kernels.philox import eps, eps_tile

if TYPE_CHECKING:
    from posterity.noise import Noise

# Two for each multiprocessor of an H200: fewer leave some of them idle or waiting for memory.
_ENOUGH_PROGRAMS = 264


class Tile(NamedTuple):
    """What one program makes, ``[rows, columns]``, by how much of the sum at a time, and with what.

    Sizes are powers of two from 16 on.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


# The first that gives enough programs is taken, or else the last.
_FORWARD = (Tile(128, 64, 32), Tile(64, 64, 32), Tile(64, 32, 32), Tile(16, 32, 64, 2), Tile(16, 16, 64, 1))
# Tensor cores read float32 from shared memory along the sum only. These products have the sum on the outer
# axis of an operand, where Hopper's own instructions need it turned in registers first: tiles with fewer than
# 64 rows or 4 warps take the older ones, which need not.
_BACKWARD = (
    Tile(32, 128, 32),
    Tile(32, 64, 32),
    Tile(32, 32, 32, 2),
    Tile(16, 32, 64, 2),
    Tile(16, 16, 64, 1),
)
_MOMENTS = (Tile(32, 128, 32), Tile(32, 64, 32), Tile(32, 32, 32, 2), Tile(16, 16, 64, 1))


# The batch is often ragged, so that its size must not compile anew. Widths and strides are a layer's own, and
# that they are multiples of 16 is what lets four numbers be loaded at once.
@triton.jit(do_not_specialize=["rows"])
def _product(
    a,
    b,
    bias,
    out,
    rows,
    columns,
    depth,
    a_sample,
    a_row,
    b_sample,
    b_depth,
    b_column,
    bias_sample,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``out[k, r, c] = Σ_d a[k, r, d] · b[k, d, c] + bias[k, c]``."""
    # Programs that share a tile of b are neighbours, so that it comes from memory once.
    top = tl.program_id(0) * ROWS
    left = tl.program_id(1) * COLUMNS
    sample = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = left + tl.arange(0, COLUMNS)
    along = tl.arange(0, DEPTH)
    row_inside = top + row < rows
    column_inside = column < columns
    a += sample * a_sample + top.to(tl.int64) * a_row
    b += sample * b_sample
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + along
        inside = at < depth
        left_part = tl.load(
            a + row[:, None] * a_row + at[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0
        )
        right_part = tl.load(
            b + at[:, None] * b_depth + column[None, :] * b_column,
            mask=inside[:, None] & column_inside[None, :],
            other=0.0,
        )
        acc = tl.dot(left_part, right_part, acc, input_precision="tf32")
    if BIAS:
        acc += tl.load(bias + sample * bias_sample + column, mask=column_inside, other=0.0).to(tl.float32)[
            None, :
        ]
    out += (sample * rows + top) * columns
    tl.store(
        out + row[:, None] * columns + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


@triton.jit(do_not_specialize=["batch", "samples", "seed", "first", "block", "bias_block"])
def _moments(
    x,
    grad,
    total,
    product,
    bias_total,
    bias_product,
    step,
    batch,
    outputs,
    inputs,
    samples,
    x_sample,
    x_row,
    grad_sample,
    grad_row,
    seed,
    first,
    block,
    bias_block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS_DEPTH: tl.constexpr,
):
    """A tile of Σ_k g_k and Σ_k g_k · eps_k; the column of tiles beyond the last is the bias."""
    left = tl.program_id(0) * COLUMNS
    top = tl.program_id(1) * ROWS
    row = top + tl.arange(0, ROWS)
    row_inside = row < outputs
    key = seed.to(tl.int64)
    number = tl.load(step)
    if left < inputs:
        column = left + tl.arange(0, COLUMNS)
        column_inside = column < inputs
        along = tl.arange(0, DEPTH)
        g = tl.zeros([ROWS, COLUMNS], tl.float32)
        a = tl.zeros([ROWS, COLUMNS], tl.float32)
        b = tl.zeros([ROWS, COLUMNS], tl.float32)
        parts = tl.cdiv(batch, DEPTH)
        # One loop over samples and parts of the batch, so that the next sample's loads are under way while
        # this one's noise is made.
        for turn in range(samples * parts):
            sample = turn // parts
            start = (turn - sample * parts) * DEPTH
            at = start + along
            inside = at < batch
            grad_at = grad + tl.cast(sample, tl.int64) * grad_sample + tl.cast(start, tl.int64) * grad_row
            x_at = x + tl.cast(sample, tl.int64) * x_sample + tl.cast(start, tl.int64) * x_row
            left_part = tl.load(
                grad_at + along[None, :] * grad_row + row[:, None],
                mask=inside[None, :] & row_inside[:, None],
                other=0.0,
            )
            right_part = tl.load(
                x_at + along[:, None] * x_row + column[None, :],
                mask=inside[:, None] & column_inside[None, :],
                other=0.0,
            )
            g = tl.dot(left_part, right_part, g, input_precision="tf32")
            if start + DEPTH >= batch:
                a += g
                b += g * eps_tile(key, number, first + sample, block, top, left, inputs, ROWS, COLUMNS)
                g = tl.zeros([ROWS, COLUMNS], tl.float32)
        here = row.to(tl.int64)[:, None] * inputs + column[None, :]
        mask = row_inside[:, None] & column_inside[None, :]
        tl.store(total + here, tl.load(total + here, mask=mask) + a, mask=mask)
        tl.store(product + here, tl.load(product + here, mask=mask) + b, mask=mask)
    else:
        wide = tl.arange(0, BIAS_DEPTH)
        bias_a = tl.zeros([ROWS], tl.float32)
        bias_b = tl.zeros([ROWS], tl.float32)
        for sample in range(samples):
            sums = tl.zeros([ROWS], tl.float32)
            for start in range(0, batch, BIAS_DEPTH):
                at = start + wide
                part = tl.load(
                    grad
                    + tl.cast(sample, tl.int64) * grad_sample
                    + at.to(tl.int64)[:, None] * grad_row
                    + row[None, :],
                    mask=(at < batch)[:, None] & row_inside[None, :],
                    other=0.0,
                )
                sums += tl.sum(part.to(tl.float32), 0)
            bias_a += sums
            bias_b += sums * eps(key, number, first + sample, bias_block, top, ROWS)
        tl.store(bias_total + row, tl.load(bias_total + row, mask=row_inside) + bias_a, mask=row_inside)
        tl.store(bias_product + row, tl.load(bias_product + row, mask=row_inside) + bias_b, mask=row_inside)


def multiplies(x: Tensor) -> bool:
    """Whether these kernels multiply such numbers as torch is set to: half precision, or float32 as tf32."""
    if x.dtype == torch.float32:
        return x.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """``x Wᵀ + b`` under every sample's weights, ``[K, B, O]``; float32 is multiplied as tf32.

    Args:
        x: Inputs ``[K, B, I]``, or ``[B, I]`` for all samples.
        weight: Weights ``[K, O, I]``.
        bias: Biases ``[K, O]``.
        tile: What each program makes; by default chosen from the shape.
    """
    weight = _inner(weight)
    if bias is not None:
        bias = _inner(bias)
    return _multiply(x, weight, (weight.stride(2), weight.stride(1)), weight.shape[1], bias, tile, _FORWARD)


def linear_input_grad(grad: Tensor, weight: Tensor, *, tile: Tile | None = None) -> Tensor:
    """``grad W`` under every sample's weights, ``[K, B, I]``.

    Args:
        grad: Gradients with respect to the layer's outputs, ``[K, B, O]``.
        weight: Weights ``[K, O, I]``.
        tile: What each program makes; by default chosen from the shape.
    """
    weight = _inner(weight)
    return _multiply(
        grad, weight, (weight.stride(1), weight.stride(2)), weight.shape[2], None, tile, _BACKWARD
    )


def linear_moments(
    noise: Noise,
    x: Tensor,
    grad: Tensor,
    blocks: Sequence[int],
    total: Tensor,
    product: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Add Σ_k g_k to ``total`` and Σ_k g_k · eps_k to ``product``, g_k being sample k's gradient.

    Each number is summed by one program in one order: the same inputs give the same bits.

    Args:
        noise: Behind the sampled weights.
        x: The layer's inputs, ``[K, B, I]``, or ``[B, I]`` for all samples; I is a multiple of 4, because
            normals are made four at a time.
        grad: Gradients with respect to its outputs, ``[K, B, O]``.
        blocks: Numbers of the weight and, if it has one, the bias in the noise's layout.
        total: Σ g of all blocks, flat.
        product: As ``total``.
        tile: What each program makes; by default chosen from the shape.
    """
    samples, batch, outputs = grad.shape
    inputs = x.shape[-1]
    layout = noise.layout
    sums = [flat[layout.span(i)] for flat in (total, product) for i in (blocks[0], blocks[-1])]
    x, grad = _inner(x).expand(samples, batch, inputs), _inner(grad)
    if tile is None:
        tile = _choose(_MOMENTS, 1, outputs, inputs)
    step, seed, first = address(noise)
    grid = (
        triton.cdiv(inputs, tile.columns) + len(blocks) - 1,
        triton.cdiv(outputs, tile.rows),
    )
    _moments[grid](
        x,
        grad,
        sums[0],
        sums[2],
        sums[1],  # the bias's; without one no program looks at these
        sums[3],
        step,
        batch,
        outputs,
        inputs,
        samples,
        x.stride(0),
        x.stride(1),
        grad.stride(0),
        grad.stride(1),
        seed,
        first,
        layout.hashes[blocks[0]],
        layout.hashes[blocks[-1]],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BIAS_DEPTH=128,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _multiply(
    a: Tensor,
    b: Tensor,
    strides: tuple[int, int],
    columns: int,
    bias: Tensor | None,
    tile: Tile | None,
    tiles: Sequence[Tile],
) -> Tensor:
    """``a [K, R, D]`` or ``[R, D]`` by ``b``, whose strides along D and along the columns are given."""
    samples = len(b)
    rows, depth = a.shape[-2:]
    a = _inner(a).expand(samples, rows, depth)
    out = a.new_empty(samples, rows, columns)
    if tile is None:
        tile = _choose(tiles, samples, rows, columns)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), samples)
    _product[grid](
        a,
        b,
        bias,
        out,
        rows,
        columns,
        depth,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        *strides,
        0 if bias is None else bias.stride(0),
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _inner(tensor: Tensor) -> Tensor:
    """The tensor with neighbours along its last axis side by side in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _choose(tiles: Sequence[Tile], samples: int, rows: int, columns: int) -> Tile:
    for tile in tiles:
        # No larger than what there is to make.
        tile = tile._replace(
            rows=min(tile.rows, max(16, triton.next_power_of_2(rows))),
            columns=min(tile.columns, max(16, triton.next_power_of_2(columns))),
        )
        if samples * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= _ENOUGH_PROGRAMS:
            break
    return tile
