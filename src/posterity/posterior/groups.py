"""Scales of groups of weights: group normal-Jeffreys and group horseshoe.

Louizos, Ullrich, Welling: "Bayesian Compression for Deep Learning", NIPS 2017. The weights of a group, such
as those that leave an input or reach an output map, share a scale: w = z · w̃ with w̃ ~ N(μ, σ²), and the
prior of each w̃ is N(0, 1). A group that the data do not need becomes noise.

    GNJ   p(z) ∝ 1/|z|, q(z) = N(μz, σz²)
          KL = Σ_groups KL_log-uniform(α = σz²/μz²) + Σ_weights ½ (σ² + μ² − 1 − log σ²)
    GHS   z = √(s_a s_b · a b), q of each log a normal; s of all groups of a layer together
          a ~ Γ(½, 1), b ~ IG(½, 1): √(a b) is half-Cauchy; s_a ~ Γ(½, τ0²), s_b ~ IG(½, 1)
          KL to Γ(½, τ²): −½ m − log v − ½ (1 + log 2) + exp(m + v²/2) / τ² + log τ  of log a ~ N(m, v²)
          KL to IG(½, 1):  ½ m − log v − ½ (1 + log 2) + exp(−m + v²/2)

    E w = E z · μ,  Var w = Var z (σ² + μ²) + (E z)² σ²

| paper | here |
|---|---|
| q(z), GNJ and GHS | ``NormalScales``, ``LogNormalScales`` |
| p(z), p(w̃) | :class:`GroupNormalJeffreys`, :class:`GroupHorseshoe` |
| one z per input of a dense layer, per output map of a convolution | ``dense="input"``, ``conv="output"`` |
| z and outputs drawn for each example | ``estimator="local"``; not with ``conv="kernel"`` |
| cuts by eye, layer by layer, of log α of z (GNJ) or of its mode (GHS) | one log α for all, of w |

Deviations: ``prune(log_alpha=…)`` counts the noise of both z and w̃, 1 + α_w = (1 + α_z)(1 + α_w̃), so one
rule applies to GNJ, GHS and all other posteriors. In GHS z starts near 1: s at τ0 = 10⁻⁵, and the scales b of
groups make up for it. Biases and other vectors have no scale, and N(0, 1) for a prior.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posterity.arguments import NUMBER, takes
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.leaf import Leaf
from posterity.posterior.priors import Density
from posterity.posterior.scaled import Conv, Dense, ScaledGaussian, Scales, scale_shape
from posterity.posterior.scales import LogNormalScales, NormalScales
from posterity.posterior.sparse import LogUniform

# Log-variances of about -9, the paper's.
_Z_STD = 0.011
_TAU = 1e-5
# Smallest τ0: the KL has 1 / τ0², which must fit in single precision.
_SMALLEST = 1e-15


def gnj(
    mean: Tensor, std: float, *, conv: Conv = "output", dense: Dense = "input", z_std: float = _Z_STD
) -> Leaf:
    """Weights with normal scales, for the prior :class:`GroupNormalJeffreys`; vectors are diagonal.

    Args:
        mean: Means of the parameter.
        std: Standard deviations of its weights given scales of 1, at the start.
        conv: What has its own scale in a convolution, as for :func:`~posterity.mnf`: an ``"output"`` map, an
            ``"input"`` map or a ``"kernel"``.
        dense: What has its own scale in a matrix: an ``"input"`` or an ``"output"``.
        z_std: Std of the scales at the start, about 1.

    Example:
        >>> from posterity import variational
        >>> net = torch.nn.Linear(16, 2)
        >>> model = variational(net, family=gnj, prior=GroupNormalJeffreys())
        >>> model.posterior.block("weight").scales.shape
        torch.Size([1, 16])
    """
    if mean.dim() < 2:
        return DiagonalGaussian(mean, std)
    return ScaledGaussian(mean, std, NormalScales(scale_shape(mean, conv, dense), mean).start(z_std))


def ghs(
    mean: Tensor, std: float, *, conv: Conv = "output", dense: Dense = "input", z_std: float = _Z_STD
) -> Leaf:
    """Weights with log-normal scales, for the prior :class:`GroupHorseshoe`; vectors are diagonal.

    The arguments are those of :func:`gnj`.

    Example:
        >>> from posterity import variational
        >>> net = torch.nn.Conv2d(3, 8, 5)
        >>> model = variational(net, family=ghs, prior=GroupHorseshoe())
        >>> model.posterior.block("weight").scales.shape
        torch.Size([8, 1, 1, 1])
    """
    if mean.dim() < 2:
        return DiagonalGaussian(mean, std)
    return ScaledGaussian(mean, std, LogNormalScales(scale_shape(mean, conv, dense), mean).start(z_std))


class GroupPrior(Density):
    """A prior of scales and of the weights that they multiply; vectors, which have no scales, get N(0, 1).

    Example:
        >>> issubclass(GroupNormalJeffreys, GroupPrior), issubclass(GroupHorseshoe, GroupPrior)
        (True, True)
    """

    @abstractmethod
    def of_scales(self, scales: Scales, used: Tensor) -> Tensor:
        """KL of q(z) from p(z), summed over the groups of a mask, ``[*scales.shape]``."""

    def log_density(self, value: Tensor) -> Tensor:
        """Raises: a single weight has no density, since groups share scales."""
        raise TypeError(f"{type(self).__name__} has no density of single weights, since groups share scales")

    def check(self, leaf: Leaf) -> None:
        """Raise unless the leaf has the kind of scales that this prior is for, or is a vector."""
        scales, family = self._wants()
        if isinstance(leaf, DiagonalGaussian) and len(leaf.shape) < 2:
            return
        if not (isinstance(leaf, ScaledGaussian) and isinstance(leaf.scales, scales)):
            kind = leaf.scales if isinstance(leaf, ScaledGaussian) else leaf
            raise TypeError(
                f"{type(self).__name__} is for weights with {scales.__name__}, not with a "
                f"{type(kind).__name__} of shape {tuple(kind.shape)}: pass family=posterity.{family} to "
                "variational(), or give this tensor another prior by posterity.ByName"
            )

    @abstractmethod
    def _wants(self) -> tuple[type[Scales], str]:
        """The kind of scales that q must have, and the name of its family."""


@final
class GroupNormalJeffreys(GroupPrior):
    """p(z) ∝ 1/|z| for the scales of groups, and N(0, 1) for what they multiply: for the family ``gnj``.

    Args:
        bounds: Bounds of log α of the scales, as for :class:`~posterity.LogUniform`, but wider: scales start
            at −9, and need a gradient from the prior there.

    Example:
        >>> from posterity import kl
        >>> bool(kl(gnj(torch.zeros(3, 2), 1.0, z_std=10.0), GroupNormalJeffreys()) < 0.1)  # only noise
        True
    """

    def __init__(self, bounds: tuple[float, float] = (-20.0, 20.0)) -> None:
        self.of_scale = LogUniform(bounds)

    def of_scales(self, scales: Scales, used: Tensor) -> Tensor:
        """The log-uniform KL of every scale."""
        assert isinstance(scales, NormalScales)
        return torch.where(used, self.of_scale.divergence(scales.centre, scales.std()), 0.0).sum()

    def _wants(self) -> tuple[type[Scales], str]:
        return NormalScales, "gnj"


@final
class GroupHorseshoe(GroupPrior):
    """Half-Cauchy scales of groups and of layers, N(0, 1) for what they multiply: for the family ``ghs``.

    Args:
        scale: The scale of the layer's half-Cauchy, the paper's τ0: the smaller, the fewer groups stay.

    Example:
        >>> from posterity import kl
        >>> kl(ghs(torch.zeros(3, 2), 1.0, z_std=1.0), GroupHorseshoe()) > 0
        tensor(True)
    """

    @takes(scale=NUMBER)
    def __init__(self, scale: float = _TAU) -> None:
        if not _SMALLEST <= scale < math.inf:
            raise ValueError(f"scale must be finite and at least {_SMALLEST:g}, not {scale}")
        self.scale = float(scale)

    def of_scales(self, scales: Scales, used: Tensor) -> Tensor:
        """The KLs to Γ and to IG, of the groups and, last, of the layer."""
        assert isinstance(scales, LogNormalScales)
        log_tau = torch.zeros_like(scales.gamma)
        log_tau[-1:].fill_(
            math.log(self.scale)
        )  # by index it would be a copy from the host, which no graph takes
        terms = _to_inverse_gamma(log_tau * 2.0 - scales.gamma, softplus(scales.raw_gamma))
        terms = terms + _to_inverse_gamma(scales.inverse, softplus(scales.raw_inverse))
        counted = torch.cat([used.flatten(), used.any().reshape(1)])
        return torch.where(counted, terms, 0.0).sum()

    def _wants(self) -> tuple[type[Scales], str]:
        return LogNormalScales, "ghs"


def _to_inverse_gamma(mean: Tensor, std: Tensor) -> Tensor:
    """KL of a log-normal to IG(½, 1); with log τ² − m for the mean, that to Γ(½, τ²), whose inverse is IG."""
    return 0.5 * mean - std.log() - 0.5 * (1.0 + math.log(2.0)) + (0.5 * std.square() - mean).exp()
