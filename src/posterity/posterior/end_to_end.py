"""Diagonal leaves end to end as one leaf, so that one operation serves all weights of a posterior.

A posterior of a hundred tensors would take a dozen launches for each of them to draw and to take the KL of.
:class:`EndToEnd` lays their means and their ρ end to end, in one node of autograd's graph each, and takes
drawn weights apart in one more. What lies between is a :class:`DiagonalGaussian` like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from posterity.flat import Layout
from posterity.noise import Domain, Noise
from posterity.posterior.base import Leaf
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.priors import Density, IsotropicGaussian

# Numbers that a CPU works on at once: of more, its cache would hold none when the next operation comes.
_IN_CACHE = 1 << 18
# What all masks of a group are made of, and the versions of these.
_Masks = tuple[Sequence[Tensor | None], list[int]]


class Joined(NamedTuple):
    """Blocks of a posterior as one leaf, and one draw of it.

    Attributes:
        blocks: Those of the posterior.
        leaf: All of their weights; gradients that reach it reach them.
        weights: Drawn ones, end to end.
    """

    blocks: EndToEnd
    leaf: DiagonalGaussian
    weights: Tensor

    def apart(self) -> dict[str, Tensor]:
        """The weights by block."""
        return self.blocks.apart(self.weights)


@final
class EndToEnd:
    """Trainable diagonal leaves of one device and type, end to end.

    Args:
        leaves: By block.

    Example:
        >>> leaves = {name: DiagonalGaussian(torch.zeros(3), 0.5, trainable=True) for name in "ab"}
        >>> blocks = EndToEnd(leaves)
        >>> blocks.leaf().std().shape, list(blocks.apart(torch.zeros(6)))
        (torch.Size([6]), ['a', 'b'])
    """

    def __init__(self, leaves: Mapping[str, DiagonalGaussian]) -> None:
        self.leaves = dict(leaves)
        self._layout = Layout(list(leaves), [leaf.shape for leaf in leaves.values()], align=1)
        self._masks: dict[str, tuple[_Masks, Tensor | None]] = {}
        self._prior: tuple[list[Leaf | Density], list[int], DiagonalGaussian] | None = None

    def leaf(self) -> DiagonalGaussian:
        """All of the weights, as they are now, as one leaf."""
        loc, raw = (
            cast("Tensor", _Concatenate.apply(self._layout, *parts))  # type: ignore[no-untyped-call]
            for parts in zip(*((leaf.loc, leaf.raw) for leaf in self.leaves.values()), strict=True)
        )
        return DiagonalGaussian.made_of(loc, raw, keep=self._mask("keep"), held=self._mask("held"))

    def draw(self, *, seed: int, step: int, domain: Domain) -> Joined:
        """Weights of the first sample, by the address that each leaf alone would have."""
        leaf = self.leaf()
        at: dict[str, Any] = {"seed": seed, "step": step, "domain": domain}
        noise = Noise(range(1), self._layout, **at, device=leaf.device, dtype=leaf.dtype)
        return Joined(self, leaf, leaf.draw(noise.values[None])[0])

    def apart(self, flat: Tensor) -> dict[str, Tensor]:
        """What lies end to end, by block."""
        parts: tuple[Tensor, ...] = _Apart.apply(self._layout, flat)  # type: ignore[no-untyped-call]
        return dict(zip(self.leaves, parts, strict=True))

    def prior(self, priors: Sequence[Leaf | Density]) -> DiagonalGaussian | Density | None:
        """The blocks' priors as one of all weights; None if there is no one such prior."""
        first = priors[0]
        if isinstance(first, Density) and all(prior is first for prior in priors):
            return first
        fixed = [
            prior
            for prior in priors
            if type(prior) is IsotropicGaussian
            or (type(prior) is DiagonalGaussian and not prior.loc.requires_grad | prior.raw.requires_grad)
        ]
        if len(fixed) < len(priors):
            return None
        versions = [each._version for prior in fixed for each in _tensors(prior)]
        if self._prior is None or not _same(self._prior[0], priors) or self._prior[1] != versions:
            self._prior = list(priors), versions, self._side_by_side(fixed)
        return self._prior[2]

    @torch.no_grad()
    def _side_by_side(self, priors: Sequence[Any]) -> DiagonalGaussian:
        means, stds, places = [], [], self.leaves.values()
        for prior, leaf in zip(priors, places, strict=True):
            if isinstance(prior, IsotropicGaussian):
                means.append(leaf.loc.new_full((leaf.loc.numel(),), prior.mean))
                stds.append(leaf.loc.new_full((leaf.loc.numel(),), prior.std))
            else:
                means.append(prior.mean().reshape(-1).to(leaf.loc))
                stds.append(prior.filled_std().reshape(-1).to(leaf.loc))
        return DiagonalGaussian(torch.cat(means), torch.cat(stds))

    def _mask(self, name: str) -> Tensor | None:
        """A mask of all weights, made anew only where a leaf has another; None if no leaf has one."""
        own = [cast("Tensor | None", getattr(leaf, name)) for leaf in self.leaves.values()]
        if all(mask is None for mask in own):
            return None
        versions = [0 if mask is None else mask._version for mask in own]
        known = self._masks.get(name)
        if known is None or not _same(known[0][0], own) or known[0][1] != versions:
            fill = name == "keep"
            parts = [
                leaf.loc.new_full((leaf.loc.numel(),), fill, dtype=torch.bool)
                if mask is None
                else mask.reshape(-1)
                for leaf, mask in zip(self.leaves.values(), own, strict=True)
            ]
            known = self._masks[name] = (own, versions), torch.cat(parts)
        return known[1]


def end_to_end(leaves: Mapping[str, Leaf]) -> list[EndToEnd]:
    """The trainable diagonal ones of some leaves, by device and type; none that would be alone.

    Example:
        >>> leaves = {name: DiagonalGaussian(torch.zeros(3), 0.5, trainable=True) for name in "ab"}
        >>> [list(each.leaves) for each in end_to_end(leaves)]
        [['a', 'b']]
    """
    diagonal = {
        name: leaf for name, leaf in leaves.items() if type(leaf) is DiagonalGaussian and leaf.stores_raw
    }
    return [EndToEnd(some) for some in alike(diagonal, lambda _: None) if len(some) > 1]


def alike(
    leaves: Mapping[str, DiagonalGaussian], kind: Callable[[str], object]
) -> list[dict[str, DiagonalGaussian]]:
    """Leaves that may be one: of one device, type and kind, and on a CPU no more than its cache holds.

    Args:
        leaves: By block.
        kind: Of a block, by its name.
    """
    groups: list[dict[str, DiagonalGaussian]] = []
    latest: dict[object, tuple[dict[str, DiagonalGaussian], int]] = {}
    for name, leaf in leaves.items():
        key, size = (leaf.device, leaf.dtype, kind(name)), leaf.loc.numel()
        group, before = latest.get(key, ({}, 0))
        if not group or (leaf.device.type == "cpu" and before + size > _IN_CACHE):
            group, before = {}, 0
            groups.append(group)
        group[name] = leaf
        latest[key] = group, before + size
    return groups


def _tensors(prior: object) -> list[Tensor]:
    if not isinstance(prior, Leaf):
        return []
    return [each for each in (prior.loc, cast("DiagonalGaussian", prior).raw, prior.keep) if each is not None]


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


@final
class _Concatenate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(layout: Layout, *tensors: Tensor) -> Tensor:
        return torch.cat([each.reshape(-1) for each in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layout.views(grad.contiguous())


@final
class _Apart(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(layout: Layout, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(layout.views(flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.layout = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, torch.cat([grad.reshape(-1) for grad in grads])
