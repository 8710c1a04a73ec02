"""The engine of every learning rule: weights are drawn, their gradients summed up, and the sums move q.

A sample of a step is :meth:`Engine.draw`, a forward and a backward pass inside :meth:`Engine.collecting`, and
:meth:`Engine.absorb`. After the last one :meth:`Engine.apply` hands the means of the sums to the rule. Loop,
stack and CUDA graph all run these; they differ in who calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posterity.noise import Noise
from posterity.optim.adam import adam_init, adam_update
from posterity.optim.blocks import Blocks
from posterity.optim.collecting import Collecting, due
from posterity.optim.entries import check_common
from posterity.optim.fused import fused
from posterity.optim.gradients import GradientLedger, refuse_process_group
from posterity.optim.groups import Group, members
from posterity.optim.guard import Guard, accept, ahead_of
from posterity.optim.live import Live, under_way
from posterity.optim.rule import Rule
from posterity.optim.sampling import Draw, Sampling
from posterity.optim.slab import Slab, State, needs_mean, slabs
from posterity.optim.statistics import Accumulator, Sink, Statistics, state_dtype, zero

_generations = count()


class Engine(Optimizer, Rule):
    """A torch optimiser whose state a rule moves from statistics over weight samples."""

    _module: nn.Module | None
    _slabs: Sequence[Slab] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, copying and ``load_state_dict`` alike: pending samples are dropped."""
        super().__setstate__(state)
        self._slabs = []
        self._matrices = Blocks(self.param_groups, self.state, self.matrices)
        self._checked: list[list[object]] = []  # the groups' entries, when they were last checked
        self._held: list[Tensor] = []  # all of the state, when the slabs were made of it
        self._sums = Accumulator()
        self._ledger = GradientLedger()
        self._sampling = Sampling(self._module)
        self._collecting = Collecting(self.collects, type(self).__name__)
        self.guard = Guard(type(self).__name__)
        self._moved: list[tuple[Slab, list[int]]] = []  # by the last step, of each slab
        self._live: Live | None = None
        self._generation = next(_generations)
        self._reset()

    # What groups say.

    def check_changed(self) -> None:
        """Refuse entries for which a rule is undefined, if one has changed since they were last checked."""
        entries = [
            # A number may be in a tensor, and change in place.
            [*[getattr(group[key], "_version", None) for key in self.live], *map(group.get, self._entries)]
            for group in self.param_groups
        ]
        if entries != self._checked:
            self._check(self.param_groups)
            self._checked = entries

    def _check(self, groups: Sequence[Group]) -> None:
        """Refuse entries for which a rule is undefined."""
        for group in groups:
            check_common(group, groups[0])
            if not self._adams(group):
                self.check(group)

    @cached_property
    def _entries(self) -> list[str]:
        """Names of entries that only users change, Adam's among them."""
        return sorted({*self.defaults, "betas"} - {"steps", "blocks"})

    # From samples to statistics.

    @torch.no_grad()
    def draw(self, samples: range, weight: float = 1.0) -> list[Draw]:
        """Weights of every stochastic parameter, with their noise; the parameters' own are kept.

        Args:
            samples: Numbers of the samples.
            weight: Of each in the statistics; if all together have 1, these need no division.
        """
        self._refuse_inside("a training step")
        if samples.start == 0 and self._live is None:
            refuse_process_group()
            self._ledger.refuse_foreign(self.param_groups)
        drawn = []
        groups = under_way(self.param_groups, self._live)
        for slab in self._ready():
            slab.read()
            group = groups[slab.number]
            if group["deterministic"] or not self.draws:
                continue
            noise = Noise(
                samples,
                slab.layout,
                seed=group["seed"],
                step=group["steps"] if self._live is None else self._live.clock,
                weight=weight,
                device=slab.device,
                dtype=slab.mean.dtype,
                room=slab.room,
            )
            mean, std = slab.mean, (self.std if self._live is None else self._fused_std)(slab.state, group)
            if "keep" in slab.state:
                mean, std = mean * slab.state["keep"], std * slab.state["keep"]
            drawn.append(Draw(slab, noise, noise.perturb(mean, std).to(slab.dtype)))
        if drawn:
            self._matrices.draw(drawn, self.perturb, self._live)
        return drawn

    def collecting(
        self, drawn: Mapping[Tensor, Tensor] | None = None, *, stacked: bool = False
    ) -> AbstractContextManager[object]:
        """What forward and backward passes are run inside: they tell of the curvature that the rule wants.

        Args:
            drawn: Tensors in the place of parameters, if any.
            stacked: Whether these are ``[samples, ...]``.
        """
        named = (pair for group in self.param_groups for pair in members(group))
        return self._collecting.watch(named, drawn or {}, stacked=stacked, due=due(self.param_groups[0]))

    def absorb(
        self,
        grad_of: Callable[[Tensor], Tensor | None],
        drawn: list[Draw],
        samples: int,
        weight: float = 1.0,
        parts: int = 1,
    ) -> None:
        """Add gradients ``[samples, ...]`` taken at drawn weights to the statistics.

        Those of one sample may lack the leading dimension. Those of deterministic parameters are one, a sum
        over the samples.

        Args:
            grad_of: A parameter's gradient, if it has one.
            drawn: The weights.
            samples: How many.
            weight: Of each.
            parts: Of the batch, of which every sample has seen one.
        """
        noises = {draw.slab: draw.noise for draw in drawn if self.collects is None}
        grads = [
            (slab, {i: grad for i, p in enumerate(slab.params) if (grad := grad_of(p)) is not None})
            for slab in self._slabs
        ]
        squares, layers, examples = self._collecting.take(
            {slab.layout.names[i]: grad for slab, found in grads for i, grad in found.items()}, samples
        )
        for slab, found in grads:
            noise = noises.get(slab)
            if found:
                self._sums.of(slab, noise).add(found, noise, weight)
            names = slab.layout.names
            if squares and (own := {i: squares[names[i]] for i in found if names[i] in squares}):
                # Those of a mean loss: the examples' own gradients are as many times larger as they are many.
                self._sums.of(slab, noise).add_squares(own, weight * examples)
        if examples:
            self._sums.examples.add(examples * parts)
            self._sums.add_layers(layers, examples, weight)
        self._sums.samples += samples
        self._sums.weight += samples * weight

    def sink(self, draw: Draw, block: int) -> Sink:
        """Where a layer's backward pass may bring a drawn weight's gradient by itself."""
        return Sink(self._sums, draw.slab, draw.noise, block)

    def publish(self) -> None:
        """Put the mean gradients of all that was absorbed into ``p.grad``."""
        self._sums.publish(last=True)

    # From statistics to a move.

    @torch.no_grad()
    def apply(self, sizes: list[int]) -> None:
        """Move every parameter that has a gradient, given the batch size that each group's rule sees."""
        live, ok, done = self._live, self.guard.ok, set[Tensor]()
        if self.matrices:
            done = self._matrices.move(self._sums, sizes, self.updates, live, ok)
        groups = under_way(self.param_groups, live)
        collected = self.collects is None or bool(self._sums.examples)
        self._moved = []
        for sums in self._sums:
            slab = sums.slab
            moved = [i for i, p in enumerate(slab.params) if p.grad is not None and not (done and p in done)]
            if not moved:
                continue
            slab.count(moved)
            self._moved.append((slab, moved))
            group = groups[slab.number]
            if live is None:
                slab.locate()
                slab.read()  # a user may have changed weights since the draw
            grad = sums.mean_grad
            counts = slab.steps.tolist()
            alike = len(moved) == len(slab.params) and len(set(counts)) == 1
            for i, span in slab.spans(None if alike else moved):
                p = slab.params[i]
                own = {key: _part(value, span) for key, value in slab.state.items() if key != "mean"}
                keep = own.pop("keep", None)
                (self._move if live is None else self._fused_move)(
                    _part(slab.mean, span),
                    own,
                    _part(grad, span),
                    None if self._adams(group) else _part(sums.second, span if collected else slice(0)),
                    self._sums.weight,
                    sizes[slab.number],
                    counts[i] if live is None else live.step(p),
                    group,
                    keep,
                    ok,
                )
            slab.write(moved)
        torch.clear_autocast_cache()  # of weights that were

    def _move(
        self,
        mean: Tensor,
        state: State,
        grad: Tensor,
        second: Tensor | None,
        weight: float,
        batch_size: int,
        step: int | Tensor,
        group: Group,
        keep: Tensor | None,
        ok: Tensor | None,
    ) -> None:
        """The rule, and its result written over mean and state: all in place, so that it fuses."""
        if second is None:
            new_mean, new_state = adam_update(mean, state, grad, step, group)
        else:
            second, none = second if weight == 1 else second / weight, second[:0]
            noise, squares = (second, none) if self.collects is None else (none, second)
            stats = Statistics(grad, noise, batch_size, step, squares)
            new_mean, new_state = self.update(mean, state, stats, group)
        if keep is not None:  # what is pruned does not move: its std, which no gradient knows, might overflow
            new_mean = torch.where(keep, new_mean, 0.0)
            new_state = {key: torch.where(keep, value, state[key]) for key, value in new_state.items()}
        accept([(mean, new_mean), *((state[key], value) for key, value in new_state.items())], ok)

    @cached_property
    def _fused_move(self) -> Callable[..., None]:
        return fused(type(self), "_move")

    @cached_property
    def _fused_std(self) -> Callable[..., Tensor]:
        return fused(type(self), "std")

    def advance(self, by: int = 1) -> None:
        """Count steps: the next one draws other noise."""
        for group in self.param_groups:
            group["steps"] += by

    def _take_back(self) -> str | None:
        """Uncount a step that was held back on the device; what was at fault, if it can still be told."""
        for slab, moved in self._moved:
            slab.count(moved, -1)
        self.advance(-1)
        return self._ledger.not_finite(self.param_groups)

    def _reset(self) -> None:
        self._sums.clear()
        self.guard.forget()
        self._sampling.finish()
        self._ledger.remember(self._params())

    # Where state lies.

    @property
    def generation(self) -> int:
        """A number that is new whenever state lies elsewhere than before: captured steps hold on to it."""
        self._ready()
        return self._generation

    def _ready(self) -> Sequence[Slab]:
        """The slabs, after giving a state to parameters that have none."""
        held = self._state_tensors()
        if (
            self._slabs
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and all(slab.locate() for slab in self._slabs)
        ):
            return self._slabs
        self.guard.settle_step()  # it would uncount steps of these slabs
        for group in self.param_groups:
            for p in group["params"]:
                state: State = self.state[p]
                if state_dtype(p) == p.dtype:
                    state.pop("mean", None)  # of when it was in half precision
                if not state or needs_mean(p, state):
                    self._begin(p, state, group)
        with torch.inference_mode(False), torch.no_grad():
            self._slabs = list(slabs(self.param_groups, self.state, self.matrices))
        self._matrices = Blocks(self.param_groups, self.state, self.matrices)
        self._held = self._state_tensors()
        # What may fail in the middle of a step is not for a device alone to judge.
        self.guard.device = None if self.matrices else ahead_of(self._slabs)
        self.guard.ok = None
        self._generation = next(_generations)
        return self._slabs

    @torch.inference_mode(False)
    @torch.no_grad()
    def _begin(self, p: Tensor, state: State, group: Group) -> None:
        mean = p.detach().to(state_dtype(p), copy=True)
        if mean.dtype != p.dtype:
            state["mean"] = mean
        if "step" not in state:
            state["step"] = zero()
            state.update(adam_init(mean) if self._adams(group) else self.init(mean, None, group))

    def _state_tensors(self) -> list[Tensor]:
        return list(chain.from_iterable(map(dict.values, self.state.values())))

    def _adams(self, group: Group) -> bool:
        """Whether Adam trains a group, not the rule."""
        return bool(group["deterministic"]) and self.without_noise is None

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _refuse_inside(self, call: str) -> None:
        if self._sampling.entered is not None:
            raise RuntimeError(f"{call} inside sampled_params() would see sampled weights: leave it first")


def _part(flat: Tensor, span: slice | None) -> Tensor:
    """What lies in a span, or all."""
    return flat if span is None else flat[span]
