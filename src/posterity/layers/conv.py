"""``F.conv1d`` and ``F.conv2d``.

On a GPU a kernel squares each example's gradient inside the product; elsewhere, and in full float32, the
gradients of some examples at a time are written to memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posterity.layers.calls import Found, Multiplying, Sink, chunks, wide_dtype
from posterity.layers.stacks import (
    StackedLayer,
    autocast_dtype,
    batched,
    column_sums,
    inside,
    level_of,
    operands,
    pair,
    stack,
)
from posterity.noise import kernels

# A convolution of shared inputs with at most this many weights per output is computed as a linear layer:
# tiles of the convolution's kernels would be almost empty.
_FEW_TAPS = 64


class Sizes(NamedTuple):
    """The sizes of a 2-d convolution; a 1-d one is treated as a 2-d one over one row.

    Attributes:
        taps: Height and width of the filters.
        stride: Distance from one output to the next.
        padding: Zeros at the top and bottom, and at the left and right.
        dilation: Distance from one tap to the next.
        before: Zeros that padding="same" adds on the sides of each axis, last axis first, if any.
    """

    taps: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    before: tuple[int, ...] = ()


@final
@dataclass(eq=False)
class Conv(Multiplying):
    """``x [N, C, H, W]``, ``grad [N, O, P, Q]``; a 1-d convolution has no H and P."""

    brings_gradient = True

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def leading(self) -> int:
        """One, for a batch; none for a single image."""
        return int(self.input.dim() == self.weight.dim())

    @property
    def matrix(self) -> bool:
        """Whether filters use all channels, so that each one, flattened, is a row of a matrix."""
        return self.groups == 1

    def keep(self, out: Tensor) -> None:
        """Its sizes."""
        shape, how = self.weight.shape, (self.stride, self.padding, self.dilation)
        try:
            self.sizes = _sizes(shape, *how)
        except TypeError:  # lists have no hash
            self.sizes = _sizes(shape, *(x if isinstance(x, int | str) else tuple(x) for x in how))

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By kernels."""
        x, weight, bias = self.input, self.weight, self.bias
        level = level_of(x, weight, bias)
        if (
            kernels is None
            or level is None
            or not batched(weight)
            or (self.groups, x.dim(), weight.dim()) != (1, 4, 4)
            or isinstance(self.padding, str)
            or not kernels.multiplies(inside(weight), autocast_dtype(x))
        ):
            return NotImplemented
        images, w, b, low = operands(x, weight, bias)
        sizes = pair(self.stride), pair(self.padding), pair(self.dilation)
        sink = sinks.get(inside(weight))
        out = StackedConv2d.apply(images.movedim(-3, -1), w, b, low, sink, sizes)  # type: ignore[no-untyped-call]
        return stack(out.movedim(-1, -3), level)

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """From the products of the gradient, example by example."""
        shift = self.bias_squares(grad) if bias else None
        lines = grad.dim() == 3
        if lines or self.sizes.before or x.dtype is not grad.dtype:
            x, grad = self._planes(x.to(grad.dtype)), grad.unsqueeze(2) if lines else grad
        if self.samples > 1:
            grad = grad.view(self.samples, self.examples, *grad.shape[1:])
            x = x.view(-1, self.examples, *x.shape[1:]).expand(len(grad), -1, -1, -1, -1)
        if self.groups == 1 and kernels is not None and kernels.multiplies(grad):
            sums, squares = kernels.conv2d_squares(x, grad, *self.sizes[:4])
        else:
            sums, squares = self._sums(x, grad)
        if lines:
            sums, squares = sums.squeeze(-2), squares.squeeze(-2)
        return Found(squares, shift, sums)

    def _sums(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i g_i of every sample and Σ_i g_i² of all, from images ``[K, B, …]``, or ``[B, …]`` of one."""
        shape = (grad.shape[-3], x.shape[-3] // self.groups, *self.sizes.taps)
        sums = grad.new_zeros(*grad.shape[:-4], *shape, dtype=wide_dtype(grad.dtype))
        squares = grad.new_zeros(shape, dtype=sums.dtype)
        stacks = (sums, x, grad) if self.samples > 1 else (sums[None], x[None], grad[None])
        for total, mine, own in zip(*stacks, strict=True):
            for some, each in chunks(self.held(mine, own), mine, own):
                terms = self._products(some, each)
                total += terms.sum(0)
                squares += terms.square_().sum(0)
        return sums, squares

    def held(self, x: Tensor, grad: Tensor) -> int:
        """The size of filters, and of the inputs of each output."""
        places, taps = grad[0, 0].numel(), self.sizes.taps[0] * self.sizes.taps[1]
        return x.shape[1] * taps * (grad.shape[1] // self.groups + places)

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Products of gradients and the inputs of each output, summed over positions."""
        if grad.dim() == 4:
            return self._products(x, grad)
        return self._products(x, grad.unsqueeze(2)).squeeze(-2)

    def prepared(self, x: Tensor) -> Tensor:
        """Inputs as images."""
        return self._planes(x)

    def bias_terms(self, grad: Tensor) -> Tensor:
        """Sums over positions."""
        return grad.flatten(2).sum(2, dtype=wide_dtype(grad.dtype))

    def columns(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """The inputs of each output, in the order of the filters' weights."""
        for (some,) in chunks(self.held(x, grad), self._planes(x)):
            yield windows(some, self.sizes).flatten(1)

    def products(self, grad: Tensor) -> Tensor:
        """By positions."""
        return grad.flatten(2).movedim(1, 0)

    def _planes(self, x: Tensor) -> Tensor:
        """Inputs as images, with the zeros of padding="same" around them."""
        x = F.pad(x, self.sizes.before) if self.sizes.before else x
        return x if x.dim() == 4 else x.unsqueeze(2)

    def _products(self, x: Tensor, grad: Tensor) -> Tensor:
        """``[n, O, C / groups, R, S]``, from images."""
        # [n, G, O / G, P·Q] times [n, G, P·Q, C / G·R·S]
        seen = windows(x.to(grad.dtype), self.sizes)
        own = grad.reshape(len(grad), self.groups, -1, seen.shape[2])
        seen = seen.view(self.groups, -1, *seen.shape[1:]).permute(2, 0, 3, 1)
        shape = (len(grad), grad.shape[1], x.shape[1] // self.groups, *self.sizes.taps)
        return (own @ seen).to(wide_dtype(grad.dtype)).view(shape)


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> Sizes:
    taps = shape[2:]

    def each(size: Any) -> tuple[int, ...]:
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return sizes if len(sizes) == len(taps) else sizes * len(taps)

    def plane(size: Any, height: int) -> tuple[int, int]:
        sizes = each(size)
        return (height, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])

    before: tuple[int, ...] = ()
    if padding == "same":
        totals = [d * (t - 1) for t, d in zip(taps, each(dilation), strict=True)]
        # torch puts the odd zero at the end.
        before = tuple(side for total in reversed(totals) for side in (total // 2, total - total // 2))
    zeros = plane(0 if isinstance(padding, str) else padding, 0)
    return Sizes(plane(taps, 1), plane(stride, 1), zeros, plane(dilation, 1), before if any(before) else ())


def windows(x: Tensor, sizes: Sizes) -> Tensor:
    """The inputs of each output of a convolution of ``x [n, C, H, W]``: ``[C·R·S, n, P·Q]``."""
    seen = _windows(x, *sizes[:4])
    return seen.permute(3, 4, 5, 0, 1, 2).reshape(seen[0, 0, 0].numel(), len(x), -1)


def _windows(x: Tensor, taps: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """A view ``[n, P, Q, C, R, S]`` of ``x [n, C, H, W]``, or of a copy with zeros around it."""
    (down, across), (below, beside) = padding, dilation
    x = F.pad(x, (across, across, down, down)) if down or across else x
    axes = zip(x.shape[2:], taps, stride, dilation, strict=True)
    p, q = ((size - d * (t - 1) - 1) // step + 1 for size, t, step, d in axes)
    n, c, h, w = x.stride()
    strides = (n, h * stride[0], w * stride[1], c, h * below, w * beside)
    return x.as_strided((len(x), p, q, x.shape[1], *taps), strides, x.storage_offset())


@final
class StackedConv2d(StackedLayer):
    """``x [K, B, H, W, C]`` or ``[B, H, W, C]``, ``weight [K, O, C, R, S]`` → ``[K, B, P, Q, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sink: Any, sizes: Any) -> Any:
        taps = low[0, 0].numel()
        if x.dim() == 5 or taps > _FEW_TAPS:
            return kernels.conv2d(x, low, bias, *sizes)
        # Images have few channels: with each output's inputs side by side, this is a linear layer.
        rows = _windows_last(x, low.shape[3:], *sizes)
        out = kernels.linear(rows.flatten(0, 2), F.pad(low.flatten(2), (0, rows.shape[-1] - taps)), bias)
        return out.view(len(low), *rows.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (sizes,) = ctx.sizes
        back = None
        if ctx.needs_input_grad[0]:
            back = kernels.conv2d_input_grad(grad, weight, x.shape[-3:-1], *sizes)
            back = back if x.dim() == 5 else back.sum(0)

        def into(part: slice) -> Any:
            own = x[part] if x.dim() == 5 else x
            return kernels.conv2d_weight_grad(own, grad[part], weight.shape[3:], *sizes)

        sums = column_sums(grad.flatten(1, 3)) if ctx.needs_input_grad[2] else None
        return back, StackedLayer.into_weight(ctx, into), sums, None, None, None


def _windows_last(x: Tensor, taps: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The inputs of each output of a convolution of ``x [B, H, W, C]``: ``[B, P, Q, C·R·S]`` and zeros."""
    seen = _windows(x.movedim(-1, 1), taps, stride, padding, dilation)
    width = seen[0, 0, 0].numel()
    out = x.new_zeros(*seen.shape[:3], -(-width // 16) * 16)  # loads are wide for multiples of 16
    out[..., :width].view(seen.shape).copy_(seen)
    return out
