"""Every family with every estimator, and every layer: what docs/estimators.md says is what happens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance.families import FAMILIES, PRIORS
from posterity import (
    BGD,
    DiagonalGaussian,
    Leaf,
    ScaledGaussian,
    ScaleMixture,
    Variational,
    gnj,
    kl,
    prune,
    variational,
)
from posterity_lab import bench

ESTIMATORS = ["weight", "local", "flipout"]
OUTPUTS = partial(gnj, dense="output")
own = pytest.mark.parametrize("estimator", ["local", "flipout"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.fc = nn.BatchNorm2d(1), nn.Conv2d(1, 3, 2), nn.Linear(27, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(self.norm(x))).flatten(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 1, 4, 4, generator=g).double(), torch.randint(0, 2, (6,), generator=g)


def serves(family: str, estimator: str) -> bool:
    q = variational(net(), family=FAMILIES[family]).posterior
    return all(estimator in leaf.estimators for leaf in q.blocks.values())


PAIRS = [(family, each) for family in FAMILIES for each in ESTIMATORS]
served = pytest.mark.parametrize(("family", "estimator"), [pair for pair in PAIRS if serves(*pair)])
refused = pytest.mark.parametrize(("family", "estimator"), [pair for pair in PAIRS if not serves(*pair)])


def made(family: str, estimator: str, **options: Any) -> Variational:
    own = {"std_init": 0.1, "seed": 3, "prior": PRIORS.get(family)}
    return variational(net(), family=FAMILIES[family], estimator=estimator, **own, **options)


def own_kl(model: Variational) -> Tensor | float:
    """The KL, where parts of a family learn from it alone, as MNF's auxiliary r does."""
    scaled = any(isinstance(leaf, ScaledGaussian) for leaf in model.posterior.blocks.values())
    return model.kl() if scaled else 0.0


def train(model: Variational, opt: torch.optim.Optimizer, steps: int) -> None:
    x, y = data()
    for _ in range(steps):
        opt.zero_grad()
        out = model.outputs(x, samples=2) if model.draws % 2 else model(x)[None]
        F.cross_entropy(out.flatten(0, 1), y.repeat(len(out))).backward()
        opt.step()


@served
def test_training_moves_every_parameter_and_no_generator(family: str, estimator: str) -> None:
    model = made(family, estimator)
    before, state = [p.detach().clone() for p in model.parameters()], torch.random.get_rng_state()
    x, y = data()
    for run in (model, lambda x: model.outputs(x, samples=2).flatten(0, 1)):
        out = run(x)
        (F.cross_entropy(out, y.repeat(len(out) // 6)) + 1e-3 * own_kl(model)).backward()
        for p in model.parameters():
            assert bool(p.grad.isfinite().all())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, old)
        assert p.dtype is torch.float64


@served
def test_loop_and_stack_and_chunks_give_the_same_outputs(family: str, estimator: str) -> None:
    model, (x, _) = made(family, estimator), data()
    model.module.norm.eval()
    found = []
    for options in ({"how": "stack"}, {"how": "loop"}, {"chunk": 2}):
        model.draws = 4
        found.append(model.outputs(x, samples=3, **options))
    model.draws = 4
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[0][0], model(x))
    assert not torch.equal(model(x), model(x))
    assert len(found[0].unique(dim=0)) == 3


@served
def test_resumed_run_is_bitwise_identical(family: str, estimator: str) -> None:
    def begun(seed: int) -> tuple[Variational, torch.optim.Optimizer]:
        model = made(family, estimator)
        model.seed = seed
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, opt = begun(3)
    train(model, opt, 2)
    other, other_opt = begun(9)
    other.load_state_dict(model.state_dict())
    other_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in ((model, opt), (other, other_opt)):
        train(*each, 3)
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@served
def test_pruned_weights_stay_zero(family: str, estimator: str) -> None:
    q = prune(made(family, estimator).posterior, 0.5)
    model, (x, y) = Variational(net(), q, estimator=estimator), data()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    kept = model.posterior.kept()
    for name, p in model.module.named_parameters():
        assert p.grad.isfinite().all()
        assert not p.grad[~kept[name]].any()


@refused
def test_estimators_that_a_family_lacks_are_refused(family: str, estimator: str) -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(
        ValueError,
        match=r"'conv.weight' cannot have estimator='local': a Kernel\w+ has 'weight' or 'flipout'",
    ):
        variational(module, family=FAMILIES[family], estimator=estimator)
    assert not module._forward_pre_hooks
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    chosen = {"conv.weight": "flipout", "*": estimator}
    out = variational(module, family=FAMILIES[family], estimator=chosen)(data()[0])
    assert out.isfinite().all()


@own
def test_the_divergence_is_the_same_in_closed_form(estimator: str) -> None:
    model, (x, _) = made("DiagonalGaussian", estimator), data()
    model(x)
    torch.testing.assert_close(model.kl(), made("DiagonalGaussian", "weight").kl(), rtol=1e-12, atol=0.0)


@own
def test_estimated_divergence_draws_other_weights(estimator: str) -> None:
    model, (x, _), prior = made("DiagonalGaussian", estimator), data(), ScaleMixture()
    found = []
    for _ in range(200):
        model(x)
        found.append(model.kl(prior))
        assert torch.equal(found[-1], model.kl(prior))  # the same until the next forward pass
    values = torch.stack(found).detach()
    many = kl(model.posterior, prior, samples=2_000, seed=0).detach()
    assert values.std() > 0
    assert (values.mean() - many).abs() < 5 * values.std() * (1 / 200 + 1 / 2_000) ** 0.5
    found[-1].backward()
    assert all(bool(p.grad.any()) for p in model.posterior.parameters())
    resumed = made("DiagonalGaussian", estimator)
    resumed.load_state_dict(model.state_dict())
    assert torch.equal(resumed.kl(prior), model.kl(prior))


def test_wrong_arguments_are_refused() -> None:
    for wrong in ("locals", {"*": "Flipout"}):
        with pytest.raises(ValueError, match="estimator must be 'weight', 'local' or 'flipout', not '"):
            variational(net(), estimator=wrong)
    with pytest.raises(KeyError, match=r"no pattern matches 'norm.bias'"):
        variational(net(), estimator={"*.weight": "local"})
    with pytest.raises(ValueError, match="batch_dim must be at least 0, not -1"):
        variational(net(), estimator="flipout", batch_dim=-1)
    with pytest.raises(ValueError, match="a posterior draws at least one sample, not 0"):
        variational(net(), estimator="local").outputs(data()[0], samples=0)


def test_copy_continues_identically() -> None:
    model, (x, _) = made("DiagonalGaussian", "local"), data()
    model.outputs(x, samples=2)
    other = copy.deepcopy(model)
    assert torch.equal(model.outputs(x, samples=2), other.outputs(x, samples=2))
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert not torch.equal(model.outputs(x, samples=2), other.outputs(x, samples=2))


def test_rule_posterior_continues_with_an_estimator() -> None:
    module = net()
    model = Variational(module, BGD(module, std_init=0.1).posterior(), estimator="flipout")
    assert model(data()[0]).isfinite().all()
    assert not torch.is_inference(model.module.conv.weight)
    with torch.inference_mode():
        assert model(data()[0]).isfinite().all()


@own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_of_autocast(estimator: str, dtype: torch.dtype) -> None:
    for family, deterministic in product((DiagonalGaussian, gnj, OUTPUTS), ((), "*.weight", "*.bias")):
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        model = variational(module, estimator=estimator, deterministic=deterministic, family=family)
        with torch.autocast("cpu", dtype):
            out = model(torch.randn(5, 4))
        assert out.dtype is dtype
        out.float().square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_half_precision_has_a_variance() -> None:
    """1e-4² is 0 in float16."""
    model = variational(nn.Linear(64, 8), estimator="local", std_init=1e-4, seed=0)
    nn.init.zeros_(model.module.weight)
    nn.init.zeros_(model.module.bias)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            out = model(torch.ones(200, 64))
        assert out.dtype is dtype
        assert out.float().std().item() == pytest.approx(65**0.5 * 1e-4, rel=5 / (2 * 1600) ** 0.5 + 0.01)


def test_kernels_deviate_in_full_precision_under_autocast() -> None:
    leaf = posterity.cfg(nn.Parameter(torch.zeros(4, 3, 3, 3)), 0.3)
    nn.init.normal_(leaf.below)
    noise = {"": torch.randn(2, 4, 3, 3, 3)}
    with torch.autocast("cpu", torch.bfloat16):
        _, found = leaf.deviation(noise)
    assert torch.equal(found, leaf.deviation(noise)[1])


class Heated(nn.Module):
    """With a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3, bias=False), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.fc(x)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_parameter_may_be_one_number(estimator: str) -> None:
    model = variational(Heated(), estimator=estimator, std_init=0.1, seed=0)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    (model(x).square().mean() + model.outputs(x, samples=2).square().mean() + model.kl()).backward()
    assert all(p.grad is not None for p in model.parameters())
    step = posterity.compile_step(
        model,
        lambda net, x, y: F.cross_entropy(net(x), y),
        torch.optim.Adam(model.parameters()),
        num_data=5,
        mc_samples=2,
    )
    assert torch.isfinite(step(x, y))


# The table of layers.

TEXT = torch.randn(1, 5, 4)
ROW = torch.randn(1, 4)
PICTURE = torch.randn(1, 4, 5, 5)
WORDS = torch.tensor([[0, 2, 1]])


class Uses(nn.Module):
    """A function of some layers and inputs as a module."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.mT @ ctx.saved_tensors[0]


def tied() -> nn.Module:
    module = Uses(
        lambda self, x: self.head(self.embed(x)), embed=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False)
    )
    module.head.weight = module.embed.weight
    return module


def attention(forward: Callable[..., Tensor]) -> nn.Module:
    return Uses(forward, layer=nn.MultiheadAttention(4, 2, batch_first=True))


def linear(forward: Callable[..., Tensor]) -> nn.Module:
    return Uses(forward, layer=nn.Linear(4, 4, bias=False))


def recurrent(layer: nn.Module) -> nn.Module:
    return Uses(lambda self, x: self.layer(x)[0], layer=layer)


# By row of the table: nets with one example as input, and names that stay deterministic.
LAYERS: dict[str, list[tuple[Callable[[], nn.Module], Tensor, tuple[str, ...]]]] = {
    "`nn.Linear` on `[B, I]`": [(lambda: nn.Linear(4, 3), ROW, ())],
    "`nn.Linear` on `[B, T, I]`": [(lambda: nn.Linear(4, 3), TEXT, ())],
    "`nn.Conv1d`, `nn.Conv2d`, in groups too": [
        (lambda: nn.Conv1d(5, 3, 2), TEXT, ()),
        (lambda: nn.Conv2d(4, 6, 3, groups=2, padding_mode="circular", padding=1), PICTURE, ()),
    ],
    "`nn.MultiheadAttention`, self-attention": [
        (lambda: attention(lambda self, x: self.layer(x, x, x)[0]), TEXT, ("*out_proj*",)),
        (lambda: attention(lambda self, x: self.layer(x, x, x)[0]), TEXT, ("*in_proj*",)),
        (lambda: attention(lambda self, x: self.layer(x, x + 1, x + 1)[0]), TEXT, ("*in_proj*",)),
    ],
    "the same, `in_proj` with other keys": [
        (lambda: attention(lambda self, x: self.layer(x, x + 1, x + 1)[0]), TEXT, ("*out_proj*",)),
    ],
    "`nn.LayerNorm`, `nn.GroupNorm`, `nn.BatchNorm2d`": [
        (lambda: nn.LayerNorm(4), TEXT, ()),
        (lambda: nn.GroupNorm(2, 4), PICTURE, ()),
        (lambda: nn.BatchNorm2d(4), PICTURE, ()),
    ],
    "`nn.Embedding`, `nn.EmbeddingBag`": [
        (lambda: nn.Embedding(5, 4), WORDS, ()),
        (lambda: nn.EmbeddingBag(5, 4), WORDS, ()),
    ],
    "`nn.Conv3d`, `nn.ConvTranspose2d`, `nn.Bilinear`": [
        (lambda: nn.Conv3d(4, 2, 1), PICTURE[..., None], ()),
        (lambda: nn.ConvTranspose2d(4, 2, 2), PICTURE, ()),
        (lambda: Uses(lambda self, x: self.layer(x, x), layer=nn.Bilinear(4, 4, 2)), ROW, ()),
    ],
    "`nn.LSTM`, `nn.GRU`, `nn.RNN`": [
        (lambda kind=kind: recurrent(kind(4, 3, batch_first=True)), TEXT, ())
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    ],
    "any layer inside a `torch.vmap` of the model's own": [
        (lambda: linear(lambda self, x: torch.vmap(self.layer)(x)), ROW, ()),
    ],
    "any other operation on a parameter": [
        (lambda: linear(lambda self, x: x @ self.layer.weight), ROW, ()),
        (lambda: linear(lambda self, x: x * self.layer.weight.square().sum()), ROW, ()),
        (
            lambda: linear(
                lambda self, x: (
                    torch.cat([x, self.layer.weight[:1].expand_as(x)])[: len(x)] + self.layer.weight[0]
                )
            ),
            ROW,
            (),
        ),
    ],
    "an output layer tied to the embedding before it": [(tied, WORDS, ())],
    "a layer that is applied twice": [(lambda: linear(lambda self, x: self.layer(self.layer(x))), ROW, ())],
    "a layer whose weight something else uses later": [
        (lambda: linear(lambda self, x: self.layer(x) @ self.layer.weight), ROW, ()),
    ],
    "a `torch.autograd.Function` of a parameter": [
        (lambda: linear(lambda self, x: Product.apply(x, self.layer.weight)), ROW, ()),
    ],
    "a module that went through `torch.compile`": [
        (lambda: torch.compile(nn.Linear(4, 3), backend="eager"), ROW, ()),
    ],
}


def table(heading: str) -> dict[str, list[str]]:
    """By first cell, the other cells of a table in docs/estimators.md."""
    page = bench.FOLDER.parent / "docs" / "estimators.md"
    if not page.exists():
        pytest.skip("needs a checkout")
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", section, re.M)
    ]
    return {label: cells for label, *cells in rows[2:]}


def test_every_row_of_the_table_is_tested() -> None:
    assert set(table("By layer")) == set(LAYERS)


CASES = [
    (row, number, estimator)
    for row in LAYERS
    for number in range(len(LAYERS[row]))
    for estimator in ESTIMATORS
]


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised over weight samples")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
@pytest.mark.parametrize(("row", "number", "estimator"), CASES)
def test_layers_have_the_estimators_that_the_table_says(row: str, number: int, estimator: str) -> None:
    said = table("By layer")[row][ESTIMATORS.index(estimator)]
    build, one, deterministic = LAYERS[row][number]
    torch.manual_seed(0)
    module = build()
    x = one.expand(4, *one.shape[1:])
    options: dict[str, Any] = {"std_init": 0.3, "seed": 2, "deterministic": deterministic}

    def outputs(estimator: str, samples: int | None = None) -> Tensor:
        model = variational(copy.deepcopy(module), estimator=estimator, **options)
        out = model(x) if samples is None else model.outputs(x, samples=samples)
        out.square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.posterior.parameters())
        return out.detach()

    if said == "refused":
        name = "module" if "compile" in row else r"'layer\.weight'"
        with pytest.raises((RuntimeError, ValueError), match=rf"{name}.*: pass .*estimator="):
            outputs(estimator)
        return
    if estimator == "weight":
        assert said in ("exact", "one draw")
        assert torch.equal(outputs("weight"), outputs("weight"))
        return
    out = outputs(estimator)
    assert all(torch.equal(out, outputs(estimator)) for _ in range(2))
    for each in (out, *outputs(estimator, samples=2)):
        alike = torch.allclose(each, each[:1].expand_as(each), rtol=1e-4, atol=1e-5)
        assert alike == (said == "one draw")
    if said == "one draw":
        assert torch.equal(out, outputs("weight"))


def test_what_the_errors_advise_works() -> None:
    for row in ("a layer that is applied twice", "a layer whose weight something else uses later"):
        module = LAYERS[row][0][0]()
        model = variational(module, estimator={"layer.weight": "weight", "*": "local"})
        assert model(ROW).isfinite().all()


@own
def test_gradients_of_inputs_by_a_transform(estimator: str) -> None:
    x, found = ROW.expand(3, -1).clone().requires_grad_(), []
    for grad in (torch.func.grad, lambda f: lambda x: torch.autograd.grad(f(x), x)[0]):
        torch.manual_seed(0)
        model = variational(nn.Linear(4, 2), estimator=estimator, std_init=0.3, seed=1)
        found.append(grad(lambda x, model=model: model(x).square().sum())(x))
    torch.testing.assert_close(found[0], found[1])


def test_local_draws_no_noise_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = posterity.noise.normal
    monkeypatch.setattr(
        "posterity.noise.normal", lambda *args, **more: asked.append(more["block"]) or real(*args, **more)
    )
    model = variational(net(), family=FAMILIES["Scaled"], estimator="local", deterministic="norm.*")
    model(data()[0])
    assert asked == [
        "conv.weight|z",
        "conv.bias|z",
        "conv.weight|out",
        "fc.weight|z",
        "fc.bias|z",
        "fc.weight|out",
    ]


@own
def test_reading_a_shape_is_no_use_of_a_weight(estimator: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.layer.weight
        assert weight.shape == (4, 4) == tuple(weight.size())
        assert (weight.dim(), len(weight), weight.dtype, weight.numel()) == (2, 4, x.dtype, 16)
        assert weight.stride() == (4, 1)
        assert weight.is_contiguous()
        assert "tensor" in repr(weight)
        return self.layer(x)

    out = variational(linear(forward), estimator=estimator, std_init=0.3)(ROW.expand(3, -1))
    assert not torch.allclose(out[0], out[1])


def test_a_weight_on_another_number_of_examples_is_refused() -> None:
    module = linear(lambda self, x: self.layer(x).sum() + self.layer(x[:1]))
    with pytest.raises(
        RuntimeError, match=r"'layer.weight' is used again in one forward pass, on other examples"
    ):
        variational(module, estimator="flipout")(ROW.expand(3, -1))


def test_a_bias_that_two_weights_share_is_refused() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.bias = self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    match = r"'one.bias' is used again in one forward pass, .* or with another layer's weight"
    with pytest.raises(RuntimeError, match=match):
        variational(Sharing(), estimator="flipout")(torch.randn(3, 4))


def test_every_family_is_in_the_table() -> None:
    rows = {
        name: cells for label, cells in table("By family").items() for name in re.findall(r"`(\w+)`", label)
    }
    kinds = {name: each for name in posterity.__all__ if isinstance(each := getattr(posterity, name), type)}
    leaves = {name: each for name, each in kinds.items() if issubclass(each, Leaf) and each is not Leaf}
    assert rows.keys() == leaves.keys()
    for name, leaf in leaves.items():
        for estimator, said in zip(ESTIMATORS, rows[name], strict=True):
            assert said == "not trained by gradient" or (said == "yes") == (estimator in leaf.estimators)
