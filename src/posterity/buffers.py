"""A module's buffers, kept and put back: BatchNorm's statistics and their like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import final

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


@final
class Keeper:
    """Keeps a module's buffers, time and again, in the same memory.

    Looking for buffers costs more than copying them, so it is done anew only where they are others.

    Args:
        module: Whose buffers.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> keeper = Keeper(norm)
        >>> keeper.keep()
        >>> _ = norm(torch.randn(5, 3))
        >>> keeper.restore()
        >>> norm.running_mean
        tensor([0., 0., 0.])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: list[Tensor | None] = []
        self._shapes: list[torch.Size] = []
        self._copies: dict[str, Tensor] = {}
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers as they are."""
        found = _all_buffers(self._module)
        if not self._same(found):
            own = writable(self._module)
            with torch.inference_mode(False):
                self._copies = {name: torch.empty_like(buffer) for name, buffer in own.items()}
            self._pairs = list(_alike(own, self._copies))
            self._found, self._shapes = found, _shapes(found)
        for own_alike, copies in self._pairs:
            torch._foreach_copy_(copies, own_alike)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers, or those that have taken their names, the values that were kept."""
        if self._same(_all_buffers(self._module)):
            for own_alike, copies in self._pairs:
                torch._foreach_copy_(own_alike, copies)
        else:
            restore(self._module, self._copies)

    def _same(self, found: list[Tensor | None]) -> bool:
        return all(map(is_, found, self._found)) and _shapes(found) == self._shapes


def _all_buffers(module: nn.Module) -> list[Tensor | None]:
    """What ``module.named_buffers()`` gives, in a tenth of its time; without names, and some come twice."""
    parts = [module]
    for part in parts:  # grows on the way
        if part._modules:
            parts += [child for child in part._modules.values() if child is not None]
    return [buffer for part in parts for buffer in part._buffers.values()]


def _shapes(found: list[Tensor | None]) -> list[torch.Size]:
    return [buffer.shape for buffer in found if buffer is not None]


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
    for some, theirs in _alike(into, values):
        torch._foreach_copy_(some, theirs)


def _alike(
    into: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Tensors of one type, which one launch serves, with their values."""
    for dtype in {each.dtype for each in into.values()}:
        names = [name for name, each in into.items() if each.dtype == dtype]
        yield [into[name] for name in names], [values[name] for name in names]


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
