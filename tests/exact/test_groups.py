"""Scales that decide over groups: their KLs by quadrature and drawn weights, and what prune makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, InverseGamma, LogNormal, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F

import posterity
from posterity import (
    DiagonalGaussian,
    Factorised,
    GroupHorseshoe,
    GroupNormalJeffreys,
    IsotropicGaussian,
    LogUniform,
    ScaledGaussian,
    Variational,
    compile_step,
    elbo,
    ghs,
    gnj,
    kl,
    mnf,
    prune,
    snr,
    variational,
)
from posterity.compress import quantise, shrink, sparsity
from posterity.posterior.divergence import formula_of
from posterity.posterior.scales import LogNormalScales, NormalScales

F64 = torch.float64
FAMILIES: dict[str, tuple[Callable[..., Any], Any]] = {
    "gnj": (gnj, GroupNormalJeffreys()),
    "ghs": (ghs, GroupHorseshoe()),
}
families = pytest.mark.parametrize("family", FAMILIES)


def stirred(
    family: str, shape: tuple[int, ...] = (3, 4), size: float = 0.3, **options: Any
) -> ScaledGaussian:
    """A leaf whose scales are far from their start."""
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=g, dtype=F64)
    leaf = FAMILIES[family][0](mean, 0.1 + torch.rand(shape, generator=g, dtype=F64), **options)
    assert isinstance(leaf, ScaledGaussian)
    with torch.no_grad():
        for p in leaf.scales.parameters():
            p.add_(size * torch.randn(p.shape, generator=g, dtype=F64))
        if family == "gnj":
            leaf.scales.raw.add_(2.0)
        else:
            leaf.scales.raw_gamma.add_(4.0)
    return leaf


def drawn(leaf: ScaledGaussian, n: int) -> dict[str, Tensor]:
    return leaf.noise(range(n), block="b", seed=0, step=0)


@families
def test_moments_are_those_of_drawn_weights(family: str) -> None:
    leaf, n = stirred(family), 200_000
    noise = drawn(leaf, n)
    weights = leaf.draw(noise).detach()
    mean, std = leaf.mean().detach(), leaf.std().detach()
    assert ((weights.mean(0) - mean).abs() < 5 * std / n**0.5).all()
    fourth = (weights - mean).pow(4).mean(0)  # log-normal tails: the error of a variance is not a normal's
    assert ((weights.var(0) - std**2).abs() < 5 * ((fourth - std**4) / n).sqrt()).all()
    z_mean, z_variance = leaf.scales.moments(leaf.loc)
    sigma, mu = leaf.filled_std(), leaf.loc
    expected = z_variance * (sigma**2 + mu**2) + sigma**2 * z_mean**2
    torch.testing.assert_close(leaf.std() ** 2, expected)
    torch.testing.assert_close(leaf.mean(), z_mean * mu)
    given_mean, given_std = leaf.independent(noise)
    z, _ = leaf.scales.draw(noise["z"])
    torch.testing.assert_close(given_mean, z * mu)
    torch.testing.assert_close(given_std, z.abs() * sigma)


def test_normal_scales_have_the_density_of_normals() -> None:
    scales = stirred("gnj").scales
    z, log_q = scales.draw(torch.randn(5, *scales.noise_shape, dtype=F64))
    expected = Normal(scales.centre, scales.std()).log_prob(z).flatten(1).sum(1)
    torch.testing.assert_close(scales.log_prob(z), expected)
    torch.testing.assert_close(log_q, expected)


def test_log_normal_scales_have_the_density_of_their_normals() -> None:
    scales = stirred("ghs").scales
    z, log_q = scales.draw(torch.randn(5, *scales.noise_shape, dtype=F64))
    # log z = ½ (log a + log b + log s_a + log s_b), of independent normals.
    groups = scales.shape.numel()
    logs = 0.5 * torch.cat([torch.eye(groups, dtype=F64), torch.ones(groups, 1, dtype=F64)], 1)
    variances = F.softplus(scales.raw_gamma) ** 2 + F.softplus(scales.raw_inverse) ** 2
    normal = MultivariateNormal(logs @ (scales.gamma + scales.inverse), logs @ variances.diag() @ logs.T)
    expected = normal.log_prob(z.flatten(1).log()) - z.flatten(1).log().sum(1)
    torch.testing.assert_close(scales.log_prob(z), expected)
    torch.testing.assert_close(log_q, expected)


def test_the_normal_jeffreys_kl_is_the_mean_of_its_definition() -> None:
    leaf, n = stirred("gnj"), 400_000
    noise = drawn(leaf, n)
    z, log_q = leaf.scales.draw(noise["z"])
    weights = leaf.given(z, noise)
    given = Normal(*leaf.moments_given(z)).log_prob(weights) - Normal(0.0, z.abs()).log_prob(weights)
    terms = (given.flatten(1).sum(1) + log_q - LogUniform().log_density(z).flatten(1).sum(1)).detach()
    found = float(kl(leaf, GroupNormalJeffreys()).detach())
    # The approximation is off by at most 0.01 for each of four scales.
    assert abs(float(terms.mean()) - found) < 5 * float(terms.std()) / n**0.5 + 0.04
    scales, alone = leaf.scales, DiagonalGaussian(leaf.loc.detach(), leaf.filled_std().detach())
    of_scales = kl(DiagonalGaussian(scales.centre.detach(), scales.std().detach()), LogUniform())
    assert found == pytest.approx(float(of_scales + kl(alone, IsotropicGaussian(1.0))), rel=1e-12)


def quadrature(mean: float, std: float, prior: Any) -> float:
    """KL of a log-normal from a prior on positive numbers, over the logarithm."""
    logs = torch.linspace(mean - 12 * std, mean + 12 * std, 20_001, dtype=F64)
    values = logs.exp()
    density = Normal(torch.tensor(mean, dtype=F64), std).log_prob(logs)
    gap = LogNormal(torch.tensor(mean, dtype=F64), std).log_prob(values) - prior.log_prob(values)
    return float(np.trapezoid((density.exp() * gap).numpy(), logs.numpy()))


def test_the_horseshoe_kl_is_that_of_its_four_parts() -> None:
    leaf, tau = stirred("ghs"), torch.tensor(0.01, dtype=F64)
    scales, half = leaf.scales, torch.tensor(0.5, dtype=F64)
    with torch.no_grad():  # where the parts' exponentials are of the size of the rest
        scales.gamma[-1], scales.inverse[-1] = -9.5, 0.3
        scales.gamma[:-1], scales.inverse[:-1] = torch.tensor([-1.0, 0.2, -0.5, 0.4]), 0.7
    one = torch.ones((), dtype=F64)
    expected = 0.0
    for i in range(5):
        rate = 1.0 / tau**2 if i == 4 else one
        gamma, inverse = float(scales.gamma.data[i]), float(scales.inverse.data[i])
        stds = [float(F.softplus(raw[i])) for raw in (scales.raw_gamma.data, scales.raw_inverse.data)]
        expected += quadrature(gamma, stds[0], Gamma(half, rate))
        expected += quadrature(inverse, stds[1], InverseGamma(half, one))
    standard = kl_divergence(Normal(leaf.loc.detach(), leaf.filled_std().detach()), Normal(0.0, 1.0)).sum()
    found = float(kl(leaf, GroupHorseshoe(float(tau))).detach())
    assert found == pytest.approx(expected + float(standard), rel=1e-6)


def test_the_parts_of_the_horseshoe_make_a_half_cauchy() -> None:
    n = 100_000
    a, b = Gamma(0.5, 1.0 / 0.3**2).sample((n,)), InverseGamma(0.5, 1.0).sample((n,))
    below = (a * b).sqrt()[:, None] < 0.3 * torch.tensor([0.1, 1.0, 10.0])
    expected = 2.0 / math.pi * torch.tensor([0.1, 1.0, 10.0]).atan()
    assert ((below.float().mean(0) - expected).abs() < 5 * 0.5 / n**0.5).all()


@families
@pytest.mark.parametrize(
    ("shape", "options", "scales"),
    [
        ((3, 4), {}, (1, 4)),
        ((3, 4), {"dense": "output"}, (3, 1)),
        ((6, 2, 5, 5), {}, (6, 1, 1, 1)),
        ((6, 2, 5), {"conv": "input"}, (1, 2, 1)),
        ((6, 2, 5, 5), {"conv": "kernel"}, (6, 2, 1, 1)),
    ],
)
def test_scales_are_of_what_was_asked_for(
    family: str, shape: tuple[int, ...], options: dict[str, str], scales: tuple[int, ...]
) -> None:
    leaf = FAMILIES[family][0](torch.randn(shape), 0.1, **options)
    assert leaf.scales.shape == leaf.group_shape == scales
    z, spread = leaf.scales.moments(leaf.loc)
    torch.testing.assert_close(z, torch.ones(scales), rtol=1e-3, atol=0.0)
    assert bool((spread.sqrt() < 0.03).all())
    leaf.draw(leaf.noise(range(2), block="b", seed=0, step=0)).sum().backward()
    with pytest.raises(ValueError, match=r"must be 'input' or 'output', not 'row'|'kernel', not 'row'"):
        FAMILIES[family][0](torch.randn(shape), 0.1, conv="row", dense="row")
    with pytest.raises(ValueError, match="z_std must be finite and greater than 0, not 0"):
        FAMILIES[family][0](torch.randn(shape), 0.1, z_std=0.0)


@families
def test_gradients_are_finite_at_both_ends(family: str) -> None:
    for dtype in (torch.float32, F64):
        for centre, std in ((0.0, 1.0), (1e-12, 10.0), (1e6, 1e-3), (1.0, 1e-6)):
            leaf = FAMILIES[family][0](torch.full((2, 3), centre, dtype=dtype), std)
            with torch.no_grad():
                if family == "gnj":
                    leaf.scales.centre.copy_(torch.tensor([[0.0, 1e-9, 1e9]]))
                else:
                    leaf.scales.inverse.add_(torch.tensor([-40.0, 40.0, 0.0, 1.0]))
            found = kl(leaf, FAMILIES[family][1])
            found.backward()
            assert bool(found.isfinite())
            assert all(bool(p.grad.isfinite().all()) for p in leaf.parameters())


@families
def test_scales_at_the_start_feel_the_prior(family: str) -> None:
    leaf, prior = FAMILIES[family][0](torch.randn(3, 4), 0.01), FAMILIES[family][1]
    kl(leaf, prior).backward()
    assert all(bool((p.grad != 0).all()) for p in leaf.parameters())


@families
def test_the_joint_kl_to_a_next_prior_is_the_mean_of_its_definition(family: str) -> None:
    q = stirred(family)
    prior = stirred(family, size=0.5)
    with torch.no_grad():
        prior.loc.add_(0.4)
        prior.raw.add_(0.3)
    noise = drawn(q, 5)
    z, log_q = q.scales.draw(noise["z"])
    given, theirs = (Normal(z * leaf.loc, z.abs() * leaf.filled_std()) for leaf in (q, prior))
    terms = kl_divergence(given, theirs).flatten(1).sum(1) + log_q - prior.scales.log_prob(z)
    formula, needs_draw = formula_of(type(q), type(prior))
    assert needs_draw
    assert formula is not None
    torch.testing.assert_close(formula(q, prior, noise), terms.mean(), rtol=1e-12, atol=0.0)


@families
def test_a_group_that_is_removed_has_no_kl(family: str) -> None:
    leaf, prior = stirred(family), FAMILIES[family][1]
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[:, 1] = False
    keep[0, 2] = False  # a part of a group: its scale stays
    half = leaf.pruned(keep).hold(torch.tensor([[False] * 3 + [True]]).expand(3, 4))  # held: certain
    found = kl(half, prior)
    found.backward()
    used = torch.tensor([True, False, True, False])
    assert torch.equal(half.used_scales().flatten(), used)
    names = ("centre", "raw") if family == "gnj" else ("gamma", "inverse", "raw_gamma", "raw_inverse")
    for name in names:
        grad = getattr(half.scales, name).grad.flatten()
        assert torch.equal(grad[:4] != 0, used)
        assert len(grad) == 4 or bool(grad[4] != 0)
    dead = leaf.pruned(torch.zeros(3, 4, dtype=torch.bool))
    assert float(kl(dead, prior).detach()) == 0.0


@families
def test_priors_refuse_what_has_no_such_scales(family: str) -> None:
    make, prior = FAMILIES[family]
    net, other = nn.Sequential(nn.Linear(4, 3)), {"gnj": ghs, "ghs": gnj}[family]
    for wrong in (DiagonalGaussian, other, mnf):
        with pytest.raises(
            TypeError, match=rf"of shape \(.*\): pass family=posterity.{family} to variational"
        ):
            variational(net, family=wrong, prior=prior, estimator="local")
    with pytest.raises(
        TypeError, match=r"Scales have no auxiliary density for a prior of single weights: pass the family"
    ):
        variational(net, family=make).kl()
    with pytest.raises(TypeError, match=f"{type(prior).__name__} has no density of single weights"):
        prior.log_density(torch.zeros(2))
    with pytest.raises(TypeError, match="multiply different things, means or whole weights"):
        kl(make(torch.ones(3, 2), 0.1), mnf(torch.ones(3, 2), 0.1))
    biases = DiagonalGaussian(torch.tensor([0.3, -0.2]), 0.1)
    assert kl(biases, prior) == kl(biases, IsotropicGaussian(1.0))
    with pytest.raises(ValueError, match="scale must be finite and at least 1e-15, not 0"):
        GroupHorseshoe(0.0)
    assert kl(ghs(torch.zeros(3, 2), 0.1), GroupHorseshoe(1e-15)).isfinite()


# What a model does with them.


@families
def test_a_compiled_step_is_the_plain_loop(family: str) -> None:
    make, prior = FAMILIES[family]

    def model() -> Variational:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        return variational(net, seed=3, family=make, prior=prior)

    x, y = torch.randn(8, 4, dtype=F64), torch.randint(0, 2, (8,))
    loop, compiled = model(), model()
    adam = [torch.optim.Adam(each.parameters(), lr=0.02) for each in (loop, compiled)]
    step = compile_step(compiled, lambda net, x, y: F.cross_entropy(net(x), y), adam[1], num_data=8)
    for _ in range(3):
        adam[0].zero_grad()
        loss = elbo(F.cross_entropy(loop(x), y), loop.kl(), num_data=8)
        loss.backward()
        adam[0].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-10, atol=0.0)
    for a, b in zip(loop.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def uneven(family: str) -> Variational:
    """A net whose posterior has dead inputs in its second layer, and dead maps in its first."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 2))
    model = variational(
        nn.Sequential(*layers).double(), seed=0, family=FAMILIES[family][0], prior=FAMILIES[family][1]
    )
    with torch.no_grad():
        for name, dead in (("0.weight", [1, 4]), ("3.weight", [0, 7]), ("5.weight", [2])):
            leaf = model.posterior.block(name)
            if family == "gnj":
                leaf.scales.centre.flatten()[dead] = 1e-3
                leaf.scales.raw.flatten()[dead] = 1.0
            else:
                leaf.scales.inverse[dead] -= 20.0
                mask = torch.zeros(leaf.scales.shape, dtype=torch.bool).flatten()
                mask[dead] = True
                mask = mask.view(leaf.scales.shape).expand(leaf.shape)
                leaf.loc[mask] *= 1e-3
                leaf.raw[mask] = 0.5
    return model


DEAD = {"0.weight": 2 / 6, "3.weight": 2 / 24, "5.weight": 1 / 5}


@families
def test_a_scale_stays_for_one_weight_that_is_needed(family: str) -> None:
    leaf = stirred(family, shape=(1000, 4))
    with torch.no_grad():
        leaf.loc[:] = 1e-3
        leaf.raw[:] = 0.5
        leaf.loc.flatten()[0] = 5.0
    kept = prune(Factorised({"w": leaf}), log_alpha=3.0).kept()["w"]
    first = torch.zeros(leaf.group_shape, dtype=torch.bool)
    first.flatten()[0] = True
    assert torch.equal(kept, first.expand(leaf.shape))


@families
def test_whole_groups_go_by_their_log_alpha(family: str) -> None:
    q = uneven(family).posterior
    small = prune(q, log_alpha=3.0, spare="*bias")
    assert {name: sparsity(small)[name] for name in DEAD} == pytest.approx(DEAD)
    for name in DEAD:
        kept, shape = small.kept()[name], small.block(name).group_shape
        shared = [i for i, size in enumerate(shape) if size == 1]
        groups = kept.double().mean(shared)
        assert groups.unique().tolist() == [0.0, 1.0]
        assert torch.equal(-snr(q)[name].square().amax(shared).log() < 3.0, groups > 0)
    assert not small.mean()["3.weight"][:, 0].any()
    assert not small.std()["3.weight"][:, 0].any()
    # The same as a threshold of the SNR, and, of these, as a fraction.
    by_threshold = prune(q, threshold=math.exp(-1.5), spare="*bias")
    removed = sum(int((~keep).sum()) for keep in small.kept().values())
    names = list(DEAD)
    weights = sum(small.kept()[name].numel() for name in names)
    by_fraction = prune(q, removed / weights, spare="*bias")
    for name in names:
        assert torch.equal(by_threshold.kept()[name], small.kept()[name])
        assert torch.equal(by_fraction.kept()[name], small.kept()[name])
    # Asked for, other groups go.
    rows = prune(q, 0.2, groups="outputs", spare=["*bias", "0.weight", "3.weight"]).kept()["5.weight"]
    assert rows.all() or not rows.all(1).any()


def test_a_groups_alpha_is_that_of_scale_and_weights_together() -> None:
    leaf = stirred("gnj")
    z, spread = leaf.scales.moments(leaf.loc)
    of_scale, of_weight = spread / z**2, leaf.filled_std() ** 2 / leaf.loc**2
    q = Factorised({"w": leaf})
    alpha = 1.0 / snr(q)["w"] ** 2
    torch.testing.assert_close(alpha, ((1 + of_scale) * (1 + of_weight) - 1).detach())


@families
def test_removed_groups_make_the_net_smaller(family: str) -> None:
    model = uneven(family)
    small = prune(model.posterior, log_alpha=3.0, spare="*bias")
    x = torch.randn(3, 1, 4, 4, dtype=F64)
    shrunk = shrink(model.module, small, x)
    shapes = {name: p.shape for name, p in shrunk.module.named_parameters()}
    assert shapes["0.weight"] == (4, 1, 3, 3)
    assert shapes["3.weight"][0] == 4
    assert shapes["5.weight"] == (2, 4)
    plain = posterity.predict(model.module, small, x, mode="mean").probs
    torch.testing.assert_close(shrunk.module.eval()(x).softmax(-1), plain, rtol=1e-6, atol=1e-9)
    assert quantise(shrunk.posterior).bits["5.weight"] >= 1


@families
def test_masks_survive_saving_training_and_hand_over(family: str, tmp_path: Path) -> None:
    model = uneven(family)
    small = prune(model.posterior, log_alpha=3.0, spare="*bias")
    small.save(tmp_path / "q.safetensors")
    q = Factorised.load(tmp_path / "q.safetensors", model.module)
    kept = small.kept()
    assert all(torch.equal(mask, kept[name]) for name, mask in q.kept().items())
    assert float(kl(q, small.frozen()).detach()) == pytest.approx(0.0, abs=1e-9)
    again = Variational(model.module, q, seed=0, prior=small.frozen())
    adam = torch.optim.Adam(again.parameters(), lr=0.05)
    x, y = torch.randn(8, 1, 4, 4, dtype=F64), torch.randint(0, 2, (8,))
    for _ in range(3):
        adam.zero_grad()
        elbo(F.cross_entropy(again(x), y), again.kl(), num_data=8).backward()
        adam.step()
    assert float(kl(again.posterior, small.frozen(), samples=50, seed=0).detach()) > 0
    for name, mask in kept.items():
        assert not again.posterior.mean()[name][~mask].any()
        assert not again.posterior.sample(2)[name][:, ~mask].any()
    assert not torch.equal(again.posterior.mean()["3.weight"], small.mean()["3.weight"])


@pytest.mark.parametrize("rule", ["BGD", "VOGN", "IVON"])
def test_rules_prune_by_groups_at_a_log_alpha(rule: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    options = {} if rule == "BGD" else {"num_data": 32}
    opt = getattr(posterity, rule)(net, seed=0, **options)
    x, y = torch.randn(32, 6), torch.randint(0, 2, (32,))
    for _ in range(3):
        opt.step(lambda: F.cross_entropy(net(x), y))
    q = opt.posterior()
    score = snr(q)["0.weight"].square().mean(0)
    log_alpha = float(-score.log().sort().values[2:4].mean())
    found = prune(q, log_alpha=log_alpha, groups="inputs", spare="2.weight").kept()["0.weight"]
    assert found.all(0).sum() == found.any(0).sum() == 3


def test_saved_scales_of_an_unknown_family_are_refused() -> None:
    leaf = stirred("gnj")
    config = leaf.config()
    assert config["scales"]["family"] == NormalScales.__name__ != LogNormalScales.__name__
    config["scales"]["family"] = "Others"
    with pytest.raises(ValueError, match="its scales have the family Others, which is unknown here"):
        ScaledGaussian.restore(leaf.state_dict(), config)
