"""Parameters that move together, their state end to end in flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

from posterity.layout import Layout
from posterity.noise import Room, kernels
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
    """

    def __init__(
        self, number: int, names: Sequence[str], params: Sequence[Tensor], states: Mapping[Tensor, State]
    ) -> None:
        self.number, self.params = number, list(params)
        self.layout = Layout(names, [p.shape for p in params])
        self.device, self.dtype = params[0].device, params[0].dtype
        # The parameters' values, while samples take their place in the model.
        self.weights = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        self._weights = self.layout.views(self.weights)
        self.room = Room()
        # Where the parameters lie; captured graphs read all that ever were.
        self._places: dict[tuple[int, ...], Tensor] = {}
        # How often each was updated.
        self.steps = torch.stack([states[p]["step"] for p in params])
        self.state: State = {}
        self._views: dict[str, list[Tensor]] = {"step": list(self.steps)}
        for key in states[params[0]]:
            if key != "step":
                values = [states[p][key] for p in params]
                flat = torch.zeros(self.layout.size, dtype=values[0].dtype, device=self.device)
                self.state[key], self._views[key] = flat, self.layout.views(flat)
                torch._foreach_copy_(self._views[key], values)
        for i, p in enumerate(params):
            states[p].update({key: views[i] for key, views in self._views.items()})
        self._held = [(p, states[p], p.data_ptr()) for p in params]

    def holds(self, states: Mapping[Tensor, State]) -> bool:
        """Whether the parameters and their states are still those of the slab."""
        for p, state, place in self._held:
            if states[p] is not state or len(state) != len(self._views):
                return False
            if p.data_ptr() != place and (p.device != self.device or p.dtype != self.dtype):
                return False
        return all(
            state[key] is view
            for key, views in self._views.items()
            for (_, state, _), view in zip(self._held, views, strict=True)
        )

    def count(self, moved: Sequence[int]) -> None:
        """Count an update of some parameters."""
        if len(moved) == len(self.params):
            self.steps += 1
        else:
            self.steps[moved] += 1

    @property
    def mean(self) -> Tensor:
        """The means: the weights as they were last read, or what is kept of half-precision ones."""
        return self.state.get("mean", self.weights)

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

    def spans(self, moved: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
        """Where some parameters lie, or, in parts that a CPU's cache holds, all; each with one of them."""
        if moved is not None:
            yield from ((i, self.layout.span(i)) for i in moved)
            return
        part = _IN_CACHE if self.device.type == "cpu" else max(self.layout.size, 1)
        yield from ((0, slice(start, start + part)) for start in range(0, self.layout.size, part))

    def _transferred(self, flat: Tensor, *, read: bool) -> bool:
        """Whether one kernel could copy all parameters: torch's own takes a program for 65,536 numbers."""
        if not (flat.is_cuda and kernels is not None and all(p.is_contiguous() for p in self.params)):
            return False
        places = tuple(p.data_ptr() for p in self.params)
        if places not in self._places:
            self._places[places] = torch.tensor(places, dtype=torch.int64).to(self.device)
        kernels.transfer(self.layout, self._places[places], flat, read=read)
        if not read:
            for p in self.params:
                torch.autograd.graph.increment_version(p)
        return True


def slabs(groups: list[Group], states: Mapping[Tensor, State]) -> Iterator[Slab]:
    """The slabs of an optimiser whose parameters all have their state."""
    for number, group in enumerate(groups):
        alike: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
        for name, p in members(group):
            alike.setdefault((p.device, p.dtype, *sorted(states[p])), []).append((name, p))
        for pairs in alike.values():
            yield Slab(number, [name for name, _ in pairs], [p for _, p in pairs], states)


def needs_mean(p: Tensor, state: State) -> bool:
    """Whether a parameter in half precision still lacks its full-precision mean."""
    return state_dtype(p) != p.dtype and "mean" not in state
