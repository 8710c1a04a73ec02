"""Tensors as vmap has stacked them, and parts of tensors that share their memory."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from posterity.torch_private import functorch


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
