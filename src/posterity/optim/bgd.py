"""Bayesian Gradient Descent: online variational Bayes, one closed-form update per mini-batch.

Zeno, Golan, Hoffer, Soudry: "Bayesian Gradient Descent: Online Variational Bayes Learning with Increased
Robustness to Catastrophic Forgetting and Weight Pruning", 2018. Algorithm 1, with m, v the mean and std
before the step, θ = m + v·eps, and L the *summed* loss of the mini-batch:

    μ = m − η v² E[∂L/∂θ]                                                     eq. (12), as in eq. (18)
    σ = v sqrt(1 + (½ v E[∂L/∂θ · eps])²) − ½ v² E[∂L/∂θ · eps]               eq. (13)

| paper | here | |
|---|---|---|
| m, μ | the model's parameters | the means, whenever no sample is drawn |
| v, σ | ``state[p]["std"]`` | |
| σ at the start | ``std_init`` | |
| η | ``lr`` | scales the step of the mean only |
| K | ``mc_samples`` | |
| ∂L/∂θ | batch_size / ``temperature`` · gradient | L is a sum, our losses are means over examples |

``temperature`` is not in the paper: data counts 1/temperature times, as if L were that much larger. At 0.1,
with a tenth of η, the means move at the same pace, and stds fall as far in one epoch as otherwise in ten.

There is no KL term, no momentum and no weight decay: the posterior after a batch is the prior of the next.

**Stability.** The mean's step is a gradient step preconditioned by σ². On a loss with Hessian H (of the
summed batch loss) it is stable while ``lr · λmax(diag(σ) H diag(σ)) < 2``; it is not enough that every single
σ²·h_ii is small. Initial stds are therefore relative to 1 / sqrt(fan_in), and ``max_step`` bounds the step of
the mean, in stds, and that of log σ, which restrains a run that would leave the stable region.

**Deviations.** Equation (13) loses all digits if h = ½ v E[g·eps] is large and positive; we compute the same
number as v / (sqrt(1+h²) + h). Parameters without a posterior are trained by Adam: with σ = 0, eq. (12) would
never move them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from posterity.names import NameFilter
from posterity.optim.apply import furthest
from posterity.optim.entries import constructor
from posterity.optim.groups import Params, above_zero, representable, whole
from posterity.optim.optimizer import VariationalOptimizer
from posterity.optim.presets import settings, start_std
from posterity.optim.state import Group, State
from posterity.optim.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def bgd_mean(mean: Tensor, std: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Eq. (12), ``grad`` being E[∂L/∂θ] of the summed loss."""
    return mean - lr * std * std * grad


def bgd_std(std: Tensor, grad_noise: Tensor, most: Any = math.inf) -> Tensor:
    """Eq. (13), ``grad_noise`` being E[∂L/∂θ · eps] of the summed loss; positive by construction.

    Its logarithm changes by asinh(½ σ E[∂L/∂θ · eps]); ``most`` bounds the argument of asinh.
    """
    half = (0.5 * std * grad_noise).clamp(-most, most)
    # sqrt(1+h²) − h and sqrt(1+h²) + h are each other's inverse: take the one without cancellation.
    growth = torch.hypot(half, torch.ones_like(half)) + half.abs()
    return std * torch.where(half > 0, 1.0 / growth, growth)


@final
class BGD(VariationalOptimizer):
    """Bayesian Gradient Descent: learning without forgetting and without task boundaries.

    For every mini-batch: draw ``mc_samples`` weight vectors, average gradient and gradient times noise, then
    move each mean by ``lr · std² · gradient`` and shrink or widen each std by the closed form of the paper.
    Weights that are well determined by the data have a small std and move little, which preserves old tasks.

    Settings that are not given come from the preset (``presets.toml``). ``"default"`` learns one task well;
    ``"continual"`` keeps what was learned in earlier tasks; ``"zeno2018"`` is the paper's rule, without a
    bound.

    Args:
        params: A module, or what torch.optim takes.
        preset: Where other settings come from.
        std_scale: Std of a weight at the start, times the square root of its fan-in: 0.3. It is all the
            plasticity there is.
        std_init: Std of every weight at the start, in place of ``std_scale``.
        lr: The paper's η: 20, to make up for small stds. 1 is the closed form itself; smaller values forget
            less.
        mc_samples: Weight samples per step (the paper's K): 10.
        temperature: Divides the loss: below 1 each example counts more than once, and stds fall faster. It
            may change at every step.
        max_step: The furthest that a mean moves in a step, in its current stds, and about the most that the
            logarithm of a std changes: 0.2.
        settle_after: Updates after which that bound starts to fall, as ``1 / sqrt(1 + t / settle_after)``; by
            default it is constant, since stds themselves fall.
        batch_size: Examples in each step, if they cannot be counted from the inputs of a module and are not
            passed to ``step()``.
        deterministic: Filter of names that get no posterior (see ``posterity.names_of`` for BatchNorm).
        deterministic_lr: Adam's learning rate for those.
        batch_dim: The axis of the examples in the module's inputs: 1 for ``[T, B, …]``.
        mesh: Processes that each draw their own weights for their share of a batch.
        overlap: Whether these processes send gradients during the backward pass.
        seed: Seed of the weight noise; by default one number from torch's generator, see
            :class:`~posterity.optim.VariationalOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = BGD(model, std_init=0.05, mc_samples=10)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> loss = opt.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> sorted(opt.posterior().blocks)
        ['bias', 'weight']
    """

    needs_batch_size = True
    scheduled = ("lr", "temperature")
    narrower = "lower std_scale"

    @constructor
    def __init__(
        self,
        params: Params,
        *,
        preset: str = "default",
        std_scale: float | None = None,
        std_init: float | None = None,
        lr: float | None = None,
        mc_samples: int | None = None,
        temperature: float | None = None,
        max_step: float | None = None,
        settle_after: float | None = None,
        batch_size: int | None = None,
        deterministic: NameFilter = (),
        deterministic_lr: float = 1e-3,
        batch_dim: int = 0,
        mesh: DeviceMesh | None = None,
        overlap: bool = False,
        seed: int | None = None,
    ) -> None:
        given = {"std_scale": std_scale, "std_init": std_init, "lr": lr, "mc_samples": mc_samples}
        given |= {"temperature": temperature, "max_step": max_step, "batch_size": batch_size}
        given["settle_after"] = settle_after
        super().__init__(
            params,
            settings("BGD", preset, given, self.widths),
            seed=seed,
            deterministic=deterministic,
            deterministic_lr=deterministic_lr,
            batch_dim=batch_dim,
            mesh=mesh,
            overlap=overlap,
        )

    def check(self, group: Group) -> None:
        """Refuse values for which the rule is undefined."""
        above_zero(group, "temperature")
        if group.get("batch_size") is not None:
            whole(group, "batch_size")

    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """The std of every weight."""
        if std is None:
            return {"std": torch.full_like(mean, start_std(group, [mean]))}
        representable(std * std, "BGD")  # the factor on a mean's gradient: at 0 the mean could never move
        return {"std": std}

    def std(self, state: State, group: Group) -> Tensor:
        """The std of every weight."""
        return state["std"]

    def rate(self, state: State, group: Group, batch_size: int) -> Tensor:
        """The factor on each weight's gradient of the mean loss in eq. (12): η σ² batch_size / τ."""
        rate: Tensor = group["lr"] * batch_size / group["temperature"] * state["std"] * state["std"]
        return rate

    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """Eqs. (12) and (13)."""
        std, count = state["std"], stats.batch_size / group["temperature"]
        return (
            bgd_mean(mean, std, count * stats.grad, group["lr"]),
            {"std": bgd_std(std, count * stats.grad_noise, furthest(group, stats.step))},
        )
