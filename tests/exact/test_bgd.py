"""BGD against a scalar transcription of Algorithm 1, and against its own theory."""

import math

import pytest
import torch
from torch import nn

from posterity import BGD
from posterity.noise import normal
from posterity.optim.bgd import bgd_mean, bgd_std


def scalar_step(m: float, v: float, grads: list[float], eps: list[float], eta: float) -> tuple[float, float]:
    """Eqs. (12) and (13) as printed (with the erratum), one weight, plain Python floats."""
    k = len(grads)
    g = sum(grads) / k
    ge = sum(a * b for a, b in zip(grads, eps, strict=True)) / k
    mu = m - eta * v**2 * g
    sigma = v * math.sqrt(1 + (0.5 * v * ge) ** 2) - 0.5 * v**2 * ge
    return mu, sigma


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_run_equals_the_scalar_transcription(temperature: float) -> None:
    torch.manual_seed(3)
    model = nn.Linear(1, 1, bias=False).double()
    x, y = torch.randn(6, 1).double(), torch.randn(6, 1).double()
    opt = BGD(model, preset="zeno2018", std_init=0.3, lr=0.7, mc_samples=4, temperature=temperature, seed=0)
    m, v = model.weight.item(), 0.3
    for step in range(5):
        eps = noise(step, 4)
        weights = [m + v * e for e in eps]
        grads = [
            sum(float(xi) * (w * float(xi) - float(yi)) for xi, yi in zip(x, y, strict=True)) / temperature
            for w in weights
        ]
        m, v = scalar_step(m, v, grads, eps, 0.7)
        opt.step(lambda: 0.5 * (model(x) - y).square().mean(), batch_size=6)
        assert model.weight.item() == pytest.approx(m, rel=1e-12)
        assert opt.posterior().std()["weight"].item() == pytest.approx(v, rel=1e-12)


def noise(step: int, samples: int) -> list[float]:
    draws = normal(range(samples), (1, 1), seed=0, step=step, block="weight", dtype=torch.float64)
    return [float(value) for value in draws]


@pytest.mark.parametrize("grad_noise", [-1e30, -50.0, -1.0, 0.0, 1.0, 50.0, 1e8, 1e30])
def test_sigma_solves_its_quadratic_and_stays_positive(grad_noise: float) -> None:
    v = torch.tensor(0.2, dtype=torch.float64)
    sigma = bgd_std(v, torch.tensor(grad_noise, dtype=torch.float64))
    assert float(sigma) > 0
    # Eq. (21), divided by its largest term.
    terms = torch.stack([sigma**2, sigma * v**2 * grad_noise, -(v**2)])
    assert abs(float(terms.sum() / terms.abs().max())) < 1e-12


def test_sigma_stays_positive_in_float32_where_the_printed_form_does_not() -> None:
    v, ge = torch.tensor(1.0), torch.tensor(1e5)
    printed = v * torch.sqrt(1 + (0.5 * v * ge) ** 2) - 0.5 * v**2 * ge
    assert float(printed) == 0.0
    assert float(bgd_std(v, ge)) == pytest.approx(1e-5, rel=1e-6)


def test_sigma_stays_positive_and_finite_at_any_float32_statistic() -> None:
    for ge in (-1e20, 1e20):
        sigma = bgd_std(torch.tensor(0.1), torch.tensor(ge))
        assert 0 < float(sigma) < float("inf")


def test_sigma_falls_under_convexity_and_grows_under_concavity() -> None:
    # For a quadratic with curvature h, E[g·eps] = sigma·h exactly (Theorem 1 and Corollary 1).
    std = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    curvature = torch.tensor([5.0, 0.0, -5.0], dtype=torch.float64)
    after = bgd_std(std, std * curvature)
    assert after[0] < std[0]
    assert after[1] == std[1]
    assert after[2] > std[2]


def test_the_mean_step_is_scaled_by_the_variance() -> None:
    one = torch.ones(2, dtype=torch.float64)
    assert torch.equal(
        bgd_mean(one, torch.tensor([0.1, 0.2]).double(), 3 * one, 2.0),
        one - 6 * torch.tensor([0.1, 0.2]).double() ** 2,
    )
