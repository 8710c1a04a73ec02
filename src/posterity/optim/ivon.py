"""IVON: variational learning by an improved online Newton step, at about the cost of Adam.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan, Möllenhoff: "Variational Learning
is Effective for Large Deep Networks", ICML 2024. Algorithm 1, with g the gradient of the mean loss at
θ = m + σ·eps:

    σ = 1 / sqrt(λ (h + δ))
    ĥ = g · eps / σ                                        by reparametrisation, E[ĥ] = E[diagonal Hessian]
    h ← β2 h + (1−β2) ĥ + ½ (1−β2)² (h − ĥ)² / (h + δ)     the last term keeps h + δ positive
    ḡ ← β1 ḡ + (1−β1) g
    m ← m − α (ḡ / (1 − β1^t) + δ m) / (h + δ)

| paper | here | |
|---|---|---|
| m | the model's parameters | |
| λ (effective sample size) | ``num_data / temperature`` | |
| δ (weight decay) | ``temperature · prior_precision / num_data`` | |
| h at the start | ``hess_init`` | derived from the initial std, 1 / sqrt(λ (hess_init + δ)) |
| α | ``lr · (hess_init + δ)`` | learning rates are similar to Adam's and SGD's |
| β1, β2 | ``betas`` | |
| samples | ``mc_samples`` | g and ĥ are averaged over them |
| 1 | ``second_every`` | steps from one ĥ to the next; h then uses β2 to that power |

**Deviations.** Steps fall (``settle_after``) and are bounded by ``max_step`` stds, except with
``preset="shen2024"``. ``clip_radius`` bounds each weight's preconditioned step before the learning rate, as
in the authors' code. ``second_every`` skips ĥ in the steps between. The authors' β2 of 0.99999 averages the
Hessian over 100,000 steps, 0.9999 over 10,000: choose 1 − 1/steps for a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from posterity.names import NameFilter
from posterity.optim.entries import constructor
from posterity.optim.groups import Params, above_zero, moderate, number, representable, whole
from posterity.optim.optimizer import VariationalOptimizer
from posterity.optim.presets import above_prior, settings, start_std
from posterity.optim.state import Group, State
from posterity.optim.statistics import Statistics
from posterity.optim.step import due

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ivon_std(precision: Tensor, ess: float) -> Tensor:
    """σ = 1 / sqrt(λ (h + δ)), given h + δ."""
    return torch.rsqrt(ess * precision)


def ivon_hess(hess: Tensor, precision: Tensor, estimate: Tensor, beta2: float) -> Tensor:
    """The Riemannian average of h and ĥ, given h + δ too, which stays positive."""
    gap = hess - estimate
    mean = torch.sub(hess, gap, alpha=1 - beta2)
    return torch.addcdiv(mean, gap * gap, precision, value=0.5 * (1 - beta2) ** 2)


@final
class IVON(VariationalOptimizer):
    """Improved Variational Online Newton: an Adam-like step that also learns each weight's variance.

    Args:
        params: A module, or what torch.optim takes.
        num_data: Training examples (N).
        preset: Source of settings that are not given: ``"default"``, or ``"shen2024"``, the authors' values
            for CIFAR-10.
        lr: Learning rate: 3. The gradient is averaged, not summed, so 1 is about SGD's 0.1 with momentum 0.9.
            Steps fall, see ``settle_after``.
        std_scale: Std of a weight at the start, times the square root of the mean fan-in: 0.05.
        std_init: Std of every weight at the start, in place of ``std_scale``.
        hess_init: Diagonal Hessian of the mean loss that the posterior starts from; by default, the one that
            gives the initial std.
        prior_precision: Precision of the prior N(0, ·): 1.
        temperature: 1 is Bayes; smaller values give a sharper posterior.
        betas: Averaging of the gradient and of the Hessian: (0.9, 0.9999).
        max_step: The furthest that a weight moves in a step, in stds without data: 0.34. If it is infinite,
            steps do not fall either.
        settle_after: Updates after which steps and their bound start to fall, as
            ``1 / sqrt(1 + t / settle_after)``: 60.
        clip_radius: Bound on each weight's preconditioned step, as in the authors' code.
        second_every: Steps from one update of the Hessian to the next: 1. With ``mesh=`` the other steps send
            only the gradient, half as much.
        mc_samples: Weight samples per step: 1.
        deterministic: Filter of names that get no posterior.
        deterministic_lr: Adam's learning rate for those.
        batch_dim: The axis of the examples in the module's inputs: 1 for ``[T, B, …]``.
        mesh: Processes that each draw their own weights for their share of a batch.
        overlap: Whether these processes send gradients during the backward pass.
        seed: Seed of the weight noise; by default one number from torch's generator, see
            :class:`~posterity.optim.VariationalOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = IVON(model, num_data=8, lr=0.1)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> with opt.sampled_params():
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> bool((opt.posterior().std()["weight"] > 0).all())
        True
    """

    derived = ("hess_init",)
    widths = ("std_scale", "std_init", "hess_init")
    narrower = "lower std_scale, or raise prior_precision"

    @constructor
    def __init__(
        self,
        params: Params,
        *,
        num_data: int,
        preset: str = "default",
        lr: float | None = None,
        std_scale: float | None = None,
        std_init: float | None = None,
        hess_init: float | None = None,
        prior_precision: float | None = None,
        temperature: float | None = None,
        betas: tuple[float, float] | None = None,
        max_step: float | None = None,
        settle_after: float | None = None,
        clip_radius: float | None = None,
        second_every: int | None = None,
        mc_samples: int | None = None,
        deterministic: NameFilter = (),
        deterministic_lr: float = 1e-3,
        batch_dim: int = 0,
        mesh: DeviceMesh | None = None,
        overlap: bool = False,
        seed: int | None = None,
    ) -> None:
        given = {"num_data": num_data, "lr": lr, "prior_precision": prior_precision, "betas": betas}
        given |= {"std_scale": std_scale, "std_init": std_init, "hess_init": hess_init}
        given |= {"temperature": temperature, "max_step": max_step, "clip_radius": clip_radius}
        given |= {"settle_after": settle_after, "second_every": second_every}
        super().__init__(
            params,
            settings("IVON", preset, {**given, "mc_samples": mc_samples}, self.widths),
            seed=seed,
            deterministic=deterministic,
            deterministic_lr=deterministic_lr,
            batch_dim=batch_dim,
            mesh=mesh,
            overlap=overlap,
        )

    def check(self, group: Group) -> None:
        """Refuse values for which the rule is undefined."""
        above_zero(group, "num_data", "prior_precision", "temperature", "hess_init")
        moderate("num_data / temperature", float(group["num_data"]) / float(group["temperature"]))
        if not number(group, "clip_radius") > 0:
            raise ValueError(f"clip_radius must be greater than 0, not {group['clip_radius']}")
        whole(group, "second_every")

    def captures(self) -> bool:
        """Whether every step has an estimate of the Hessian, or this one has none."""
        first = self.param_groups[0]
        return bool(first["second_every"] == 1 or not due(first))

    def derive(self, key: str, group: Group, params: Sequence[Tensor]) -> float:
        """The ``hess_init`` that gives the initial std."""
        ess, decay = _scales(group)
        return above_prior(start_std(group, params), ess, decay)

    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """Averaged gradient and Hessian."""
        if std is None:
            hess = torch.full_like(mean, group["hess_init"])
        else:
            ess, decay = _scales(group)
            hess = 1.0 / (ess * std * std) - decay
            representable(hess + decay, "IVON")
        return {"momentum": torch.zeros_like(mean), "hess": hess}

    def std(self, state: State, group: Group) -> Tensor:
        """σ = 1 / sqrt(λ (h + δ))."""
        ess, decay = _scales(group)
        return ivon_std(state["hess"] + decay, ess)

    def scale(self, state: State, group: Group) -> float:
        """σ at the start."""
        ess, decay = _scales(group)
        return float((ess * (group["hess_init"] + decay)) ** -0.5)

    def rate(self, state: State, group: Group, batch_size: int) -> Tensor:
        """The factor on each weight's averaged gradient of the mean loss: α / (h + δ)."""
        decay = _scales(group)[1]
        step: float = group["lr"] * (group["hess_init"] + decay)
        return step / (state["hess"] + decay)

    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """Update the Hessian, if the step has an estimate, and the averaged gradient, then step by both."""
        beta1, beta2 = group["betas"]
        ess, decay = _scales(group)
        hess = state["hess"]
        if stats.grad_noise.numel():
            precision = hess + decay
            estimate = stats.grad_noise / ivon_std(precision, ess)
            hess = ivon_hess(hess, precision, estimate, beta2 ** group["second_every"])
        momentum = torch.lerp(state["momentum"], stats.grad, 1 - beta1)
        direction = torch.add(momentum / (1 - beta1**stats.step), mean, alpha=decay) / (hess + decay)
        radius = group["clip_radius"]
        if radius < math.inf:
            direction = direction.clamp(-radius, radius)
        step = group["lr"] * (group["hess_init"] + decay)
        return mean - step * direction, {"momentum": momentum, "hess": hess}


def _scales(group: Group) -> tuple[float, float]:
    """λ and δ."""
    ess = group["num_data"] / group["temperature"]
    return ess, group["prior_precision"] / ess
