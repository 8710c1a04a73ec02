"""The closed forms behind ``kl``: one function for each pair of families, or for several pairs.

The functions that draw estimate a bound: see :mod:`posterity.posterior.scaled`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from posterity.fusing import fusible
from posterity.posterior.algebra import divided
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.divergence import register_kl
from posterity.posterior.eigen import EigenGaussian
from posterity.posterior.groups import GroupPrior
from posterity.posterior.kernel import KernelGaussian
from posterity.posterior.kronecker import KroneckerGaussian
from posterity.posterior.leaf import Leaf
from posterity.posterior.matrix import MatrixGaussian
from posterity.posterior.priors import Density, IsotropicGaussian
from posterity.posterior.scaled import ScaledGaussian
from posterity.posterior.sparse import LogUniform, SparsityPrior
from posterity.torch_private import functorch

Gaussian: TypeAlias = DiagonalGaussian | IsotropicGaussian
# Priors whose KL depends on each weight's marginal only.
OfMarginals: TypeAlias = Gaussian | SparsityPrior
# The prior of weights without scales, or before scaling.
_STANDARD = IsotropicGaussian(1.0)
# Values that a CPU handles at once, in its cache.
_IN_CACHE = 1 << 16
# Below this relative change of a std, a series is used.
_SMALL = 0.05


def _normals_kl(q: Leaf, mean: Tensor, std: Tensor, p: OfMarginals) -> Tensor:
    """½ Σ (σq²/σp² + (μq−μp)²/σp² − 1 − log σq²/σp²), or p's own formula, over the weights that vary.

    Leading dimensions stay.
    """
    if isinstance(p, SparsityPrior):
        return q.total(p.divergence(mean, std))
    p_mean, p_std = (p.mean, p.std) if isinstance(p, IsotropicGaussian) else (p.mean(), p.filled_std())
    return 0.5 * q.total(_normal_gaps(mean, std, p_mean, p_std))


@fusible
def _normal_gaps(mean: Tensor, std: Tensor, p_mean: Any, p_std: Any) -> Tensor:
    """The terms of this sum."""
    gap = _spread_gap(std, p_std)  # first: it takes the most memory
    shift = (mean - p_mean) / p_std
    gap = gap + shift * shift
    if isinstance(p_std, Tensor):  # the KL to a point is infinite unless q is that point
        same = (std == 0) & (mean == p_mean)
        gap = torch.where(p_std > 0, gap, torch.where(same, 0.0, math.inf))
    return gap


def _kernels_kl(q: Leaf, mean: Tensor, lower: Tensor, p: KernelGaussian) -> Tensor:
    """½ Σ (‖L'⁻¹L‖² + ‖L'⁻¹Δμ‖² − P) + log|L'| − log|L| over kernels; leading dimensions stay.

    It uses C = L'⁻¹(L − L'), and the stds on its diagonal, so that nothing cancels if q has barely moved.
    """
    if not ((q.whole and p.whole) or torch.equal(q.varying, p.varying)):
        p = p.pruned(q.varying)
    theirs = p.lower()
    change = divided(theirs, lower - theirs)
    stds = (each.diagonal(0, -2, -1) for each in (lower, theirs))
    among = change.tril(-1).square().sum(-1) + _spread_gap(*stds)
    return 0.5 * q.total(p.whitened(mean - p.loc).square() + among.reshape(q.shape))


def _spread_gap(std: Tensor, theirs: Tensor | float) -> Tensor:
    """r² − 1 − 2 log r with r = std / theirs, accurate also for r near 1 or 0."""
    if isinstance(theirs, Tensor):
        std, theirs = torch.broadcast_tensors(std, theirs)  # type: ignore[no-untyped-call]
    gap: Tensor = _SpreadGap.apply(std, theirs)  # type: ignore[no-untyped-call]
    return gap


@final
class _SpreadGap(torch.autograd.Function):
    """Its derivative in r, 2 (r − 1/r), takes few operations; autograd would keep twenty tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(std: Tensor, theirs: Tensor | float) -> Tensor:
        if std.device.type != "cpu" or std.numel() <= _IN_CACHE:
            return _gap(std, theirs)
        look = not any(
            isinstance(each, Tensor) and functorch.is_batchedtensor(each) for each in (std, theirs)
        )
        parts = torch.split(std.reshape(-1), _IN_CACHE)
        others = torch.split(theirs.reshape(-1), _IN_CACHE) if isinstance(theirs, Tensor) else repeat(theirs)
        return torch.cat([_gap(*pair, look) for pair in zip(parts, others, strict=False)]).view(std.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.number = None if isinstance(inputs[1], Tensor) else inputs[1]
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        std, theirs = ctx.saved_tensors if ctx.number is None else (*ctx.saved_tensors, ctx.number)
        growth = (std - theirs) / theirs
        slope = grad * growth * (growth + 2.0) * 2.0  # in log r
        return slope / std, -slope / theirs if ctx.needs_input_grad[1] else None


def _gap(std: Tensor, theirs: Any, look: bool = False) -> Tensor:
    # In place, since this may get all of a posterior's weights at once.
    growth = (std - theirs).div_(theirs)
    # The logarithm of r itself: 1 + growth loses all digits if one std is far below the other.
    far: Tensor = (growth + 2.0).mul_(growth).sub_((std / theirs).log_(), alpha=2.0)
    small = growth.abs() < _SMALL
    if look and not bool(small.any()):  # the rest would take eight times as long
        return far
    return torch.where(small, _small_gap(growth), far)


def _small_gap(growth: Tensor) -> Tensor:
    # g − log(1 + g) = g s − 2 s³ (1/3 + s²/5 + …) with s = g / (2 + g); for such small g the terms that are
    # left out are below the last digit.
    s = growth / (growth + 2.0)
    square = s * s
    series = (square / 9).add_(1 / 7).mul_(square).add_(1 / 5).mul_(square).add_(1 / 3)
    tail = series.mul_(square).mul_(s)
    return s.mul_(2.0).add_(growth).mul_(growth).sub_(tail, alpha=4.0)


def _independent_kl(
    q: DiagonalGaussian | ScaledGaussian, mean: Tensor, std: Tensor, p: OfMarginals | KernelGaussian
) -> Tensor:
    """The KL of independent weights with these moments; leading dimensions of means stay."""
    if isinstance(p, KernelGaussian):
        return _kernels_kl(q, mean, torch.diag_embed(std.flatten(2)), p)
    return _normals_kl(q, mean, std, p)


@register_kl(DiagonalGaussian, DiagonalGaussian)
@register_kl(DiagonalGaussian, IsotropicGaussian)
@register_kl(DiagonalGaussian, KernelGaussian)
@register_kl(DiagonalGaussian, SparsityPrior)
def _(q: DiagonalGaussian, p: OfMarginals | KernelGaussian) -> Tensor:
    return _independent_kl(q, q.mean(), q.filled_std(), p)


@register_kl(KernelGaussian, DiagonalGaussian)
@register_kl(KernelGaussian, IsotropicGaussian)
@register_kl(KernelGaussian, SparsityPrior)
def _(q: KernelGaussian, p: OfMarginals) -> Tensor:
    # E_q[log p] depends only on q's marginals if p's weights are independent.
    return q.correlation() + _normals_kl(q, q.mean(), q.filled_std(), p)


@register_kl(KernelGaussian, KernelGaussian)
def _(q: KernelGaussian, p: KernelGaussian) -> Tensor:
    return _kernels_kl(q, q.mean(), q.lower(), p)


@register_kl(ScaledGaussian, DiagonalGaussian, needs_draw=True)
@register_kl(ScaledGaussian, IsotropicGaussian, needs_draw=True)
@register_kl(ScaledGaussian, KernelGaussian, needs_draw=True)
@register_kl(ScaledGaussian, LogUniform, needs_draw=True)  # ARD's variances cannot depend on z
def _(q: ScaledGaussian, p: OfMarginals | KernelGaussian, noise: Mapping[str, Tensor]) -> Tensor:
    z, log_q, mean, std = q.scales_from(noise)
    gap = log_q - q.scales.log_auxiliary(z, q.around(mean, std, noise))
    return (_independent_kl(q, mean, std, p) + gap).mean()


@register_kl(ScaledGaussian, Density, needs_draw=True)
def _(q: ScaledGaussian, p: Density, noise: Mapping[str, Tensor]) -> Tensor:
    z, log_q, mean, std = q.scales_from(noise)
    weights = q.around(mean, std, noise)
    gap = log_q - q.scales.log_auxiliary(z, weights)
    log_given = -0.5 * noise[""].square() - std.log() - 0.5 * math.log(2.0 * math.pi)
    return (q.total(log_given - p.log_density(weights)) + gap).mean()


@register_kl(ScaledGaussian, ScaledGaussian, needs_draw=True)
def _(q: ScaledGaussian, p: ScaledGaussian, noise: Mapping[str, Tensor]) -> Tensor:
    """The joint KL of weights and scales, an upper bound of that of the weights."""
    if p.scales.shape != q.scales.shape:
        raise ValueError(
            f"q has scales of shape {tuple(q.scales.shape)} and p {tuple(p.scales.shape)}: give both the same"
        )
    if p.scales.multiply_stds != q.scales.multiply_stds:
        raise TypeError(
            f"{type(q.scales).__name__} and {type(p.scales).__name__} multiply different things, means or "
            "whole weights: give q and p the same family"
        )
    z, log_q = q.scales.draw(noise["z"])
    shift = (q.loc - p.loc) / p.filled_std()
    # Scales of whole weights multiply both the gap and the std, so their quotient stays the same.
    gap = shift if q.scales.multiply_stds else z * shift
    given = 0.5 * q.total(gap * gap + _spread_gap(q.filled_std(), p.filled_std()))
    return (given + log_q - p.scales.log_prob(z)).mean()


@register_kl(ScaledGaussian, GroupPrior)
def _(q: ScaledGaussian, p: GroupPrior) -> Tensor:
    return p.of_scales(q.scales, q.used_scales()) + _normals_kl(q, q.loc, q.filled_std(), _STANDARD)


@register_kl(DiagonalGaussian, GroupPrior)
def _(q: DiagonalGaussian, p: GroupPrior) -> Tensor:
    return _normals_kl(q, q.mean(), q.filled_std(), _STANDARD)


@register_kl(DiagonalGaussian, KroneckerGaussian)
def _(q: DiagonalGaussian, p: KroneckerGaussian) -> Tensor:
    return p.divergence_from(q)


@register_kl(KroneckerGaussian, DiagonalGaussian)
@register_kl(KroneckerGaussian, IsotropicGaussian)
@register_kl(KroneckerGaussian, SparsityPrior)
def _(q: KroneckerGaussian, p: OfMarginals) -> Tensor:
    # E_q[log p] depends only on q's marginals if p's weights are independent.
    theirs = q.marginals()
    return q.correlation() + _normals_kl(theirs, theirs.mean(), theirs.filled_std(), p)


@register_kl(MatrixGaussian, MatrixGaussian)
@register_kl(EigenGaussian, EigenGaussian)
def _(q: KroneckerGaussian, p: KroneckerGaussian) -> Tensor:
    return q.divergence(p)
