"""Parameters that are watched are what they were, to all others and afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import VOGN
from posterity.curvature import Squares, tap
from posterity.optim.collecting import Collecting


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def plain(model: nn.Module) -> bool:
    return {type(p) for p in model.parameters()} == {nn.Parameter}


X = torch.randn(5, 3, dtype=torch.float64)


def sums(model: nn.Module) -> dict[str, Tensor]:
    """Of one example after another."""
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in X:
        grads = torch.autograd.grad(model(x[None]).square().sum(), list(model.parameters()))
        for total, grad in zip(found.values(), grads, strict=True):
            total += grad.square()
    return found


def test_they_are_of_their_class_again_whatever_happens() -> None:
    model = net()
    with Squares(model):
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert repr(model[0].bias).startswith("Parameter containing:")
        model(X).sum().backward()
    assert plain(model)
    with pytest.raises(ZeroDivisionError), Squares(model):
        model(X)
        raise ZeroDivisionError
    assert plain(model)
    weight = torch.randn(6, 3, requires_grad=True)
    with Squares({"weight": weight}):
        rows = weight[:4]
        F.linear(torch.randn(5, 3), rows).sum().backward()
    assert type(rows) is type(weight) is Tensor


def test_copies_that_are_made_inside_are_plain() -> None:
    model, file = net(), io.BytesIO()
    with Squares(model) as squares:
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        torch.save(model.state_dict(), file)
        copied(X).sum().backward()
        assert not squares.sums
        model(X).square().sum().backward()
    file.seek(0)
    state = torch.load(file)
    for other in (copied, pickled):
        assert plain(other)
        for p, q, saved in zip(model.parameters(), other.parameters(), state.values(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p, saved)
            assert type(saved) is Tensor
    for name, expected in sums(model).items():
        torch.testing.assert_close(squares.sums[name], expected)


class Own(nn.Parameter):
    """A user's own kind of parameter."""


def test_parameters_of_other_classes_are_seen_too() -> None:
    model = net()
    model[0].weight = Own(model[0].weight.detach())
    expected = sums(model)
    with Squares(model) as squares:
        model(X).square().sum().backward()
    assert type(model[0].weight) is Own
    for name, value in expected.items():
        torch.testing.assert_close(squares.sums[name], value)


def test_two_models_are_watched_one_inside_the_other() -> None:
    models = net(), nn.Sequential(*net()[:2], nn.Linear(4, 3, dtype=torch.float64))
    expected = [sums(model) for model in models]
    first, second = map(Squares, models)
    with first, second:
        (models[0](X).square().sum() + models[1](X).square().sum()).backward()
    for squares, values in zip((first, second), expected, strict=True):
        for name, value in values.items():
            torch.testing.assert_close(squares.sums[name], value)
    opts = [VOGN(model, num_data=5, lr=1e-3) for model in models]
    with opts[0].sampled_params(), opts[1].sampled_params():
        models[1](X).sum().backward()
        models[0](X).sum().backward()
    for opt in opts:
        opt.step()
    assert all(map(plain, models))


def test_inputs_of_many_shapes_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_MOST_SITES", 3)
    model = net()
    squares = Squares(model)
    for count in (5, 4, 3, 5):
        squares.clear()
        with squares:
            model(X[:count]).square().sum().backward()
        assert len(squares._taps._sites) <= 3
    for name, expected in sums(model).items():
        torch.testing.assert_close(squares.sums[name], expected)


def test_what_is_known_of_a_layer_is_not_taken_for_rows_or_for_weights_as_inputs() -> None:
    weight, other = (torch.randn(6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    squares = Squares({"weight": weight, "other": other}, strict=False)
    x = torch.randn(6, 3, dtype=torch.float64)
    found = []
    for first in range(5):
        squares.clear()
        with squares:
            F.linear(x, weight[first : first + 2]).square().sum().backward()
        found.append(squares.sums["weight"])
    assert not squares._taps._sites  # views come and go, and others may lie where they were
    for first, squared in enumerate(found):
        rows = slice(first, first + 2)
        grads = [torch.autograd.grad(F.linear(one, weight[rows]).square().sum(), weight)[0] for one in x]
        torch.testing.assert_close(squared, torch.stack(grads).square().sum(0))
    for inputs, refused in ((x, set()), (other, {"weight", "other"})):
        with squares:
            F.linear(inputs, weight).sum().backward()
        assert squares.refused.keys() == refused


def test_drawn_weights_are_let_go_when_all_is_told() -> None:
    collecting, p = Collecting(Squares, "VOGN"), nn.Parameter(torch.randn(2, 3))
    drawn = torch.randn(2, 3, requires_grad=True)
    with collecting.watch([("weight", p)], {p: drawn}, stacked=False, due=True):
        F.linear(torch.randn(5, 3), drawn).sum().backward()
    assert collecting.take(["weight"], 1).squares.keys() == {"weight"}
    gone = weakref.ref(drawn)
    del drawn
    gc.collect()
    assert gone() is None


def test_a_model_is_not_watched_twice_at_once() -> None:
    model = net()
    expected = sums(model)
    with Squares(model, strict=False) as outer, Squares(model) as inner:
        model(X).square().sum().backward()
    assert plain(model)
    for name, value in expected.items():
        torch.testing.assert_close(inner.sums[name], value)
        assert name in outer.refused or torch.allclose(outer.sums[name], value)
