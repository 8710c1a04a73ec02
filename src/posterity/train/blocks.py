"""Blocks of a posterior that is trained by gradient, as a step draws them and moves on from their gradients.

A drawn weight is w = μ + σ(ρ) · eps, so the gradients of a loss at drawn weights are E[g] for μ and
E[g·eps] · σ'(ρ) for ρ: the sums that rules collect. :class:`Diagonal` leaves, end to end, need no more than
these. Any :class:`Other` leaf is drawn through autograd's graph, and gets the gradients of its own parameters
from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast, final

import torch
from torch import Tensor

from posterity.flat import ALIGN
from posterity.noise import Domain, Noise
from posterity.optim.state import FlatGroup, zero
from posterity.optim.statistics import Accumulator, Sink
from posterity.optim.step import Draw
from posterity.posterior import Density, DiagonalGaussian, Leaf
from posterity.posterior.divergence import formula_of, leaf_kl

_MASKS = ("keep", "held")


@final
class Diagonal:
    """Diagonal leaves of one device, type and prior, end to end.

    Args:
        number: Of the group.
        leaves: By block.
        params: The module's parameters that the blocks take the place of.
        priors: Of the blocks: one and the same density, or diagonal Gaussians.

    Attributes:
        flat: The means, with ρ and masks as their state.
        run: How a function of leaves and tensors is run: as it is, or as one kernel.
    """

    def __init__(
        self,
        number: int,
        leaves: Mapping[str, DiagonalGaussian],
        params: Sequence[Tensor],
        priors: Sequence[Leaf | Density],
    ) -> None:
        self.leaves, self.params = list(leaves.values()), list(params)
        states = {
            leaf.loc: {"step": zero(), "raw": leaf.raw.detach(), **_masks(leaf)} for leaf in self.leaves
        }
        first = self.leaves[0]
        align = 1 if first.device.type == "cpu" else ALIGN
        means = [leaf.loc for leaf in self.leaves]
        self.flat = FlatGroup(number, list(leaves), means, states, align=align)
        self._inside = self._padding_apart() if sum(self.flat.layout.sizes) < self.flat.layout.size else None
        self._priors, self._versions = priors, list[int]()
        self.prior = priors[0]
        if isinstance(self.prior, DiagonalGaussian):
            self.prior = DiagonalGaussian(torch.zeros_like(self.flat.weights), 1.0)
            self.follow()
        self.estimated = formula_of(DiagonalGaussian, type(self.prior))[0] is None
        self.run: Callable[[Any], Callable[..., Any]] = as_it_is
        self.clear()

    def _padding_apart(self) -> Tensor:
        inside = torch.zeros(self.flat.layout.size, dtype=torch.bool, device=self.flat.device)
        for view in self.flat.layout.views(inside):
            view.fill_(True)
        return inside

    @torch.no_grad()
    def follow(self) -> None:
        """Take the priors as they are now, if they are Gaussians that somebody has changed."""
        if not isinstance(self.prior, DiagonalGaussian):
            return
        priors = cast("Sequence[DiagonalGaussian]", self._priors)
        versions = [each._version for prior in priors for each in (prior.loc, prior.raw)]
        if versions != self._versions:
            self._versions, layout = versions, self.flat.layout
            for mean, std, prior in zip(
                layout.views(self.prior.loc), layout.views(self.prior.raw), priors, strict=True
            ):
                mean.copy_(prior.mean())
                std.copy_(prior.filled_std())

    def clear(self) -> None:
        """Start the next step."""
        self._partial: list[Tensor] | None = None  # gradients of μ and ρ that are not by way of weights
        self.divergence: Tensor | float = 0.0

    def leaf(self) -> tuple[DiagonalGaussian, DiagonalGaussian, list[Tensor]]:
        """All weights as one leaf, the same without the padding, and its μ and ρ, which gradients reach."""
        own = [each.detach().requires_grad_() for each in (self.flat.weights, self.flat.state["raw"])]
        keep, held = (self.flat.state.get(name) for name in _MASKS)
        leaf = DiagonalGaussian.made_of(*own, keep=keep, held=held)
        if keep is not None or self._inside is None:
            return leaf, leaf, own
        return leaf, DiagonalGaussian.made_of(*own, keep=self._inside, held=held), own

    @torch.no_grad()
    def draw(self, rows: range, weight: float, at: Mapping[str, Any]) -> Draw:
        """Weights of some samples, by the addresses that each leaf alone would have."""
        flat = self.flat
        if rows.start == 0:
            flat.read()
            flat.load()
        noise = Noise(
            rows, flat.layout, weight=weight, device=flat.device, dtype=flat.dtype, room=flat.room, **at
        )
        leaf, _, _ = self.leaf()
        return Draw(flat, noise, noise.perturb(leaf.mean(), leaf.std()))

    def hand_out(self, drawn: Draw, sums: Accumulator, weights: dict[Tensor, Tensor], sinks: Any) -> None:
        """Put drawn weights, which want gradients if μ or ρ does, in the place of parameters."""
        one = len(drawn.noise.samples) == 1
        views = drawn.group.layout.views(drawn.flat) if one else drawn.weights()
        for i, (p, leaf, own) in enumerate(zip(self.params, self.leaves, views, strict=True)):
            weights[p] = own.requires_grad_(leaf.loc.requires_grad or leaf.raw.requires_grad)
            if own.requires_grad:
                sinks[own] = Sink(sums, drawn.group, drawn.noise, i)

    def absorb(
        self, grads: Mapping[Tensor, Tensor | None], drawn: Draw, sums: Accumulator, share: Any, scale: Any
    ) -> None:
        """Add gradients at drawn weights to the sums, and those of a KL that is estimated there.

        Args:
            grads: By the module's parameter.
            drawn: The weights.
            sums: Of all groups.
            share: What the KL counts for in the loss.
            scale: What the sums will be multiplied by; None if they will not be.
        """
        own = {i: grad for i, p in enumerate(self.params) if (grad := grads.get(p)) is not None}
        mine = sums.of(self.flat, drawn.noise)
        if own:
            mine.add(own, drawn.noise)
        if self.estimated:
            by_weight = self._estimate(drawn, share)
            if scale is not None:
                by_weight = {i: grad / scale for i, grad in by_weight.items()}
            mine.add(by_weight, drawn.noise)

    def _estimate(self, drawn: Draw, share: Any) -> dict[int, Tensor]:
        """The gradients of the KL at drawn weights in these, by block; those in μ and ρ are kept."""
        rows, layout = len(drawn.noise.samples), self.flat.layout
        estimate = self.run(_at_weights)
        with torch.enable_grad():
            _, leaf, own = self.leaf()
            weights = drawn.flat.detach().requires_grad_()
            if rows == 1:
                total = estimate(leaf, self.prior, weights[None])
            else:
                places = [
                    slice(rows * span.start, rows * span.start + rows * size) for span, size in self._spans
                ]
                values = [
                    estimate(_part(leaf, span), self.prior, weights[place].view(rows, size))
                    for (span, size), place in zip(self._spans, places, strict=True)
                ]
                total = torch.stack(values).sum()
        by_weight, *by_own = torch.autograd.grad(total, [weights, *own])
        found = [drawn.noise.weight * share * grad for grad in by_own]
        before = self._partial or [torch.zeros_like(grad) for grad in found]
        self._partial = [a + b for a, b in zip(before, found, strict=True)]
        self.divergence = self.divergence + drawn.noise.weight * total.detach()
        return dict(enumerate(layout.stacked(by_weight * share, rows)))

    @cached_property
    def _spans(self) -> list[tuple[slice, int]]:
        """Where blocks lie, and their sizes."""
        return [(self.flat.layout.span(i), size) for i, size in enumerate(self.flat.layout.sizes)]

    @torch.no_grad()
    def finish(self, sums: Accumulator, share: Any, scale: Any) -> None:
        """Give μ and ρ their gradients."""
        mine = sums.of(self.flat, None)
        for i in set(range(len(self.params))) - mine.used:  # which may hold anything
            mine.both[:, self.flat.layout.span(i)] = 0.0
        if scale is not None:
            mine.both.mul_(scale)
        seeds = list(mine.both.to(self.flat.dtype))
        with torch.enable_grad():
            leaf, counted, own = self.leaf()
            if self.estimated:
                ends = [leaf.mean(), leaf.std()]
            else:
                ends = self.run(_with_divergence)(leaf, counted, self.prior)
                seeds.append(ends[-1].new_ones(()) * share)
                self.divergence = ends[-1].detach()
        found = torch.autograd.grad(ends, own, seeds)
        if self._partial is not None:
            found = tuple(a + b for a, b in zip(found, self._partial, strict=True))
        loc, raw = map(self.flat.layout.views, found)
        for i, block in enumerate(self.leaves):
            give(block.loc, loc[i])
            give(block.raw, raw[i])


# What a captured step runs as one kernel.


def _with_divergence(
    leaf: DiagonalGaussian, counted: DiagonalGaussian, prior: Leaf | Density
) -> tuple[Tensor, Tensor, Tensor]:
    return leaf.mean(), leaf.std(), leaf_kl(counted, prior, None, dict)


def _at_weights(leaf: DiagonalGaussian, prior: Leaf | Density, weights: Tensor) -> Tensor:
    """The sum over samples of what estimates the KL."""
    return leaf_kl(leaf, prior, weights, dict) * len(weights)


def as_it_is(function: Any) -> Any:
    """A function as it is run in an eager step."""
    return function


def _part(leaf: DiagonalGaussian, span: slice) -> DiagonalGaussian:
    keep, held = (None if mask is None else mask[span] for mask in (leaf.keep, leaf.held))
    return DiagonalGaussian.made_of(leaf.loc[span], leaf.raw[span], keep=keep, held=held)


@final
class Other:
    """A leaf of any family, drawn through autograd's graph.

    Args:
        name: Of the block.
        leaf: Its leaf.
        params: The module's parameters that it takes the place of.
        prior: Its prior.
    """

    def __init__(self, name: str, leaf: Leaf, params: Sequence[Tensor], prior: Leaf | Density) -> None:
        self.name, self.leaf, self.params, self.prior = name, leaf, list(params), prior
        self._estimated = formula_of(type(leaf), type(prior))[0] is None
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self._grads: dict[Tensor, Tensor] = {}
        self.divergence: Tensor | float = 0.0

    @torch.enable_grad()
    def draw(self, rows: range, at: Mapping[str, Any]) -> Tensor:
        """Weights of some samples."""
        return self.leaf.draw(self.leaf.noise(rows, block=self.name, **at))

    def hand_out(self, drawn: Tensor, weights: dict[Tensor, Tensor]) -> None:
        """Put drawn weights in the place of parameters."""
        for p, part in zip(self.params, self.leaf.split(drawn), strict=True):
            own = part.detach()
            weights[p] = (own[0] if len(own) == 1 else own).requires_grad_(part.requires_grad)

    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        drawn: Tensor,
        rows: range,
        weight: float,
        share: Any,
        scale: Any,
        at: Mapping[str, Any],
    ) -> None:
        """Add the gradients of the leaf's own parameters: the loss's by drawn weights, and the KL's."""
        ends, seeds = list[Tensor](), list[Tensor]()
        with torch.enable_grad():
            for p, part in zip(self.params, self.leaf.split(drawn), strict=True):
                grad = grads.get(p)
                if grad is not None and part.requires_grad:
                    ends.append(part)
                    seeds.append(grad.reshape(part.shape) * (weight if scale is None else weight * scale))
            if self._estimated or rows.start == 0:
                noise: Callable[[], Mapping[str, Tensor]] = partial(
                    self.leaf.noise,
                    range(1),
                    block=f"kl|{self.name}",
                    seed=at["seed"],
                    step=at["step"] + 1,  # as Variational.kl() has it, after the draw
                    domain=Domain.SAMPLE,
                )
                value = leaf_kl(self.leaf, self.prior, drawn, noise)
                part_of = len(rows) * weight if self._estimated else 1.0
                self.divergence = self.divergence + part_of * value.detach()
                if value.requires_grad:
                    ends.append(value)
                    seeds.append(value.new_ones(()) * (part_of * share))
        own = [p for p in self.leaf.parameters() if p.requires_grad]
        if not ends or not own:
            return
        for p, grad in zip(own, torch.autograd.grad(ends, own, seeds, allow_unused=True), strict=True):
            if grad is not None:
                self._grads[p] = self._grads[p] + grad if p in self._grads else grad

    def finish(self) -> None:
        """Give the leaf's parameters their gradients."""
        for p, grad in self._grads.items():
            give(p, grad)


@torch.no_grad()
def give(p: Tensor, grad: Tensor) -> None:
    """Let a parameter that wants one have a gradient, laid out as it is itself."""
    if p.requires_grad:
        p.grad = grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def _masks(leaf: Leaf) -> dict[str, Tensor]:
    masks = ((name, getattr(leaf, name)) for name in _MASKS)
    return {name: mask for name, mask in masks if mask is not None}
