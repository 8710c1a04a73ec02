"""Embeddings of positions that all examples share: exact where they are added, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from posterity.curvature import Squares, Uncollected

WORDS = 5


class Positions(nn.Module):
    """Words and their places, put together in some way."""

    def __init__(self, join: Callable[[Tensor, nn.Embedding], Tensor], words_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.join, self.words_first = join, words_first

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.join(self.words(ids), self.places).tanh())


def naive(model: nn.Module, ids: Tensor, batch_dim: int = 0) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in ids.split(1, batch_dim):
        grads = torch.autograd.grad(model(one).square().sum(), list(model.parameters()))
        for total, grad in zip(found.values(), grads, strict=True):
            total += grad.square()
    return found


OUTSIDE = torch.arange(9)
EXACT = {
    "arange(T)": lambda x, e: x + e(torch.arange(x.shape[1])),
    "arange(T)[None]": lambda x, e: e(torch.arange(x.shape[1])[None]) + x,
    "some of an arange": lambda x, e: x + e(torch.arange(9)[2 : 2 + x.shape[1]]),
    "an arange from outside, [1, T]": lambda x, e: x + e(OUTSIDE[None, : x.shape[1]]),
    "in place": lambda x, e: x.add_(e(torch.arange(x.shape[1]))),
    "a difference": lambda x, e: x - e(torch.arange(x.shape[1])),
    "a product": lambda x, e: torch.mul(e(torch.arange(x.shape[1])), x),
    "twice": lambda x, e: (x + e(torch.arange(x.shape[1]))).tanh() + e(torch.arange(x.shape[1])),
    "one for all, added twice": lambda x, e: (lambda p: (x + p).tanh() * p)(e(torch.arange(x.shape[1]))),
    "rows with an axis more": lambda x, e: x + e(torch.arange(x.shape[1])).unsqueeze(0),
    "rows[None]": lambda x, e: e(torch.arange(x.shape[1]))[None] + x,
    "for each example": lambda x, e: x + e(torch.arange(x.shape[1]).expand(x.shape[:2])),
}


@pytest.mark.parametrize("examples", [1, 4, WORDS])
@pytest.mark.parametrize("case", EXACT)
def test_positions_that_are_added_are_exact(case: str, examples: int) -> None:
    model, ids = Positions(EXACT[case]).double(), torch.randint(0, 7, (examples, WORDS))
    with Squares(model) as squares:
        model(ids).square().sum().backward()
    assert squares.examples == examples
    torch.testing.assert_close(squares.sums, naive(model, ids))


@pytest.mark.parametrize("examples", [1, 4, WORDS])
def test_positions_are_exact_where_examples_come_second(examples: int) -> None:
    model = Positions(lambda x, e: x + e(torch.arange(len(x))[:, None])).double()
    ids = torch.randint(0, 7, (WORDS, examples))
    with Squares(model, batch_dim=1) as squares:
        model(ids).square().sum().backward()
    torch.testing.assert_close(squares.sums, naive(model, ids, batch_dim=1))


def test_the_models_shapes_are_what_they_were() -> None:
    def join(x: Tensor, e: nn.Embedding) -> Tensor:
        rows = e(torch.arange(x.shape[1]))
        assert rows.shape == (WORDS, 4)
        assert e(torch.arange(x.shape[1])[None]).shape == (1, WORDS, 4)
        return x + rows

    model, ids = Positions(join).double(), torch.randint(0, 7, (4, WORDS))
    with Squares(model) as squares:
        model(ids).square().sum().backward()
    torch.testing.assert_close(squares.sums, naive(model, ids))


REFUSED = {
    "one of its rows": lambda x, e: x + e(torch.arange(x.shape[1])[None])[0],
    "scaled": lambda x, e: x + 0.5 * e(torch.arange(x.shape[1])),
    "joined": lambda x, e: torch.cat([x, e(torch.arange(x.shape[1])[None]).expand_as(x)], 1),
    "alone": lambda x, e: e(torch.arange(x.shape[1])[None]).expand_as(x) + 0 * x,
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_uses_of_shared_positions_are_refused(case: str) -> None:
    model, ids = Positions(REFUSED[case]), torch.randint(0, 7, (4, WORDS))
    refused = pytest.raises(
        Uncollected, match=r"'places.weight' is used on positions .*\(pass positions \[B, T\]\)"
    )
    with refused, Squares(model):
        model(ids).square().sum().backward()


def test_positions_from_outside_are_not_taken_for_examples() -> None:
    """As many positions as examples: only where they are added can be seen what they are."""
    model = Positions(lambda x, e: x + e(OUTSIDE[: x.shape[1]])).double()
    with Squares(model) as squares:
        ids = torch.randint(0, 7, (4, WORDS))
        model(ids).square().sum().backward()
    torch.testing.assert_close(squares.sums, naive(model, ids))
    refused = pytest.raises(Uncollected, match=r"'places.weight' has a row for each example, which is added")
    with refused, Squares(model):
        model(torch.randint(0, 7, (WORDS, WORDS))).square().sum().backward()


def test_one_word_for_each_example_is_no_position() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ids = torch.randint(0, 7, (6,))
    with Squares(model) as squares:
        model(ids).square().sum().backward()
    torch.testing.assert_close(squares.sums, naive(model, ids))


LOST = {
    "scaled": lambda x, e: x + 0.5 * e(torch.arange(x.shape[1])),
    "joined": lambda x, e: torch.cat([x, e(torch.arange(x.shape[1])[None]).expand_as(x)], 1),
}


@pytest.mark.parametrize("rule", [posterity.VOGN, posterity.NoisyKFAC])
@pytest.mark.parametrize("case", LOST)
def test_a_rule_refuses_positions_whose_gradient_was_lost(case: str, rule: Callable[..., Any]) -> None:
    model, ids = Positions(LOST[case]), torch.randint(0, 7, (4, WORDS))
    opt = rule(model, num_data=100)
    with pytest.raises(RuntimeError, match=r"'places.weight' is used on positions"), opt.sampled_params():
        model(ids).square().mean().backward()
    step = posterity.compile_step(model, lambda m, x: m(x).square().mean(), opt)
    with pytest.raises(RuntimeError, match=r"'places.weight' is used on positions"):
        step(ids)


def test_laplace_refuses_positions_whose_gradient_was_lost() -> None:
    class Classes(Positions):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).mean(1)

    model, ids = Classes(LOST["scaled"]), torch.randint(0, 7, (4, WORDS))
    with pytest.raises(RuntimeError, match=r"'places.weight' is used on positions"):
        posterity.laplace.fit(model, (ids, torch.zeros(4, dtype=torch.long)), names="*")


def test_as_many_rows_as_examples_are_no_positions() -> None:
    model = Positions(lambda x, e: x + e(OUTSIDE[: x.shape[1]])[None])
    with pytest.raises(Uncollected, match=r"'places.weight' has a row for each example"), Squares(model):
        model(torch.randint(0, 7, (WORDS, WORDS))).square().sum().backward()
