"""Priors: densities of a single weight, for any shape, without a sampler. Posteriors can be priors, too.

``kl(q, p)`` takes both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from posterity.arguments import MODULE, NUMBER, described, instance, takes
from posterity.names import first_match
from posterity.posterior.base import Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.leaf import Leaf


class Density(ABC):
    """A density of one weight.

    Example:
        >>> class Laplace(Density):
        ...     def log_density(self, value): return -value.abs() - math.log(2.0)
        >>> from posterity import DiagonalGaussian, kl
        >>> bool(torch.isfinite(kl(DiagonalGaussian(torch.zeros(3), 1.0), Laplace(), samples=100)))
        True
    """

    @abstractmethod
    def log_density(self, value: Tensor) -> Tensor:
        """Log-density of each weight, same shape as ``value``."""

    def check(self, leaf: Leaf) -> None:  # noqa: B027  # most serve any
        """Raise if it cannot be the prior of the given leaf."""


@final
class IsotropicGaussian(Density):
    """N(mean, std²) for every weight; its precision is ``prior_precision = 1 / std²``.

    Example:
        >>> IsotropicGaussian(std=2.0).log_density(torch.zeros(1))
        tensor([-1.6121])
    """

    @takes(std=NUMBER, mean=NUMBER)
    def __init__(self, std: float = 1.0, mean: float = 0.0) -> None:
        if not (math.isfinite(std) and std > 0):
            raise ValueError(f"std must be finite and greater than 0, not {std}")
        if not math.isfinite(mean):
            raise ValueError(f"mean must be finite, not {mean}")
        self.std, self.mean = float(std), float(mean)

    def log_density(self, value: Tensor) -> Tensor:
        """Log-density of each weight."""
        scaled = (value - self.mean) / self.std
        return -0.5 * scaled * scaled - math.log(self.std * math.sqrt(2.0 * math.pi))


@final
class ScaleMixture(Density):
    """Blundell's prior: ``weight · N(0, std_wide²) + (1 − weight) · N(0, std_narrow²)``.

    Args:
        weight: Probability of the wide component (the paper's π).
        std_wide: Its standard deviation (σ1).
        std_narrow: That of the narrow component (σ2), smaller.

    Example:
        >>> w = torch.ones((), requires_grad=True)
        >>> ScaleMixture(0.5, 0.1, 0.002).log_density(w).backward()
        >>> w.grad
        tensor(-100.)
    """

    @takes(weight=NUMBER, std_wide=NUMBER, std_narrow=NUMBER)
    def __init__(
        self, weight: float = 0.5, std_wide: float = 1.0, std_narrow: float = math.exp(-6.0)
    ) -> None:
        if not 0.0 < weight < 1.0:
            raise ValueError(f"weight must lie between 0 and 1, not {weight}")
        if not 0.0 < std_narrow < std_wide < math.inf:
            raise ValueError(f"need 0 < std_narrow < std_wide, not {std_narrow} and {std_wide}")
        self.weight, self.std_wide, self.std_narrow = float(weight), float(std_wide), float(std_narrow)

    def log_density(self, value: Tensor) -> Tensor:
        """Log-density of each weight.

        The wide component is factored out of the logsumexp, so far from zero the gradient is −w/std_wide²,
        even where the square of the weight overflows.
        """
        square = value * value
        wide, narrow = 0.5 / self.std_wide**2, 0.5 / self.std_narrow**2
        log_wide = torch.full_like(square, math.log(self.weight / self.std_wide))
        log_narrow = math.log((1.0 - self.weight) / self.std_narrow) - (narrow - wide) * square
        return torch.logaddexp(log_wide, log_narrow) - wide * square - 0.5 * math.log(2.0 * math.pi)


@final
class ByName:
    """A prior for each group of tensors: name patterns in order; the first that matches counts.

    Args:
        priors: Densities or posteriors. A new head on a pretrained net has
            ``{"head.*": IsotropicGaussian(), "*": around(pretrained, 0.1)}``.

    Example:
        >>> prior = ByName({"*.bias": IsotropicGaussian(1.0), "*": IsotropicGaussian(0.1)})
        >>> prior.block("fc.weight").std
        0.1
    """

    @takes(priors=instance("priors by name", Mapping))
    def __init__(self, priors: Mapping[str, Density | Posterior | ByName]) -> None:
        for pattern, prior in priors.items():
            if not (isinstance(pattern, str) and isinstance(prior, Density | Posterior | ByName)):
                raise TypeError(
                    f"ByName takes densities and posteriors by patterns of names, not {described(prior)}"
                )
        if not priors:
            raise ValueError('ByName needs at least one pattern, such as {"*": IsotropicGaussian(1.0)}')
        self.priors = dict(priors)

    def source(self, name: str) -> Density | Posterior | ByName:
        """The prior whose pattern matches the name first."""
        return first_match(self.priors, name)

    def block(self, name: str) -> Any:
        """The tensor's prior: a density, or a posterior's leaf."""
        source = self.source(name)
        return source if isinstance(source, Density) else source.block(name)


@takes(model=MODULE, std=NUMBER)
def around(model: nn.Module, std: float) -> Factorised:
    """N(w*, std²) around the weights of a pretrained net, as a prior for further training.

    For individual stds, use the posterior of ``laplace.fit`` on the pretraining data; for layers that the
    pretrained net does not have, use :class:`ByName`.

    Example:
        >>> from posterity import kl, variational
        >>> net = nn.Linear(3, 2)
        >>> prior = around(net, 0.1)
        >>> bool(kl(variational(net, std_init=0.1).posterior, prior) < 1e-6)
        True
    """
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"std must be finite and greater than 0, not {std}")
    return Factorised({name: DiagonalGaussian(p.detach(), std) for name, p in model.named_parameters()})
