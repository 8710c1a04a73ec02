"""Matching a prior's blocks to a posterior's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor

from posterity.names import refuse_unmatched
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.leaf import Leaf
from posterity.posterior.priors import ByName, Density, IsotropicGaussian

Prior: TypeAlias = Leaf | Density


def matched(q: Factorised, p: Any) -> Iterator[tuple[str, Leaf, Prior]]:
    """Every block of q by name, with its prior from p, in the block's shape.

    Single tensors of q that p holds as one block are joined, under the name of p's block.

    Example:
        >>> q = Factorised({"w": DiagonalGaussian(torch.zeros(2), 0.1)})
        >>> [name for name, _, _ in matched(q, IsotropicGaussian())]
        ['w']
    """
    if not isinstance(p, Density) and not hasattr(p, "block"):
        raise TypeError(f"a {type(p).__name__} is not a prior: pass a posterior, a Density or ByName of them")
    if isinstance(p, ByName):
        refuse_unmatched(p.priors, chain.from_iterable(q.tensors.values()))
    done: set[str] = set()
    for name, leaf in q.blocks.items():
        source = _source(p, q.tensors[name][0])
        block = None if leaf.joined else _block_around(source, name)
        if block is None:
            yield name, leaf, prior_of(p, name, q.tensors[name], leaf)
        elif name not in done:
            done |= {*cast(Factorised, source).tensors[block]}
            yield block, *_together(q, p, cast(Factorised, source), block)


def sources_of(p: Any) -> Iterator[object]:
    """The densities and leaves that a prior currently consists of.

    Example:
        >>> list(sources_of(ByName({"*": IsotropicGaussian()})))[0].std
        1.0
    """
    if isinstance(p, ByName):
        for each in p.priors.values():
            yield from sources_of(each)
    elif isinstance(p, Factorised):
        yield from p.blocks.values()
    else:
        yield p


def _source(p: Any, tensor: str) -> Any:
    """A tensor's prior: p itself, or one of ByName's."""
    return _source(p.source(tensor), tensor) if isinstance(p, ByName) else p


def _block_around(source: Any, tensor: str) -> str | None:
    """The block of several tensors, or of a flattened one, in which a prior holds a tensor."""
    if not isinstance(source, Factorised):
        return None
    blocks = (block for block, tensors in source.tensors.items() if tensor in tensors)
    return next((block for block in blocks if source.block(block).joined), None)


def _together(q: Factorised, p: Any, source: Factorised, block: str) -> tuple[Leaf, Leaf]:
    """Single tensors of q joined as one block, with the prior's block of them."""
    theirs, names = source.block(block), source.tensors[block]
    parts = []
    for name, shape in zip(names, theirs.shapes, strict=True):
        if name not in q.blocks or _source(p, name) is not source:
            raise ValueError(
                f"the prior holds {block!r} as one block, of which q or this prior lacks {name!r}: take a "
                "prior of single tensors, such as that of laplace.fit(structure='diagonal')"
            )
        part = q.block(name)
        if not isinstance(part, DiagonalGaussian):
            raise TypeError(
                f"kl() of a {type(part).__name__} ({name!r}) to a {type(theirs).__name__} ({block!r}) has no "
                "formula: take a prior of single tensors, such as that of laplace.fit(structure='diagonal')"
            )
        _same_shape(name, part.shape, shape)
        parts.append(part)
    rows = ((part.mean(), part.filled_std(), part.varying) for part in parts)
    mean, std, varying = (theirs.join(values) for values in zip(*rows, strict=True))
    whole = all(part.whole for part in parts)
    leaf = DiagonalGaussian(mean, std, keep=None if whole else varying)
    leaf.loc, leaf.raw = mean, std  # with their graphs, which the constructor drops
    return leaf, theirs


def prior_of(p: Any, name: str, tensors: Sequence[str], q: Leaf) -> Prior:
    """The prior of one of q's blocks, in the block's shape."""
    sources = [_source(p, tensor) for tensor in tensors]
    source = sources[0]
    if q.joined and all(each is source for each in sources):
        if isinstance(source, Density):
            return source
        if isinstance(source, Factorised) and name in source.tensors and source.block(name).joined:
            return source.block(name)
    parts = [
        _part(*each, shape) for each, shape in zip(zip(sources, tensors, strict=True), q.shapes, strict=True)
    ]
    if not q.joined:
        return parts[0]
    if not all(isinstance(part, DiagonalGaussian | IsotropicGaussian) for part in parts):
        return _Beside(parts, q)
    leaves = [_as_diagonal(part, shape, q) for part, shape in zip(parts, q.shapes, strict=True)]
    mean, std, keep = (
        q.join(values) for values in zip(*((x.mean(), x.std(), x.varying) for x in leaves), strict=True)
    )
    return DiagonalGaussian(mean, std, keep=keep)


def _part(source: Any, tensor: str, shape: torch.Size) -> Prior:
    """The part of one prior for one tensor."""
    if isinstance(source, Density):
        return source
    try:
        found = source.block(tensor)
    except KeyError:
        raise KeyError(
            f"the prior has no block {tensor!r}, which q has: give it one, by posterity.ByName"
        ) from None
    if isinstance(found, Leaf):
        _same_shape(tensor, shape, found.shapes[0])  # of a block of its own
    return cast(Prior, found)


def _same_shape(name: str, ours: torch.Size, theirs: torch.Size) -> None:
    if ours != theirs:
        raise ValueError(
            f"{name!r} has shape {tuple(ours)} in q and {tuple(theirs)} in the prior: they must be equal"
        )


def _as_diagonal(p: Prior, shape: torch.Size, like: Leaf) -> DiagonalGaussian:
    if isinstance(p, IsotropicGaussian):
        return DiagonalGaussian(torch.full(shape, p.mean, dtype=like.dtype, device=like.device), p.std)
    return cast(DiagonalGaussian, p)


@final
class _Beside(Density):
    """Densities of a block's tensors, side by side as the tensors are."""

    def __init__(self, parts: Sequence[Prior], block: Leaf) -> None:
        if not all(isinstance(part, Density) for part in parts):
            names = " and ".join(type(part).__name__ for part in parts)
            raise TypeError(
                f"kl() to {names} of the tensors of one block: give the prior the same blocks as q"
            )
        self.parts, self.whole = cast("Sequence[Density]", parts), block

    def log_density(self, value: Tensor) -> Tensor:
        """Log-density of each weight, by its own tensor's."""
        tensors = self.whole.split(value)
        return self.whole.join([p.log_density(each) for p, each in zip(self.parts, tensors, strict=True)])
