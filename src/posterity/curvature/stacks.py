"""Tensors as vmap has stacked them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _functorch as functorch  # vmap's own: which tensors are stacked, and where


def rows_of(result: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """Which rows of a tensor another one is, in the same memory; None if it is anything else."""
    axis = samples_axis(whole)
    if (
        samples_axis(result) != axis
        or axis not in (None, 0)
        or result.dim() != whole.dim()
        or not whole.dim()
    ):
        return None
    some, all_ = inside(result), inside(whole)
    at = 0 if axis is None else 1
    same = (
        some.untyped_storage().data_ptr() == all_.untyped_storage().data_ptr()
        and some.stride() == all_.stride()
        and some.dtype == all_.dtype
        and [*some.shape[:at], *some.shape[at + 1 :]] == [*all_.shape[:at], *all_.shape[at + 1 :]]
    )
    start, rest = divmod(some.storage_offset() - all_.storage_offset(), max(all_.stride(at), 1))
    if not same or rest or start < 0 or start + some.shape[at] > all_.shape[at]:
        return None
    return start, start + some.shape[at]


def sample_of(result: Tensor, stack: Tensor) -> int | None:
    """Which sample of a stack, outside vmap, a tensor is, in the same memory; None if it is anything else."""
    if samples_axis(stack) is not None or result.shape != stack.shape[1:] or not stack.dim():
        return None
    rows = rows_of(result[None], stack)
    return None if rows is None else rows[0]


def stacking() -> tuple[Any, int]:
    """The level of vmap that is running and its samples; None and 1 if none is.

    NotImplemented where it is not the only transform.
    """
    stack = functorch.get_interpreter_stack() or []
    if not stack:
        return None, 1
    if len(stack) > 1 or stack[0].key() != functorch.TransformType.Vmap:
        return NotImplemented, 1
    return stack[0].level(), functorch.CVmapInterpreterPtr(stack[0]).batchSize()


def inside(x: Any) -> Any:
    """The tensor that vmap has stacked."""
    return functorch.get_unwrapped(x) if x is not None and functorch.is_batchedtensor(x) else x


def samples_axis(x: Tensor | None) -> int | None:
    """Where it has its samples, if it has any."""
    return functorch.maybe_get_bdim(x) if x is not None and functorch.is_batchedtensor(x) else None


def samples_first(x: Tensor) -> Tensor:
    """``[K, …]``, or ``[1, …]`` if it has no samples."""
    axis = samples_axis(x)
    return x[None] if axis is None else inside(x).movedim(axis, 0)
