"""Blocks of any family in a training step: drawn through autograd's graph, which gives their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from posterity.noise import Domain
from posterity.posterior import Density, Leaf
from posterity.posterior.divergence import formula_of, leaf_kl
from posterity.posterior.end_to_end import EndToEnd
from posterity.train.blocks import StepValues, give
from posterity.train.learner import Drawn


class Other(ABC):
    """Leaves of any family, joined.

    Args:
        blocks: The leaves; a single one may hold several tensors.
        params: The module's parameters that each replaces.
        prior: The prior of all.

    Attributes:
        divergence: The KL, if already known.
        grads: Gradients of the leaves' own parameters.
    """

    def __init__(self, blocks: EndToEnd, params: Sequence[Sequence[Tensor]], prior: Leaf | Density) -> None:
        self.blocks, self.by_leaf, self.prior = blocks, list(params), prior
        self.params = list(chain.from_iterable(params))
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
        """Add the gradients of the leaves' own parameters, of the loss and of the KL."""

    def finish(self, step: StepValues) -> Sequence[Tensor]:
        """Set the gradients of the leaves' parameters; returns them, in as few tensors as possible."""
        given = set[int]()
        for p, grad in self.grads.items():
            # Autograd returns the same tensor for parameters that are added up; clipping would shrink it
            # twice.
            give(p, grad.clone() if grad.data_ptr() in given else grad)
            given.add(grad.data_ptr())
        return self.unsummed()

    def unsummed(self) -> Sequence[Tensor]:
        """All gradients, since autograd computes them; the whole tensor if they are parts of one."""
        wholes = [grad if grad._base is None else grad._base for grad in self.grads.values()]
        return list({id(each): each for each in wholes}.values())

    def own(self) -> list[Tensor]:
        """The leaves' parameters that require gradients."""
        return [p for leaf in self.blocks.leaves.values() for p in leaf.parameters() if p.requires_grad]

    def _noise_of_kl(self, leaf: Leaf, step: StepValues) -> Mapping[str, Tensor]:
        """Standard normals behind a draw of the KL's own."""
        # As Variational.kl() has it, after the draw.
        at: dict[str, Any] = {"seed": step.at["seed"], "step": step.at["step"] + 1, "domain": Domain.SAMPLE}
        return self.blocks.noise(leaf, range(1), prefix="kl|", **at)

    def _kl(
        self, leaf: Leaf, weights: Tensor | None, part: float, draw: Callable[[], Mapping[str, Tensor]]
    ) -> Tensor:
        """The KL of the joined leaf, at drawn weights or at its own draw; ``part`` of it counts here."""
        value = leaf_kl(leaf, self.prior, weights, draw)
        self.divergence = self.divergence + part * value.detach()
        return value

    def _add(self, ends: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Propagate gradients of some results to the leaves' parameters, and add them."""
        own = self.own()
        if not ends or not own:
            return
        found = torch.autograd.grad(list(ends), own, list(seeds), allow_unused=True)
        for p, grad in zip(own, found, strict=True):
            self._keep(p, grad)

    def _keep(self, p: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self.grads[p] = self.grads[p] + grad if p in self.grads else grad


class _Source(NamedTuple):
    """The joined leaf, its weights ``[samples, *shape]``, and the normals of the KL's own draw."""

    leaf: Leaf
    weights: Tensor
    own: Mapping[str, Tensor]


@final
class DrawnOther(Other):
    """Leaves whose weights are drawn once for each sample and shared by all examples.

    Args:
        blocks: The leaves.
        params: Of the module.
        prior: Of all.
        at_draw: Whether a KL that has no formula is estimated at the weights that the loss sees; else at a
            draw of its own.
    """

    def __init__(
        self, blocks: EndToEnd, params: Sequence[Sequence[Tensor]], prior: Leaf | Density, at_draw: bool
    ) -> None:
        super().__init__(blocks, params, prior)
        formula, draws = formula_of(type(next(iter(blocks.leaves.values()))), type(prior))
        self._at_draw = at_draw and formula is None
        self._own_draw = draws or (formula is None and not at_draw)

    @torch.enable_grad()
    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> _Source:
        """Weights of some samples."""
        leaf = self.blocks.leaf()
        noise: Mapping[str, Tensor] = self.blocks.noise(leaf, rows, **step.at)
        own: Mapping[str, Tensor] = {}
        if self._own_draw and rows.start == 0:
            noise, own = leaf.prepared([noise, self._noise_of_kl(leaf, step)])
        weights = leaf.draw(noise)
        by_leaf = self.blocks.apart(weights.detach().reshape(len(weights), leaf.shape.numel()))
        for each, params, values in zip(
            self.blocks.leaves.values(), self.by_leaf, by_leaf.values(), strict=True
        ):
            for p, part in zip(params, each.split(values), strict=True):
                one = part[0] if len(part) == 1 else part
                drawn.weights[p] = one.detach().requires_grad_(weights.requires_grad)
        return _Source(leaf, weights, own)

    @torch.enable_grad()
    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: _Source,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Propagate gradients at drawn weights to the leaves' parameters."""
        leaf, weights, noise = source
        ends, seeds = list[Tensor](), list[Tensor]()
        if weights.requires_grad and any(grads.get(p) is not None for p in self.params):
            found, scaled = self._end_to_end(grads, weights), step.scaled(weight)
            ends.append(weights)
            seeds.append(found if scaled is None else found * scaled)
        if self._at_draw or rows.start == 0:
            part_of = len(rows) * weight if self._at_draw else 1.0
            value = self._kl(leaf, weights if self._at_draw else None, part_of, lambda: noise)
            if value.requires_grad:
                ends.append(value)
                seeds.append(step.of_kl(value) if part_of == 1 else step.of_kl(value) * part_of)
        self._add(ends, seeds)

    def _end_to_end(self, grads: Mapping[Tensor, Tensor | None], weights: Tensor) -> Tensor:
        """Gradients at drawn weights, as these lie."""
        rows, found = len(weights), []
        for own, params in zip(self.blocks.leaves.values(), self.by_leaf, strict=True):
            parts = []
            for p, shape in zip(params, own.shapes, strict=True):
                grad = grads.get(p)
                parts.append(weights.new_zeros(rows, *shape) if grad is None else grad.reshape(rows, *shape))
            found.append(own.join(parts).reshape(rows, own.shape.numel()))
        return torch.cat(found, 1).view(weights.shape)
