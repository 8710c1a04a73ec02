"""Layer operations in a form that is fast when weights are stacked over samples.

``vmap`` turns any operation into one over K weight samples, some of them slowly. :class:`StackedRoutes` sends
those through :mod:`posterity.stacked`, whose functions know what a stack is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # vmap's own: which tensors are stacked, and where
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity.noise import kernels
from posterity.stacked import BatchNorm, Conv2d, CrossEntropy, Linear, MaxPool2d, Sink

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
            out = _ROUTES[func](self._sinks, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _linear(sinks: Mapping[Tensor, Sink], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    level = _level(weight, input, bias)
    if level is None or weight.dim() != 2 or input.shape[-1] != weight.shape[-1]:
        return NotImplemented
    x, w, b, low = _operands(input, weight, bias, _autocast(input))
    # Inputs that all samples share stay one matrix.
    samples = [len(w)] if functorch.is_batchedtensor(input) else []
    x = x.reshape(*samples, -1, x.shape[-1])
    out = Linear.apply(x, w, b, low, sinks.get(_inside(weight)))  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.view(len(w), *input.shape[:-1], w.shape[1]), 0, level)


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
    dtype, level = _autocast(input), _level(weight, input, bias)
    if (
        kernels is None
        or level is None
        or (groups, input.dim()) != (1, 4)
        or isinstance(padding, str)
        or not kernels.multiplies(_inside(weight), dtype)
    ):
        return NotImplemented
    x, w, b, low = _operands(input, weight, bias, dtype)
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    sink = sinks.get(_inside(weight))
    out = Conv2d.apply(x.movedim(-3, -1), w, b, low, sink, sizes)  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.movedim(-1, -3), 0, level)


def _cross_entropy(
    sinks: Mapping[Tensor, Sink],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    level = _level(input, target)
    if (
        kernels is None
        or level is None
        or not input.is_cuda
        or input.dtype not in _FLOATS
        or (input.dim(), target.dim(), target.dtype) != (2, 1, torch.int64)
        or any(each is not None for each in (weight, size_average, reduce))
        or (reduction, label_smoothing) != ("mean", 0.0)
    ):
        return NotImplemented
    loss, _ = CrossEntropy.apply(_front(input), _front(target), ignore_index)  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(loss, 0, level)


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
    level = _level(input, running_mean, running_var, weight, bias)
    x = None if level is None else _channels_last(input)
    rows = input.numel() // input.shape[1] if input.dim() > 1 else 0
    if level is None or x is None or rows < 2:
        return NotImplemented
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(running_var + eps) if weight is None else weight * torch.rsqrt(running_var + eps)
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        return torch.addcmul(shift.view(shape), input, scale.view(shape)).to(input.dtype)
    if any(each is not None and not functorch.is_batchedtensor(each) for each in (running_mean, running_var)):
        return NotImplemented
    affine = [None if each is None else _front(each) for each in (weight, bias)]
    flat = x.reshape(len(x), -1, x.shape[-1])
    out, mean, var, _ = BatchNorm.apply(flat, *affine, eps)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, var * (rows / (rows - 1)))):
            if running is not None:
                _front(running).lerp_(now.to(running.dtype), momentum)
    return functorch._add_batch_dim(out.view(x.shape).movedim(-1, 2), 0, level)


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
    level = _level(input)
    x = None if level is None or input.dim() != 4 else _channels_last(input)
    kernel = _pair(kernel_size)
    sizes = _pair(stride or kernel), _pair(padding), _pair(dilation)
    if level is None or x is None or return_indices or not kernels.pools(kernel, *sizes, ceil_mode):
        return NotImplemented
    out = MaxPool2d.apply(x.flatten(0, 1), kernel)  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.view(*x.shape[:2], *out.shape[1:]).movedim(-1, 2), 0, level)


def _channels_last(input: Tensor) -> Tensor | None:
    """Stacked activations ``[K, B, …, C]`` if kernels can work on them, else None."""
    x = _front(input)
    if kernels is None or not x.is_cuda or x.dim() < 3 or x.dtype not in _FLOATS:
        return None
    if x.is_contiguous() and x.dim() > 3:  # channels first: vmap's own way is fast
        return None
    return x.movedim(2, -1).contiguous()


def _operands(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A layer's input, weight ``[K, …]`` and bias ``[K, O]``, and the weight as it is multiplied.

    Autocast does not look inside an autograd function, so what it would cast is cast here.
    """
    x, w, b = _front(input), _front(weight), None
    if bias is not None:
        b = _front(bias) if functorch.is_batchedtensor(bias) else bias.expand(len(w), -1)
    if dtype is None:
        return x, w, b, w
    return x.to(dtype), w, None if b is None else b.to(dtype), w.detach().to(dtype)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


# By operation: its route, whose arguments after the sinks have the names and the order that torch gives them.
_ROUTES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    F.cross_entropy: _cross_entropy,
}


def _level(first: Tensor, *others: Tensor | None) -> int | None:
    """The level of vmap at which the first tensor is stacked, and those of the others that are; else None.

    A user's own vmap inside the model stacks at another level: what it does is not ours to take apart.
    """
    stacked = [each for each in (first, *others) if each is not None and functorch.is_batchedtensor(each)]
    levels = {functorch.maybe_get_level(each) for each in stacked}
    inner = any(functorch.is_batchedtensor(functorch.get_unwrapped(each)) for each in stacked)
    if not functorch.is_batchedtensor(first) or len(levels) != 1 or inner:
        return None
    return int(levels.pop())


def _inside(x: Tensor) -> Tensor:
    """The tensor that vmap has stacked."""
    return functorch.get_unwrapped(x) if functorch.is_batchedtensor(x) else x


def _front(x: Tensor) -> Tensor:
    """The same with its samples in front."""
    return _inside(x).movedim(functorch.maybe_get_bdim(x), 0) if functorch.is_batchedtensor(x) else x


def _autocast(x: Tensor) -> torch.dtype | None:
    """What autocast would multiply in, if anything."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)
