"""State of a rule: separate tensors for every parameter, and a flat cache of them for speed.

``optimizer.state[p]`` is what users save, load, read and change. A rule would need a launch for each of these
tensors and each operation, so :class:`FlatGroup` keeps a copy of them in one buffer, works on that, and
writes changes back. It can be dropped and rebuilt at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeAlias, final
from weakref import proxy

import torch
from torch import Tensor

from posterity.flat import ALIGN, Layout, largest
from posterity.noise import Room, addresses, alike, kernels
from posterity.optim.adam import adam_init
from posterity.sharding import gradient, is_sharded, local, offset
from posterity.torch_private import foreach_add_, foreach_copy_

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer

Group: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Tensor]

# Keys of counts, which are the host's; all other tensors of a state are the device's.
COUNTS = ("step", "since")
# Numbers of each buffer that a rule works on at once on a CPU.
_IN_CACHE = 1 << 16
_version = attrgetter("_version")
_generations = count()


@final
class FlatGroup:
    """Parameters of one group, device and dtype, which a rule updates all at once.

    For sharded parameters it holds this process's parts, and draws those slices of the noise.

    Args:
        number: The group's number.
        names: Of the parameters.
        params: The parameters.
        states: The optimiser's state.
        apart: Keys of tensors that do not have one value per weight.
        align: Blocks start at multiples of this; by default the kernels' alignment.

    Attributes:
        parts: This process's part of each parameter: all of it, unless sharded.
        weights: The parameters' values while the model holds samples.
        state: The state's tensors, flat, by key.
        steps: Number of updates of each parameter, from ``states``.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        params: Sequence[Tensor],
        states: Mapping[Tensor, State],
        apart: Collection[str] = (),
        align: int = ALIGN,
    ) -> None:
        self.number, self.params, self.sharded = number, list(params), is_sharded(params[0])
        self.parts = list(map(local, params))
        shapes, wholes = [part.shape for part in self.parts], [p.shape for p in params]
        at = list(map(offset, params)) if self.sharded else None
        self.layout = Layout(names, shapes, wholes, at, align=align)
        self.device, self.dtype = params[0].device, params[0].dtype
        self.weights = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        self._weights = self.layout.views(self.weights)
        self.room = Room()
        self._fused = kernels is not None and self.device.type == "cuda"
        # Addresses of tensors; captured graphs read these.
        self._at: tuple[int, ...] = ()
        self._fits, self._plain = True, False
        self._places: dict[tuple[int, ...], Tensor] = {}
        self.steps = [states[p]["step"] for p in params]
        keys = [key for key in states[params[0]] if key not in (*COUNTS, *apart)]
        self._own = {key: [local(states[p][key]) for p in params] for key in keys}
        # In the padding masks are 0, and all other values 1, since a std of 0 would count as invalid.
        self.state: State = {
            key: torch.full(
                (self.layout.size,), own[0].dtype != torch.bool, dtype=own[0].dtype, device=self.device
            )
            for key, own in self._own.items()
        }
        self._views = {key: self.layout.views(flat) for key, flat in self.state.items()}
        self._plain_state = {
            key: self._fused and alike(own, self.state[key].dtype) for key, own in self._own.items()
        }
        self.load()
        self.locate()

    # The cache.

    def load(self) -> None:
        """Copy the optimiser's state into the buffers."""
        for key, own in self._own.items():
            foreach_copy_(self._views[key], own)
        self.keep_in_mind()

    def keep_in_mind(self) -> None:
        """Mark the state as read, although others have written to it."""
        self._known = self._versions()

    def current(self) -> bool:
        """Whether nobody has changed these tensors since they were read or written."""
        return self._known == self._versions()

    def save(self, keys: Collection[str], moved: Sequence[int]) -> None:
        """Write a rule's changes for some parameters to the optimiser's own tensors."""
        everything = len(moved) == len(self.params)
        for key in keys:
            own, views = self._own[key], self._views[key]
            if everything and self._plain_state[key]:
                self._transfer(own, self.state[key], read=False)
            else:
                foreach_copy_([own[i] for i in moved], [views[i] for i in moved])
        self.keep_in_mind()

    def _versions(self) -> list[list[int]]:
        return [list(map(_version, own)) for own in self._own.values()]

    def count(self, moved: Sequence[int], by: int = 1) -> None:
        """Count an update of some parameters, or uncount one."""
        foreach_add_([self.steps[i] for i in moved], by)

    # The parameters.

    def locate(self) -> bool:
        """Look up the parameters' memory, which users may change; returns whether they still belong here."""
        if self.sharded:
            self.parts = list(map(local, self.params))
        at = tuple(map(Tensor.data_ptr, self.parts))
        if at != self._at:
            self._at = at
            self._fits = all(p.device == self.device and p.dtype == self.dtype for p in self.parts)
        self._plain = self._fused and self._fits and all(map(Tensor.is_contiguous, self.parts))
        return self._fits

    @property
    def mean(self) -> Tensor:
        """The means: the weights as last read, or the stored means of half-precision ones."""
        return self.state.get("mean", self.weights)

    # These three want the parameters to be where they were last located.

    def read(self) -> None:
        """Read the parameters' values."""
        if self._plain:
            self._transfer(self.parts, self.weights, read=True)
        else:
            foreach_copy_(self._weights, self.parts)

    def put(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat buffer; ``weights`` gives them those that were read."""
        if self._plain:
            self._transfer(self.parts, flat, read=False)
        else:
            views = self._weights if flat is self.weights else self.layout.views(flat)
            foreach_copy_(self.parts, views)

    def write(self, moved: Sequence[int]) -> None:
        """Give some parameters their means."""
        if len(moved) == len(self.params) and "mean" not in self.state:
            self.put(self.weights)
            return
        means = self._views.get("mean", self._weights)
        foreach_copy_([self.parts[i] for i in moved], [means[i] for i in moved])

    def _transfer(self, tensors: Sequence[Tensor], flat: Tensor, *, read: bool) -> None:
        """Copy contiguous tensors of one dtype with one kernel; torch's takes one program per 65,536
        numbers."""
        at = tuple(map(Tensor.data_ptr, tensors))
        if at not in self._places:
            self._places[at] = addresses(at, self.device)
        kernels.transfer(self.layout, self._places[at], flat, read=read)
        if not read:
            torch.autograd.graph.increment_version(tensors)

    # Gradients, and what else is given by block.

    def gather(self, number: Tensor | None = None) -> Tensor:
        """The parameters' gradients, flat, in the precision of the state; overwritten by the next call.

        Args:
            number: A zero, which becomes non-finite if a gradient is.
        """
        flat, views = self._gathered
        grads = [gradient(p) for p in self.params]
        found = [grad for grad in grads if grad is not None]
        if len(found) < len(views):
            flat.zero_()  # else it would have gradients of earlier steps
        elif self._fused and alike(found, flat.dtype):
            places = addresses(tuple(map(Tensor.data_ptr, found)), self.device)
            kernels.transfer(self.layout, places, flat, read=True, poison=number)
            return flat
        there = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        foreach_copy_(there, found)
        if number is not None:
            number.copy_(largest(flat))
        return flat

    @cached_property
    def between(self) -> Tensor:
        """The padding between blocks in a flat buffer."""
        free = torch.ones(self.layout.size, dtype=torch.bool)
        for view in self.layout.views(free):
            view.fill_(False)
        return free.nonzero()[:, 0].to(self.device)

    @cached_property
    def _gathered(self) -> tuple[Tensor, list[Tensor]]:
        with torch.inference_mode(False):
            flat = torch.zeros(self.layout.size, dtype=state_dtype(self.weights), device=self.device)
            return flat, self.layout.views(flat)

    def add(self, values: Mapping[int, Tensor], flat: Tensor, weight: float, poison: Tensor) -> None:
        """Add weighted tensors, by block, to a flat buffer in the precision of the state.

        Args:
            values: By block.
            flat: The buffer.
            weight: Weight of the added tensors.
            poison: A number, which becomes non-finite if a sum is.
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
        foreach_add_([views[i] for i in values], own, alpha=weight)
        poison += largest(flat) * 0.0

    def spans(self, moved: Sequence[int] | None) -> Iterator[tuple[int, slice | None]]:
        """Spans of some parameters, or of all in parts that fit into a CPU's cache; each with one of its
        parameters.

        None means everywhere: a view for each buffer would take longer than many operations.
        """
        if moved is not None:
            yield from ((i, self.layout.span(i)) for i in moved)
        elif self.layout.size and (self.device.type != "cpu" or self.layout.size <= _IN_CACHE):
            yield 0, None
        else:
            starts = range(0, self.layout.size, _IN_CACHE)
            yield from ((0, slice(start, start + _IN_CACHE)) for start in starts)


@final
class StateCache:
    """All flat groups of an optimiser, rebuilt whenever its state has moved in memory.

    Args:
        opt: The optimiser.

    Attributes:
        latest: The flat groups from the last call of :meth:`groups`.
    """

    def __init__(self, opt: VariationalOptimizer) -> None:
        self._opt: VariationalOptimizer = proxy(opt)  # a circle would keep both in a GPU's memory
        self.drop()

    def drop(self) -> None:
        """Forget everything; nothing is lost."""
        self.latest: list[FlatGroup] = []
        self._held: list[Tensor] = []  # all of the state, when it was last cached
        self._generation = next(_generations)

    @property
    def generation(self) -> int:
        """A number that changes whenever state moves in memory; captured steps compare it."""
        self.groups()
        return self._generation

    def groups(self) -> Sequence[FlatGroup]:
        """Parameters and state in flat buffers, after initialising the state of parameters without one."""
        opt, held = self._opt, self.tensors()
        if (
            self.latest
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and all(flat.locate() for flat in self.latest)
        ):
            for flat in self.latest:
                if not flat.current():  # a user has changed state in place
                    flat.load()
            return self.latest
        if opt.sums.samples:
            raise RuntimeError(
                "parameters or tensors of the state were replaced in the middle of a step: call "
                "step() or zero_grad() first"
            )
        opt.settle_step()  # it would uncount steps of these groups
        with torch.inference_mode(False), torch.no_grad():
            for group in opt.param_groups:
                for p in group["params"]:
                    self._begin(p, opt.state[p], group)
            self.latest = list(self._made())
        opt.blocks.renew()
        self._held = self.tensors()
        self._generation = next(_generations)
        return self.latest

    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        return list(chain.from_iterable(map(dict.values, self._opt.state.values())))

    def reread(self) -> None:
        """Read the parameters again, which a user may have changed since weights were drawn."""
        for flat in self.latest:
            flat.locate()
            flat.read()

    def _begin(self, p: Tensor, state: State, group: Group) -> None:
        """Initialise a parameter's state if it has none, and the mean of a half-precision one."""
        if state_dtype(p) == p.dtype:
            state.pop("mean", None)  # of when it was in half precision
        elif "mean" not in state:
            state["mean"] = _mean(p)
        if "step" not in state:
            state["step"] = zero()
            rule, mean = self._opt, _mean(p)
            state.update(adam_init(mean) if rule.by_adam(group) else rule.init(mean, None, group))
        row = self._opt.padding.get(p)
        if row is not None and not group["deterministic"]:
            keep = local(state.setdefault("keep", torch.ones_like(p, dtype=torch.bool)))
            own = keep.narrow(0, here, 1) if 0 <= (here := row - offset(p)[0]) < len(keep) else keep[:0]
            if bool(own.any()):
                own.fill_(False)

    def _made(self) -> Iterator[FlatGroup]:
        """Build the flat groups of an optimiser whose parameters all have a state."""
        states, apart = self._opt.state, self._opt.matrices
        for number, group in enumerate(self._opt.param_groups):
            similar: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
            for name, p in members(group):
                keys = sorted(states[p].keys() - {*COUNTS, *apart})
                similar.setdefault((p.device, p.dtype, is_sharded(p), *keys), []).append((name, p))
            for pairs in similar.values():
                yield FlatGroup(number, [name for name, _ in pairs], [p for _, p in pairs], states, apart)


def members(group: Group) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of a group."""
    return zip(group["param_names"], group["params"], strict=True)


def state_dtype(p: Tensor) -> torch.dtype:
    """The posterior's precision for a parameter: never half."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def _mean(p: Tensor) -> Tensor:
    """A copy of a parameter in the posterior's precision, contiguous as all state is."""
    return p.detach().to(state_dtype(p), copy=True, memory_format=torch.contiguous_format)


def zero() -> Tensor:
    """A count of updates; whole numbers, because single precision would stop counting at 2²⁴."""
    return torch.zeros((), dtype=torch.int64)
