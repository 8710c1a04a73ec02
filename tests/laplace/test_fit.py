"""Laplace fits of trained models: what they leave alone, take and refuse, and what they are worth."""

from __future__ import annotations

import copy
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import posterity
from laplace.first_tries import TASKS, log_scores, trained
from posterity import DiagonalGaussian, EigenGaussian, laplace, metrics, predict

ALL = ["*", "1.*"]  # norm layers, too


def conv_net() -> nn.Sequential:
    """In training mode, as a training loop leaves it."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(36, 3),
    )
    net(torch.randn(50, 1, 6, 6))
    return net


def pictures() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(20, 1, 6, 6, generator=g), torch.randint(0, 3, (20,), generator=g)


class Counting(nn.Module):
    """Moves a buffer and draws numbers, even in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1)
        return self.layer(x)


def test_the_model_is_left_as_it_was() -> None:
    for net, x in ((conv_net(), pictures()[0]), (Counting(), torch.randn(20, 3))):
        y = torch.randint(0, 2, (20,))
        F.cross_entropy(net(x), y).backward()
        net[1].eval() if isinstance(net, nn.Sequential) else net.layer.eval()
        state = {name: value.clone() for name, value in net.state_dict().items()}
        grads = {name: p.grad.clone() for name, p in net.named_parameters()}
        modes = [module.training for module in net.modules()]
        rng = torch.get_rng_state()
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        found = laplace.fit(net, loader, prior_precision="validation", validation=loader, samples=2)
        predict(net, found.posterior(), x)
        laplace.fit(net, loader)
        with pytest.raises(ValueError, match="labels must be whole numbers from 0 to"):
            laplace.fit(net, (x, y + 5))
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        assert all(torch.equal(p.grad, grads[name]) for name, p in net.named_parameters())
        assert all(p.requires_grad for p in net.parameters())
        assert [module.training for module in net.modules()] == modes


def test_the_mode_of_the_model_does_not_matter() -> None:
    stds = [
        laplace.fit(net, pictures(), names=ALL, prior_precision=1.0).posterior().std()
        for net in (conv_net(), conv_net().eval())
    ]
    assert all(torch.equal(value, stds[1][name]) for name, value in stds[0].items())


def test_layers_have_the_leaves_that_their_curvature_has() -> None:
    q = laplace.fit(conv_net(), pictures(), names=ALL).posterior()
    kinds = {name: type(leaf) for name, leaf in q.blocks.items()}
    assert kinds == {
        "0.weight+0.bias": EigenGaussian,
        "1.weight": DiagonalGaussian,
        "1.bias": DiagonalGaussian,
        "3.weight": DiagonalGaussian,  # a convolution in groups
        "6.weight+6.bias": EigenGaussian,
    }
    p = predict(conv_net(), q, pictures()[0], samples=5)
    assert p.probs.shape == (20, 3)
    assert torch.isfinite(p.probs).all()


def test_weights_outside_the_filter_keep_their_values() -> None:
    net, (x, y) = conv_net(), pictures()
    q = laplace.fit(net, (x, y), names="6.*", prior_precision=2.0).posterior()
    assert q.tensors == {"6.weight+6.bias": ("6.weight", "6.bias")}
    draws = q.sample(1, seed=0)
    with torch.no_grad():
        features = net.eval()[:6](x)
    expected = F.linear(features, draws["6.weight"][0], draws["6.bias"][0])
    torch.testing.assert_close(predict(net, q, x, samples=1).samples[0], expected)
    # Layer by layer: what else is fitted does not change a layer's curvature.
    whole = laplace.fit(net, (x, y), names=ALL, prior_precision=2.0).posterior()
    torch.testing.assert_close(whole.std()["6.weight"], q.std()["6.weight"])
    net[0].requires_grad_(False)
    assert not {"0.weight", "0.bias"} & {*laplace.fit(net, (x, y), names=ALL).posterior().mean()}
    biases = laplace.fit(net, (x, y), names=lambda name: name.endswith("bias")).posterior()
    assert {*biases.blocks} == {"1.bias", "6.bias"}


def test_weights_that_nothing_uses_have_the_width_of_the_prior() -> None:
    net = nn.Linear(3, 2)
    net.other = nn.Linear(3, 2)
    data = (torch.randn(9, 3), torch.randint(0, 2, (9,)))
    q = laplace.fit(net, data, names="*", prior_precision=4.0).posterior()
    assert (q.std()["other.weight"] == 0.5).all()
    assert (q.std()["weight"] < 0.5).all()


def test_half_precision_weights_have_a_posterior_in_single_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x, y = torch.randn(40, 6).bfloat16(), torch.randint(0, 3, (40,))
    for structure in ("diagonal", "kronecker"):
        q = laplace.fit(net, (x, y), names="*", structure=structure, prior_precision=1.0).posterior()
        assert {value.dtype for value in (*q.mean().values(), *q.std().values())} == {torch.float32}
        assert predict(net, q, x).samples.dtype == torch.bfloat16
        assert torch.isfinite(predict(net, q, x).probs).all()
        options = {"names": "*", "structure": structure, "prior_precision": 1.0}
        wide = laplace.fit(net.float(), (x.float(), y), **options).posterior()
        net.bfloat16()
        for name, std in wide.std().items():  # products of a few numbers, each rounded to 8 bits
            assert ((q.std()[name] - std).abs() < 0.05 * std).all()


def test_singular_factors_and_a_weak_prior() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 40), torch.randint(0, 5, (3,))  # directions that no example has a say in
    q = laplace.fit(nn.Linear(40, 5), (x, y), prior_precision=1e-6).posterior()
    assert q.std()["weight"].max() < 1e3
    assert q.std()["weight"].max() > 900


def test_many_outputs_are_sampled_by_default() -> None:
    x = torch.randn(30, 4)

    def std(outputs: int, **options: object) -> Tensor:
        torch.manual_seed(0)
        net, y = nn.Linear(4, outputs), torch.arange(30) % outputs
        return laplace.fit(net, (x, y), prior_precision=1.0, **options).posterior().std()["weight"]

    assert torch.equal(std(33), std(33, kind="mc"))
    assert torch.equal(std(32), std(32, kind="exact"))
    assert torch.equal(std(33), std(33, seed=0))
    assert not torch.equal(std(33), std(33, seed=1))
    assert not torch.equal(std(5, kind="empirical"), std(5))


def test_labels_are_drawn_anew_in_every_batch() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(1, 4).expand(20, 4), torch.zeros(20, dtype=torch.long)
    mc = [
        laplace.fit(net, (x, y), kind="mc", batch_size=size, prior_precision=1.0).spectra["weight+bias"]
        for size in (1, 20)
    ]
    exact = laplace.fit(net, (x, y), prior_precision=1.0).spectra["weight+bias"]
    # The same label twenty times has rank 1, which neither the exact Fisher nor twenty labels have.
    for found in mc:
        assert found.values[1].max() > 0.1 * exact.values[1].max()


def test_a_variational_model_is_fitted_at_its_means() -> None:
    net, data = nn.Linear(4, 3), (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    model = posterity.variational(net, std_init=0.5)
    a, b = (laplace.fit(each, data).posterior() for each in (net, model))
    assert all(torch.equal(value, b.std()[name]) for name, value in a.std().items())
    assert torch.equal(*(predict(each, a, data[0]).samples for each in (net, model)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_labels_may_be_of_any_whole_type(kind: str, dtype: torch.dtype) -> None:
    net, x, y = nn.Linear(4, 3), torch.randn(12, 4), torch.randint(0, 3, (12,))
    a, b = (laplace.fit(net, (x, each), kind=kind, prior_precision=1.0) for each in (y, y.to(dtype)))
    assert a.log_evidence == b.log_evidence


def test_validation_picks_the_best_predicting_prior_on_the_grid() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    grid = (0.01, 1.0, 100.0)
    x, held_out = torch.randn(60, 4), torch.randn(40, 4)
    y, targets = (net(each).detach() + 0.5 * torch.randn(len(each), 1) for each in (x, held_out))
    for linearise in (False, True):
        found = laplace.fit(
            net,
            (x, y),
            likelihood="regression",
            noise_variance=0.05,
            names="*",
            validation=(held_out, targets),
            grid=grid,
            samples=30,
            linearise=linearise,
            batch_size=16,
        )
        average, single = {}, {}
        for precision in grid:
            q = found.with_prior(precision).posterior()
            out = predict(net, q, held_out, samples=30).samples
            assert q.linearised == linearise
            logs = torch.distributions.Normal(out, 0.05**0.5).log_prob(targets).sum(-1)
            average[precision], single[precision] = float(logs.logsumexp(0).mean()), float(logs.mean())
        assert {*found.prior_precision.values()} == {max(average, key=average.get)}
        # The networks together are worth more than each: by their own scores, the narrowest would win.
        assert max(average, key=average.get) < max(single, key=single.get) == 100.0


def test_a_progress_bar_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    net, data = nn.Linear(4, 3), (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    a, b = (laplace.fit(net, data, batch_size=5, progress=progress) for progress in (False, True))
    assert a.log_evidence == b.log_evidence
    assert "collecting curvature" in capsys.readouterr().err


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.rand(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()))


def test_a_layer_that_collectors_refuse() -> None:
    net, data = Scaled(), (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    message = (
        "'scale' is used by an operation that is not a known layer, from which no curvature can be "
        r"collected: leave it out by names=, or pass fallback='vmap'"
    )
    with pytest.raises(RuntimeError, match=message):
        laplace.fit(net, data, names="*")
    assert {*laplace.fit(net, data, names="head.*").posterior().blocks} == {"head.weight+head.bias"}
    assert {*laplace.fit(net, data, names="*", fallback="vmap").posterior().blocks} == {
        "scale",
        "head.weight+head.bias",
    }


def test_a_layer_applied_twice_has_squares() -> None:
    net, data = Twice(), (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    blocks = laplace.fit(net, data, names="*").posterior().blocks
    assert {*blocks} == {"layer.weight", "layer.bias", "head.weight+head.bias"}


def test_evidence_with_kdim_and_vdim() -> None:
    """The log-determinant of a prior that outweighs the data is that of the prior, weight by weight."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x[..., :3], x[..., 1:3], need_weights=False)[0].mean(1)

    torch.manual_seed(0)
    net, data = Net(), (torch.randn(12, 5, 4), torch.randint(0, 4, (12,)))
    fitted = laplace.fit(net, data, names="*", structure="kronecker", prior_precision=1e12)
    blocks = fitted.posterior().blocks
    names = [name for block in blocks for name in block.split("+")]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    total = sum(p.numel() for p in net.parameters())
    assert sum(each.values.numel() for each in fitted.spectra.values()) == total


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = self.weight.chunk(2)
        return F.linear(x, top) * F.linear(x.tanh(), bottom)


def test_a_weight_used_in_parts_has_a_diagonal_only() -> None:
    net, data = Halves(), (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    with pytest.raises(ValueError, match=r"'weight' is used in parts, .* or pass structure='diagonal'"):
        laplace.fit(net, data)
    assert laplace.fit(net, data, structure="diagonal").posterior().std()["weight"].shape == (6, 4)


X, Y = torch.ones(6, 4), torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": -1.0}, "prior_precision must be finite and greater than 0, not -1"),
        ({"prior_precision": 0.0}, "prior_precision must be finite and greater than 0, not 0"),
        ({"prior_precision": "evidence"}, "must be a number, 'marginal', .* not 'evidence'"),
        (
            {"prior_precision": "validation"},
            "validation= is for prior_precision='validation', which needs it",
        ),
        ({"validation": (X, Y), "prior_precision": 1.0}, "validation= is for prior_precision='validation'"),
        ({"prior_precision": "validation", "validation": []}, "the validation loader gave no batch"),
        ({"prior_precision": "validation", "validation": (X, Y), "grid": ()}, "grid is empty"),
        ({"prior_precision": "validation", "validation": (X, Y), "grid": (1.0, -1.0)}, "not -1"),
        ({"temperature": 0.0}, "temperature must be finite and greater than 0, not 0"),
        ({"noise_variance": 1.0}, "noise_variance is for likelihood='regression'"),
        ({"likelihood": "poisson"}, "likelihood must be 'classification' or 'regression', not 'poisson'"),
        ({"likelihood": "regression", "noise_variance": -2.0}, "noise_variance must be finite and greater"),
        ({"num_data": 0}, "num_data must be at least 1, not 0"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"structure": "full"}, "structure must be one of 'diagonal', 'kronecker', not 'full'"),
        ({"kind": "true"}, "kind must be one of 'empirical', 'mc', 'exact', not 'true'"),
        ({"names": "head.*"}, r"no parameter is named like 'head\.\*'; the names are 'weight', 'bias'"),
        ({"names": lambda name: False}, "names= matches no parameter"),
        ({"loader": []}, "the loader gave no batch"),
        ({"loader": (X[:0], Y[:0])}, "there are no examples: the inputs, or those of a batch, are empty"),
        (
            {"loader": [(X, Y), (X[:0], Y[:0])]},
            "there are no examples: .* or those of a batch, are empty",
        ),
        ({"loader": (X, Y[:5])}, "6 inputs and 5 targets"),
        ({"loader": (X, Y + 3)}, "labels must be whole numbers from 0 to 2"),
        ({"loader": (X, Y.float())}, "labels must be whole numbers from 0 to 2"),
        (
            {"loader": (X, torch.ones(6, 3))},
            r"y has shape \[6, 3\], outputs \[6, 3\]: give labels \[B\], one class for each example, for",
        ),
        (
            {"loader": (X, torch.ones(6)), "likelihood": "regression"},
            r"y has shape \[6\], outputs \[6, 3\]: .* targets \[B, C\] for regression",
        ),
        ({"loader": (X[:, None], Y)}, r"the model must give outputs \[B, C\], .* not \[6, 1, 3\]"),
        ({"loader": (X * torch.nan, Y)}, "'weight' or its curvature is not finite: look for nan"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], message: str) -> None:
    loader = options.get("loader", (X, Y))
    rest = {name: value for name, value in options.items() if name != "loader"}
    with pytest.raises(ValueError, match=message):
        laplace.fit(nn.Linear(4, 3), loader, **rest)


def test_a_temperature_may_be_any_number() -> None:
    found = laplace.fit(nn.Linear(4, 3), (X, Y), temperature=Fraction(1, 2))
    assert found.temperature == 0.5


def test_a_grid_of_one_number_is_refused() -> None:
    with pytest.raises(TypeError, match="grid holds the prior precisions to choose from, not 3: pass a list"):
        laplace.fit(nn.Linear(4, 3), (X, Y), validation=(X, Y), grid=3)


def test_data_without_targets_are_refused() -> None:
    for data, message in (
        (TensorDataset(X, Y), "a Dataset gives single examples: pass DataLoader"),
        ([{"x": X, "y": Y}], r"a batch must be \(inputs, targets\), or a mapping with 'labels', not a dict"),
        ([X, X, X], r"a batch must be \(inputs, targets\), .* not a Tensor"),
        ([(X,)], r"a batch must be \(inputs, targets\), .* not a tuple"),
        ([(X, Y.tolist())], r"a batch must be \(inputs, targets\), .* not a tuple"),
        (X, r"data must be \(inputs, targets\) or a DataLoader, not a Tensor"),
        ([(X, Y, Y)], r"positional arguments"),  # the model takes one
    ):
        with pytest.raises(TypeError, match=message):
            laplace.fit(nn.Linear(4, 3), data)


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"requires a gradient: call model.requires_grad_\(\) first"):
        laplace.fit(nn.Linear(4, 3).requires_grad_(False), (X, Y))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside torch.inference_mode\(\)"):
        laplace.fit(nn.Linear(4, 3), (X, Y))
    with torch.inference_mode():
        made_there = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="a model that was built outside it"):
        laplace.fit(made_there, (X, Y))
    with torch.no_grad():
        assert laplace.fit(nn.Linear(4, 3), (X, Y)).num_data == 6


def test_where_the_evidence_has_no_maximum_a_number_is_asked_for() -> None:
    zero = nn.Linear(4, 3)
    for p in zero.parameters():
        nn.init.zeros_(p)
    with pytest.raises(ValueError, match=r"the weights of 'weight\+bias' are zero, .* as a number"):
        laplace.fit(zero, (X, Y))
    blind = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False))
    with pytest.raises(ValueError, match="the eigenvalues of all blocks are zero"):
        laplace.fit(blind, (0.0 * X, Y), names="*")
    line = nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r"the mean squared error is 0.0, .* give noise_variance="):
        laplace.fit(line, (X, line(X).detach()), likelihood="regression")


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.words(ids)).mean(1))


def test_layers_that_torch_would_fuse_can_be_linearised() -> None:
    torch.manual_seed(0)
    net, x, y = Attentive(), torch.randint(0, 7, (30, 5)), torch.randint(0, 3, (30,))
    q = laplace.fit(net, (x, y), names="*", prior_precision=1e8).posterior()
    assert {"block.self_attn.in_proj_weight+block.self_attn.in_proj_bias", "words.weight"} <= {*q.blocks}
    # Under so strong a prior deviations are small, and a net and its linear part hardly differ.
    a, b = (predict(net, q, x, samples=3, seed=1, linearise=each).samples for each in (False, True))
    mean = predict(net, q, x, mode="mean").samples
    assert (a - b).norm() < 0.02 * (a - mean).norm()
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_linearised_prediction_refuses() -> None:
    net = nn.Linear(4, 3)
    q = laplace.fit(net, (X, Y)).posterior()
    with pytest.raises(ValueError, match="samples and batch_size must be at least 1, not 0 and 1024"):
        predict(net, q, X, samples=0)
    with pytest.raises(ValueError, match="there are no examples"):
        predict(net, q, X[:0])
    with pytest.raises(ValueError, match="'weight' has shape"):
        predict(nn.Linear(5, 3), q, X)


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        opt.zero_grad()
        # The prior N(0, 1) as weight decay: the evidence presumes weights that were trained with it.
        decay = sum(p.square().sum() for p in net.parameters()) / (2 * len(train))
        (F.cross_entropy(net(x[train]), y[train]) + decay).backward()
        opt.step()
    return net, (x[train], y[train]), (x[test], y[test])


# Stated margins, in nats, of the evidence's prior.
@pytest.mark.parametrize(
    ("names", "margin"), [(None, 0.1), ("*", 0.25)], ids=["last layer", "all layers, linearised"]
)
def test_digits_are_known_and_noise_is_not(
    digits: tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    names: str | None,
    margin: float,
) -> None:
    net, train, (x, y) = digits
    q = laplace.fit(net, train, names=names, prior_precision="marginal").posterior()
    noise = torch.rand(400, 64, generator=torch.Generator().manual_seed(2))
    known, unknown = (predict(net, q, each, samples=50) for each in (x, noise))
    plain, blind = (predict(net, q, each, mode="mean") for each in (x, noise))
    assert metrics.accuracy(known.probs, y) > metrics.accuracy(plain.probs, y) - 0.01
    assert metrics.nll(known.probs, y) < metrics.nll(plain.probs, y) + margin
    assert unknown.entropy.mean() > 1.1 * blind.entropy.mean()
    assert metrics.auroc(known.entropy, unknown.entropy) > metrics.auroc(plain.entropy, blind.entropy) - 0.01


@pytest.mark.parametrize("names", [None, "*"], ids=["last layer", "all layers"])
def test_defaults_never_make_the_net_worse(
    digits: tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], names: str | None
) -> None:
    net, train, (x, y) = digits
    half = len(x) // 2
    held_out, (x, y) = (x[:half], y[:half]), (x[half:], y[half:])
    plain = predict(net, x=x)
    by_data = laplace.fit(net, train, names=names)
    by_held_out = laplace.fit(net, train, names=names, validation=held_out)
    # Training data may cost 0.0005 nats more; test data cost about the same.
    for found, margin in ((by_data, 0.001), (by_held_out, 0.0002)):
        p = predict(net, found.posterior(), x, samples=50)
        assert metrics.nll(p.probs, y) < metrics.nll(plain.probs, y) + margin
        assert metrics.accuracy(p.probs, y) > metrics.accuracy(plain.probs, y) - 0.005
    # The same posterior for the model itself, and the evidence's prior, do cost.
    (chosen,), (marginal,) = (
        {*each.prior_precision.values()} for each in (by_data, by_data.with_prior("marginal"))
    )
    assert chosen > 10 * marginal
    costly = predict(net, by_data.with_prior("marginal").posterior(), x, samples=50)
    assert metrics.nll(costly.probs, y) > metrics.nll(plain.probs, y) + 0.02
    if names == "*":
        drawn = predict(net, by_data.with_prior("marginal").posterior(), x, samples=50, linearise=False)
        assert metrics.nll(drawn.probs, y) > metrics.nll(costly.probs, y) + 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    net, (x, y) = conv_net(), pictures()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)  # batches on the CPU
    there = laplace.fit(net, loader, names=ALL, prior_precision=1.0).posterior().std()
    net.cuda()
    rng = torch.cuda.get_rng_state()
    found = laplace.fit(net, loader, names=ALL, prior_precision=1.0)
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    for name, std in found.posterior().std().items():
        assert std.is_cuda
        torch.testing.assert_close(std.cpu(), there[name], rtol=1e-3, atol=1e-5)
    assert found.with_prior("marginal").log_evidence >= found.log_evidence
    chosen = laplace.fit(net, loader, prior_precision="validation", validation=loader, samples=2)
    assert predict(net, chosen.posterior(), x.cuda()).probs.is_cuda
    assert predict(net, chosen.posterior(), x.cuda(), linearise=False).probs.is_cuda


def test_factors_of_some_batches_only_are_refused() -> None:
    class Places(nn.Module):
        """Its inner layer sees one example, whatever the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.inner(torch.ones(1, 2))).tanh())

    model, x, y = Places(), torch.randn(7, 4), torch.randint(0, 3, (7,))
    options = {"names": "*", "fallback": "vmap"}
    assert "inner.weight" in laplace.fit(model, (x, y), batch_size=4, **options).spectra
    with pytest.raises(ValueError, match=r"'inner\.\w+' has Kronecker factors in some batches only: leave"):
        laplace.fit(model, (x, y), batch_size=3, **options)  # the last has one example
    laplace.fit(model, (x, y), batch_size=3, structure="diagonal", **options)


def test_bias_keeps_its_curvature_if_its_weight_has_another_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(12, 4), nn.Linear(4, 12)
            self.out.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x).mean(1))

    model, x, y = Tied(), torch.randint(0, 12, (30, 3)), torch.randint(0, 12, (30,))
    stds = [
        laplace.fit(
            model,
            (x, y),
            names="*",
            kind="mc",
            structure=structure,
            fallback="vmap",
            prior_precision=0.1,
        )
        .posterior()
        .std()["out.bias"]
        for structure in ("kronecker", "diagonal")
    ]
    torch.testing.assert_close(*stds)
    assert stds[0].max() < 0.1**-0.5


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_padding_row_has_no_std_and_no_part_in_the_evidence(structure) -> None:
    torch.manual_seed(0)
    words = torch.cat([torch.randint(1, 6, (16, 3)), torch.zeros(16, 2, dtype=torch.long)], 1)
    y = torch.randint(0, 3, (16,))
    net = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))
    evidences = []
    for value in (0.0, 1.0):
        nn.init.constant_(net[0].weight[0], value)
        net[2].weight.data[:, 12:] = 0.0  # so that the row does not change what the net says
        found = laplace.fit(net, (words, y), structure=structure, names="*", prior_precision=2.0)
        q = found.posterior()
        assert torch.equal(q.mean()["0.weight"][0], net[0].weight[0])
        assert not q.std()["0.weight"][0].any()
        assert q.std()["0.weight"][1:].all()
        if structure == "diagonal":  # else the last layer has factors of its inputs
            evidences.append(found.spectra["0.weight"].log_evidence(2.0))
    assert len(set(evidences)) <= 1


def test_a_posterior_knows_that_it_is_a_linearisation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    found = laplace.fit(net, (X + torch.randn(6, 4), Y), names="*", prior_precision=1.0)
    q = found.posterior()
    q.save(tmp_path / "q.safetensors")
    loaded = posterity.Factorised.load(tmp_path / "q.safetensors", net)
    for each in (q, loaded, q.frozen(), posterity.prune(q, 0.5), copy.deepcopy(q).double()):
        assert each.linearised
    linear, drawn = (predict(net, q, X, linearise=each).samples for each in (True, False))
    assert torch.equal(predict(net, loaded, X).samples, linear)
    assert not torch.allclose(drawn, linear, atol=0.1)
    # The mean network is the same, and pruned means are those that a pruned posterior is linear around.
    assert torch.equal(predict(net, q, X, mode="mean").samples[0], predict(net, x=X).samples[0])
    drawn_from = laplace.fit(net, (X, Y), prior_precision=1.0, linearise=False).posterior()
    assert not drawn_from.linearised
    drawn_from.save(tmp_path / "plain.safetensors")
    assert not posterity.Factorised.load(tmp_path / "plain.safetensors").linearised


def test_a_linearisation_trained_further_is_none() -> None:
    net = nn.Linear(4, 3)
    q = laplace.fit(net, (X, Y), structure="diagonal", prior_precision=1.0).posterior()
    assert not posterity.Variational(net, q).posterior.linearised
    opt = posterity.BGD(net)
    opt.load_posterior(q)
    assert not opt.posterior().linearised


def test_a_model_that_cannot_be_vectorised_is_linearised_in_a_loop() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.last(self.first(x).tanh())
            return out if out.sum() < 1e9 else -out

    torch.manual_seed(0)
    net, x = Branching(), torch.randn(6, 4)
    q = laplace.fit(net, (x, Y), names="*", prior_precision=1.0).posterior()
    loop = predict(net, q, x, how="loop").samples
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(predict(net, q, x).samples, loop)


def test_layers_before_the_first_drawn_one_run_once() -> None:
    class Counted(nn.Module):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            out = x * 1.0
            Counted.rows += out.numel() if not torch._C._functorch.is_batchedtensor(out) else 10**6
            return out

    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Counted(), nn.Linear(5, 3)).eval()
    q = laplace.fit(net, (X, Y), prior_precision=1.0).posterior()
    Counted.rows = 0
    predict(net, q, X, samples=50)
    assert Counted.rows == 30


def excess(task: str, epochs: int, name: str) -> tuple[float, float]:
    """What a fit costs on test data over the plain net, in nats per example, and its standard error."""
    data, model, _ = TASKS[task]
    torch.manual_seed(0)
    train, held_out, test = data(0)
    logs = log_scores(trained(model(), train, epochs), train, held_out, test, [name])
    costs = logs["plain"] - logs[name]
    return float(costs.mean()), float(costs.std()) / len(costs) ** 0.5


# The rule allows 0.0005 nats, or a standard error, on training data; test data have a standard error too.
@pytest.mark.parametrize("name", ["last", "last, validation", "all"])
@pytest.mark.parametrize(
    ("task", "epochs"),
    [
        ("digits, MLP 64-100-10", 20),
        ("diabetes, MLP 10-50-1", 40),
        ("Friedman, MLP 10-50-1", 40),
        ("sine, MLP 1-50-1", 100),
    ],
)
def test_first_tries_cost_no_more_than_chance(task: str, epochs: int, name: str) -> None:
    cost, error = excess(task, epochs, name)
    assert cost <= 0.0005 + 3 * error


def test_the_evidence_costs_more_than_chance_on_digits() -> None:
    for name in ("last, marginal", "all, marginal"):
        cost, error = excess("digits, MLP 64-100-10", 20, name)
        assert cost > 0.0005 + 3 * error


def test_overconfident_net_gains_from_laplace() -> None:
    cost, error = excess("diabetes, MLP 10-50-1", 300, "last, validation")
    assert cost < -2 * error


class TwoLogits(nn.Module):
    """What a model of one logit is as one of two classes."""

    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one = one

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.one(x), (1, 0))


@pytest.mark.parametrize("names", [None, "*"])
def test_one_logit_is_two_classes(names: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    y = (x.sum(1) + torch.randn(60) > 0).float()
    one = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    found = laplace.fit(one, (x, y[:, None]), names=names, prior_precision=2.0, binary=True)
    two = laplace.fit(
        TwoLogits(one),
        (x, y.long()),
        names=names,
        prior_precision=2.0,
    )
    assert found.log_evidence == pytest.approx(two.log_evidence, rel=1e-6)
    for name, std in found.posterior().std().items():
        torch.testing.assert_close(std, two.posterior().std()[f"one.{name}"])
    many = predict(one, found.posterior(), x, samples=2000, binary=True)
    assert many.probs.shape == (60, 2)
    closed = laplace.moments(one, found.posterior(), x).probs
    assert (closed - many.probs).abs().max() < 0.03  # of the probit approximation, and of 2000 samples


def test_one_logit_for_each_input_gives_two_probabilities_for_each() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    column = nn.Sequential(nn.Linear(4, 1))
    flat = nn.Sequential(column[0], nn.Flatten(0))
    q = laplace.fit(flat, (x, (x.sum(1) > 0).float()), names="*", binary=True).posterior()
    found = laplace.moments(flat, q, x)
    assert found.probs.shape == (20, 2)
    torch.testing.assert_close(found.probs, laplace.moments(column, q, x).probs)


def test_one_logit_needs_to_be_said() -> None:
    x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    message = 'one number each: pass binary=True if it is a logit, or likelihood="regression"'
    with pytest.raises(ValueError, match=message):
        laplace.fit(nn.Linear(3, 1), (x, y))
    with pytest.raises(ValueError, match="one logit"):
        laplace.fit(nn.Linear(3, 2), (x, y), binary=True)
    with pytest.raises(ValueError, match="leave one of them out"):
        laplace.fit(nn.Linear(3, 1), (x, y), binary=True, likelihood="regression")


def test_repr_is_one_line_without_the_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    found = laplace.fit(net, (X, Y), names="*", prior_precision=5.0)
    assert repr(found) == "Laplace(blocks=2, weights=43, prior_precision=5, num_data=6, temperature=1)"
    low, high = sorted((found := found.with_prior("marginal-by-block")).prior_precision.values())
    assert f"prior_precision={low:.4g} … {high:.4g}, " in repr(found)
    found = laplace.fit(nn.Linear(4, 1), (X, X[:, :1]), likelihood="regression", noise_variance=0.5)
    assert repr(found).endswith("num_data=6, temperature=1, noise_variance=0.5)")


@pytest.mark.parametrize("targets", ["column", "row"])
def test_regression_with_one_number_for_each_input(targets: str) -> None:
    """A model that squeezes its output, or targets without the axis of outputs, or both."""
    line = nn.Linear(4, 1)
    column = (X @ torch.randn(4, 1, generator=torch.Generator().manual_seed(3))) + 0.1
    y = column if targets == "column" else column[:, 0]
    held_out = (X[:3], y[:3])
    found = [
        laplace.fit(model, (X, y), likelihood="regression", validation=held_out)
        for model in (line, nn.Sequential(line, nn.Flatten(0)))
    ]
    wanted = laplace.fit(line, (X, column), likelihood="regression", validation=(X[:3], column[:3]))
    for each in found:
        assert each.noise_variance == pytest.approx(wanted.noise_variance)
        one, other = (float(fitted.with_prior(1.0).log_evidence) for fitted in (each, wanted))
        assert one == pytest.approx(other)
    squeezed = nn.Sequential(line, nn.Flatten(0))
    posterior = found[1].posterior()
    assert posterity.predict(squeezed, posterior, X).mean.shape == (len(X),)
    assert laplace.moments(squeezed, posterior, X).variance.shape == (len(X),)


def test_outputs_of_a_regression_are_not_asked_for_classes() -> None:
    with pytest.raises(ValueError, match=r"the model must give outputs \[B, C\], not \[6, 3, 1\]"):
        laplace.fit(
            nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1))), (X, X[:, :3]), likelihood="regression"
        )
