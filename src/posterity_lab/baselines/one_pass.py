"""The KL to a log-uniform prior and its gradient in one pass over the weights: the same numbers, sooner.

`posterity.LogUniform` is a chain of operations, each of which reads and writes all weights, and so is its
gradient. For a net of some hundred thousand weights in small batches that is more than the net itself costs.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posterity import Density, DiagonalGaussian, LogUniform, register_kl

_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695  # of LogUniform, with which a test compares this


@final
class OnePass(Density):
    """A log-uniform prior whose KL to a diagonal Gaussian is found together with its gradient.

    Args:
        prior: The prior.
        compiled: Whether torch.compile makes it one loop over the weights, for which it needs a compiler.

    Example:
        >>> from posterity import kl
        >>> q = DiagonalGaussian(torch.tensor([1.0, 0.0]), 0.1, trainable=True)
        >>> bool(kl(q, OnePass(LogUniform())).isclose(kl(q, LogUniform())))
        True
    """

    def __init__(self, prior: LogUniform, compiled: bool = False) -> None:
        self.prior = prior
        self.run = torch.compile(_with_slopes, dynamic=False) if compiled else _with_slopes

    def log_density(self, value: Tensor) -> Tensor:
        """The prior's own."""
        return self.prior.log_density(value)


@register_kl(DiagonalGaussian, OnePass)
def _(q: DiagonalGaussian, p: OnePass) -> Tensor:
    if not q.stores_raw or q.keep is not None or q.held is not None:
        return q.total(p.prior.divergence(q.loc, q.filled_std()))
    found: Tensor = _Kl.apply(q.loc, q.raw, p)  # type: ignore[no-untyped-call]
    return found


def _with_slopes(mean: Tensor, raw: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ k1 sigmoid(k3 log i − k2) + ½ log(1 + i), where i = μ²/σ² is within bounds, and σ = softplus(ρ).

    With its slopes in μ and ρ.
    """
    std = softplus(raw)
    inverse = (mean / std).square()
    inside = (inverse > low) & (inverse < high)
    inverse = inverse.clamp(low, high)
    s = torch.sigmoid(_K3 * inverse.log() - _K2)
    total = (_K1 * s + 0.5 * inverse.log1p()).sum()
    # log i grows by 2/μ, and falls by 2/σ; σ grows by 1 − e^−σ.
    slope = torch.where(inside, 2.0 * _K1 * _K3 * s * (1.0 - s) + inverse / (1.0 + inverse), 0.0)
    return total, slope / torch.where(inside, mean, 1.0), slope / std * torch.expm1(-std)


@final
class _Kl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, raw: Tensor, p: OnePass) -> Tensor:
        low, high = p.prior.bounds
        total, by_mean, by_raw = p.run(mean, raw, math.exp(-high), math.exp(-low))
        ctx.save_for_backward(by_mean, by_raw)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        by_mean, by_raw = ctx.saved_tensors
        return grad * by_mean, grad * by_raw, None
