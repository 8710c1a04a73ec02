"""Which weights a Laplace fit takes: the last layer that a batch passes, the whole net, or a filter's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from posterity import laplace
from posterity.laplace.fitting import _Sample

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Reversed(nn.Module):
    """Registered back to front, with a head that has no part in the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.other = nn.Linear(5, 3), nn.Linear(4, 5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.last(self.first(x).tanh())
        return out, self.other(out)


class Tempered(nn.Module):
    """A norm and a learnt temperature behind the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.first, self.head, self.norm = nn.Linear(4, 5), nn.Linear(5, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.first(x).tanh())) * self.temperature


class Functional(nn.Module):
    """Calls its head's weight, not its head."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).tanh(), self.head.weight, self.head.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]


def norm_at_the_end() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Reversed, {"output": 0}, {"last.weight", "last.bias"}),
        (Tempered, {}, {"head.weight", "head.bias"}),
        (Functional, {}, {"head.weight", "head.bias"}),
        (Attention, {}, {"attention.out_proj.weight", "attention.out_proj.bias"}),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
            {},
            {"0.weight", "0.bias"},
        ),
    ],
    ids=[
        "registered in reverse",
        "norm and temperature behind",
        "functional",
        "attention",
        "norm at the end",
    ],
)
def test_the_last_layer_is_the_one_that_runs_last(
    model: type[nn.Module], options: dict[str, object], expected: set[str]
) -> None:
    torch.manual_seed(0)
    net = model()
    x = X.view(12, 1, 2, 2) if isinstance(net, nn.Sequential) else X
    found = laplace.fit(net, (x, Y), prior_precision=1.0, **options)
    assert {*found.posterior().mean()} == expected


def test_tied_weights_are_found_at_their_last_use() -> None:
    found = laplace.fit(Tied(), (torch.arange(12), torch.arange(12)), prior_precision=1.0)
    assert {*found.posterior().mean()} == {"words.weight"}


def test_frozen_layers_are_not_the_last() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].requires_grad_(False)
    assert {*laplace.fit(net, (X, Y), prior_precision=1.0).posterior().mean()} == {"0.weight", "0.bias"}


def test_a_last_layer_without_known_curvature_says_what_to_do() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3)))
    with pytest.raises(RuntimeError, match=r"'2\.param.* leave it out by names=, or pass fallback"):
        laplace.fit(net, (X, Y))
    found = laplace.fit(net, (X, Y), fallback="vmap", prior_precision=1.0)
    assert "2.parametrizations.weight.original1" in found.posterior().mean()
    with pytest.raises(
        ValueError, match=r"no layer with trainable weights ran, .*: choose weights by names="
    ):
        laplace.fit(nn.LayerNorm(4), (X, Y))


class LlamaRMSNorm(nn.Module):
    """As other libraries write theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def test_the_whole_net_leaves_out_norm_layers_unless_named() -> None:
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.GroupNorm(1, 5), LlamaRMSNorm()]
    net = nn.Sequential(*layers, nn.Linear(5, 3))
    options = {"prior_precision": 1.0, "fallback": "vmap"}
    linear = {"0.weight", "0.bias", "5.weight", "5.bias"}

    def names(names: object) -> set[str]:
        return {*laplace.fit(net, (X, Y), names=names, **options).posterior().mean()}

    assert names("*") == linear
    assert names(["*", "2.*"]) == linear | {"2.weight", "2.bias"}
    assert names("1.*") == {"1.weight", "1.bias"}
    assert names(lambda name: True) == {name for name, _ in net.named_parameters()}
    with pytest.raises(ValueError, match="the model has norm layers only, which '\\*' leaves out"):
        laplace.fit(nn.LayerNorm(4), (X, Y), names="*")


def test_large_data_are_sampled_evenly() -> None:
    for batch, count in ((64, 400), (1, 3000), (5000, 3)):
        seen = _Sample()
        for k in range(count):
            seen.add(torch.full((batch, 1), float(k)), torch.zeros(batch))
        starts = [int(x[0, 0]) for x, _ in seen.batches]
        assert len({b - a for a, b in pairwise(starts)}) <= 1
        assert starts[0] == 0
        assert batch * count < 2 * 512 or batch * len(starts) >= 512
        assert len(starts) == 1 or batch * len(starts) <= 2 * 512
