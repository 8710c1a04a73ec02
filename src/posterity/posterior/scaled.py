"""A Gaussian whose means are multiplied by random scales that weights share: ``w = z · mean + std · noise``.

Given z the weights are independent normals; z makes them dependent, skewed and of several modes. What z is
distributed as is a part of its own, :class:`Scales`: a flow in :mod:`posterity.posterior.flow`.

The marginal q(w) = ∫ q(w | z) q(z) dz has no closed form, so neither has its KL. There are two bounds on it:

    to a density p(w):      E_z[KL(q(w | z) ‖ p) + log q(z) − log r(z | w)],  r any conditional density
    to another p(w, z):     E_z[KL(q(w | z) ‖ p(w | z)) + log q(z) − log p(z)],  the joint KL, without r

The second is the one for the next prior (Kochurov et al. 2018); both draw z, and the first w.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity import noise as noises
from posterity.posterior.base import Leaf
from posterity.posterior.diagonal import inverse_softplus

# Draws of z behind means and stds: half of them, and their opposites.
MOMENT_DRAWS = 512


class Scales(nn.Module, ABC):
    """The distribution q(z) of the scales of a :class:`ScaledGaussian`.

    Args:
        shape: Of z; it broadcasts to the weights' shape, ``[outputs, 1, 1, 1]`` for one scale per output.

    Example:
        >>> from posterity.posterior.flow import Flow
        >>> issubclass(Flow, Scales)
        True
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, *shape]`` from as many standard normals, and log q(z) ``[n]`` of each."""

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z), ``[n]``, of any scales ``[n, *shape]``."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What, beside tensors and shape, is needed to build it again (JSON)."""

    @classmethod
    @abstractmethod
    def build(cls, shape: torch.Size, config: Mapping[str, Any], like: Tensor) -> Self:
        """One of that shape, with a tensor's dtype and device, whose tensors are not set."""

    def log_auxiliary(self, z: Tensor, weights: Tensor) -> Tensor:
        """log r(z | w), ``[n]``, of an auxiliary density: the nearer to q(z | w), the tighter the bound."""
        raise TypeError(f"the scales of a {type(self).__name__} have no auxiliary density for this prior")

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, ``[*shape]``, over ``MOMENT_DRAWS`` fixed draws.

        The normals behind them come with their opposites and have mean 0 and variance 1, so that moments of
        scales that are linear in their normals are exact. They are the same for every device and dtype.
        """
        at: dict[str, Any] = {"seed": 0, "step": 0, "block": "moments", "domain": noises.Domain.SAMPLE}
        half = noises.normal(range(1), (MOMENT_DRAWS // 2, *self.shape), **at, dtype=torch.float64)[0]
        half = half / half.square().mean(0).sqrt()
        z, _ = self.draw(torch.cat([half, -half]).to(like))
        return z.mean(0), z.var(0, correction=0)


@final
class ScaledGaussian(Leaf):
    """Normals whose means are multiplied by shared random scales: ``w = z · loc + std · noise``.

    Means, stds and what the scales are made of are parameters; given an ``nn.Parameter`` as mean it uses that
    very object. A module that shares it holds ``loc``, which is the posterior's mean only where E[z] is 1:
    predict at the mean by ``mode="mean"``.

    There is no log-density. ``mean`` and ``std``, and with them pruning, are moments over z: E[w] =
    loc · E[z], Var w = std² + loc² · Var z, with those of z over ``MOMENT_DRAWS`` fixed draws.

    Args:
        mean: What the scales multiply, in the shape of the weights.
        std: Standard deviation of the weights given z: a number, or a tensor that broadcasts.
        scales: The distribution of z.
        keep: Mask of the weights that are not pruned.

    Example:
        >>> from posterity import mnf
        >>> q = mnf(torch.zeros(4, 3, 5, 5), 0.1)
        >>> q.scales.shape, q.std().shape
        (torch.Size([4, 1, 1, 1]), torch.Size([4, 3, 5, 5]))
    """

    estimators = frozenset({"weight", "local", "flipout"})
    raw: Tensor

    def __init__(
        self, mean: Tensor, std: Tensor | float, scales: Scales, *, keep: Tensor | None = None
    ) -> None:
        if not mean.is_floating_point():
            raise TypeError(f"means must be floating-point numbers, not {mean.dtype}: pass mean.float()")
        super().__init__(mean.shape, keep)
        spread = torch.as_tensor(std, dtype=mean.dtype, device=mean.device).detach()
        if not bool((torch.isfinite(spread) & (spread > 0)).all()):
            raise ValueError(f"std must be finite and greater than 0; the lowest is {float(spread.min()):g}")
        for given, name in ((spread, "std"), (spread.new_empty(scales.shape), "scales")):
            try:
                given.expand(mean.shape)
            except RuntimeError:
                raise ValueError(
                    f"{name} of shape {tuple(given.shape)} do not broadcast to means of shape "
                    f"{tuple(mean.shape)}"
                ) from None
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        self.raw = nn.Parameter(inverse_softplus(spread.expand(mean.shape)).clone())
        self.scales = scales

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        """One normal per weight, and one per scale, ``"z"``."""
        return {"": self.shape, "z": self.scales.shape}

    def filled_std(self) -> Tensor:
        """Standard deviation of each weight given z, also of those that do not vary."""
        return softplus(self.raw)

    def given(self, z: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Weights ``[n, *shape]`` for scales and the normals of :meth:`noise`."""
        return self._settled(torch.addcmul(z * self.loc, self.filled_std(), noise[""]))

    def mean(self) -> Tensor:
        """Mean of the block, over z too."""
        mean, _ = self.scales.moments(self.loc)
        return self._settled(self.loc * mean)

    def std(self) -> Tensor:
        """Standard deviation of each weight, over z too."""
        _, variance = self.scales.moments(self.loc)
        return self.masked((self.filled_std().square() + self.loc.square() * variance).sqrt())

    def log_prob(self, value: Tensor) -> Tensor:
        """There is none: raises."""
        raise TypeError(
            "a ScaledGaussian has no log-density, because its scales are integrated out: as a prior it "
            "serves only posteriors of its own kind, by their joint density of weights and scales"
        )

    @torch.no_grad()
    def share_mean(self, *parameters: nn.Parameter) -> None:
        """Let a module's parameter be ``loc``, and take on its values."""
        (parameter,) = parameters
        if self.loc is not parameter:
            parameter.copy_(self._settled(self.loc))
            self.loc = parameter
            self.to(self.device, self.dtype)

    def pruned(self, keep: Tensor) -> Self:
        """The same distribution with the weights outside ``keep`` removed; scales are as they were."""
        keep = keep & self.kept
        leaf = type(self)(self.loc.detach() * keep, 1.0, deepcopy(self.scales), keep=keep)
        with torch.no_grad():
            leaf.raw.copy_(self.raw)
        return leaf.hold(self.held).requires_grad_(self.loc.requires_grad)

    def config(self) -> dict[str, Any]:
        """What the scales are."""
        scales = {"family": type(self.scales).__name__, "shape": list(self.scales.shape)}
        return {"scales": scales | self.scales.config()}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Build the leaf again, bit for bit."""
        loc, own = tensors["loc"], config["scales"]
        families = {each.__name__: each for each in Scales.__subclasses__()}
        if own["family"] not in families:
            raise ValueError(f"its scales are of the family {own['family']}, unknown here")
        scales = families[own["family"]].build(torch.Size(own["shape"]), own, loc)
        leaf = cls(loc, 1.0, scales, keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        for name, value in leaf.named_parameters():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} is not finite in the file: it is damaged")
        return leaf

    def _independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        z, _ = self.scales.draw(noise["z"])
        return z * self.loc, self.filled_std()

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        z, _ = self.scales.draw(noise["z"])
        return self.given(z, noise)
