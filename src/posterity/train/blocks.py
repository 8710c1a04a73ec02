"""Diagonal blocks of a posterior that is trained by gradient: drawing, and gradients.

A drawn weight is w = μ + σ(ρ) · eps, so the gradients of a loss at drawn weights are E[g] for μ and
E[g·eps] · σ'(ρ) for ρ: the sums that rules collect. If layers draw outputs for each example instead
(:mod:`posterity.layers.estimators`), the gradients with respect to μ and σ are the same sums. Either way a
:class:`Diagonal` group is a few flat buffers, with one KL and one chain from σ to ρ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posterity.flat import ALIGN, Layout
from posterity.fusing import fusible, is_fusing
from posterity.noise import Domain, Noise
from posterity.optim.state import FlatGroup, zero
from posterity.optim.statistics import Accumulator, Sink, Sums
from posterity.optim.step import Draw
from posterity.posterior import Density, DiagonalGaussian, Leaf
from posterity.posterior.divergence import formula_of, leaf_kl
from posterity.torch_private import foreach_add, foreach_add_, foreach_mul
from posterity.train.learner import Drawn

_MASKS = ("keep", "held")


class StepValues(NamedTuple):
    """The values that all blocks share in one step.

    Attributes:
        sums: Gradients, and their products with the noise.
        share: Factor of the KL in the loss.
        scale: Final factor of the sums, or None.
        at: Address of the noise.
        several: Whether several processes add up their sums.
    """

    sums: Accumulator
    share: Any
    scale: Any
    at: Mapping[str, Any]
    several: bool = False

    def scaled(self, weight: float) -> Any:
        """Factor of the gradients of samples with a weight, or None."""
        if self.scale is None:
            return None if weight == 1 else weight
        return weight * self.scale

    def of_kl(self, divergence: Tensor) -> Tensor:
        """The gradient of the loss with respect to a KL."""
        if isinstance(self.share, Tensor):
            return self.share.to(divergence.dtype)
        return torch.full_like(divergence, self.share)


class Whole(NamedTuple):
    """All weights of a group as one leaf.

    Attributes:
        leaf: The leaf.
        counted: The same without the padding between blocks.
        own: Its μ and ρ, which get gradients.
    """

    leaf: DiagonalGaussian
    counted: DiagonalGaussian
    own: list[Tensor]


class Diagonal(ABC):
    """Diagonal leaves of one device, dtype, prior and estimator, in flat buffers.

    Args:
        number: The group's number.
        leaves: By block.
        params: The module's parameters that the blocks replace.
        priors: Of the blocks: one and the same density, or diagonal Gaussians.
        at_draw: Whether a KL that has no formula is estimated at the weights that the loss sees; else at a
            draw of its own.

    Attributes:
        flat: The means, with ρ and masks as their state.
        divergence: The KL, if already known.
    """

    def __init__(
        self,
        number: int,
        leaves: Mapping[str, DiagonalGaussian],
        params: Sequence[Tensor],
        priors: Sequence[Leaf | Density],
        at_draw: bool,
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
        estimated = formula_of(DiagonalGaussian, type(self.prior))[0] is None
        self.at_draw, self._own_draw = estimated and at_draw, estimated and not at_draw
        self.clear()

    def _padding_apart(self) -> Tensor:
        inside = torch.zeros(self.flat.layout.size, dtype=torch.bool, device=self.flat.device)
        for view in self.flat.layout.views(inside):
            view.fill_(True)
        return inside

    @torch.no_grad()
    def follow(self) -> None:
        """Copy Gaussian priors again if their tensors have changed."""
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

    def _alone(self) -> bool:
        """Whether the tensors of a single leaf can be used directly instead of flat copies."""
        one, align = self.leaves[0], self._inside is not None
        return len(self.leaves) == 1 and not align and one.loc.is_contiguous() and one.raw.is_contiguous()

    def _flat(self) -> tuple[Tensor, Tensor]:
        """Means and ρ of all weights."""
        if self._alone():
            one = self.leaves[0]
            return one.loc.detach().view(-1), one.raw.detach().view(-1)
        return self.flat.weights, self.flat.state["raw"]

    @torch.enable_grad()
    def leaf(self) -> Whole:
        """All weights as one leaf."""
        own = [each.detach().requires_grad_() for each in self._flat()]
        keep, held = (self.flat.state.get(name) for name in _MASKS)
        # Kernels for draws or the KL compute stds themselves.
        masks: dict[str, Any] = {"held": held, "std": None if is_fusing() else softplus(own[1])}
        leaf = DiagonalGaussian.made_of(*own, keep=keep, **masks)
        counted = self._counted()
        return Whole(
            leaf, leaf if counted is keep else DiagonalGaussian.made_of(*own, keep=counted, **masks), own
        )

    def _counted(self) -> Tensor | None:
        """Mask of the weights that the KL counts: those not pruned, without the padding between blocks."""
        return self.flat.state.get("keep", self._inside)

    def _moments(self, rows: range) -> tuple[Tensor, Tensor]:
        """Means and stds of all weights at the first sample of a step."""
        if rows.start == 0:
            alone = self._alone()
            if not alone:
                self.flat.read()
            if not alone or any(name in self.flat.state for name in _MASKS):
                self.flat.load()
            self._whole = self.leaf()
        leaf = self._whole.leaf
        return leaf.mean().detach(), leaf.std().detach()

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
        """Add gradients to the sums, and those of a KL that is estimated at drawn weights.

        Args:
            grads: As the step has them.
            source: What :meth:`draw` returned.
            rows: Numbers of the samples.
            weight: Weight of each sample in the sums.
            step: The values that the samples were drawn with.
        """

    def unsummed(self) -> Sequence[Tensor]:
        """Gradients of the loss outside the sums: a captured step must check them separately."""
        return ()

    @torch.no_grad()
    def finish(self, step: StepValues) -> Sequence[Tensor]:
        """Set the gradients of μ and ρ; returns them, in as few tensors as possible."""
        seeds, whole = self._seeds(step), self._whole
        with torch.enable_grad():
            if self.at_draw:
                ends: Sequence[Tensor] = [whole.leaf.mean(), whole.leaf.std()]
            else:
                if self._own_draw:
                    noise = self._noise_of_kl(step.at)
                    ends = _with_estimate(whole.leaf, whole.counted, self.prior, noise)
                else:
                    ends = _with_divergence(whole.leaf, whole.counted, self.prior)
                seeds.append(step.of_kl(ends[-1]))
                self.divergence = ends[-1].detach()
        found = torch.autograd.grad(ends, whole.own, seeds)
        if self._partial is not None:
            found = foreach_add(list(found), self._partial)
        loc, raw = map(self.flat.layout.views, found)
        for i, block in enumerate(self.leaves):
            give(block.loc, loc[i])
            give(block.raw, raw[i])
        return found if self._inside is None else [*loc, *raw]  # padding holds anything

    def complete(self, step: StepValues) -> Sums:
        """Gradients of the loss with respect to means and stds, also for blocks that it did not reach."""
        mine = step.sums.of(self.flat, None)
        mine.clean()
        mine.used = set(range(len(self.params)))
        return mine

    def _seeds(self, step: StepValues) -> list[Tensor]:
        """The same, as they are carried on."""
        both = self.complete(step).both
        if step.scale is not None:
            both.mul_(step.scale)
        return list(both.to(self.flat.dtype))

    def _noise_of_kl(self, at: Mapping[str, Any]) -> Tensor:
        """Standard normals ``[1, size]`` behind the draw that ``Variational.kl()`` would take."""
        own = {"seed": at["seed"], "step": at["step"] + 1, "domain": Domain.SAMPLE}
        where: dict[str, Any] = {"device": self.flat.device, "dtype": self.flat.dtype}
        return Noise(range(1), self._kl_layout, **own, **where).values[None]

    @cached_property
    def _kl_layout(self) -> Layout:
        layout = self.flat.layout
        align = ALIGN if self._inside is not None else 1
        return Layout([f"kl|{name}" for name in layout.names], layout.shapes, align=align)


@final
class DrawnDiagonal(Diagonal):
    """Leaves whose weights are drawn once for each sample and shared by all examples."""

    @torch.no_grad()
    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> Draw:
        """Draw weights of some samples, with the noise addresses that each leaf alone would have."""
        flat, moments = self.flat, self._moments(rows)
        where: dict[str, Any] = {"device": flat.device, "dtype": flat.dtype, "room": flat.room}
        noise = Noise(rows, flat.layout, weight=weight, **where, **step.at)
        source = Draw(flat, noise, noise.perturb(*moments))
        views = flat.layout.views(source.flat) if len(rows) == 1 else source.weights()
        for i, (p, block, own) in enumerate(zip(self.params, self.leaves, views, strict=True)):
            drawn.weights[p] = own.requires_grad_(block.loc.requires_grad or block.raw.requires_grad)
            if own.requires_grad:
                drawn.sinks[own] = Sink(step.sums, flat, noise, i)
        return source

    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: Draw,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Add gradients at drawn weights to the sums, and those of a KL that is estimated there."""
        own = {i: grad for i, p in enumerate(self.params) if (grad := grads.get(p)) is not None}
        if self.at_draw:
            of_kl = dict(enumerate(self.flat.layout.stacked(self._estimate(source, step), len(rows))))
            if own:
                parts = [of_kl[i] for i in own]
                foreach_add_(
                    parts, [grad.view_as(part) for grad, part in zip(own.values(), parts, strict=True)]
                )
            own = of_kl
        mine = step.sums.of(self.flat, source.noise)
        if own:
            mine.add(own, source.noise)

    def _estimate(self, drawn: Draw, step: StepValues) -> Tensor:
        """The gradients of the KL at drawn weights in these, end to end; those in μ and ρ are kept."""
        rows, layout, flat = len(drawn.noise.samples), self.flat.layout, self._flat()
        masks = self._counted(), self.flat.state.get("held")
        # A single sample's blocks have the layout of the leaves; with several, the samples of each block are
        # adjacent.
        spans = self._spans if rows > 1 else [(slice(0, layout.size), layout.size)]
        places = [slice(rows * span.start, rows * span.start + rows * size) for span, size in spans]
        grads = []
        for (span, size), place in zip(spans, places, strict=True):
            # The compiler reads the .grad of its inputs, which only graph leaves have.
            own = [each[span].detach().requires_grad_() for each in flat]
            weights = drawn.flat[place].view(rows, size).detach().requires_grad_()
            keep, held = (None if mask is None else mask[span] for mask in masks)
            with torch.enable_grad():
                std = None if is_fusing() else softplus(own[1])
                leaf = DiagonalGaussian.made_of(*own, keep=keep, held=held, std=std)
                total = _at_weights(leaf, self.prior, weights)
            grads.append(torch.autograd.grad(total, [weights, *own], step.of_kl(total)))
            self.divergence = self.divergence + drawn.noise.weight * total.detach()
        by_weight, *by_own = zip(*grads, strict=True)
        found = [_end_to_end(each, [span for span, _ in spans], flat[0]) for each in by_own]
        if drawn.noise.weight != 1:
            found = list(foreach_mul(found, drawn.noise.weight))
        self._partial = found if self._partial is None else list(foreach_add(self._partial, found))
        at_weights = _end_to_end(by_weight, places, drawn.flat)
        # The sums are multiplied by the scale at the end.
        return at_weights if step.scale is None else at_weights / step.scale

    @cached_property
    def _spans(self) -> list[tuple[slice, int]]:
        """Where blocks lie, and their sizes."""
        return [(self.flat.layout.span(i), size) for i, size in enumerate(self.flat.layout.sizes)]


# Functions that a captured step runs as one kernel.


@fusible
def _with_divergence(
    leaf: DiagonalGaussian, counted: DiagonalGaussian, prior: Leaf | Density
) -> tuple[Tensor, Tensor, Tensor]:
    return leaf.mean(), leaf.std(), leaf_kl(counted, prior, None, dict)


@fusible
def _with_estimate(
    leaf: DiagonalGaussian, counted: DiagonalGaussian, prior: Leaf | Density, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return leaf.mean(), leaf.std(), leaf_kl(counted, prior, counted.draw(noise), dict)


@fusible
def _at_weights(leaf: DiagonalGaussian, prior: Leaf | Density, weights: Tensor) -> Tensor:
    """The sum over samples of what estimates the KL."""
    return leaf_kl(leaf, prior, weights, dict) * len(weights)


def _end_to_end(parts: Sequence[Tensor], places: Sequence[slice], like: Tensor) -> Tensor:
    """Parts of a flat tensor placed in one of the given size, with zeros between them."""
    if parts[0].numel() == like.numel():
        return parts[0].reshape(like.shape)
    whole = torch.zeros_like(like)
    for part, place in zip(parts, places, strict=True):
        whole[place] = part.flatten()
    return whole


@torch.no_grad()
def give(p: Tensor, grad: Tensor) -> None:
    """Set the gradient of a parameter that requires one, in its own layout."""
    if p.requires_grad:
        p.grad = grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def _masks(leaf: Leaf) -> dict[str, Tensor]:
    masks = ((name, getattr(leaf, name)) for name in _MASKS)
    return {name: mask for name, mask in masks if mask is not None}
