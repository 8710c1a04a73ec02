"""Monte-Carlo means over weight samples: computed once, for every method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.noise import Noise

if TYPE_CHECKING:
    from posterity.optim.slab import Slab


@dataclass(frozen=True)
class Statistics:
    """What a rule sees of one step, averaged over the weight samples.

    Attributes:
        grad: E[g], the gradient of the *mean* loss, as clipping and hooks left it in ``p.grad``.
        grad_noise: E[g·eps]; empty for a rule that collects curvature instead.
        batch_size: Examples behind the step, where the rule asked for it; else 0.
        step: How often this block was updated, this time included.
        squares: E[(1/B) Σ_i g_i²] of the B examples' own gradients, for a rule that collects them; empty in
            a step that does not.
        factors: Of a block that is a matrix, in a step that collects them.
    """

    grad: Tensor
    grad_noise: Tensor
    batch_size: int
    step: int | Tensor
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    factors: Kronecker | None = None


@final
@dataclass(eq=False)
class Sums:
    """Two sums of a slab over the samples of a step, in the precision of the posterior's state.

    Attributes:
        slab: Whose gradients.
        both: Σ g, and Σ g·eps or what is collected of curvature, flat; of blocks that had no gradient it may
            hold anything.
        numbers: Of E[g], as :meth:`judged` finds it, and of the sums: finite if these are.
        poison: The second of them: on a GPU, NaN if a sum is not finite.
        used: Blocks that had a gradient, by number.
        published: E[g] as it was put into ``p.grad``, if it was: flat, and the views that were.
    """

    slab: Slab
    both: Tensor
    numbers: Tensor
    poison: Tensor
    used: set[int] = field(default_factory=set)
    published: tuple[Tensor, dict[int, Tensor]] | None = None

    @classmethod
    def none(cls, slab: Slab, noise: Noise | None) -> Sums:
        """Nothing yet, of gradients taken under some noise."""
        size, dtype = slab.layout.size, state_dtype(slab.weights)
        if noise is not None and noise.overwrites:
            both = torch.empty(2, size, dtype=dtype, device=slab.device)
            numbers = torch.zeros(2, dtype=dtype, device=slab.device)
            return cls(slab, both, numbers, numbers[1])
        flat = torch.zeros(2 * size + 2, dtype=dtype, device=slab.device)
        return cls(slab, flat[:-2].view(2, size), flat[-2:], flat[-1])

    @property
    def grad(self) -> Tensor:
        """Σ g."""
        return self.both[0]

    @property
    def second(self) -> Tensor:
        """Σ g·eps, or Σ (1/B) Σ_i g_i²."""
        return self.both[1]

    def add(
        self, grads: Mapping[int, Tensor], noise: Noise | None, weight: float = 1.0, rows: slice = slice(None)
    ) -> None:
        """Add gradients ``[k, ...]`` by block, taken under the given noise of some of its samples.

        Those of one sample may lack the leading dimension. Where no noise matters, all have a weight; those
        of deterministic parameters are one, a sum over samples.
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
            shapes = self.slab.layout.shapes
            whole = {i: grad if grad.dim() == len(shapes[i]) else grad.sum(0) for i, grad in grads.items()}
            self.slab.add(whole, self.grad, weight, self.poison)

    def add_squares(self, squares: Mapping[int, Tensor], weight: float) -> None:
        """Add squares of single examples' gradients, by block."""
        self.slab.add(squares, self.second, weight, self.poison)

    def publish(self, weight: float, last: bool) -> None:
        """Put E[g] into ``p.grad``, where clipping, hooks and logging expect it.

        Args:
            weight: Of all samples together.
            last: Whether no more samples come, so that the sum itself may be given away.
        """
        flat = (self.grad if last and weight == 1.0 else self.grad / weight).to(self.slab.dtype)
        views = self.slab.layout.views(flat)
        self.published = flat, {i: views[i] for i in self.used}
        for i, view in self.published[1].items():
            self.slab.params[i].grad = view

    @cached_property
    def mean_grad(self) -> Tensor:
        """E[g], flat, as ``p.grad`` has it when this is first asked for."""
        if self.published is None:
            return self.slab.gather()
        flat, views = self.published
        for i, view in views.items():
            grad = self.slab.params[i].grad
            if grad is not None and grad is not view:  # replaced, not changed in place
                view.copy_(grad)
        return flat.to(self.grad.dtype)

    def judged(self) -> Tensor:
        """The numbers that are finite if E[g], as ``p.grad`` has it now, and the sums are."""
        if self.published is None:
            self.mean_grad = self.slab.gather(self.numbers[0])
        else:
            torch.linalg.vector_norm(self.mean_grad, math.inf, out=self.numbers[0])
        return self.numbers


@final
class Accumulator:
    """The sums of all slabs since the last step."""

    def __init__(self) -> None:
        self.samples = 0
        self.weight = 0.0  # of all samples together
        self.examples: set[int] = set()  # behind each sample, where they are counted
        self.layers: dict[str, Kronecker] = {}  # sums of factors, by the layer's weight
        self._sums: dict[Slab, Sums] = {}

    def of(self, slab: Slab, noise: Noise | None) -> Sums:
        """The sums of one slab, to add gradients to that were taken under some noise."""
        if slab not in self._sums:
            self._sums[slab] = Sums.none(slab, noise)
        return self._sums[slab]

    def add_layers(self, layers: Mapping[str, Kronecker], examples: int, weight: float) -> None:
        """Add factors that passes with so many examples have told, of a mean loss over these."""
        for key, layer in layers.items():
            # S is of gradients that are the examples' own over their number, and A is a sum.
            A, S = layer.A * (weight / examples), layer.S * (weight * examples)
            seen = layer.examples * (weight / examples)
            if before := self.layers.get(key):
                A, S, seen = before.A + A, before.S + S, before.examples + seen
            self.layers[key] = replace(layer, A=A, S=S, examples=seen)

    @torch.no_grad()
    def publish(self, last: bool = False) -> None:
        """Put E[g] into every ``p.grad``; see :meth:`Sums.publish`."""
        if self.samples == 1 and not last:
            return  # a single sample's gradients are their own mean
        for sums in self._sums.values():
            sums.publish(self.weight, last)

    def __iter__(self) -> Iterator[Sums]:
        return iter(self._sums.values())

    def used(self) -> set[int]:
        """Parameters that had a gradient, by ``id``."""
        return {id(sums.slab.params[i]) for sums in self for i in sums.used}

    @property
    def curvature(self) -> str:
        """What the sums beside the gradients' are of, in words."""
        return "the mean of squared gradients" if self.examples else "E[gradient · noise]"

    def clear(self) -> None:
        """Start the next step."""
        self.samples, self.weight = 0, 0.0
        self.examples.clear()
        self.layers.clear()
        self._sums.clear()


@final
class Sink(NamedTuple):
    """Where a layer's backward pass brings the gradient of a drawn weight, summed up as it is made.

    Attributes:
        sums: Of all slabs.
        slab: The weight's.
        noise: Behind the drawn weights.
        block: The weight's number in the slab.
    """

    sums: Accumulator
    slab: Slab
    noise: Noise
    block: int

    def parts(self) -> list[slice]:
        """Which samples' gradients to make and bring at once; none if they may be left to autograd."""
        return self.noise.parts(self.block)

    def take(self, grads: Tensor, rows: slice) -> None:
        """Add the gradients ``[k, *shape]`` of some of the samples."""
        self.sums.of(self.slab, self.noise).add({self.block: grads}, self.noise, rows=rows)


def state_dtype(p: Tensor) -> torch.dtype:
    """The posterior's precision for a parameter: never half."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def zero() -> Tensor:
    """A count of updates; whole numbers, because single precision would stop counting at 2²⁴."""
    return torch.zeros((), dtype=torch.int64)
