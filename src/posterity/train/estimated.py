"""Blocks of a training step whose layers have estimators: they get placeholders, which receive the gradients.

Estimators in layers are in :mod:`posterity.layers.estimators`. Diagonal leaves give means and stds in flat
buffers, like those that are drawn; values from leaves of other families are part of their own graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from posterity.estimators import together
from posterity.layers import Estimator
from posterity.posterior import Density, DiagonalGaussian, Leaf
from posterity.posterior.end_to_end import EndToEnd
from posterity.torch_private import foreach_add_, foreach_copy_, foreach_norm
from posterity.train.blocks import Diagonal, StepValues
from posterity.train.families import Other
from posterity.train.learner import Drawn


@final
class EstimatedDiagonal(Diagonal):
    """Leaves whose layers get means and stds, and draw their outputs for each example.

    Args:
        number: Number of the group.
        leaves: Leaves by block.
        params: Parameters of the module, in the same order.
        priors: Priors of the blocks.
        estimator: ``"local"`` or ``"flipout"``.
    """

    def __init__(
        self,
        number: int,
        leaves: Mapping[str, DiagonalGaussian],
        params: Sequence[Tensor],
        priors: Sequence[Leaf | Density],
        estimator: Estimator,
    ) -> None:
        super().__init__(number, leaves, params, priors, at_draw=False)
        self.estimator = estimator
        self._own = [leaf.loc for leaf in self.leaves], [leaf.raw for leaf in self.leaves]
        self._given = {
            name: DiagonalGaussian.made_of(
                leaf.loc.detach(), leaf.raw.detach(), keep=None, held=None, stores_raw=False
            )
            for name, leaf in leaves.items()
        }
        self.given = together(self._given, dict.fromkeys(leaves, estimator), lambda _: DiagonalGaussian)

    def names(self) -> list[str]:
        """Of the blocks."""
        return list(self._given)

    def clear(self) -> None:
        """Start the next step."""
        super().clear()
        self._direct: list[Tensor] | None = None

    def unsummed(self) -> Sequence[Tensor]:
        """The gradients of a step's only sample, if used directly."""
        return self._direct or ()

    def _seeds(self, step: StepValues) -> list[Tensor]:
        """Gradients of the loss with respect to means and stds."""
        return super()._seeds(step) if self._direct is None else self._direct

    @torch.no_grad()
    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> None:
        """Pass means and stds to the layers, and take gradients with respect to them."""
        moments = zip(*map(self.flat.layout.views, self._moments(rows)), strict=True)
        for (mean, std), own, given in zip(moments, self.leaves, self._given.values(), strict=True):
            given.loc, given.raw = drawn.leaves[own.loc], drawn.leaves[own.raw] = mean, std
            mean.requires_grad_(own.loc.requires_grad)
            std.requires_grad_(own.raw.requires_grad)

    @torch.no_grad()
    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: None,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Add gradients of means and stds to the sums; each is already a sum over samples."""
        by_moment = [[grads.get(p) for p in own] for own in self._own]
        if weight == 1 and step.scale is None and not step.several and self._alone():
            (mean,), (std,) = by_moment
            if mean is not None and std is not None:  # they are the sums
                self._direct = [mean.reshape(-1), std.reshape(-1)]
                return
        mine, fresh = step.sums.of(self.flat, None, overwritten=True), rows.start == 0
        written: list[Tensor] = []
        for found, flat in zip(by_moment, mine.both, strict=True):
            views = self.flat.layout.views(flat)
            there = {i: grad.to(flat.dtype) for i, grad in enumerate(found) if grad is not None}
            for i in set(range(len(views))) - there.keys() if fresh else ():
                views[i].zero_()
            if not there:  # all are frozen, or unused
                continue
            into, given = [views[i] for i in there], list(there.values())
            if fresh and weight == 1:
                foreach_copy_(into, given)
            elif fresh:
                for view, grad in zip(into, given, strict=True):
                    torch.mul(grad, weight, out=view)
            else:
                foreach_add_(into, given, alpha=weight)
            written += into
        mine.used = set(range(len(self.leaves)))
        if mine.both.is_cuda and written:
            mine.poison += 0.0 * torch.stack(foreach_norm(written)).sum()


@final
class EstimatedOther(Other):
    """A leaf whose layers draw their outputs for each example, through the leaf's own graph.

    Args:
        blocks: The leaf.
        params: The module's parameters that it replaces.
        prior: Its prior.
        estimator: ``"local"`` or ``"flipout"``.
    """

    def __init__(
        self,
        blocks: EndToEnd,
        params: Sequence[Sequence[Tensor]],
        prior: Leaf | Density,
        estimator: Estimator,
    ) -> None:
        super().__init__(blocks, params, prior)
        self.estimator, self.given = estimator, [blocks]

    def names(self) -> list[str]:
        """Of the block."""
        return list(self.blocks.leaves)

    def draw(self, rows: range, weight: float, step: StepValues, drawn: Drawn) -> None:
        """Take gradients with respect to the leaf's parameters."""
        drawn.leaves.update((p, p) for p in self.own())

    @torch.enable_grad()
    def absorb(
        self,
        grads: Mapping[Tensor, Tensor | None],
        source: None,
        rows: range,
        weight: float,
        step: StepValues,
    ) -> None:
        """Store gradients, each of which is already a sum over samples."""
        scaled = step.scaled(weight)
        for p in self.own():
            grad = grads.get(p)
            self._keep(p, grad if grad is None or scaled is None else grad * scaled)
        if rows.start == 0:
            leaf = self.blocks.leaf()
            value = self._kl(leaf, None, 1.0, partial(self._noise_of_kl, leaf, step))
            if value.requires_grad:
                self._add([value], [step.of_kl(value)])
