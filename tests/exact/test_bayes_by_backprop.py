"""Bayes by Backprop: the paper's gradients, equations (3) and (4) of its section 3.2."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posterity import (
    BGD,
    ByName,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    MatrixGaussian,
    ScaleMixture,
    Variational,
    elbo,
    kl,
    mnf,
    names_of,
    point_mass,
    prune,
    variational,
)
from posterity.noise import normal


def test_gradients_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 3).double()
    model = variational(net, std_init=0.3, seed=5)
    prior = ScaleMixture(0.25, 1.0, 0.1)
    x, y = torch.randn(7, 2).double(), torch.randint(0, 3, (7,))
    mu = {name: p.detach().clone() for name, p in net.named_parameters()}
    loss = elbo(F.cross_entropy(model(x), y), model.kl(prior), num_data=10)
    loss.backward()

    # f(w, θ) = log q(w|θ) − log P(w) − log P(D|w), all per example; its partial derivatives by autograd.
    rho = {name: leaf.raw for name, leaf in model.posterior.blocks.items()}
    eps = {
        name: normal(range(1), p.shape, seed=5, step=0, block=name, dtype=torch.float64)[0]
        for name, p in mu.items()
    }
    m = {name: value.clone().requires_grad_() for name, value in mu.items()}
    r = {name: value.detach().clone().requires_grad_() for name, value in rho.items()}
    w = {
        name: (m[name] + torch.log1p(torch.exp(r[name])) * eps[name]).detach().requires_grad_() for name in mu
    }
    f = F.cross_entropy(x @ w["weight"].T + w["bias"], y)
    for name in mu:
        q = torch.distributions.Normal(m[name], torch.log1p(torch.exp(r[name])))
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(torch.tensor([0.25, 0.75]).double()),
            torch.distributions.Normal(torch.zeros(2).double(), torch.tensor([1.0, 0.1]).double()),
        )
        f = f + (q.log_prob(w[name]).sum() - mixture.log_prob(w[name]).sum()) / 10
    f.backward()
    for name, p in net.named_parameters():
        delta_mu = w[name].grad + m[name].grad
        delta_rho = w[name].grad * eps[name] / (1 + torch.exp(-r[name].detach())) + r[name].grad
        torch.testing.assert_close(p.grad, delta_mu)
        torch.testing.assert_close(rho[name].grad, delta_rho)
    torch.testing.assert_close(loss, f)


def test_the_wrapped_module_is_the_users_own_and_holds_the_means() -> None:
    net = nn.Linear(2, 3)
    before = net.weight.detach().clone()
    model = variational(net, deterministic="bias")
    assert model.module is net
    assert model.posterior.block("weight").mean() is net.weight
    assert list(model.posterior.blocks) == ["weight"]
    assert torch.equal(net.weight, before)
    assert len(list(model.parameters())) == 3  # mean and rho of the weight, the bias
    x = torch.randn(4, 2)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(net(x), net(x))


def test_given_posterior_shares_its_means_with_the_module() -> None:
    net = nn.Linear(2, 3)
    q = prune(variational(nn.Linear(2, 3)).posterior, 0.5)
    means = q.mean()["weight"].detach().clone()
    model = Variational(net, q)
    assert torch.equal(net.weight, means)
    assert len(list(model.parameters())) == 4
    with torch.no_grad():
        net.weight.add_(1.0)
    keep = q.block("weight").keep
    assert torch.equal(q.mean()["weight"], net.weight * keep)


def trained(model: Variational) -> None:
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    for _ in range(3):
        opt.zero_grad()
        nll = F.cross_entropy(model(x), y)
        elbo(nll, model.kl(IsotropicGaussian()), num_data=20).backward()
        opt.step()


@pytest.mark.parametrize("saved", [False, True], ids=["as it is", "from a file"])
def test_the_posterior_of_a_rule_can_be_trained_by_gradient(tmp_path: Path, saved: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    rule = BGD(net, std_init=0.05, deterministic=names_of(net, nn.BatchNorm1d))
    q = prune(rule.posterior(), 0.3)
    if saved:
        q.save(tmp_path / "q")
        q = Factorised.load(tmp_path / "q", net)
    means, stds, keep = q.mean(), q.std(), q.kept()
    model = Variational(net, q)
    for name, std in model.posterior.std().items():
        torch.testing.assert_close(std, stds[name])
        assert torch.equal(net.get_parameter(name), means[name])
    assert not keep["0.weight"].all()
    trained(model)
    for name, kept in keep.items():
        for before, after in ((means, model.posterior.mean()), (stds, model.posterior.std())):
            assert (after[name] != before[name])[kept].all()
            assert not after[name][~kept].any()
        assert not net.get_parameter(name)[~kept].any()
        assert torch.equal(q.mean()[name], means[name])  # what was given is left as it was
        assert torch.equal(q.std()[name], stds[name])


def test_a_frozen_posterior_is_trained_as_a_copy() -> None:
    net = nn.Linear(6, 3)
    last = variational(net).posterior.frozen()
    before = {name: value.clone() for name, value in (last.mean() | {"std": last.std()["weight"]}).items()}
    model = Variational(net, last)
    trained(model)
    assert not torch.equal(model.posterior.std()["weight"], before["std"])
    assert torch.equal(last.std()["weight"], before["std"])
    assert torch.equal(last.mean()["weight"], before["weight"])


def test_a_posterior_takes_the_dtype_of_the_module() -> None:
    net = nn.Linear(6, 3).double()
    model = Variational(net, BGD(nn.Linear(6, 3)).posterior())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(torch.ones(2, 6, dtype=torch.float64)).dtype == torch.float64


def test_untrainable_families_are_refused_and_the_module_is_unchanged() -> None:
    net, other = nn.Linear(6, 3), nn.Linear(6, 3)
    before = net.weight.detach().clone()
    leaf = MatrixGaussian((other.weight, other.bias), 0.1 * torch.eye(3), torch.eye(7))
    correlated = Factorised({("weight", "bias"): leaf})
    with pytest.raises(
        TypeError, match=r"'weight\+bias' cannot be trained: a MatrixGaussian is not trained by gradient"
    ):
        Variational(net, correlated)
    certain = Factorised(
        {
            "weight": DiagonalGaussian(other.weight.detach(), 0.1),
            "bias": DiagonalGaussian(other.bias.detach(), 0.0),
        }
    )
    with pytest.raises(
        ValueError, match="'bias' cannot be trained: it has weights of std 0, which no gradient widens"
    ):
        Variational(net, certain)
    with pytest.raises(ValueError, match="'weight' cannot be trained: it has weights of std 0"):
        Variational(net, prune(point_mass(other), 0.5))
    assert torch.equal(net.weight, before)
    # What the first error advises.
    means, stds, kept = correlated.mean(), correlated.std(), correlated.kept()
    trained(
        Variational(
            net,
            Factorised({name: DiagonalGaussian(means[name], stds[name], keep=kept[name]) for name in means}),
        )
    )


def test_estimated_kl_keeps_its_gradient_after_no_grad() -> None:
    model = variational(nn.Linear(2, 3))
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.kl(ScaleMixture()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    copied = copy.deepcopy(model)
    model(torch.ones(1, 2))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_filter_may_be_a_generator() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = variational(net, deterministic=(name for name in ("0.bias", "1.bias")))
    assert list(model.posterior.blocks) == ["0.weight", "1.weight"]


def test_resumed_draws_go_on_where_they_stopped() -> None:
    torch.manual_seed(1)
    model, x = variational(nn.Linear(2, 3), seed=3), torch.randn(4, 2)
    model(x)
    other = variational(nn.Linear(2, 3))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))


def test_many_samples_share_one_divergence_estimate() -> None:
    model = variational(nn.Linear(2, 3))
    assert model.outputs(torch.randn(4, 2), samples=5).shape == (5, 4, 3)
    prior = ByName({"weight": ScaleMixture(), "*": IsotropicGaussian()})
    first = model.kl(prior)
    assert torch.equal(first, model.kl(prior))  # at the weights drawn last
    assert not torch.equal(first, kl(model.posterior, prior))
    with pytest.raises(ValueError, match="there is no parameter to draw"):
        variational(nn.Linear(2, 3), deterministic="*")
    for setting in ("std_init", "std_scale"):
        with pytest.raises(ValueError, match=f"{setting} must be finite and greater than 0, not 0"):
            variational(nn.Linear(2, 3), **{setting: 0.0})


def test_stds_at_the_start_follow_the_mean_fan_in() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).double()
    fan_in = (4 * 18 * 18 + 3 * 16 * 16) / (4 * 18 + 3 * 16)  # of matrices, by their numbers of weights
    for given, expected in (
        ({}, 0.02 / fan_in**0.5),
        ({"std_scale": 0.3}, 0.3 / fan_in**0.5),
        ({"std_init": 0.4}, 0.4),
    ):
        stds = variational(net, **given).posterior.std()
        assert set(stds) == {name for name, _ in net.named_parameters()}
        for std in stds.values():
            torch.testing.assert_close(std.detach(), torch.full_like(std, expected))


def test_the_prior_is_standard_normal_unless_given() -> None:
    torch.manual_seed(0)
    model = variational(nn.Linear(5, 3).double(), std_init=0.3)
    q = model.posterior
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, q.std()[name]),
            torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)),
        ).sum()
        for name, mean in q.mean().items()
    )
    torch.testing.assert_close(model.kl(), expected)
    assert torch.equal(model.kl(), model.kl(IsotropicGaussian(1.0)))


def test_an_estimate_is_at_weights_of_the_posterior_as_it_is() -> None:
    model = variational(nn.Linear(30, 20), std_init=0.01)
    prior = ScaleMixture()
    model(torch.randn(4, 30))
    before = model.kl(prior)
    assert torch.equal(model.kl(prior), before)  # at the same weights
    with torch.no_grad():
        model.module.weight += 1.0
    expected = kl(model.posterior, prior, samples=200)
    torch.testing.assert_close(model.kl(prior), expected, rtol=0.05, atol=0.0)


def test_layers_that_would_run_again_at_their_means_are_refused() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    model = variational(Again())
    loss = model(torch.randn(4, 5, requires_grad=True)).square().mean()
    with pytest.raises(RuntimeError, match="activation checkpointing would run a Linear again at its means"):
        loss.backward()


def test_a_module_in_two_wrappers_has_one_hook() -> None:
    net = nn.Linear(3, 2)
    variational(net), variational(net)
    assert len(net._forward_pre_hooks) == 1


def test_a_padding_row_is_certain_and_stays() -> None:
    words = torch.cat([torch.randint(1, 6, (16, 3)), torch.zeros(16, 9, dtype=torch.long)], 1)
    net = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Linear(48, 3))
    nn.init.normal_(net[0].weight)
    row = net[0].weight[0].detach().clone()
    elsewhere = BGD(list(net.named_parameters())).posterior()  # which does not know of padding
    for model in (variational(net, std_init=0.1), Variational(net, elsewhere)):
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(words), torch.zeros(16, dtype=torch.long))
            (loss + model.kl(IsotropicGaussian()) / 16).backward()
            opt.step()
        assert torch.equal(net[0].weight[0], row)
        q = model.posterior
        assert torch.equal(q.sample(3)["0.weight"][:, 0], row.expand(3, -1))
        assert not q.std()["0.weight"][0].any()
        assert q.std()["0.weight"][1:].all()
        assert torch.equal(q.frozen().sample(2)["0.weight"][1, 0], row)


@pytest.mark.parametrize("trainable", [False, True])
def test_unfit_prior_is_refused_and_nothing_changes(trainable: bool) -> None:
    source, net = variational(nn.Linear(6, 3)), nn.Linear(6, 3)
    q = source.posterior if trainable else source.posterior.frozen()
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 6\) in q and \(2, 6\) in the prior"):
        Variational(net, q, prior=variational(nn.Linear(6, 2)).posterior.frozen())
    assert torch.equal(net.weight, before)
    assert not net._forward_pre_hooks
    assert source.posterior.block("weight").loc is source.module.weight


def test_a_prior_is_tried_as_the_posterior_will_be() -> None:
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2)).double()
    prior = variational(net).posterior.frozen()  # whose padding row is certain
    q = BGD(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))).posterior()
    model = Variational(net, q, prior=prior)
    assert torch.equal(model.posterior.block("0.weight").held, prior.block("0.weight").held)
    assert q.block("0.weight").held is None
    assert torch.isfinite(model.kl())


def test_weights_that_a_part_of_the_module_draws_are_refused() -> None:
    part = variational(nn.Linear(6, 3))
    whole = nn.Sequential(part, nn.Linear(3, 3))
    for module, name in ((part, "module.weight"), (whole, "0.module.weight")):
        with pytest.raises(ValueError, match=f"'{name}' belongs to a Variational, which draws its weights"):
            variational(module)
    assert list(variational(whole, deterministic="0.*").posterior.blocks) == ["1.weight", "1.bias"]


def test_complex_weights_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'weight' is torch.complex64, .*: name it in deterministic="):
        variational(nn.Linear(6, 3, dtype=torch.complex64))


@pytest.mark.parametrize("family", [DiagonalGaussian, mnf])
def test_means_stay_shared_after_loading_with_assign(family: Any) -> None:
    saved = variational(nn.Linear(6, 3), family=family, seed=0).state_dict()
    model = variational(nn.Linear(6, 3), family=family)
    copied = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in saved.items()}
    model.load_state_dict(copied, assign=True)
    leaf = model.posterior.block("weight")
    assert leaf.loc is model.module.weight
    assert all(torch.equal(each, copied[key]) for key, each in model.named_parameters())
    trained(model)
    assert leaf.loc is model.module.weight
    assert not torch.equal(leaf.loc, saved["module.weight"])
