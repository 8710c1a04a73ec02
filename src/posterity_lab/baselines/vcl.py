"""Variational continual learning (Nguyen et al. 2018): the last task's posterior is the next one's prior.

Bayes by Backprop on each task's ELBO; the one line that makes it continual takes the posterior as it stands
for the prior. Without coresets. A task's posterior starts from the last one's, stds included.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import Factorised, IsotropicGaussian, elbo, variational
from posterity_lab.baselines.graph import Watch
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import Mask, restricted


def vcl(
    model: nn.Module,
    *,
    num_data: int,
    lr: float,
    std_init: float = 0.02,
    prior_std: float = 1.0,
    samples: int = 1,
    kl_factor: float = 1.0,
    mask: Mask | None = None,
    seed: int = 0,
) -> _Vcl:
    """Adam on the ELBO of each task, with the last task's posterior as prior.

    Args:
        model: What to train.
        num_data: Training examples of one task.
        lr: Learning rate.
        std_init: Std of every weight at the start.
        prior_std: Std of the first task's prior.
        samples: Weight samples per step.
        kl_factor: Scale of the KL; 1 is Bayes.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> method = vcl(nn.Linear(4, 2), num_data=8, lr=1e-3)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    net = variational(model, std_init=std_init, seed=seed)
    return _Vcl(net, IsotropicGaussian(prior_std), num_data, lr, samples, kl_factor, mask)


@final
class _Vcl(Method):
    """Bayes by Backprop that hands its posterior on to itself."""

    def __init__(
        self,
        net: Any,
        prior: IsotropicGaussian,
        num_data: int,
        lr: float,
        samples: int,
        kl_factor: float,
        mask: Mask | None,
    ) -> None:
        self.model = self._net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
        self._prior: IsotropicGaussian | Factorised = prior
        self._num_data, self._samples, self._factor, self._mask = num_data, samples, kl_factor, mask
        self._watch = Watch(next(net.parameters()).device)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._watch.refuse()
        logits = self._net.outputs(x, samples=self._samples)
        if self._mask is not None:
            logits = restricted(logits, self._mask(y))
        nll = cross_entropy(logits.flatten(0, 1), y.repeat(self._samples))
        loss = elbo(nll, self._net.kl(self._prior), num_data=self._num_data, factor=self._factor)
        self.optimizer.found_inf = self._watch.see(loss)  # type: ignore[attr-defined]
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def boundary(self, data: Split) -> None:
        """A task is over: what is known now is the next one's prior."""
        self._prior = self._net.posterior.frozen()

    def posterior(self) -> Factorised:
        posterior: Factorised = self._net.posterior.frozen()
        return posterior

    def state_dict(self) -> dict[str, Any]:
        handed = self._prior.state_dict() if isinstance(self._prior, Factorised) else None
        return {**super().state_dict(), "prior": handed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["prior"] is not None:
            prior = self._net.posterior.frozen()
            prior.load_state_dict(state["prior"])
            self._prior = prior
