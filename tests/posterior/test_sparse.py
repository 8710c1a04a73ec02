"""Sparsity priors: their KLs against quadrature and torch.distributions, and what they do at the ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity import (
    ARD,
    ByName,
    Density,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    KernelGaussian,
    Leaf,
    LogUniform,
    cfg,
    compile_step,
    elbo,
    kl,
    mnf,
    variational,
    warmup,
)
from posterity.optim.presets import TABLE

PRIORS = [LogUniform(), ARD()]
priors = pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: type(prior).__name__)


def weights(log_alpha: Tensor, size: float = 0.3) -> DiagonalGaussian:
    mean = torch.full_like(log_alpha, size)
    return DiagonalGaussian(mean, size * (0.5 * log_alpha).exp(), trainable=True)


def value(q: Leaf | Factorised, prior: Density) -> float:
    return float(kl(q, prior).detach())


def expected_log_size(alpha: float) -> float:
    """E log|1 + √α ε| by quadrature, finer near the zero of what the logarithm is of."""
    zero, widths = -1.0 / math.sqrt(alpha), np.geomspace(1e-13, 60.0, 400_001)
    total = 0.0
    for sign in (-1.0, 1.0):
        points = zero + sign * widths
        density = np.exp(-0.5 * points**2) / math.sqrt(2.0 * math.pi)
        values = density * np.log(math.sqrt(alpha) * widths)
        total += float(np.trapezoid(values, widths))
    return total


def test_the_log_uniform_kl_is_within_a_hundredth_of_quadrature() -> None:
    levels = torch.linspace(-8.0, 8.0, 33, dtype=torch.float64)
    for level in levels.tolist():
        alpha = math.exp(level)
        # E log q − E log p, p = 1/|w| times what has the KL go to 0 for α → ∞.
        noise_only = -0.5 * (0.5772156649015329 + math.log(2.0))
        exact = expected_log_size(alpha) - 0.5 * math.log(alpha) - noise_only
        found = value(weights(torch.tensor([level], dtype=torch.float64)), LogUniform())
        assert abs(found - exact) < 0.01


def test_the_ard_kl_is_that_of_the_nearest_gaussian() -> None:
    q = DiagonalGaussian(torch.tensor([0.3, -2.0, 0.0]).double(), torch.tensor([0.2, 0.1, 1.5]).double())
    widths = (q.mean().square() + q.std().square()).sqrt()
    ours, normal = value(q, ARD((-60.0, 60.0))), torch.distributions.Normal
    for factor, least in ((1.0, True), (0.97, False), (1.03, False)):
        theirs = torch.distributions.kl_divergence(normal(q.mean(), q.std()), normal(0.0, factor * widths))
        assert (abs(float(theirs.sum()) - ours) < 1e-9) is least
        assert float(theirs.sum()) > ours - 1e-9


@priors
def test_pure_noise_costs_nothing_and_sure_weights_much(prior: LogUniform | ARD) -> None:
    values = [value(weights(torch.tensor([level])), prior) for level in (-7.5, -3.0, 0.0, 3.0, 7.5)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 3e-4
    assert values[0] > 3.0


@priors
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_both_ends_and_at_a_mean_of_zero(
    prior: LogUniform | ARD, dtype: torch.dtype
) -> None:
    mean = torch.tensor([0.0, 1e-30, 1e-12, 1e-4, 1.0, 1e4, 1e12], dtype=dtype)
    for std in (1e-12, 1e-6, 1e-2, 1.0, 1e6):
        q = DiagonalGaussian(mean, std, trainable=True)
        found = kl(q, prior)
        found.backward()
        assert bool(found.isfinite())
        for p in (q.loc, q.raw):
            assert p.grad is not None
            assert bool(p.grad.isfinite().all())


@priors
@pytest.mark.parametrize(("mean", "std"), [(1.0, 1e-20), (1e3, 1e-18), (-1.0, 1e-43)])
def test_single_precision_gradients_for_almost_certain_weights(
    prior: LogUniform | ARD, mean: float, std: float
) -> None:
    q = DiagonalGaussian(torch.tensor([mean]), std, trainable=True)
    found = kl(q, prior)
    found.backward()
    assert float(found.detach()) == value(DiagonalGaussian(torch.tensor([1.0]), 1e-4), prior)
    assert [float(p.grad) for p in (q.loc, q.raw)] == [0.0, 0.0]


@priors
def test_outside_of_its_bounds_a_kl_is_constant(prior: LogUniform | ARD) -> None:
    q = weights(torch.tensor([-8.5, -7.5, 7.5, 8.5]).double())
    kl(q, prior).backward()
    assert [bool(grad) for grad in q.raw.grad] == [False, True, True, False]
    at = [value(weights(torch.tensor([level]).double()), prior) for level in (-9.0, -8.5, -8.0)]
    assert at[0] == at[1] == pytest.approx(at[2], rel=1e-9)
    wide = weights(torch.tensor([-8.5, 8.5]).double())
    kl(wide, type(prior)(bounds=(-20.0, 20.0))).backward()
    assert bool((wide.raw.grad != 0).all())


@priors
def test_the_gradient_is_that_of_finite_differences(prior: LogUniform | ARD) -> None:
    mean = torch.tensor([0.3, -0.01, 0.05, 0.0], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([0.1, 0.04, 0.02, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(prior.divergence, (mean, std))


@priors
def test_pruned_and_held_weights_have_no_kl(prior: LogUniform | ARD) -> None:
    q = weights(torch.tensor([-2.0, 0.5, -1.0]))
    expected = value(weights(torch.tensor([0.5])), prior)
    lone = q.pruned(torch.tensor([False, True, True])).hold(torch.tensor([False, False, True]))
    found = kl(lone, prior)
    found.backward()
    assert float(found.detach()) == pytest.approx(expected, rel=1e-6)
    for p in lone.parameters():
        assert [bool(grad) for grad in p.grad] == [False, True, False]
        assert bool(p.grad.isfinite().all())


@priors
def test_a_point_is_infinitely_far(prior: LogUniform | ARD) -> None:
    assert float(kl(DiagonalGaussian(torch.tensor([1.0, 0.0]), 0.0), prior)) == torch.inf


def test_the_log_uniform_density_agrees_with_its_formula() -> None:
    q, n = weights(torch.tensor([0.0, 1.0, 3.0]).double()), 400_000
    drawn = q.draw(torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    normal = torch.distributions.Normal(q.mean(), q.std())
    terms = (normal.log_prob(drawn) - LogUniform().log_density(drawn)).sum(-1).detach()
    # The approximation is off by at most 0.01 for each of three weights.
    assert abs(float(terms.mean()) - value(q, LogUniform())) < 5 * float(terms.std()) / n**0.5 + 0.03


@priors
def test_correlated_weights_add_what_they_know_of_each_other(prior: LogUniform | ARD) -> None:
    leaf = cfg(torch.randn(2, 1, 2, 2, dtype=torch.float64), 0.3)
    assert isinstance(leaf, KernelGaussian)
    with torch.no_grad():
        leaf.below.normal_()
    alone = DiagonalGaussian(leaf.mean().detach(), leaf.std().detach())
    torch.testing.assert_close(kl(leaf, prior), leaf.correlation() + kl(alone, prior))
    assert float(leaf.correlation().detach()) > 0.1


def test_ard_refuses_scales_that_are_drawn() -> None:
    leaf = mnf(torch.ones(3, 2), 0.1)
    assert bool(kl(leaf, LogUniform()).isfinite())
    with pytest.raises(TypeError, match="ARD has no density, because its variances follow q"):
        kl(leaf, ARD())


@pytest.mark.parametrize(
    "bounds", [(8.0, -8.0), (-8.0, math.inf), (-100.0, 8.0), (math.nan, 8.0), (1.0, 1.0)]
)
def test_bad_bounds_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(
        ValueError, match="bounds must be two values of log alpha, low and high, between -80 and 80"
    ):
        LogUniform(bounds)
    with pytest.raises(TypeError, match="takes two numbers for bounds"):
        ARD(8.0)  # type: ignore[arg-type]


# As the prior of a model.


def test_prior_given_to_the_model_is_the_default() -> None:
    net = nn.Linear(3, 2)
    model = variational(net, prior=LogUniform(), deterministic="*bias")
    assert list(model.posterior.blocks) == ["weight"]
    assert float(model.kl().detach()) == value(model.posterior, LogUniform())
    assert float(model.kl(ARD()).detach()) == value(model.posterior, ARD())
    plain = variational(nn.Linear(3, 2))
    assert float(plain.kl().detach()) == value(plain.posterior, IsotropicGaussian())
    with pytest.raises(TypeError, match=r"takes a prior for prior, not 1\.0"):
        variational(net, prior=1.0)  # type: ignore[arg-type]


def test_a_posterior_as_prior_is_no_part_of_the_model() -> None:
    net = nn.Linear(3, 2)
    before = variational(net).posterior.frozen()
    model = variational(net, prior=before)
    assert model.prior is before
    assert not any("prior" in name for name in (*model.state_dict(), *dict(model.named_modules())))
    assert len(list(model.parameters())) == 4


def test_a_sparsity_prior_has_its_own_stds_at_the_start() -> None:
    scale = TABLE["variational"]["sparse"]["std_scale"]
    for prior in (LogUniform(), ARD(), ByName({"*bias": IsotropicGaussian(), "*": LogUniform()})):
        q = variational(nn.Linear(100, 5), prior=prior).posterior
        assert float(q.std()["weight"].detach().mean()) == pytest.approx(scale / 10.0, rel=1e-5)
    for options in ({"std_scale": 0.02}, {"std_init": 0.002}):
        q = variational(nn.Linear(100, 5), prior=LogUniform(), **options).posterior
        assert float(q.std()["weight"].detach().mean()) == pytest.approx(0.002, rel=1e-5)
    q = variational(nn.Linear(100, 5)).posterior
    assert float(q.std()["weight"].detach().mean()) == pytest.approx(0.002)


@pytest.mark.parametrize("own", [True, False])
@priors
def test_a_compiled_step_is_the_plain_loop(prior: LogUniform | ARD, own: bool) -> None:
    def model() -> posterity.Variational:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        with torch.no_grad():
            net[0].weight[0] = 0.0  # α = ∞
            net[2].weight[0] = 50.0  # log α below the bounds
        options = {"prior": prior} if own else {"std_scale": 0.18}
        return variational(net, seed=3, deterministic="*bias", **options)

    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 2, (8,))
    loop, compiled = model(), model()
    adam = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (loop, compiled)]
    step = compile_step(
        compiled,
        lambda net, x, y: F.cross_entropy(net(x), y),
        adam[1],
        num_data=8,
        factor=warmup(3, delay=1),
        prior=None if own else prior,
    )
    for i in range(5):
        adam[0].zero_grad()
        nll = F.cross_entropy(loop(x), y)
        divergence = loop.kl() if own else loop.kl(prior)
        loss = elbo(nll, divergence, num_data=8, factor=warmup(3, delay=1), step=i)
        loss.backward()
        adam[0].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-10, atol=0.0)
    for a, b in zip(loop.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
