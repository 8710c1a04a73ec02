"""Saving and restoring a module's buffers, such as BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter, is_
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from posterity.flat import Layout
from posterity.noise import addresses, kernels
from posterity.torch_private import foreach_copy_

Key = TypeVar("Key")
_shape = attrgetter("shape")
_changes = count()


def writable(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that can change in place; one made by ``expand`` cannot.

    Example:
        >>> sorted(writable(nn.BatchNorm1d(3)))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    return {name: buffer for name, buffer in module.named_buffers() if is_writable(buffer)}


def is_writable(buffer: Tensor) -> bool:
    """Whether no two of its numbers share memory, as they do in one made by ``expand``."""
    return all(stride for stride, size in zip(buffer.stride(), buffer.shape, strict=True) if size > 1)


def versions(values: Mapping[str, Tensor]) -> list[int]:
    """Numbers that change whenever a tensor does; tensors made in inference mode count as changed."""
    return [next(_changes) if each.is_inference() else each._version for each in values.values()]


@final
class Keeper:
    """Saves a module's buffers repeatedly, in the same memory.

    Finding the buffers costs more than copying them, so it is repeated only if they have changed.

    Args:
        module: The module with the buffers.

    Attributes:
        copies: The saved values, by name.

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
        # What each module has of modules and of buffers; many have none of either.
        self._parts: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._found: list[object] = []
        self._buffers: list[Tensor] = []
        self._places: list[object] = []
        self.copies: dict[str, Tensor] = {}
        self._kept: list[_Words | _Alike] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Save the current values."""
        if not self._same():
            own = writable(self._module)
            with torch.inference_mode(False):
                self._kept = list(_memory(own))
            self.copies = {name: copy for each in self._kept for name, copy in each.copies.items()}
            parts = [part for each in self._module.modules() for part in (each._modules, each._buffers)]
            self._parts = [part for part in parts if part]
            self._empty = [part for part in parts if not part]
            self._found, self._buffers = _values(self._parts), list(self._module.buffers())
            self._places = _places(self._buffers)
        for each in self._kept:
            each.keep()

    def restore(self) -> None:
        """Restore the saved values, also into buffers that have replaced the originals."""
        self.restore_unless(None)

    @torch.no_grad()
    def restore_unless(self, ok: Tensor | None) -> None:
        """Restore, if a flag on the device is not set or there is no flag."""
        if self._same():
            for each in self._kept:
                each.restore(ok)
            return
        for name, buffer in writable(self._module).items():
            if name in self.copies and buffer.shape == self.copies[name].shape:
                then = self.copies[name]
                buffer.copy_(then if ok is None else torch.where(ok.to(buffer.device), buffer, then))

    def _same(self) -> bool:
        """Whether modules and buffers are the same as when last found."""
        now = _values(self._parts)
        return (
            bool(self._parts or self._empty)
            and not any(self._empty)
            and len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and _places(self._buffers) == self._places
        )


@final
class StepBuffers:
    """A module's buffers over the samples of a training step: each sample starts from the values before the
    step.

    The values after the first sample are kept.

    Args:
        module: The model, if its buffers are to be managed.
    """

    def __init__(self, module: nn.Module | None) -> None:
        model = nn.Module() if module is None else module
        self._first, self._later = Keeper(model), Keeper(model)
        self._under_way = False

    def enter(self, number: int) -> None:
        """Prepare for a sample."""
        if number == 0:
            self._first.keep()
            self._under_way = True
        else:
            self._later.keep()
            self.undo()

    def leave(self, number: int, used: bool) -> None:
        """Finish a sample."""
        if number:
            self._later.restore()
        elif not used:
            self._first.restore()

    def undo(self) -> None:
        """Restore the buffers from before the step, if one has begun."""
        if self._under_way:
            self._first.restore()

    def undo_unless(self, ok: Tensor | None) -> None:
        """The same, if there is a flag on the device and it is not set."""
        if self._under_way and ok is not None:
            self._first.restore_unless(ok)

    def finish(self) -> None:
        """End the step: the next sample is the first of another."""
        self._under_way = False


class _Words:
    """Buffers on one GPU, as words of four bytes: one kernel copies all of them, whatever their dtypes."""

    def __init__(self, own: Mapping[str, Tensor], device: torch.device) -> None:
        self._own = list(own.values())
        self._layout = Layout(list(own), [(b.numel() * b.itemsize // 4,) for b in self._own])
        self._flat = torch.empty(self._layout.size, dtype=torch.int32, device=device)
        self._at = addresses(tuple(b.data_ptr() for b in self._own), device)
        views = self._layout.views(self._flat)
        self.copies = {
            name: view.view(b.dtype).view(b.shape) for (name, b), view in zip(own.items(), views, strict=True)
        }

    @staticmethod
    def fit(own: Mapping[str, Tensor]) -> bool:
        """Whether these buffers can be copied this way."""
        return (
            kernels is not None
            and len({b.device for b in own.values()}) == 1
            and all(
                b.is_cuda and b.is_contiguous() and b.numel() * b.itemsize % 4 == b.data_ptr() % 4 == 0
                for b in own.values()
            )
        )

    def keep(self) -> None:
        kernels.transfer(self._layout, self._at, self._flat, read=True)

    def restore(self, ok: Tensor | None) -> None:
        kernels.transfer(self._layout, self._at, self._flat, read=False, unless=ok)
        torch.autograd.graph.increment_version(self._own)


class _Alike:
    """Buffers of one dtype on one device, with memory for their old and new values."""

    def __init__(self, own: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._own, self._device = list(own.values()), device
        sizes = [buffer.numel() for buffer in self._own]
        self._flats = torch.empty(2, sum(sizes), dtype=dtype, device=device)
        self._then, self._now = (
            [part.view(b.shape) for part, b in zip(flat.split(sizes), self._own, strict=True)]
            for flat in self._flats
        )
        self.copies = dict(zip(own, self._then, strict=True))

    def keep(self) -> None:
        foreach_copy_(self._then, self._own)

    def restore(self, ok: Tensor | None) -> None:
        if ok is None:
            foreach_copy_(self._own, self._then)
            return
        foreach_copy_(self._now, self._own)
        then, now = self._flats
        torch.where(ok.to(self._device), now, then, out=now)
        foreach_copy_(self._own, self._now)


def _memory(own: Mapping[str, Tensor]) -> Iterator[_Words | _Alike]:
    """Memory for the saved values."""
    if _Words.fit(own):
        yield _Words(own, next(iter(own.values())).device)
        return
    for dtype, device in {(buffer.dtype, buffer.device) for buffer in own.values()}:
        some = {name: b for name, b in own.items() if (b.dtype, b.device) == (dtype, device)}
        yield _Alike(some, dtype, device)


def _places(buffers: Sequence[Tensor]) -> list[object]:
    return [*map(Tensor.data_ptr, buffers), *map(_shape, buffers)]


def _values(parts: Iterable[dict[str, Any]]) -> list[object]:
    return list(chain.from_iterable([part.values() for part in parts]))  # of a script's, no dicts


@torch.no_grad()
def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers, by name."""
    return copied(writable(module))


@torch.no_grad()
def copied(values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies of some tensors, made in few launches."""
    copies = {key: torch.empty_like(value) for key, value in values.items()}
    _copy(copies, values)
    return copies


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the buffers to the given values, in place."""
    _copy(writable(module), values)


def _copy(into: Mapping[Key, Tensor], values: Mapping[Key, Tensor]) -> None:
    for dtype in {each.dtype for each in into.values()}:  # one launch serves all of a type
        keys = [key for key, each in into.items() if each.dtype == dtype]
        foreach_copy_([into[key] for key in keys], [values[key] for key in keys])
