"""Bayes by Backprop: the paper's gradients, equations (3) and (4) of its section 3.2."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posterity import ByName, IsotropicGaussian, ScaleMixture, Variational, elbo, kl, prune, variational
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


def test_a_posterior_from_elsewhere_shares_its_means_with_the_module() -> None:
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


def test_an_estimated_divergence_has_its_whole_gradient_after_a_forward_pass_without_one() -> None:
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


def test_draws_of_many_samples_and_a_shared_estimate_of_the_divergence() -> None:
    model = variational(nn.Linear(2, 3))
    assert model.outputs(torch.randn(4, 2), samples=5).shape == (5, 4, 3)
    prior = ByName({"weight": ScaleMixture(), "*": IsotropicGaussian()})
    first = model.kl(prior)
    assert torch.equal(first, model.kl(prior))  # at the weights drawn last
    assert not torch.equal(first, kl(model.posterior, prior))
    with pytest.raises(ValueError, match="no parameter is left to draw"):
        variational(nn.Linear(2, 3), deterministic="*")
    with pytest.raises(ValueError, match="std must be finite and greater than 0"):
        variational(nn.Linear(2, 3), std_init=0.0)
