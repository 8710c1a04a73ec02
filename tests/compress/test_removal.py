"""Nets without their dead units give the outputs of the pruned ones."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posterity
from posterity import DiagonalGaussian, Factorised, predict
from posterity.compress import export, point_mass, prune, shrink
from posterity.compress.functional import as_functions
from posterity.compress.trace import exported
from posterity_lab import nets


class LeNet(nn.Module):
    """Convolutions, pooling, a size written by hand, no bias in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 8, 5)
        self.fc1, self.fc2 = nn.Linear(128, 20, bias=False), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.tanh(self.fc1(x.view(-1, 128))))


class Residual(nn.Module):
    """Two blocks whose sums tie the channels, a depthwise convolution, BatchNorm, a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.two = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.each, self.more = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = x + self.two(F.gelu(self.one(x)))
        x = F.silu(x + self.more(self.each(x)))
        return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))


class Words(nn.Module):
    """An embedding whose width can shrink, and positions that are added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 6), nn.Parameter(torch.randn(5, 6))
        self.mix, self.out = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.mix(self.table(words) + self.places)).transpose(1, 2).mean(2))


class Attended(nn.Module):
    """Attention without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.4)


CASES = {
    "mlp": (lambda: nets.build("mlp-30-20", (1, 8, 8), 10), lambda: torch.randn(5, 1, 8, 8)),
    "lenet": (LeNet, lambda: torch.randn(5, 1, 28, 28)),
    "residual": (Residual, lambda: torch.randn(5, 3, 8, 8)),
    "words": (Words, lambda: torch.randint(0, 11, (4, 5))),
}


def without(model: nn.Module, generator: torch.Generator, share: float = 0.5) -> Factorised:
    """A posterior in which a share of all rows and columns of matrices is pruned, and many single weights."""
    keep = {}
    for name, p in model.named_parameters():
        keep[name] = torch.rand(p.shape, generator=generator) > 0.3
        if p.dim() > 1:
            rows = torch.rand(p.shape[0], generator=generator) > share
            columns = torch.rand(p.shape[1], generator=generator) > share
            rows[0] = columns[0] = True
            keep[name] &= rows.view(-1, *[1] * (p.dim() - 1)) & columns.view(1, -1, *[1] * (p.dim() - 2))
    leaves = {
        name: DiagonalGaussian(p.detach() * keep[name], 0.02, keep=keep[name])
        for name, p in model.named_parameters()
    }
    return Factorised(leaves)


def masked(model: nn.Module, posterior: Factorised) -> nn.Module:
    found = copy.deepcopy(model).eval()
    found.load_state_dict(posterior.mean(), strict=False)
    return found


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_those_of_the_pruned_net(case: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = CASES[case][0]().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    before = copy.deepcopy(model.state_dict())
    posterior = without(model, generator)
    x = CASES[case][1]()
    x = x.double() if x.is_floating_point() else x
    small = shrink(model, posterior, x)
    assert parameters(small.module) < 0.8 * parameters(model)
    assert not small.dense
    for inputs in (x, torch.cat([x, x.flip(0)])[:7]):  # a batch of another size, too
        torch.testing.assert_close(small.module(inputs), masked(model, posterior)(inputs))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: tuple(p.shape) for name, p in small.module.named_parameters()} == {
        name: small.shapes.get(name, (tuple(p.shape),) * 2)[1] for name, p in small.module.named_parameters()
    }


def test_sampled_outputs_have_the_moments_of_the_large_net() -> None:
    """Constant units go into the bias with the variance of the weights that they were multiplied with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 2, bias=False))
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    keep = torch.tensor([True, False, False, True, True, False])
    leaves["0.weight"] = leaves["0.weight"].pruned(keep[:, None].expand(6, 4))
    leaves["0.bias"] = leaves["0.bias"].pruned(keep)  # three units are always softplus(0)
    posterior, x = Factorised(leaves), torch.randn(3, 4)
    small = shrink(model, posterior, x)
    assert small.shapes == {
        "0.weight": ((6, 4), (3, 4)),
        "0.bias": ((6,), (3,)),
        "2.weight": ((2, 6), (2, 3)),
    }
    assert small.module.get_parameter("2.bias").shape == (2,)
    n = 20_000
    large, less = (
        predict(m, q, x, samples=n, seed=1).samples.double()
        for m, q in ((model, posterior), (small.module, small.posterior))
    )
    error = (large.var(0) / n).sqrt()
    assert bool(((large.mean(0) - less.mean(0)).abs() < 5 * 2**0.5 * error).all())
    spread = large.var(0) * (2.0 / n) ** 0.5
    assert bool(((large.var(0) - less.var(0)).abs() < 5 * 2**0.5 * spread).all())


def test_constant_units_behind_padding_stay_unless_they_are_zero() -> None:
    """Beyond the edge is zero, so what a constant adds differs from place to place."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    keep = torch.ones(4, 1, 3, 3, dtype=torch.bool)
    keep[1:3] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.0) for name, p in model.named_parameters()}
    leaves["0.weight"] = leaves["0.weight"].pruned(keep)
    with torch.no_grad():
        leaves["0.bias"].loc.copy_(torch.tensor([0.3, 0.5, -0.5, 0.1]))  # relu: the third gives zero
    small = shrink(model, Factorised(leaves), torch.randn(2, 1, 7, 7))
    assert small.shapes["0.weight"] == ((4, 1, 3, 3), (3, 1, 3, 3))


def test_constants_are_folded_at_every_position_of_a_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    keep = torch.ones(4, 1, 3, 3, dtype=torch.bool)
    keep[1:3] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    leaves["0.weight"] = leaves["0.weight"].pruned(keep)
    leaves["0.bias"].loc.copy_(torch.tensor([0.3, 0.5, 0.7, 0.1]))
    posterior, x = Factorised(leaves), torch.randn(2, 1, 7, 7).double()
    small = shrink(model, posterior, x)
    assert small.shapes["2.weight"] == ((2, 4, 3, 3), (2, 2, 3, 3))
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x))
    weight = posterior.mean()["2.weight"]
    expected = posterior.mean()["2.bias"] + weight[:, 1].sum((1, 2)) * 0.5 + weight[:, 2].sum((1, 2)) * 0.7
    torch.testing.assert_close(small.posterior.mean()["2.bias"], expected)


class Summed(nn.Module):
    """Two layers of which one has constant units, summed or seen by heads that share a weight or a bias."""

    def __init__(self, shares: str) -> None:
        super().__init__()
        self.shares = shares
        self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6)
        self.head, self.other = nn.Linear(6, 2), nn.Linear(6, 2)
        if shares == "weight":
            self.other.weight = self.head.weight
        if shares == "bias":
            self.other.bias = self.head.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one(x), self.two(x)
        if self.shares == "units":
            return self.head(torch.relu(one + two))
        return self.head(F.softplus(one)) + 2 * self.other(torch.tanh(two))


@pytest.mark.parametrize("shares", ["units", "weight", "bias"])
def test_constants_of_one_term_or_one_use_are_not_folded_for_all(shares: str) -> None:
    torch.manual_seed(0)
    model, keep = Summed(shares).double(), torch.ones(6, 4, dtype=torch.bool)
    keep[2:4] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    leaves["one.weight"] = leaves["one.weight"].pruned(keep)
    if shares != "units":
        leaves["two.weight"] = leaves["two.weight"].pruned(keep)
    posterior = Factorised(leaves)
    small = shrink(model, posterior, torch.randn(1, 4).double())  # of one example, in which all is constant
    x = torch.randn(5, 4).double()
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x))


def test_what_cannot_be_followed_is_named_and_stays() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, 5, 8)
    posterior = point_mass(model)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    masks["layers.0.linear2.weight"][:, 3:] = False
    masks["layers.1.linear1.weight"][2:9] = False
    masks["layers.0.self_attn.out_proj.weight"][:, :4] = False
    leaves = {name: leaf.pruned(masks[name]) for name, leaf in posterior.blocks.items()}
    posterior = Factorised(leaves)
    small = shrink(model, posterior, x)
    assert small.shapes["layers.0.linear1.weight"] == ((16, 8), (3, 8))
    assert small.shapes["layers.1.linear2.weight"] == ((8, 16), (8, 9))
    assert small.dense["layers.0.self_attn.in_proj_weight"] == "select takes some of its units"
    assert small.dense["layers.0.norm1.weight"] == "layer_norm is over its units"
    torch.testing.assert_close(small.module(x[:2]), masked(model, posterior)(x[:2]))


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_large_nets_shrink(name: str) -> None:
    torch.manual_seed(0)
    model = nets.build(name, (3, 32, 32), 10)
    posterior = without(model, torch.Generator().manual_seed(1))
    x = torch.randn(2, 3, 32, 32)
    small = shrink(model, posterior, x[:1])
    assert parameters(small.module) < 0.5 * parameters(model)
    assert not small.dense
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x), rtol=1e-3, atol=1e-4)


def test_tied_weights_shrink_together_or_not_at_all() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.out = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.two(torch.relu(self.one(x)))))

    torch.manual_seed(0)
    model = Tied()
    posterior = without(model, torch.Generator().manual_seed(2))
    x = torch.randn(4, 6)
    small = shrink(
        model, posterior, x
    )  # its columns are the net's input, so its rows, tied to no columns, may go
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x))
    assert set(small.posterior.mean()) == {name for name, _ in small.module.named_parameters()}


RULES = {
    "BGD": lambda net: posterity.BGD(net),
    "IVON": lambda net: posterity.IVON(net, num_data=8),
    "VOGN": lambda net: posterity.VOGN(net, num_data=8),
    "NoisyKFAC": lambda net: posterity.NoisyKFAC(net, num_data=8),
}


def small_net() -> tuple[nn.Module, Factorised]:
    """Without its dead units, with dead weights in it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 9), nn.Linear(9, 3)
    )
    small = shrink(model, without(model, torch.Generator().manual_seed(1)), torch.randn(2, 1, 8, 8))
    assert parameters(small.module) < parameters(model)
    assert not all(bool(kept.all()) for kept in small.posterior.kept().values())
    return small.module, small.posterior


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_a_smaller_net_further_and_masks_stay(rule: str) -> None:
    net, posterior = small_net()
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
    opt = RULES[rule](net)
    opt.load_posterior(posterior)
    for _ in range(2):
        opt.step(lambda: F.cross_entropy(net(x), y), batch_size=len(x))
    found, kept = opt.posterior(), posterior.kept()
    assert all(bool((mean[~kept[name]] == 0).all()) for name, mean in found.mean().items())
    assert all(not bool(each[~kept[name]].any()) for name, each in found.kept().items())
    assert not torch.equal(found.mean()["0.weight"], posterior.mean()["0.weight"])


def test_a_smaller_posterior_is_a_prior_and_keeps_its_masks(tmp_path: Path) -> None:
    net, posterior = small_net()
    posterior.save(tmp_path / "small.safetensors")
    again = Factorised.load(tmp_path / "small.safetensors")
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
    bayesian = posterity.Variational(net, again, seed=0, estimator="local", prior=posterior)
    adam = torch.optim.Adam(bayesian.parameters(), lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        posterity.elbo(F.cross_entropy(bayesian(x), y), bayesian.kl(), num_data=8).backward()
        adam.step()
    kept = posterior.kept()
    for name, mean in bayesian.posterior.mean().items():
        assert bool((mean[~kept[name]] == 0).all())
        assert not torch.equal(mean, posterior.mean()[name])


class Asked(nn.Module):
    """A net that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.two(torch.relu(self.one(x))) * scale}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of graphs with keywords
def test_a_smaller_net_can_be_pickled(tmp_path: Path) -> None:
    net, _ = small_net()
    x = torch.randn(3, 1, 8, 8)
    torch.save(net, tmp_path / "net.pt")
    assert torch.equal(torch.load(tmp_path / "net.pt", weights_only=False)(x), net(x))
    model, x, scale = Asked(), torch.randn(3, 4), torch.ones(1)
    small = shrink(model, without(model, torch.Generator().manual_seed(1)), x, scale=scale).module
    torch.save(small, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    assert torch.equal(again(x, scale=scale)["out"], small(x, scale=scale)["out"])


def unused_inputs(model: nn.Sequential, used: dict[int, list[int]]) -> Factorised:
    """A posterior whose matrices have some columns alone."""
    keep = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for layer, columns in used.items():
        keep[f"{layer}.weight"] = keep[f"{layer}.weight"] & torch.isin(
            torch.arange(model[layer].in_features), torch.tensor(columns)
        )
    leaves = {
        name: DiagonalGaussian(p.detach() * keep[name], 0.1, keep=keep[name])
        for name, p in model.named_parameters()
    }
    return Factorised(leaves)


def wide() -> nn.Sequential:
    """A net in which a fifth of a layer's inputs is worth a step more."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 1000), nn.ReLU(), nn.Linear(1000, 2)
    )


def test_inputs_that_a_layer_does_not_use_are_not_multiplied(tmp_path: Path) -> None:
    """Those of the net, and positions of channels that stay; where few weights go by it, they are."""
    model, x = wide(), torch.randn(4, 1, 8, 8)
    posterior = unused_inputs(model, {2: [3, 70, 5], 4: list(range(900))})  # the second channel is dead
    small = shrink(model, posterior, x)
    assert small.shapes["0.weight"][1] == (2, 1, 3, 3)
    assert small.shapes["2.weight"][1] == small.posterior.mean()["2.weight"].shape == (900, 3)
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x))
    export(tmp_path / "net.pt2", small.module, small.posterior, x[:2])
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), small.module(x))

    first = nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 2))
    few = shrink(first, unused_inputs(first, {0: [1, 5, 4]}), torch.randn(3, 60))
    assert few.shapes == {"0.weight": ((200, 60), (200, 3))}
    again = shrink(few.module, few.posterior, torch.randn(3, 60))
    assert not again.shapes
    assert not again.dense
    most = shrink(first, unused_inputs(first, {0: list(range(11, 60))}), torch.randn(3, 60))
    assert not most.shapes


def test_a_smaller_net_that_selects_inputs_is_made_smaller_again() -> None:
    model, x = wide(), torch.randn(4, 1, 8, 8)
    once = shrink(model, unused_inputs(model, {2: [3, 5, 40, 70, 107]}), x)
    fewer = once.posterior.mean()["2.weight"].clone()
    fewer[:, :2] = 0.0  # all that the first channel gives
    keep = {"2.weight": fewer != 0}
    blocks = {name: leaf.pruned(keep.get(name, leaf.kept)) for name, leaf in once.posterior.blocks.items()}
    twice = shrink(once.module, Factorised(blocks), x)
    assert twice.shapes["0.weight"] == ((3, 1, 3, 3), (2, 1, 3, 3))
    assert twice.shapes["2.weight"] == ((1000, 5), (1000, 3))
    torch.testing.assert_close(twice.module(x), masked(once.module, Factorised(blocks))(x))


LAYERS = {
    "linear": (nn.Linear(4, 3, bias=False), torch.randn(2, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding="valid", groups=2), torch.randn(2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 3, 3, padding="same", dilation=2), torch.randn(2, 4, 9, 9)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), torch.randn(2, 2, 4, 4, 4)),
    "batch_norm": (nn.BatchNorm1d(4, eps=0.3), torch.randn(5, 4)),
    "layer_norm": (nn.LayerNorm(4, eps=0.3), torch.randn(5, 4)),
    "group_norm": (nn.GroupNorm(2, 4, eps=0.3), torch.randn(5, 4)),
    "embedding": (nn.Embedding(5, 3), torch.tensor([[0, 4], [2, 4]])),
    "padding": (nn.Embedding(5, 3, padding_idx=2), torch.tensor([[0, 4], [2, 4]])),
    "relu": (nn.ReLU(), torch.randn(2, 4)),
    "max_pool2d": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), torch.randn(2, 4, 8, 8)),
    "attention": (Attended(), torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_calls_of_aten_become_those_of_functions(name: str) -> None:
    """With their arguments, and with the gradients of the layer."""
    layer, x = LAYERS[name]
    layer = copy.deepcopy(layer).eval()
    net = exported(copy.deepcopy(layer), (x,), {}).module(check_guards=False)
    as_functions(net.graph)
    net.recompile()
    called = [node.target for node in net.graph.nodes if node.op == "call_function"]
    assert not [each for each in called if "aten" in str(each) and "sym_size" not in str(each)]
    torch.testing.assert_close(net(x), layer(x), rtol=0, atol=0)
    for p in net.parameters():
        p.requires_grad_()
    for each in (net, layer):
        if list(layer.parameters()):
            each(x).square().sum().backward()
    grads = [[p.grad for p in each.parameters()] for each in (net, layer)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_outputs_that_are_infinite_are_compared_and_nan_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.relu(self.one(x))) + torch.tensor([0.0, -torch.inf, 0.0])

    torch.manual_seed(0)
    model, x = Masked(), torch.randn(3, 4)
    posterior = without(model, torch.Generator().manual_seed(2))
    small = shrink(model, posterior, x)
    assert small.shapes
    torch.testing.assert_close(small.module(x), masked(model, posterior)(x))
    with pytest.raises(ValueError, match="outputs for this example are nan at the posterior's means"):
        shrink(model, posterior, torch.full((3, 4), torch.nan))


def test_bad_calls_are_refused_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    posterior = point_mass(model)
    with pytest.raises(TypeError, match=r"shrink\(\) takes a Factorised posterior for posterior, not 'q'"):
        shrink(model, "q", torch.randn(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the example has an empty tensor: pass a batch of at least one"):
        shrink(model, posterior, torch.randn(0, 4))
    with pytest.raises(ValueError, match="the model does not take this example: RuntimeError: mat1"):
        shrink(model, posterior, torch.randn(3, 5))
    dead = prune(posterior, 1.0)
    with pytest.raises(
        ValueError, match=r"nothing is left of '0.weight' along axis 0, and the net gives the"
    ):
        shrink(model, dead, torch.randn(3, 4))

    class Data(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if float(x.sum()) > 0 else self.fc(-x)

    with pytest.raises(ValueError, match=r"torch\.export cannot follow the model: "):
        shrink(Data(), point_mass(Data()), torch.randn(3, 4))
