"""Tensors that vmap has stacked, and the base and weightless cases of autograd functions of whole stacks.

The functions handle K weight samples at once, forward and backward. They take stacked tensors in memory
order, samples first and channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posterity.layers.calls import Call, Sink
from posterity.noise import kernels
from posterity.torch_private import functorch

# The types that kernels compute in.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def batched(x: Tensor | None) -> TypeGuard[Tensor]:
    """Whether vmap has stacked it."""
    return x is not None and functorch.is_batchedtensor(x)


def inside(x: Any) -> Any:
    """The tensor that vmap has stacked."""
    return functorch.get_unwrapped(x) if batched(x) else x


def innermost(x: Tensor) -> Tensor:
    """The tensor below all torch.func transforms, including those inside a user's model."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def samples_axis(x: Tensor | None) -> int | None:
    """The axis of its samples, if it has any."""
    return functorch.maybe_get_bdim(x) if batched(x) else None


def front(x: Tensor) -> Tensor:
    """The tensor with its samples in front, if it has any."""
    axis = samples_axis(x)
    moved: Tensor = x if axis is None else inside(x).movedim(axis, 0)
    return moved


def stack(x: Tensor, level: int, axis: int | None = 0) -> Tensor:
    """A tensor stacked for vmap at a level, with its samples on an axis; unchanged if it has none."""
    return x if axis is None else functorch._add_batch_dim(x, axis, level)


def level_of(*tensors: Tensor | None) -> int | None:
    """The level of vmap of the stacked tensors; None unless there is exactly one level.

    A user's own vmap inside the model stacks at another level, which is left to vmap.
    """
    found: list[Tensor] = [each for each in tensors if batched(each)]
    levels = {functorch.maybe_get_level(each) for each in found}
    if len(levels) != 1 or any(batched(inside(each)) for each in found):
        return None
    return int(levels.pop())


def stacking() -> tuple[int | None, int]:
    """The running level of vmap and its number of samples; None if it is not the only transform."""
    running = functorch.get_interpreter_stack() or []
    if len(running) != 1 or running[0].key() != functorch.TransformType.Vmap:
        return None, 1
    return running[0].level(), functorch.CVmapInterpreterPtr(running[0]).batchSize()


def rows_of(some: Tensor, whole: Tensor, at: int = 0) -> tuple[int, int] | None:
    """The rows, along an axis, that a view takes of a tensor; None if it is not such a view."""
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
    """The dtype in which autocast would multiply, if any."""
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
        """The gradient of the weights, by samples, unless a sink has taken it."""
        if not ctx.needs_input_grad[1]:
            return None
        parts = [] if ctx.sink is None else ctx.sink.parts()
        for rows in parts:
            ctx.sink.take(make(rows), rows)
        return None if parts else make(slice(None)).to(ctx.dtype)


def operands(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A layer's input, weight ``[K, …]`` and bias ``[K, O]``, and the weight as cast for the product.

    Autocast does not work inside an autograd function, so this does its casts.
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
    """Stacked activations ``[K, B, …, C]`` if kernels support them, else None."""
    x = front(input)
    if kernels is None or not x.is_cuda or x.dim() < 3 or x.dtype not in FLOATS:
        return None
    if x.is_contiguous() and x.dim() > 3:  # channels first: vmap's own way is fast
        return None
    return x.movedim(2, -1).contiguous()


def pair(size: Any) -> tuple[int, int]:
    """A size for both axes of an image."""
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


@final
@dataclass(eq=False)
class MaxPool2d(Call):
    """``x [B, C, H, W]``."""

    input: Tensor
    kernel_size: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    return_indices: bool = False

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By kernels."""
        level, kernel = level_of(self.input), pair(self.kernel_size)
        x = channels_last(self.input) if level is not None and self.input.dim() == 4 else None
        sizes = pair(self.stride or kernel), pair(self.padding), pair(self.dilation), self.ceil_mode
        if level is None or x is None or self.return_indices or not kernels.pools(kernel, *sizes):
            return NotImplemented
        out = StackedMaxPool2d.apply(x.flatten(0, 1), kernel)  # type: ignore[no-untyped-call]
        return stack(out.view(*x.shape[:2], *out.shape[1:]).movedim(-1, 2), level)


@final
class StackedMaxPool2d(Stacked):
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


@final
@dataclass(eq=False)
class CrossEntropy(Call):
    """The mean loss of logits ``[B, C]`` and labels ``[B]``, with all other options at their defaults."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By a kernel."""
        input, target = self.input, self.target
        level, asked = level_of(input, target), (self.weight, self.size_average, self.reduce)
        if (
            kernels is None
            or level is None
            or any(each is not None for each in asked)
            or (self.reduction, self.label_smoothing) != ("mean", 0.0)
            or not batched(input)
            or not input.is_cuda
            or input.dtype not in FLOATS
            or (input.dim(), target.dim(), target.dtype) != (2, 1, torch.int64)
        ):
            return NotImplemented
        loss, _ = StackedCrossEntropy.apply(front(input), front(target), self.ignore_index)  # type: ignore[no-untyped-call]
        return stack(loss, level)


@final
class StackedCrossEntropy(Stacked):
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
