"""A module's buffers, kept and put back: BatchNorm's statistics and their like."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def writable(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that can change in place; one made by ``expand`` cannot.

    Example:
        >>> sorted(writable(nn.BatchNorm1d(3)))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if all(stride for stride, size in zip(buffer.stride(), buffer.shape, strict=True) if size > 1)
    }


@torch.no_grad()
def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers, by name."""
    return copied(writable(module))


@torch.no_grad()
def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of some tensors, made in few launches."""
    copies = {name: torch.empty_like(value) for name, value in values.items()}
    _copy(copies, values)
    return copies


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the buffers the given values, in place."""
    _copy(writable(module), values)


def _copy(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    # One launch serves tensors of one type only.
    for dtype in {each.dtype for each in into.values()}:
        names = [name for name, each in into.items() if each.dtype == dtype]
        torch._foreach_copy_([into[name] for name in names], [values[name] for name in names])


@torch.no_grad()
def restore_unless(ok: Tensor, module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the buffers the given values, in place, if a flag on the device is not set."""
    own = writable(module)
    for dtype in {buffer.dtype for buffer in own.values()}:
        names = [name for name, buffer in own.items() if buffer.dtype == dtype]
        now = torch.cat([own[name].reshape(-1) for name in names])
        then = torch.cat([values[name].reshape(-1) for name in names])
        chosen = torch.split(torch.where(ok, now, then), [own[name].numel() for name in names])
        shaped = [part.view(own[name].shape) for name, part in zip(names, chosen, strict=True)]
        torch._foreach_copy_([own[name] for name in names], shaped)
