"""Monte-Carlo means over weight samples: computed once, for every method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from posterity.noise import Noise

if TYPE_CHECKING:
    from posterity.optim.slab import Slab


@dataclass(frozen=True)
class Statistics:
    """What a rule sees of one step, averaged over the weight samples.

    Attributes:
        grad: E[g], the gradient of the *mean* loss, as clipping and hooks left it in ``p.grad``.
        grad_noise: E[g·eps].
        batch_size: Examples behind the step, where the rule asked for it; else 0.
        step: How often this block was updated, this time included.
    """

    grad: Tensor
    grad_noise: Tensor
    batch_size: int
    step: int | Tensor


@final
@dataclass(eq=False)
class Sums:
    """Σ g and Σ g·eps of a slab over the samples of a step, in the precision of the posterior's state.

    Attributes:
        slab: Whose gradients.
        both: Σ g and Σ g·eps, flat; of blocks that had no gradient it may hold anything.
        poison: On a GPU, NaN if a sum is not finite.
        used: Blocks that had a gradient, by number.
        published: E[g] as it was put into ``p.grad``, if it was: flat, and the views that were.
    """

    slab: Slab
    both: Tensor
    poison: Tensor
    used: set[int] = field(default_factory=set)
    published: tuple[Tensor, dict[int, Tensor]] | None = None

    @classmethod
    def zeros(cls, slab: Slab) -> Sums:
        """Nothing yet."""
        size, dtype = slab.layout.size, state_dtype(slab.weights)
        flat = torch.zeros(2 * size + 1, dtype=dtype, device=slab.device)
        return cls(slab, flat[:-1].view(2, size), flat[-1])

    @property
    def grad(self) -> Tensor:
        """Σ g."""
        return self.both[0]

    @property
    def grad_noise(self) -> Tensor:
        """Σ g·eps."""
        return self.both[1]

    def add(
        self, grads: Mapping[int, Tensor], noise: Noise | None, weight: float = 1.0, rows: slice = slice(None)
    ) -> None:
        """Add gradients ``[k, ...]`` by block, taken under the given noise of some of its samples.

        Those of one sample may lack the leading dimension. Deterministic parameters have no noise, and one
        gradient that is a sum over samples, with a weight.
        """
        fresh = self.used.isdisjoint(grads)
        self.used.update(grads)
        if noise is not None:
            noise.moments(grads, self.both, self.poison, rows, fresh=fresh)
        elif grads:
            sums = self.slab.layout.views(self.grad)
            values = [grad.reshape(sums[i].shape).to(self.grad.dtype) for i, grad in grads.items()]
            torch._foreach_add_([sums[i] for i in grads], values, alpha=weight)
            self.poison += torch.linalg.vector_norm(self.grad, float("inf")) * 0.0

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


@final
class Accumulator:
    """The sums of all slabs since the last step."""

    def __init__(self) -> None:
        self.samples = 0
        self.weight = 0.0  # of all samples together
        self._sums: dict[Slab, Sums] = {}

    def of(self, slab: Slab) -> Sums:
        """The sums of one slab, to add to."""
        if slab not in self._sums:
            self._sums[slab] = Sums.zeros(slab)
        return self._sums[slab]

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

    def clear(self) -> None:
        """Start the next step."""
        self.samples, self.weight = 0, 0.0
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
        self.sums.of(self.slab).add({self.block: grads}, self.noise, rows=rows)


def state_dtype(p: Tensor) -> torch.dtype:
    """The posterior's precision for a parameter: never half."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def zero() -> Tensor:
    """A count of updates; whole numbers, because single precision would stop counting at 2²⁴."""
    return torch.zeros((), dtype=torch.int64)
