"""Parameters that move together, their state end to end in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor

from posterity.flat import Layout
from posterity.noise import Room, addresses, alike, kernels
from posterity.optim.groups import Group, members
from posterity.optim.statistics import state_dtype

State: TypeAlias = dict[str, Tensor]

# Numbers of each buffer that a rule works on at once on a CPU.
_IN_CACHE = 1 << 16


@final
class Slab:
    """Parameters of one group, device and dtype: what a rule does, it does to all of them at once.

    The optimiser's ``state[p]`` holds views of the flat buffers, under the same keys.

    Args:
        number: Of the group.
        names: Of the parameters.
        params: The parameters.
        states: The optimiser's state, whose tensors are replaced by views.
        apart: Keys of tensors that are not values of single weights, and stay as they are.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        params: Sequence[Tensor],
        states: Mapping[Tensor, State],
        apart: Collection[str] = (),
    ) -> None:
        self.number, self.params = number, list(params)
        self.layout = Layout(names, [p.shape for p in params])
        self.device, self.dtype = params[0].device, params[0].dtype
        # The parameters' values, while samples take their place in the model.
        self.weights = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        self._weights = self.layout.views(self.weights)
        self.room = Room()
        self._fused = kernels is not None and self.device.type == "cuda"
        # Where the parameters lie; captured graphs read all places that ever were.
        self._at: tuple[int, ...] = ()
        self._fits, self._plain = True, False
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._pointers: Tensor | None = None  # the places of now
        # How often each was updated.
        self.steps = torch.stack([states[p]["step"] for p in params])
        self.state: State = {}
        self._views: dict[str, list[Tensor]] = {"step": list(self.steps)}
        for key in states[params[0]]:
            if key != "step" and key not in apart:
                values = [states[p][key] for p in params]
                flat = torch.zeros(self.layout.size, dtype=values[0].dtype, device=self.device)
                self.state[key], self._views[key] = flat, self.layout.views(flat)
                torch._foreach_copy_(self._views[key], values)
        for i, p in enumerate(params):
            states[p].update({key: views[i] for key, views in self._views.items()})
        self.locate()

    def locate(self) -> bool:
        """Look where the parameters lie, which users may change; whether they still belong to the slab."""
        at = tuple(map(Tensor.data_ptr, self.params))
        if at != self._at:
            self._at, self._pointers = at, self._places.get(at)
            self._fits = all(p.device == self.device and p.dtype == self.dtype for p in self.params)
        self._plain = self._fused and self._fits and all(map(Tensor.is_contiguous, self.params))
        return self._fits

    def count(self, moved: Sequence[int], by: int = 1) -> None:
        """Count an update of some parameters, or uncount one."""
        if len(moved) == len(self.params):
            self.steps += by
        else:
            self.steps[moved] += by

    @property
    def mean(self) -> Tensor:
        """The means: the weights as they were last read, or what is kept of half-precision ones."""
        return self.state.get("mean", self.weights)

    # These three want the parameters to be where they were last located.

    def read(self) -> None:
        """Take the parameters' values."""
        if not self._transferred(self.weights, read=True):
            torch._foreach_copy_(self._weights, self.params)

    def put(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat buffer; ``weights`` gives them those that were read."""
        if not self._transferred(flat, read=False):
            views = self._weights if flat is self.weights else self.layout.views(flat)
            torch._foreach_copy_(self.params, views)

    def write(self, moved: Sequence[int]) -> None:
        """Give some parameters their means."""
        if len(moved) == len(self.params) and "mean" not in self.state:
            self.put(self.weights)
            return
        means = self._views.get("mean", self._weights)
        torch._foreach_copy_([self.params[i] for i in moved], [means[i] for i in moved])

    def gather(self, number: Tensor | None = None) -> Tensor:
        """The parameters' gradients, flat, in the precision of the state; overwritten by the next call.

        Args:
            number: A zero, which becomes a number that is not finite if a gradient is not.
        """
        flat, views = self._gathered
        grads = [p.grad for p in self.params]
        found = [grad for grad in grads if grad is not None]
        if len(found) < len(views):
            flat.zero_()  # else it would have gradients of earlier steps
        elif self._fused and alike(found, flat.dtype):
            places = addresses(tuple(map(Tensor.data_ptr, found)), self.device)
            kernels.transfer(self.layout, places, flat, read=True, poison=number)
            return flat
        there = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        torch._foreach_copy_(there, found)
        if number is not None:
            torch.linalg.vector_norm(flat, math.inf, out=number)
        return flat

    def add(self, values: Mapping[int, Tensor], flat: Tensor, weight: float, poison: Tensor) -> None:
        """Add weighted tensors, by block, to a flat buffer in the precision of the state.

        Args:
            values: By block.
            flat: The buffer.
            weight: Of what is added.
            poison: A number, which is not finite any more if a sum is not.
        """
        # A graph would read the addresses from a place that may be another's by then; kernels have weights in
        # single precision.
        by_address = (
            self._fused and flat.dtype == torch.float32 and not torch.cuda.is_current_stream_capturing()
        )
        if by_address and alike(values.values(), flat.dtype):
            places = addresses(tuple(map(Tensor.data_ptr, values.values())), self.device)
            kernels.add(self.layout, tuple(values), places, flat, weight, poison)
            return
        views = self.layout.views(flat)
        own = [value.to(flat.dtype) for value in values.values()]
        torch._foreach_add_([views[i] for i in values], own, alpha=weight)
        poison += torch.linalg.vector_norm(flat, math.inf) * 0.0

    @cached_property
    def _gathered(self) -> tuple[Tensor, list[Tensor]]:
        with torch.inference_mode(False):
            flat = torch.zeros(self.layout.size, dtype=state_dtype(self.weights), device=self.device)
            return flat, self.layout.views(flat)

    def spans(self, moved: Sequence[int] | None) -> Iterator[tuple[int, slice | None]]:
        """Where some parameters lie, or, in parts that a CPU's cache holds, all; each with one of them.

        None is everywhere: a view for each buffer would take longer than many an operation.
        """
        if moved is not None:
            yield from ((i, self.layout.span(i)) for i in moved)
        elif self.layout.size and (self.device.type != "cpu" or self.layout.size <= _IN_CACHE):
            yield 0, None
        else:
            starts = range(0, self.layout.size, _IN_CACHE)
            yield from ((0, slice(start, start + _IN_CACHE)) for start in starts)

    def _transferred(self, flat: Tensor, *, read: bool) -> bool:
        """Whether one kernel could copy all parameters: torch's own takes a program for 65,536 numbers."""
        if not self._plain:
            return False
        if self._pointers is None:
            self._pointers = self._places[self._at] = addresses(self._at, self.device)
        kernels.transfer(self.layout, self._pointers, flat, read=read)
        if not read:
            torch.autograd.graph.increment_version(self.params)
        return True


def slabs(groups: list[Group], states: Mapping[Tensor, State], apart: Collection[str] = ()) -> Iterator[Slab]:
    """The slabs of an optimiser whose parameters all have their state; see :class:`Slab`."""
    for number, group in enumerate(groups):
        alike: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
        for name, p in members(group):
            keys = sorted(states[p].keys() - set(apart))
            alike.setdefault((p.device, p.dtype, *keys), []).append((name, p))
        for pairs in alike.values():
            yield Slab(number, [name for name, _ in pairs], [p for _, p in pairs], states, apart)


def needs_mean(p: Tensor, state: State) -> bool:
    """Whether a parameter in half precision still lacks its full-precision mean."""
    return state_dtype(p) != p.dtype and "mean" not in state
