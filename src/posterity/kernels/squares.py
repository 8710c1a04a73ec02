"""Triton kernels: single examples' gradients, as far as their squares need them.

For a convolution an example's gradient is a matrix product over the P·Q places of its output,

    G_i[o, (c, r, s)] = Σ_(p, q) grad_i[o, p, q] · x_i[c, stride · p + step · r, stride · q + step · s]

and a program makes one tile of it for one example after another. What it has is added, and its square, in
registers: no G_i is ever written, and the arithmetic is that of one ordinary gradient. A linear layer that
shares its weight over places, such as the words of a text, is a convolution by one tap.

Few tiles are shared out by examples, and the parts added up by one more launch, always in the same order.

Tensor cores want the summed axis of float32 contiguous, so places come last there, as torch has them. Halves
are multiplied in any order and have channels last, since fewer than four bytes cannot be loaded ahead; where
the channels are no multiple of 16, they go as float32, which changes no number. Inputs are padded in memory:
a mask for every number of a tile would cost more than its product.

For the scale of a batch normalisation it is Σ_(p, q) grad_i · x̂_i, made in one walk over both.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from posterity.kernels.conv import Pair, Tile, channels_first, turned

# A thread has 32 numbers of a tile, three times, and so many registers in all: sixteen warps fill one of an
# H200's 132 multiprocessors.
_REGISTERS = 128
_WARPS = 132 * 16
# What it costs a program to begin and to write its part, in places of an example.
_OVERHEAD = 256
_MOST_SPLITS = 64


# Sizes and strides decide how wide loads can be; a kernel for every other value would be waste.
@triton.jit(do_not_specialize=["own", "share", "batch", "width", "taps_w"])
def _squares(
    grad, x, out, own, share, batch, outputs, columns, depth, width, minor, taps_w,
    grad_b, grad_o, grad_place, x_b, x_c, down, across, below, beside,
    LAST: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are output channels, columns ``(c, r, s)``, or ``(r, s, c)`` if channels are LAST in memory.

    ``minor`` is how many of the columns' last axis there are, taps or channels. Place ``(p, q)`` is
    ``p · down + q · across`` from the first, tap ``(r, s)`` ``r · below + s · beside``. WHOLE: all places of
    an example are summed at once.
    """
    tiles = tl.cdiv(columns, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    first = split * share
    examples = tl.minimum(batch - first, share)
    grad += (sample * batch + first) * grad_b
    x += (sample * own * batch + first) * x_b
    major = n // minor
    if LAST:
        tap = major
        c = n - major * minor
    else:
        c = major
        tap = n - major * minor
    r = tap // taps_w
    left = m * grad_o
    right = c * x_c + r * below + (tap - r * taps_w) * beside

    acc = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM, BN], tl.float32)
    start = 0
    for _ in range(examples * tl.cdiv(depth, BK)):
        t = start + tl.arange(0, BK)
        p = t // width
        place = p * down + (t - p * width) * across
        a = tl.load(
            grad + (left[:, None] + (t * grad_place)[None, :]),
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
    size = outputs.to(tl.int64) * columns
    at = out + (split * tl.num_programs(2) + sample) * size
    written = (m < outputs)[:, None] & (n < columns)[None, :]
    tl.store(at + m[:, None] * columns + n[None, :], total, mask=written)
    at += tl.num_programs(1) * tl.num_programs(2) * size
    tl.store(at + m[:, None] * columns + n[None, :], square, mask=written)


@triton.jit(do_not_specialize=["batch"])
def _products(
    grad, x, mean, rstd, out, batch, channels, places,
    grad_sample, grad_b, grad_c, grad_place, x_sample, x_b, x_c, x_place,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One example's Σ grad · (x − mean) · rstd over places, of some channels."""
    example = tl.program_id(0)
    sample = (example // batch).to(tl.int64)
    b = example - sample * batch
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = c < channels
    grad += sample * grad_sample + b * grad_b
    x += sample * x_sample + b * x_b
    centre = tl.load(mean + sample * channels + c, mask=within, other=0.0)
    total = tl.zeros([CHANNELS, PLACES], tl.float32)
    for start in range(0, places, PLACES):
        t = start + tl.arange(0, PLACES)
        mask = within[:, None] & (t < places)[None, :]
        value = tl.load(grad + c[:, None] * grad_c + t[None, :] * grad_place, mask=mask, other=0.0)
        beside = tl.load(x + c[:, None] * x_c + t[None, :] * x_place, mask=mask, other=0.0)
        total += value.to(tl.float32) * (beside.to(tl.float32) - centre[:, None])
    scale = tl.load(rstd + sample * channels + c, mask=within, other=0.0)
    tl.store(out + example.to(tl.int64) * channels + c, tl.sum(total, 1) * scale, mask=within)


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
        grad: The loss's gradient in the outputs ``[K, B, O, P, Q]``, of the same type.
        kernel_size: R and S.
        stride: As in ``F.conv2d``, for both axes.
        padding: Likewise.
        dilation: Likewise.
        tile: Instead of the one chosen by size; ``tile.k`` counts places.
        splits: By how many programs the examples are shared.
    """
    samples, batch, outputs, height, width = grad.shape
    channels, taps = x.shape[2], kernel_size[0] * kernel_size[1]
    own = int(x.stride(0) != 0)
    x = x if own else x[:1]
    if channels % 16 or outputs % 16:
        x, grad = x.float(), grad.float()
    last = x.dtype != torch.float32
    x, grad = _laid_out(x, last, padding), _laid_out(grad, last)
    grad_o, _, grad_place = grad.stride()[2:]
    x_c, x_row, x_place = x.stride()[2:]
    columns, depth = channels * taps, height * width
    tile = tile or _tile(outputs, columns, depth, x.dtype)
    tiles = triton.cdiv(outputs, tile.m) * triton.cdiv(columns, tile.n)
    steps = triton.cdiv(depth, tile.k)
    share = triton.cdiv(batch, splits or _splits(tiles * samples, batch, steps * tile.k, tile.warps))
    splits = triton.cdiv(batch, share)
    parts = x.new_empty((2, splits, samples * outputs, columns), dtype=torch.float32)
    _squares[tiles, splits, samples](
        grad, x, parts, own, share, batch, outputs, columns, depth, width,
        channels if last else taps, kernel_size[1],
        grad[0, 0].numel(), grad_o, grad_place, x[0, 0].numel(), x_c,
        stride[0] * x_row, stride[1] * x_place, dilation[0] * x_row, dilation[1] * x_place,
        LAST=last, WHOLE=steps == 1, BM=tile.m, BN=tile.n, BK=tile.k,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=_REGISTERS,
    )  # fmt: skip
    both = parts[:, 0] if splits == 1 else parts.sum(1)
    if last:
        both = channels_first(both.view(2 * samples, outputs, *kernel_size, channels))
    sums, squares = both.view(2, samples, outputs, channels, *kernel_size)
    return sums, squares[0] if samples == 1 else squares.sum(0)


def batch_norm_terms(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The examples' gradients of the scale of a batch normalisation, ``[K·B, C]``, in float32.

    Args:
        x: Inputs ``[K, B, C, T]``, as they lie in memory.
        grad: The loss's gradient in the outputs, likewise.
        mean: That inputs are normalised by, float32 ``[K, C]``, or ``[1, C]`` for all samples.
        rstd: 1 / √(variance + eps), likewise.
    """
    samples, batch, channels, places = grad.shape
    out = grad.new_empty((samples * batch, channels), dtype=torch.float32)
    mean, rstd = (each.expand(samples, channels).contiguous() for each in (mean, rstd))
    # Four numbers for each thread along the axis that is side by side in memory.
    by_place = grad.stride(3) == 1
    wide = min(512 if by_place else 64, max(16, triton.next_power_of_2(places if by_place else channels)))
    tall = 2048 // wide
    size = {"CHANNELS": tall, "PLACES": wide} if by_place else {"CHANNELS": wide, "PLACES": tall}
    _products[samples * batch, triton.cdiv(channels, size["CHANNELS"])](
        grad, x, mean, rstd, out, batch, channels, places,
        *grad.stride(), *x.stride(), **size,
    )  # fmt: skip
    return out


def _laid_out(x: Tensor, last: bool, padding: Pair = (0, 0)) -> Tensor:
    """``[K, B, C, H, W]`` with zeros around, and neighbouring channels or else places side by side."""
    channels, height, width = x.shape[2:]
    sides = (padding[1], padding[1], padding[0], padding[0])
    by_place = x.permute(0, 1, 3, 4, 2)
    if last:
        if not by_place.is_contiguous():
            by_place = turned(x.contiguous().view(-1, channels, height, width, 1)).view(by_place.shape)
        by_place = F.pad(by_place, (0, 0, *sides)) if any(padding) else by_place
        return by_place.permute(0, 1, 4, 2, 3)
    if not x.is_contiguous():
        x = turned(by_place.contiguous().view(-1, height * width, channels, 1, 1)).view(x.shape)
    return F.pad(x, sides) if any(padding) else x


def _tile(outputs: int, columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """As large as registers permit, since every number that is loaded is used by a row or a column of it."""
    m = 128 if outputs > 64 else 64
    n = 128 if columns > 64 else max(32, triton.next_power_of_2(columns))
    k = min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(depth)))
    return Tile(m, n, k, max(4, m * n // 1024), 4)


@lru_cache(maxsize=1024)
def _splits(programs: int, batch: int, depth: int, warps: int) -> int:
    """So many that all programs end soonest, when as many run at once as there are registers for."""
    at_once = _WARPS // warps
    return min(
        range(1, min(batch, _MOST_SPLITS) + 1),
        key=lambda splits: (
            triton.cdiv(programs * splits, at_once) * (triton.cdiv(batch, splits) * depth + _OVERHEAD)
        ),
    )
