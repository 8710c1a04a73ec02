"""``kl(q, p)``: a sum over weights, by formula where there is one, by Monte Carlo otherwise.

Pairs of families register their formula with :func:`register_kl`, as torch.distributions does; a formula may
ask for a draw of its own. A pair without a formula falls back to Monte Carlo, which needs log-densities only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor

from posterity import noise
from posterity.posterior.base import Leaf, Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.eigen import EigenGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.kronecker import KroneckerGaussian
from posterity.posterior.matrix import MatrixGaussian
from posterity.posterior.priors import ByName, Density, IsotropicGaussian
from posterity.posterior.together import Joined, Together

Formula: TypeAlias = Callable[..., Tensor]
F = TypeVar("F", bound=Formula)
# By pair of families: the formula, and whether it wants a draw.
_FORMULAS: dict[tuple[type, type], tuple[Formula, bool]] = {}
# Numbers that a CPU works on at once.
_IN_CACHE = 1 << 16


def register_kl(q_type: type, p_type: type, *, needs_draw: bool = False) -> Callable[[F], F]:
    """Register a formula for KL(q ‖ p) of a pair of families; it returns the sum over weights.

    Args:
        q_type: Family of q.
        p_type: Family of p, or a prior.
        needs_draw: Whether to call it as ``formula(q, p, noise)``, for a KL, or a bound on one, that is
            estimated; ``noise`` has ``kl``'s ``samples`` of the normals in ``q.noise_shapes``, by name.

    Example:
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

    It is taken block by block. Where q holds several tensors as one block, p may hold the same block, or each
    of the tensors by itself.

    Args:
        q: A posterior, or the leaf of one block.
        p: Another posterior, or a prior.
        weights: Draws of q (as ``q.sample`` gives them) on which blocks without a formula are estimated;
            those of the likelihood term may be used again. Without them ``samples`` new ones are drawn.
        samples: How many, then; and how many a formula gets that needs a draw.
        seed: Makes what is drawn a pure function of it; without one every call draws anew.
        step: Chooses, with the seed, what is drawn.
        joined: Blocks of q that are there as one leaf, with its weights, which ``weights`` then lacks.

    Example:
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
    blocks = q.blocks
    priors = {name: prior_of(p, name, q.tensors[name], leaf) for name, leaf in blocks.items()}
    terms, given = [], dict[str, Tensor]()
    for each in joined:
        if (whole := one_prior(each.together, priors)) is not None:
            terms.append(leaf_kl(each.leaf, whole, each.weights[None], dict))
            blocks = {name: leaf for name, leaf in blocks.items() if name not in each.together.leaves}
        else:
            given |= {name: one[None] for name, one in each.apart().items()}
    if weights is not None and not joined:
        given = q.join(weights)
    elif weights is not None:
        left = (name for name in blocks if name not in given)
        given |= {name: blocks[name].join([weights[each] for each in q.tensors[name]]) for name in left}
    for name, leaf in blocks.items():
        draw = partial(leaf.noise, **at, block=f"kl|{name}")
        terms.append(leaf_kl(leaf, priors[name], given.get(name), draw))
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def prior_of(p: Any, name: str, tensors: Sequence[str], q: Leaf) -> Leaf | Density:
    """What p says of one of q's blocks, in the block's shape."""
    if isinstance(p, Density):
        return p
    if not hasattr(p, "block"):
        raise TypeError(f"a {type(p).__name__} is no prior: pass a posterior, a Density or ByName of them")
    if not q.joined:
        return cast("Leaf | Density", p.block(name))
    if isinstance(p, Factorised) and name in p.tensors and p.block(name).joined:
        return p.block(name)
    parts = [p.block(tensor) for tensor in tensors]
    if isinstance(parts[0], Density) and all(part is parts[0] for part in parts):
        return parts[0]
    if not all(isinstance(part, DiagonalGaussian | IsotropicGaussian) for part in parts):
        return _Beside(parts, q)
    leaves = [_as_diagonal(part, shape, q) for part, shape in zip(parts, q.shapes, strict=True)]
    mean, std, keep = (
        q.join(values) for values in zip(*((x.mean(), x.std(), x.varying) for x in leaves), strict=True)
    )
    return DiagonalGaussian(mean, std, keep=keep)


def one_prior(blocks: Together, priors: Mapping[str, Leaf | Density]) -> Leaf | Density | None:
    """The prior of blocks that are one leaf; None where it must be taken block by block."""
    whole = blocks.prior([priors[name] for name in blocks.leaves])
    if whole is None:
        return None
    for name, leaf in blocks.leaves.items():
        refuse_misfit(leaf, priors[name])
    formula, needs_draw = formula_of(DiagonalGaussian, type(whole))
    if formula is None:
        return whole if isinstance(whole, Density) else None
    return None if needs_draw else whole


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


def leaf_kl(
    q: Leaf, p: Leaf | Density, weights: Tensor | None, draw: Callable[[], Mapping[str, Tensor]]
) -> Tensor:
    """KL(q ‖ p) of one block: at the weights, or else at a draw of its noise, if it must be estimated."""
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


def formula_of(q_type: type, p_type: type) -> tuple[Formula | None, bool]:
    """The registered formula of the nearest pair of ancestors, and whether it needs a draw."""
    for q_base in q_type.__mro__:
        for p_base in p_type.__mro__:
            if (q_base, p_base) in _FORMULAS:
                return _FORMULAS[q_base, p_base]
    return None, False


def _gaussian_kl(q: DiagonalGaussian, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """½ Σ (σq²/σp² + (μq−μp)²/σp² − 1 − log σq²/σp²), over the weights that vary."""
    growth = (q.filled_std() - std) / std
    shift = (q.mean() - mean) / std
    return 0.5 * q.total(shift * shift + _spread_gap(growth))


def _spread_gap(growth: Tensor) -> Tensor:
    """r² − 1 − 2 log r of r = 1 + growth, to all digits where it is next to 1."""
    gap: Tensor = _SpreadGap.apply(growth)  # type: ignore[no-untyped-call]
    return gap


@final
class _SpreadGap(torch.autograd.Function):
    """Its derivative, 2 (r − 1/r), takes a few operations and one tensor; autograd would keep twenty."""

    generate_vmap_rule = True

    @staticmethod
    def forward(growth: Tensor) -> Tensor:
        if growth.device.type != "cpu" or growth.numel() <= _IN_CACHE:
            return _gap(growth)
        parts = torch.split(growth.reshape(-1), _IN_CACHE)
        return torch.cat([_gap(part) for part in parts]).view(growth.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (growth,) = ctx.saved_tensors
        slope: Tensor = growth * (growth + 2.0) / (growth + 1.0)
        return grad * slope * 2.0


def _gap(growth: Tensor) -> Tensor:
    # g − log(1 + g) = g s − 2 s³ (1/3 + s²/5 + …) with s = g / (2 + g); what is left out is below the last
    # digit for so small a g.
    s = growth / (growth + 2.0)
    square = s * s
    tail = square * s * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9)))
    near = growth * growth + 2.0 * (growth * s - 2.0 * tail)
    far = growth * (growth + 2.0) - 2.0 * torch.log1p(growth)
    return torch.where(growth.abs() < 0.05, near, far)


@register_kl(DiagonalGaussian, DiagonalGaussian)
def _(q: DiagonalGaussian, p: DiagonalGaussian) -> Tensor:
    return _gaussian_kl(q, p.mean(), p.filled_std())


@register_kl(DiagonalGaussian, IsotropicGaussian)
def _(q: DiagonalGaussian, p: IsotropicGaussian) -> Tensor:
    return _gaussian_kl(q, p.mean, p.std)


@register_kl(KroneckerGaussian, DiagonalGaussian)
@register_kl(KroneckerGaussian, IsotropicGaussian)
def _(q: KroneckerGaussian, p: DiagonalGaussian | IsotropicGaussian) -> Tensor:
    # E_q[log p] sees q's marginals alone where p is independent from weight to weight.
    return q.correlation() + kl(q.marginals(), p)


@register_kl(MatrixGaussian, MatrixGaussian)
@register_kl(EigenGaussian, EigenGaussian)
def _(q: KroneckerGaussian, p: KroneckerGaussian) -> Tensor:
    return q.divergence(p)
