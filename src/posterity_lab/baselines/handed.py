"""VOGN whose prior is the last task's posterior, by weight.

As :class:`posterity.VOGN` at temperature 1, with a prior N(μ0, 1/(N δ̃)) that is part of the state, δ̃ being
of every weight its own:

    m ← β1 m + ĝ + δ̃ (μ − μ0)
    s ← β2 s + (1−β2) ĥ
    μ ← μ − α m / (s + δ̃ + γ)
    σ² = 1 / (N (s + δ̃ + γ))
    at a boundary:  μ0 ← μ,  δ̃ ← δ̃ + λ s,  s ← 0,  m ← 0

λ being the strength; where it is 1, σ right after a boundary is what it was. The damping γ is not handed on:
it is no knowledge.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from posterity import Factorised, VariationalOptimizer, compile_step
from posterity.curvature import Squares
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import Mask, masked_loss


def vogn_told(
    model: nn.Module,
    *,
    num_data: int,
    lr: float,
    prior_precision: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.99),
    damping: float = 1e-3,
    strength: float = 1.0,
    mc_samples: int = 1,
    mask: Mask | None = None,
    seed: int = 0,
) -> _Told:
    """VOGN that is told of boundaries, and takes its posterior for the next prior.

    Args:
        model: What to train.
        num_data: Training examples of one task.
        lr: Learning rate.
        prior_precision: Of the first task's prior N(0, ·).
        betas: Momentum, and averaging of the curvature, which is what is handed on: one batch's would be
            noise.
        damping: Added to the curvature of every weight.
        strength: How many times a task's curvature counts in the next prior. Bayes' rule says once, of the
            true one; squared gradients of examples that are learned by heart come to less.
        mc_samples: Weight samples per step.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> method = vogn_told(nn.Linear(4, 2), num_data=8, lr=1e-3)
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    group = {"lr": lr, "betas": betas, "damping": damping, "strength": strength, "num_data": num_data}
    rule = _Handed(model, {**group, "prior_precision": prior_precision}, mc_samples=mc_samples, seed=seed)
    return _Told(model, rule, mask)


@final
class _Handed(VariationalOptimizer):
    """The rule above."""

    collects = Squares

    def check(self, group: Any) -> None:
        if not group["prior_precision"] > 0:
            raise ValueError(f"prior_precision must be greater than 0, not {group['prior_precision']:g}")
        if not group["damping"] >= 0:
            raise ValueError(f"damping must be 0 or more, not {group['damping']:g}")
        if not group["strength"] >= 0:
            raise ValueError(f"strength must be 0 or more, not {group['strength']:g}")

    def init(self, mean: Tensor, std: Tensor | None, group: Any) -> dict[str, Tensor]:
        decay = torch.full_like(mean, group["prior_precision"] / group["num_data"])
        zeros = {key: torch.zeros_like(mean) for key in ("momentum", "anchor")}
        # Without curvature the first steps would be taken at weights that are noise.
        return {**zeros, "hess": torch.ones_like(mean), "decay": decay}

    def std(self, state: Any, group: Any) -> Tensor:
        shifted: Tensor = state["hess"] + state["decay"] + group["damping"]
        return torch.rsqrt(group["num_data"] * shifted)

    def update(self, mean: Tensor, state: Any, stats: Any, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2 = group["betas"]
        decay, anchor = state["decay"], state["anchor"]
        hess = beta2 * state["hess"] + (1 - beta2) * stats.squares
        momentum = beta1 * state["momentum"] + stats.grad + decay * (mean - anchor)
        moved = mean - group["lr"] * momentum / (hess + decay + group["damping"])
        return moved, {"momentum": momentum, "hess": hess, "anchor": anchor, "decay": decay}


@final
class _Told(Method):
    def __init__(self, model: nn.Module, rule: _Handed, mask: Mask | None) -> None:
        self.model, self.optimizer, self._rule = model, rule, rule
        self._train_step = compile_step(model, masked_loss(mask), rule)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._train_step(x, y)

    @torch.no_grad()
    def boundary(self, data: Split) -> None:
        """A task is over: what is known now is the next one's prior."""
        for group in self._rule.param_groups:
            for p in group["params"]:
                state = self._rule.state[p]
                state["anchor"].copy_(p)
                state["decay"].add_(state["hess"], alpha=group["strength"])
                state["hess"].zero_()
                state["momentum"].zero_()

    def posterior(self) -> Factorised:
        return self._rule.posterior()
