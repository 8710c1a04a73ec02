"""Priors and divergences against torch.distributions and against known numbers."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from posterity import (
    BGD,
    ByName,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    KernelGaussian,
    Posterior,
    ScaleMixture,
    around,
    cfg,
    kl,
    laplace,
    mnf,
    variational,
)


def test_kl_of_a_linear_layer_is_the_sum_over_its_weights() -> None:
    layer = nn.Linear(10, 20)
    for p in layer.parameters():
        nn.init.constant_(p, 0.1)
    q = BGD(layer, std_init=0.05).posterior()
    assert kl(q, IsotropicGaussian(1.0)).item() == pytest.approx(550.436, abs=1e-3)


def test_kl_between_gaussians_equals_torch_distributions() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (
        (torch.randn(4, 3, generator=g).double(), torch.rand(4, 3, generator=g).double() + 0.1)
        for _ in range(2)
    )
    expected = kl_divergence(Normal(*a), Normal(*b)).sum()
    torch.testing.assert_close(kl(DiagonalGaussian(*a), DiagonalGaussian(*b)), expected)
    expected = kl_divergence(Normal(*a), Normal(0.3, 2.0)).sum()
    torch.testing.assert_close(kl(DiagonalGaussian(*a), IsotropicGaussian(2.0, mean=0.3)), expected)


def test_scale_mixture_equals_torch_distributions() -> None:
    w = torch.linspace(-3, 3, 61, dtype=torch.float64)
    mixture = MixtureSameFamily(
        Categorical(torch.tensor([0.75, 0.25]).double()),
        Normal(torch.zeros(2).double(), torch.tensor([1.0, 0.05]).double()),
    )
    torch.testing.assert_close(ScaleMixture(0.75, 1.0, 0.05).log_density(w), mixture.log_prob(w))


def test_scale_mixture_has_the_gradient_of_its_wide_part_far_out() -> None:
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    ScaleMixture(0.5, 0.1, 0.002).log_density(w).backward()
    assert w.grad is not None
    assert w.grad.item() == pytest.approx(-100.0, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_mixture_has_finite_gradients_for_any_weight(dtype: torch.dtype) -> None:
    w = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e19, 1e30], dtype=dtype, requires_grad=True)
    ScaleMixture(0.5, 1.0, math.exp(-8)).log_density(w).sum().backward()
    assert w.grad is not None
    assert torch.isfinite(w.grad).all()
    assert (w.grad[1:] < 0).all()


def test_isotropic_gaussian_equals_torch_distributions() -> None:
    w = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(IsotropicGaussian(0.3, mean=0.1).log_density(w), Normal(0.1, 0.3).log_prob(w))


def test_scales_may_differ_by_name() -> None:
    q = Factorised(
        {"a.weight": DiagonalGaussian(torch.ones(2), 0.5), "a.bias": DiagonalGaussian(torch.ones(1), 0.5)}
    )
    prior = ByName({"*.bias": IsotropicGaussian(3.0), "*": IsotropicGaussian(1.0)})
    expected = kl(q.block("a.weight"), IsotropicGaussian(1.0)) + kl(q.block("a.bias"), IsotropicGaussian(3.0))
    torch.testing.assert_close(kl(q, prior), expected)
    with pytest.raises(KeyError, match=r"no pattern matches 'a.weight'"):
        kl(q, ByName({"*.bias": IsotropicGaussian()}))


def test_monte_carlo_kl_is_unbiased_fresh_and_differentiable() -> None:
    q = DiagonalGaussian(torch.full((3,), 0.2).double(), 0.4, trainable=True)
    prior = ScaleMixture(0.5, 1.0, 0.1)
    n = 4000
    estimates = torch.stack([kl(q, prior).detach() for _ in range(n)])
    assert estimates.std() > 0
    # One long estimate stands for the expectation; its own error is added.
    many = torch.stack([kl(q, prior, samples=20_000).detach() for _ in range(10)])
    error = (estimates.var() / n + many.var() / 10).sqrt()
    assert abs(estimates.mean() - many.mean()) < 5 * error
    kl(q, prior).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in q.parameters())


def test_monte_carlo_kl_to_a_mixture_equals_quadrature() -> None:
    mean, std, prior, n = 0.4, 0.3, ScaleMixture(0.5, 1.0, 0.05), 20_000
    w = torch.linspace(mean - 9 * std, mean + 9 * std, 20_001, dtype=torch.float64)
    q = Normal(torch.tensor(mean, dtype=torch.float64), std)
    gap = q.log_prob(w) - prior.log_density(w)
    expected, square = (float(torch.trapezoid(q.log_prob(w).exp() * gap**power, w)) for power in (1, 2))
    leaf = DiagonalGaussian(torch.tensor([mean], dtype=torch.float64), std)
    error = ((square - expected**2) / n) ** 0.5
    assert abs(float(kl(leaf, prior, samples=n, seed=0)) - expected) < 5 * error
    assert expected > 100 * error  # its sign is not left to chance


def test_bad_priors_and_pairs_are_refused() -> None:
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="std must be finite and greater than 0"):
            IsotropicGaussian(bad)
    with pytest.raises(ValueError, match="weight must lie between 0 and 1, not 1"):
        ScaleMixture(1.0)
    with pytest.raises(ValueError, match="need 0 < std_narrow < std_wide"):
        ScaleMixture(0.5, 0.1, 0.2)
    with pytest.raises(ValueError, match="at least one pattern"):
        ByName({})
    with pytest.raises(ValueError, match=r"q has shape \(2,\) and p \(3,\)"):
        kl(DiagonalGaussian(torch.zeros(2), 1.0), DiagonalGaussian(torch.zeros(3), 1.0))

    class Odd(Posterior):
        def _sample(self, samples, seed, step):
            return {}

        def mean(self):
            return {}

        def log_prob(self, params):
            return torch.zeros(())

        def block(self, name):
            return None

    with pytest.raises(TypeError, match="no rule for a Odd"):
        kl(Odd(), IsotropicGaussian())

    with pytest.raises(TypeError, match="a float is not a prior: pass a posterior, a Density or ByName"):
        kl(Factorised({"w": DiagonalGaussian(torch.zeros(2), 1.0)}), 1.0)

    class NoDensity:
        def block(self, name):
            return self

    with pytest.raises(TypeError, match="a NoDensity has neither a formula nor a log-density"):
        kl(Factorised({"w": DiagonalGaussian(torch.zeros(2), 1.0)}), NoDensity())


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(30, 1, 4, 4).double(), torch.randint(0, 2, (30,))


FAMILIES = {"ffg": DiagonalGaussian, "cfg": cfg, "mnf": mnf}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_pretrained_net_are_the_means_of_a_prior(family: str) -> None:
    net = pretrained()
    prior = around(net, 0.3)
    q = variational(net, family=FAMILIES[family], std_init=0.1).posterior
    if family != "mnf":
        count = sum(p.numel() for p in net.parameters())
        one = kl_divergence(Normal(0.0, 0.1), Normal(0.0, 0.3))
        torch.testing.assert_close(kl(q, prior), (count * one).double())
    before = kl(q, prior, seed=0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    assert kl(q, prior, seed=0) > before + 100  # the prior stays where the net was
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="std must be finite and greater than 0"):
            around(net, bad)
    with pytest.raises(TypeError, match=r"around\(\) takes a number for std, not '0.1'"):
        around(net, "0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_of_old_data_is_the_prior_of_the_backbone(family: str) -> None:
    net = pretrained()
    old = laplace.fit(net, data(), names="*", structure="diagonal", prior_precision=1.0).posterior()
    net[3] = nn.Linear(27, 5).double()  # a new head
    q = variational(net, family=FAMILIES[family], std_init=0.1).posterior
    prior = ByName({"3.*": IsotropicGaussian(1.0), "*": old})
    backbone = [kl(q.block(f"0.{name}"), old.block(f"0.{name}"), seed=0) for name in ("weight", "bias")]
    if family != "mnf":
        head = [kl(q.block(f"3.{name}"), IsotropicGaussian(1.0)) for name in ("weight", "bias")]
        torch.testing.assert_close(kl(q, prior), sum(backbone + head))
    assert torch.isfinite(kl(q, prior))
    with pytest.raises(ValueError, match=r"'3.weight' has shape \(5, 27\) in q and \(2, 27\) in the prior"):
        kl(q, old)
    half = Factorised({"0.weight": old.block("0.weight")})
    with pytest.raises(KeyError, match=r"the prior has no block '0.bias', which q has: give it one, by po"):
        kl(q, ByName({"0.*": half, "*": IsotropicGaussian()}))


@pytest.mark.parametrize("kind", ["eigen", "matrix"])
@pytest.mark.parametrize("masks", ["none", "both", "prior keeps more"])
def test_a_layer_as_one_block_is_a_prior_of_single_tensors(kind: str, masks: str) -> None:
    net = pretrained()
    old = laplace.fit(net, data(), names="*", prior_precision=1.0).posterior()
    blocks = {name: leaf.product() if kind == "matrix" else leaf for name, leaf in old.blocks.items()}
    old = old.rebuilt(blocks)
    g = torch.Generator().manual_seed(0)
    q = variational(net, std_init=0.1).posterior
    with torch.no_grad():
        for p in q.parameters():
            p.add_(0.1 * torch.rand(p.shape, generator=g).double())
    keep = {name: torch.rand(shape, generator=g) > 0.3 for name, shape in q.shapes().items()}
    if masks != "none":
        q = q.rebuilt({name: leaf.pruned(keep[name]) for name, leaf in q.blocks.items()})
    joined = old.join(keep)
    if masks == "both":
        old = old.rebuilt({name: leaf.pruned(joined[name]) for name, leaf in old.blocks.items()})
    expected = torch.zeros(()).double()
    for name, leaf in old.blocks.items():
        chosen = torch.ones_like(joined[name]) if masks == "none" else joined[name]
        row, column = chosen.nonzero(as_tuple=True)
        theirs = MultivariateNormal(leaf.mean()[chosen], leaf._covariance(row, column))
        mean, std = (old.join(each)[name][chosen] for each in (q.mean(), q.std()))
        expected += kl_divergence(MultivariateNormal(mean, std.square().diag()), theirs)
    found = kl(q, old)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(kl(q, ByName({"0.*": old, "*": old})), expected)
    found.backward()
    assert all(bool(p.grad.any()) for p in q.parameters())


def test_prior_with_unknown_blocks_is_refused() -> None:
    net = pretrained()
    old = laplace.fit(net, data(), names="*", prior_precision=1.0).posterior()
    for family in (cfg, mnf):
        kind = "KernelGaussian" if family is cfg else "ScaledGaussian"
        with pytest.raises(
            TypeError, match=rf"kl\(\) of a {kind} \('0.weight'\) to a EigenGaussian .* has no f"
        ):
            kl(variational(pretrained(), family=family).posterior, old)
    q = variational(net, deterministic="0.bias").posterior
    with pytest.raises(
        ValueError, match=r"the prior holds '0.weight\+0.bias' as one block, .* lacks '0.bias'"
    ):
        kl(q, old)
    q = variational(pretrained()).posterior
    with pytest.raises(ValueError, match=r"as one block, of which q or this prior lacks '0.bias'"):
        kl(q, ByName({"*.bias": IsotropicGaussian(), "*": old}))
    net[3] = nn.Linear(27, 5).double()
    with pytest.raises(ValueError, match=r"'3.weight' has shape \(5, 27\) in q and \(2, 27\) in the prior"):
        kl(variational(net).posterior, old)


def test_numbers_that_would_give_none_are_refused() -> None:
    q = DiagonalGaussian(torch.zeros(3), 1.0)
    for samples in (0, -1):
        with pytest.raises(ValueError, match=f"samples must be at least 1, not {samples}"):
            kl(q, ScaleMixture(), samples=samples)
    with pytest.raises(ValueError, match="mean must be finite, not nan"):
        IsotropicGaussian(1.0, math.nan)
    with pytest.raises(TypeError, match=r"means must be floating-point numbers, not torch.int64: pass"):
        DiagonalGaussian(torch.tensor([1, 2]), 0.5)


@pytest.mark.parametrize("growth", [1e-6, 1e-4, 1e-2, 0.049, 0.051, 0.5, -1e-6, -1e-3, -0.5])
def test_kl_of_a_posterior_that_barely_moved_keeps_its_digits(growth: float) -> None:
    start = torch.full((1000,), 0.02)
    moved = start * (1 + growth)
    found = kl(DiagonalGaussian(torch.zeros(1000), moved), DiagonalGaussian(torch.zeros(1000), start))
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(torch.zeros(1000).double(), moved.double()),
        torch.distributions.Normal(torch.zeros(1000).double(), start.double()),
    ).sum()
    # The float64 reference itself loses digits of 1e-12 where numbers of order 1 cancel.
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("std", [1e-3, 1e-6, 1e-9, 1e-30])
def test_kl_of_stds_far_below_the_priors_keeps_its_digits(dtype: torch.dtype, std: float) -> None:
    shape = (4, 1, 1, 3)
    prior = DiagonalGaussian(torch.zeros(shape, dtype=dtype), 2.0)
    kernels = KernelGaussian(torch.zeros(shape, dtype=dtype), 2.0)
    for family in (
        lambda: DiagonalGaussian(prior.loc, std, trainable=True),
        lambda: KernelGaussian(prior.loc, std),
    ):
        for p in (prior, kernels, IsotropicGaussian(2.0)):
            q = family()
            own = q.std().detach().double() / 2.0  # of a type that rounds
            found = kl(q, p)
            exact = 0.5 * (own.square() - 1.0 - 2.0 * own.log()).sum()
            digits = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0.0}
            torch.testing.assert_close(found.double(), exact, **digits)
            found.backward()
            in_raw = (own.square() - 1.0) * torch.sigmoid(q.raw.detach().double()) / (2.0 * own)
            torch.testing.assert_close(q.raw.grad.double(), in_raw, **digits)
