"""Theorem 1 and Corollary 1 of Bayesian Gradient Descent, in double precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import BGD
from posterity_lab.theory import (
    bayes_std,
    curvature,
    double_well,
    estimated,
    quadratic,
    trajectory,
)


def convex(n: int = 5) -> Tensor:
    """A dense, strongly convex Hessian."""
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.T / n + 0.1 * torch.eye(n, dtype=torch.float64)


def start(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64) * 0.2 + 0.1


def quadrature(
    gradient: Callable[[Tensor], Tensor], mean: float, std: float, nodes: int = 20001
) -> tuple[float, float]:
    """E[g] and E[g·eps] by summation over a fine grid."""
    eps = torch.linspace(-12, 12, nodes, dtype=torch.float64)
    weight = torch.exp(-0.5 * eps**2)
    weight = weight / weight.sum()
    g = gradient(mean + std * eps)
    return float((weight * g).sum()), float((weight * g * eps).sum())


def test_sigma_falls_at_every_step_of_a_convex_problem() -> None:
    std = trajectory(quadratic(convex()), *start(), steps=200).std
    assert (std[1:] < std[:-1]).all()
    assert (std > 0).all()


def test_sigma_grows_at_every_step_of_a_concave_problem() -> None:
    std = trajectory(quadratic(-convex()), *start(), steps=8).std
    assert (std[1:] > std[:-1]).all()


def test_each_axis_follows_its_own_curvature() -> None:
    # A saddle with coupled axes: the diagonal decides, as section 3.3 says of restrictions to an axis.
    hess = torch.tensor([[2.0, 0.7, 0.1], [0.7, -0.3, 0.2], [0.1, 0.2, 0.0]], dtype=torch.float64)
    std = trajectory(quadratic(hess), *start(3), steps=10).std
    assert (std[1:, 0] < std[:-1, 0]).all()
    assert (std[1:, 1] > std[:-1, 1]).all()
    assert (std[1:, 2] == std[0, 2]).all()


def test_the_estimate_of_ten_samples_is_not_monotone() -> None:
    hess = convex()
    std = trajectory(estimated(lambda theta: theta @ hess, samples=10), *start(), steps=50).std
    assert (std[1:] > std[:-1]).any()
    assert std[-1].mean() < std[0].mean()  # but the trend is


def test_the_bound_of_theorem_1_is_m_sigma() -> None:
    # ½mθ² + log(1 + e^θ) is strongly convex with parameter m, and not quadratic.
    m = 0.3
    for mean in (-3.0, 0.0, 0.5, 4.0):
        for std in (0.01, 0.2, 3.0):
            _, e_grad_noise = quadrature(lambda theta: m * theta + torch.sigmoid(theta), mean, std)
            assert e_grad_noise >= m * std
            if std < 0.1:  # the printed bound does not hold
                assert e_grad_noise < m / (2 * torch.pi) ** 0.5


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.3), (0.7, 0.1), (-1.2, 0.9)])
def test_closed_forms_are_the_integrals(mean: float, std: float) -> None:
    at = torch.tensor([mean], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)
    for moments, gradient in (
        (double_well(), lambda theta: theta**3 - theta),
        (quadratic(torch.tensor([[1.7]], dtype=torch.float64)), lambda theta: 1.7 * theta),
    ):
        got = [float(value) for value in moments(*at)]
        assert got == pytest.approx(quadrature(gradient, mean, std), abs=1e-9)


def test_in_a_double_well_sigma_grows_on_the_hill_and_falls_in_the_valley() -> None:
    run = trajectory(double_well(), torch.tensor([0.1]).double(), torch.tensor([0.1]).double(), steps=600)
    mean, std = run.mean[:, 0], run.std[:, 0]
    hill = 3 * mean[:-1] ** 2 + 3 * std[:-1] ** 2 < 1
    assert hill.any()
    assert not hill.all()
    assert torch.equal(std[1:] > std[:-1], hill)
    assert 0.9 < float(mean[-1]) < 1.0


def test_sigma_follows_bayes_rule_to_the_order_of_the_step() -> None:
    # Halving σ² · curvature should halve the distance to the exact posterior.
    one = torch.ones(1, dtype=torch.float64)
    gaps = []
    for scale in (1e-2, 5e-3):
        std = trajectory(quadratic(one.diag()), one, scale**0.5 * one, steps=100).std
        gaps.append(float((std / bayes_std(one, scale**0.5 * one, steps=100) - 1).abs().max()))
    assert gaps[0] < 1e-2
    assert 1.5 < gaps[0] / gaps[1] < 3.0


def test_the_optimiser_itself_follows_the_exact_trajectory() -> None:
    # Mean of many samples: the library's BGD on ½ Σ h θ², against closed-form expectations.
    h = torch.tensor([0.5, 2.0], dtype=torch.float64)
    weight = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
    exact = trajectory(quadratic(h.diag()), weight.detach().clone(), torch.full_like(h, 0.3), steps=3)
    samples = 400
    opt = BGD([("w", weight)], std_init=0.3, mc_samples=samples, batch_size=1)
    for _ in range(3):
        opt.step(lambda: 0.5 * (h * weight**2).sum())
    # The average of g·eps, g = h(μ + σ·eps), has the standard error h·sqrt((μ² + 2σ²) / samples), and σ moves
    # by at most σ²/2 times that in each of three steps.
    error = h * (3 * 0.3**2 / samples) ** 0.5 * 0.5 * 0.3**2 * 3**0.5
    assert (opt.posterior().std()["w"] - exact.std[-1]).abs().lt(5 * error).all()


def net() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(20, 3, dtype=torch.float64), torch.randint(0, 2, (20,))


def test_gradient_times_noise_is_the_hessian_of_a_net() -> None:
    model, x, y = net()
    seen = curvature(model, x, lambda out: cross_entropy(out, y), std=1e-3, pairs=2000)
    assert (seen.estimate - seen.hessian).abs().lt(5 * seen.error).all()
    # The errors are small enough for this to say something, and there is curvature of both signs.
    assert seen.error.max() < 0.1 * seen.hessian.abs().max()
    assert seen.hessian.min() < -5 * seen.error.min()
    assert seen.hessian.max() > 0


def test_the_hessian_is_that_of_finite_differences() -> None:
    model, x, y = net()
    seen = curvature(model, x, lambda out: cross_entropy(out, y), std=1e-3, pairs=2)
    flat = [(p, i) for p in model.parameters() for i in range(p.numel())]
    step = 1e-4
    for (p, i), exact in zip(flat, seen.hessian.tolist(), strict=True):
        values = []
        for shift in (-step, 0.0, step):
            with torch.no_grad():
                p.view(-1)[i] += shift
                values.append(float(cross_entropy(model(x), y)))
                p.view(-1)[i] -= shift
        assert (values[0] - 2 * values[1] + values[2]) / step**2 == pytest.approx(exact, abs=1e-6)


def test_bad_calls_are_refused() -> None:
    model, x, y = net()
    with pytest.raises(ValueError, match="at least two pairs of draws, not 1"):
        curvature(model, x, lambda out: cross_entropy(out, y), std=0.1, pairs=1)
    with pytest.raises(ValueError, match="at least one sample, not 0"):
        estimated(lambda theta: theta, samples=0)
