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


def _batch_norm(
    sinks: Mapping[Tensor, Sink],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x = _channels_last(input)
    rows = input.numel() // input.shape[1] if input.dim() > 1 else 0
    if x is None or rows < 2:
        return NotImplemented
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(running_var + eps) if weight is None else weight * torch.rsqrt(running_var + eps)
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)
    if any(each is not None and not functorch.is_batchedtensor(each) for each in (running_mean, running_var)):
        return NotImplemented
    affine = [None if each is None else _front(each) for each in (weight, bias)]
    flat = x.reshape(len(x), -1, x.shape[-1])
    out, mean, var, _ = _BatchNorm.apply(flat, *affine, eps)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, var * (rows / (rows - 1)))):
            if running is not None:
                _front(running).lerp_(now.to(running.dtype), momentum)
    out = out.view(x.shape).movedim(-1, 2)
    return functorch._add_batch_dim(out, 0, functorch.maybe_get_level(input))


def _max_pool2d(
    sinks: Mapping[Tensor, Sink],
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    x = _channels_last(input)
    kernel = _pair(kernel_size)
    sizes = _pair(stride or kernel), _pair(padding), _pair(dilation)
    if x is None or x.dim() != 5 or return_indices or not kernels.pools(kernel, *sizes, ceil_mode):
        return NotImplemented
    out = _MaxPool2d.apply(x.flatten(0, 1), kernel)  # type: ignore[no-untyped-call]
    out = out.view(*x.shape[:2], *out.shape[1:]).movedim(-1, 2)
    return functorch._add_batch_dim(out, 0, functorch.maybe_get_level(input))


def _channels_last(input: Tensor) -> Tensor | None:
    """Stacked activations ``[K, B, …, C]`` if kernels can work on them where they lie, else None."""
    if kernels is None or not input.is_cuda or not functorch.is_batchedtensor(input):
        return None
    x = _front(input)
    if x.dim() < 3 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if x.is_contiguous() and x.dim() > 3:  # channels first: vmap's own way is fast
        return None
    return x.movedim(2, -1).contiguous()


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
    F.batch_norm: (
        _batch_norm,
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    ),
    F.max_pool2d: (
        _max_pool2d,
        ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    ),
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
            _column_sums(grad).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
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
            return kernels.conv2d(x, weight, bias, *sizes)
        # A picture has few channels: each output's inputs side by side, and it is a linear layer.
        rows = _windows(x, weight.shape[3:], *sizes)
        out = kernels.linear(rows.flatten(0, 2), F.pad(weight.flatten(2), (0, rows.shape[-1] - taps)), bias)
        return out.view(len(weight), *rows.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        a, w = _cast(ctx.dtype, x, weight)
        (sizes,) = ctx.sizes
        back = None
        if ctx.needs_input_grad[0]:
            back = kernels.conv2d_input_grad(grad, w, x.shape[-3:-1], *sizes)
            back = (back if x.dim() == 5 else back.sum(0)).to(x.dtype)

        def into(rows: slice) -> Any:
            own = a[rows] if a.dim() == 5 else a
            return kernels.conv2d_weight_grad(own, grad[rows], weight.shape[3:], *sizes)

        return (
            back,
            _Layer.into_weight(ctx, weight, into),
            _column_sums(grad.flatten(1, 3)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


class _BatchNorm(_Stacked):
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

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        back, *into = kernels.batch_norm_grad(x, grad.contiguous(), weight, mean, rstd)
        shared = (weight is None or weight.dim() == 1, ctx.bias_dim == 1)
        wanted = ctx.needs_input_grad[1:3]
        sums = [(each.sum(0) if one else each) for each, one in zip(into, shared, strict=True)]
        return back, *(each if want else None for each, want in zip(sums, wanted, strict=True)), None


class _MaxPool2d(_Stacked):
    """``x [N, H, W, C]`` → ``[N, P, Q, C]``, by windows that do not overlap."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Any:
        return kernels.max_pool2d(x, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return kernels.max_pool2d_grad(x, grad.contiguous(), ctx.kernel), None


def _column_sums(grad: Tensor) -> Tensor:
    """Sums over the rows of ``[K, M, C]``."""
    return grad.sum(1) if kernels is None or not grad.is_cuda else kernels.column_sums(grad.contiguous())


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
