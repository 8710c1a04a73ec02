"""The methods of a first try, each called with its required arguments only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import posterity
from posterity import Factorised, VariationalOptimizer, laplace
from posterity_lab.baselines.graph import Captured
from posterity_lab.data import Split
from posterity_lab.first_try.tasks import Likelihood

LossFn: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """The starting point of a method.

    Attributes:
        model: The net, with its initial weights.
        loss_fn: ``loss_fn(model, x, y)`` gives the mean loss of a batch.
        num_data: Training examples.
        likelihood: Likelihood of the targets.
        graph: Whether plain training on a GPU is captured as a CUDA graph.
    """

    model: nn.Module
    loss_fn: LossFn
    num_data: int
    likelihood: Likelihood = "classification"
    graph: bool = True


class Learner(NamedTuple):
    """A training step, and the posterior after training; ``posterior`` gets the last training data."""

    step: Callable[[Tensor, Tensor], Tensor]
    posterior: Callable[[Split], Factorised | None]


Method: TypeAlias = Callable[[Setup], Learner]


def _plain(setup: Setup, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a torch optimiser; on a GPU a CUDA graph, unless ``graph`` is False."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = setup.loss_fn(setup.model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def tensors() -> list[Tensor]:
        state = [value for own in optimizer.state.values() for value in own.values()]
        changed = [*setup.model.parameters(), *setup.model.buffers(), *state]
        return [each for each in changed if isinstance(each, Tensor)]

    return Captured(setup.model, step, tensors) if setup.graph else step


def adamw(setup: Setup) -> Learner:
    """AdamW, to which all others are compared."""
    capturable = setup.graph and next(setup.model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=1e-3, capturable=capturable)
    return Learner(_plain(setup, optimizer), lambda data: None)


def sgd(setup: Setup) -> Learner:
    """SGD with momentum."""
    optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1, momentum=0.9)
    return Learner(_plain(setup, optimizer), lambda data: None)


def _rule(make: Callable[[Setup], VariationalOptimizer]) -> Method:
    def method(setup: Setup) -> Learner:
        optimizer = make(setup)
        step = posterity.compile_step(setup.model, setup.loss_fn, optimizer)
        return Learner(step, lambda data: optimizer.posterior())

    return method


def bayes_by_backprop(setup: Setup) -> Learner:
    """Bayes by Backprop as in the README."""
    bayesian = posterity.variational(setup.model)
    adam = torch.optim.Adam(bayesian.parameters())
    step = posterity.compile_step(bayesian, setup.loss_fn, adam, num_data=setup.num_data, factor=0.01)
    return Learner(step, lambda data: bayesian.posterior.frozen())


def laplace_after_adamw(setup: Setup) -> Learner:
    """A Laplace approximation of the net that AdamW trained."""

    def posterior(data: Split) -> Factorised:
        found = laplace.fit(setup.model, (data.x, data.y), likelihood=setup.likelihood)
        return found.posterior()

    return Learner(adamw(setup).step, posterior)


METHODS: dict[str, Method] = {
    "adamw": adamw,
    "sgd": sgd,
    "bgd": _rule(lambda setup: posterity.BGD(setup.model)),
    "bgd-continual": _rule(lambda setup: posterity.BGD(setup.model, preset="continual")),
    "bong": _rule(lambda setup: posterity.BONG(setup.model)),
    "ivon": _rule(lambda setup: posterity.IVON(setup.model, num_data=setup.num_data)),
    "vogn": _rule(lambda setup: posterity.VOGN(setup.model, num_data=setup.num_data)),
    "ogn": _rule(lambda setup: posterity.OGN(setup.model, num_data=setup.num_data)),
    "kfac": _rule(lambda setup: posterity.KFAC(setup.model, num_data=setup.num_data)),
    "noisy-kfac": _rule(lambda setup: posterity.NoisyKFAC(setup.model, num_data=setup.num_data)),
    "bbb": bayes_by_backprop,
    "laplace": laplace_after_adamw,
}
