"""Checks of a posterior during training: does it move, is its noise useful, how fast can each weight move?

Each takes a few reductions per tensor, cheap enough for every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.arguments import instance, takes
from posterity.caller import warn
from posterity.optim import VariationalOptimizer, handover
from posterity.optim.state import members
from posterity.optim.watch import PosteriorWarning
from posterity.posterior import Factorised

# Below this the noise in the weights is less than what rounding them to bfloat16 would change.
COLLAPSED = 2.0**-9
# A posterior has blown up where its noise is this many times that of the start and this many times its means
# (by gradient it may widen to the prior and outweigh its means a few times while it still predicts well),
NOISY = 10.0
# or where it is so much larger altogether. Biases that start at zero may well grow a hundredfold.
RUN_AWAY = 1000.0
_POSTERIOR = instance("a Factorised posterior", Factorised)


@dataclass(frozen=True)
class Health:
    """How one tensor's posterior has changed since the start; pruned weights are ignored.

    Attributes:
        finite: Whether all means and stds are.
        mean_moved: Whether any mean differs from where it started.
        std_moved: The same of the stds.
        noise: ‖std‖ / ‖mean‖, the relative change by sampling; infinite if all means are zero.
        growth: ‖std‖ over its value at the start.
        scale: The size of a sampled tensor, √(‖mean‖² + ‖std‖²), over that of the start.
    """

    finite: bool
    mean_moved: bool
    std_moved: bool
    noise: float
    growth: float
    scale: float

    @property
    def complaint(self) -> str | None:
        """What is wrong with the tensor and what to do about it; None if nothing is."""
        if not self.finite:
            return "is not finite: lower lr or the initial std"
        if not self.mean_moved and not self.std_moved:
            return "never moved: does the loss depend on it, and is lr above 0?"
        if not self.std_moved:
            return "has learned no std, only means: look at what should move its std"
        if self.scale > RUN_AWAY or min(self.growth, self.noise) > NOISY:
            return "has blown up: lower lr, the initial std, or the weight of the KL where there is one"
        if self.noise < COLLAPSED:
            return "has collapsed, sampling hardly changes it: raise the initial std or the temperature"
        return None


@dataclass(frozen=True)
class Histogram:
    """How many values of each tensor lie in each bin.

    Attributes:
        edges: Borders of the bins, equally far apart on a logarithmic scale, ``[bins + 1]``.
        counts: By the tensor's name, ``[bins]``.
    """

    edges: Tensor
    counts: dict[str, Tensor]


@torch.no_grad()
@takes(posterior=_POSTERIOR, start=_POSTERIOR)
def check(
    posterior: Factorised, start: Factorised, optimizer: VariationalOptimizer | None = None
) -> dict[str, Health]:
    """The health of each tensor's posterior; one :class:`PosteriorWarning` per call names all problems.

    Args:
        posterior: After some steps of training.
        start: Before the first step.
        optimizer: The optimiser that trains it. If given, there is also a warning about stds that outweigh
            the weights, unless its losses at sampled weights show that this does no harm; it names the
            setting to change.

    Returns:
        Health by tensor name, without tensors that are pruned completely.

    Example:
        >>> from posterity import BGD
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = BGD(model, std_init=0.05)
        >>> start = opt.posterior()
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> loss = opt.step(lambda: torch.nn.functional.cross_entropy(model(x), y), batch_size=len(x))
        >>> check(opt.posterior(), start)["weight"].std_moved
        True
    """
    now, then = ((q.mean(), q.std()) for q in (posterior, start))
    kept, health = posterior.kept(), {}
    measured = {name: _measure(name, kept[name], *now, *then) for name in kept}
    for name, values in measured.items():
        alive, finite, mean_moved, std_moved, mean, std, old_mean, old_std = values.tolist()
        if alive:
            health[name] = Health(
                finite=bool(finite),
                mean_moved=bool(mean_moved),
                std_moved=bool(std_moved),
                noise=_over(std, mean),
                growth=_over(std, old_std),
                scale=_over(math.hypot(mean, std), math.hypot(old_mean, old_std)),
            )
    said: dict[str, list[str]] = {}
    for name, each in health.items():
        if each.complaint is not None:
            said.setdefault(each.complaint, []).append(name)
    found = [f"that of {_listed(names)} {complaint}" for complaint, names in said.items()]
    if found:
        found[0] = found[0].replace("that of", "the posterior of", 1)
    if optimizer is not None and (unfit := handover.unfit(optimizer, posterior.blocks.values())):
        found.append(unfit)
    if found:
        warn("; ".join(found), PosteriorWarning)
    return health


def learning_rates(optimizer: VariationalOptimizer, *, batch_size: int = 1) -> dict[str, Tensor]:
    """The effective learning rate of every weight: the factor on its gradient of the mean loss.

    For BGD lr · std² · batch_size, for IVON lr · (hess_init + δ) / (hess + δ). Pruned weights and padding
    rows have 0. Weights in a block that is updated as a matrix (K-FAC) have no individual rate, and are left
    out.

    Args:
        optimizer: One whose rule has a rate per weight.
        batch_size: Examples in each step, for rules that sum their gradients. 1 gives BGD's rate as in the
            paper, for the gradient of the sum.

    Example:
        >>> from posterity import BGD
        >>> learning_rates(BGD(torch.nn.Linear(2, 1), std_init=0.1, lr=2.0))["bias"]
        tensor([0.0200])
    """
    rate = getattr(optimizer, "rate", None)
    if rate is None:
        raise TypeError(f"{type(optimizer).__name__} has no rate per weight: give its rule a method rate()")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    posterior = optimizer.posterior()  # every block has its state after this
    stds, rates = posterior.std(), {}
    for group in optimizer.param_groups:
        for name, p in members(group):
            if name in posterior.blocks:
                own = rate(optimizer.state[p], group, batch_size)
                rates[name] = torch.where(stds[name] > 0, own, 0.0)
    return rates


def histogram(values: Mapping[str, Tensor], bins: int = 60) -> Histogram:
    """A histogram of each tensor's values, such as ``posterior.std()``, ``snr(posterior)``,
    ``learning_rates(opt)``.

    All tensors have the same bins, on a logarithmic scale from the smallest value to the largest, at least a
    factor of ten. Values that are zero (pruned), infinite or NaN are not counted.

    Example:
        >>> histogram({"fc.weight": torch.tensor([0.01, 0.1, 0.1, 0.0])}, bins=2).counts
        {'fc.weight': tensor([1, 2])}
    """
    if bins < 1:
        raise ValueError(f"a histogram needs at least one bin, not {bins}")
    logs = {}
    for name, value in values.items():
        flat = value.detach().flatten()
        logs[name] = flat[(flat > 0) & (flat < torch.inf)].log10()
    ends = [end for each in logs.values() if len(each) for end in (float(each.min()), float(each.max()))]
    if not ends:
        raise ValueError(
            "a histogram needs at least one value above 0, and there is none: are all weights pruned or held?"
        )
    middle, width = (min(ends) + max(ends)) / 2, max(max(ends) - min(ends), 1.0)
    borders = middle + width * torch.linspace(-0.5, 0.5, bins + 1, dtype=torch.float64)
    counts = {
        name: torch.bincount(torch.bucketize(each, borders[1:-1].to(each), right=True), minlength=bins)
        for name, each in logs.items()
    }
    return Histogram(10.0**borders, counts)


def _measure(
    name: str,
    kept: Tensor,
    means: Mapping[str, Tensor],
    stds: Mapping[str, Tensor],
    old_means: Mapping[str, Tensor],
    old_stds: Mapping[str, Tensor],
) -> Tensor:
    """Whether weights are left, the values for Health, and the norms of mean and std, now and at the
    start."""
    if name not in old_means:
        raise ValueError(f"the posterior at the start has no {name!r}: take it from the same optimiser")
    mean, std = means[name], stds[name]
    if mean.shape != old_means[name].shape:
        then = tuple(old_means[name].shape)
        raise ValueError(f"{name!r} has shape {tuple(mean.shape)}, and {then} at the start")
    old_mean, old_std = (torch.where(kept, each[name].to(mean), 0.0) for each in (old_means, old_stds))
    values = [
        kept.any(),
        torch.isfinite(mean).all() & torch.isfinite(std).all(),
        (mean != old_mean).any(),
        (std != old_std).any(),
        # In double precision, in which the squares of weights that ran away do not overflow.
        *(torch.linalg.vector_norm(each, dtype=torch.float64) for each in (mean, std, old_mean, old_std)),
    ]
    return torch.stack([value.to(torch.float64) for value in values])


def _listed(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more


def _over(value: float, base: float) -> float:
    return value / base if base else math.inf
