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
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not _expanded(buffer):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _expanded(buffer: Tensor) -> bool:
    steps = zip(buffer.stride(), buffer.shape, strict=True)
    return 0 in buffer.stride() and any(stride == 0 and size > 1 for stride, size in steps)


class Keeper:
    """Keeps and puts back a module's buffers again and again, in few launches and in memory of its own.

    Args:
        module: Its parts are looked up once; buffers that they change or exchange later are seen.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> keeper = Keeper(norm)
        >>> keeper.keep("before")
        >>> _ = norm(torch.ones(3, 2))
        >>> keeper.put_back("before")
        >>> int(norm.num_batches_tracked)
        0
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if part._buffers]
        self._kept: dict[str, tuple[list[int], list[tuple[list[Tensor], list[Tensor]]]]] = {}

    @torch.no_grad()
    def keep(self, when: str) -> None:
        """Copy the buffers, under a name."""
        for copies, now in self._pairs(when):
            torch._foreach_copy_(copies, now)

    @torch.no_grad()
    def put_back(self, when: str) -> None:
        """Give the buffers the values of that time."""
        for copies, now in self._pairs(when):
            torch._foreach_copy_(now, copies)

    def _pairs(self, when: str) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Copies and buffers, those of one type together: one launch serves no more."""
        now = [each for part in self._parts for each in part._buffers.values() if each is not None]
        same = [id(each) for each in now]
        if when not in self._kept or self._kept[when][0] != same:
            now = [each for each in now if not _expanded(each)]
            kinds = {(each.dtype, each.device) for each in now}
            groups = [[each for each in now if (each.dtype, each.device) == kind] for kind in kinds]
            self._kept[when] = same, [([torch.empty_like(each) for each in group], group) for group in groups]
        return self._kept[when][1]


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
