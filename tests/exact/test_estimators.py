"""Estimators against their definitions in float64: weights of one example, moments, expected gradients."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from conformance.families import SPREAD, Kernels, Scaled
from posterity import DiagonalGaussian, ScaledGaussian, Variational, gnj, variational
from posterity.noise import normal

SEED, STD = 5, 0.3


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Attending(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


def images(channels: int, *size: int) -> Tensor:
    return torch.randn(3, channels, *size)


TEXT = torch.randn(3, 5, 4)
CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2, dilation=2), nn.Flatten()
)
ENCODER = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
TIME_FIRST = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
# Nets, inputs, and the axis of their examples.
NETS = {
    "linear": (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)), torch.randn(3, 4), 0),
    "positions": (nn.Linear(4, 2), TEXT, 0),
    "time first": (nn.Linear(4, 2), TEXT.transpose(0, 1), 1),
    "conv1d": (nn.Conv1d(4, 3, 3, padding="same"), TEXT.mT, 0),
    "conv2d": (CONVOLUTIONS, images(2, 6, 6), 0),
    "attention": (Attending(True), TEXT, 0),
    "attention, time first": (Attending(False), TEXT.transpose(0, 1), 1),
    "encoder": (ENCODER, TEXT, 0),
    "encoder, time first": (TIME_FIRST, TEXT.transpose(0, 1), 1),
    "twice": (Twice(), torch.randn(3, 4), 0),
}
nets = pytest.mark.parametrize("net", NETS)


def made(net: nn.Module, estimator: str, **options: object) -> Variational:
    net = copy.deepcopy(net).double()
    return variational(net, estimator=estimator, std_init=STD, seed=SEED, **options)


def drawn(shape: tuple[int, ...], name: str) -> Tensor:
    return normal(range(1), shape, block=name, seed=SEED, step=0, dtype=torch.float64)[0]


def signs(name: str, shape: tuple[int, ...]) -> Tensor:
    return drawn(shape, name).sign()


def weights_of(model: Variational, example: int, examples: int) -> dict[str, Tensor]:
    """μ + r sᵀ Δ of one example; norms and the like have one draw for all."""
    params, found = dict(model.module.named_parameters()), {}
    for name, mean in params.items():
        shift = STD * drawn(tuple(mean.shape), name)
        layer = name.removesuffix("weight").removesuffix("bias") + "weight"
        if params[layer].dim() > 1:
            outputs, inputs = params[layer].shape[:2]
            shift = shift.transpose(0, -1) * signs(f"{layer}|out", (examples, outputs))[example]
            shift = shift.transpose(0, -1)
            if name == layer:
                groups = getattr(model.module.get_submodule(name.rpartition(".")[0]), "groups", 1)
                s = signs(f"{layer}|in", (examples, inputs * groups))[example].view(groups, 1, inputs)
                shape = (groups, outputs // groups, inputs, -1)
                shift = (shift.reshape(shape) * s[..., None]).reshape(mean.shape)
        found[name] = mean + shift
    return found


@nets
def test_flipout_gives_each_example_its_own_weights(net: str) -> None:
    module, x, axis = NETS[net]
    model, x = made(module, "flipout", batch_dim=axis), x.double()
    out = model(x)
    for example in range(3):
        one = x.narrow(axis, example, 1)
        expected = functional_call(model.module, weights_of(model, example, 3), one)
        torch.testing.assert_close(out.narrow(axis, example, 1), expected)
    assert not torch.allclose(
        weights_of(model, 0, 3)[first := next(iter(model.estimators))], model.module.get_parameter(first)
    )


def test_signs_that_are_drawn_at_once_are_those_drawn_one_by_one() -> None:
    net, x, _ = NETS["conv2d"]
    later = made(net, "flipout")
    later(x.double())
    for examples in (3, 2, 2):  # known shapes, other shapes, and these again
        first = made(net, "flipout")
        first.draws = later.draws
        torch.testing.assert_close(first(x[:examples].double()), later(x[:examples].double()), rtol=0, atol=0)


class Anchored(nn.Module):
    """One layer has the same inputs at every pass; the other is used twice, on as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.twice = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.fixed(x.new_ones(2, 3)).mean()
        return self.twice(self.twice(x) + shift)


def test_signs_follow_the_shape_of_a_layer_that_is_used_twice() -> None:
    torch.manual_seed(0)
    net, x = Anchored(), torch.ones(4, 3, dtype=torch.float64)
    later = made(net, "flipout")
    later(x[:1])
    first = made(net, "flipout")
    first.draws = later.draws
    torch.testing.assert_close(first(x), later(x), rtol=0, atol=0)


def test_local_has_the_moments_of_linear_outputs() -> None:
    model, x = made(nn.Linear(4, 6), "local"), TEXT.double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    mean, std = model.posterior.mean(), model.posterior.std()
    variance = (x[..., None, :].square() * std["weight"].square()).sum(-1) + std["bias"].square()
    noise = drawn((3, 5, 6), "weight|out")
    expected = x @ mean["weight"].T + mean["bias"] + variance.sqrt() * noise
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_local_has_the_moments_of_convolutions_at_each_position(bias: bool, groups: int) -> None:
    layer = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups, bias=bias)
    model, x = made(layer, "local"), images(2, 5, 5).double()
    mean, std = model.posterior.mean(), model.posterior.std()
    seen = F.unfold(x, 3, padding=1, stride=2).view(3, groups, -1, 9)  # [B, G, C / G · 9, P · Q]
    weights = [each.flatten(1).view(groups, 4 // groups, -1) for each in (mean["weight"], std["weight"])]
    at_mean = torch.einsum("bgip,goi->bgop", seen, weights[0]).reshape(3, 4, 3, 3)
    variance = torch.einsum("bgip,goi->bgop", seen.square(), weights[1].square()).reshape(3, 4, 3, 3)
    if bias:
        at_mean = at_mean + mean["bias"].view(-1, 1, 1)
        variance = variance + std["bias"].square().view(-1, 1, 1)
    torch.testing.assert_close(model(x), at_mean + variance.sqrt() * drawn((3, 4, 3, 3), "weight|out"))


def test_gradients_of_local_are_the_papers() -> None:
    """Kingma et al. 2015, section 3: ∂out/∂σ² = eps x² / (2 √var)."""
    model, x, y = made(nn.Linear(4, 2, bias=False), "local"), torch.randn(3, 4).double(), torch.randn(3, 2)
    leaf = model.posterior.block("weight")
    out = model(x)
    (out - y).square().sum().backward()
    std, noise = leaf.std().detach(), drawn((3, 2), "weight|out")
    slope, root = 2 * (out - y).detach(), (x.square() @ std.square().T).sqrt()
    torch.testing.assert_close(model.module.weight.grad, slope.T @ x)
    in_variance = (slope * noise / (2 * root)).T @ x.square()
    torch.testing.assert_close(leaf.raw.grad, in_variance * 2 * std * torch.sigmoid(leaf.raw.detach()))


@pytest.mark.parametrize("net", ["linear", "conv2d"])
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_second_derivatives(net: str, estimator: str) -> None:
    module, x, _ = NETS[net]
    x = x.double().requires_grad_()
    torch.manual_seed(0)
    model = variational(copy.deepcopy(module).double(), std_init=STD, seed=SEED, estimator=estimator)
    own = [x, *model.parameters()]
    direction = [torch.randn_like(p) for p in own]

    def along(**more: bool) -> Tensor:
        model.draws = 0
        grads = torch.autograd.grad(model(x).square().sum(), own, **more)
        return torch.stack([(g * d).sum() for g, d in zip(grads, direction, strict=True)]).sum()

    def after(step: float) -> Tensor:
        with torch.no_grad():
            for p, d in zip(own, direction, strict=True):
                p.add_(d, alpha=step)
        return along()

    found = torch.autograd.grad(along(create_graph=True), own)
    curvature = sum((g * d).sum() for g, d in zip(found, direction, strict=True))
    slope = (after(1e-5) - after(-2e-5)) / 2e-5
    torch.testing.assert_close(curvature, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_the_expected_gradient_of_a_quadratic_loss(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E Σ (xw + b − y)² = Σ (xμ + μ_b − y)² + x² σ² + σ_b²; ±1 have the normals' first three moments."""
    model, x, y = made(nn.Linear(2, 1), estimator), torch.randn(3, 2).double(), torch.randn(3, 1).double()
    mean, std = model.posterior.mean(), model.posterior.std()
    exact = (x @ mean["weight"].T + mean["bias"] - y).square()
    exact = exact + x.square() @ std["weight"].square().T + std["bias"].square()
    expected = torch.autograd.grad(exact.sum(), list(model.parameters()))
    # What is independent for one example: three weights, an output, or signs of two inputs and an output.
    given: dict[str, Tensor] = {}

    def chosen(samples: range, shape: tuple[int, ...], *, block: str, **_: object) -> Tensor:
        return given.get(block, torch.ones(1, dtype=torch.float64)).expand(1, *shape)

    monkeypatch.setattr("posterity.noise.normal", chosen)
    total = [torch.zeros_like(each) for each in expected]
    for a, b, c in product((-1.0, 1.0), repeat=3):
        a, b, c = (torch.tensor([each]).double() for each in (a, b, c))
        pair = torch.cat([a, b])
        given = {"weight": pair, "bias": c, "weight|out": c}
        if estimator == "flipout":
            given = {"weight|in": pair, "weight|out": c}
        out = model.outputs(x, samples=1)[0]  # forward() draws diagonal leaves at once, by other functions
        grads = torch.autograd.grad((out - y).square().sum(), list(model.parameters()))
        total = [each + grad / 8 for each, grad in zip(total, grads, strict=True)]
    for each, grad in zip(total, expected, strict=True):
        torch.testing.assert_close(each, grad)


def test_estimator_works_for_a_bias_only() -> None:
    x = images(2, 3, 3).double()
    for estimator in ("local", "flipout"):
        model = made(nn.Conv2d(2, 4, 2), estimator, deterministic="weight")
        at_mean = model.module(x)
        noise = (
            drawn((3, 4, 2, 2), "bias|out")
            if estimator == "local"
            else (drawn((4,), "bias") * signs("bias|out", (3, 4)))[..., None, None]
        )
        torch.testing.assert_close(model(x), at_mean + STD * noise)
    model = made(nn.Conv2d(2, 4, 2), {"weight": "local", "bias": "weight"})
    variance = F.conv2d(x.square(), torch.full((4, 2, 2, 2), STD**2).double())
    expected = F.conv2d(x, model.module.weight, model.module.bias + STD * drawn((4,), "bias"))
    expected = expected + variance.sqrt() * drawn((3, 4, 2, 2), "weight|out")
    torch.testing.assert_close(model(x), expected)


def test_scales_are_drawn_once_for_a_batch() -> None:
    x = torch.randn(3, 4).double()
    z = 1 + SPREAD * drawn((6,), "weight|z")
    model = made(nn.Linear(4, 6, bias=False), "local", family=Scaled)
    mean = z[:, None] * model.module.weight
    root = (x.square() @ torch.full((4, 6), STD**2).double()).sqrt()
    torch.testing.assert_close(model(x), x @ mean.T + root * drawn((3, 6), "weight|out"))
    model = made(nn.Linear(4, 6, bias=False), "flipout", family=Scaled)
    delta = STD * drawn((6, 4), "weight")
    shift = (x * signs("weight|in", (3, 4))) @ delta.T * signs("weight|out", (3, 6))
    torch.testing.assert_close(model(x), x @ (z[:, None] * model.module.weight).T + shift)


# Nets with weights in groups, what has scales in them, and the axis of examples.
GROUPED: dict[str, tuple[nn.Module, Tensor, str, int]] = {
    "linear": (nn.Linear(4, 6), torch.randn(3, 4), "input", 0),
    "linear, outputs": (nn.Linear(4, 6, bias=False), torch.randn(3, 4), "output", 0),
    "time first": (nn.Linear(4, 2), TEXT.transpose(0, 1), "output", 1),
    "one output": (nn.Linear(4, 1), torch.randn(3, 4), "output", 0),
    "conv1d": (nn.Conv1d(4, 3, 3, padding="same"), TEXT.mT, "output", 0),
    "conv2d": (nn.Conv2d(2, 3, 2), images(2, 4, 4), "input", 0),
    "in groups": (nn.Conv2d(4, 6, 2, groups=2), images(4, 3, 3), "input", 0),
    "in groups, outputs": (nn.Conv2d(4, 6, 2, groups=2), images(4, 3, 3), "output", 0),
    "attention": (Attending(True), TEXT, "input", 0),
    "attention, time first": (Attending(False), TEXT.transpose(0, 1), "output", 1),
}


def scaled(model: Variational, weights: dict[str, Tensor], example: int) -> dict[str, Tensor]:
    """The weights times the scales that an example has."""
    found = dict(weights)
    for name, leaf in model.posterior.blocks.items():
        if isinstance(leaf, ScaledGaussian):
            found[name] = found[name] * (1 + SPREAD * drawn((3, *leaf.scales.shape), f"{name}|z")[example])
    return found


@pytest.mark.parametrize("net", GROUPED)
def test_each_example_has_its_own_scales(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, which, axis = GROUPED[net]
    x, family = x.double(), partial(gnj, conv=which, dense=which, z_std=SPREAD)
    model = made(module, "flipout", family=family, batch_dim=axis)
    out = model(x)
    for example in range(3):
        own, one = weights_of(model, example, 3), x.narrow(axis, example, 1)
        expected = functional_call(model.module, scaled(model, own, example), one)
        torch.testing.assert_close(out.narrow(axis, example, 1), expected)

    def of_scales(samples: range, shape: tuple[int, ...], *, block: str, **more: Any) -> Tensor:
        return normal(samples, shape, block=block, **more) * block.endswith("|z")

    monkeypatch.setattr("posterity.noise.normal", of_scales)
    model = made(module, "local", family=family, batch_dim=axis)
    out, means = model(x), dict(model.module.named_parameters())
    monkeypatch.undo()
    for example in range(3):
        expected = functional_call(model.module, scaled(model, means, example), x.narrow(axis, example, 1))
        torch.testing.assert_close(out.narrow(axis, example, 1), expected)


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize(
    ("layer", "x"), [(nn.Linear(4, 6), torch.randn(3, 4)), (nn.Conv2d(2, 4, 2), images(2, 3, 3))]
)
def test_scales_multiply_the_noise_of_weights_but_not_of_biases(
    which: str, layer: nn.Module, x: Tensor
) -> None:
    model = made(layer, "local", family=partial(gnj, conv=which, dense=which, z_std=SPREAD))
    weight, bias, ones = model.module.weight, model.module.bias, [1] * (x.dim() - 2)
    multiply = F.conv2d if ones else F.linear
    size = x.shape[1] if which == "input" else len(weight)
    z = 1 + SPREAD * drawn((3, size), "weight|z").view(3, size, *ones)
    before, after = (z, 1.0) if which == "input" else (1.0, z)
    out, x = model(x.double()), before * x.double()
    mean = after * multiply(x, weight) + bias.view(-1, *ones)
    variance = after**2 * multiply(x.square(), torch.ones_like(weight)) + 1
    noise = drawn(tuple(mean.shape), "weight|out")
    torch.testing.assert_close(out, mean + STD * variance.sqrt() * noise)


def test_one_example_without_an_axis_has_one_draw() -> None:
    x, layer = torch.randn(4).double(), nn.Linear(4, 6, bias=False)
    one, weight = (made(layer, each, family=gnj) for each in ("local", "weight"))
    torch.testing.assert_close(one(x), weight(x))


def test_kernels_keep_their_correlations() -> None:
    model = made(nn.Conv2d(2, 3, 2, bias=False), "flipout", family=Kernels)
    x, leaf = images(2, 4, 4).double(), model.posterior.block("weight")
    delta = leaf.draw({"": drawn((3, 2, 2, 2), "weight")[None]})[0] - leaf.loc
    out, s, r = model(x), signs("weight|in", (3, 2)), signs("weight|out", (3, 3))
    for example in range(3):
        own = leaf.loc + delta * torch.outer(r[example], s[example])[..., None, None]
        torch.testing.assert_close(out[example], F.conv2d(x[example], own))


def test_an_output_without_variance_has_no_gradient_of_nan() -> None:
    q = DiagonalGaussian(torch.randn(3, 4).double(), STD, trainable=True)
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[1] = False
    model = Variational(nn.Linear(4, 3, bias=False).double(), _only(q.pruned(keep)), estimator="local")
    x = torch.randn(5, 4).double()
    x[0] = 0.0
    x.requires_grad_()
    out = model(x)
    assert not out[:, 1].any()
    assert not out[0].any()
    out.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (*model.parameters(), x))
    narrow = torch.tensor(1e-12).double()  # no floor widens it
    model = Variational(
        nn.Linear(4, 3, bias=False).double(),
        _only(DiagonalGaussian(torch.zeros(3, 4).double(), narrow)),
        estimator="local",
        seed=SEED,
    )
    x = x.detach()
    root = (x.square().sum(1, keepdim=True)).sqrt() * narrow
    torch.testing.assert_close(model(x), root * drawn((5, 3), "weight|out"), atol=0.0, rtol=1e-6)


def _only(leaf: DiagonalGaussian) -> object:
    from posterity import Factorised

    return Factorised({"weight": leaf})
