"""Families go through all of the library: CFG, MNF, and one from outside, with two noises and no density."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from conformance.families import Trained
from posterity import (
    BGD,
    ByName,
    DiagonalGaussian,
    EigenGaussian,
    Factorised,
    IsotropicGaussian,
    Leaf,
    MatrixGaussian,
    ScaleMixture,
    Variational,
    cfg,
    elbo,
    kl,
    mnf,
    names_of,
    predict,
    prune,
    register_kl,
    snr,
    variational,
)
from posterity.noise import Domain, normal

SPREAD = 0.3  # std of the scales


class RowScaled(Trained):
    """``z · (loc + std · noise)`` with one scale z ~ N(1, SPREAD²) per row: a product of normals."""

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        return {"": self.shape, "z": self.shape[:1]}

    def scales(self, noise: Mapping[str, Tensor]) -> Tensor:
        z = 1.0 + SPREAD * noise["z"]
        return z.reshape(*z.shape, *[1] * (len(self.shape) - 1))

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return self.scales(noise) * (self.loc + self.log_std.exp() * noise[""])

    def std(self) -> Tensor:
        square = self.loc.square() + (2 * self.log_std).exp()
        return self.masked(((1 + SPREAD**2) * square - self.loc.square()).sqrt())


@register_kl(RowScaled, IsotropicGaussian, needs_draw=True)
def _(q: RowScaled, p: IsotropicGaussian, noise: Mapping[str, Tensor]) -> Tensor:
    """E_z[KL(q(w | z) ‖ p)], a bound on the KL as a flow's is."""
    z = q.scales(noise)
    terms = kl_divergence(Normal(z * q.loc, z.abs() * q.log_std.exp()), Normal(p.mean, p.std))
    return q.total(terms).mean()


def posterior(seed: int = 0) -> Factorised:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=g, dtype=torch.float64)
    return Factorised({"weight": RowScaled(weight, 0.2), "bias": DiagonalGaussian(weight[:, 0], 0.1)})


def test_both_noises_reach_a_draw() -> None:
    q, n = posterior(), 40_000
    draws = q.sample(n, seed=1)["weight"]
    leaf = q.block("weight")
    at = {"seed": 1, "step": 0, "dtype": torch.float64, "domain": Domain.SAMPLE}
    eps = normal(range(n), (3, 4), block="weight", **at)
    z = 1 + SPREAD * normal(range(n), (3,), block="weight|z", **at)
    torch.testing.assert_close(draws, z[:, :, None] * (leaf.loc + 0.2 * eps))
    mean, std = q.mean()["weight"], q.std()["weight"]
    assert ((draws.mean(0) - mean).abs() < 5 * std / n**0.5).all()
    square = (draws - mean).square()
    assert ((square.mean(0) - std.square()).abs() < 5 * square.std(0) / n**0.5).all()
    # Weights of one row share a scale, those of others do not.
    rest = torch.corrcoef((draws / leaf.loc)[:, :2, :2].flatten(1).T)
    assert rest[0, 1] > 0.2
    assert abs(rest[0, 2]) < 5 / n**0.5


def test_a_sample_is_the_same_alone_and_among_others() -> None:
    q = posterior()
    whole, part = q._sample(range(5), 3, 2), q._sample(range(3, 5), 3, 2)
    assert torch.equal(whole["weight"][3:], part["weight"])


def test_a_formula_gets_the_draw_that_it_asked_for() -> None:
    q, prior = posterior(), IsotropicGaussian(0.7)
    leaf, n = q.block("weight"), 50_000
    z = 1 + SPREAD * torch.randn(n, 3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    terms = kl_divergence(Normal(z * leaf.loc, z.abs() * 0.2), Normal(0.0, 0.7)).flatten(1).sum(1)
    found = kl(leaf, prior, samples=n)
    assert abs(found - terms.mean()) < 5 * terms.std() * (2 / n) ** 0.5
    # Its own draw at every call; with a seed always the same; blocks draw apart.
    assert kl(leaf, prior) != kl(leaf, prior)
    assert kl(q, prior, seed=1) == kl(q, prior, seed=1) != kl(q, prior, seed=1, step=1)
    twins = Factorised({"a": leaf, "b": leaf})
    assert kl(twins, prior, seed=1) != 2 * kl(Factorised({"a": leaf}), prior, seed=1)
    kl(q, prior).backward()
    assert all(bool(p.grad.any()) for p in leaf.parameters())


def test_a_missing_density_is_named_where_it_is_needed() -> None:
    q = posterior()
    for call in (
        lambda: q.log_prob(q.sample(2)),
        lambda: kl(q, ScaleMixture()),
        lambda: kl(q, q.frozen()),
    ):
        with pytest.raises(TypeError, match=r"a RowScaled has no log-density: use a prior for which reg"):
            call()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(27, 2))


def test_training_moves_mean_and_spread_of_a_chosen_family() -> None:
    module = net()
    chosen = dict.fromkeys(names_of(module, nn.Conv2d), RowScaled)
    model = variational(module, family=chosen | {"*": DiagonalGaussian}, std_init=0.05, seed=4)
    families = {name: type(leaf) for name, leaf in model.posterior.blocks.items()}
    assert families == {
        "0.weight": RowScaled,
        "0.bias": RowScaled,
        "2.weight": DiagonalGaussian,
        "2.bias": DiagonalGaussian,
    }
    assert model.posterior.block("0.weight").loc is module[0].weight
    x, y = torch.randn(20, 1, 4, 4), torch.randint(0, 2, (20,))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    elbo(F.cross_entropy(model(x), y), model.kl(IsotropicGaussian()), num_data=20).backward()
    opt.step()
    assert all(bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True))
    assert torch.equal(model.posterior.mean()["0.weight"], module[0].weight)
    p = predict(module, model.posterior, x, samples=3)
    assert len(p.samples.unique(dim=0)) == 3
    mean = predict(module, model.posterior, x, mode="mean").samples[0]
    torch.testing.assert_close(mean, module(x))


def test_a_resumed_run_estimates_the_same_divergence() -> None:
    x, prior = torch.randn(5, 1, 4, 4), IsotropicGaussian()
    model, other = (variational(net(), family=RowScaled, seed=seed) for seed in (3, 5))
    model(x)
    other.load_state_dict(model.state_dict())
    model(x), other(x)
    assert model.kl(prior) == other.kl(prior)
    before = model.kl(prior)
    model(x)
    assert model.kl(prior) != before


class Words(nn.Module):
    """Words, positions of which no row is padding, and a convolution over both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.conv = nn.Conv1d(4, 6, 3)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.words(x).mT).relu().mean(-1))


def words(family: str) -> Variational:
    torch.manual_seed(len(family))
    return variational(Words(), family={"cfg": cfg, "mnf": mnf}[family], std_init=0.05, seed=1)


def steps(model: Variational, count: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    g, prior = torch.Generator().manual_seed(2), IsotropicGaussian(0.3)
    x, y = torch.randint(0, 9, (16, 7), generator=g), torch.randint(0, 2, (16,), generator=g)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(elbo(F.cross_entropy(model(x), y), model.kl(prior), num_data=1000))
        losses[-1].backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("family", ["cfg", "mnf"])
def test_resumed_run_equals_an_uninterrupted_one(family: str) -> None:
    model, other = words(family), Variational(Words(), words(family).posterior.frozen(), seed=7)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps(model, 3, opt)
    saved = deepcopy((model.state_dict(), opt.state_dict()))
    again = torch.optim.Adam(other.parameters(), lr=1e-2)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert torch.equal(torch.stack(steps(model, 3, opt)), torch.stack(steps(other, 3, again)))
    for name, value in model.posterior.sample(2, seed=0).items():
        assert torch.equal(value, other.posterior.sample(2, seed=0)[name])


@pytest.mark.parametrize("family", ["cfg", "mnf"])
def test_families_of_the_library_go_through_all_of_it(family: str, tmp_path: Path) -> None:
    model = words(family)
    padding = model.module.words.weight[0].detach().clone()
    assert not padding.any()
    steps(model, 3, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert torch.equal(model.posterior.sample(2)["words.weight"][1, 0], padding)
    small = prune(model.posterior, 0.5)
    small.save(tmp_path / "q")
    # On from a file: the module takes on what is multiplied, or the means.
    onward = Variational(Words(), Factorised.load(tmp_path / "q"), seed=3)
    assert onward.posterior.block("conv.weight").loc is onward.module.conv.weight
    losses = steps(onward, 3, torch.optim.Adam(onward.parameters(), lr=1e-2))
    assert bool(torch.stack(losses).isfinite().all())
    for name, kept in small.kept().items():
        assert not onward.posterior.sample(2)[name][:, ~kept].any()
    assert torch.isfinite(onward.kl(small.frozen()))
    x = torch.randint(0, 9, (5, 7))
    stacked, looped = (predict(Words(), small, x, samples=3, how=how).samples for how in ("stack", "loop"))
    torch.testing.assert_close(stacked, looped)
    # A rule takes over the moments.
    rule = BGD(Words(), std_init=0.1)
    rule.load_posterior(model.posterior)
    found = rule.posterior().std()["conv.weight"]
    torch.testing.assert_close(found, model.posterior.std()["conv.weight"].detach())


@pytest.mark.parametrize("family", ["cfg", "mnf"])
def test_half_precision_draws_and_compares(family: str) -> None:
    q = words(family).posterior.frozen().bfloat16()
    assert q.sample(2)["conv.weight"].dtype == torch.bfloat16
    assert torch.isfinite(kl(q, q.frozen()))


def test_a_pattern_must_match_every_parameter() -> None:
    with pytest.raises(KeyError, match=r"no pattern matches '0.bias': add one, or '\*' as the last"):
        variational(net(), family={"*.weight": DiagonalGaussian})
    prior = ByName({"0.*": IsotropicGaussian(0.5), "*": IsotropicGaussian()})
    assert torch.isfinite(variational(net(), family=RowScaled).kl(prior))


def test_saved_and_frozen_bit_for_bit(tmp_path: Path) -> None:
    q = prune(posterior(), 0.3)
    q.save(tmp_path / "q")
    for other in (Factorised.load(tmp_path / "q"), q.frozen()):
        assert type(other.block("weight")) is RowScaled
        assert torch.equal(other.sample(4, seed=2)["weight"], q.sample(4, seed=2)["weight"])
    assert not any(p.requires_grad for p in q.frozen().parameters())
    frozen = q.frozen()
    linear = nn.Linear(4, 3).double()
    model = Variational(linear, frozen)
    assert all(p.requires_grad for p in model.posterior.parameters())
    assert model.posterior.block("weight").loc is linear.weight
    assert frozen.block("weight").loc is not linear.weight


def test_pruned_by_moments() -> None:
    q = prune(posterior(), 0.5)
    assert sum(int((~kept).sum()) for kept in q.kept().values()) == 8  # of 15
    for name, kept in q.kept().items():
        assert not q.sample(3, seed=0)[name][:, ~kept].any()
        assert not snr(q)[name][~kept].any()
    assert torch.isfinite(kl(q, IsotropicGaussian()))


def test_a_rule_takes_over_its_moments() -> None:
    q = posterior()
    opt = BGD(nn.Linear(4, 3).double(), std_init=0.1)
    opt.load_posterior(q)
    torch.testing.assert_close(opt.posterior().std()["weight"], q.std()["weight"].detach())


def test_weights_of_other_shapes_or_too_few_are_refused() -> None:
    q = BGD(nn.Linear(3, 2)).posterior()
    with pytest.raises(KeyError, match="'bias' is missing: give values of every tensor"):
        kl(q, ScaleMixture(), weights={"weight": torch.zeros(1, 2, 3)})
    with pytest.raises(ValueError, match=r"'weight' has shape \(3,\), and the posterior's is \(2, 3\)"):
        q.log_prob({"weight": torch.zeros(3), "bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'weight' has leading dimensions \(4,\) and 'bias' \(\): give all"):
        q.log_prob({"weight": torch.zeros(4, 2, 3), "bias": torch.zeros(2)})
    with pytest.raises(TypeError, match="'bias' must be given numbers, not booleans"):
        q.log_prob({"weight": torch.zeros(2, 3), "bias": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"std of shape \(3,\) does not broadcast to means of shape \(2,\)"):
        DiagonalGaussian(torch.zeros(2), torch.ones(3))


@pytest.mark.parametrize(
    "family", [MatrixGaussian, EigenGaussian, nn.Linear, lambda p, std: "leaf", "cfg", nn.Linear(3, 2)]
)
def test_family_that_cannot_make_a_leaf_is_refused_by_name(family: Any) -> None:
    name = "a Linear" if isinstance(family, nn.Module) else getattr(family, "__name__", repr(family))
    with pytest.raises(TypeError, match=f"which {name} does not: use DiagonalGaussian, cfg or mnf$"):
        variational(nn.Linear(3, 2), family={"bias": DiagonalGaussian, "*": family})


def test_an_error_inside_a_family_of_ones_own_is_shown() -> None:
    def family(p: Tensor, std: float) -> Leaf:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        variational(nn.Linear(3, 2), family=family)


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        BGD(nn.Linear(3, 2)).posterior().save(tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_held_weights_are_certain_whatever_the_family(tmp_path) -> None:
    q = posterior()
    held = torch.zeros(3, 4, dtype=torch.bool)
    held[1] = True
    before = float(kl(q, IsotropicGaussian(), seed=0).detach())
    means = q.mean()["weight"].detach().clone()
    q.block("weight").hold(held)
    after = float(kl(q, IsotropicGaussian(), seed=0).detach())
    assert 0 < after < before
    q.save(tmp_path / "q")
    for each in (q, q.frozen(), Factorised.load(tmp_path / "q"), prune(q, 0.5, score=lambda q: q.std())):
        pruned = ~each.kept()["weight"]
        expected = means.masked_fill(pruned, 0.0)[1]
        assert torch.equal(each.sample(2)["weight"][0, 1], expected)
        assert torch.equal(each.mean()["weight"][1], expected)
        assert not each.std()["weight"][1].any()
    assert q.kept()["weight"].all()
