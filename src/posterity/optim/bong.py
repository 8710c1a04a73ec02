"""Bayesian online natural gradient, for streams of data, from per-example gradients.

Jones, Chang, Murphy: "Bayesian Online Natural Gradient", 2024, with a diagonal Gaussian and the empirical
Fisher matrix. The posterior after a batch is the prior of the next, as in BGD, and a batch takes one step of
natural gradient, without a KL term. With g_i the gradient of example i's own loss, θ = μ + σ·eps:

    σ⁻² ← σ⁻² + (1/τ) Σ_i E[g_i²]
    μ ← μ − η σ² (1/τ) Σ_i E[g_i]                                    with the σ of the line above

| paper | here | |
|---|---|---|
| μ | the model's parameters | the means, whenever no sample is drawn |
| σ | σ₀ / sqrt(``state[p]["evidence"]``) | evidence r = σ₀² / σ² begins at 1 |
| σ₀ | ``state[p]["start"]`` | ``std_scale`` / sqrt(fan_in), by tensor; ``std_init`` |
| 1 | 1 / τ = fan_in · fan_out / (``std_scale``² · ``consolidate_after``) | how often an example counts |
| 1 | η: a step is ``lr`` · E[(1/B) Σ_i g_i] / r | |
| M | ``mc_samples`` | |

so that with κ = fan_out / ``consolidate_after`` (``state[p]["unit"]``) a step is

    r ← r + κ Σ_i E[g_i²]
    μ ← μ − lr · E[g] / r

**Deviations, and why.** The paper has τ = η = 1. At the start E[g_i²] is proportional to 1 / fan_out, and σ₀²
to 1 / fan_in: in a layer of n weights an example raises each weight's precision by a share of 1/n. So stds
hardly fall in wide layers, and little is kept (docs/methods/bong.md). With τ proportional to 1/n they fall
equally fast in wide and narrow layers. Steps do not grow with 1/τ: the first ones are SGD's, with rate
``lr``, and a weight's steps get shorter as evidence for its value comes in. BGD estimates σ E[g_i²] by
E[g·eps], which is too noisy to count data many times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from posterity.curvature import Collector, Squares
from posterity.names import NameFilter
from posterity.optim.entries import constructor
from posterity.optim.groups import Params, above_zero, representable, whole
from posterity.optim.optimizer import VariationalOptimizer
from posterity.optim.presets import settings, start_std
from posterity.optim.state import Group, State
from posterity.optim.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def bong_evidence(evidence: Tensor, unit: Tensor, squares: Tensor) -> Tensor:
    """r ← r + κ Σ_i E[g_i²], ``squares`` being that sum."""
    return evidence + unit * squares


def bong_mean(mean: Tensor, evidence: Tensor, grad: Tensor, lr: float) -> Tensor:
    """μ ← μ − lr E[g] / r, ``grad`` being that of the mean loss."""
    return mean - lr * grad / evidence


@final
class BONG(VariationalOptimizer):
    """Bayesian online natural gradient: learning a stream without forgetting and without task boundaries.

    For every mini-batch: draw weights, average the gradient and the sum of the examples' squared gradients;
    the latter is evidence for each weight, which reduces its variance and the length of its steps. One weight
    sample is enough. For wide nets, the weight of an example grows with the size of the layer.

    Weights must be used by layers with per-example gradients, as for :class:`VOGN`; others are refused by
    name. Defaults are in ``presets.toml``.

    Args:
        params: A module, or what torch.optim takes.
        std_scale: Std of a weight at the start, times the square root of its fan-in: 1. It is all the
            plasticity there is.
        std_init: Std of every weight at the start, in place of ``std_scale``.
        lr: Rate of SGD, in the first steps: 1.
        consolidate_after: Examples after which a weight's precision has doubled, with gradients as at the
            start; later examples count less, since a net that has learned them has small gradients. Smaller
            values keep more of what was learned, and leave less room for later tasks.
        temperature: Divides the loss in the update of the precision: 1. It may change at every step.
        mc_samples: Weight samples per step: 1.
        max_step: The furthest that a mean moves in a step, in its current stds: 0.3.
        settle_after: Updates after which that bound starts to fall, as ``1 / sqrt(1 + t / settle_after)``; by
            default it is constant, since stds themselves fall.
        batch_size: Examples in each step, if they cannot be counted from the inputs of a module and are not
            passed to ``step()``.
        deterministic: Filter of names that get no posterior (see ``posterity.names_of`` for BatchNorm); the
            same rule trains them, without noise.
        deterministic_lr: If given, Adam trains those, with this learning rate.
        batch_dim: The axis of the examples in the inputs of the module and of layers with several axes: 1 for
            ``[T, B, …]``.
        mesh: Processes that each draw their own weights for their share of a batch.
        seed: Seed of the weight noise; by default one number from torch's generator, see
            :class:`~posterity.optim.VariationalOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = BONG(model)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> before = opt.posterior().std()["weight"]
        >>> loss = opt.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> bool((opt.posterior().std()["weight"] < before).all())
        True
    """

    needs_batch_size = True
    scheduled = ("lr", "temperature")
    collects: ClassVar[type[Collector]] = Squares
    without_noise: ClassVar[Group] = {}
    narrower = "lower std_scale"

    @constructor
    def __init__(
        self,
        params: Params,
        *,
        std_scale: float | None = None,
        std_init: float | None = None,
        lr: float | None = None,
        consolidate_after: float | None = None,
        temperature: float | None = None,
        mc_samples: int | None = None,
        max_step: float | None = None,
        settle_after: float | None = None,
        batch_size: int | None = None,
        deterministic: NameFilter = (),
        deterministic_lr: float | None = None,
        batch_dim: int = 0,
        mesh: DeviceMesh | None = None,
        seed: int | None = None,
    ) -> None:
        given = {"std_scale": std_scale, "std_init": std_init, "lr": lr, "mc_samples": mc_samples}
        given |= {"consolidate_after": consolidate_after, "max_step": max_step, "batch_size": batch_size}
        given |= {"settle_after": settle_after, "temperature": temperature}
        super().__init__(
            params,
            settings("BONG", "default", given, self.widths),
            seed=seed,
            deterministic=deterministic,
            deterministic_lr=deterministic_lr,
            batch_dim=batch_dim,
            mesh=mesh,
        )

    def check(self, group: Group) -> None:
        """Refuse values for which the rule is undefined."""
        above_zero(group, "consolidate_after", "temperature")
        if group.get("batch_size") is not None:
            whole(group, "batch_size")

    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """Initial evidence, and two constants: the initial std, and the weight of an example."""
        start = torch.full_like(mean, start_std(group, [mean]))
        outputs = mean.shape[0] if mean.dim() else 1
        unit = torch.full_like(mean, outputs / group["consolidate_after"])
        evidence = torch.ones_like(mean) if std is None else (start / std).square()
        representable(evidence, "BONG")
        return {"evidence": evidence, "start": start, "unit": unit}

    def std(self, state: State, group: Group) -> Tensor:
        """σ = σ₀ / sqrt(r)."""
        return state["start"] * state["evidence"].rsqrt()

    def rate(self, state: State, group: Group, batch_size: int) -> Tensor:
        """The factor on each weight's gradient of the mean loss: lr / r."""
        rate: Tensor = group["lr"] / state["evidence"]
        return rate

    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """Update the evidence, then the mean."""
        count = stats.batch_size / group["temperature"]
        evidence = bong_evidence(state["evidence"], state["unit"], count * stats.squares)
        return bong_mean(mean, evidence, stats.grad, group["lr"]), {"evidence": evidence}
