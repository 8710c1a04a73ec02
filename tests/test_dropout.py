"""Dropout masks as predictive samples, and dropout's KL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import posterity
from posterity import MCDropout, dropout_kl, predict


def make() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    net(torch.randn(64, 4))  # running statistics that are not the batch's
    return net, torch.randn(10, 4)


def test_masks_have_the_moments_of_inverted_dropout() -> None:
    n, p = 4_000, 0.3
    layer = nn.Linear(5, 2).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    samples = predict(nn.Sequential(nn.Dropout(p), layer), MCDropout(), x, samples=n).samples
    mean = layer(x).detach()
    std = (p / (1 - p) * (x.square() @ layer.weight.detach().square().T)).sqrt()
    assert ((samples.mean(0) - mean).abs() < 5 * std / n**0.5).all()
    spread = (samples - mean).square()
    assert ((spread.mean(0) - std.square()).abs() < 5 * spread.std(0) / n**0.5).all()
    # Every input has masks of its own: equal inputs give uncorrelated outputs.
    twins = predict(nn.Sequential(nn.Dropout(p), layer), MCDropout(), x[:1].expand(2, 5), samples=n).samples
    assert abs(twins[:, :, 0].T.corrcoef()[0, 1]) < 5 / n**0.5


@pytest.mark.parametrize("p", [0.2, 0.5, 1.0])
@pytest.mark.parametrize(
    "layer", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
)
def test_what_stays_and_what_drops_has_torchs_values(layer: type[nn.Module], p: float) -> None:
    shape = {nn.Dropout1d: (60, 5, 2), nn.Dropout2d: (60, 5, 2, 2), nn.FeatureAlphaDropout: (60, 5, 2, 2)}
    x = torch.full(shape.get(layer, (60, 5, 2, 2, 2)), 0.7, dtype=torch.float64)
    ours = predict(layer(p), MCDropout(), x, samples=1, class_dim=1).samples
    torch.testing.assert_close(ours.unique(), layer(p)(x).unique())


def test_only_dropout_is_in_training_mode_and_all_is_put_back() -> None:
    net, x = make()
    net.train()
    net[2].eval()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    modes: list[tuple[bool, ...]] = []
    handle = net[4].register_forward_hook(lambda *_: modes.append(tuple(m.training for m in net.modules())))
    p = predict(net, MCDropout(), x, samples=7)
    handle.remove()
    assert modes == [(False, False, False, True, False, False)] * 7
    assert [m.training for m in net.modules()] == [True, True, True, False, True, True]
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert not net[2]._forward_hooks
    assert not p.samples.requires_grad
    assert len(p.samples.unique(dim=0)) == 7


def test_every_mode_of_prediction_works() -> None:
    net, x = make()
    samples = predict(net, MCDropout(), x, samples=9).samples
    assert samples.shape == (9, 10, 3)
    got = {mode: predict(net, MCDropout(), x, samples=9, mode=mode) for mode in ("average", "single", "vote")}
    assert all(torch.equal(each.samples, samples) for each in got.values())
    torch.testing.assert_close(got["average"].probs, samples.softmax(-1).mean(0))
    torch.testing.assert_close(got["single"].probs, samples.softmax(-1))
    assert (got["average"].mutual_information > 0).any()
    mean = predict(net, MCDropout(), x, mode="mean")
    torch.testing.assert_close(mean.samples, net.eval()(x).detach()[None])


def test_a_seed_chooses_the_masks_and_no_generator_moves() -> None:
    net, x = make()
    torch.manual_seed(5)
    torch.rand(3)
    before = torch.get_rng_state()
    first = predict(net, MCDropout(), x, samples=4, seed=1).samples
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 5
    torch.manual_seed(6)
    assert torch.equal(predict(net, MCDropout(), x, samples=4, seed=1).samples, first)
    assert torch.equal(predict(net, MCDropout(), x, samples=6, seed=1).samples[:4], first)
    assert not torch.equal(predict(net, MCDropout(), x, samples=4, seed=2).samples, first)


def test_batches_have_different_masks() -> None:
    net, x = make()
    twice = torch.cat([x, x])
    p = predict(net, MCDropout(), twice, samples=4, batch_size=10, progress=True).samples
    assert p.shape == (4, 20, 3)
    assert torch.equal(p[:, :10], predict(net, MCDropout(), x, samples=4).samples)
    assert not torch.equal(p[:, :10], p[:, 10:])
    assert predict(net, MCDropout(), twice, samples=4, batch_size=7).samples.shape == (4, 20, 3)


@pytest.mark.parametrize(
    ("layer", "dims"),
    [
        (nn.Dropout(0.5), 0),
        (nn.Dropout1d(0.5), 1),
        (nn.Dropout2d(0.5), 2),
        (nn.Dropout3d(0.5), 3),
        (nn.AlphaDropout(0.5), 0),
        (nn.FeatureAlphaDropout(0.5), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_every_kind_of_dropout_layer_drops(layer: nn.Module, dims: int) -> None:
    x = torch.ones(2, 8, *[3] * dims)
    samples = predict(nn.Sequential(layer, nn.Flatten()), MCDropout(), x, samples=5).samples
    assert len(samples.unique(dim=0)) == 5


def test_layers_that_torch_would_fuse_drop_too() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    samples = predict(layer, MCDropout(), torch.randn(2, 3, 8), samples=4).samples
    assert len(samples.unique(dim=0)) == 4


def test_a_variational_model_drops_at_its_means() -> None:
    net, x = make()
    model = posterity.variational(net)
    a, b = (predict(each, MCDropout(), x, samples=3).samples for each in (net, model))
    assert torch.equal(a, b)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_that_drops_nothing_is_refused() -> None:
    for net in (nn.Linear(4, 2), nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 2)), Functional()):
        with pytest.raises(ValueError, match="has no dropout layer with p above 0 to draw masks for: add"):
            predict(net, MCDropout(), torch.ones(3, 4))
    with pytest.raises(RuntimeError, match=r"no dropout layer of the model ran, so all passes are the same"):
        predict(Unused(), MCDropout(), torch.ones(3, 4))


def test_everything_is_put_back_after_an_error() -> None:
    net, _ = make()
    net[2].eval()
    before = torch.get_rng_state()
    net[4] = nn.Linear(7, 3)
    with pytest.raises(RuntimeError):
        predict(net, MCDropout(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert [m.training for m in net.modules()] == [True, True, True, False, True, True]
    assert not net[2]._forward_hooks
    before_linear = torch.get_rng_state()
    assert not torch.equal(before, before_linear)  # the new layer's own weights were drawn
    with pytest.raises(RuntimeError):
        predict(net, MCDropout(), torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), before_linear)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_masks_on_a_gpu_leave_its_generator_alone() -> None:
    net, x = make()
    net.cuda()
    before = torch.cuda.get_rng_state()
    a, b = (predict(net, MCDropout(), x.cuda(), samples=4).samples for _ in range(2))
    assert torch.equal(a, b)
    assert len(a.unique(dim=0)) == 4
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9])
def test_the_kl_is_the_expected_prior_term_but_for_a_constant(p: float) -> None:
    n, precision = 40_000, 3.0
    layer = nn.Linear(5, 2).double()
    weight = layer.weight.detach()
    prior = torch.distributions.Normal(*torch.tensor([0.0, precision**-0.5], dtype=torch.float64))
    torch.manual_seed(0)
    # One mask for each input, scaled as torch's own dropout scales it.
    masks = nn.functional.dropout(torch.ones(n, 1, 5, dtype=torch.float64), p)
    terms = -prior.log_prob(masks * weight).sum((1, 2))
    constant = -prior.log_prob(torch.zeros_like(weight)).sum()  # the expectation at weights of 0
    error = (terms.mean() - constant - dropout_kl({layer: p}, prior_precision=precision)).abs().item()
    assert error < 5 * terms.std().item() / n**0.5 + 1e-12


def test_its_gradient_is_weight_decay() -> None:
    layer = nn.Linear(3, 2)
    dropout_kl({layer: 0.75}, prior_precision=0.5).backward()
    torch.testing.assert_close(layer.weight.grad, layer.weight.detach() * 0.5 / 0.25)
    assert layer.bias.grad is None


def test_in_a_sequential_the_layers_behind_dropout_are_found() -> None:
    drop, conv, first, last = nn.Dropout(0.25), nn.Conv2d(1, 2, 3), nn.Linear(8, 4), nn.Linear(4, 2)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 1, 3), nn.Dropout2d(0.5), conv, nn.ReLU()),
        nn.Sequential(nn.Dropout(0.1), nn.Flatten()),
        first,
        nn.Tanh(),
        drop,
        nn.ReLU(),
        last,
        nn.LogSoftmax(-1),
    )
    expected = dropout_kl({conv: 0.5, first: 0.1, last: 0.25}, prior_precision=2.0)
    torch.testing.assert_close(dropout_kl(net, prior_precision=2.0), expected)
    again = nn.Sequential(drop, nn.Linear(2, 2), drop, nn.Linear(2, 2))  # one module in two places
    torch.testing.assert_close(dropout_kl(again), dropout_kl({again[1]: 0.25, again[3]: 0.25}))


class Residual(nn.Sequential):
    """Not what it is made of, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_what_dropout_scales_is_never_guessed() -> None:
    linear = nn.Linear(2, 2)
    for net, name in (
        (nn.Sequential(nn.Dropout(0.5), nn.Tanh(), linear), "'1', a Tanh"),
        (nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2), linear), "'1', a BatchNorm1d"),
        (nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), linear), "'1', a Dropout"),
        (nn.Sequential(nn.Sequential(nn.AlphaDropout(0.5)), linear), "'0.0', a AlphaDropout"),
        (nn.Sequential(Unused(), linear), "'0', a Unused"),
        (nn.Sequential(nn.Dropout(0.5), Residual(linear), nn.Linear(2, 2)), "'1', a Residual"),
        (nn.Sequential(nn.Dropout(0.5), linear, nn.Dropout(0.2), linear), "'3', a Linear"),
    ):
        with pytest.raises(ValueError, match=f"are scaled by the dropout before or in {name}: pass"):
            dropout_kl(net)
    with pytest.raises(ValueError, match="no layer follows the last dropout layer"):
        dropout_kl(nn.Sequential(linear, nn.Dropout(0.5)))
    with pytest.raises(ValueError, match="no layer follows a dropout layer"):
        dropout_kl(nn.Sequential(linear))
    with pytest.raises(TypeError, match="a Dropout has no weight: pass the layer that follows"):
        dropout_kl({nn.Dropout(0.5): 0.5})
    for rate in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="drop rate must be at least 0 and less than 1"):
            dropout_kl({linear: rate})
    with pytest.raises(ValueError, match="prior_precision must be finite and greater than 0, not 0"):
        dropout_kl({linear: 0.5}, prior_precision=0.0)


def test_a_module_that_is_no_sequential_is_refused_by_its_name() -> None:
    with pytest.raises(
        TypeError,
        match=r"cannot tell which weights dropout scales in a Unused, .*: pass \{layer: drop rate\}",
    ):
        dropout_kl(Unused())  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="cannot tell which weights dropout scales in a Residual, which is not a plain "
    ):
        dropout_kl(Residual(nn.Dropout(0.5), nn.Linear(2, 2)))
