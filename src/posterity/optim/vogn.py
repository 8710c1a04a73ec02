"""VOGN and OGN: natural-gradient variational inference in the form of Adam, with a Gauss-Newton curvature.

Khan, Nielsen, Tangkaratt, Lin, Gal, Srivastava: "Fast and Scalable Bayesian Deep Learning by
Weight-Perturbation in Adam", ICML 2018; Osawa, Swaroop, Jain, Eschenhagen, Turner, Yokota, Khan: "Practical
Deep Learning with Bayesian Principles", NeurIPS 2019. Algorithm 1 of the latter, with g_i the gradient of
example i's own loss at θ = μ + σ·eps:

    ĝ = E[(1/B) Σ_i g_i],  ĥ = E[(1/B) Σ_i g_i²]      over weight samples; ĥ ≥ 0 stands for the Hessian
    m ← β1 m + (ĝ + δ̃ μ)
    s ← β2 s + (1−β2) ĥ
    μ ← μ − α m / (s + δ̃ + γ)
    σ² = τ / (N (s + δ̃ + γ))

| paper | here | |
|---|---|---|
| μ | the model's parameters | |
| m, s | ``state[p]["momentum"]``, ``state[p]["hess"]`` | |
| s at the start | ``hess_init`` | if 0, s is the mean of all ĥ while these are fewer than 1 / (1−β2) |
| α | ``lr · lr_unit`` | m is a sum of gradients: the effective rate is α / (1 − β1) |
| β1 | ``betas[0]`` | |
| β2, the weight of the *new* ĥ | ``1 − betas[1]`` | ``betas`` are as Adam's |
| N, ρ | ``num_data``, ``augmentation`` | the N above is ``num_data · augmentation`` |
| δ, δ̃ | ``prior_precision``, ``temperature · prior_precision / N`` | |
| τ, γ, K | ``temperature``, ``damping``, ``mc_samples`` | |

After :meth:`VOGN.hand_over` the prior of a weight is N(μ0, 1/(δ + κ)), with ``state[p]["prior_mean"]`` and
``state[p]["known"]``: δ + κ replaces δ above, and μ − μ0 replaces μ in δ̃ μ. ``state[p]["since"]`` is the
number of updates at that time.

OGN takes its gradients at μ, and is otherwise the same: its Gaussian is fitted, but not used in training.

**Tempering.** Two forms of the rule exist, which agree at τ = 1. Algorithm 1 as printed has
s ← (1 − τβ2) s + β2 ĥ and σ² = 1 / (N (s + δ̃ + γ)), whose precision converges to N ĥ/τ + τδ + Nγ. The
authors' code has the form above, which converges to N ĥ/τ + δ + Nγ/τ: without damping, the precision of the
tempered posterior.

**Damping** is part of the posterior's precision, as in the authors' code.

**Momentum and learning rate.** A step is α·m / (s + δ̃ + γ), and m does not contain α: when α drops, the step
drops at once. Rules whose buffer holds α·m need the momentum correction of Goyal et al. 2017 for that; this
rule does not. ``keep_velocity=True`` stores v = α·m instead, v ← β1 v + α (ĝ + δ̃ μ). While α is constant
both are the same; when α changes from a to b, v keeps its value and decays by β1, as if m were multiplied by
a / b.

**Deviations.** Steps fall (``settle_after``) and are bounded by ``max_step`` stds, except with
``preset="osawa2019"``. ĥ is exact for biases of convolutions and for BatchNorm, which the authors
approximate. As in the authors' code, the same rule trains parameters without a posterior, without noise and
without a prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, final

import torch
from torch import Tensor

from posterity.arguments import described
from posterity.curvature import Collector, Squares
from posterity.names import NameFilter
from posterity.optim.entries import constructor
from posterity.optim.groups import Params, above_zero, at_least_zero, moderate, representable
from posterity.optim.optimizer import VariationalOptimizer
from posterity.optim.presets import above_prior, settings, start_std
from posterity.optim.state import Group, State, zero
from posterity.optim.statistics import Statistics
from posterity.posterior import Leaf

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def vogn_hess(hess: Tensor, squares: Tensor, beta2: float | Tensor) -> Tensor:
    """s ← β2 s + (1−β2) ĥ."""
    return beta2 * hess + (1 - beta2) * squares


def vogn_std(hess: Tensor, temperature: float | Tensor, num_data: float, shift: float | Tensor) -> Tensor:
    """σ = sqrt(τ / (N (s + δ̃ + γ))), ``shift`` being δ̃ + γ."""
    return (temperature / (num_data * (hess + shift))).sqrt()


class Settings(TypedDict, total=False):
    """Settings common to all of these rules; :class:`VOGN` explains them."""

    preset: str
    lr: float | None
    lr_unit: float | None
    std_scale: float | None
    std_init: float | None
    damping: float | None
    hess_init: float | None
    prior_precision: float | None
    temperature: float | None
    betas: tuple[float, float] | None
    max_step: float | None
    settle_after: float | None
    augmentation: float | None
    keep_velocity: bool | None
    mc_samples: int | None
    deterministic: NameFilter
    deterministic_lr: float | None
    batch_dim: int
    mesh: DeviceMesh | None
    seed: int | None


class GaussNewton(VariationalOptimizer):
    """The rule of VOGN and OGN, which differ in where they take gradients, and the base of K-FAC."""

    collects: ClassVar[type[Collector]] = Squares
    scheduled = ("lr", "temperature")
    derived = ("damping", "lr_unit")
    widths = ("std_scale", "std_init", "damping")
    without_noise: ClassVar[Group] = {"prior_precision": 0.0}
    narrower = "lower std_scale, or raise damping"
    table: ClassVar[str] = "VOGN"

    @constructor
    def __init__(
        self,
        params: Params,
        *,
        num_data: int,
        preset: str = "default",
        lr: float | None = None,
        lr_unit: float | None = None,
        std_scale: float | None = None,
        std_init: float | None = None,
        damping: float | None = None,
        hess_init: float | None = None,
        prior_precision: float | None = None,
        temperature: float | None = None,
        betas: tuple[float, float] | None = None,
        max_step: float | None = None,
        settle_after: float | None = None,
        augmentation: float | None = None,
        keep_velocity: bool | None = None,
        mc_samples: int | None = None,
        deterministic: NameFilter = (),
        deterministic_lr: float | None = None,
        batch_dim: int = 0,
        mesh: DeviceMesh | None = None,
        seed: int | None = None,
        _more: Group | None = None,
    ) -> None:
        given = {"num_data": num_data, "lr": lr, "lr_unit": lr_unit, "betas": betas, "max_step": max_step}
        given |= {"std_scale": std_scale, "std_init": std_init, "damping": damping, "hess_init": hess_init}
        given |= {"prior_precision": prior_precision, "temperature": temperature, "mc_samples": mc_samples}
        given |= {"augmentation": augmentation, "keep_velocity": keep_velocity, "settle_after": settle_after}
        given |= _more or {}
        super().__init__(
            params,
            settings(self.table, preset, given, self.widths),
            seed=seed,
            deterministic=deterministic,
            deterministic_lr=deterministic_lr,
            batch_dim=batch_dim,
            mesh=mesh,
        )

    def check(self, group: Group) -> None:
        """Refuse values for which the rule is undefined."""
        above_zero(group, "num_data", "temperature", "augmentation", "lr_unit")
        at_least_zero(group, "prior_precision", "damping", "hess_init")
        if not isinstance(group["keep_velocity"], bool):
            raise ValueError(f"keep_velocity must be True or False, not {described(group['keep_velocity'])}")
        size = float(group["num_data"]) * float(group["augmentation"]) / float(group["temperature"])
        moderate("num_data · augmentation / temperature", size)
        if not group["prior_precision"] + group["damping"] > 0:
            raise ValueError("damping must be greater than 0 if prior_precision is 0")
        if not self.draws and group["mc_samples"] != 1:
            raise ValueError(f"mc_samples must be 1: {type(self).__name__} draws no weights")

    def derive(self, key: str, group: Group, params: Sequence[Tensor]) -> float:
        """The ``damping`` that gives the initial std, or the ``lr_unit`` for averaged gradients."""
        if key == "damping":
            num_data = group["num_data"] * group["augmentation"]
            ess = num_data / group["temperature"]
            return above_prior(start_std(group, params), ess, group["prior_precision"] / ess)
        return float((1 - group["betas"][0]) * (group["hess_init"] + scales(group)[2]))

    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """Momentum and curvature."""
        if std is None:
            hess = torch.full_like(mean, group["hess_init"])
        else:
            num_data, _, shift = scales(group)
            hess = group["temperature"] / (num_data * std * std) - shift
            representable(hess + shift, type(self).__name__)
        return {"momentum": torch.zeros_like(mean), "hess": hess}

    def std(self, state: State, group: Group) -> Tensor:
        """σ = sqrt(τ / (N (s + δ̃ + γ)))."""
        num_data, _, shift = scales(group, state)
        return vogn_std(state["hess"], group["temperature"], num_data, shift)

    def scale(self, state: State, group: Group) -> Any:
        """σ without data: curvature by itself slows steps down."""
        num_data, _, shift = scales(group, state)
        return (group["temperature"] / (num_data * shift)) ** 0.5

    def rate(self, state: State, group: Group, batch_size: int) -> Tensor:
        """The factor on the sum m of each weight's gradients of the mean loss: α / (s + δ̃ + γ)."""
        rate: Tensor = group["lr"] * group["lr_unit"] / (state["hess"] + scales(group, state)[2])
        return rate

    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """Update curvature and momentum, then take the preconditioned step."""
        _, decay, shift = scales(group, state)
        rate = group["lr"] * group["lr_unit"]
        into, out = (rate, 1.0) if group["keep_velocity"] else (1.0, rate)
        curvature = self.curvature(state, stats, group)
        away = mean - state["prior_mean"] if "prior_mean" in state else mean
        momentum = group["betas"][0] * state["momentum"] + into * (stats.grad + decay * away)
        moved = mean - out * momentum / (curvature["hess"] + shift)
        return moved, {"momentum": momentum, **curvature}

    def curvature(self, state: State, stats: Statistics, group: Group) -> State:
        """s ← β2 s + (1−β2) ĥ; if s starts from 0, the mean of all ĥ until there are 1 / (1−β2) of them."""
        beta2 = group["betas"][1]
        if _is_mean(state, group):
            beta2 = _at_most(1 - 1 / (1 + (stats.step - 1) // group.get("factors_every", 1)), beta2)
        return {"hess": vogn_hess(state["hess"], stats.squares, beta2)}

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """State from a loaded posterior, whose curvature counts as learned from data."""
        prior = {key: torch.zeros_like(mean) for key in ("prior_mean", "known")}
        return {**self.init(mean, std, group), **prior}

    @torch.no_grad()
    def hand_over(self, strength: float = 1.0) -> None:
        """Make the posterior the prior of what follows; call this between tasks.

        The prior of every weight that was updated becomes N(μ, 1 / (δ + κ)), where μ is its current mean and
        κ the precision that it has gained from data so far. ``hess_init`` and the damping do not count, since
        they do not come from data. Curvature and momentum start from 0 again. After t updates a curvature
        that started at s₀ is β2ᵗ s₀ + (1 − β2ᵗ) ĥ, where ĥ is a weighted mean over batches; κ grows by
        N ĥ / τ. ``betas[1]`` should be near 1, or ĥ is that of the last batch alone.

        The curvature of a loaded posterior counts as an earlier estimate from the same data: its whole
        average is handed on. If it comes from other data, call this right after loading. A loaded posterior
        comes with the prior N(0, 1 / δ). Deterministic parameters have no prior.

        Args:
            strength: How many times the curvature since the last call counts. Bayes' rule counts the true
                curvature once; squared gradients of memorised examples underestimate it.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> opt = VOGN(model, num_data=8, lr=0.01, betas=(0.9, 0.99))
            >>> loss = opt.step(lambda: model(torch.ones(8, 4)).square().mean())
            >>> opt.hand_over()
            >>> bool((opt.state[model.weight]["prior_mean"] == model.weight).all())
            True
        """
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength must be 0 or more, and finite, not {strength:g}")
        if self.matrices:
            raise TypeError(f"{type(self).__name__} has no precision per weight to hand over: use VOGN")
        self.refuse_inside("hand_over()")
        self.check_changed()
        self.settle()
        self.cache.groups()
        for p in self.parameters():
            self.state[p]["momentum"].zero_()
        for _, p, group in self.stochastic():
            state, (num_data, *_) = self.state[p], scales(group)
            mean, hess = state.get("mean", p), state["hess"]
            begun = "since" in state or "known" not in state  # from no curvature or a guess: not loaded
            updates = int(state["step"]) - int(state.get("since", 0))
            if begun and not updates:
                continue
            # β2 as rounded in steps: many steps, and 1 / (1 − β2ᵗ), would amplify the difference.
            beta2 = torch.tensor(group["betas"][1], dtype=hess.dtype).item()
            forgotten = beta2**updates if begun and not _is_mean(state, group) else 0.0
            if "known" not in state:
                state.update({key: torch.zeros_like(hess) for key in ("prior_mean", "known")})
                hess = hess - forgotten * self.init(mean, None, group)["hess"]
            state["prior_mean"].copy_(mean)
            # A posterior that was wider than its prior has curvature below 0.
            gained = hess.clamp(min=0.0) / (1.0 - forgotten)
            state["known"].add_(gained, alpha=strength * num_data / group["temperature"])
            state["hess"].zero_()
            state.setdefault("since", zero()).copy_(state["step"])
        self.reset()


@final
class VOGN(GaussNewton):
    """Variational Online Gauss-Newton: Adam's form, with a scale learned from per-example gradients.

    For every mini-batch: draw ``mc_samples`` weight vectors, average the gradient and the examples' squared
    gradients, then step by both. Weights must be used by layers with per-example gradients (linear layers,
    convolutions, norms, embeddings, attention); others are refused by name.

    Settings that are not given come from the preset (``presets.toml``). In ``"default"`` the std of a weight
    has an upper limit set by the fan-in, curvature from data lowers it, and ``lr`` is the rate of a step on
    averaged gradients where there is no curvature. ``"osawa2019"`` has the authors' values for CIFAR-10,
    except ``prior_precision``, which they set to 100 (LeNet-5), 0.5 (AlexNet) and 50 (ResNet-18, with
    BatchNorm deterministic), and ``mc_samples``, which they set to 6, 3 and 5. On ImageNet they used
    ``betas=(0.9, 0.1)``. Their ``augmentation`` was 10 on CIFAR-10 and 5 on ImageNet. They warm up the
    temperature, as ``posterity.warmup(steps, start=0.1)`` does in the example.

    Args:
        params: A module, or what torch.optim takes.
        num_data: Training examples (N).
        preset: Source of settings that are not given.
        lr: Learning rate: 3, in units of ``lr_unit``; it falls, see ``settle_after``.
        lr_unit: Factor on ``lr``; by default (1 − betas[0]) · (hess_init + damping + δ̃).
        std_scale: Std of a weight without data, times the square root of the mean fan-in: 0.05.
        std_init: Std of every weight without data, in place of ``std_scale``.
        damping: Added to the curvature of every weight, in steps and in the posterior; by default, the value
            that gives the std without data.
        hess_init: Curvature of the mean loss to start from, a guess whose weight falls with every batch. With
            0, the default, the first batch gives it.
        prior_precision: Precision of the prior N(0, ·): 1.
        temperature: 1 is Bayes; smaller values give a sharper posterior. It may change at every step.
        betas: Momentum, and averaging of the curvature: (0.9, 0.999). For the latter, 0.001 follows each
            batch, and values near 1 average many batches.
        max_step: The furthest that a weight moves in a step, in stds without data: 0.34. If it is infinite,
            steps do not fall either.
        settle_after: Updates after which steps and their bound start to fall, as
            ``1 / sqrt(1 + t / settle_after)``: 60.
        augmentation: Factor by which data augmentation multiplies the number of examples.
        keep_velocity: Whether earlier gradients in the momentum keep the lr that they had.
        mc_samples: Weight samples per step: 1.
        deterministic: Filter of names that get no posterior and no prior (see ``posterity.names_of`` for
            BatchNorm); the same rule trains them, without noise.
        deterministic_lr: If given, Adam trains those, with this learning rate: for parameters without
            per-example gradients, such as a position embedding that is added to inputs.
        batch_dim: The axis of the examples in the inputs of the module and of layers with several axes: 1 for
            ``[T, B, …]``.
        mesh: Processes that each draw their own weights for their share of a batch.
        seed: Seed of the weight noise; by default one number from torch's generator, see
            :class:`~posterity.optim.VariationalOptimizer`.

    Example:
        >>> from posterity import warmup
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = VOGN(model, num_data=8, lr=0.01, mc_samples=3)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> temperature = warmup(10, start=0.1)
        >>> for step in range(3):
        ...     for group in opt.param_groups:
        ...         group["temperature"] = temperature(step)
        ...     loss = opt.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> bool((opt.posterior().std()["weight"] > 0).all())
        True
    """


@final
class OGN(GaussNewton):
    """Online Gauss-Newton: VOGN with gradients at the means, for point estimates with a Gaussian around them.

    As in a diagonal Laplace approximation, the final posterior's precision comes from squared gradients at
    the means; training draws no weights.

    It takes the same arguments as :class:`VOGN`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = OGN(model, num_data=8, lr=0.01)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> with opt.sampled_params():
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> sorted(opt.posterior().blocks)
        ['bias', 'weight']
    """

    draws = False


def scales(group: Group, state: Mapping[str, Tensor] = MappingProxyType({})) -> tuple[float, Any, Any]:
    """N, δ̃ and δ̃ + γ, with the prior in a block's state if there is one; tensors in a captured step."""
    num_data = group["num_data"] * group["augmentation"]
    precision = group["prior_precision"] + state["known"] if "known" in state else group["prior_precision"]
    decay = group["temperature"] * precision / num_data
    return num_data, decay, decay + group["damping"]


def _is_mean(state: Mapping[str, Tensor], group: Group) -> bool:
    """Whether s is a plain mean over batches, without a guess or loaded value in it."""
    return bool(group["hess_init"] == 0) and "known" not in state


def _at_most(value: float | Tensor, limit: float) -> float | Tensor:
    """The smaller of two numbers; the first is a tensor in a captured step."""
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)
