"""What autograd functions of whole stacks share: K weight samples at once, forward and backward.

They take stacked tensors as they lie in memory, samples first and channels last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posterity.layers.stacks import autocast_dtype, batched, front
from posterity.noise import kernels

# What kernels compute in.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Stacked(torch.autograd.Function):
    """A function of whole stacks: it may be called while vmap runs, but not on what vmap has stacked."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError("weights are stacked over samples once, not twice")


class StackedLayer(Stacked):
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


def operands(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A layer's input, weight ``[K, …]`` and bias ``[K, O]``, and the weight as it is multiplied.

    Autocast does not look inside an autograd function, so what it would cast is cast here.
    """
    x, w, b, dtype = front(input), front(weight), None, autocast_dtype(input)
    if bias is not None:
        b = front(bias) if batched(bias) else bias.expand(len(w), -1)
    if dtype is None:
        return x, w, b, w
    return x.to(dtype), w, None if b is None else b.to(dtype), w.detach().to(dtype)


def column_sums(grad: Tensor) -> Tensor:
    """Sums over the rows of ``[K, M, C]``."""
    if kernels is None or not grad.is_cuda or grad.dtype == torch.float64:
        return grad.sum(1)
    sums: Tensor = kernels.column_sums(grad.contiguous())
    return sums.to(grad.dtype)


def channels_last(input: Tensor) -> Tensor | None:
    """Stacked activations ``[K, B, …, C]`` if kernels can work on them, else None."""
    x = front(input)
    if kernels is None or not x.is_cuda or x.dim() < 3 or x.dtype not in FLOATS:
        return None
    if x.is_contiguous() and x.dim() > 3:  # channels first: vmap's own way is fast
        return None
    return x.movedim(2, -1).contiguous()


def pair(size: Any) -> tuple[int, int]:
    """A size for both axes of a picture."""
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
