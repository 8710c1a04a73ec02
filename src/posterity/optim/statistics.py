"""Monte-Carlo means over weight samples: computed once, for every method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.noise import Noise


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


class Accumulator:
    """Sums of g and g·eps since the last step, in the precision of the posterior's state."""

    def __init__(self) -> None:
        self.samples = 0
        self._grad: dict[Tensor, Tensor] = {}
        self._grad_noise: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(self, p: Tensor, grads: Tensor, noise: Noise | None) -> None:
        """Add gradients ``[k, ...]`` that were taken under the given noise.

        A deterministic parameter has no noise, and one gradient ``[1, ...]`` that is a sum over samples.
        """
        grads = grads.to(state_dtype(p))
        if noise is None:
            grad = grads[0].clone()
        else:
            grad, product = noise.moments(grads)
            self._grad_noise[p] = self._grad_noise[p] + product if p in self._grad_noise else product
        self._grad[p] = self._grad[p] + grad if p in self._grad else grad

    def publish(self) -> None:
        """Put E[g] into ``p.grad``, where clipping, hooks and logging expect it."""
        for p, grad in self._grad.items():
            p.grad = (grad / self.samples).to(p.dtype)

    def grad_noise(self, p: Tensor) -> Tensor:
        """E[g·eps] of a sampled parameter."""
        return self._grad_noise[p] / self.samples

    def sums(self) -> Iterator[Tensor]:
        """Everything that must be finite."""
        yield from self._grad_noise.values()

    def __contains__(self, p: Tensor) -> bool:
        return p in self._grad

    def clear(self) -> None:
        """Start the next step."""
        self.samples = 0
        self._grad.clear()
        self._grad_noise.clear()


def state_dtype(p: Tensor) -> torch.dtype:
    """The posterior's precision for a parameter: never half."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def zero() -> Tensor:
    """A count of updates; whole numbers, because single precision would stop counting at 2²⁴."""
    return torch.zeros((), dtype=torch.int64)
