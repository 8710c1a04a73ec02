"""Estimators against many draws of the weights: moments of outputs, and gradients; five standard errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import DiagonalGaussian, ghs, gnj, variational

N = 10_000
LAYERS = {
    "linear": (nn.Linear(3, 2), torch.randn(2, 3)),
    "positions": (nn.Linear(3, 2), torch.randn(2, 2, 3)),
    "conv2d": (nn.Conv2d(2, 2, 2, padding=1), torch.randn(2, 2, 2, 2)),
}
layers = pytest.mark.parametrize("layer", LAYERS)
# Scales of inputs and of outputs.
GROUPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "linear, inputs": ("linear", partial(gnj, dense="input", z_std=0.5)),
    "linear, outputs": ("linear", partial(gnj, dense="output", z_std=0.5)),
    "linear, horseshoe": ("linear", partial(ghs, z_std=0.3)),
    "positions, inputs": ("positions", partial(gnj, z_std=0.5)),
    "conv2d, inputs": ("conv2d", partial(gnj, conv="input", z_std=0.5)),
    "conv2d, outputs": ("conv2d", partial(gnj, conv="output", z_std=0.5)),
}
groups = pytest.mark.parametrize("group", GROUPS)


def outputs(layer: str, estimator: str, seed: int, family: Any = DiagonalGaussian) -> Tensor:
    """``[N, B, …]``, every output flat."""
    torch.manual_seed(0)
    net, x = LAYERS[layer]
    net = type(net)(**_arguments(net)).double()
    model = variational(net, std_init=0.4, seed=seed, estimator=estimator, family=family)
    x = torch.cat([x, x[:1]]).double()  # the first example twice
    with torch.no_grad():
        return model.outputs(x, samples=N).flatten(2)


def _arguments(net: nn.Module) -> dict[str, object]:
    if isinstance(net, nn.Linear):
        return {"in_features": net.in_features, "out_features": net.out_features}
    return {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "padding": 1}


def assert_zero_mean(samples: Tensor) -> None:
    """The mean over the first axis is zero, but for its standard error."""
    error = samples.std(0) / len(samples) ** 0.5
    assert (samples.mean(0).abs() < 5 * error + 1e-12).all(), (samples.mean(0).abs() / error).max()


@layers
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_mean_and_variance_are_those_of_drawn_weights(layer: str, estimator: str) -> None:
    ours, weight = outputs(layer, estimator, 1), outputs(layer, "weight", 2)
    assert_zero_mean(ours - weight)  # two independent draws
    mean = weight.mean(0)
    assert_zero_mean((ours - mean).square() - (weight - mean).square())


@layers
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_examples_are_not_correlated(layer: str, estimator: str) -> None:
    centred = outputs(layer, estimator, 1)
    centred = centred - centred.mean(0)
    assert_zero_mean(centred[:, 0] * centred[:, 1])
    assert_zero_mean(centred[:, 0] * centred[:, 2])
    weight = outputs(layer, "weight", 2)
    assert torch.equal(weight[:, 0], weight[:, 2])


@layers
def test_flipout_outputs_of_an_example_have_the_posterior_correlation(layer: str) -> None:
    every = {each: outputs(layer, each, seed) for seed, each in enumerate(("weight", "flipout", "local"))}
    mean = every["weight"].mean(0)
    pairs = {name: _products((each - mean)[:, 0]) for name, each in every.items()}
    assert_zero_mean(pairs["flipout"] - pairs["weight"])
    assert_zero_mean(pairs["local"])
    if layer != "linear":  # positions share weights: what local ignores
        shared = pairs["weight"].mean(0)
        assert (shared.abs() > 5 * pairs["weight"].std(0) / N**0.5).any()


@groups
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_each_example_has_scales_distributed_as_those_of_drawn_weights(group: str, estimator: str) -> None:
    layer, family = GROUPS[group]
    ours, weight = outputs(layer, estimator, 1, family), outputs(layer, "weight", 2, family)
    assert_zero_mean(ours - weight)
    mean = weight.mean(0)
    ours, weight = ours - mean, weight - mean
    assert_zero_mean(ours.square() - weight.square())
    if layer == "linear":  # outputs of an example share its scales, and nothing else with local
        assert_zero_mean(_products(ours[:, 0]) - _products(weight[:, 0]))


@groups
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_examples_share_no_scales(group: str, estimator: str) -> None:
    layer, family = GROUPS[group]
    centred = outputs(layer, estimator, 1, family)
    centred = centred - centred.mean(0)
    assert_zero_mean(centred[:, 0] * centred[:, 2])  # the same inputs
    if estimator == "local":  # with flipout they share all but the signs of deviations
        spread = centred.square() - centred.square().mean(0)
        assert_zero_mean(spread[:, 0] * spread[:, 2])


def test_examples_share_scales_of_kernels() -> None:
    centred = outputs("conv2d", "local", 1, partial(gnj, conv="kernel", z_std=0.5))
    centred = centred - centred.mean(0)
    products = centred[:, 0] * centred[:, 2]
    assert (products.mean(0).abs() > 5 * products.std(0) / N**0.5).any()


def _products(values: Tensor) -> Tensor:
    """Of all pairs of different numbers."""
    first, second = torch.triu_indices(values.shape[1], values.shape[1], 1)
    return values[:, first] * values[:, second]


def small_net(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    layers = nn.Conv2d(1, 2, 2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 2)
    return nn.Sequential(*layers).double()


def gradients(kind: str, estimator: str, seed: int, family: Any = DiagonalGaussian) -> Tensor:
    """``[groups, parameters]``: gradients of the mean loss over many samples each."""
    model = variational(small_net(kind), std_init=0.5, seed=seed, estimator=estimator, family=family)
    x = torch.randn(3, 3) if kind == "mlp" else torch.randn(3, 1, 3, 3)
    found = []
    for _ in range(100):
        out = model.outputs(x.double(), samples=100)
        loss = F.cross_entropy(out.flatten(0, 1), torch.tensor([0, 1, 1]).repeat(100))
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(found)


@pytest.mark.parametrize(("kind", "estimator"), [("mlp", "local"), ("mlp", "flipout"), ("cnn", "flipout")])
def test_expected_gradients_are_those_of_drawn_weights(kind: str, estimator: str) -> None:
    ours, weight = gradients(kind, estimator, 1), gradients(kind, "weight", 2)
    assert_zero_mean(ours - weight)
    mean = weight.mean(0)
    assert (mean.abs() > 5 * weight.std(0) / len(weight) ** 0.5).sum() > len(mean) / 2  # it is not all noise


@pytest.mark.parametrize("family", [partial(gnj, z_std=0.5), partial(ghs, dense="output", z_std=0.3)])
def test_expected_gradients_of_scales_are_those_of_drawn_weights(family: Any) -> None:
    ours, weight = gradients("mlp", "local", 1, family), gradients("mlp", "weight", 2, family)
    assert_zero_mean(ours - weight)
    mean = weight.mean(0)
    assert (mean.abs() > 5 * weight.std(0) / len(weight) ** 0.5).sum() > len(mean) / 2
    assert ours.var(0).sum() < weight.var(0).sum()
