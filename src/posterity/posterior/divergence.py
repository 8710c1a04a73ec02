"""``kl(q, p)``: a sum over weights, by formula where there is one, by Monte Carlo otherwise.

Pairs of families register their formula with :func:`register_kl`, as torch.distributions does; a formula may
ask for its own draw. A pair without a formula falls back to Monte Carlo, which needs log-densities only. The
library's own formulas are in :mod:`posterity.posterior.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from posterity import noise
from posterity.arguments import TENSORS, WHOLE, instance, takes
from posterity.posterior.base import Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.end_to_end import Joined
from posterity.posterior.factorised import Factorised
from posterity.posterior.leaf import Leaf
from posterity.posterior.matching import matched
from posterity.posterior.priors import ByName, Density

Formula: TypeAlias = Callable[..., Tensor]
F = TypeVar("F", bound=Formula)
# By pair of families: the formula, and whether it needs a draw.
_FORMULAS: dict[tuple[type, type], tuple[Formula, bool]] = {}


def register_kl(q_type: type, p_type: type, *, needs_draw: bool = False) -> Callable[[F], F]:
    """Register a formula for KL(q ‖ p) of a pair of families; it returns the sum over weights.

    Args:
        q_type: Family of q.
        p_type: Family of p, or a prior.
        needs_draw: Whether to call it as ``formula(q, p, noise)``, for a KL, or a bound on one, that is
            estimated; ``noise`` has ``kl``'s ``samples`` of the normals in ``q.noise_shapes``, by name.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> class Flat(Density):
        ...     def log_density(self, value): return torch.zeros_like(value)
        >>> @register_kl(DiagonalGaussian, Flat)
        ... def _(q, p): return q.total(-torch.log(q.std()))
        >>> kl(DiagonalGaussian(torch.zeros(2), 1.0), Flat())
        tensor(0.)
    """

    def add(formula: F) -> F:
        _FORMULAS[q_type, p_type] = formula, needs_draw
        return formula

    return add


@takes(
    q=instance("a posterior or a leaf", Posterior, Leaf),
    weights=TENSORS,
    samples=WHOLE,
    seed=WHOLE,
    step=WHOLE,
)
def kl(
    q: Posterior | Leaf,
    p: Posterior | Leaf | Density | ByName,
    *,
    weights: Mapping[str, Tensor] | None = None,
    samples: int = 1,
    seed: int | None = None,
    step: int = 0,
    joined: Sequence[Joined] = (),
) -> Tensor:
    """KL(q ‖ p), summed over all weights of q; differentiable.

    It is computed block by block. If q holds several tensors as one block, p may hold the same block, or each
    of the tensors separately; if p does, q may hold each as a diagonal Gaussian.

    Args:
        q: A posterior, or the leaf of one block.
        p: Another posterior, or a prior.
        weights: Draws of q (as ``q.sample`` gives them) on which blocks without a formula are estimated;
            those of the likelihood term can be reused. Without them ``samples`` new ones are drawn.
        samples: Number of these new draws, and of the draws for a formula that needs them.
        seed: Makes the draws a pure function of it; without one every call gives new draws.
        step: Chooses the draws together with the seed.
        joined: Blocks of q that are joined in one leaf, some with its weights, which ``weights`` then lacks.

    Example:
        >>> from posterity import DiagonalGaussian, IsotropicGaussian
        >>> kl(DiagonalGaussian(torch.zeros(3), 1.0), IsotropicGaussian(1.0))
        tensor(0.)
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    domain = noise.Domain.SAMPLE
    if seed is None:
        (seed, step), domain = noise.fresh(), noise.Domain.FRESH
    at: dict[str, Any] = {"samples": range(samples), "seed": seed, "step": step, "domain": domain}
    if isinstance(q, Leaf):
        return leaf_kl(q, cast("Leaf | Density", p), None, partial(q.noise, **at, block="kl"))
    if not isinstance(q, Factorised):
        raise TypeError(f"kl() has no rule for a {type(q).__name__}: pass a Factorised posterior or a leaf")
    pairs = {name: (leaf, prior) for name, leaf, prior in matched(q, p)}
    terms, given = [], dict[str, Tensor]()
    for each in joined:
        # A block of several tensors in the prior already joins these leaves.
        alone = all(pairs.get(name, (None,))[0] is leaf for name, leaf in each.blocks.leaves.items())
        priors = {name: pairs[name][1] for name in each.blocks.leaves} if alone else {}
        if alone and (whole := one_prior(each, priors)) is not None:
            together = partial(each.blocks.noise, each.leaf, **at, prefix="kl|")
            terms.append(leaf_kl(each.leaf, whole, each.weights, together))
            pairs = {name: pair for name, pair in pairs.items() if name not in priors}
        elif each.weights is not None:
            given |= each.blocks.apart(each.weights.flatten(1))
    if weights is not None and not joined:
        given = q.join(weights)
    elif weights is not None:
        left = (name for name in q.blocks if name in pairs and name not in given)
        given |= {name: q.block(name).join([weights[each] for each in q.tensors[name]]) for name in left}
    for name, (leaf, prior) in pairs.items():
        draw = partial(leaf.noise, **at, block=f"kl|{name}")
        terms.append(leaf_kl(leaf, prior, given.get(name), draw))
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def one_prior(joined: Joined, priors: Mapping[str, Leaf | Density]) -> Leaf | Density | None:
    """The common prior of blocks joined in one leaf; None if the KL must be computed block by block."""
    whole = joined.blocks.prior([priors[name] for name in joined.blocks.leaves], joined.leaf)
    if whole is None:
        return None
    for name, leaf in joined.blocks.leaves.items():
        refuse_misfit(leaf, priors[name])
    return whole if elementwise(whole) else None


def elementwise(prior: Leaf | Density) -> bool:
    """Whether its KL from diagonal leaves is a sum over single weights, so that they can be joined."""
    formula, needs_draw = formula_of(DiagonalGaussian, type(prior))
    gaussian = type(prior) is DiagonalGaussian and formula is not None
    return not needs_draw and (gaussian or isinstance(prior, Density))


def leaf_kl(
    q: Leaf, p: Leaf | Density, weights: Tensor | None, draw: Callable[[], Mapping[str, Tensor]]
) -> Tensor:
    """KL(q ‖ p) of one block; if estimated, at the given weights or else at a draw from its noise."""
    refuse_misfit(q, p)
    formula, needs_draw = formula_of(type(q), type(p))
    if formula is not None:
        return formula(q, p, draw()) if needs_draw else formula(q, p)
    if not isinstance(p, Leaf | Density):
        raise TypeError(
            f"kl() to a {type(p).__name__} has neither a formula nor a log-density: give it one with "
            "register_kl(), or derive it from Density"
        )
    if isinstance(p, Leaf) and not torch.equal(q.varying, p.varying):
        raise ValueError("an estimated KL needs q and p pruned at the same places: prune both alike")
    if weights is None:
        weights = q.draw(draw())
    log_p = p.log_prob(weights) if isinstance(p, Leaf) else q.total(p.log_density(weights))
    return (q.log_prob(weights) - log_p).mean()


def refuse_misfit(q: Leaf, p: Leaf | Density) -> None:
    """Raise unless p has a density wherever q has weights."""
    if isinstance(p, Leaf):
        if p.shape != q.shape:
            raise ValueError(f"q has shape {tuple(q.shape)} and p {tuple(p.shape)}: they must be equal")
        if not p.whole and bool((q.varying & ~p.varying).any()):
            raise ValueError("the prior has pruned weights that q still holds: prune q at the same places")
    elif isinstance(p, Density):
        p.check(q)


def formula_of(q_type: type, p_type: type) -> tuple[Formula | None, bool]:
    """The registered formula of the nearest pair of ancestors, and whether it needs a draw."""
    for q_base in q_type.__mro__:
        for p_base in p_type.__mro__:
            if (q_base, p_base) in _FORMULAS:
                return _FORMULAS[q_base, p_base]
    return None, False
