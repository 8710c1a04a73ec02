"""Bayesian linear regression: each method reaches the fixed point that it should.

For a Gaussian likelihood of variance 1 the exact posterior has precision P = XᵀX + prior_precision · I, and
the best diagonal Gaussian has the exact mean and variances 1 / diag(P). On a quadratic loss the expectations
that rules consume are known in closed form: E[g] is the gradient at the mean, E[g·eps] = std · diag(Hessian).
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from posterity import (
    BGD,
    IVON,
    OGN,
    VOGN,
    DiagonalGaussian,
    IsotropicGaussian,
    Variational,
    elbo,
    variational,
)
from posterity.optim.statistics import Statistics

N, D = 40, 3
G = torch.Generator().manual_seed(0)
X = (
    torch.randn(N, D, generator=G).double()
    @ torch.tensor([[1.0, 0.4, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]]).double()
)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + torch.randn(N, 1, generator=G).double()
PRIOR_PRECISION = 2.0


def posterior(temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact mean and mean-field variances, of the tempered posterior."""
    precision = X.T @ X / temperature + PRIOR_PRECISION * torch.eye(D).double()
    return torch.linalg.solve(precision, X.T @ Y / temperature).flatten(), 1.0 / precision.diagonal()


def nll(weight: torch.Tensor) -> torch.Tensor:
    return 0.5 * (X @ weight.T - Y).square().mean()


def exact_statistics(mean: torch.Tensor, std: torch.Tensor, step: int, scale: float = 1.0) -> Statistics:
    """The expectations for the mean loss, ``scale`` times."""
    grad = scale * (X.T @ (X @ mean - Y.flatten())) / N
    return Statistics(grad, scale * std * (X.T @ X).diagonal() / N, N, step)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_ivon_reaches_the_best_diagonal_gaussian(temperature: float) -> None:
    opt = IVON(
        [torch.zeros(D).double().requires_grad_()],
        preset="shen2024",
        num_data=N,
        prior_precision=PRIOR_PRECISION,
        temperature=temperature,
        betas=(0.5, 0.9),
        lr=0.3,
    )
    group = opt.param_groups[0]
    mean = torch.zeros(D).double()
    state = opt.init(mean, None, group)
    for step in range(1, 3000):
        stats = exact_statistics(mean, opt.std(state, group), step)
        mean, state = opt.update(mean, state, stats, group)
    exact_mean, variance = posterior(temperature)
    torch.testing.assert_close(mean, exact_mean, rtol=1e-8, atol=1e-10)
    # The tempered posterior exp(−(NLL + τ·prior)/τ): precision N·h/τ + prior_precision.
    torch.testing.assert_close(opt.std(state, group) ** 2, variance, rtol=1e-8, atol=0)


def expected_squares(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E[(1/N) Σ_i g_i²] of single examples' gradients x_i (x_iᵀθ − y_i).

    It is x_i² times the mean square of the residual: its square at the mean, and its variance under q.
    """
    residual = X @ mean - Y.flatten()
    return (X.square() * (residual.square() + X.square() @ variance)[:, None]).mean(0)


def gauss_newton_variance(
    mean: torch.Tensor, temperature: float, damping: float, noise: float
) -> torch.Tensor:
    """The v = τ / (N (ĥ(v) + τ δ/N + γ)), squared gradients with their residuals in the Hessian's place."""
    v = torch.zeros(D).double()
    for _ in range(200):
        hess = expected_squares(mean, noise * v)
        v = 1.0 / (N * hess / temperature + PRIOR_PRECISION + N * damping / temperature)
    return v


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("make", [VOGN, OGN])
def test_gauss_newton_reaches_its_own_fixed_point(
    make: type[VOGN] | type[OGN], temperature: float, damping: float
) -> None:
    opt = make(
        [torch.zeros(D).double().requires_grad_()],
        num_data=N,
        prior_precision=PRIOR_PRECISION,
        temperature=temperature,
        damping=damping,
        betas=(0.5, 0.9),
        preset="osawa2019",
        lr=0.05,
    )
    group = opt.param_groups[0]
    mean = torch.zeros(D).double()
    state = opt.init(mean, None, group)
    for step in range(1, 1000):
        variance = opt.std(state, group) ** 2 if opt.draws else torch.zeros(D).double()
        grad = exact_statistics(mean, variance.sqrt(), step).grad
        stats = Statistics(grad, grad[:0], N, step, expected_squares(mean, variance))
        mean, state = opt.update(mean, state, stats, group)
    exact_mean, _ = posterior(temperature)  # damping slows steps down and moves no fixed point
    torch.testing.assert_close(mean, exact_mean, rtol=1e-8, atol=1e-10)
    variance = gauss_newton_variance(exact_mean, temperature, damping, float(opt.draws))
    torch.testing.assert_close(opt.std(state, group) ** 2, variance, rtol=1e-8, atol=0)


def test_sampled_squares_are_unbiased() -> None:
    layer = nn.Linear(D, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(posterior()[0][None])
    n = 1000
    opt = VOGN(layer, num_data=N, std_init=0.1, seed=0)
    mean, std = layer.weight.detach().flatten(), opt.posterior().std()["weight"].flatten()
    singles, before = [], torch.zeros(D).double()
    for _ in range(n):
        with opt.sampled_params():
            (0.5 * (layer(X) - Y).square().mean()).backward()
        total = next(iter(opt.sums)).second[:D].clone()
        singles.append(total - before)
        before = total
    squares = torch.stack(singles) * len(X)
    exact = expected_squares(mean, std**2)
    assert ((squares.mean(0) - exact).abs() < 5 * squares.std(0) / n**0.5).all()
    # The noise is a part of it that would be missed.
    assert ((exact - expected_squares(mean, 0 * std)) > 10 * squares.std(0) / n**0.5).all()


def test_bgd_adds_up_precision_like_bayes_rule() -> None:
    opt = BGD([torch.zeros(D).double().requires_grad_()], preset="zeno2018", std_init=0.05)
    group = opt.param_groups[0]
    mean = torch.zeros(D).double()
    state = opt.init(mean, None, group)
    steps = 5000
    for step in range(1, steps + 1):
        mean, state = opt.update(mean, state, exact_statistics(mean, opt.std(state, group), step), group)
    curvature = (X.T @ X).diagonal()
    # One explicit step turns a precision 1/v² into 1/v² + h·(sqrt(1+a²) + a) with a = ½v²h: never less than
    # Bayes' rule gives, and more by the factor of the first step at most.
    start = 1.0 / 0.05**2
    a = 0.5 * curvature / start
    precision = 1.0 / state["std"] ** 2
    assert (precision >= start + steps * curvature).all()
    assert (precision <= start + steps * curvature * (torch.sqrt(1 + a * a) + a)).all()
    # The prior N(0, 1/start) weighs what a share start / precision of the data does; the mean is as near to
    # the least-squares solution as that (the off-diagonal part of the Hessian slows it, at most by λmin/h).
    solution = torch.linalg.lstsq(X, Y).solution.flatten()
    slowest = torch.linalg.eigvalsh(X.T @ X)[0] / curvature.max()
    assert (mean - solution).norm() < (start / precision.min()) ** slowest * solution.norm()


def at_the_optimum() -> tuple[Variational, DiagonalGaussian]:
    """A linear model whose posterior is the best diagonal Gaussian."""
    exact_mean, variance = posterior()
    layer = nn.Linear(D, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(exact_mean[None])
    model = variational(layer)
    leaf = model.posterior.block("weight")
    assert isinstance(leaf, DiagonalGaussian)
    with torch.no_grad():
        leaf.raw.copy_(torch.log(torch.expm1(variance.sqrt()))[None])
    return model, leaf


def test_best_diagonal_gaussian_is_a_fixed_point_of_bayes_by_backprop() -> None:
    model, leaf = at_the_optimum()
    # E[NLL] over q, exactly: the NLL at the mean plus half the trace of variance times curvature.
    expected = nll(leaf.mean()) + 0.5 * (leaf.std().square() * (X.T @ X).diagonal() / N).sum()
    loss = elbo(expected, model.kl(IsotropicGaussian(PRIOR_PRECISION**-0.5)), num_data=N)
    grads = torch.autograd.grad(loss, [leaf.loc, leaf.raw])
    assert all(float(grad.abs().max()) < 1e-12 for grad in grads)
    with torch.no_grad():
        leaf.raw.add_(0.1)
    moved = torch.autograd.grad(
        elbo(
            nll(leaf.mean()) + 0.5 * (leaf.std().square() * (X.T @ X).diagonal() / N).sum(),
            model.kl(IsotropicGaussian(PRIOR_PRECISION**-0.5)),
            num_data=N,
        ),
        [leaf.raw],
    )[0]
    assert (moved > 1e-4).all()  # and is pulled back from elsewhere


def test_sampled_gradients_of_bayes_by_backprop_are_unbiased() -> None:
    model, leaf = at_the_optimum()
    n = 4000
    grads = []
    for _ in range(n):
        loss = elbo(
            0.5 * (model(X) - Y).square().mean(),
            model.kl(IsotropicGaussian(PRIOR_PRECISION**-0.5)),
            num_data=N,
        )
        grads.append(parameters_to_vector(torch.autograd.grad(loss, [leaf.loc, leaf.raw])))
    stacked = torch.stack(grads)
    assert (stacked.mean(0).abs() < 5 * stacked.std(0) / n**0.5).all()


@pytest.mark.parametrize("rule", ["bgd", "ivon"])
def test_sampled_statistics_are_unbiased(rule: str) -> None:
    layer = nn.Linear(D, 1, bias=False).double()
    n = 4000
    opt = BGD(layer, std_init=0.3, mc_samples=n) if rule == "bgd" else IVON(layer, num_data=N, mc_samples=n)
    std = opt.posterior().std()["weight"]
    grads, noises = [], []
    for _ in range(n):
        with opt.sampled_params():
            theta = layer.weight.detach().clone()
            nll(layer.weight).backward()
            assert layer.weight.grad is not None
            grads.append(layer.weight.grad.clone())
        noises.append((theta - layer.weight.detach()) / std)
    g, ge = torch.stack(grads), torch.stack(grads) * torch.stack(noises)
    exact = exact_statistics(layer.weight.detach().flatten(), std.flatten(), 1)
    assert ((g.mean(0) - exact.grad).abs() < 5 * g.std(0) / n**0.5).all()
    assert ((ge.mean(0) - exact.grad_noise).abs() < 5 * ge.std(0) / n**0.5).all()
    sums = next(iter(opt.sums))
    torch.testing.assert_close(sums.group.layout.views(sums.second)[0], ge.mean(0))
