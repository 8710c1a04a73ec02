"""Layer operations in a form that is fast when weights are stacked over samples.

``vmap`` turns any operation into one over K weight samples, some of them slowly. :class:`StackedRoutes` sends
those through functions that know what a stack is. Each is the same mathematics, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # vmap's own: which tensors are stacked, and where
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity.noise import kernels

# Inputs of an output of a convolution that is done as a linear layer; below, the kernels' tiles are empty.
_FEW_TAPS = 64


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is made, so that it need not be kept."""

    def parts(self) -> list[slice]:
        """Which samples' gradients to make and bring at once; none if they may be left to autograd."""

    def take(self, grads: Tensor, rows: slice) -> None:
        """Take the gradients of some of the samples."""


@final
class StackedRoutes(TorchFunctionMode):
    """Inside, layers with stacked weights take a route that is fast for them, in both directions.

    Args:
        sinks: By stacked weight; what they take, autograd does not return.
    """

    def __init__(self, sinks: Mapping[Tensor, Sink] | None = None) -> None:
        super().__init__()
        self._sinks = sinks or {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ROUTES:
            route, signature = _ROUTES[func]
            out = route(self._sinks, **{**dict(zip(signature, args, strict=False)), **kwargs})
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _linear(sinks: Mapping[Tensor, Sink], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not functorch.is_batchedtensor(weight):
        return NotImplemented
    level = functorch.maybe_get_level(weight)
    x, w, b = _front(input), _front(weight), _stacked(bias, weight)
    # Inputs that all samples share stay one matrix.
    samples = [len(w)] if functorch.is_batchedtensor(input) else []
    x = x.reshape(*samples, -1, x.shape[-1])
    out = _Linear.apply(x, w, b, sinks.get(_inside(weight)), _autocast(x))  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.view(len(w), *input.shape[:-1], -1), 0, level)


def _conv2d(
    sinks: Mapping[Tensor, Sink],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dtype = _autocast(input)
    if (
        kernels is None
        or not functorch.is_batchedtensor(weight)
        or (groups, input.dim()) != (1, 4)
        or isinstance(padding, str)
        or not kernels.multiplies(_inside(weight), dtype)
    ):
        return NotImplemented
    level = functorch.maybe_get_level(weight)
    x, w, b = _front(input).movedim(-3, -1), _front(weight), _stacked(bias, weight)
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    out = _Conv2d.apply(x, w, b, sinks.get(_inside(weight)), dtype, sizes)  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.movedim(-1, -3), 0, level)


def _cross_entropy(
    sinks: Mapping[Tensor, Sink], input: Tensor, target: Tensor, ignore_index: int = -100, **other: Any
) -> Any:
    plain = {
        "weight": None,
        "size_average": None,
        "reduce": None,
        "reduction": "mean",
        "label_smoothing": 0.0,
    }
    if (
        kernels is None
        or not input.is_cuda
        or not functorch.is_batchedtensor(input)
        or functorch.is_batchedtensor(target)
        or (input.dim(), target.dim(), target.dtype) != (2, 1, torch.int64)
        or any(other[key] != plain[key] for key in other)
    ):
        return NotImplemented
    loss, _ = _CrossEntropy.apply(_front(input), target, ignore_index)  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(loss, 0, functorch.maybe_get_level(input))


def _stacked(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """A layer's bias ``[K, O]``, if it has one."""
    if bias is None or functorch.is_batchedtensor(bias):
        return None if bias is None else _front(bias)
    return bias.expand(len(_front(weight)), -1)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size * 2)[:2]


# By operation: its route, and the names of its positional arguments.
_ROUTES: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    F.linear: (_linear, ("input", "weight", "bias")),
    F.conv2d: (_conv2d, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    F.cross_entropy: (_cross_entropy, ("input", "target", "weight", "size_average", "ignore_index")),
}


def _inside(x: Tensor) -> Tensor:
    """The tensor that vmap has stacked."""
    return functorch.get_unwrapped(x) if functorch.is_batchedtensor(x) else x


def _front(x: Tensor) -> Tensor:
    """The same with its samples in front."""
    return _inside(x).movedim(functorch.maybe_get_bdim(x), 0) if functorch.is_batchedtensor(x) else x


def _autocast(x: Tensor) -> torch.dtype | None:
    """What autocast would compute in: it does not look inside an autograd function."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> Any:
    return [each if dtype is None or each is None else each.to(dtype) for each in tensors]


class _Stacked(torch.autograd.Function):
    """A function of whole stacks: it may be called while vmap runs, but not on what vmap has stacked."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError("weights are stacked over samples once, not twice")


class _Layer(_Stacked):
    """A layer ``f(x, weight [K, …], bias [K, O] or None)`` that may compute in another type."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.sink, ctx.dtype, *ctx.sizes = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def into_weight(ctx: Any, weight: Tensor, make: Callable[[slice], Tensor]) -> Tensor | None:
        """The gradient in the weights, by samples, unless a sink has taken it."""
        if not ctx.needs_input_grad[1]:
            return None
        parts = [] if ctx.sink is None else ctx.sink.parts()
        for rows in parts:
            ctx.sink.take(make(rows), rows)
        return None if parts else make(slice(None)).to(weight.dtype)


class _Linear(_Layer):
    """``x [K, B, I]`` or ``[B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sink: Any, dtype: Any) -> Any:
        x, weight, bias = _cast(dtype, x, weight, bias)
        if kernels is not None and kernels.multiplies(weight):
            return kernels.linear(x, weight, bias)
        x = x.expand(len(weight), -1, -1)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        a, w = _cast(ctx.dtype, x, weight)
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.bmm(grad, w)
            back = (back if x.dim() == 3 else back.sum(0)).to(x.dtype)
        a = a.expand(len(grad), -1, -1)
        return (
            back,
            _Layer.into_weight(ctx, weight, lambda rows: torch.bmm(grad[rows].mT, a[rows])),
            grad.sum(1).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class _Conv2d(_Layer):
    """``x [K, B, H, W, C]`` or ``[B, H, W, C]``, ``weight [K, O, C, R, S]`` → ``[K, B, P, Q, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sink: Any, dtype: Any, sizes: Any) -> Any:
        x, weight, bias = _cast(dtype, x, weight, bias)
        taps = weight[0, 0].numel()
        if x.dim() == 5 or taps > _FEW_TAPS:
            return kernels.conv2d(x, kernels.channels_last(weight), bias, *sizes)
        # A picture has few channels: each output's inputs side by side, and it is a linear layer.
        stride, padding, dilation = sizes
        rows = F.unfold(x.movedim(-1, 1), weight.shape[3:], dilation, padding, stride)
        fill = -taps % 16  # loads are wide for multiples of 16
        rows = F.pad(rows, (0, 0, 0, fill)).mT.reshape(-1, taps + fill)
        out = kernels.linear(rows, F.pad(weight.flatten(2), (0, fill)), bias)
        high = (x.shape[1] + 2 * padding[0] - dilation[0] * (weight.shape[3] - 1) - 1) // stride[0] + 1
        return out.view(len(weight), len(x), high, -1, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        a, w = _cast(ctx.dtype, x, weight)
        (sizes,) = ctx.sizes
        back = None
        if ctx.needs_input_grad[0]:
            back = kernels.conv2d_input_grad(grad, kernels.channels_last(w), x.shape[-3:-1], *sizes)
            back = (back if x.dim() == 5 else back.sum(0)).to(x.dtype)

        def into(rows: slice) -> Tensor:
            own = a[rows] if a.dim() == 5 else a
            made = kernels.conv2d_weight_grad(own, grad[rows], weight.shape[3:], *sizes)
            return made.movedim(-1, 2)

        return (
            back,
            _Layer.into_weight(ctx, weight, into),
            grad.sum((1, 2, 3)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


class _CrossEntropy(_Stacked):
    """Mean loss of every sample, ``[K]``, of logits ``[K, B, C]``."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, ignore_index: int) -> Any:
        return kernels.cross_entropy(logits, target, ignore_index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, None, None]).to(slope.dtype), None, None
