"""Adam as a rule, for the parameters that a name filter leaves without a posterior.

Kingma & Ba 2015, Algorithm 1, as torch.optim.Adam runs it: a rule that scales its step by the posterior's
variance would never move a weight that has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EPS = 1e-8
ADAM: dict[str, Any] = {"betas": (0.9, 0.999)}


def adam_init(mean: Tensor) -> dict[str, Tensor]:
    """Both moments at zero."""
    return {"momentum": torch.zeros_like(mean), "square": torch.zeros_like(mean)}


def adam_update(
    mean: Tensor, state: dict[str, Tensor], grad: Tensor, step: int | Tensor, group: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on E[g]."""
    beta1, beta2 = group["betas"]
    momentum = beta1 * state["momentum"] + (1 - beta1) * grad
    square = beta2 * state["square"] + (1 - beta2) * grad**2
    scale = (square / (1 - beta2**step)).sqrt() + _EPS
    mean = mean - group["lr"] / (1 - beta1**step) * momentum / scale
    return mean, {"momentum": momentum, "square": square}
