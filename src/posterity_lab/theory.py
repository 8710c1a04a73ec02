"""What Bayesian Gradient Descent should do by its theory, computed with exact expectations.

Zeno et al. 2018, section 3.3. Where L is strongly convex with parameter m, E[∂L/∂θ_i · eps_i] is positive
(Theorem 1; the bound is m·σ_i, the printed m/√(2π) is an error), so every σ_i falls at every step
(Corollary 1); where L is strongly concave it grows. For small σ, E[g·eps] / σ is the diagonal of the Hessian,
with an error of order σ².

This holds for the expectations themselves. An estimate from K = 10 draws has noise, and σ then also grows at
some steps: `estimated` shows that.

Expectations are given by `Moments`: a function of mean and std to E[g] and E[g·eps], g being the gradient
of the summed loss. The rule itself is the library's own, `bgd_mean` and `bgd_std`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from posterity.optim.bgd import bgd_mean, bgd_std

Moments: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trajectory:
    """Mean and std of each weight before the first step and after every one, ``[steps + 1, n]``."""

    mean: Tensor
    std: Tensor


def quadratic(hess: Tensor) -> Moments:
    """Expectations under ½ θᵀHθ: E[g] = Hμ and E[g·eps] = σ · diag(H), both exact.

    Args:
        hess: H, ``[n, n]``; its sign is that of the problem: convex, concave, or a saddle.

    Example:
        >>> quadratic(2 * torch.eye(1))(torch.tensor([3.0]), torch.tensor([0.5]))
        (tensor([6.]), tensor([1.]))
    """
    return lambda mean, std: (hess @ mean, std * hess.diagonal())


def double_well() -> Moments:
    """Expectations under Σ ¼θ⁴ − ½θ², concave near 0 and convex beyond 1/√3.

    With θ = μ + σ·eps, E[θ³] = μ³ + 3μσ² and E[θ³·eps] = 3σ(μ² + σ²), so E[g·eps] / σ is exactly the second
    derivative at μ plus 3σ².

    Example:
        >>> double_well()(torch.tensor([1.0]), torch.tensor([0.0]))
        (tensor([0.]), tensor([0.]))
    """
    return lambda mean, std: (
        mean**3 + 3 * mean * std**2 - mean,
        std * (3 * mean**2 + 3 * std**2 - 1),
    )


def estimated(gradient: Callable[[Tensor], Tensor], samples: int, seed: int = 0) -> Moments:
    """Expectations as training has them: averages over ``samples`` draws, new ones at every call.

    Args:
        gradient: From weights ``[samples, n]`` to gradients of the same shape.
        samples: The paper's K.
        seed: Chooses the draws.

    Example:
        >>> one = torch.ones(1)
        >>> e_grad, e_grad_noise = estimated(lambda theta: 2 * theta, samples=10_000)(0 * one, one)
        >>> bool((e_grad_noise - 2).abs() < 0.2)
        True
    """
    if samples < 1:
        raise ValueError(f"an estimate needs at least one sample, not {samples}")
    generator = torch.Generator().manual_seed(seed)

    def moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        eps = torch.randn(samples, *mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        grads = gradient(mean + std * eps)
        return grads.mean(0), (grads * eps).mean(0)

    return moments


def trajectory(moments: Moments, mean: Tensor, std: Tensor, *, steps: int, lr: float = 1.0) -> Trajectory:
    """BGD from the given start, under the given expectations.

    Example:
        >>> start = torch.zeros(1), torch.ones(1)
        >>> trajectory(quadratic(torch.eye(1)), *start, steps=2).std.flatten()
        tensor([1.0000, 0.6180, 0.5112])
    """
    means, stds = [mean], [std]
    for _ in range(steps):
        e_grad, e_grad_noise = moments(means[-1], stds[-1])
        means.append(bgd_mean(means[-1], stds[-1], e_grad, lr))
        stds.append(bgd_std(stds[-1], e_grad_noise))
    return Trajectory(torch.stack(means), torch.stack(stds))


def bayes_std(curvature: Tensor, std: Tensor, *, steps: int) -> Tensor:
    """The std by Bayes' rule, ``[steps + 1, n]``: every step adds the curvature to the precision 1/σ².

    BGD follows it up to terms of the order σ² · curvature.

    Example:
        >>> bayes_std(torch.tensor([3.0]), torch.tensor([1.0]), steps=1).flatten()
        tensor([1.0000, 0.5000])
    """
    times = torch.arange(steps + 1, dtype=std.dtype, device=std.device)[:, None]
    return (std**-2 + curvature * times).rsqrt()


@dataclass(frozen=True)
class Curvature:
    """Two views of the diagonal Hessian of a net's loss, one value per weight, ``[n]``.

    Attributes:
        hessian: Exact, by automatic differentiation at the means.
        estimate: E[g·eps] / σ over draws of the weights.
        error: Standard error of the estimate.
    """

    hessian: Tensor
    estimate: Tensor
    error: Tensor


def curvature(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    std: float,
    pairs: int = 1000,
    seed: int = 0,
) -> Curvature:
    """E[g·eps] / σ against the Hessian's diagonal, for a net small enough to have its whole Hessian.

    Draws come in pairs eps and −eps, in which the gradient at the mean cancels; its noise, divided by σ,
    would drown all else.

    Args:
        model: The net, at its means; use float64.
        x: Its inputs.
        loss: From its outputs to one number.
        std: σ of every weight. The two differ by an order of σ², because the estimate looks around the mean.
        pairs: Pairs of draws.
        seed: Chooses them.

    Example:
        >>> net, x = nn.Linear(2, 1).double(), torch.ones(3, 2).double()
        >>> seen = curvature(net, x, lambda out: out.square().sum(), std=0.01)
        >>> seen.hessian
        tensor([6., 6., 6.], dtype=torch.float64)
    """
    if pairs < 2:
        raise ValueError(f"an estimate with a standard error needs at least two pairs of draws, not {pairs}")
    named = {name: p.detach() for name, p in model.named_parameters()}
    mean = torch.cat([p.flatten() for p in named.values()])

    def value(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [p.numel() for p in named.values()])
        weights = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        return loss(functional_call(model, weights, (x,)))

    eps = torch.randn(pairs, len(mean), generator=torch.Generator().manual_seed(seed), dtype=mean.dtype).to(
        mean.device
    )
    gradients = vmap(grad(value))
    draws = eps * (gradients(mean + std * eps) - gradients(mean - std * eps)) / (2 * std)
    return Curvature(
        hessian=jacrev(grad(value))(mean).diagonal(),
        estimate=draws.mean(0),
        error=draws.std(0) / pairs**0.5,
    )
