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
    return {name: buffer.clone() for name, buffer in writable(module).items()}


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the buffers the given values, in place."""
    for name, buffer in writable(module).items():
        buffer.copy_(values[name])
