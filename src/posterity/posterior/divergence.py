"""``kl(q, p)``: a sum over weights, closed form where there is one, Monte-Carlo otherwise.

Pairs of families register their formula with :func:`register_kl`, as torch.distributions does. A new leaf or
prior without one falls back to Monte-Carlo, which needs nothing but log-densities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from posterity import noise
from posterity.posterior.base import Leaf, Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.factorised import Factorised
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
    if isinstance(q, Leaf):
        return _leaf_kl(q, cast("Leaf | Density", p), None, samples)
    if not isinstance(q, Factorised):
        raise TypeError(f"kl() has no rule for a {type(q).__name__}; pass a Factorised posterior or a leaf")
    terms = [
        _leaf_kl(leaf, cast(Any, p).block(name), None if weights is None else weights[name], samples)
        for name, leaf in q.blocks.items()
    ]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _leaf_kl(q: Leaf, p: Leaf | Density, weights: Tensor | None, samples: int) -> Tensor:
    if isinstance(p, Leaf):
        if p.shape != q.shape:
            raise ValueError(f"q has shape {tuple(q.shape)} and p {tuple(p.shape)}: they must be equal")
        held = torch.ones((), dtype=torch.bool, device=q.device) if q.keep is None else q.keep
        if p.keep is not None and bool((held & ~p.keep).any()):
            raise ValueError("the prior has pruned weights that q still holds: prune q at the same places")
    formula = _formula(type(q), type(p))
    if formula is not None:
        return formula(q, p)
    if not isinstance(p, Leaf | Density):
        raise TypeError(
            f"kl() to a {type(p).__name__} has neither a closed form nor a log-density: give it one with "
            "register_kl(), or derive it from Density"
        )
    if isinstance(p, Leaf) and not _same_mask(q, p):
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


def _same_mask(q: Leaf, p: Leaf) -> bool:
    if q.keep is None or p.keep is None:
        return q.keep is p.keep
    return torch.equal(q.keep, p.keep)


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
