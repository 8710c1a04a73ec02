"""Layer operations in a form that is fast when weights are stacked over samples.

``vmap`` turns any operation into one over K weight samples, some of them slowly. :class:`StackedRoutes` sends
those through functions that know what a stack is. Each is the same mathematics, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is made, so that it need not be kept."""

    def linear(self, x: Tensor, grad: Tensor, bias: Any) -> bool:
        """Take the gradients of a linear layer's weight and bias, given its inputs and outputs' gradient."""


@final
class StackedRoutes(TorchFunctionMode):
    """Inside, ``F.linear`` is one batched matrix product over all samples, in both directions.

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
        if func is F.linear:
            return _linear(self._sinks, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(sinks: Mapping[Tensor, Sink], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _Linear.apply(input, weight, bias, sinks, _autocast(input))  # type: ignore[no-untyped-call]


def _autocast(x: Tensor) -> torch.dtype | None:
    """What autocast would compute in: it does not look inside an autograd function."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


class _Linear(torch.autograd.Function):
    """``x Wᵀ + b`` of one sample; under vmap, of all."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, sinks: Any, dtype: torch.dtype | None
    ) -> Tensor:
        x, weight, bias = _cast(dtype, x, weight, bias)
        return torch._C._nn.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.bias, _, ctx.dtype = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias = None if ctx.bias is None else ctx.bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        a, w, _ = _cast(ctx.dtype, x, weight, None)
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            (grad @ w).to(x.dtype) if ctx.needs_input_grad[0] else None,
            (flat.mT @ a.reshape(-1, a.shape[-1])).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            flat.sum(0).to(ctx.bias) if ctx.bias is not None and ctx.needs_input_grad[2] else None,
            None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: Mapping[Tensor, Sink],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None:  # the weights are not stacked: samples are just more rows
            x, weight, bias = _cast(dtype, x, weight, bias)
            out = F.linear(x[None] if in_dims[0] is None else x.movedim(in_dims[0], 0), weight)
            if bias is not None and in_dims[2] is not None:
                bias = bias.movedim(in_dims[2], 0).view(info.batch_size, *[1] * (out.dim() - 2), -1)
            return out if bias is None else out + bias, 0
        sink, bias_sink = sinks.get(weight), None if bias is None else sinks.get(bias)
        weight = weight.movedim(in_dims[1], 0)
        rows = x.shape[:-1] if in_dims[0] is None else x.movedim(in_dims[0], 0).shape[1:-1]
        # Inputs that all samples share stay one matrix.
        stacked = [] if in_dims[0] is None else [info.batch_size]
        x = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        x = x.reshape(*stacked, -1, x.shape[-1])
        if bias is not None:
            bias = bias.movedim(in_dims[2], 0) if in_dims[2] is not None else bias.expand(info.batch_size, -1)
        out = _StackedLinear.apply(x, weight, bias, (sink, bias_sink), dtype)  # type: ignore[no-untyped-call]
        return out.view(info.batch_size, *rows, -1), 0


class _StackedLinear(torch.autograd.Function):
    """``x [K, B, I]`` or ``[B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sinks: Any, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight, bias = _cast(dtype, x, weight, bias)
        ctx.save_for_backward(x, weight)
        ctx.sinks = sinks
        x = x.expand(len(weight), -1, -1)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sink, bias_sink = ctx.sinks
        into_x, into_weight, into_bias, *_ = ctx.needs_input_grad
        back = None
        if into_x:
            back = torch.bmm(grad, weight)
            back = (back if x.dim() == 3 else back.sum(0)).to(ctx.dtypes[0])
        if into_weight and sink is not None and sink.linear(x, grad, bias_sink):
            into_weight, into_bias = False, into_bias and bias_sink is None
        return (
            back,
            torch.bmm(grad.mT, x.expand(len(grad), -1, -1)).to(ctx.dtypes[1]) if into_weight else None,
            grad.sum(1).to(ctx.dtypes[2]) if into_bias else None,
            None,
            None,
        )


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> Any:
    return [each if dtype is None or each is None else each.to(dtype) for each in tensors]
