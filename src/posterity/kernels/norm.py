"""Triton kernels: batch normalisation of K stacked inputs, its gradients, and sums over rows.

Inputs are ``[K, M, C]``, channels last: M counts images and positions together. Every function is two
launches over the same grid: each program sums its share of the rows for one block of channels, then each
merges the few partial results of its channels and writes its share of the output. The second launch goes
backwards, since the rows that the first read last are still in the cache. No result depends on the order in
which programs run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Partial results that a program merges at once, in registers. This is a maximum, since a kernel for each
# number of them would be compiled again for ragged batches.
_SPLITS = tl.constexpr(64)


# Up to this many are summed at once: a second launch would cost more.
_FEW_ROWS = 256


class Tile(NamedTuple):
    """The values that a program holds at once, its channels, compiler options, and the number of programs.

    Sizes are powers of two. The default fits three times on each of an H200's 132 multiprocessors, if there
    are enough registers: more programs would wait for the others to end.
    """

    numbers: int = 4096
    columns: int = 64
    warps: int = 8
    stages: int = 1
    programs: int = 396


class _Plan(NamedTuple):
    """A grid, the rows that each split takes (the last may have fewer), and how kernels are compiled."""

    grid: tuple[int, int, int]
    share: int
    options: dict[str, int]


@triton.jit
def _place(rows, channels, share, COLUMNS: tl.constexpr):
    """This program's first row, its number of rows, and its channels."""
    begin = tl.program_id(0) * share
    base = (tl.program_id(2).to(tl.int64) * rows + begin) * channels
    return base, tl.minimum(share, rows - begin), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _part(number, split, column, channels):
    """Offsets of a split's partial results in ``[numbers, K, splits, C]``."""
    sample = number * tl.num_programs(2) + tl.program_id(2)
    return (sample * tl.num_programs(0) + split) * channels + column


@triton.jit
def _parts(parts, number, column, channels):
    """All splits' partial results, ``[_SPLITS, COLUMNS]``."""
    split = tl.arange(0, _SPLITS)[:, None]
    mask = (split < tl.num_programs(0)) & (column < channels)[None, :]
    return tl.load(parts + _part(number, split, column[None, :], channels), mask=mask, other=0.0)


@triton.jit
def _channel(values, stride, column, channels):
    at = values + tl.program_id(2).to(tl.int64) * stride + column
    return tl.load(at, mask=column < channels, other=0.0).to(tl.float32)


@triton.jit
def _merge(count, mean, square):
    """Counts, means and sums of squared deviations, merged over the first axis (Chan et al., 1979)."""
    total = tl.sum(count, 0)
    merged = tl.sum(mean * (count / total)[:, None], 0)
    away = mean - merged[None, :]
    return merged, tl.sum(square + count[:, None] * away * away, 0)


@triton.jit(do_not_specialize=["rows", "share"])
def _statistics(
    x, parts, rows, channels, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The mean of a share of the rows, and its sum of squared deviations from it.

    Each place of the tile keeps its own running mean (Welford, 1962), so that nothing is exchanged between
    threads until the end, and nothing cancels however far the mean is from zero.
    """
    base, size, column = _place(rows, channels, share, COLUMNS)
    row = tl.arange(0, ROWS)
    within = (column < channels)[None, :]
    here = x + base + row[:, None] * channels + column[None, :]
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    before = 0.0
    for start in tl.range(0, size, ROWS, num_stages=STAGES):
        inside = (start + row < size)[:, None]
        value = tl.load(here + start * channels, mask=inside & within, other=0.0).to(tl.float32)
        part = 1.0 / (before + 1.0)
        away = tl.where(inside, value - mean, 0.0)
        mean += away * part
        square += away * away * (before * part)
        before += 1.0
    count = tl.cdiv(tl.maximum(size - row, 0), ROWS).to(tl.float32)
    mean, square = _merge(count, mean, square)
    split = tl.program_id(0)
    tl.store(parts + _part(0, split, column, channels), mean, mask=column < channels)
    tl.store(parts + _part(1, split, column, channels), square, mask=column < channels)


@triton.jit(do_not_specialize=["rows", "share"])
def _normalise(
    x, weight, bias, parts, y, statistics, rows, channels, share, weight_sample, bias_sample, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``(x − mean) · rstd · weight + bias``; the first split stores the statistics, ``[3, K, C]``."""
    base, size, column = _place(rows, channels, share, COLUMNS)
    count = tl.minimum(tl.maximum(rows - tl.arange(0, _SPLITS) * share, 0), share).to(tl.float32)
    mean, square = _merge(count, _parts(parts, 0, column, channels), _parts(parts, 1, column, channels))
    variance = square / rows
    rstd = tl.rsqrt(variance + eps)
    if tl.program_id(0) == 0:
        at = statistics + tl.program_id(2) * channels + column
        step = tl.num_programs(2) * channels
        tl.store(at, mean, mask=column < channels)
        tl.store(at + step, rstd, mask=column < channels)
        tl.store(at + 2 * step, variance, mask=column < channels)
    scale = rstd
    if weight is not None:
        scale *= _channel(weight, weight_sample, column, channels)
    shift = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        shift = _channel(bias, bias_sample, column, channels)
    row = tl.arange(0, ROWS)
    within = (column < channels)[None, :]
    here = base + row[:, None] * channels + column[None, :]
    tiles = tl.cdiv(size, ROWS)
    for turn in tl.range(0, tiles, num_stages=STAGES):
        start = (tiles - 1 - turn) * ROWS
        mask = (start + row < size)[:, None] & within
        value = tl.load(x + here + start * channels, mask=mask, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + here + start * channels, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "share"])
def _sums(
    grad, x, mean, rstd, parts, rows, channels, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of a share of the rows of ``grad`` and, where there is an x, of its products with x̂."""
    base, size, column = _place(rows, channels, share, COLUMNS)
    row = tl.arange(0, ROWS)
    within = (column < channels)[None, :]
    here = base + row[:, None] * channels + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if x is not None:
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        centre = _channel(mean, channels, column, channels)[None, :]
    for start in tl.range(0, size, ROWS, num_stages=STAGES):
        mask = (start + row < size)[:, None] & within
        value = tl.load(grad + here + start * channels, mask=mask, other=0.0).to(tl.float32)
        total += value
        if x is not None:
            # Outside the mask the gradient is zero, so the other factor does not matter.
            beside = tl.load(x + here + start * channels, mask=mask, other=0.0).to(tl.float32)
            product += value * (beside - centre)
    split = tl.program_id(0)
    tl.store(parts + _part(0, split, column, channels), tl.sum(total, 0), mask=column < channels)
    if x is not None:
        scaled = tl.sum(product, 0) * _channel(rstd, channels, column, channels)
        tl.store(parts + _part(1, split, column, channels), scaled, mask=column < channels)


@triton.jit(do_not_specialize=["rows", "share"])
def _input_grad(
    grad, x, weight, mean, rstd, parts, out, sums, rows, channels, share, weight_sample,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``w · rstd · (grad − mean of grad − x̂ · mean of grad · x̂)``."""
    base, size, column = _place(rows, channels, share, COLUMNS)
    total = tl.sum(_parts(parts, 0, column, channels), 0)
    product = tl.sum(_parts(parts, 1, column, channels), 0)
    if tl.program_id(0) == 0:
        at = sums + tl.program_id(2) * channels + column
        tl.store(at, total, mask=column < channels)
        tl.store(at + tl.num_programs(2) * channels, product, mask=column < channels)
    centre = _channel(mean, channels, column, channels)[None, :]
    scale = _channel(rstd, channels, column, channels)
    slope = (scale * product / rows)[None, :]
    shift = (total / rows)[None, :]
    if weight is not None:
        scale *= _channel(weight, weight_sample, column, channels)
    row = tl.arange(0, ROWS)
    within = (column < channels)[None, :]
    here = base + row[:, None] * channels + column[None, :]
    tiles = tl.cdiv(size, ROWS)
    for turn in tl.range(0, tiles, num_stages=STAGES):
        start = (tiles - 1 - turn) * ROWS
        mask = (start + row < size)[:, None] & within
        value = tl.load(grad + here + start * channels, mask=mask, other=0.0).to(tl.float32)
        beside = tl.load(x + here + start * channels, mask=mask, other=0.0).to(tl.float32)
        value = (value - shift - (beside - centre) * slope) * scale[None, :]
        tl.store(out + here + start * channels, value.to(out.dtype.element_ty), mask=mask)


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``F.batch_norm`` of each sample by the statistics of its own rows.

    Args:
        x: ``[K, M, C]``.
        weight: ``[K, C]``, or ``[C]`` for all samples, or None.
        bias: likewise.
        eps: Added to the variance.
        tile: What each program works on; by default chosen from the shape.

    Returns:
        The output ``[K, M, C]`` in x's type, then mean, 1 / √(variance + eps) and biased variance, float32
        ``[K, C]``.
    """
    x = x.contiguous()
    samples, rows, channels = x.shape
    plan = _plan(x, tile)
    weight, bias = _affine(weight, samples), _affine(bias, samples)
    parts = x.new_empty((2, samples, plan.grid[0], channels), dtype=torch.float32)
    statistics = x.new_empty((3, samples, channels), dtype=torch.float32)
    y = torch.empty_like(x)
    _statistics[plan.grid](x, parts, rows, channels, plan.share, **plan.options)
    _normalise[plan.grid](
        x, weight, bias, parts, y, statistics, rows, channels, plan.share,
        0 if weight is None else weight.stride(0), 0 if bias is None else bias.stride(0), eps, **plan.options,
    )  # fmt: skip
    return y, statistics[0], statistics[1], statistics[2]


def batch_norm_grad(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`batch_norm` in x, ``[K, M, C]``, in the weight and in the bias, ``[K, C]``.

    The last two are float32 and of each sample, also where samples share their weight.

    Args:
        x: As given to :func:`batch_norm`.
        grad: With respect to its output, ``[K, M, C]``.
        weight: As given to :func:`batch_norm`.
        mean: As returned by it.
        rstd: Likewise.
        tile: What each program works on; by default chosen from the shape.
    """
    x, grad, mean, rstd = x.contiguous(), grad.contiguous(), mean.contiguous(), rstd.contiguous()
    samples, rows, channels = x.shape
    plan = _plan(x, tile)
    weight = _affine(weight, samples)
    parts = x.new_empty((2, samples, plan.grid[0], channels), dtype=torch.float32)
    sums = x.new_empty((2, samples, channels), dtype=torch.float32)
    out = torch.empty_like(x)
    _sums[plan.grid](grad, x, mean, rstd, parts, rows, channels, plan.share, **plan.options)
    _input_grad[plan.grid](
        grad, x, weight, mean, rstd, parts, out, sums, rows, channels, plan.share,
        0 if weight is None else weight.stride(0), **plan.options,
    )  # fmt: skip
    return out, sums[1], sums[0]


def column_sums(x: Tensor, *, tile: Tile | None = None) -> Tensor:
    """The sums over rows of each sample, ``[K, M, C]`` to float32 ``[K, C]``.

    Args:
        x: ``[K, M, C]``.
        tile: What each program works on; by default chosen from the shape.
    """
    x = x.contiguous()
    samples, rows, channels = x.shape
    if tile is None and rows <= _FEW_ROWS:
        tile = Tile(columns=32, warps=4, programs=1)
    plan = _plan(x, tile)
    parts = x.new_empty((samples, plan.grid[0], channels), dtype=torch.float32)
    _sums[plan.grid](x, None, None, None, parts, rows, channels, plan.share, **plan.options)
    return parts[:, 0] if plan.grid[0] == 1 else parts.sum(1)


def _affine(values: Tensor | None, samples: int) -> Tensor | None:
    """One contiguous row for each sample; samples may share it."""
    if values is None:
        return None
    values = values if values.stride(-1) == 1 else values.contiguous()
    return values.expand(samples, values.shape[-1])


def _plan(x: Tensor, tile: Tile | None) -> _Plan:
    samples, rows, channels = x.shape
    # Half precision halves the bytes in flight, which are too few unless the next tiles are loaded ahead.
    tile = tile or Tile(stages=1 if x.element_size() == 4 else 3)
    columns = min(tile.columns, triton.next_power_of_2(channels))
    height = min(tile.numbers // columns, triton.next_power_of_2(max(rows, 1)))
    blocks = triton.cdiv(channels, columns)
    splits = max(1, min(tile.programs // (samples * blocks), _SPLITS.value))
    share = triton.cdiv(triton.cdiv(max(rows, 1), splits), height) * height
    splits = triton.cdiv(max(rows, 1), share)
    options = {
        "ROWS": height,
        "COLUMNS": columns,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    return _Plan((splits, blocks, samples), share, options)
