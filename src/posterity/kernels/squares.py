"""Triton kernels: squares of per-example gradients.

For a convolution, an example's gradient is a matrix product over the P·Q positions of its output,

    G_i[o, (c, r, s)] = Σ_(p, q) grad_i[o, p, q] · x_i[c, stride · p + step · r, stride · q + step · s]

and a program computes one tile of it for one example after another. The tile and its square are summed in
registers: G_i is never written, and the arithmetic is that of one ordinary gradient. A linear layer that
shares its weight over positions, such as the words of a text, is a convolution with one tap.

If there are few tiles, examples are split between programs, and one more launch adds the parts, always in the
same order.

Tensor cores need the summed axis of float32 to be contiguous, so positions come last. Inputs are padded in
memory: a mask for every value of a tile would cost more than its product. Other layouts and half precision
(fewer than four bytes cannot be loaded ahead) are converted by the launch that pads.

For a batch normalisation the gradients are Σ_(p, q) grad_i · x̂_i of the scale and Σ_(p, q) grad_i of the
shift, both computed and squared in one pass.

Values that depend only on a layer's sizes are computed once: in a plain loop a GPU waits for Python.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.conv import Pair, Tile
from posterity.kernels.launch import Launch

# A thread holds 32 values of a tile, three times, and this many registers in all: sixteen warps fill one of
# an H200's 132 multiprocessors.
_REGISTERS = 128
_WARPS = 132 * 16
# Cost of starting a program and writing its part, in positions of an example.
_OVERHEAD = 256
_MOST_SPLITS = 64


# Depth and channels decide the width of loads and stores; other values need no kernels of their own.
@triton.jit(do_not_specialize=["own", "share", "batch", "outputs", "width", "plane", "row"])
def _squares(
    grad, x, out, own, share, batch, outputs, channels, depth, width, plane, row,
    R: tl.constexpr, S: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    BELOW: tl.constexpr, BESIDE: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are output channels, columns ``(c, r, s)``.

    Outputs are ``depth`` positions in rows of ``width``; inputs have ``plane`` positions in rows of ``row``.
    Output ``(p, q)`` starts at input ``(DOWN · p, ACROSS · q)``; tap ``(r, s)`` is ``(BELOW · r, BESIDE ·
    s)`` further on. WHOLE: all positions of an example are summed at once.
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
    """Some positions of some channels of one image, with DOWN and ACROSS zeros on its sides.

    Positions are the tile's first axis: threads go along it, unless the other one is known to be contiguous.
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
    """One example's (Σ grad · (x − mean) · rstd)² and (Σ grad)² over positions, for some channels."""
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
        x: Inputs ``[K, B, C, H, W]``, as they lie in memory; the same for all samples if K has stride 0. One
            sample's may be ``[B, C, H, W]``, and its sum then lacks K too.
        grad: The loss's gradient in the outputs ``[K, B, O, P, Q]``, or ``[B, O, P, Q]``.
        kernel_size: R and S.
        stride: As in ``F.conv2d``, for both axes.
        padding: Likewise.
        dilation: Likewise.
        tile: In place of the one chosen by size; ``tile.k`` counts positions.
        splits: Number of programs that share the examples.
    """
    if x.dim() == 5 and x.stride(0) == 0:
        x = x[:1]
    cover, cover_grad, launch, shape, split = _plan(
        x.shape, x.stride(), x.dtype, grad.shape, grad.stride(), grad.dtype,
        kernel_size, stride, padding, dilation, tile, splits,
    )  # fmt: skip
    x = x if cover is None else cover(x)
    grad = grad if cover_grad is None else cover_grad(grad)
    parts = x.new_empty(shape)
    launch(grad, x, parts)
    sums, squares = (parts.sum(1) if split else parts).unbind()
    if len(shape) - split == 5:
        return sums, squares
    return sums, squares[0] if len(squares) == 1 else squares.sum(0)


def batch_norm_squares(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, axis: int = 2) -> Tensor:
    """Squares of every example's gradients of scale and shift, ``[2, K·B, C]``, in float32.

    Args:
        x: Inputs ``[K, B, C, T…]``, as they lie in memory.
        grad: The loss's gradient in the outputs, likewise.
        mean: Mean of the normalisation, contiguous float32 ``[K, C]``, or ``[C]`` for all samples.
        rstd: 1 / √(variance + eps), likewise.
        axis: The axis of the channels; 1 if ``x`` and ``grad`` lack K.
    """
    own = mean.numel() > grad.shape[axis]
    walk = _walk(grad.shape, grad.stride(), x.stride(), axis, own, (grad.dtype, x.dtype))
    if walk is None:  # copy positions that are not one axis in memory
        flat = (*grad.shape[: axis + 1], -1)
        return batch_norm_squares(x.reshape(flat), grad.reshape(flat), mean, rstd, axis)
    launch, shape = walk
    out = mean.new_empty(shape)
    launch(grad, x, mean, rstd, out)
    return out


class _Cover(NamedTuple):
    """Copies images to float32 with zeros around, with positions contiguous."""

    launch: Launch
    shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.shape, dtype=torch.float32)
        self.launch(x, out)
        return out


class _Plan(NamedTuple):
    """The values that depend only on a convolution's sizes.

    Attributes:
        cover: Copies the inputs to the required layout, if needed.
        cover_grad: The same for gradients.
        launch: The launch of the programs.
        shape: Shape of their results.
        split: Whether the second axis of the results has parts that must be added.
    """

    cover: _Cover | None
    cover_grad: _Cover | None
    launch: Launch
    shape: tuple[int, ...]
    split: bool


@lru_cache(maxsize=1024)
def _plan(
    x: tuple[int, ...],
    x_strides: tuple[int, ...],
    x_type: torch.dtype,
    grad: tuple[int, ...],
    grad_strides: tuple[int, ...],
    grad_type: torch.dtype,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tile: Tile | None,
    splits: int | None,
) -> _Plan:
    """The plan for shapes, strides and dtypes of inputs and gradients, and for the other arguments."""
    cover = _cover(x, x_strides, padding, x_type)
    cover_grad = _cover(grad, grad_strides, (0, 0), grad_type)
    channels, rows, row = (x if cover is None else cover.shape)[-3:]
    batch, outputs, height, width = grad[-4:]
    leading = tuple(grad[:-4])  # the axis of samples, if there is one
    samples = math.prod(leading)
    columns, depth = channels * kernel_size[0] * kernel_size[1], height * width
    tile = tile or _tile(outputs, columns, depth)
    tiles = triton.cdiv(outputs, tile.m) * triton.cdiv(columns, tile.n)
    steps = triton.cdiv(depth, tile.k)
    share = triton.cdiv(batch, splits or _splits(tiles * samples, batch, steps * tile.k, tile.warps))
    splits = triton.cdiv(batch, share)
    own = math.prod(x[:-4]) == samples
    numbers = (
        int(own), share, batch, outputs, channels, depth, width, rows * row, row,
        *kernel_size, *stride, *dilation, steps == 1, tile.m, tile.n, tile.k,
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": _REGISTERS}
    launch = Launch(_squares, (tiles, splits, samples), numbers, options)
    parts = (splits,) if splits > 1 else ()
    return _Plan(
        cover, cover_grad, launch, (2, *parts, *leading, outputs, channels, *kernel_size), splits > 1
    )


def _tile(outputs: int, columns: int, depth: int) -> Tile:
    """As large as registers permit, since each loaded value is used for a whole row or column."""
    m = 128 if outputs > 64 else 64
    n = 128 if columns > 64 else max(32, triton.next_power_of_2(columns))
    k = min(32, max(16, triton.next_power_of_2(depth)))
    return Tile(m, n, k, max(4, m * n // 1024), 4)


def _splits(programs: int, batch: int, depth: int, warps: int) -> int:
    """The number of splits with which all programs finish first, given how many fit at once."""
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
    axis: int,
    own: bool,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Launch, tuple[int, ...]] | None:
    """The launch for examples of a shape, strides and dtypes, and the shape of its results.

    None if positions are not one axis in memory.
    """
    channels, places = shape[axis], math.prod(shape[axis + 1 :])
    between = [_between(shape[axis + 1 :], strides[axis + 1 :]) for strides in (grad, x)]
    if None in between:
        return None
    samples, batch = shape[:2] if axis == 2 else (1, shape[0])
    # Strides of samples, examples, channels and positions.
    (grad_steps, x_steps) = (
        (*((0,) if axis == 1 else ()), *strides[: axis + 1], step)
        for strides, step in zip((grad, x), between, strict=True)
    )
    # Four values for each thread along the contiguous axis.
    by_place = grad_steps[3] == 1
    wide = min(512 if by_place else 64, max(16, triton.next_power_of_2(places if by_place else channels)))
    tall, wide = (2048 // wide, wide) if by_place else (wide, 2048 // wide)
    numbers = (batch, channels, places, *grad_steps, *x_steps, channels if own else 0, tall, wide)
    grid = (samples * batch, triton.cdiv(channels, tall), 1)
    return Launch(_norm_squares, grid, numbers, {}), (2, samples * batch, channels)


def _between(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The stride of some axes, if they lie in memory like one axis."""
    step = total = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if total == 1:
            step = stride
        elif stride != step * total:
            return None
        total *= size
    return step


def _cover(
    shape: tuple[int, ...], strides: tuple[int, ...], padding: Pair, dtype: torch.dtype
) -> _Cover | None:
    """The launch for images of a shape, strides, zeros and dtype; None if the layout already fits."""
    if padding == (0, 0) and dtype == torch.float32 and _between(shape, strides) == 1:
        return None
    batch, channels, height, width = shape[-4:]
    samples = math.prod(shape[:-4])
    steps = (*((0,) if len(shape) == 4 else ()), *strides)
    rows, row = height + 2 * padding[0], width + 2 * padding[1]
    # Writes go along positions, whatever the order of reads.
    wide = min(512 if steps[4] == 1 else 32, max(16, triton.next_power_of_2(rows * row)))
    tall = 2048 // wide
    grid = (samples * batch, triton.cdiv(channels, tall), triton.cdiv(rows * row, wide))
    numbers = (batch, channels, height, width, *steps, *padding, tall, wide)
    return _Cover(Launch(_spread, grid, numbers, {}), (*shape[:-2], rows, row))
