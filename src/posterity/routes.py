"""Layer operations in a form that is fast when weights are stacked over samples.

``vmap`` turns any operation into one over K weight samples, some of them slowly. :class:`StackedRoutes` sends
those through functions that know what a stack is. Each is the same mathematics, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@final
class StackedRoutes(TorchFunctionMode):
    """Inside, ``F.linear`` is one batched matrix product over all samples, in both directions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _Linear.apply(*_linear_arguments(*args, **kwargs))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Positional arguments, cast as autocast would: it does not look inside an autograd function."""
    device = input.device.type
    if not torch.is_autocast_enabled(device) or input.dtype == torch.float64:
        return input, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _Linear(torch.autograd.Function):
    """``x Wᵀ + b`` of one sample; under vmap, of all."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch._C._nn.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            flat.mT @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None:  # the weights are not stacked: samples are just more rows
            out = F.linear(x[None] if in_dims[0] is None else x.movedim(in_dims[0], 0), weight)
            if bias is not None and in_dims[2] is not None:
                bias = bias.movedim(in_dims[2], 0).view(info.batch_size, *[1] * (out.dim() - 2), -1)
            return out if bias is None else out + bias, 0
        weight = weight.movedim(in_dims[1], 0)
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
        if bias is not None:
            bias = bias.movedim(in_dims[2], 0) if in_dims[2] is not None else bias.expand(info.batch_size, -1)
        rows = x.shape[1:-1]
        out = _StackedLinear.apply(x.reshape(len(x), -1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return out.view(len(x), *rows, -1), 0


class _StackedLinear(torch.autograd.Function):
    """``x [K, B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None,
            torch.bmm(grad.mT, x) if ctx.needs_input_grad[1] else None,
            grad.sum(1) if ctx.has_bias and ctx.needs_input_grad[2] else None,
        )
