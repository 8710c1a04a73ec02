"""Scales by a flow against autograd's Jacobian and against quadrature, in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from posterity import (
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    KernelGaussian,
    ScaledGaussian,
    ScaleMixture,
    cfg,
    kl,
    mnf,
    predict,
    variational,
)
from posterity.posterior.flow import Flow
from posterity.posterior.scaled import MOMENT_DRAWS

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def stirred(leaf: ScaledGaussian, seed: int = 0, size: float = 0.7) -> ScaledGaussian:
    """A leaf whose scales are far from their start."""
    with torch.no_grad():
        for number, p in enumerate(leaf.scales.parameters()):
            p.add_(size * random(*p.shape, seed=seed + number))
    return leaf


def small(std: float = 0.3, seed: int = 0, shape: tuple[int, ...] = (2, 3, 1, 2)) -> ScaledGaussian:
    """A convolution with one scale per kernel."""
    torch.manual_seed(seed)
    leaf = mnf(random(*shape, seed=seed), std, conv="kernel", hidden=5, z_std=0.4)
    assert isinstance(leaf, ScaledGaussian)
    return stirred(leaf, seed)


def log_r(q: ScaledGaussian, noise: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, log_q = q.scales.draw(noise["z"])
    weights = q.given(z, noise)
    return z, weights, log_q, q.scales.log_auxiliary(z, weights)


@pytest.mark.parametrize(("size", "steps"), [(1, 2), (2, 1), (3, 2), (6, 4)])
def test_flow_and_its_inverse_have_autograds_determinant(size: int, steps: int) -> None:
    torch.manual_seed(size)
    flow = Flow(torch.Size([size]), steps=steps, hidden=4, like=torch.zeros((), dtype=F64)).start(0.5)
    with torch.no_grad():
        for p in flow.parameters():
            p.add_(0.8 * torch.randn(p.shape, dtype=F64))
    eps = random(3, size, seed=1)
    z, log_q = flow.draw(eps)
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(lambda e: flow.draw(e[None])[0][0], each) for each in eps]
    )
    expected = Normal(torch.zeros((), dtype=F64), 1.0).log_prob(eps).sum(1) - jacobian.det().abs().log()
    torch.testing.assert_close(log_q, expected)
    torch.testing.assert_close(flow.log_prob(z), log_q)
    # The same for r, whose own flow is run forward.
    w = random(3, size, seed=2)
    start = flow.auxiliary.log_prob(z, w)
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(lambda v: _through(flow, v), each) for each in z.detach()]
    )
    a = (w * flow.auxiliary.c).sum(1, keepdim=True)
    mean = flow.auxiliary.mean + flow.auxiliary.b1 * a
    std = (-0.5 * (flow.auxiliary.precision + flow.auxiliary.b2 * a.tanh())).exp()
    y = torch.stack([_through(flow, each) for each in z])
    torch.testing.assert_close(start, Normal(mean, std).log_prob(y).sum(1) + jacobian.det().abs().log())


def _through(flow: Flow, z: Tensor) -> Tensor:
    for step in flow.auxiliary.steps:
        z = step(z[None])[0][0]
    return z


def test_a_flow_density_integrates_to_one() -> None:
    torch.manual_seed(0)
    flow = Flow(torch.Size([2]), steps=2, hidden=5, like=torch.zeros((), dtype=F64)).start(0.5)
    axis = torch.linspace(-6.0, 8.0, 701, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)
    assert abs(flow.log_prob(grid).exp().sum() * (axis[1] - axis[0]) ** 2 - 1.0) < 1e-6


def test_every_two_steps_move_every_scale() -> None:
    torch.manual_seed(0)
    flow = Flow(torch.Size([7]), steps=4, hidden=3, like=torch.zeros(())).start()
    masks = [step.mask for step in flow.steps]
    assert all(int(mask.sum()) in (3, 4) for mask in masks)
    assert torch.equal(masks[0], ~masks[1])
    assert torch.equal(masks[2], ~masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_the_auxiliary_density_is_that_of_its_definition() -> None:
    q = small()  # six scales, of two weights each
    r, z, weights = q.scales.auxiliary, random(4, 2, 3, 1, 1, seed=1), random(4, 2, 3, 1, 2, seed=2)
    a = (r.c * weights.mean((3, 4)).flatten(1)).sum(1, keepdim=True)
    at, log_det = z.flatten(1), torch.zeros(4, dtype=F64)
    for step in r.steps:
        at, change = step(at)
        log_det = log_det + change
    std = (-0.5 * (r.precision + r.b2 * a.tanh())).exp()
    expected = Normal(r.mean + r.b1 * a, std).log_prob(at).sum(1) + log_det
    torch.testing.assert_close(q.scales.log_auxiliary(z, weights), expected)


def marginal_kl(q: ScaledGaussian, prior: Normal) -> Tensor:
    """KL of two weights with a scale each, by quadrature over z0 and over both weights."""
    nodes = torch.linspace(-6.0, 6.0, 81, dtype=F64)
    grid = torch.cartesian_prod(nodes, nodes)
    share = (-0.5 * grid.square().sum(1)).exp()
    z, _ = q.scales.draw(grid.reshape(-1, *q.scales.shape))
    mean, std = (z * q.loc).flatten(1).detach(), q.std().max().detach()
    axis = torch.linspace(float(mean.min() - 6 * std), float(mean.max() + 6 * std), 401, dtype=F64)
    first, second = (
        Normal(mean[:, i], q.filled_std().flatten()[i].detach()).log_prob(axis[:, None]).exp()
        for i in range(2)
    )
    density = (first * (share / share.sum())) @ second.T
    area = (axis[1] - axis[0]) ** 2
    assert abs(density.sum() * area - 1.0) < 1e-6
    log_prior = prior.log_prob(axis)[:, None] + prior.log_prob(axis)
    return (torch.xlogy(density, density) - density * log_prior).sum() * area


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_above_the_kl_of_the_weights(seed: int) -> None:
    q, n = small(seed=seed, shape=(1, 2, 1, 1), std=0.5), 4000
    exact = marginal_kl(q, Normal(torch.zeros((), dtype=F64), 0.8))
    each = torch.stack([kl(q, IsotropicGaussian(0.8), samples=n, seed=i).detach() for i in range(8)])
    error = each.std() / 8**0.5
    assert each.mean() > exact - 5 * error
    assert each.mean() - exact < 20.0  # r here is arbitrary
    # r learns: the bound comes down, and never below.
    opt = torch.optim.Adam(q.scales.auxiliary.parameters(), lr=0.03)
    for step in range(150):
        opt.zero_grad()
        kl(q, IsotropicGaussian(0.8), samples=64, seed=1, step=step).backward()
        opt.step()
    learned = torch.stack([kl(q, IsotropicGaussian(0.8), samples=n, seed=i).detach() for i in range(8)])
    error = learned.std() / 8**0.5
    assert exact - 5 * error < learned.mean() < each.mean()


def test_the_bound_is_the_kl_where_r_is_exact() -> None:
    """One weight, one scale, no flow: z and w are jointly normal, and r can be q(z | w)."""
    q = mnf(torch.full((1, 1), 1.3, dtype=F64), 0.4, steps=0, z_std=0.6)
    assert isinstance(q, ScaledGaussian)
    mu, variance, noise = 1.3, 0.36, 0.16
    total = mu**2 * variance + noise
    r = q.scales.auxiliary
    with torch.no_grad():
        r.c.fill_(1.0)
        r.b1.fill_(variance * mu / total)
        r.mean.fill_(1.0 - variance * mu / total * mu)
        r.b2.zero_()
        r.precision.fill_(-math.log(variance * noise / total))
    exact = kl_divergence(Normal(mu, total**0.5), Normal(0.2, 0.7))
    found = kl(q, IsotropicGaussian(0.7, mean=0.2), samples=50_000, seed=0)
    one = torch.stack([kl(q, IsotropicGaussian(0.7, mean=0.2), seed=i) for i in range(200)]).std()
    assert abs(found - exact) < 5 * one / 50_000**0.5
    torch.testing.assert_close(q.mean(), torch.full((1, 1), mu, dtype=F64))
    torch.testing.assert_close(q.std(), torch.full((1, 1), total**0.5, dtype=F64))


def priors(shape: tuple[int, ...]) -> list:
    factor = random(*shape[:2], 2, 2, seed=9).tril(-1) + 0.6 * torch.eye(2, dtype=F64)
    return [
        IsotropicGaussian(0.7, mean=0.2),
        DiagonalGaussian(random(*shape, seed=7), random(*shape, seed=8).abs() + 0.3),
        KernelGaussian(random(*shape, seed=7), factor),
        ScaleMixture(0.5, 1.0, 0.1),
    ]


@pytest.mark.parametrize("number", range(4))
def test_the_bound_is_the_mean_of_its_definition(number: int) -> None:
    shape = (2, 3, 1, 2)
    q, p, n = small(), priors(shape)[number], 20_000
    noise = {name: random(n, *each, seed=20) for name, each in q.noise_shapes.items()}
    noise["z"] = random(n, *q.scales.shape, seed=21)
    z, weights, log_q, r = log_r(q, noise)
    log_w = Normal(z * q.loc, q.filled_std()).log_prob(weights).flatten(1).sum(1)
    log_p = (
        p.log_prob(weights)
        if isinstance(p, DiagonalGaussian | KernelGaussian)
        else p.log_density(weights).flatten(1).sum(1)
    )
    terms = log_w - log_p + log_q - r
    assert abs(kl(q, p, samples=n) - terms.mean()) < 5 * terms.std() * (2 / n) ** 0.5
    # One draw at a time is as right on average, and reaches every parameter.
    singles = torch.stack([kl(q, p).detach() for _ in range(1000)])
    assert abs(singles.mean() - terms.mean()) < 5 * (singles.var() / 1000 + terms.var() / n) ** 0.5
    kl(q, p).backward()
    assert all(bool(each.grad.any()) and bool(each.grad.isfinite().all()) for each in q.parameters())


def test_the_gradient_of_the_bound_is_that_of_finite_differences() -> None:
    q = small(shape=(1, 2, 1, 2))
    for p in (IsotropicGaussian(0.7), small(seed=3, shape=(1, 2, 1, 2))):
        names = [
            name for name, _ in q.named_parameters() if not (isinstance(p, ScaledGaussian) and "aux" in name)
        ]
        for name in names:
            value = q.get_parameter(name)
            q.zero_grad()
            kl(q, p, seed=1).backward()
            place = value.grad.abs().argmax()
            step = torch.zeros(value.numel(), dtype=F64)
            step[place] = 1e-6
            with torch.no_grad():
                value.add_(step.reshape(value.shape))
                above = kl(q, p, seed=1)
                value.sub_(2 * step.reshape(value.shape))
                below = kl(q, p, seed=1)
                value.add_(step.reshape(value.shape))
            torch.testing.assert_close(
                value.grad.flatten()[place], (above - below) / 2e-6, rtol=1e-4, atol=1e-6
            )


def test_joint_divergence_is_zero_after_hand_over_and_grows_with_change() -> None:
    q = small()
    prior = q.copy().requires_grad_(False)
    assert abs(kl(q, prior, samples=50)) < 1e-10
    moved = stirred(small(), seed=40, size=0.05)
    n = 20_000
    noise = {name: random(n, *each, seed=20) for name, each in q.noise_shapes.items()}
    noise["z"] = random(n, *q.scales.shape, seed=21)
    z, weights, log_q, _ = log_r(moved, noise)
    log_w = Normal(z * moved.loc, moved.filled_std()).log_prob(weights).flatten(1).sum(1)
    log_p = Normal(z * q.loc, q.filled_std()).log_prob(weights).flatten(1).sum(1) + q.scales.log_prob(z)
    terms = log_w + log_q - log_p
    found = kl(moved, prior, samples=n)
    assert abs(found - terms.mean()) < 5 * terms.std() * (2 / n) ** 0.5
    assert found > 0
    kl(moved, prior).backward()
    assert not any("aux" not in name and p.grad is None for name, p in moved.named_parameters())
    assert all(p.grad is None for p in moved.scales.auxiliary.parameters())  # no r there
    # Other steps, widths and masks are no matter: the old flow is inverted.
    torch.manual_seed(9)
    other = mnf(q.loc.detach(), 0.3, conv="kernel", steps=3, hidden=2)
    assert torch.isfinite(kl(q, other))
    torch.manual_seed(9)
    with pytest.raises(ValueError, match=r"q has scales of shape \(2, 3, 1, 1\) and p \(2, 1, 1, 1\)"):
        kl(q, mnf(q.loc.detach(), 0.3))


def test_the_joint_divergence_is_above_that_of_the_weights() -> None:
    q, p = (small(seed=seed, shape=(1, 2, 1, 1), std=0.5) for seed in (0, 1))
    nodes = torch.linspace(-6.0, 6.0, 81, dtype=F64)
    grid = torch.cartesian_prod(nodes, nodes)
    share = (-0.5 * grid.square().sum(1)).exp()
    axis = torch.linspace(-9.0, 9.0, 601, dtype=F64)
    logs = []
    for leaf in (q, p):
        mean = (leaf.scales.draw(grid.reshape(-1, 1, 2, 1, 1))[0] * leaf.loc).flatten(1).detach()
        both = (Normal(mean[:, i], 0.5).log_prob(axis[:, None]).exp() for i in range(2))
        logs.append(((next(both) * (share / share.sum())) @ next(both).T).clamp_min(1e-300).log())
    density = logs[0].exp()
    area = (axis[1] - axis[0]) ** 2
    assert abs(density.sum() * area - 1.0) < 1e-6
    marginal = (density * (logs[0] - logs[1])).sum() * area
    each = torch.stack([kl(q, p, samples=5000, seed=i).detach() for i in range(20)])
    assert each.mean() > marginal - 5 * each.std() / 20**0.5
    assert marginal > 0


def test_moments_are_those_of_many_draws() -> None:
    q, n = small(), 50_000
    draws = q.draw({name: random(n, *each, seed=3 + len(name)) for name, each in q.noise_shapes.items()})
    mean, std = q.mean(), q.std()
    fourth = (draws - draws.mean(0)).pow(4).mean(0)
    # Errors of the draws here, and of those behind the moments: at most those of so many plain ones.
    counts = 1 / n + 1 / MOMENT_DRAWS
    assert ((draws.mean(0) - mean).abs() < 5 * std * counts**0.5).all()
    spread = (fourth - std**4).clamp_min(0.0).sqrt()
    assert ((draws.var(0) - std.square()).abs() < 5 * spread * counts**0.5).all()
    assert torch.equal(q.mean(), mean)  # always the same
    torch.testing.assert_close(q.copy().float().mean().double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.copy().float().std().double(), std, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "chosen", "scales"),
    [
        ((4, 3, 2, 2), {}, (4, 1, 1, 1)),
        ((4, 3, 2, 2), {"conv": "input"}, (1, 3, 1, 1)),
        ((4, 3, 2, 2), {"conv": "kernel"}, (4, 3, 1, 1)),
        ((4, 3, 2), {"conv": "kernel"}, (4, 3, 1)),
        ((4, 3), {}, (1, 3)),
        ((4, 3), {"dense": "output", "conv": "kernel"}, (4, 1)),
    ],
)
def test_scales_multiply_what_was_chosen(
    shape: tuple[int, ...], chosen: dict, scales: tuple[int, ...]
) -> None:
    q = mnf(torch.ones(shape), 1e-7, **chosen)
    assert isinstance(q, ScaledGaussian)
    assert q.scales.shape == scales
    w = q.draw(q.noise(range(5), block="w", seed=0, step=0))
    torch.testing.assert_close(w, w.mean([i + 1 for i, s in enumerate(scales) if s == 1], True).expand_as(w))
    assert len(w[0].unique()) >= math.prod(scales)
    torch.testing.assert_close(q.mean(), torch.ones(shape), atol=0.02, rtol=0)
    assert isinstance(mnf(torch.ones(3), 0.1), DiagonalGaussian)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))


def test_any_module_is_trained_and_handed_over(tmp_path) -> None:
    x, y = torch.randn(8, 1, 4, 4), torch.randint(0, 2, (8,))
    model = variational(net(), family=partial(mnf, conv="kernel"), seed=0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        opt.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + 1e-3 * model.kl()).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        opt.step()
    stacked = model.outputs(x, samples=3)
    assert len(stacked.unique(dim=0)) == 3
    prior = model.posterior.frozen()
    assert abs(kl(model.posterior, prior, seed=0)) < 1e-3 * sum(p.numel() for p in prior.parameters())
    assert torch.isfinite(model.kl(prior))
    prior.save(tmp_path / "q")
    state = torch.get_rng_state()
    loaded = Factorised.load(tmp_path / "q")
    assert torch.equal(torch.get_rng_state(), state)  # building flows draws, loading does not
    for name, value in loaded.sample(3, seed=1).items():
        assert torch.equal(value, prior.sample(3, seed=1)[name])
    mean = predict(net(), loaded, x, mode="mean")
    assert torch.equal(mean.samples, predict(net(), prior, x, mode="mean").samples)


def test_a_sample_is_the_same_alone_and_among_others() -> None:
    q = Factorised({"w": small()})
    torch.testing.assert_close(
        q._sample(range(5), 3, 2)["w"][3:], q._sample(range(3, 5), 3, 2)["w"], rtol=1e-12, atol=1e-12
    )


def test_held_and_pruned_weights_count_for_nothing() -> None:
    q = small()
    keep = torch.rand(q.shape, generator=torch.Generator().manual_seed(0)) > 0.4
    held = keep & (torch.rand(q.shape, generator=torch.Generator().manual_seed(1)) > 0.7)
    less = q.pruned(keep).hold(held)
    noise = q.noise(range(4), block="w", seed=0, step=0)
    before, after = q.draw(noise), less.draw(noise)
    assert torch.equal(after[:, keep & ~held], before[:, keep & ~held])
    assert not after[:, ~keep].any()
    assert torch.equal(after[:, held], q.loc[held].expand(4, -1))
    assert torch.equal(less.mean()[held], q.loc[held])
    assert not less.std()[held | ~keep].any()
    assert abs(kl(less, less.copy())) < 1e-10
    found = torch.stack([kl(less, IsotropicGaussian(), samples=500, seed=i).detach() for i in range(20)])
    many = q.noise(range(10_000), block="w", seed=0, step=0)
    z, log_q = less.scales.draw(many["z"])
    terms = kl_divergence(Normal(z * q.loc, q.filled_std()), Normal(torch.zeros((), dtype=F64), 1.0))
    expected = terms[:, keep & ~held].sum(1) + log_q - less.scales.log_auxiliary(z, less.draw(many))
    error = (found.var() / 20 + expected.var() / 10_000).sqrt()
    assert abs(found.mean() - expected.mean()) < 5 * error


def test_what_does_not_fit_is_refused() -> None:
    q = small()
    with pytest.raises(TypeError, match="has no log-density, because its scales are integrated out"):
        q.log_prob(q.mean())
    for other in (DiagonalGaussian(q.loc.detach(), 0.1), cfg(q.loc.detach(), 0.1)):
        with pytest.raises(TypeError, match="serves only posteriors of its own kind"):
            kl(other, q)
    with pytest.raises(ValueError, match="conv must be 'output', 'input' or 'kernel', not 'row'"):
        mnf(torch.zeros(2, 2), 0.1, conv="row")
    with pytest.raises(ValueError, match="dense must be 'input' or 'output', not 'kernel'"):
        mnf(torch.zeros(2, 2), 0.1, dense="kernel")
    with pytest.raises(ValueError, match="steps must be 0 or more and hidden 1 or more, not 2 and 0"):
        mnf(torch.zeros(2, 2), 0.1, hidden=0)
    with pytest.raises(ValueError, match="z_std must be finite and greater than 0, not 0"):
        mnf(torch.zeros(2, 2), 0.1, z_std=0.0)
    with pytest.raises(ValueError, match="std must be finite and greater than 0; the lowest is -1"):
        mnf(torch.zeros(2, 2), -1.0)
    flow = Flow(torch.Size([3, 1]), steps=0, hidden=1, like=torch.zeros(())).start()
    with pytest.raises(ValueError, match=r"scales of shape \(3, 1\) do not broadcast to means of shape"):
        ScaledGaussian(torch.zeros(2, 2), 0.1, flow)


def test_multivariate_marginals_of_linear_scales() -> None:
    """Without a flow, weights of one scale are jointly normal."""
    q = mnf(torch.tensor([[0.5], [-1.0]], dtype=F64), 0.2, steps=0, z_std=0.4)
    exact = MultivariateNormal(
        q.loc.flatten(), 0.04 * torch.eye(2, dtype=F64) + 0.16 * torch.outer(q.loc.flatten(), q.loc.flatten())
    )
    n = 40_000
    draws = q.draw({"": random(n, 2, 1, seed=1), "z": random(n, 1, 1, seed=2)}).flatten(1)
    torch.testing.assert_close(q.std().flatten(), exact.variance.sqrt())
    products = (draws - exact.mean).prod(1)
    assert abs(products.mean() - exact.covariance_matrix[0, 1]) < 5 * products.std() / n**0.5
