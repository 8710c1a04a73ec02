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


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is made, so that it need not be kept."""

    def linear(self, x: Tensor, grad: Tensor, bias: Any) -> bool:
        """Take the gradients of a linear layer's weight and bias, given its inputs and outputs' gradient."""


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
    own = [sinks.get(_inside(each)) for each in (weight, bias) if each is not None]
    x, w, b = _front(input), _front(weight), None
    if bias is not None:
        b = _front(bias) if functorch.is_batchedtensor(bias) else bias.expand(len(w), -1)
    # Inputs that all samples share stay one matrix.
    samples = [len(w)] if functorch.is_batchedtensor(input) else []
    x = x.reshape(*samples, -1, x.shape[-1])
    out = _Linear.apply(x, w, b, own, _autocast(x))  # type: ignore[no-untyped-call]
    return functorch._add_batch_dim(out.view(len(w), *input.shape[:-1], -1), 0, level)


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


# By operation: its route, and the names of its positional arguments.
_ROUTES: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    F.linear: (_linear, ("input", "weight", "bias")),
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


class _Linear(_Stacked):
    """``x [K, B, I]`` or ``[B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sinks: Any, dtype: Any) -> Any:
        x, weight, bias = _cast(dtype, x, weight, bias)
        if kernels is not None and kernels.multiplies(weight):
            return kernels.linear(x, weight, bias)
        x = x.expand(len(weight), -1, -1)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.sinks, ctx.dtype = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        a, w = _cast(ctx.dtype, x, weight)
        into_x, into_weight, into_bias, *_ = ctx.needs_input_grad
        back = None
        if into_x:
            if kernels is not None and kernels.multiplies(w):
                back = kernels.linear_input_grad(grad, w)
            else:
                back = torch.bmm(grad, w)
            back = (back if x.dim() == 3 else back.sum(0)).to(x.dtype)
        sink, bias_sink = (*ctx.sinks, None)[:2]
        if into_weight and sink is not None and sink.linear(a, grad, bias_sink):
            into_weight, into_bias = False, into_bias and bias_sink is None
        return (
            back,
            torch.bmm(grad.mT, a.expand(len(grad), -1, -1)).to(weight.dtype) if into_weight else None,
            grad.sum(1).to(ctx.bias_dtype) if into_bias else None,
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
