"""VOGN whose prior is the last task's posterior, weight by weight."""

from __future__ import annotations

import math
from typing import final

from torch import Tensor, nn

from posterity import VOGN, Factorised, compile_step
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
    """VOGN with known task boundaries, at which its posterior becomes the next prior.

    Args:
        model: What to train.
        num_data: Training examples of one task.
        lr: Learning rate.
        prior_precision: Precision of the first task's prior N(0, ·).
        betas: Momentum, and averaging of the curvature, which is handed over: that of one batch would be
            noise.
        damping: Added to the curvature of every weight.
        strength: How many times a task's curvature counts in the next prior, see ``VOGN.hand_over``.
        mc_samples: Weight samples per step.
        mask: Which logits count in training.
        seed: Of the weight noise.

    Example:
        >>> method = vogn_told(nn.Linear(4, 2), num_data=8, lr=1e-3)
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    rule = VOGN(
        model,
        preset="osawa2019",
        num_data=num_data,
        lr=lr,
        prior_precision=prior_precision,
        betas=betas,
        damping=damping,
        mc_samples=mc_samples,
        seed=seed,
    )
    return _Told(model, rule, mask, strength)


@final
class _Told(Method):
    def __init__(self, model: nn.Module, rule: VOGN, mask: Mask | None, strength: float) -> None:
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength must be 0 or more, and finite, not {strength:g}")
        self.model, self.optimizer, self._rule, self._strength = model, rule, rule, strength
        self._train_step = compile_step(model, masked_loss(mask), rule)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._train_step(x, y)

    def boundary(self, data: Split) -> None:
        """End a task: the posterior becomes the next task's prior."""
        self._rule.hand_over(self._strength)

    def posterior(self) -> Factorised:
        return self._rule.posterior()
