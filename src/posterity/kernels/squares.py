"""Triton kernels: single examples' gradients, as far as their squares need them.

For a convolution an example's gradient is a matrix product over the P·Q places of its output,

    G_i[o, (c, r, s)] = Σ_(p, q) grad_i[o, p, q] · x_i[c, stride · p + step · r, stride · q + step · s]

and a program makes one tile of it for one example after another. What it has is added, and its square, in
registers: no G_i is ever written, and the arithmetic is that of one ordinary gradient. A linear layer that
shares its weight over places, such as the words of a text, is a convolution by one tap.

Few tiles are shared out by examples, and the parts added up by one more launch, always in the same order.

Tensor cores want the summed axis of float32 contiguous, so places come last. Inputs are padded in memory: a
mask for every number of a tile would cost more than its product. Whatever else lies in memory, halves too
(fewer than four bytes cannot be loaded ahead), is written out like that in the same launch that pads it.

For a batch normalisation the gradients are Σ_(p, q) grad_i · x̂_i of the scale and Σ_(p, q) grad_i of the
shift, both made and squared in one walk.

What a layer's sizes decide is worked out once for each: in a plain loop a GPU waits for what Python does.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.conv import Pair, Tile
from posterity.kernels.launch import Launch

# A thread has 32 numbers of a tile, three times, and so many registers in all: sixteen warps fill one of an
# H200's 132 multiprocessors.
_REGISTERS = 128
_WARPS = 132 * 16
# What it costs a program to begin and to write its part, in places of an example.
_OVERHEAD = 256
_MOST_SPLITS = 64


# Depth and channels decide how wide loads and stores can be; a kernel for every other value would be waste.
@triton.jit(do_not_specialize=["own", "share", "batch", "outputs", "width", "plane", "row"])
def _squares(
    grad, x, out, own, share, batch, outputs, channels, depth, width, plane, row,
    R: tl.constexpr, S: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    BELOW: tl.constexpr, BESIDE: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are output channels, columns ``(c, r, s)``.

    Outputs are ``depth`` places in rows of ``width``; inputs have ``plane`` places in rows of ``row``. Output
    ``(p, q)`` sees what is from ``(DOWN · p, ACROSS · q)``, by tap ``(r, s)`` ``(BELOW · r, BESIDE · s)`` on.
    WHOLE: all places of an example are summed at once.
    """
    columns = channels * (R * S)
    tiles = tl.cdiv(columns, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    first = split * share
    examples = tl.minimum(batch - first, share)
    grad_b = outputs * depth
    x_b = channels * plane
    grad += (sample * batch + first) * grad_b
    x += (sample * own * batch + first) * x_b
    c = n // (R * S)
    tap = n - c * (R * S)
    r = tap // S
    left = m * depth
    right = c * plane + r * (BELOW * row) + (tap - r * S) * BESIDE

    acc = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM, BN], tl.float32)
    start = 0
    for _ in range(examples * tl.cdiv(depth, BK)):
        t = start + tl.arange(0, BK)
        p = t // width
        place = p * (DOWN * row) + (t - p * width) * ACROSS
        a = tl.load(
            grad + (left[:, None] + t[None, :]),
            mask=(m < outputs)[:, None] & (t < depth)[None, :],
            other=0.0,
        )
        v = tl.load(
            x + (place[:, None] + right[None, :]),
            mask=(t < depth)[:, None] & (n < columns)[None, :],
            other=0.0,
        )
        if WHOLE:
            acc = tl.dot(a, v, input_precision="tf32")
            total += acc
            square += acc * acc
            grad += grad_b
            x += x_b
        else:
            acc = tl.dot(a, v, acc, input_precision="tf32")
            start += BK
            if start >= depth:
                total += acc
                square += acc * acc
                acc = tl.zeros([BM, BN], tl.float32)
            grad += tl.where(start >= depth, grad_b, 0)
            x += tl.where(start >= depth, x_b, 0)
            start = tl.where(start >= depth, 0, start)

    # [2, splits, K, O, columns]
    number = split * tl.num_programs(2) + sample
    written = (m < outputs)[:, None] & (n < columns)[None, :]
    at = m[:, None] * columns + n[None, :]
    tl.store(out + number * outputs * columns + at, total, mask=written)
    number += tl.num_programs(1) * tl.num_programs(2)
    tl.store(out + number * outputs * columns + at, square, mask=written)


@triton.jit(do_not_specialize=["batch", "height", "width"])
def _spread(
    x, out, batch, channels, height, width, x_sample, x_b, x_c, x_h, x_w,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Some places of some channels of one picture, with DOWN and ACROSS zeros on its sides.

    Places are the tile's first axis: threads go along it, unless the other one is known to be contiguous.
    """
    picture = tl.program_id(0).to(tl.int64)
    sample = picture // batch
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.program_id(2) * PLACES + tl.arange(0, PLACES)
    row = width + 2 * ACROSS
    plane = (height + 2 * DOWN) * row
    r = t // row
    h = r - DOWN
    w = t - r * row - ACROSS
    seen = (h >= 0) & (h < height) & (w >= 0) & (w < width)
    value = tl.load(
        x + sample * x_sample + (picture - sample * batch) * x_b
        + ((h * x_h + w * x_w)[:, None] + (c * x_c)[None, :]),
        mask=seen[:, None] & (c < channels)[None, :],
        other=0.0,
    )  # fmt: skip
    tl.store(
        out + picture * channels * plane + (t[:, None] + c[None, :] * plane),
        value.to(tl.float32),
        mask=(t < plane)[:, None] & (c < channels)[None, :],
    )


@triton.jit(do_not_specialize=["batch"])
def _norm_squares(
    grad, x, mean, rstd, out, batch, channels, places,
    grad_sample, grad_b, grad_c, grad_place, x_sample, x_b, x_c, x_place, own,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One example's (Σ grad · (x − mean) · rstd)² and (Σ grad)² over places, of some channels."""
    example = tl.program_id(0).to(tl.int64)
    sample = example // batch
    b = example - sample * batch
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = c < channels
    grad += sample * grad_sample + b * grad_b
    x += sample * x_sample + b * x_b
    centre = tl.load(mean + sample * own + c, mask=within, other=0.0)
    scale = tl.zeros([CHANNELS, PLACES], tl.float32)
    shift = tl.zeros([CHANNELS, PLACES], tl.float32)
    for start in range(0, places, PLACES):
        t = start + tl.arange(0, PLACES)
        mask = within[:, None] & (t < places)[None, :]
        value = tl.load(grad + c[:, None] * grad_c + t[None, :] * grad_place, mask=mask, other=0.0)
        beside = tl.load(x + c[:, None] * x_c + t[None, :] * x_place, mask=mask, other=0.0)
        value = value.to(tl.float32)
        shift += value
        scale += value * (beside.to(tl.float32) - centre[:, None])
    first = tl.sum(scale, 1) * tl.load(rstd + sample * own + c, mask=within, other=0.0)
    second = tl.sum(shift, 1)
    # [2, K·B, C]
    tl.store(out + example * channels + c, first * first, mask=within)
    tl.store(out + (tl.num_programs(0) + example) * channels + c, second * second, mask=within)


def conv2d_squares(
    x: Tensor,
    grad: Tensor,
    kernel_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_i G_i of every sample, ``[K, O, C, R, S]``, and Σ_i G_i² of all, ``[O, C, R, S]``, in float32.

    Args:
        x: Inputs ``[K, B, C, H, W]``, as they lie in memory; the same for all samples if K has stride 0.
        grad: The loss's gradient in the outputs ``[K, B, O, P, Q]``.
        kernel_size: R and S.
        stride: As in ``F.conv2d``, for both axes.
        padding: Likewise.
        dilation: Likewise.
        tile: Instead of the one chosen by size; ``tile.k`` counts places.
        splits: By how many programs the examples are shared.
    """
    own = x.stride(0) != 0
    x, grad = _laid_out(x if own else x[:1], padding), _laid_out(grad, (0, 0))
    launch, shape, splits = _shared_out(x.shape, grad.shape, own, kernel_size, stride, dilation, tile, splits)
    parts = x.new_empty(shape)
    launch(grad, x, parts)
    sums, squares = (parts.sum(1) if splits > 1 else parts[:, 0]).unbind()
    return sums, squares[0] if len(sums) == 1 else squares.sum(0)


def batch_norm_squares(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Sums of the squares of the examples' gradients of scale and shift, ``[2, C]``, in float32.

    Args:
        x: Inputs ``[K, B, C, T]``, as they lie in memory.
        grad: The loss's gradient in the outputs, likewise.
        mean: That inputs are normalised by, contiguous float32 ``[K, C]``, or ``[C]`` for all samples.
        rstd: 1 / √(variance + eps), likewise.
    """
    launch, shape = _walk(
        grad.shape, grad.stride(), x.stride(), mean.numel() > grad.shape[2], (grad.dtype, x.dtype)
    )
    out = mean.new_empty(shape)
    launch(grad, x, mean, rstd, out)
    return out.sum(1)


def _laid_out(x: Tensor, padding: Pair) -> Tensor:
    """``[K, B, C, H, W]`` in float32 with zeros around, and neighbouring places side by side."""
    if padding == (0, 0) and x.dtype == torch.float32 and x.is_contiguous():
        return x
    launch, shape = _cover(x.shape, x.stride(), padding, x.dtype)
    out = x.new_empty(shape, dtype=torch.float32)
    launch(x, out)
    return out


@lru_cache(maxsize=1024)
def _shared_out(
    x: tuple[int, ...],
    grad: tuple[int, ...],
    own: bool,
    kernel_size: Pair,
    stride: Pair,
    dilation: Pair,
    tile: Tile | None,
    splits: int | None,
) -> tuple[Launch, tuple[int, ...], int]:
    """Programs for a convolution, the shape of what they write, and by how many examples are shared."""
    samples, batch, outputs, height, width = grad
    channels, rows, row = x[2:]
    columns, depth = channels * kernel_size[0] * kernel_size[1], height * width
    tile = tile or _tile(outputs, columns, depth)
    tiles = triton.cdiv(outputs, tile.m) * triton.cdiv(columns, tile.n)
    steps = triton.cdiv(depth, tile.k)
    share = triton.cdiv(batch, splits or _splits(tiles * samples, batch, steps * tile.k, tile.warps))
    splits = triton.cdiv(batch, share)
    numbers = (
        int(own), share, batch, outputs, channels, depth, width, rows * row, row,
        *kernel_size, *stride, *dilation, steps == 1, tile.m, tile.n, tile.k,
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": _REGISTERS}
    launch = Launch(_squares, (tiles, splits, samples), numbers, options)
    return launch, (2, splits, samples, outputs, channels, *kernel_size), splits


def _tile(outputs: int, columns: int, depth: int) -> Tile:
    """As large as registers permit, since every number that is loaded is used by a row or a column of it."""
    m = 128 if outputs > 64 else 64
    n = 128 if columns > 64 else max(32, triton.next_power_of_2(columns))
    k = min(32, max(16, triton.next_power_of_2(depth)))
    return Tile(m, n, k, max(4, m * n // 1024), 4)


def _splits(programs: int, batch: int, depth: int, warps: int) -> int:
    """So many that all programs end soonest, when as many run at once as there are registers for."""
    at_once = _WARPS // warps
    return min(
        range(1, min(batch, _MOST_SPLITS) + 1),
        key=lambda splits: (
            triton.cdiv(programs * splits, at_once) * (triton.cdiv(batch, splits) * depth + _OVERHEAD)
        ),
    )


@lru_cache(maxsize=1024)
def _walk(
    shape: tuple[int, ...],
    grad: tuple[int, ...],
    x: tuple[int, ...],
    own: bool,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Launch, tuple[int, ...]]:
    """Programs for examples, by their shape, strides and types, and the shape of what they write."""
    samples, batch, channels, places = shape
    # Four numbers for each thread along the axis that is side by side in memory.
    by_place = grad[3] == 1
    wide = min(512 if by_place else 64, max(16, triton.next_power_of_2(places if by_place else channels)))
    tall, wide = (2048 // wide, wide) if by_place else (wide, 2048 // wide)
    numbers = (batch, channels, places, *grad, *x, channels if own else 0, tall, wide)
    grid = (samples * batch, triton.cdiv(channels, tall), 1)
    return Launch(_norm_squares, grid, numbers, {}), (2, samples * batch, channels)


@lru_cache(maxsize=1024)
def _cover(
    shape: tuple[int, ...], strides: tuple[int, ...], padding: Pair, dtype: torch.dtype
) -> tuple[Launch, tuple[int, ...]]:
    """Programs for pictures, by their shape, strides, zeros and type, and the shape of what they write."""
    samples, batch, channels, height, width = shape
    rows, row = height + 2 * padding[0], width + 2 * padding[1]
    # They are written by places, whatever they are read by.
    wide = min(512 if strides[4] == 1 else 32, max(16, triton.next_power_of_2(rows * row)))
    tall = 2048 // wide
    grid = (samples * batch, triton.cdiv(channels, tall), triton.cdiv(rows * row, wide))
    numbers = (batch, channels, height, width, *strides, *padding, tall, wide)
    return Launch(_spread, grid, numbers, {}), (samples, batch, channels, rows, row)
