"""Tensors as vmap has stacked them, and what autograd functions of whole stacks share.

These see K weight samples at once, forward and backward. They take stacked tensors as they lie in memory,
samples first and channels last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from posterity.noise import kernels
from posterity.torch_private import functorch

# What kernels compute in.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def batched(x: Tensor | None) -> TypeGuard[Tensor]:
    """Whether vmap has stacked it."""
    return x is not None and functorch.is_batchedtensor(x)


def inside(x: Any) -> Any:
    """The tensor that vmap has stacked."""
    return functorch.get_unwrapped(x) if batched(x) else x


def samples_axis(x: Tensor | None) -> int | None:
    """Where it has its samples, if it has any."""
    return functorch.maybe_get_bdim(x) if batched(x) else None


def front(x: Tensor) -> Tensor:
    """The tensor with its samples in front, if it has any."""
    axis = samples_axis(x)
    moved: Tensor = x if axis is None else inside(x).movedim(axis, 0)
    return moved


def stack(x: Tensor, level: int, axis: int | None = 0) -> Tensor:
    """A tensor as vmap has it at a level, with its samples on an axis; as it is if it has none."""
    return x if axis is None else functorch._add_batch_dim(x, axis, level)


def level_of(*tensors: Tensor | None) -> int | None:
    """The level of vmap at which those of the tensors are stacked that are; None if there is not one.

    A user's own vmap inside the model stacks at another level: what it does is not ours to take apart.
    """
    found: list[Tensor] = [each for each in tensors if batched(each)]
    levels = {functorch.maybe_get_level(each) for each in found}
    if len(levels) != 1 or any(batched(inside(each)) for each in found):
        return None
    return int(levels.pop())


def stacking() -> tuple[int | None, int]:
    """The level of vmap that is running and its samples; None if it is not the only transform."""
    running = functorch.get_interpreter_stack() or []
    if len(running) != 1 or running[0].key() != functorch.TransformType.Vmap:
        return None, 1
    return running[0].level(), functorch.CVmapInterpreterPtr(running[0]).batchSize()


def rows_of(some: Tensor, whole: Tensor, at: int = 0) -> tuple[int, int] | None:
    """Which rows of a tensor, along an axis, another one is in the same memory; None if it is none."""
    if some.dim() != whole.dim() or whole.dim() <= at:
        return None
    same = (
        some.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        and some.stride() == whole.stride()
        and some.dtype == whole.dtype
        and [*some.shape[:at], *some.shape[at + 1 :]] == [*whole.shape[:at], *whole.shape[at + 1 :]]
    )
    start, rest = divmod(int(some.storage_offset() - whole.storage_offset()), max(whole.stride(at), 1))
    if not same or rest or start < 0 or start + some.shape[at] > whole.shape[at]:
        return None
    return start, start + some.shape[at]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would multiply in, if anything."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


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
