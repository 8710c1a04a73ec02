"""Leaves end to end give what the leaves alone give: weights, divergences and gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import posterity
from posterity import ByName, DiagonalGaussian, IsotropicGaussian, ScaleMixture, Variational, kl, variational
from posterity.noise import Domain
from posterity.posterior.end_to_end import end_to_end
from posterity.posterior.flows import Places


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 6, padding_idx=0), nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


X = torch.randint(0, 9, (16, 3), generator=torch.Generator().manual_seed(1))


def whole(*_: Any) -> Variational:
    return variational(net(), std_init=0.2, seed=4)


def pruned(*_: Any) -> Variational:
    model = Variational(net(), posterity.prune(whole().posterior, 0.4), seed=4)
    assert any(leaf.keep is not None for leaf in model.posterior.blocks.values())
    return model


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 6), nn.Unflatten(1, (1, 3)), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3)).double()


def kernels(*_: Any) -> Variational:
    model = variational(convolutions(), family=posterity.cfg, std_init=0.2, seed=4)
    with torch.no_grad():
        for name in ("2.weight", "4.weight"):
            model.posterior.block(name).below.normal_()
    assert ["2.weight", "4.weight"] in [list(each.leaves) for each in model._groups()[0]]
    return model


def flows(*_: Any) -> Variational:
    torch.manual_seed(1)
    model = variational(convolutions(), family=partial(posterity.mnf, hidden=4), std_init=0.2, seed=4)
    with torch.no_grad():  # at the start all but z0 is next to nothing
        for p in model.posterior.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    first = model._groups()[0][0]
    assert list(first.leaves) == [f"{number}.weight" for number in (0, 2, 4, 6)]
    return model


def pruned_flows(*_: Any) -> Variational:
    return Variational(convolutions(), posterity.prune(flows().posterior, 0.4), seed=4)


def pruned_kernels(*_: Any) -> Variational:
    return Variational(convolutions(), posterity.prune(kernels().posterior, 0.4), seed=4)


def mixed(*_: Any) -> Variational:
    model = net()
    model[2].float()
    return variational(nn.Sequential(*model[:2], Cast(model[2]), *model[3:]), std_init=0.2, seed=4)


class Cast(nn.Module):
    """A layer in single precision among others in double."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()).double()


def frozen(*_: Any) -> Variational:
    model = whole()
    model.module[2].weight.requires_grad_(False)
    model.posterior.block("4.weight").raw.requires_grad_(False)
    return model


PRIORS = {
    "isotropic": IsotropicGaussian(0.7, 0.1),
    "mixture": ScaleMixture(0.3, 1.0, 0.1),
    "by name": ByName({"*.bias": IsotropicGaussian(2.0), "*": ScaleMixture()}),
    "gaussians by name": ByName({"*.bias": IsotropicGaussian(2.0), "*": IsotropicGaussian(0.3)}),
    "posterior": None,
}


def alone(model: Variational, prior: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Weights, and gradients of a loss with the KL in it, leaf by leaf."""
    q = model.posterior
    drawn = q._sample(range(1), model.seed, 0, Domain.TRAIN)
    one = {name: w[0] for name, w in drawn.items()}
    loss = torch.func.functional_call(model.module, one, (X,)).square().mean()
    loss = loss + 0.1 * kl(q, prior, weights=drawn, seed=model.seed, step=1)
    return {**one, "loss": loss}, torch.autograd.grad(loss, wanted(model), allow_unused=True)


def wanted(model: Variational) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("make", [whole, pruned, mixed, frozen, kernels, pruned_kernels, flows, pruned_flows])
@pytest.mark.parametrize("name", PRIORS)
def test_joined_leaves_match_single_leaves(make: Any, name: str) -> None:
    model = make()
    prior = PRIORS[name] or copy.deepcopy(make().posterior).frozen()
    expected, grads = alone(model, prior)
    seen: dict[str, torch.Tensor] = {}
    for path, layer in model.module.named_modules():
        for own, _ in layer.named_parameters(recurse=False):
            layer.register_forward_pre_hook(
                lambda layer, _, path=path, own=own: seen.update({f"{path}.{own}": getattr(layer, own)})
            )
    loss = model(X).square().mean()
    assert model._last.joined
    loss = loss + 0.1 * model.kl(prior)
    loss.backward()
    single = any(p.dtype == torch.float32 for p in model.parameters())
    close = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False} if single else {"rtol": 1e-12, "atol": 1e-12}
    for key, value in expected.items():
        torch.testing.assert_close(loss if key == "loss" else seen[key], value, **close)
    for p, grad in zip(wanted(model), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, **close)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", PRIORS)
def test_divergence_without_drawn_weights_matches_single_leaves(name: str) -> None:
    model = variational(net(), std_init=0.2, seed=4, estimator="local")
    prior = PRIORS[name] or copy.deepcopy(whole().posterior).frozen()
    model(X)
    found, expected = model.kl(prior), kl(model.posterior, prior, seed=4, step=1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(each, wanted(model)) for each in (found, expected))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_leaves_that_are_replaced_cast_held_or_changed_are_seen() -> None:
    model = whole()
    model(X)
    leaf = model.posterior.block("2.weight")
    with torch.no_grad():
        leaf.raw.add_(1.0)
    after: list[Any] = []

    def check() -> None:
        model.draws = 0
        with torch.no_grad():
            drawn = model._draw_one()
            expected = model.posterior._sample(range(1), model.seed, 0, Domain.TRAIN)
        for name, w in expected.items():
            torch.testing.assert_close(drawn[name], w[0])
        after.append({name: w.clone() for name, w in drawn.items()})

    check()
    leaf.hold(torch.arange(18).expand(7, 18) % 2 == 0)
    check()
    held = leaf.held.clone()
    leaf.held[:, :9] = False  # in place
    check()
    assert not torch.equal(held, leaf.held)
    model.posterior._leaves[1] = DiagonalGaussian(model.module[2].weight, 0.5, trainable=True)
    check()
    model.float()
    check()
    assert {w.dtype for w in after[-1].values()} == {torch.float32}
    for a, b in pairwise(after[:-1]):
        assert not torch.equal(a["2.weight"], b["2.weight"])


def test_priors_that_are_replaced_or_changed_in_place_are_seen() -> None:
    model = whole()
    prior = copy.deepcopy(model.posterior).frozen()
    leaf, seen = prior.block("2.weight"), []

    def check() -> None:
        model(X)  # from here on all leaves are one
        assert model._last.joined
        found = model.kl(prior).detach()
        torch.testing.assert_close(found, kl(model.posterior, prior).detach(), rtol=1e-12, atol=1e-12)
        expected = sum(kl(one, prior.block(name)).detach() for name, one in model.posterior.blocks.items())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        seen.append(float(found))

    check()
    leaf.loc.add_(0.3)
    check()
    leaf.raw.mul_(2.0)
    check()
    prior._leaves[1] = leaf = DiagonalGaussian(torch.zeros(7, 18).double(), 0.5)
    check()
    leaf.loc = torch.ones(7, 18).double()
    check()
    leaf.loc = torch.full((7, 18), 2.0).double()  # of the same version
    check()
    assert len({*seen}) == 6


@pytest.mark.parametrize("make", [whole, kernels])
def test_replaced_parameter_has_no_divergence_of_old_weights(make: Any) -> None:
    model = make()
    model(X)
    leaf = model.posterior.block("2.weight")
    leaf.raw = nn.Parameter(leaf.raw.detach() + 1.0)  # of the same version
    torch.testing.assert_close(model.kl(), kl(model.posterior, model.prior), rtol=1e-12, atol=1e-12)


def test_numbers_of_a_prior_that_change_are_seen() -> None:
    model, biases = whole(), IsotropicGaussian(2.0)
    prior = ByName({"*.bias": biases, "*": IsotropicGaussian(0.3)})
    model(X)
    before = model.kl(prior)
    biases.std = 3.0
    found = model.kl(prior)
    torch.testing.assert_close(found, kl(model.posterior, prior), rtol=1e-12, atol=1e-12)
    assert found != before


@pytest.mark.parametrize("estimator", ["weight", "local"])
def test_a_model_that_ran_in_inference_mode_can_be_trained(estimator: Any) -> None:
    model = variational(net(), std_init=0.2, seed=4, estimator=estimator)  # it has a mask, for padding
    with torch.inference_mode():
        model(X)
        model.kl(PRIORS["gaussians by name"])
    (model(X).square().mean() + model.kl(PRIORS["gaussians by name"])).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_many_samples_in_inference_mode_are_those_outside_it(estimator: Any) -> None:
    model = variational(net(), std_init=0.2, seed=4, estimator=estimator)  # it has a mask, for padding
    with torch.inference_mode():
        found = model.outputs(X, samples=2)
    model.draws = 0
    torch.testing.assert_close(found.clone(), model.outputs(X, samples=2).detach())


@pytest.mark.parametrize("make", [whole, pruned, kernels, flows])
def test_the_divergence_may_have_a_backward_pass_of_its_own(make: Any) -> None:
    model = make()
    for part in (model(X).square().mean(), 0.1 * model.kl()):
        part.backward()
    found = [p.grad for p in wanted(model)]
    model.draws = 0
    loss = model(X).square().mean() + 0.1 * model.kl()
    for mine, theirs in zip(found, torch.autograd.grad(loss, wanted(model)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [whole, kernels, flows])
def test_transforms_of_a_divergence_before_anything_is_kept(make: Any) -> None:
    model = make()
    inner = Both(model)
    own = {name: p.detach() for name, p in inner.named_parameters()}
    stacked = {name: torch.stack([p, 1.1 * p]) for name, p in own.items()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        model.draws = 0
        return torch.func.functional_call(inner, params, (X,))

    found = torch.func.vmap(torch.func.grad(loss), randomness="same")(stacked)
    for i in range(2):
        alone = torch.func.grad(loss)({name: p[i] for name, p in stacked.items()})
        for name, grad in alone.items():
            torch.testing.assert_close(found[name][i], grad)


class Both(nn.Module):
    """A loss with the KL in it, as a module."""

    def __init__(self, model: Variational) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean() + 0.1 * self.model.kl()


def test_kernels_of_one_weight_lie_end_to_end() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)).double()
    families = {"*.weight": posterity.KernelGaussian, "*": DiagonalGaussian}
    model, plain = (
        variational(layers, family=each, std_init=0.2, seed=4) for each in (families, DiagonalGaussian)
    )
    x = torch.randn(5, 3, 2, 2).double()
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.kl(), plain.kl())
    assert ["0.weight", "1.weight"] in [list(each.leaves) for each in model._groups()[0]]


@pytest.mark.parametrize("how", [{"steps": 0}, {"conv": "input"}, {"conv": "kernel"}], ids=str)
def test_flows_of_any_form_lie_end_to_end(how: dict[str, Any]) -> None:
    """The first convolution has one input, and so one scale."""
    model = variational(convolutions(), family=partial(posterity.mnf, **how), std_init=0.2, seed=4)
    expected, grads = alone(model, IsotropicGaussian())
    loss = model(X).square().mean() + 0.1 * model.kl()
    torch.testing.assert_close(loss, expected["loss"])
    for mine, theirs in zip(torch.autograd.grad(loss, wanted(model)), grads, strict=True):
        torch.testing.assert_close(mine, theirs)


class Stop(torch.autograd.Function):
    """What passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def test_indices_of_flows_are_made_once_and_go_with_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[weakref.ref[Places]]()
    make = Places.__init__

    def watched(self: Places, *args: Any) -> None:
        made.append(weakref.ref(self))
        make(self, *args)

    monkeypatch.setattr(Places, "__init__", watched)
    model = flows()
    for _ in range(3):
        (model(X).square().mean() + model.kl()).backward()
    assert len(made) == 1
    assert made[0]() is not None
    del model
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("make", [whole, kernels, flows])
def test_weights_that_no_gradient_comes_back_to_have_none(make: Any) -> None:
    model = make()
    drawn = model._draw_one()
    x = torch.ones((), dtype=torch.double, requires_grad=True)
    (x + sum(Stop.apply(w).sum() for w in drawn.values())).backward()
    assert x.grad == 1.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_second_derivatives_and_draws_before_one_backward_pass() -> None:
    model = whole()
    losses = [model(X).square().mean() + 0.1 * model.kl() for _ in range(2)]
    (losses[0] + losses[1]).backward()
    both = [p.grad.clone() for p in wanted(model)]
    parts = []
    for i in range(2):
        model.draws = i
        loss = model(X).square().mean() + 0.1 * model.kl()
        parts.append(torch.autograd.grad(loss, wanted(model), create_graph=True))
    for total, a, b in zip(both, *parts, strict=True):
        torch.testing.assert_close(total, a + b)
    norm = torch.stack([grad.square().sum() for grad in parts[0]]).sum()
    curvature = torch.autograd.grad(norm, wanted(model))
    direction, step = [torch.randn_like(p) for p in wanted(model)], 1e-5
    direction[0][0] = 0.0  # the padding row, which no gradient reaches

    def norm_at(shift: float) -> torch.Tensor:
        with torch.no_grad():
            for p, d in zip(wanted(model), direction, strict=True):
                p.add_(d, alpha=shift)
        model.draws = 0
        loss = model(X).square().mean() + 0.1 * model.kl()
        return torch.stack([g.square().sum() for g in torch.autograd.grad(loss, wanted(model))]).sum()

    slope = (norm_at(step) - norm_at(-2 * step)) / (2 * step)
    expected = sum((c * d).sum() for c, d in zip(curvature, direction, strict=True))
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)


def test_leaves_alone_in_their_kind_are_left_to_themselves() -> None:
    leaf = DiagonalGaussian(torch.zeros(3), 0.5, trainable=True)
    fixed = DiagonalGaussian(torch.zeros(3), 0.5)
    assert end_to_end({"a": leaf, "b": fixed}) == []


def test_the_spread_gap_has_the_derivative_of_its_value() -> None:
    q = DiagonalGaussian(torch.zeros(9).double(), torch.logspace(-3, 3, 9).double(), trainable=True)
    raw = q.raw.detach().clone().requires_grad_()
    std = nn.functional.softplus(raw)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(q.loc.detach(), std), normal(0.0, 1.0)).sum()
    found = kl(q, IsotropicGaussian())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, q.raw)[0], torch.autograd.grad(expected, raw)[0], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("size", [5, (1 << 16) + 5])
def test_divergence_to_one_gaussian_is_exact_in_any_number_of_parts(size: int) -> None:
    growth = torch.linspace(-1e-4, 1e-4, size, dtype=torch.float64)
    q = DiagonalGaussian(torch.zeros(size).double(), 1.0 + growth)
    exact = 0.5 * (2 * growth**2 - 2 / 3 * growth**3 + 0.5 * growth**4).sum()  # of r² − 1 − 2 log r
    torch.testing.assert_close(kl(q, IsotropicGaussian()), exact, rtol=1e-9, atol=0.0)
