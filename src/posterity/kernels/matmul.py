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
from posterity.kernels.philox import normals
from posterity.layout import quarter

if TYPE_CHECKING:
    from posterity.noise import Noise

# One for each multiprocessor of an H200. Larger tiles read their operands fewer times, as long as there are
# enough of them to go round.
_ENOUGH_PROGRAMS = 132


class Tile(NamedTuple):
    """What one program makes, ``[rows, columns]``, by how much of the sum at a time, and with what.

    Sizes are powers of two from 16 on.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3

    def options(self) -> dict[str, int]:
        """As a kernel takes them."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


# The first that gives enough programs is taken, or else the last. Hopper's own tensor instructions (64 rows
# and 4 warps or more) read float32 along the sum only; an operand that lies the other way is turned on its
# way into shared memory, number by number. The backward products have such operands, so that their small
# tiles take the older instructions, which read either way.
_FORWARD = (
    Tile(128, 128, 32, 8),
    Tile(128, 64, 32),
    Tile(64, 64, 32),
    Tile(64, 32, 32),
    Tile(16, 32, 64, 2),
    Tile(16, 16, 64, 1),
)
_BACKWARD = (
    Tile(128, 128, 32, 8),
    Tile(128, 64, 32),
    Tile(32, 64, 32),
    Tile(32, 32, 32, 2),
    Tile(16, 32, 64, 2),
    Tile(16, 16, 64, 1),
)
# Rows of each quarter of the outputs, so four times as many in all.
_MOMENTS = (Tile(16, 128, 32, 8), Tile(16, 64, 32), Tile(16, 32, 32), Tile(16, 16, 64, 2))


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


@triton.jit
def _rows_of(grad, at, inside, row, mine, grad_row):
    """A tile ``[rows, part of the batch]`` of the outputs' gradient."""
    return tl.load(
        grad + at[None, :] * grad_row + row[:, None], mask=inside[None, :] & mine[:, None], other=0.0
    )


@triton.jit
def _column_sums(grad, at, inside, row, mine, grad_row):
    part = tl.load(
        grad + at[:, None] * grad_row + row[None, :], mask=inside[:, None] & mine[None, :], other=0.0
    )
    return tl.sum(part.to(tl.float32), 0)


@triton.jit
def _add(into, at, value, mask):
    tl.store(into + at, tl.load(into + at, mask=mask) + value, mask=mask)


@triton.jit(do_not_specialize=["batch", "quads", "samples", "seed", "first", "block", "bias_block"])
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
    quads,
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
    """One tile of every quarter of Σ_k g_k and Σ_k g_k · eps_k; the tiles beyond the last are the bias."""
    left = tl.program_id(0) * COLUMNS
    quarter = 4 * quads  # known to be a multiple of 4, so that loads are wide
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = place < quarter
    r0, r1, r2, r3 = place, place + quarter, place + 2 * quarter, place + 3 * quarter
    i0, i1, i2, i3 = (
        mine & (r0 < outputs),
        mine & (r1 < outputs),
        mine & (r2 < outputs),
        mine & (r3 < outputs),
    )
    key = seed.to(tl.int64)
    number = tl.load(step)
    if left < inputs:
        column = left + tl.arange(0, COLUMNS)
        within = column < inputs
        along = tl.arange(0, DEPTH)
        zero = tl.zeros([ROWS, COLUMNS], tl.float32)
        g0, g1, g2, g3 = zero, zero, zero, zero
        t0, t1, t2, t3 = zero, zero, zero, zero
        p0, p1, p2, p3 = zero, zero, zero, zero
        parts = tl.cdiv(batch, DEPTH)
        # One loop over samples and parts of the batch, so that the next sample's loads are under way while
        # this one's noise is made.
        for turn in range(samples * parts):
            sample = turn // parts
            start = (turn - sample * parts) * DEPTH
            inside = start + along < batch
            grad_at = grad + tl.cast(sample, tl.int64) * grad_sample + tl.cast(start, tl.int64) * grad_row
            x_at = x + tl.cast(sample, tl.int64) * x_sample + tl.cast(start, tl.int64) * x_row
            part = tl.load(
                x_at + along[:, None] * x_row + column[None, :],
                mask=inside[:, None] & within[None, :],
                other=0.0,
            )
            g0 = tl.dot(_rows_of(grad_at, along, inside, r0, i0, grad_row), part, g0, input_precision="tf32")
            g1 = tl.dot(_rows_of(grad_at, along, inside, r1, i1, grad_row), part, g1, input_precision="tf32")
            g2 = tl.dot(_rows_of(grad_at, along, inside, r2, i2, grad_row), part, g2, input_precision="tf32")
            g3 = tl.dot(_rows_of(grad_at, along, inside, r3, i3, grad_row), part, g3, input_precision="tf32")
            if start + DEPTH >= batch:
                index = place[:, None] * inputs + column[None, :]
                e0, e1, e2, e3 = normals(key, number, first + sample, block, index)
                t0, t1, t2, t3 = t0 + g0, t1 + g1, t2 + g2, t3 + g3
                p0, p1, p2, p3 = p0 + g0 * e0, p1 + g1 * e1, p2 + g2 * e2, p3 + g3 * e3
                g0, g1, g2, g3 = zero, zero, zero, zero
        a0, m0 = r0[:, None] * inputs + column[None, :], i0[:, None] & within[None, :]
        a1, m1 = r1[:, None] * inputs + column[None, :], i1[:, None] & within[None, :]
        a2, m2 = r2[:, None] * inputs + column[None, :], i2[:, None] & within[None, :]
        a3, m3 = r3[:, None] * inputs + column[None, :], i3[:, None] & within[None, :]
        _add(total, a0, t0, m0)
        _add(total, a1, t1, m1)
        _add(total, a2, t2, m2)
        _add(total, a3, t3, m3)
        _add(product, a0, p0, m0)
        _add(product, a1, p1, m1)
        _add(product, a2, p2, m2)
        _add(product, a3, p3, m3)
    else:
        wide = tl.arange(0, BIAS_DEPTH)
        none = tl.zeros([ROWS], tl.float32)
        b0, b1, b2, b3 = none, none, none, none
        c0, c1, c2, c3 = none, none, none, none
        for sample in range(samples):
            s0, s1, s2, s3 = none, none, none, none
            for start in range(0, batch, BIAS_DEPTH):
                inside = start + wide < batch
                grad_at = grad + tl.cast(sample, tl.int64) * grad_sample + tl.cast(start, tl.int64) * grad_row
                s0 += _column_sums(grad_at, wide, inside, r0, i0, grad_row)
                s1 += _column_sums(grad_at, wide, inside, r1, i1, grad_row)
                s2 += _column_sums(grad_at, wide, inside, r2, i2, grad_row)
                s3 += _column_sums(grad_at, wide, inside, r3, i3, grad_row)
            e0, e1, e2, e3 = normals(key, number, first + sample, bias_block, place)
            b0, b1, b2, b3 = b0 + s0, b1 + s1, b2 + s2, b3 + s3
            c0, c1, c2, c3 = c0 + s0 * e0, c1 + s1 * e1, c2 + s2 * e2, c3 + s3 * e3
        _add(bias_total, r0, b0, i0)
        _add(bias_total, r1, b1, i1)
        _add(bias_total, r2, b2, i2)
        _add(bias_total, r3, b3, i3)
        _add(bias_product, r0, c0, i0)
        _add(bias_product, r1, c1, i1)
        _add(bias_product, r2, c2, i2)
        _add(bias_product, r3, c3, i3)


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
        x: The layer's inputs, ``[K, B, I]``, or ``[B, I]`` for all samples.
        grad: Gradients with respect to its outputs, ``[K, B, O]``.
        blocks: Numbers of the weight and, if it has one, the bias in the noise's layout.
        total: Σ g of all blocks, flat.
        product: As ``total``.
        tile: What each program makes; by default chosen from the shape.
    """
    samples, batch, outputs = grad.shape
    inputs = x.shape[-1]
    rows = quarter(outputs)
    layout = noise.layout
    sums = [flat[layout.span(i)] for i in (blocks[0], blocks[-1]) for flat in (total, product)]
    x, grad = _inner(x).expand(samples, batch, inputs), _inner(grad)
    if tile is None:
        tile = _choose(_MOMENTS, 1, rows, inputs, batch)
    step, seed, first = address(noise)
    grid = (triton.cdiv(inputs, tile.columns) + len(blocks) - 1, triton.cdiv(rows, tile.rows))
    _moments[grid](
        x,
        grad,
        *sums,  # without a bias no program looks at the last two
        step,
        batch,
        outputs,
        inputs,
        rows // 4,
        samples,
        *x.stride()[:2],
        *grad.stride()[:2],
        seed,
        first,
        layout.hashes[blocks[0]],
        layout.hashes[blocks[-1]],
        BIAS_DEPTH=128,
        **tile.options(),
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
        tile = _choose(tiles, samples, rows, columns, depth)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), samples)
    _product[grid](
        a,
        b,
        bias,
        out,
        rows,
        columns,
        depth,
        *a.stride()[:2],
        b.stride(0),
        *strides,
        0 if bias is None else bias.stride(0),
        BIAS=bias is not None,
        **tile.options(),
    )
    return out


def _inner(tensor: Tensor) -> Tensor:
    """The tensor with neighbours along its last axis side by side in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _choose(tiles: Sequence[Tile], samples: int, rows: int, columns: int, depth: int) -> Tile:
    for tile in tiles:
        tile = tile._replace(
            rows=_at_most(tile.rows, rows),
            columns=_at_most(tile.columns, columns),
            depth=_at_most(tile.depth, depth),
        )
        if samples * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= _ENOUGH_PROGRAMS:
            break
    return tile


def _at_most(size: int, there: int) -> int:
    """A tile's size, or the power of two from 16 on that takes all there is, if that is less."""
    return min(size, max(16, triton.next_power_of_2(there)))
