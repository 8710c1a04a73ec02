"""Blocks of any family in a training step: drawn through autograd's graph, which gives their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from posterity.noise import Domain
from posterity.posterior import Density, Leaf
from posterity.posterior.divergence import formula_of, leaf_kl
from posterity.train.blocks import StepValues, give
from posterity.train.learner import Drawn


class Other(ABC):
    """A leaf of any family.

    Args:
        name: Name of the block.
        leaf: Its leaf.
        params: The module's parameters that it takes the place of.
        prior: Its prior.

    Attributes:
        divergence: The KL, as far as it is known.
        grads: Gradients of the leaf's own parameters.
    """

    def __init__(self, name: str, leaf: Leaf, params: Sequence[Tensor], prior: Leaf | Density) -> None:
        self.name, self.leaf, self.params, self.prior = name, leaf, list(params), prior
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self.grads: dict[Tensor, Tensor] = {}
        self.divergence: Tensor | float = 0.0

    @abstractmethod
    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> Any:
        """Draw what some samples get for the parameters; returns what :meth:`absorb` needs as its source."""

    @abstractmethod
    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: Any,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Add the gradients of the leaf's own parameters, of the loss and of the KL."""

    def finish(self, step: StepValues) -> None:
        """Give the leaf's parameters their gradients."""
        for p, grad in self.grads.items():
            give(p, grad)

    def unsummed(self) -> Sequence[Tensor]:
        """All gradients, since autograd makes them."""
        return list(self.grads.values())

    def own(self) -> list[Tensor]:
        """The leaf's parameters that want gradients."""
        return [p for p in self.leaf.parameters() if p.requires_grad]

    def _kl(self, weights: Tensor | None, part: float, step: StepValues) -> Tensor:
        """The KL, at drawn weights or at a draw of its own; ``part`` of it counts here."""
        noise: Callable[[], Mapping[str, Tensor]] = partial(
            self.leaf.noise,
            range(1),
            block=f"kl|{self.name}",
            seed=step.at["seed"],
            step=step.at["step"] + 1,  # as Variational.kl() has it, after the draw
            domain=Domain.SAMPLE,
        )
        value = leaf_kl(self.leaf, self.prior, weights, noise)
        self.divergence = self.divergence + part * value.detach()
        return value

    def _add(self, ends: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Carry gradients in some results on to the leaf's parameters, and add them."""
        own = self.own()
        if not ends or not own:
            return
        found = torch.autograd.grad(list(ends), own, list(seeds), allow_unused=True)
        for p, grad in zip(own, found, strict=True):
            self._keep(p, grad)

    def _keep(self, p: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self.grads[p] = self.grads[p] + grad if p in self.grads else grad


@final
class DrawnOther(Other):
    """A leaf whose weights are drawn once for each sample and shared by all examples.

    Args:
        name: Name of the block.
        leaf: Its leaf.
        params: Of the module.
        prior: Its prior.
        at_draw: Whether a KL that has no formula is estimated at the weights that the loss sees; else at a
            draw of its own.
    """

    def __init__(
        self, name: str, leaf: Leaf, params: Sequence[Tensor], prior: Leaf | Density, at_draw: bool
    ) -> None:
        super().__init__(name, leaf, params, prior)
        self._at_draw = at_draw and formula_of(type(leaf), type(prior))[0] is None

    @torch.enable_grad()
    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> Tensor:
        """Weights of some samples."""
        source = self.leaf.draw(self.leaf.noise(rows, block=self.name, **step.at))
        for p, part in zip(self.params, self.leaf.split(source), strict=True):
            own = part.detach()
            drawn.weights[p] = (own[0] if len(own) == 1 else own).requires_grad_(part.requires_grad)
        return source

    @torch.enable_grad()
    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: Tensor,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Carry gradients at drawn weights on to the leaf's parameters."""
        ends, seeds = list[Tensor](), list[Tensor]()
        weight_now = weight if step.scale is None else weight * step.scale
        for p, part in zip(self.params, self.leaf.split(source), strict=True):
            grad = grads.get(p)
            if grad is not None and part.requires_grad:
                ends.append(part)
                seeds.append(grad.reshape(part.shape) * weight_now)
        if self._at_draw or rows.start == 0:
            part_of = len(rows) * weight if self._at_draw else 1.0
            value = self._kl(source if self._at_draw else None, part_of, step)
            if value.requires_grad:
                ends.append(value)
                seeds.append(value.new_ones(()) * (part_of * step.share))
        self._add(ends, seeds)
