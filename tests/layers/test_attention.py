"""Attention of stacks of samples against a loop over them; attention modules against their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import posterity
from posterity.curvature import Squares, Uncollected
from posterity.layers import Intercept, attention
from posterity.layers.attention import Attention

K, B, H, T, S, D = 3, 4, 2, 5, 6, 8


def texts(*shared: int, heads: int = H) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, H, T, D), (B, heads, S, D), (B, heads, S, D)
    return [
        torch.randn(*(() if i in shared else (K,)), *shape, dtype=torch.float64, requires_grad=True)
        for i, shape in enumerate(shapes)
    ]


MASKS = {
    "none": None,
    "bool, of all": torch.rand(T, S) > 0.3,
    "float, of all": torch.randn(T, S).double(),
    "bool, of keys": torch.arange(S) < torch.tensor([6, 4, 5, 2])[:, None, None, None],
    "float, of heads": torch.randn(1, H, T, S).double(),
    "float, of each": torch.randn(B, H, T, S).double(),
}


def both(inputs: list[Tensor], mask: Tensor | None, in_mask: int | None, **options: Any) -> None:
    """Values and gradients of a stack are those of a loop."""
    dims = tuple(0 if each.dim() == 5 else None for each in inputs)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    with Intercept():
        found = vmap(call, (*dims, in_mask))(*inputs, mask)
    looped = torch.stack(
        [
            call(
                *(each[k] if each.dim() == 5 else each for each in inputs),
                mask if in_mask is None else mask[k],
            )
            for k in range(K)
        ]
    )
    torch.testing.assert_close(found, looped)
    slope = torch.randn_like(looped)
    wanted = [*inputs, mask] if mask is not None and mask.requires_grad else inputs
    for ours, theirs in zip(
        *(torch.autograd.grad(out, wanted, slope) for out in (found, looped)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that torch's own attention was called with outside vmap."""
    shapes: list[tuple[int, ...]] = []
    real = Attention.stacked

    def stacked(self: Attention, sinks: Any) -> Any:
        out = real(self, sinks)
        if out is not NotImplemented:
            shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(Attention, "stacked", stacked)
    return shapes


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)])
def test_samples_are_folded_into_the_batch(mask: str, shared: tuple[int, ...], folded: list[Any]) -> None:
    both(texts(*shared), MASKS[mask], None, scale=0.3)
    assert len(folded) == 1


def test_each_sample_may_have_a_mask(folded: list[Any]) -> None:
    both(texts(), torch.randn(K, T, S).double().requires_grad_(), 0)
    both(texts(0, 1, 2), torch.randn(K, B, 1, T, S).double().requires_grad_(), 0)
    assert len(folded) == 2


def test_causal_attention_and_groups_of_heads(folded: list[Any]) -> None:
    both(texts(), None, None, is_causal=True)
    both(texts(heads=1), None, None, enable_gqa=True)
    assert len(folded) == 2


def test_dropout_is_left_to_vmap(folded: list[Any]) -> None:
    with Intercept():
        out = vmap(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), randomness="different"
        )(*texts())
    assert out.shape == (K, B, H, T, D)
    assert not folded


@pytest.mark.parametrize("weights", [True, False])
def test_a_transformer_runs_its_attention_and_its_layers_folded(
    weights: bool, folded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True).double()
    if weights:
        real = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, **more: real(*args, **{**more, "need_weights": True})
    drawn = {
        name: (p + 0.1 * torch.randn(K, *p.shape)).detach().requires_grad_()
        for name, p in layer.named_parameters()
    }
    x, found = torch.randn(4, 5, 8).double(), []
    for how in ("stack", "loop"):
        out = posterity.run(layer, drawn, x, how=how)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(drawn.values()))])
    assert bool(folded) != weights
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torchs_attention_is_run_as_it_is() -> None:
    real = F.multi_head_attention_forward
    assert attention.attention_forward.__code__ is real.__code__
    assert attention.attention_forward.__kwdefaults__ == real.__kwdefaults__


class Attending(nn.Module):
    """Attention twice without a norm between, whose strides say nothing of its axes."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.batch_first = nn.Linear(4, 6), batch_first
        self.layers = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=batch_first) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x if self.batch_first else x.transpose(0, 1))
        for layer in self.layers:
            hidden = layer(hidden, hidden, hidden, need_weights=False)[0] + hidden
        return self.head(hidden.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("words", [5, 4])
def test_modules_tell_on_which_axis_their_examples_are(words: int) -> None:
    model, x = Attending(True).double(), torch.randn(4, words, 4).double()
    with Squares(model) as squares:
        model(x).square().sum().backward()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in x.split(1):
        grads = torch.autograd.grad(model(one).square().sum(), list(model.parameters()))
        for total, grad in zip(expected.values(), grads, strict=True):
            total += grad.square()
    torch.testing.assert_close(squares.sums, expected)


@pytest.mark.parametrize("words", [5, 4])
def test_time_first_attention_is_refused(words: int) -> None:
    model, x = Attending(False).double(), torch.randn(4, words, 4).double()
    with pytest.raises(Uncollected, match=r"on axis|examples where another"), Squares(model):
        model(x).square().sum().backward()
