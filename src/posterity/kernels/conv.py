"""Triton kernels: K convolutions of K inputs with K weights in one launch, and their gradients.

Implicit matrix products over channels-last tensors: x ``[K, B, H, W, C]`` (or ``[B, H, W, C]``, the same for
all K), output ``[K, B, P, Q, O]``; weights are torch's ``[K, O, C, R, S]``, and permuted here. Float32 goes
through tf32 tensor cores, bfloat16 through its own; sums are in float32.

Rows of the product are ordered by position first and image last, so a tile's rows mostly share a position,
and kernel taps that fall into the padding are skipped for the whole tile: on 2×2 images a 3×3 kernel costs 4
taps instead of 9, on 4×4 images 6.25 on average. Offsets within a sample are int32: it has fewer than 2³¹
elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 396  # three for each of an H200's 132 multiprocessors

Pair = tuple[int, int]


class Tile(NamedTuple):
    """A program's share of a matrix product ``[m, k] @ [k, n]``, and how it is compiled."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class _Axis(NamedTuple):
    """One spatial axis of a gather: output i, tap j reads input ``i · stride + first + j · step``, step > 0.

    Tap j is the weight's ``tap_first + j · tap_step``; output i is written to ``out_first + i · out_step``.
    """

    size: int
    count: int
    stride: int
    first: int
    step: int
    taps: int
    tap_first: int
    tap_step: int
    out_size: int
    out_first: int
    out_step: int


# Only the numbers of channels decide the width of loads; other values need no kernels of their own.
_PLAIN = [f"{name}_{axis}" for axis in "hw" for name in _Axis._fields]


@triton.jit(do_not_specialize=["own", "B", "R", "S", *_PLAIN])
def _conv(
    x, weight, bias, out, own, B, C, N, R, S,
    size_h, count_h, stride_h, first_h, step_h, taps_h, tap_first_h, tap_step_h,
    out_size_h, out_first_h, out_step_h,
    size_w, count_w, stride_w, first_w, step_w, taps_w, tap_first_w, tap_step_w,
    out_size_w, out_first_w, out_step_w,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    x += sample * own * (B * size_h * size_w * C)
    weight += sample * (N * R * S * C)
    out += sample * (B * out_size_h * out_size_w * N)
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)

    # Rows and columns beyond the last repeat it, and are not written.
    rows = B * count_h * count_w
    position = tl.minimum(m, rows - 1) // B
    b = tl.minimum(m, rows - 1) - position * B
    p = position // count_w
    q = position - p * count_w
    h = p * stride_h + first_h
    w = q * stride_w + first_w
    row = ((b * size_h + h) * size_w + w) * C
    column = tl.minimum(n, N - 1) * (R * S * C)

    # The taps that any row needs.
    low_h = tl.min(tl.cdiv(tl.maximum(-h, 0), step_h), 0)
    low_w = tl.min(tl.cdiv(tl.maximum(-w, 0), step_w), 0)
    high_h = tl.minimum(tl.max(tl.cdiv(tl.maximum(size_h - h, 0), step_h), 0), taps_h)
    high_w = tl.minimum(tl.max(tl.cdiv(tl.maximum(size_w - w, 0), step_w), 0), taps_w)
    tall = tl.maximum(high_h - low_h, 0)
    wide = tl.maximum(high_w - low_w, 0)

    total = tl.zeros([BM, BN], tl.float32)
    i = low_h
    j = low_w
    start = low_h * 0
    for _ in range(tall * wide * tl.cdiv(C, BK)):
        c = start + tl.arange(0, BK)
        y = h + i * step_h
        z = w + j * step_w
        inside = (y >= 0) & (y < size_h) & (z >= 0) & (z < size_w)
        moved = (i * step_h * size_w + j * step_w) * C
        tap = ((tap_first_h + i * tap_step_h) * S + tap_first_w + j * tap_step_w) * C
        left = tl.load(
            x + (row + moved)[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0
        )
        right = tl.load(weight + (column + tap)[None, :] + c[:, None], mask=(c < C)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")
        start += BK
        j += (start >= C).to(tl.int32)
        start = tl.where(start >= C, 0, start)
        i += (j >= high_w).to(tl.int32)
        j = tl.where(j >= high_w, low_w, j)

    if BIASED:
        total += tl.load(bias + sample * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pixel = (b * out_size_h + out_first_h + p * out_step_h) * out_size_w + out_first_w + q * out_step_w
    tl.store(out + (pixel * N)[:, None] + n[None, :], total, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=[
    "own", "H", "W", "P", "Q", "R", "S", "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h",
    "dilation_w", "splits",
])  # fmt: skip
def _weight_grad(
    grad, x, out, own, B, H, W, C, P, Q, N, R, S,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    grad_b, grad_pixel, grad_o, x_b, x_pixel, x_c, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are output channels, columns (r, s, c), and the sum goes over positions and blocks of images."""
    split = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    columns = R * S * C
    grad += sample * (B * P * Q * N)
    x += sample * own * (B * H * W * C)
    out += (split * tl.num_programs(2) + sample) * (N * columns)
    tiles = tl.cdiv(columns, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    tap = n // C
    r = tap // S
    h = r * dilation_h - padding_h
    w = (tap - r * S) * dilation_w - padding_w
    left = m * grad_o
    right = (h * W + w) * x_pixel + (n - tap * C) * x_c

    # The positions that any column needs.
    low_p = tl.min(tl.where(n < columns, tl.cdiv(tl.maximum(-h, 0), stride_h), P), 0)
    low_q = tl.min(tl.where(n < columns, tl.cdiv(tl.maximum(-w, 0), stride_w), Q), 0)
    high_p = tl.minimum(tl.max(tl.where(n < columns, tl.cdiv(tl.maximum(H - h, 0), stride_h), 0), 0), P)
    high_q = tl.minimum(tl.max(tl.where(n < columns, tl.cdiv(tl.maximum(W - w, 0), stride_w), 0), 0), Q)
    wide = tl.maximum(high_q - low_q, 1)
    blocks = tl.cdiv(B, BK)
    steps = tl.maximum(high_p - low_p, 0) * tl.maximum(high_q - low_q, 0) * blocks
    begin = split * tl.cdiv(steps, splits)
    end = tl.minimum(begin + tl.cdiv(steps, splits), steps)
    position = begin // blocks
    start = (begin - position * blocks) * BK
    p = low_p + position // wide
    q = low_q + position % wide

    total = tl.zeros([BM, BN], tl.float32)
    for _ in range(begin, end):
        b = start + tl.arange(0, BK)
        y = h + p * stride_h
        z = w + q * stride_w
        inside = (n < columns) & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(
            grad + (left + (p * Q + q) * grad_pixel)[:, None] + (b * grad_b)[None, :],
            mask=(m < N)[:, None] & (b < B)[None, :],
            other=0.0,
        )
        v = tl.load(
            x + (right + (p * stride_h * W + q * stride_w) * x_pixel)[None, :] + (b * x_b)[:, None],
            mask=inside[None, :] & (b < B)[:, None],
            other=0.0,
        )
        total = tl.dot(a, v, total, input_precision="tf32")
        start += BK
        q += (start >= B).to(tl.int32)
        start = tl.where(start >= B, 0, start)
        p += (q >= high_q).to(tl.int32)
        q = tl.where(q >= high_q, low_q, q)
    tl.store(out + m[:, None] * columns + n[None, :], total, mask=(m < N)[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["groups"])
def _swap(x, out, rows, groups, columns, BLOCK: tl.constexpr):
    """``[K, rows, groups, columns]`` to ``[K, columns, groups, rows]``."""
    sample = (tl.program_id(1) // groups).to(tl.int64)
    group = tl.program_id(1) % groups
    x += sample * (rows * groups * columns)
    out += sample * (rows * groups * columns)
    tiles = tl.cdiv(rows, BLOCK)
    m = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tile = tl.load(x + ((m * groups + group) * columns)[:, None] + n[None, :], mask=inside)
    tl.store(out + ((n * groups + group) * rows)[None, :] + m[:, None], tile, mask=inside)


@triton.jit
def _permute(x, out, channels, TAPS: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the channels from ``[channels, TAPS]`` to ``[TAPS, channels]``, if LAST, or back."""
    base = tl.program_id(1).to(tl.int64) * channels * TAPS
    first = tl.program_id(0) * 64
    place = tl.arange(0, BLOCK)
    # In the order of writes; reads stay in the cache.
    if LAST:
        channel, tap = first + place % 64, place // 64
    else:
        channel, tap = first + place // TAPS, place % TAPS
    inside = (channel < channels) & (channel < first + 64) & (tap < TAPS)
    by_channel, by_tap = channel * TAPS + tap, tap * channels + channel
    if LAST:
        tl.store(out + base + by_tap, tl.load(x + base + by_channel, mask=inside), mask=inside)
    else:
        tl.store(out + base + by_channel, tl.load(x + base + by_tap, mask=inside), mask=inside)


def channels_last(weight: Tensor) -> Tensor:
    """Weights ``[K, O, C, R, S]`` as these kernels read them, ``[K, O, R, S, C]``."""
    samples, outputs, channels, *taps = weight.shape
    return _permuted(weight, True, samples * outputs, channels, taps).view(samples, outputs, *taps, channels)


def channels_first(weight: Tensor) -> Tensor:
    """The inverse of :func:`channels_last`."""
    samples, outputs, *taps, channels = weight.shape
    return _permuted(weight, False, samples * outputs, channels, taps).view(samples, outputs, channels, *taps)


def _permuted(x: Tensor, last: bool, rows: int, channels: int, taps: Sequence[int]) -> Tensor:
    count = taps[0] * taps[1]
    if count == 1 or not rows:
        return x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(64 * count)
    _permute[triton.cdiv(channels, 64), rows](
        x.contiguous(), out, channels, TAPS=count, LAST=last, BLOCK=block
    )
    return out


def turned(weight: Tensor) -> Tensor:
    """Weights ``[K, O, C, R, S]`` transposed for the input's gradient, ``[K, C, R, S, O]``."""
    samples, outputs, *rest = weight.shape
    return _swapped(weight.reshape(samples, outputs, 1, -1)).view(samples, *rest, outputs)


def batch_last(x: Tensor) -> Tensor:
    """``[K, B, H, W, C]`` as ``[K, H, W, C, B]``, or both without K."""
    batch, *rest = x.shape[-4:]
    return _swapped(x.reshape(-1, batch, 1, rest[0] * rest[1] * rest[2])).view(*x.shape[:-4], *rest, batch)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    tile: Tile | None = None,
) -> Tensor:
    """``F.conv2d`` of each sample, channels last.

    Args:
        x: ``[K, B, H, W, C]``, or ``[B, H, W, C]`` for all samples.
        weight: ``[K, O, C, R, S]``.
        bias: ``[K, O]`` or None.
        stride: as in ``F.conv2d``, for both axes.
        padding: likewise.
        dilation: likewise.
        tile: instead of the one chosen by size.

    Returns:
        ``[K, B, P, Q, O]``.
    """
    x, weight = x.contiguous(), channels_last(weight)
    axes = []
    for size, taps, s, p, d in zip(x.shape[-3:-1], weight.shape[2:4], stride, padding, dilation, strict=True):
        count = (size + 2 * p - d * (taps - 1) - 1) // s + 1
        axes.append(_Axis(size, count, s, -p, d, taps, 0, 1, count, 0, 1))
    out = x.new_empty(len(weight), x.shape[-4], axes[0].count, axes[1].count, weight.shape[1])
    _gather(x, weight, bias, out, axes, tile)
    return out


def conv2d_input_grad(
    grad: Tensor,
    weight: Tensor,
    input_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    tile: Tile | None = None,
) -> Tensor:
    """The gradient of :func:`conv2d` in x, ``[K, B, H, W, C]``, from the output's, ``[K, B, P, Q, O]``.

    A convolution of ``grad`` with the transposed weights; with a stride, one for each phase of the input's
    positions, which reads only the taps that reach it.
    """
    grad, weight = grad.contiguous(), turned(weight)
    out = grad.new_empty(*grad.shape[:2], *input_size, weight.shape[1])
    sizes = zip(grad.shape[2:4], input_size, weight.shape[2:4], stride, padding, dilation, strict=True)
    for axes in itertools.product(*([_phase(f, *size) for f in range(size[3])] for size in sizes)):
        _gather(grad, weight, None, out, axes, tile)
    return out


def conv2d_weight_grad(
    x: Tensor,
    grad: Tensor,
    kernel_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    copy: bool | None = None,
) -> Tensor:
    """The gradient of :func:`conv2d` in the weights, ``[K, O, C, R, S]``.

    Args:
        x: as given to :func:`conv2d`.
        grad: ``[K, B, P, Q, O]``.
        kernel_size: R and S.
        stride: as given to :func:`conv2d`.
        padding: likewise.
        dilation: likewise.
        tile: instead of the one chosen by size; ``tile.k`` counts images, at one position.
        splits: into how many partial sums the sum over images and positions is split, for small weights.
        copy: whether x and grad are first copied by :func:`batch_last`, since tensor cores want the summed
            axis of float32 contiguous; by default only for float32.
    """
    samples, batch, height, width, outputs = grad.shape
    h, w, channels = x.shape[-3:]
    own = int(x.dim() == 5)
    x, grad = x.contiguous(), grad.contiguous()
    _refuse_large(x.numel() // (samples if own else 1), grad[0].numel())
    strides = (height * width * outputs, outputs, 1, h * w * channels, channels, 1)
    if x.dtype == torch.float32 if copy is None else copy:
        x, grad = batch_last(x), batch_last(grad)
        strides = (1, outputs * batch, batch, 1, channels * batch, batch)
    columns = kernel_size[0] * kernel_size[1] * channels
    tile = tile or _weight_grad_tile(outputs, columns, batch, x.dtype)
    tiles = triton.cdiv(outputs, tile.m) * triton.cdiv(columns, tile.n)
    steps = height * width * triton.cdiv(batch, tile.k)
    splits = splits or max(1, min(_PROGRAMS // (tiles * samples), steps // 8))
    out = torch.empty(
        (splits, samples, outputs, *kernel_size, channels),
        dtype=x.dtype if splits == 1 else torch.float32,
        device=x.device,
    )
    _weight_grad[tiles, splits, samples](
        grad, x, out, own, batch, h, w, channels, height, width, outputs, *kernel_size,
        *stride, *padding, *dilation, *strides, splits,
        BM=tile.m, BN=tile.n, BK=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return channels_first(out[0] if splits == 1 else out.sum(0).to(x.dtype))


def _swapped(x: Tensor) -> Tensor:
    samples, rows, groups, columns = x.shape
    out = x.new_empty(samples, columns, groups, rows)
    block = 64
    grid = (triton.cdiv(rows, block) * triton.cdiv(columns, block), samples * groups)
    _swap[grid](x, out, rows, groups, columns, BLOCK=block)
    return out


def _gather(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, axes: Sequence[_Axis],
    tile: Tile | None,
) -> None:  # fmt: skip
    samples, outputs, *taps, channels = weight.shape
    own = int(x.dim() == 5)
    if x.shape[-1] != channels:
        raise ValueError(f"the input has {x.shape[-1]} channels and the weights {channels}: groups must be 1")
    _refuse_large(x.numel() // (samples if own else 1), weight[0].numel(), out[0].numel())
    rows = out.shape[1] * axes[0].count * axes[1].count
    tile = tile or _conv_tile(samples, rows, outputs, x.dtype)
    bias = None if bias is None else bias.contiguous()
    _conv[triton.cdiv(rows, tile.m) * triton.cdiv(outputs, tile.n), samples](
        x, weight, bias, out, own, out.shape[1], channels, outputs, *taps,
        *axes[0], *axes[1], BIASED=bias is not None,
        BM=tile.m, BN=tile.n, BK=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _phase(f: int, grad_size: int, size: int, taps: int, stride: int, padding: int, dilation: int) -> _Axis:
    """Inputs ``f + i · stride``, which tap r reads for ``i + (f + padding − r · dilation) / stride``."""
    met = [r for r in reversed(range(taps)) if (f + padding - r * dilation) % stride == 0]
    at = [(f + padding - r * dilation) // stride for r in met] or [0]
    step, tap_step = (at[1] - at[0], met[1] - met[0]) if len(met) > 1 else (1, 0)
    count = len(range(f, size, stride))
    return _Axis(grad_size, count, 1, at[0], step, len(met), met[0] if met else 0, tap_step, size, f, stride)


def _conv_tile(samples: int, rows: int, outputs: int, dtype: torch.dtype) -> Tile:
    k = 32 if dtype == torch.float32 else 64
    n = 128 if outputs > 64 else max(16, triton.next_power_of_2(outputs))
    for m, wide in ((128, 256 if outputs >= 256 else n), (128, n)):
        if triton.cdiv(rows, m) * triton.cdiv(outputs, wide) * samples >= 264:
            return Tile(m, wide, k, 8 if wide >= 128 else 4, 3)
    return Tile(64, n, k, 4, 3)


def _weight_grad_tile(outputs: int, columns: int, batch: int, dtype: torch.dtype) -> Tile:
    m = 128 if outputs > 64 else 64
    n = 128 if columns > 64 else max(16, triton.next_power_of_2(columns))
    k = min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(batch)))
    return Tile(m, n, k, 8 if m == n == 128 else 4, 3)


def _refuse_large(*sizes: int) -> None:
    if max(sizes) >= 2**31:
        raise ValueError(f"a sample has {max(sizes)} elements, and 2³¹ are too many: use a smaller batch")
