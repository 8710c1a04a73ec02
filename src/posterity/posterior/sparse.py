"""Priors that turn weights into noise: sparse variational dropout, with a log-uniform prior or ARD.

Molchanov, Ashukha, Vetrov: "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017. Kharitonov,
Molchanov, Vetrov: "Variational Dropout via Empirical Bayes", 2018 (ARD). For a weight with q(w) = N(μ, σ²),
both KLs are functions of α = σ²/μ² alone, and fall to 0 if the weight is pure noise:

    log-uniform, p(w) ∝ 1/|w|    KL ≈ k1 sigmoid(−k2 − k3 log α) + ½ log(1 + 1/α)
    ARD, p(w) = N(0, λ)          KL = ½ log(1 + 1/α), with the λ = μ² + σ² that makes it smallest

| papers | here |
|---|---|
| θ, σ² | means and squared stds of q; a net has μ in its own parameters |
| k1, k2, k3 | ``LogUniform``'s constants; the approximation is within 0.01 of the KL for every α |
| clipping of log α in the KL | ``bounds``: outside of them a KL is constant, and has no gradient |
| clipping of log α in a layer's variance | none: layers draw from q itself |
| prune where log α ≥ 3 | ``prune(posterior, log_alpha=3.0)`` |
| log σ² = −10 at the start | ``variational``'s preset ``sparse``, a std relative to 1 / sqrt(fan_in) |
| biases are no part of q | ``variational(…, deterministic="*bias")``: they have no KL either |

Deviations: layers draw with q's own variance, σ², not with μ² exp(clip(log α)). With clipping, a net would be
trained with noise other than its posterior's, and σ would get no gradient from the data wherever log α is out
of bounds. Here the data still limit the width of such a weight, so its variance needs no bound.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from posterity.arguments import Kind, is_number, takes
from posterity.posterior.priors import Density

_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695
# Bounds of log α: e^±80 are float32 numbers.
_FURTHEST = 80.0
# Smaller stds count as this: mean / std² would overflow, and give NaN times the zero gradient out of bounds.
_LEAST = 1e-17
# log p(w) = −log|w| + this has the KL go to 0 for α → ∞: −½ log(2πe) − ½ (γ + log 2).
_LOG_CONSTANT = -0.5 * (math.log(2.0 * math.pi * math.e) + 0.5772156649015329 + math.log(2.0))
_BOUNDS = Kind(
    "two numbers",
    lambda bounds: isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(is_number, bounds)),
)


class SparsityPrior(Density):
    """A prior whose KL is a function of α = σ²/μ² that falls to 0 for α → ∞.

    Args:
        bounds: Lowest and highest log α: outside of them the KL is constant and has no gradient.

    Example:
        >>> issubclass(LogUniform, SparsityPrior), issubclass(ARD, SparsityPrior)
        (True, True)
    """

    @takes(bounds=_BOUNDS)
    def __init__(self, bounds: tuple[float, float] = (-8.0, 8.0)) -> None:
        low, high = bounds
        if not -_FURTHEST <= low < high <= _FURTHEST:
            raise ValueError(
                f"bounds must be two values of log alpha, low and high, between -{_FURTHEST:g} and "
                f"{_FURTHEST:g}, not {low} and {high}"
            )
        self.bounds = float(low), float(high)

    def divergence(self, mean: Tensor, std: Tensor) -> Tensor:
        """KL(N(mean, std²) ‖ p) of each weight; infinite at a std of 0."""
        low, high = self.bounds
        # 1/α, whose gradients in both are finite at a mean of 0, where those of log α are not.
        inverse = (mean / std.clamp_min(_LEAST)).square().clamp(math.exp(-high), math.exp(-low))
        return torch.where(std > 0, self.of_alpha(inverse), torch.inf)

    @abstractmethod
    def of_alpha(self, inverse: Tensor) -> Tensor:
        """The KL as a function of 1/α, which is within bounds."""


@final
class LogUniform(SparsityPrior):
    """p(w) ∝ 1/|w|: no scale is more likely than another, and a weight that the data do not need is noise.

    The density is improper, so KLs are defined up to a constant, chosen such that weights of pure noise have
    0; they say nothing about the evidence. ``kl`` uses Molchanov's approximation for families with a std per
    weight.

    Args:
        bounds: Lowest and highest log α: outside of them the KL is constant and has no gradient.

    Example:
        >>> from posterity import DiagonalGaussian, kl
        >>> q = DiagonalGaussian(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.1]))
        >>> kl(q, LogUniform())  # a weight of α = 0.01, and one of noise alone
        tensor(2.9391)
    """

    def of_alpha(self, inverse: Tensor) -> Tensor:
        """k1 sigmoid(−k2 − k3 log α) + ½ log(1 + 1/α)."""
        return _K1 * torch.sigmoid(_K3 * inverse.log() - _K2) + 0.5 * torch.log1p(inverse)

    def log_density(self, value: Tensor) -> Tensor:
        """−log|w|, and the constant."""
        return _LOG_CONSTANT - value.abs().log()


@final
class ARD(SparsityPrior):
    """N(0, λ) with an individual λ for each weight, always the one nearest to q: automatic relevance.

    Its KL, ½ log(1 + 1/α), is exact. The prior follows q, so it has no fixed density.

    Args:
        bounds: Lowest and highest log α: outside of them the KL is constant and has no gradient.

    Example:
        >>> from posterity import DiagonalGaussian, kl
        >>> kl(DiagonalGaussian(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.1])), ARD())
        tensor(2.3077)
    """

    def of_alpha(self, inverse: Tensor) -> Tensor:
        """½ log(1 + 1/α)."""
        return 0.5 * torch.log1p(inverse)

    def log_density(self, value: Tensor) -> Tensor:
        """Raises: there is none."""
        raise TypeError(
            "ARD has no density, because its variances follow q: use it for families with a mean and a std "
            "of each weight, such as DiagonalGaussian"
        )
