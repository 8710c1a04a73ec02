"""Bayes by Backprop (Blundell et al. 2015), and VCL, which replaces its prior at boundaries.

Variational continual learning (Nguyen et al. 2018) is Bayes by Backprop on each task's ELBO, with the last
task's posterior as prior; here without coresets. A task's posterior starts from the last one, stds included.
With families other than the diagonal Gaussian it is Bayesian incremental learning (Kochurov et al. 2018).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import (
    ByName,
    Density,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    Variational,
    compile_step,
    variational,
)
from posterity.variational import Family
from posterity_lab.baselines.point import Nll
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import Mask, restricted

Descent: TypeAlias = Literal["adam", "sgd"]


def bbb(
    model: nn.Module,
    *,
    prior: Density,
    num_data: int,
    lr: float,
    std_init: float = 0.02,
    samples: int = 1,
    kl_factor: float = 1.0,
    family: Family = DiagonalGaussian,
    optimizer: Descent = "adam",
    nll: Nll = cross_entropy,
    mask: Mask | None = None,
    seed: int = 0,
) -> _Backprop:
    """Adam or SGD on the ELBO, through the draw of the weights.

    Args:
        model: What to train.
        prior: Of every weight.
        num_data: Training examples.
        lr: Learning rate.
        std_init: Std of every weight at the start, unless the family has its own.
        samples: Weight samples per step.
        kl_factor: Scale of the KL; 1 is Bayes.
        family: Of the posterior, as in ``variational``.
        optimizer: ``"adam"`` or ``"sgd"``, on the mean loss per example.
        nll: Mean negative log-likelihood of outputs ``[B, ...]`` and targets ``[B, ...]``.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> method = bbb(nn.Linear(4, 2), prior=IsotropicGaussian(0.1), num_data=8, lr=1e-3)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    net = variational(model, family=family, std_init=std_init, seed=seed)
    made = _descent(net, optimizer, lr)
    return _Backprop(net, made, prior, False, num_data, samples, kl_factor, nll, mask)


def vcl(
    model: nn.Module,
    *,
    num_data: int,
    lr: float,
    std_init: float = 0.02,
    prior_std: float = 1.0,
    prior: Density | Factorised | ByName | None = None,
    samples: int = 1,
    kl_factor: float = 1.0,
    family: Family = DiagonalGaussian,
    mask: Mask | None = None,
    seed: int = 0,
) -> _Backprop:
    """Adam on the ELBO of each task, with the last task's posterior as prior.

    Args:
        model: What to train.
        num_data: Training examples of one task.
        lr: Learning rate.
        std_init: Std of every weight at the start.
        prior_std: Std of the first task's prior, around 0.
        prior: The first task's prior instead, such as one around pretrained weights.
        samples: Weight samples per step.
        kl_factor: Scale of the KL; 1 is Bayes.
        family: Of the posterior, as in ``variational``.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> method = vcl(nn.Linear(4, 2), num_data=8, lr=1e-3)
        >>> method.boundary(Split(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
    """
    if not 0 < prior_std < float("inf"):
        raise ValueError(f"prior_std must be finite and greater than 0, not {prior_std:g}")
    net = variational(model, family=family, std_init=std_init, seed=seed)
    first = IsotropicGaussian(prior_std) if prior is None else prior
    made = _descent(net, "adam", lr)
    return _Backprop(net, made, first, True, num_data, samples, kl_factor, cross_entropy, mask)


@final
class _Backprop(Method):
    """Bayes by Backprop with `compile_step`: on a GPU a step is a CUDA graph, without synchronisation."""

    def __init__(
        self,
        net: Variational,
        optimizer: torch.optim.Optimizer,
        prior: Density | Factorised | ByName,
        hands_over: bool,
        num_data: int,
        samples: int,
        kl_factor: float,
        nll: Nll,
        mask: Mask | None,
    ) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, not {samples}")
        self.model = self._net = net
        self.optimizer = optimizer
        self._prior, self._hands_over, self._handed = prior, hands_over, False
        self._how: dict[str, Any] = {"num_data": num_data, "mc_samples": samples, "factor": kl_factor}
        self._nll, self._mask = nll, mask
        self._begin()

    def _begin(self) -> None:
        """Compile the step for the current prior."""
        self._train_step = compile_step(self._net, self._loss, self.optimizer, prior=self._prior, **self._how)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._train_step(x, y)

    def boundary(self, data: Split) -> None:
        """End a task: the posterior becomes the next prior, if the method hands it over."""
        if self._hands_over:
            self._prior, self._handed = self.posterior(), True
            self._begin()

    def posterior(self) -> Factorised:
        return self._net.posterior.frozen()

    def state_dict(self) -> dict[str, Any]:
        prior = self._prior.state_dict() if isinstance(self._prior, Factorised) and self._handed else None
        return {**super().state_dict(), "prior": prior}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["prior"] is not None:
            self._prior, self._handed = self.posterior(), True
            self._prior.load_state_dict(state["prior"])
        self._begin()

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return self._nll(outputs if self._mask is None else restricted(outputs, self._mask(y)), y)


def _trained(net: Variational) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _descent(net: Variational, name: Descent, lr: float) -> torch.optim.Optimizer:
    params = _trained(net)
    match name:
        case "adam":
            return torch.optim.Adam(params, lr=lr, fused=True, capturable=params[0].is_cuda)
        case "sgd":
            return torch.optim.SGD(params, lr=lr, fused=True)
    raise ValueError(f"optimizer must be 'adam' or 'sgd', not {name!r}")
