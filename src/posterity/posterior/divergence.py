"""``kl(q, p)``: a sum over weights, closed form where there is one, Monte-Carlo otherwise.

Pairs of families register their formula with :func:`register_kl`, as torch.distributions does. A new leaf or
prior without one falls back to Monte-Carlo, which needs nothing but log-densities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor

from posterity import noise
from posterity.posterior.base import Leaf, Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.eigen import EigenGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.matrix import MatrixGaussian, solved
from posterity.posterior.priors import ByName, Density, IsotropicGaussian

Formula = Callable[[Any, Any], Tensor]
F = TypeVar("F", bound=Formula)
_FORMULAS: dict[tuple[type, type], Formula] = {}


def register_kl(q_type: type, p_type: type) -> Callable[[F], F]:
    """Register a closed form of KL(q ‖ p) for a pair of families; it returns the sum over weights.

    Example:
        >>> class Flat(Density):
        ...     def log_density(self, value): return torch.zeros_like(value)
        >>> @register_kl(DiagonalGaussian, Flat)
        ... def _(q, p): return q.total(-torch.log(q.std()))
        >>> kl(DiagonalGaussian(torch.zeros(2), 1.0), Flat())
        tensor(0.)
    """

    def add(formula: F) -> F:
        _FORMULAS[q_type, p_type] = formula
        return formula

    return add


def kl(
    q: Posterior | Leaf,
    p: Posterior | Leaf | Density | ByName,
    *,
    weights: Mapping[str, Tensor] | None = None,
    samples: int = 1,
) -> Tensor:
    """KL(q ‖ p), summed over all weights of q; differentiable.

    It is taken block by block. Where q holds several tensors as one block, p may hold the same block, or each
    of the tensors by itself.

    Args:
        q: A posterior, or the leaf of one block.
        p: Another posterior, or a prior.
        weights: Draws of q (as ``q.sample`` gives them) on which blocks without a closed form are estimated;
            those of the likelihood term may be used again. Without them ``samples`` fresh ones are drawn.
        samples: How many, then.

    Example:
        >>> kl(DiagonalGaussian(torch.zeros(3), 1.0), IsotropicGaussian(1.0))
        tensor(0.)
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    if isinstance(q, Leaf):
        return _leaf_kl(q, cast("Leaf | Density", p), None, samples)
    if not isinstance(q, Factorised):
        raise TypeError(f"kl() has no rule for a {type(q).__name__}; pass a Factorised posterior or a leaf")
    drawn: Mapping[str, Tensor | None] = dict.fromkeys(q.blocks) if weights is None else q.join(weights)
    terms = [
        _leaf_kl(leaf, _prior(cast(Any, p), name, q.tensors[name], leaf), drawn[name], samples)
        for name, leaf in q.blocks.items()
    ]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _prior(p: Any, name: str, tensors: Sequence[str], q: Leaf) -> Leaf | Density:
    """What p says of one of q's blocks, in the block's shape."""
    if q.shapes == (q.shape,):
        return cast("Leaf | Density", p.block(name))
    held = p.block(name) if isinstance(p, Factorised) and name in p.tensors else None
    if held is not None and not isinstance(held, DiagonalGaussian):
        return held
    parts = [p.block(tensor) for tensor in tensors]
    if isinstance(parts[0], Density) and all(part is parts[0] for part in parts):
        return parts[0]
    if not all(isinstance(part, DiagonalGaussian | IsotropicGaussian) for part in parts):
        return _Beside(parts, q)
    leaves = [_as_diagonal(part, shape, q) for part, shape in zip(parts, q.shapes, strict=True)]
    mean, std, keep = (
        q.join(values) for values in zip(*((x.mean(), x.std(), x.kept) for x in leaves), strict=True)
    )
    return DiagonalGaussian(mean, std, keep=keep)


def _as_diagonal(p: DiagonalGaussian | IsotropicGaussian, shape: torch.Size, like: Leaf) -> DiagonalGaussian:
    if isinstance(p, IsotropicGaussian):
        return DiagonalGaussian(torch.full(shape, p.mean, dtype=like.dtype, device=like.device), p.std)
    if p.shape != shape:
        raise ValueError(f"q has shape {tuple(shape)} and p {tuple(p.shape)}: they must be equal")
    return p


@final
class _Beside(Density):
    """Densities of a block's tensors, side by side as the tensors are."""

    def __init__(self, parts: Sequence[Density], block: Leaf) -> None:
        if not all(isinstance(part, Density) for part in parts):
            names = " and ".join(type(part).__name__ for part in parts)
            raise TypeError(
                f"kl() to {names} of the tensors of one block: give the prior the same blocks as q"
            )
        self.parts, self.whole = parts, block

    def log_density(self, value: Tensor) -> Tensor:
        """Log-density of each weight, by its own tensor's."""
        tensors = self.whole.split(value)
        return self.whole.join([p.log_density(each) for p, each in zip(self.parts, tensors, strict=True)])


def _leaf_kl(q: Leaf, p: Leaf | Density, weights: Tensor | None, samples: int) -> Tensor:
    if isinstance(p, Leaf):
        if p.shape != q.shape:
            raise ValueError(f"q has shape {tuple(q.shape)} and p {tuple(p.shape)}: they must be equal")
        if p.keep is not None and bool((q.kept & ~p.keep).any()):
            raise ValueError("the prior has pruned weights that q still holds: prune q at the same places")
    formula = _formula(type(q), type(p))
    if formula is not None:
        return formula(q, p)
    if not isinstance(p, Leaf | Density):
        raise TypeError(
            f"kl() to a {type(p).__name__} has neither a closed form nor a log-density: give it one with "
            "register_kl(), or derive it from Density"
        )
    if isinstance(p, Leaf) and not torch.equal(q.kept, p.kept):
        raise ValueError("an estimated KL needs q and p pruned at the same places: prune both alike")
    if weights is None:
        seed, step = noise.fresh()
        weights = q.draw(
            noise.normal(
                range(samples),
                q.shape,
                seed=seed,
                step=step,
                block="kl",
                device=q.device,
                dtype=q.dtype,
            )
        )
    log_p = p.log_prob(weights) if isinstance(p, Leaf) else q.total(p.log_density(weights))
    return (q.log_prob(weights) - log_p).mean()


def _formula(q_type: type, p_type: type) -> Formula | None:
    """The registered formula of the nearest pair of ancestors."""
    for q_base in q_type.__mro__:
        for p_base in p_type.__mro__:
            if (q_base, p_base) in _FORMULAS:
                return _FORMULAS[q_base, p_base]
    return None


def _gaussian_kl(q: DiagonalGaussian, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """½ Σ (σq²/σp² + (μq−μp)²/σp² − 1 − log σq²/σp²), over the kept weights."""
    ratio = q.filled_std() / std
    shift = (q.mean() - mean) / std
    return 0.5 * q.total(ratio * ratio + shift * shift - 1.0 - 2.0 * torch.log(ratio))


@register_kl(DiagonalGaussian, DiagonalGaussian)
def _(q: DiagonalGaussian, p: DiagonalGaussian) -> Tensor:
    return _gaussian_kl(q, p.mean(), p.filled_std())


@register_kl(DiagonalGaussian, IsotropicGaussian)
def _(q: DiagonalGaussian, p: IsotropicGaussian) -> Tensor:
    return _gaussian_kl(q, p.mean, p.std)


@register_kl(MatrixGaussian, DiagonalGaussian)
@register_kl(MatrixGaussian, IsotropicGaussian)
@register_kl(EigenGaussian, DiagonalGaussian)
@register_kl(EigenGaussian, IsotropicGaussian)
def _(q: MatrixGaussian | EigenGaussian, p: DiagonalGaussian | IsotropicGaussian) -> Tensor:
    # E_q[log p] sees q's marginals alone where p is independent from weight to weight.
    return q.correlation() + kl(q.marginals(), p)


@register_kl(MatrixGaussian, MatrixGaussian)
def _(q: MatrixGaussian, p: MatrixGaussian) -> Tensor:
    """½ (tr(Σp⁻¹ Σq) + ‖Lp⁻¹ (μq−μp)‖² − n) + log|Lp| − log|Lq|, of the kept weights.

    The trace of a Kronecker product is the product of the factors' traces.
    """
    if q.keep is not None:
        p = p.pruned(q.keep)
    pairs = list(zip(p.factors(), q.factors(), strict=True))
    # In double precision: trace and n are large, and nearly equal where q has barely moved.
    trace = torch.stack([solved(lp.double(), lq.double(), 0).square().sum() for lp, lq in pairs]).prod()
    excess = (trace - math.prod(len(lq) for _, lq in pairs)).to(q.dtype)
    shift = p.whitened(q.mean() - p.mean()).square().sum()
    return 0.5 * (excess + shift) + p.log_volume() - q.log_volume()


@register_kl(EigenGaussian, EigenGaussian)
def _(q: EigenGaussian, p: EigenGaussian) -> Tensor:
    """The same, where tr(Σp⁻¹ Σq) is Σ over both grids of (Rᵀp Rq)² (Cᵀp Cq)² scale_q² / scale_p²."""
    if q.keep is not None:
        p = p.pruned(q.keep)
    if q.thinned:
        trace = solved(p.cholesky().double(), q.cholesky().double(), 0).square().sum()
    else:
        turn_rows, turn_columns = (
            (ours.double().mT @ theirs.double()).square()
            for ours, theirs in ((p.rows, q.rows), (p.columns, q.columns))
        )
        seen = turn_rows @ q.scale.double().square() @ turn_columns.mT
        trace = (seen / p.scale.double().square()).sum()
    excess = (trace - int(q.kept.sum())).to(q.dtype)
    shift = p.whitened(q.mean() - p.mean()).square().sum()
    return 0.5 * (excess + shift) + p.log_volume() - q.log_volume()
