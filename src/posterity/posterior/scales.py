"""Scales of whole weights: normal, or log-normal with a factor that all groups of a layer share.

:mod:`posterity.posterior.groups` has the families and priors that use them.
"""

from __future__ import annotations

import math
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity.posterior.diagonal import inverse_softplus
from posterity.posterior.scaled import Scales

# Shared scales at the start.
_SHARED = 1e-5


@final
class NormalScales(Scales):
    """Independent normal scales, N(centre, softplus(raw)²), of whole weights.

    Args:
        shape: Of z.
        like: A tensor of the right dtype and device.

    Example:
        >>> scales = NormalScales(torch.Size([4, 1]), torch.zeros(())).start(0.1)
        >>> scales.draw(torch.zeros(3, 4, 1))[0].shape
        torch.Size([3, 4, 1])
    """

    multiply_stds = True

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        super().__init__(shape)
        self.centre = nn.Parameter(like.detach().new_ones(shape))
        self.raw = nn.Parameter(like.detach().new_zeros(shape))

    @torch.no_grad()
    def start(self, z_std: float) -> Self:
        """Set all scales to about 1."""
        self.raw.fill_(_start(z_std, self.raw))
        return self

    def std(self) -> Tensor:
        """Standard deviation of every scale."""
        return softplus(self.raw)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, *shape]`` from as many standard normals, and log q(z) ``[n]`` of each."""
        return torch.addcmul(self.centre, self.std(), noise), self._density(noise)

    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z), ``[n]``."""
        return self._density((z - self.centre) / self.std())

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, exactly."""
        return self.centre, self.std().square()

    def _density(self, eps: Tensor) -> Tensor:
        logs = -0.5 * eps.square() - self.std().log() - 0.5 * math.log(2.0 * math.pi)
        return logs.flatten(1).sum(1)


@final
class LogNormalScales(Scales):
    """Log-normal scales of whole weights: each is a group's own scale times one that all groups share.

    Either is √(a b); ``gamma`` and ``inverse`` are the means of log a and log b, named after their priors,
    with the shared one's last.

    Args:
        shape: Of z.
        like: A tensor of the right dtype and device.

    Example:
        >>> scales = LogNormalScales(torch.Size([4, 1]), torch.zeros(())).start(0.1)
        >>> scales.draw(torch.zeros(3, *scales.noise_shape))[0].shape
        torch.Size([3, 4, 1])
    """

    multiply_stds = True
    gamma: Tensor
    inverse: Tensor
    raw_gamma: Tensor
    raw_inverse: Tensor

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        super().__init__(shape)
        for name in ("gamma", "inverse", "raw_gamma", "raw_inverse"):
            setattr(self, name, nn.Parameter(like.detach().new_zeros(shape.numel() + 1)))

    @property
    def noise_shape(self) -> torch.Size:
        """One normal for each scale, and one for the shared factor."""
        return torch.Size([self.shape.numel() + 1])

    @torch.no_grad()
    def start(self, z_std: float) -> Self:
        """Set all scales to about 1, with a shared factor of 1e-5, the horseshoe's default scale."""
        for raw in (self.raw_gamma, self.raw_inverse):
            raw.fill_(_start(z_std, raw))
        self.gamma[-1] = 2.0 * math.log(_SHARED)
        self.inverse[:-1] = -2.0 * math.log(_SHARED)
        return self

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, *shape]`` from the normals of ``noise_shape``, and log q(z) ``[n]`` of each."""
        mean, own, shared = self._logs()
        logs = mean + own.sqrt() * noise[:, :-1] + shared.sqrt() * noise[:, -1:]
        z = logs.exp().reshape(len(noise), *self.shape)
        return z, self._density(logs)

    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z), ``[n]``."""
        return self._density(z.flatten(1).log())

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, exactly."""
        mean, own, shared = self._logs()
        variance = (own + shared).reshape(self.shape)
        centre = (mean.reshape(self.shape) + 0.5 * variance).exp()
        return centre, centre.square() * torch.expm1(variance)

    def _logs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means of log z, and variances of each scale's own part and of the shared one."""
        mean = 0.5 * (self.gamma + self.inverse)
        variance = 0.25 * (softplus(self.raw_gamma).square() + softplus(self.raw_inverse).square())
        return mean[:-1] + mean[-1], variance[:-1], variance[-1]

    def _density(self, logs: Tensor) -> Tensor:
        # log z is normal with covariance diag(own) + shared: its inverse by Sherman and Morrison.
        mean, own, shared = self._logs()
        error, weight = logs - mean, 1.0 / own
        growth = 1.0 + shared * weight.sum()
        square = (weight * error.square()).sum(1) - shared / growth * (weight * error).sum(1).square()
        volume = own.log().sum() + growth.log() + logs.shape[1] * math.log(2.0 * math.pi)
        return -0.5 * (square + volume) - logs.sum(1)


def _start(z_std: float, like: Tensor) -> Tensor:
    """The ρ of a std."""
    if not 0.0 < z_std < math.inf:
        raise ValueError(f"z_std must be finite and greater than 0, not {z_std}")
    return inverse_softplus(torch.tensor(z_std, dtype=like.dtype, device=like.device))
