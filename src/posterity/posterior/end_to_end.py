"""Leaves of one family joined end to end as one leaf, so that one operation handles all of their weights.

For a posterior of a hundred tensors, draws and KLs would take a dozen launches for each tensor.
:class:`EndToEnd` concatenates the leaves' parameters, with one autograd node for each kind, and splits drawn
weights in one more. In between is a leaf like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast, final

import torch
from torch import Tensor

from posterity.flat import Layout, apart
from posterity.noise import Domain, Noise
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.leaf import Leaf
from posterity.posterior.priors import Density, IsotropicGaussian
from posterity.torch_private import lasts

L = TypeVar("L", bound=Leaf)
# Values that a CPU handles at once: more would be evicted from its cache before the next operation.
_IN_CACHE = 1 << 18
# The tensors from which a group's masks are made, and their versions.
_Masks = tuple[Sequence[Tensor | None], list[int]]


class Joined(NamedTuple):
    """Blocks of a posterior as one leaf.

    Attributes:
        blocks: The posterior's blocks.
        leaf: A leaf of all their weights; its gradients reach the blocks' leaves.
        weights: One draw of the leaf, ``[1, *shape]``, if there is one.
    """

    blocks: EndToEnd
    leaf: Leaf
    weights: Tensor | None = None


@final
class EndToEnd:
    """Leaves of one family, kind, device and dtype, joined end to end.

    Args:
        leaves: Leaves by block, each of a single tensor; or any one leaf, which is used unchanged.

    Attributes:
        signs: Shapes of the random signs that layers got for the leaves, by name.

    Example:
        >>> leaves = {name: DiagonalGaussian(torch.zeros(3), 0.5, trainable=True) for name in "ab"}
        >>> blocks = EndToEnd(leaves)
        >>> blocks.leaf().std().shape, list(blocks.apart(torch.zeros(6)))
        (torch.Size([6]), ['a', 'b'])
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self.leaves = dict(leaves)
        first = next(iter(self.leaves.values()))
        self._first, self._family = first, type(first)
        self._layout = Layout(list(leaves), [leaf.shape for leaf in leaves.values()], align=1)
        self.signs: dict[str, torch.Size] = {}
        self._noise: dict[tuple[str, str], Layout] = {}
        self._masks: dict[str, tuple[_Masks, Tensor | None]] = {}
        self._prior: tuple[list[object], list[float], DiagonalGaussian] | None = None

    def leaf(self) -> Leaf:
        """One leaf of all the current weights."""
        if len(self.leaves) == 1:
            return self._first
        masks = {name: self._mask(name) for name in ("keep", "held")}
        return self._family.end_to_end(list(self.leaves.values()), self._layout, masks)

    def noise(
        self,
        leaf: Leaf,
        samples: range,
        *,
        seed: int,
        step: int,
        domain: Domain,
        prefix: str = "",
        but: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Standard normals for the joined leaf; the noise addresses are those of the separate leaves.

        Args:
            leaf: The joined leaf.
            samples: The sample numbers.
            seed: Seed of the noise.
            step: Step of the noise.
            domain: Domain of the noise.
            prefix: Prefix of the blocks' names in addresses.
            but: Names of normals to leave out.
        """
        if len(self.leaves) == 1:
            (block,) = self.leaves
            at: dict[str, Any] = {"seed": seed, "step": step, "domain": domain}
            return leaf.noise(samples, block=f"{prefix}{block}", but=but, **at)
        found: dict[str, Tensor] = {}
        where: dict[str, Any] = {"device": leaf.device, "dtype": leaf.dtype}
        for name, shape in leaf.noise_shapes.items():
            if name in but:
                continue
            noise = Noise(
                samples, self._layout_of(prefix, name), seed=seed, step=step, domain=domain, **where
            )
            rows = len(samples)
            values = noise.values if rows == 1 else torch.cat([x.reshape(rows, -1) for x in noise.blocks], 1)
            found[name] = values.view(rows, *shape)
        return found

    def draw(self, *, seed: int, step: int, domain: Domain) -> Joined:
        """Draw the weights of the first sample."""
        leaf = self.leaf()
        noise = self.noise(leaf, range(1), seed=seed, step=step, domain=domain)
        return Joined(self, leaf, leaf.draw(noise))

    def apart(self, values: Tensor) -> dict[str, Tensor]:
        """One value for each weight, ``[..., size]``, by block; leading dimensions stay."""
        if len(self.leaves) == 1:
            return {name: values.view(*values.shape[:-1], *leaf.shape) for name, leaf in self.leaves.items()}
        return dict(zip(self.leaves, apart(self._layout, values), strict=True))

    def _layout_of(self, prefix: str, name: str) -> Layout:
        """The layout of the noise with this name, over all blocks."""
        found = self._noise.get((prefix, name))
        if found is None:
            blocks = [f"{prefix}{block}|{name}" if name else f"{prefix}{block}" for block in self.leaves]
            shapes = [leaf.noise_shapes[name] for leaf in self.leaves.values()]
            found = self._noise[prefix, name] = Layout(blocks, shapes, align=1)
        return found

    def prior(self, priors: Sequence[Leaf | Density], leaf: Leaf) -> DiagonalGaussian | Density | None:
        """The blocks' priors as one prior of the joined leaf; None if they cannot be joined."""
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
        parts: list[object] = [*priors, *chain.from_iterable(map(_tensors, fixed))]
        numbers = list(chain.from_iterable(map(_numbers, fixed)))
        known = self._prior
        if known is None or not _same(known[0], parts) or known[1] != numbers:
            known = parts, numbers, self._side_by_side(fixed, leaf.shape)
            self._prior = known if lasts() else None
        return known[2]

    @torch.no_grad()
    def _side_by_side(self, priors: Sequence[Any], shape: torch.Size) -> DiagonalGaussian:
        means, stds, places = [], [], self.leaves.values()
        for prior, leaf in zip(priors, places, strict=True):
            if isinstance(prior, IsotropicGaussian):
                means.append(leaf.loc.new_full((leaf.loc.numel(),), prior.mean))
                stds.append(leaf.loc.new_full((leaf.loc.numel(),), prior.std))
            else:
                means.append(prior.mean().reshape(-1).to(leaf.loc))
                stds.append(prior.filled_std().reshape(-1).to(leaf.loc))
        return DiagonalGaussian(torch.cat(means).view(shape), torch.cat(stds).view(shape))

    def _mask(self, name: str) -> Tensor | None:
        """A mask of all weights, rebuilt only if a leaf's mask changed; None if no leaf has one."""
        own = [cast("Tensor | None", getattr(leaf, name)) for leaf in self.leaves.values()]
        masks = [mask for mask in own if mask is not None]
        if not masks:
            return None
        lasting = not any(map(Tensor.is_inference, masks))  # others may change, and have no versions
        versions = [mask._version for mask in masks] if lasting else []
        known = self._masks.get(name) if lasting else None
        if known is None or not _same(known[0][0], own) or known[0][1] != versions:
            fill = name == "keep"
            parts = [
                leaf.loc.new_full((leaf.loc.numel(),), fill, dtype=torch.bool)
                if mask is None
                else mask.reshape(-1)
                for leaf, mask in zip(self.leaves.values(), own, strict=True)
            ]
            known = (own, versions), torch.cat(parts)
            if lasting and lasts():
                self._masks[name] = known
        return known[1]


def end_to_end(leaves: Mapping[str, Leaf]) -> list[EndToEnd]:
    """Groups of two or more leaves of one family, kind, device and dtype.

    Example:
        >>> leaves = {name: DiagonalGaussian(torch.zeros(3), 0.5, trainable=True) for name in "ab"}
        >>> [list(each.leaves) for each in end_to_end(leaves)]
        [['a', 'b']]
    """
    of_a_kind = {name: leaf for name, leaf in leaves.items() if leaf.kind is not None}
    groups = alike(of_a_kind, lambda name: (type(leaves[name]), leaves[name].kind))
    return [EndToEnd(some) for some in groups if len(some) > 1]


def alike(leaves: Mapping[str, L], kind: Callable[[str], object]) -> list[dict[str, L]]:
    """Groups of leaves of one device, dtype and kind, on a CPU no larger than its cache.

    Args:
        leaves: Leaves by block.
        kind: The kind of a block, by its name.
    """
    groups: list[dict[str, L]] = []
    latest: dict[object, tuple[dict[str, L], int]] = {}
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


def _numbers(prior: object) -> list[float]:
    """Numbers that change with a prior."""
    if isinstance(prior, IsotropicGaussian):
        return [prior.mean, prior.std]
    return [each._version for each in _tensors(prior)]


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
