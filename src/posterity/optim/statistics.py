"""Monte-Carlo means over weight samples: computed once, for every method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.flat import largest
from posterity.noise import Noise
from posterity.optim.state import FlatGroup, state_dtype
from posterity.sharding import beside, gradient, local


@dataclass(frozen=True)
class Statistics:
    """The statistics of one step for a rule, averaged over the weight samples.

    Attributes:
        grad: E[g], the gradient of the mean loss per example: ``p.grad`` after clipping and hooks, times
            count / B if the loss is a mean over ``count`` terms.
        grad_noise: E[g·eps]; empty for a rule that collects curvature instead.
        batch_size: B, the examples in the step, if the rule needs it.
        step: Number of updates of this block, including this one.
        squares: E[(1/B) Σ_i g_i²] of the B examples' own gradients, for a rule that collects them; empty in
            a step that does not.
        factors: Kronecker factors of a matrix block, in a step that collects them.
    """

    grad: Tensor
    grad_noise: Tensor
    batch_size: float | Tensor
    step: int | Tensor
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    factors: Kronecker | None = None


@final
@dataclass(eq=False)
class Sums:
    """Two weighted sums of a group over the samples of a step, in the precision of the posterior's state.

    Attributes:
        group: The group of the gradients.
        both: Σ g, and Σ g·eps or the squares that were collected, flat.
        numbers: Finite if the sums and the E[g] that :meth:`judged` reads are.
        poison: The second of them: on a GPU, NaN if a sum is not finite.
        used: Numbers of the blocks that had a gradient.
        factor: A pending factor of the second sum, which the rule applies when it reads the sum.
        published: E[g] as written to ``p.grad``, if it was: flat, and its views.
        overwritten: Whether blocks without a gradient, and padding, may be uninitialised.
    """

    group: FlatGroup
    both: Tensor
    numbers: Tensor
    poison: Tensor
    used: set[int] = field(default_factory=set)
    factor: float | Tensor = 1.0
    published: tuple[Tensor, dict[int, Tensor]] | None = None
    overwritten: bool = False

    @classmethod
    def empty(cls, group: FlatGroup, overwritten: bool) -> Sums:
        """Sums of zero; uninitialised if everything will be written before it is read."""
        size, dtype = group.layout.size, state_dtype(group.weights)
        if overwritten:
            both = torch.empty(2, size, dtype=dtype, device=group.device)
            numbers = torch.zeros(2, dtype=dtype, device=group.device)
            return cls(group, both, numbers, numbers[1], overwritten=True)
        flat = torch.zeros(2 * size + 2, dtype=dtype, device=group.device)
        return cls(group, flat[:-2].view(2, size), flat[-2:], flat[-1])

    @property
    def grad(self) -> Tensor:
        """Σ g."""
        return self.both[0]

    @property
    def second(self) -> Tensor:
        """Σ g·eps, or Σ_i g_i²."""
        return self.both[1]

    def add(
        self, grads: Mapping[int, Tensor], noise: Noise | None, weight: float = 1.0, rows: slice = slice(None)
    ) -> None:
        """Add gradients ``[k, ...]`` by block, taken under the given noise of some of its samples.

        Gradients of a single sample may lack the leading dimension. Noise has its own weight. Gradients of
        deterministic parameters are one tensor, a sum over samples.
        """
        known = self.used.intersection(grads)
        self.used.update(grads)
        if noise is not None:
            first = {i: grad for i, grad in grads.items() if i not in known} if known else grads
            more = {i: grads[i] for i in known}
            for some, fresh in ((first, True), (more, False)):
                if some:
                    noise.moments(some, self.both, self.poison, rows, fresh=fresh)
        elif grads:
            shapes = self.group.layout.shapes
            whole = {i: grad if grad.dim() == len(shapes[i]) else grad.sum(0) for i, grad in grads.items()}
            self.group.add(whole, self.grad, weight, self.poison)

    def clean(self) -> None:
        """Write zeros to uninitialised parts."""
        if not self.overwritten:
            return
        self.both.index_fill_(1, self.group.between, 0.0)
        for i in set(range(len(self.group.params))) - self.used:
            self.both[:, self.group.layout.span(i)] = 0.0

    def publish(self, last: bool) -> None:
        """Write E[g] to ``p.grad``, for clipping, hooks and logging.

        Args:
            last: Whether this is the last sample, so that the sum itself can be used.
        """
        flat = self.grad.to(self.group.dtype, copy=not last)
        views = self.group.layout.views(flat)
        params, split = self.group.params, self.group.sharded
        self.published = flat, {i: beside(views[i], params[i]) if split else views[i] for i in self.used}
        for i, view in self.published[1].items():
            params[i].grad = view

    @cached_property
    def mean_grad(self) -> Tensor:
        """E[g], flat, as in ``p.grad`` at the first access."""
        if self.published is None:
            return self.group.gather()
        flat, views = self.published
        for i, view in views.items():
            p = self.group.params[i]
            if p.grad is not view and (grad := gradient(p)) is not None:  # replaced, not changed in place
                local(view).copy_(grad)
        return flat.to(self.grad.dtype)

    def judged(self) -> Tensor:
        """Numbers that are finite if the current ``p.grad`` and the sums are."""
        if self.published is None:
            self.mean_grad = self.group.gather(self.numbers[0])
        else:
            self.numbers[0].copy_(largest(self.mean_grad))
        if not self.both.is_cuda:  # there, sums are judged as they are made
            self.poison += 0.0 * largest(self.second)
        return self.numbers


@final
class Accumulator:
    """The sums of all groups since the last step.

    Attributes:
        samples: Number of absorbed samples: contexts, or the samples of a stack.
        weight: Weight of each.
        scale: Factor of gradients when they are added; squares get its square.
        parts: Number of parts of the batch; every sample has seen one.
        losses: The samples' losses, if known.
        examples: Examples that layers saw in all samples together, if a rule collects curvature; in a
            captured step of several processes a tensor, like ``inputs``.
        inputs: Examples in the module's inputs, in all samples together; None if they cannot be counted.
        layers: Weighted sums of Kronecker factors, by the layer's weight.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self.samples, self.weight, self.scale, self.parts = 0, 1.0, 1.0, 1
        self.examples: float | Tensor = 0
        self.inputs: float | Tensor | None = 0.0
        self.losses: list[Tensor] = []
        self.layers: dict[str, Kronecker] = {}
        self._sums: dict[FlatGroup, Sums] = {}
        self._scaled = self._pooled = False

    def of(self, group: FlatGroup, noise: Noise | None, *, overwritten: bool = False) -> Sums:
        """The sums of one group, for adding gradients that were taken under some noise.

        Args:
            group: The group.
            noise: The noise of the drawn weights, if any.
            overwritten: Whether all of them will be written before they are read.
        """
        if group not in self._sums:
            self._sums[group] = Sums.empty(group, overwritten or (noise is not None and noise.overwrites))
        return self._sums[group]

    def skip(self, weight: float) -> None:
        """Count a sample without examples."""
        self.samples, self.weight = self.samples + 1, weight

    def take(self, sums: Sums, used: set[int], share: Any, factor: Any) -> None:
        """Add the sums of a group, of which some blocks had a gradient somewhere.

        Args:
            sums: Of the group.
            used: Numbers of the blocks with a gradient.
            share: Factor of the first sum.
            factor: The same for the second.
        """
        sums.used, self._pooled = used, True
        if before := self._sums.get(sums.group):
            before.grad.add_(sums.grad, alpha=share)
            before.second.add_(sums.second, alpha=factor / before.factor)
            before.poison += sums.poison
            before.used |= used
        else:
            sums.grad.mul_(share)
            sums.factor, self._sums[sums.group] = factor, sums

    def add_inputs(self, examples: float | Tensor | None) -> None:
        """Add the examples in a module's inputs, if they can be counted."""
        self.inputs = None if self.inputs is None or examples is None else self.inputs + examples

    @property
    def collected(self) -> bool:
        """Whether layers have reported curvature."""
        return isinstance(self.examples, Tensor) or bool(self.examples)

    def counted(self) -> float | None:
        """The number of examples in the step, from the module's inputs."""
        return None if not self.inputs else _whole(float(self.inputs) * self.weight)

    def seen_by_layers(self) -> float | None:
        """The number of examples in the step, as seen by layers."""
        return _whole(float(self.examples) * self.weight * self.parts) if self.examples else None

    def missing(self, here: Any, squares: bool) -> tuple[Any, Any]:
        """The pending factors of both sums, given the examples of the step.

        Args:
            here: The examples of the step.
            squares: Whether the second sum is of squares. Other processes may have more parts of their
                batches.
        """
        more = here / self.scale
        return more, more * more / self.parts if squares else more

    def add_layers(self, layers: Mapping[str, Kronecker]) -> None:
        """Add factors of the loss as given to the backward pass."""
        self.add_weighted(times(layers, self.weight, self.weight))

    def add_weighted(self, layers: Mapping[str, Kronecker]) -> None:
        """Add factors that are already weighted."""
        for key, layer in layers.items():
            if before := self.layers.get(key):
                A, S, seen = before.A + layer.A, before.S + layer.S, before.examples + layer.examples
                layer = replace(layer, A=A, S=S, examples=seen)
            self.layers[key] = layer

    def finish(self) -> None:
        """After the last sample: turn sums of curvature into means over examples.

        Of a mean loss over B examples, of all micro-batches together, the examples' own gradients are B times
        what each contributes: E[(1/B) Σ (B c_i)²] = B E[Σ c_i²], and likewise for S.
        """
        if self._scaled or not self.collected:
            return
        self._scaled = True
        behind = self.examples * self.weight
        for sums in self:
            if isinstance(behind, Tensor):
                sums.factor = sums.factor * behind
            else:  # a rule would be compiled for every number
                sums.second.mul_(behind)
        self.layers = {
            key: replace(each, A=each.A / each.examples, S=each.S * behind)
            for key, each in self.layers.items()
        }

    @torch.no_grad()
    def publish(self, last: bool = False) -> None:
        """Put E[g] into every ``p.grad``; see :meth:`Sums.publish`."""
        if self.samples == self.weight == 1 and not (last or self._pooled):
            return  # a single sample's gradients are their own mean
        for sums in self:
            sums.publish(last)

    def __iter__(self) -> Iterator[Sums]:
        return iter(self._sums.values())


def times(layers: Mapping[str, Kronecker], A: float, S: float) -> dict[str, Kronecker]:
    """Factors of inputs and of gradients, multiplied by one number each; examples count as inputs do."""
    return {k: replace(e, A=e.A * A, S=e.S * S, examples=e.examples * A) for k, e in layers.items()}


def _whole(number: float) -> float:
    """A number of examples that was divided by the number of samples, and rounded."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number


@final
class Sink(NamedTuple):
    """Takes the gradient of a drawn weight from a layer's backward pass.

    Attributes:
        sums: Of all groups.
        group: The weight's.
        noise: Behind the drawn weights.
        block: The weight's number in the group.
    """

    sums: Accumulator
    group: FlatGroup
    noise: Noise
    block: int

    def parts(self) -> list[slice]:
        """The samples whose gradients to compute and take at once; none to leave them to autograd."""
        return self.noise.parts(self.block)

    def take(self, grads: Tensor, rows: slice) -> None:
        """Add the gradients ``[k, *shape]`` of some of the samples."""
        self.sums.of(self.group, self.noise).add({self.block: grads}, self.noise, rows=rows)
