"""Layers of whole stacks: K weight samples at once, forward and backward, the same mathematics as torch's.

They take stacked tensors as they lie in memory, samples first and channels last. :mod:`posterity.routes`
calls them in place of what ``vmap`` would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posterity.noise import kernels

# A convolution of shared inputs with at most so many weights for each output is done as a linear layer: the
# tiles of the convolution's kernels would be almost empty.
_FEW_TAPS = 64
# More rows than these fill a GPU, and torch's own products are the faster.
_FEW_ROWS = 512


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is made, so that it need not be kept."""

    def parts(self) -> list[slice]:
        """Which samples' gradients to make and bring at once; none if they may be left to autograd."""

    def take(self, grads: Tensor, rows: slice) -> None:
        """Take the gradients of some of the samples."""


class _Stacked(torch.autograd.Function):
    """A function of whole stacks: it may be called while vmap runs, but not on what vmap has stacked."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError("weights are stacked over samples once, not twice")


class _Layer(_Stacked):
    """A layer ``f(x, weight [K, …], bias [K, O] or None)`` that multiplies a rounded copy of its weight."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, low, ctx.sink, *ctx.sizes = inputs
        ctx.save_for_backward(x, low)
        ctx.dtype = weight.dtype

    @staticmethod
    def into_weight(ctx: Any, make: Callable[[slice], Tensor]) -> Tensor | None:
        """The gradient in the weights, by samples, unless a sink has taken it."""
        if not ctx.needs_input_grad[1]:
            return None
        parts = [] if ctx.sink is None else ctx.sink.parts()
        for rows in parts:
            ctx.sink.take(make(rows), rows)
        return None if parts else make(slice(None)).to(ctx.dtype)


class Linear(_Layer):
    """``x [K, B, I]`` or ``[B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sink: Any) -> Any:
        if kernels is not None and kernels.multiplies(low) and x.shape[-2] <= _FEW_ROWS:
            return kernels.linear(x, low, bias)
        x = x.expand(len(low), -1, -1)
        if bias is None:
            return torch.bmm(x, low.mT)
        if not x.is_cuda or x.shape[1] <= _FEW_ROWS:
            return torch.baddbmm(bias[:, None], x, low.mT)
        # Each product fills the GPU, and adds its bias as it goes; a stack's would be written out first.
        out = x.new_empty(*x.shape[:2], low.shape[1])
        for each in range(len(low)):
            torch.addmm(bias[each], x[each], low[each].mT, out=out[each])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.bmm(grad, weight)
            back = back if x.dim() == 3 else back.sum(0)
        rows = x.expand(len(grad), -1, -1)
        return (
            back,
            _Layer.into_weight(ctx, lambda part: torch.bmm(grad[part].mT, rows[part])),
            _column_sums(grad) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class Conv2d(_Layer):
    """``x [K, B, H, W, C]`` or ``[B, H, W, C]``, ``weight [K, O, C, R, S]`` → ``[K, B, P, Q, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sink: Any, sizes: Any) -> Any:
        taps = low[0, 0].numel()
        if x.dim() == 5 or taps > _FEW_TAPS:
            return kernels.conv2d(x, low, bias, *sizes)
        # A picture has few channels: each output's inputs side by side, and it is a linear layer.
        rows = _windows(x, low.shape[3:], *sizes)
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

        return (
            back,
            _Layer.into_weight(ctx, into),
            _column_sums(grad.flatten(1, 3)) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


class BatchNorm(_Stacked):
    """Training: ``x [K, M, C]``, weight and bias ``[K, C]``, ``[C]`` or None → the same, mean, variance."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        out, mean, rstd, var = kernels.batch_norm(x, weight, bias, eps)
        return out, mean, var, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _ = inputs
        ctx.save_for_backward(x, weight, output[1], output[3])
        ctx.bias_dim = None if bias is None else bias.dim()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else zeros would be written for those

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        back, *into = kernels.batch_norm_grad(x, grad.contiguous(), weight, mean, rstd)
        shared = (weight is None or weight.dim() == 1, ctx.bias_dim == 1)
        wanted = ctx.needs_input_grad[1:3]
        sums = [(each.sum(0) if one else each) for each, one in zip(into, shared, strict=True)]
        return back, *(each if want else None for each, want in zip(sums, wanted, strict=True)), None


class MaxPool2d(_Stacked):
    """``x [N, H, W, C]`` → ``[N, P, Q, C]``, by windows that do not overlap."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Any:
        return kernels.max_pool2d(x, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return kernels.max_pool2d_grad(x, grad.contiguous(), ctx.kernel), None


def _column_sums(grad: Tensor) -> Tensor:
    """Sums over the rows of ``[K, M, C]``."""
    if kernels is None or not grad.is_cuda or grad.dtype == torch.float64:
        return grad.sum(1)
    sums: Tensor = kernels.column_sums(grad.contiguous())
    return sums.to(grad.dtype)


def _windows(x: Tensor, taps: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """What each output of a convolution sees of ``x [B, H, W, C]``: ``[B, P, Q, C·R·S]`` and zeros."""
    x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    batch, *image, channels = x.shape
    axes = [
        (size - d * (t - 1) - 1) // s + 1 for size, t, s, d in zip(image, taps, stride, dilation, strict=True)
    ]
    b, h, w, c = x.stride()
    steps = (b, h * stride[0], w * stride[1], c, h * dilation[0], w * dilation[1])
    seen = x.as_strided((batch, *axes, channels, *taps), steps)
    width = seen[0, 0, 0].numel()
    out = x.new_zeros(batch, *axes, -(-width // 16) * 16)  # loads are wide for multiples of 16
    out[..., :width].view(seen.shape).copy_(seen)
    return out


class CrossEntropy(_Stacked):
    """Mean loss of every sample, ``[K]``, of logits ``[K, B, C]``."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, ignore_index: int) -> Any:
        return kernels.cross_entropy(logits, target, ignore_index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, None, None]).to(slope.dtype), None, None
