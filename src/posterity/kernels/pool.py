"""Triton kernels: the maxima of windows that tile an image, channels last, and their gradient.

No indices are stored: the gradient finds each window's maximum again, which costs one more read of the
input and no more memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]


class Tile(NamedTuple):
    """Windows times channels of a program, its channels, and compiler options.

    Sizes are powers of two.
    """

    numbers: int = 1024
    columns: int = 64
    warps: int = 4


@triton.jit
def _windows(windows, P, Q, H, W, C, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr):
    """This program's windows, as image, row and column of the output, and their first pixel's offset."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = m % Q
    p = m // Q % P
    image = m // Q // P
    first = ((image * H + p * KH).to(tl.int64) * W + q * KW) * C
    return m < windows, image, p, q, first


@triton.jit(do_not_specialize=["windows", "H", "W", "P", "Q"])
def _max_pool(
    x, y, windows, H, W, P, Q, C,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    inside, image, p, q, first = _windows(windows, P, Q, H, W, C, KH, KW, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (c < C)[None, :]
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    for tap in tl.static_range(KH * KW):
        at = first + (tap // KW * W + tap % KW) * C
        value = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        best = tl.where((value > best) | (value != value), value, best)
    at = ((image * P + p).to(tl.int64) * Q + q) * C
    tl.store(y + at[:, None] + c[None, :], best.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["windows", "H", "W", "P", "Q"])
def _max_pool_grad(
    x, grad, out, windows, H, W, P, Q, C,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Windows that cross the edge have no output, and write zeros for their pixels inside the image."""
    inside, image, p, q, first = _windows(windows, tl.cdiv(H, KH), tl.cdiv(W, KW), H, W, C, KH, KW, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = (c < C)[None, :]
    whole = inside & (p < P) & (q < Q)
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    where = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tap in tl.static_range(KH * KW):
        at = first + (tap // KW * W + tap % KW) * C
        value = tl.load(x + at[:, None] + c[None, :], mask=whole[:, None] & within, other=0.0).to(tl.float32)
        # As in torch: the first of equal values, with NaN as the largest.
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        where = tl.where(better, tap, where)
    at = ((image * P + p).to(tl.int64) * Q + q) * C
    value = tl.load(grad + at[:, None] + c[None, :], mask=whole[:, None] & within, other=0.0)
    for tap in tl.static_range(KH * KW):
        at = first + (tap // KW * W + tap % KW) * C
        there = inside & (p * KH + tap // KW < H) & (q * KW + tap % KW < W)
        chosen = tl.where(where == tap, value, 0.0)
        tl.store(out + at[:, None] + c[None, :], chosen, mask=there[:, None] & within)


def pools(
    kernel: Pair, stride: Pair, padding: Pair = (0, 0), dilation: Pair = (1, 1), ceil_mode: bool = False
) -> bool:
    """Whether the windows tile the image, so that these kernels can pool it; otherwise torch does.

    Args:
        kernel: As in ``F.max_pool2d``, for both axes.
        stride: Likewise.
        padding: Likewise.
        dilation: Likewise.
        ceil_mode: As in ``F.max_pool2d``.
    """
    return kernel == stride and padding == (0, 0) and dilation == (1, 1) and not ceil_mode


def max_pool2d(x: Tensor, kernel: Pair, *, tile: Tile | None = None) -> Tensor:
    """``F.max_pool2d`` with ``stride=kernel``, channels last.

    Args:
        x: ``[N, H, W, C]``.
        kernel: A window's height and width; rows and columns that do not fill one are left out.
        tile: What each program works on; by default chosen from the shape.

    Returns:
        ``[N, P, Q, C]``.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    size = (height // kernel[0], width // kernel[1])
    if min(size) == 0:
        raise ValueError(f"images of {height}×{width} have no window of {kernel[0]}×{kernel[1]}: use smaller")
    y = x.new_empty(images, *size, channels)
    windows = images * size[0] * size[1]
    grid, options = _launch(windows, channels, kernel, tile)
    _max_pool[grid](x, y, windows, height, width, *size, channels, **options)
    return y


def max_pool2d_grad(x: Tensor, grad: Tensor, kernel: Pair, *, tile: Tile | None = None) -> Tensor:
    """The gradient of :func:`max_pool2d` in x, ``[N, H, W, C]``: each window's at its first maximum.

    Args:
        x: As given to :func:`max_pool2d`.
        grad: With respect to its output, ``[N, P, Q, C]``.
        kernel: As given to :func:`max_pool2d`.
        tile: What each program works on; by default chosen from the shape.
    """
    x, grad = x.contiguous(), grad.contiguous()
    images, height, width, channels = x.shape
    out = torch.empty_like(x)
    windows = images * triton.cdiv(height, kernel[0]) * triton.cdiv(width, kernel[1])
    grid, options = _launch(windows, channels, kernel, tile)
    _max_pool_grad[grid](x, grad, out, windows, height, width, *grad.shape[1:3], channels, **options)
    return out


def _launch(
    windows: int, channels: int, kernel: Pair, tile: Tile | None
) -> tuple[tuple[int, int], dict[str, int]]:
    tile = tile or Tile()
    columns = min(tile.columns, triton.next_power_of_2(channels))
    rows = min(tile.numbers // columns, triton.next_power_of_2(max(windows, 1)))
    grid = (triton.cdiv(windows, rows), triton.cdiv(channels, columns))
    sizes = {"KH": kernel[0], "KW": kernel[1], "ROWS": rows, "COLUMNS": columns}
    return grid, {**sizes, "num_warps": tile.warps}
