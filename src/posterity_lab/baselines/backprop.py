"""Bayes by Backprop (Blundell et al. 2015), and with a prior that is replaced at boundaries, VCL.

Variational continual learning (Nguyen et al. 2018) is Bayes by Backprop on each task's ELBO with the last
task's posterior for a prior. Without coresets. A task's posterior starts from the last one's, stds included.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import Density, DiagonalGaussian, Factorised, elbo, kl, run, variational
from posterity_lab.baselines.graph import Captured, Watch
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import Mask, restricted


def bbb(
    model: nn.Module,
    *,
    prior: Density,
    num_data: int,
    lr: float,
    std_init: float = 0.02,
    samples: int = 1,
    kl_factor: float = 1.0,
    mask: Mask | None = None,
    seed: int = 0,
) -> _Backprop:
    """Adam on the ELBO, through the draw of the weights.

    Args:
        model: What to train.
        prior: Of every weight.
        num_data: Training examples.
        lr: Learning rate.
        std_init: Std of every weight at the start.
        samples: Weight samples per step.
        kl_factor: Scale of the KL; 1 is Bayes.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> from posterity import IsotropicGaussian
        >>> method = bbb(nn.Linear(4, 2), prior=IsotropicGaussian(0.1), num_data=8, lr=1e-3)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    return _Backprop(model, prior, num_data, lr, std_init, samples, kl_factor, mask, seed)


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
) -> _Backprop:
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
        >>> method.boundary(Split(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
    """
    if not 0 < prior_std < float("inf"):
        raise ValueError(f"prior_std must be finite and greater than 0, not {prior_std:g}")
    prior = Factorised(
        {
            name: DiagonalGaussian(torch.zeros_like(p), prior_std)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
    )
    return _Backprop(model, prior, num_data, lr, std_init, samples, kl_factor, mask, seed)


@final
class _Backprop(Method):
    """Bayes by Backprop. On a GPU a step is a CUDA graph, and waits for nothing.

    There a loss that is not finite leaves the weights as they are, and is raised by one of the next steps. A
    prior that is a posterior stays where it is: a boundary gives it other values, and a graph sees them.
    """

    def __init__(
        self,
        model: nn.Module,
        prior: Density | Factorised,
        num_data: int,
        lr: float,
        std_init: float,
        samples: int,
        kl_factor: float,
        mask: Mask | None,
        seed: int,
    ) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, not {samples}")
        self.model = self._net = variational(model, std_init=std_init, seed=seed)
        self._params = [p for p in self._net.parameters() if p.requires_grad]
        device = self._params[0].device
        self.optimizer = torch.optim.Adam(self._params, lr=lr, fused=True, capturable=device.type == "cuda")
        self._prior, self._num_data, self._samples = prior, num_data, samples
        self._factor, self._mask = kl_factor, mask
        # torch's noise, not the library's: on a CPU that is addressed by numbers which a graph would fix.
        self._noise = torch.Generator(device).manual_seed(seed)
        self._watch = Watch(device)
        self._run = Captured(self._net, self._learn, self._tensors, [self._noise])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._watch.refuse()
        return self._run(x, y)

    @torch.no_grad()
    def boundary(self, data: Split) -> None:
        """A task is over: a prior that is a posterior becomes what is known now."""
        if isinstance(self._prior, Factorised):
            mean, std = self._net.posterior.mean(), self._net.posterior.std()
            for name, leaf in self._prior.blocks.items():
                leaf.load_state_dict({"loc": mean[name], "raw": std[name]})

    def posterior(self) -> Factorised:
        return self._net.posterior.frozen()

    def state_dict(self) -> dict[str, Any]:
        prior = self._prior.state_dict() if isinstance(self._prior, Factorised) else {}
        return {**super().state_dict(), "prior": prior, "noise": self._noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if isinstance(self._prior, Factorised):
            self._prior.load_state_dict(state["prior"])
        self._noise.set_state(state["noise"].cpu())
        self._run.forget()  # the optimiser's state lies elsewhere

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        posterior = self._net.posterior
        weights = posterior.split(
            {name: leaf.draw(self._normal(leaf)) for name, leaf in posterior.blocks.items()}
        )
        logits = run(self._net.module, weights, x)
        if self._mask is not None:
            logits = restricted(logits, self._mask(y))
        nll = cross_entropy(logits.flatten(0, 1), y.repeat(self._samples))
        divergence = kl(posterior, self._prior, weights=weights)
        loss = elbo(nll, divergence, num_data=self._num_data, factor=self._factor)
        # Fused optimisers leave weights and state as they are where this is 1.
        self.optimizer.found_inf = self._watch.see(loss)  # type: ignore[attr-defined]
        for p, grad in zip(self._params, torch.autograd.grad(loss, self._params), strict=True):
            p.grad = grad
        self.optimizer.step()
        return loss.detach()

    def _normal(self, leaf: Any) -> Tensor:
        shape = (self._samples, *leaf.shape)
        return torch.randn(shape, generator=self._noise, device=leaf.device, dtype=leaf.dtype)

    def _tensors(self) -> list[Tensor]:
        """All that a step changes."""
        state = [value for own in self.optimizer.state.values() for value in own.values()]
        changed = [*self._params, *self._net.buffers(), *state, self._watch.count]
        return [tensor for tensor in changed if isinstance(tensor, Tensor)]
