"""The posterior q: a distribution over a model's named parameter tensors.

Every method produces a :class:`Posterior`, and everything that uses one takes it. It is usually
:class:`~posterity.posterior.factorised.Factorised` over blocks, with one
:class:`~posterity.posterior.leaf.Leaf` per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from posterity import noise
from posterity.arguments import MODULE, WHOLE, takes


class Run(Protocol):
    """Runs a model on one batch under K sets of weights, or, given none, under its own."""

    def __call__(
        self, model: nn.Module, weights: Mapping[str, Tensor], around: Mapping[str, Tensor] | None = None, /
    ) -> Tensor:
        """Outputs ``[K, B, ...]``; with ``around``, of the model linearised there."""


# Some numbered networks: their outputs [S, B, ...] on a batch, given a Run of it and its number.
Networks: TypeAlias = Callable[[Run, int], Tensor]


class Posterior(nn.Module, ABC):
    """A distribution over named tensors.

    With a seed, ``sample`` is a pure function of its arguments; without one every call gives new draws, also
    in forked processes. torch's generators are never advanced.

    Attributes:
        linearised: Whether it is a posterior of the model linearised around the means, as a Laplace
            approximation is: ``predict`` then uses that model.

    Example:
        >>> from posterity import BGD
        >>> posterior = BGD(nn.Linear(3, 2), std_init=0.1).posterior()
        >>> isinstance(posterior, Posterior), posterior.sample(5, seed=0)["weight"].shape
        (True, torch.Size([5, 2, 3]))
    """

    linearised: bool = False

    @takes(n=WHOLE, seed=WHOLE, step=WHOLE)
    def sample(self, n: int = 1, *, seed: int | None = None, step: int = 0) -> dict[str, Tensor]:
        """Draw ``n`` sets of weights; every tensor gets a leading dimension ``n``.

        Gradients flow to the posterior's parameters if these require them.
        """
        if n < 1:
            raise ValueError(f"a posterior draws at least one sample, not {n}: pass n >= 1")
        if seed is None:
            seed, step = noise.fresh()
        return self._sample(range(n), seed, step)

    @takes(model=MODULE)
    def check(self, model: nn.Module) -> Self:
        """Raise unless every tensor fits a parameter of the model; the error names the first that does
        not."""
        params = dict(model.named_parameters())
        for name, shape in self.shapes().items():
            if name not in params:
                own = f" (its first is {next(iter(params))!r})" if params else ""
                raise ValueError(
                    f"the posterior has {name!r}, but the model has no such parameter{own}: pass the module "
                    "itself, not a wrapper or a part of it, and build the optimizer from it or its "
                    "named_parameters(), where it loads the state_dict() of one without names"
                )
            if params[name].shape != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)} in the posterior and "
                    f"{tuple(params[name].shape)} in the model"
                )
        return self

    def networks(self, model: nn.Module, samples: range | None, seed: int) -> Networks:
        """The model under the weights of the given sample numbers; without numbers, under the means."""
        if samples is None:
            weights = {name: mean[None] for name, mean in self.mean().items()}
            return lambda run, step: run(model, weights)
        drawn, around = self._sample(samples, seed, 0), self.mean() if self.linearised else None
        return lambda run, step: run(model, drawn, around)

    @abstractmethod
    def _sample(
        self, samples: range, seed: int, step: int, domain: noise.Domain = noise.Domain.SAMPLE
    ) -> dict[str, Tensor]:
        """The draws of the given sample numbers, noise addressed by (domain, seed, step, sample, block)."""

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """The mean of every tensor."""

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor."""
        return {name: mean.shape for name, mean in self.mean().items()}

    @abstractmethod
    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Log-density of the given weights, summed over weights; leading dimensions are kept."""

    @abstractmethod
    def block(self, name: str) -> Any:
        """The distribution of one block, for block-by-block divergences."""
