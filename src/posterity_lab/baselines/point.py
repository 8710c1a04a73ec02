"""Training of one set of weights, plain or with a penalty that protects earlier tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from posterity_lab.baselines.graph import Captured, Watch, rates_on_device
from posterity_lab.baselines.penalty import Importance, Penalty, by_fisher, by_path, equal
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import Mask, masked_loss

Nll: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def sgd(model: nn.Module, *, lr: float, momentum: float = 0.0, mask: Mask | None = None) -> _Point:
    """Stochastic gradient descent.

    Args:
        model: What to train.
        lr: Learning rate.
        momentum: As in torch.optim.
        mask: Which logits count in training.

    Example:
        >>> method = sgd(nn.Linear(4, 2), lr=0.1)
        >>> method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)).shape
        torch.Size([])
    """
    return _Point(model, torch.optim.SGD(_trained(model), lr=lr, momentum=momentum, fused=True), mask)


def adam(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    nll: Nll | None = None,
) -> _Point:
    """Adam.

    Args:
        model: What to train.
        lr: Learning rate.
        weight_decay: Factor of the weight that is added to its gradient, except for BatchNorm.
        mask: Which logits count in training.
        nll: Mean negative log-likelihood of outputs and targets, in place of the cross-entropy.

    Example:
        >>> method = adam(nn.Linear(4, 2), lr=1e-3)
        >>> method.posterior() is None
        True
    """
    return _Point(model, _adam(model, lr, weight_decay), mask, nll=nll)


def l2(model: nn.Module, *, lr: float, strength: float, mask: Mask | None = None) -> _Point:
    """Adam with an equal pull on all weights towards those at the last boundary.

    Args:
        model: What to train.
        lr: Learning rate.
        strength: Of the pull.
        mask: Which logits count in training.

    Example:
        >>> method = l2(nn.Linear(4, 2), lr=1e-3, strength=0.1)
        >>> method.boundary(Split(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
    """
    return _Point(model, _adam(model, lr), mask, strength, equal())


def ewc(
    model: nn.Module,
    *,
    lr: float,
    strength: float,
    decay: float = 1.0,
    labels: Literal["model", "data"] = "model",
    examples: int = 4096,
    mask: Mask | None = None,
) -> _Point:
    """Adam with online elastic weight consolidation.

    Args:
        model: What to train.
        lr: Learning rate.
        strength: Of the pull; half the paper's λ.
        decay: γ, the factor on earlier tasks' Fisher at each boundary.
        labels: ``"model"`` for the Fisher, ``"data"`` for the empirical one.
        examples: Number of a task's examples for the Fisher.
        mask: Which logits count in training.

    Example:
        >>> method = ewc(nn.Linear(4, 2), lr=1e-3, strength=100.0)
        >>> method.boundary(Split(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
    """
    return _Point(model, _adam(model, lr), mask, strength, by_fisher(model, decay, labels, examples, mask))


def si(
    model: nn.Module, *, lr: float, strength: float, damping: float = 0.1, mask: Mask | None = None
) -> _Point:
    """Adam with synaptic intelligence.

    Args:
        model: What to train.
        lr: Learning rate.
        strength: Of the pull; the paper's c.
        damping: The paper's ξ.
        mask: Which logits count in training.

    Example:
        >>> method = si(nn.Linear(4, 2), lr=1e-3, strength=0.1)
        >>> method.boundary(Split(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
    """
    return _Point(model, _adam(model, lr), mask, strength, by_path(_trained(model), damping))


@final
class _Point(Method):
    """One set of weights. On a GPU a step is a CUDA graph, without synchronisation.

    There a non-finite loss does not change the weights, and one of the next steps raises an error.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mask: Mask | None = None,
        strength: float = 0.0,
        rule: Importance | None = None,
        nll: Nll | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        rates_on_device(optimizer)
        self._params = _trained(model)
        self._loss = masked_loss(mask) if nll is None else lambda net, x, y: nll(net(x), y)
        self._penalty = None if rule is None else Penalty(self._params, strength, rule)
        self._watch = Watch(self._params[0].device)
        self._run = Captured(model, self._learn, self._tensors)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._watch.refuse()
        return self._run(x, y)

    def boundary(self, data: Split) -> None:
        """End a task, whose training data was ``data``."""
        if self._penalty is not None:
            self._penalty.renew(data)

    def posterior(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        own = {} if self._penalty is None else self._penalty.state_dict()
        return {**super().state_dict(), "penalty": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._penalty is not None:
            self._penalty.load_state_dict(state["penalty"])
        self._run.forget()  # the optimiser's state has moved

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._loss(self.model, x, y)
        bad = self._watch.see(loss)
        grads = torch.autograd.grad(loss, self._params, materialize_grads=True)
        pulled = grads if self._penalty is None else self._penalty.pulled(grads)
        for p, each in zip(self._params, pulled, strict=True):
            p.grad = each
        # Fused optimisers change neither weights nor state where this is 1.
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.step()
        if self._penalty is not None:
            self._penalty.rule.after_step(self._params, bad)
        return loss.detach()

    def _tensors(self) -> list[Tensor]:
        """All tensors that a step changes."""
        state = [value for own in self.optimizer.state.values() for value in own.values()]
        gathered = () if self._penalty is None else self._penalty.rule.tensors()
        changed = [*self._params, *self.model.buffers(), *state, *gathered, self._watch.count]
        return [tensor for tensor in changed if isinstance(tensor, Tensor)]


def _trained(model: nn.Module) -> tuple[nn.Parameter, ...]:
    params = tuple(p for p in model.parameters() if p.requires_grad)
    if not params:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
    return params


def _adam(model: nn.Module, lr: float, weight_decay: float = 0.0) -> torch.optim.Adam:
    params = _trained(model)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    spared = {p for norm in norms for p in norm.parameters()}
    groups = [
        {"params": [p for p in params if p not in spared], "weight_decay": weight_decay},
        {"params": [p for p in params if p in spared], "weight_decay": 0.0},
    ]
    return torch.optim.Adam(
        [group for group in groups if group["params"]], lr=lr, fused=True, capturable=params[0].is_cuda
    )
