"""Models of every kind of layer, and the plainest way to take single examples' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


class Problem(NamedTuple):
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    batch_dim: int = 0

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, inputs and targets."""
        torch.manual_seed(1)
        model, x = self.make().to(dtype), self.x()
        x = x.to(dtype) if x.is_floating_point() else x
        with torch.no_grad():
            for p in model.parameters():  # norms' scales, biases of attention: not ones and zeros
                p.add_(0.1 * torch.randn_like(p))
        count = x.shape[self.batch_dim]
        with torch.no_grad():
            size = self.outputs(model, x).shape[1]
        return model, x, torch.randn(count, size, dtype=dtype)

    def outputs(self, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return model(x).movedim(self.batch_dim, 0).flatten(1)

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
        """A mean over examples."""
        return F.mse_loss(self.outputs(model, x), target, reduction="none").sum(1).mean()

    def naive(
        self, model: nn.Module, x: Tensor, target: Tensor, weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Mean of squared gradients, one example after another."""
        weights = dict(model.named_parameters()) if weights is None else weights
        weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
        sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        for one, goal in zip(x.split(1, self.batch_dim), target.split(1), strict=True):
            loss = self.loss(lambda x: functional_call(model, weights, (x,)), one, goal)
            grads = torch.autograd.grad(loss, list(weights.values()))
            for total, grad in zip(sums.values(), grads, strict=True):
                total += grad.square()
        return {name: total / len(target) for name, total in sums.items()}


class Attention(nn.Module):
    """Attention of a text to itself, or to a shorter one, or to two of other widths."""

    def __init__(self, kind: str, batch_first: bool, weights: bool, bias: bool = True) -> None:
        super().__init__()
        self.widths = {"kdim": 4, "vdim": 5} if kind == "widths" else {}
        self.attention = nn.MultiheadAttention(6, 2, bias=bias, batch_first=batch_first, **self.widths)
        self.kind, self.weights = kind, weights
        self.short = slice(None) if kind == "self" else slice(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, self.short] if self.attention.batch_first else x[self.short]
        key = x if self.kind == "self" else short
        value = key.flip(-1) if self.kind in ("three", "widths") else key
        if self.kind == "widths":
            key, value = key[..., : self.widths["kdim"]], value[..., : self.widths["vdim"]]
        return self.attention(x, key, value, need_weights=self.weights)[0]


class Tokens(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8, padding_idx=-2)
        self.block = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 3)
        self.words = 1 if batch_first else 0

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.block(self.embed(ids)).mean(self.words, keepdim=True)
        return self.head(hidden)


class Bert(nn.Module):
    """Tokens, positions ``[1, T]`` and kinds of tokens, a block of torch's, and a head tied to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(7, 8), nn.Embedding(9, 8), nn.Embedding(2, 8)
        self.norm = nn.LayerNorm(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.words.weight
        self.register_buffer("ids", torch.arange(9)[None])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.kinds((ids > 3).long())
        hidden += self.places(self.ids[:, : ids.shape[1]])
        return self.head(self.block(self.norm(hidden)))


class GPT(nn.Module):
    """Tokens, positions ``[T]``, attention written out with one projection, and a head tied to the tokens."""

    def __init__(self, positions_first: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(7, 8), nn.Embedding(9, 8)
        self.ln_1, self.c_attn, self.c_proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.ln_2, self.c_fc, self.c_out = nn.LayerNorm(8), nn.Linear(8, 11), nn.Linear(11, 8)
        self.positions_first = positions_first

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.positions_first:
            x = self.wpe(places[None]) + self.wte(ids)
        else:
            x = self.wte(ids) + self.wpe(places)
        q, k, v = (
            each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).split(8, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return F.linear(x, self.wte.weight)


class T5(nn.Module):
    """One table for what is read and what is written, and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.encoder, self.decoder = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.encoder(self.shared(ids)).tanh().mean(1, keepdim=True)
        return F.linear(self.decoder(self.shared(ids.flip(1)[:, :2]) + read).tanh(), self.shared.weight)


class Applied(nn.Module):
    """Layers that are applied twice, and one whose bias is another one's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.out = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.conv(x)).tanh()
        return F.linear(x.mean((2, 3)), self.out.weight, self.norm.weight)


class Rows(nn.Module):
    """Rows of one weight, some of which two layers use, and one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.inner.weight, self.inner.bias
        hidden = F.linear(x, w[:3], b[:3]) + F.linear(x, w[1:])
        return F.linear(F.pad(hidden.tanh(), (0, 1)), w[1:3], b[1:3])


class Padded(nn.Module):
    """A table with a row that learns nothing, counted from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, -3)


def tensor(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def words(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, shape)


def around(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer with something before it, so that its inputs want gradients, and an in-place step after it."""
    return lambda: nn.Sequential(Scale(), layer(), nn.LeakyReLU(inplace=True))


class Scale(nn.Module):
    """Not a layer that is known: to be left out by name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def running(norm: nn.Module) -> nn.Module:
    """BatchNorm that uses statistics of other data."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


PROBLEMS = {
    "mlp": Problem(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), tensor(7, 6)
    ),
    "linear over words": Problem(around(lambda: nn.Linear(4, 3)), tensor(5, 6, 4)),
    "linear over pictures": Problem(around(lambda: nn.Linear(4, 3)), tensor(5, 2, 3, 4)),
    "linear, examples second": Problem(around(lambda: nn.Linear(4, 3)), tensor(6, 5, 4), 1),
    "conv": Problem(around(lambda: nn.Conv2d(3, 4, 3, padding=1)), tensor(5, 3, 6, 5)),
    "conv on data": Problem(lambda: nn.Conv2d(3, 4, 3), tensor(5, 3, 6, 5)),
    "conv, channels last": Problem(
        around(lambda: nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)),
        lambda: torch.randn(5, 3, 6, 5).to(memory_format=torch.channels_last),
    ),
    "conv 1x1": Problem(around(lambda: nn.Conv2d(3, 4, 1, bias=False)), tensor(5, 3, 6, 5)),
    "conv to one place": Problem(around(lambda: nn.Conv2d(3, 4, (6, 5))), tensor(5, 3, 6, 5)),
    "conv, stride and dilation": Problem(
        around(lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(2, 3), padding=(2, 1))),
        tensor(5, 3, 8, 7),
    ),
    "conv in groups": Problem(
        around(lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1)), tensor(5, 4, 6, 5)
    ),
    "conv by channel": Problem(around(lambda: nn.Conv2d(4, 8, 3, groups=4)), tensor(5, 4, 6, 5)),
    "conv, same, even": Problem(
        around(lambda: nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(1, 3))), tensor(5, 3, 6, 5)
    ),
    "conv, valid": Problem(around(lambda: nn.Conv2d(3, 4, 3, padding="valid")), tensor(5, 3, 6, 5)),
    "conv, circular": Problem(
        around(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")), tensor(5, 3, 6, 5)
    ),
    "conv1d": Problem(
        around(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2)), tensor(5, 4, 9)
    ),
    "conv1d, same, even": Problem(around(lambda: nn.Conv1d(4, 6, 4, padding="same")), tensor(5, 4, 9)),
    "BatchNorm1d": Problem(around(lambda: running(nn.BatchNorm1d(4))), tensor(5, 4)),
    "BatchNorm1d over time": Problem(around(lambda: running(nn.BatchNorm1d(4, eps=0.1))), tensor(5, 4, 3)),
    "BatchNorm2d": Problem(around(lambda: running(nn.BatchNorm2d(4))), tensor(5, 4, 3, 2)),
    "LayerNorm": Problem(around(lambda: nn.LayerNorm(4)), tensor(5, 4)),
    "LayerNorm over words": Problem(around(lambda: nn.LayerNorm((3, 4), eps=0.1)), tensor(5, 6, 3, 4)),
    "LayerNorm without bias": Problem(around(lambda: nn.LayerNorm(4, bias=False)), tensor(5, 3, 4)),
    "GroupNorm": Problem(around(lambda: nn.GroupNorm(2, 4, eps=0.1)), tensor(5, 4, 3, 2)),
    "GroupNorm without places": Problem(around(lambda: nn.GroupNorm(2, 4)), tensor(5, 4)),
    "embedding": Problem(lambda: nn.Embedding(7, 3), words(5, 6)),
    "embedding of one word": Problem(lambda: nn.Embedding(7, 3), words(5)),
    "embedding with padding": Problem(lambda: nn.Embedding(7, 3, padding_idx=2), words(5, 6, 2)),
    "embedding with padding from the end": Problem(Padded, words(5, 6)),
    "attention": Problem(lambda: Attention("self", True, False), tensor(5, 4, 6)),
    "attention with weights": Problem(lambda: Attention("self", True, True), tensor(5, 4, 6)),
    "attention without bias": Problem(lambda: Attention("self", True, True, bias=False), tensor(5, 4, 6)),
    "attention, examples second": Problem(lambda: Attention("self", False, False), tensor(4, 5, 6), 1),
    "attention, encoder and decoder": Problem(lambda: Attention("pair", True, False), tensor(5, 4, 6)),
    "attention, three texts": Problem(lambda: Attention("three", False, True), tensor(4, 5, 6), 1),
    "attention, own projections": Problem(lambda: Attention("widths", True, False), tensor(5, 4, 6)),
    "BERT": Problem(Bert, words(5, 4)),
    "BERT, one example": Problem(Bert, words(1, 4)),
    "GPT-2": Problem(GPT, words(5, 4)),
    "GPT-2, as many words as examples": Problem(GPT, words(5, 5)),
    "GPT-2, positions first": Problem(lambda: GPT(positions_first=True), words(5, 4)),
    "T5": Problem(T5, words(5, 4)),
    "layers applied twice": Problem(Applied, tensor(5, 2, 4, 3)),
    "rows that layers share": Problem(Rows, tensor(5, 4)),
    "transformer": Problem(Tokens, words(5, 4)),
    "transformer, examples second": Problem(lambda: Tokens(batch_first=False), words(4, 5), 1),
}
