"""Sums of gradients and of their squares, example by example, for convolutions.

:func:`conv2d_squares` is all that a collector asks of a convolution. On a GPU a kernel squares each example's
gradient where it is made; elsewhere, and in full float32, some examples' at a time are written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.noise import kernels

# Numbers that are held at once, of examples' gradients and of what they are made of: on a CPU new memory
# costs more than what fills it, and a GPU wants much to do.
_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}


class Sizes(NamedTuple):
    """How a convolution walks over a picture.

    Attributes:
        taps: Height and width of the filters.
        stride: From one output to the next.
        padding: Zeros at the top and bottom, and at the left and right.
        dilation: From one tap to the next.
        groups: Of channels that do not see each other.
    """

    taps: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


def conv2d_squares(x: Tensor, grad: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Σ_i g_i of every sample and Σ_i g_i² of all, where g_i is example i's gradient of the filters.

    Args:
        x: The layer's inputs ``[K, B, C, H, W]``.
        grad: The loss's gradient in the layer's outputs ``[K, B, O, P, Q]``.
        sizes: Of the convolution.

    Returns:
        Gradients ``[K, O, C / groups, R, S]`` and squares ``[O, C / groups, R, S]``, in single precision at
        least.

    Example:
        >>> x, grad = torch.randn(1, 7, 2, 5, 5), torch.randn(1, 7, 4, 3, 3)
        >>> sums, squares = conv2d_squares(x, grad, Sizes((3, 3)))
        >>> sums.shape, squares.shape
        (torch.Size([1, 4, 2, 3, 3]), torch.Size([4, 2, 3, 3]))
    """
    if sizes.groups == 1 and kernels is not None and kernels.multiplies(grad):
        return kernels.conv2d_squares(x, grad, *sizes[:4])
    samples, _, channels = x.shape[:3]
    wide, groups = wide_dtype(grad.dtype), sizes.groups
    shape = (grad.shape[2], channels // groups, *sizes.taps)
    sums = grad.new_zeros((samples, *shape), dtype=wide)
    squares = grad.new_zeros(shape, dtype=wide)
    taps = squares[0].numel()
    for k in range(samples):
        for rows, seen in windows(x[k], sizes, more=squares.numel()):
            # [n, G, O / G, P·Q] times [n, G, P·Q, C / G·R·S]
            places = seen.shape[2]
            own = grad[k, rows].reshape(-1, groups, shape[0] // groups, places)
            terms = (own @ seen.view(groups, taps, -1, places).permute(2, 0, 3, 1)).to(wide)
            sums[k] += terms.sum(0).view(shape)
            squares += terms.square_().sum(0).view(shape)
    return sums, squares


def windows(x: Tensor, sizes: Sizes, more: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """What each output of a convolution sees of ``x [B, C, H, W]``: ``[C·R·S, n, P·Q]`` of some examples.

    Args:
        x: Inputs.
        sizes: Of the convolution.
        more: How many numbers the caller will hold for each example.
    """
    (down, across), (r, s) = sizes.padding, sizes.taps
    x = F.pad(x, (across, across, down, down)) if down or across else x
    axes = zip(x.shape[2:], sizes.taps, sizes.stride, sizes.dilation, strict=True)
    p, q = ((size - d * (t - 1) - 1) // step + 1 for size, t, step, d in axes)
    batch, channels = x.shape[:2]
    step = at_once(x, channels * r * s * p * q + more)
    for start in range(0, batch, step):
        part = x[start : start + step]
        n, c, h, w = part.stride()
        (down, across), (below, beside) = sizes.stride, sizes.dilation
        strides = (c, h * below, w * beside, n, h * down, w * across)
        seen = part.as_strided((channels, r, s, len(part), p, q), strides)
        yield slice(start, start + step), seen.reshape(channels * r * s, len(part), p * q)


def at_once(x: Tensor, numbers: int) -> int:
    """How many examples to work on at once, if so many numbers are held for each."""
    return max(1, _AT_ONCE.get(x.device.type, _AT_ONCE["cuda"]) // numbers)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: never half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
