"""Gradients reach watched weights as autograd would bring them: once for each backward pass, with hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posterity.curvature import Factors, Squares
from posterity.layers import passes

X = torch.randn(5, 2, 4, 4, dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 1, bias=False), nn.Flatten(), nn.Linear(12, 2)
    ).double()


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return model(x).square().sum(1).mean()


def plain_grads(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model), list(model.parameters())))


def assert_grads(model: nn.Module, expected: list[Tensor], times: float = 1.0) -> None:
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, times * grad)


@pytest.mark.parametrize("hooked", [True, False])
def test_gradients_are_there_after_each_backward_pass(hooked: bool) -> None:
    model = net()
    expected = plain_grads(model)
    if hooked:
        model[2].weight.register_hook(lambda grad: None)
    with Squares(model):
        for passed in (1, 2):
            loss_of(model).backward()
            assert_grads(model, expected, passed)
        model.zero_grad()
        loss_of(model).backward()
    assert_grads(model, expected)
    with Squares(model):
        loss_of(model).backward()
    assert_grads(model, expected, 2)


def test_hooks_on_weights_are_called_once_with_the_whole_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    x, seen, after = torch.randn(5, 4).double(), [], []
    (expected,) = torch.autograd.grad(model(x).square().mean(), model[0].weight)
    model[0].weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    with Squares(model):
        model(x).square().mean().backward()
    torch.testing.assert_close(seen, [expected])
    torch.testing.assert_close(model[0].weight.grad, 2 * expected)
    assert len(after) == 1
    assert torch.equal(after[0], model[0].bias.grad)


def test_other_processes_hear_of_gradients_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, nodes = net(), [], []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for p in model.parameters():  # as DistributedDataParallel does
        node = p.view_as(p).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: made.append(1))
        nodes.append(node)
    expected = plain_grads(model)
    made.clear()
    with Squares(model):
        loss_of(model).backward()
    assert len(made) == 5
    assert_grads(model, expected)


def test_gradients_are_not_copied() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    for own in (False, True):
        weight.grad = None
        if own:
            weight.register_hook(lambda grad: None)
        with Squares({"weight": weight}):
            out = F.linear(torch.randn(4, 2), weight)
            made = []
            out.grad_fn.register_hook(lambda grads, _, made=made: made.append(grads[-1].data_ptr()))
            out.sum().backward()
        assert made == [weight.grad.data_ptr()]


@pytest.mark.parametrize("kind", [Squares, Factors])
@pytest.mark.parametrize(
    "names", [("0.weight", "2.weight", "4.weight"), ("2.weight",), ("2.weight", "4.bias")]
)
def test_autograd_grad_is_unchanged(kind: type[Squares], names: tuple[str, ...]) -> None:
    """Convolutions have no edge to their weight: those that others lead to alone are reached all the same."""
    model = net()
    watched = {name: model.get_parameter(name) for name in names}
    expected = torch.autograd.grad(loss_of(model), list(watched.values()))
    with kind(watched) as collector:
        found = torch.autograd.grad(loss_of(model), list(watched.values()))
    torch.testing.assert_close(found, expected)
    assert all(p.grad is None for p in model.parameters())
    with kind(watched) as again:
        loss_of(model).backward()
    assert collector.examples == again.examples == 5
    assert {*collector.sums, *collector.blocks} == {*again.sums, *again.blocks} == set(names)


def test_autograd_grad_reports_unused_inputs() -> None:
    model = net()
    other = nn.Linear(2, 2).double()
    watched = {**dict(model.named_parameters()), "other": other.weight}
    with Squares(watched):
        *found, none = torch.autograd.grad(loss_of(model), list(watched.values()), allow_unused=True)
        assert none is None
        assert all(each is not None for each in found)
        with pytest.raises(RuntimeError, match="was not used: pass allow_unused=True"):
            torch.autograd.grad(loss_of(model), list(watched.values()))
        assert not torch.autograd.grad(loss_of(model), list(watched.values()), materialize_grads=True)[
            -1
        ].any()


def test_a_backward_pass_may_be_restricted_to_inputs() -> None:
    model, x = net(), X.clone().requires_grad_()
    frozen = model[0].weight
    watched = {name: p for name, p in model.named_parameters() if p is not frozen}
    expected = dict(zip(watched, torch.autograd.grad(loss_of(model), list(watched.values())), strict=True))
    with Squares(watched) as squares:
        loss_of(model, x).backward(inputs=list(watched.values()))
    assert squares.sums.keys() == watched.keys()
    assert x.grad is None
    assert frozen.grad is None
    for name, p in watched.items():
        torch.testing.assert_close(p.grad, expected[name])


def test_weights_made_of_others_pass_their_gradients_on() -> None:
    mean = torch.randn(3, 2, requires_grad=True)
    x = torch.randn(4, 2)
    for keep in (True, False):
        drawn = mean.tanh()
        mean.grad = None
        with Squares({"weight": drawn}):
            for _ in range(1 + keep):
                F.linear(x, drawn).sum().backward(retain_graph=keep)
        expected = (1 + keep) * (1 - mean.tanh().square()) * x.sum(0)
        torch.testing.assert_close(mean.grad, expected)


def test_a_pass_that_fails_leaves_no_gradients() -> None:
    model = net()
    expected = plain_grads(model)
    squares = Squares(model)

    def failing(grad: Tensor) -> None:
        raise ZeroDivisionError

    with squares:
        out = model[4](model[:4](X))
        hidden = model[1](model[0](X))
        hidden.register_hook(failing)
        with pytest.raises(ZeroDivisionError):
            (out.sum() + model[2:](hidden).sum()).backward()
        assert all(p.grad is None for p in model.parameters())
        squares.clear()
        loss_of(model).backward()
    assert_grads(model, expected)


def test_inputs_that_change_before_the_backward_pass_are_refused() -> None:
    model, x = net(), X.clone()
    with (
        pytest.raises(RuntimeError, match=r"the inputs of .*'0.weight'.* were changed in place"),
        Squares(model),
    ):
        loss = loss_of(model, x)
        x += 1
        loss.backward()


def test_a_graph_that_was_freed_is_not_gone_through_again() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="second time"), Squares(model):
        loss = loss_of(model)
        loss.backward()
        loss.backward()


def test_a_hook_that_torch_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of an alias that was not reported is refused as one of the weight itself."""
    monkeypatch.setattr("posterity.layers.intercept.add_hook", lambda *_: None)
    layer = nn.Linear(4, 2).double()
    with pytest.raises(RuntimeError, match="'bias', 'weight' is used by an operation"), Squares(layer):
        layer(X[:, 0, 0]).sum().backward()


def test_checkpoints_without_reentry_are_exact() -> None:
    model, found = net(), []
    for again in (False, True):
        model.zero_grad()
        with Squares(model) as squares:
            out = checkpoint(model, X, use_reentrant=False) if again else model(X)
            out.square().mean().backward()
        found.append({**squares.sums, **{f"grad {name}": p.grad for name, p in model.named_parameters()}})
    torch.testing.assert_close(*found)


def test_leaves_of_a_graph() -> None:
    a, b = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    found = passes.leaves([(a * b).sum() + a.exp().sum(), torch.zeros(2)])
    assert {id(each) for each in found} == {id(a), id(b)}


def test_backward_of_an_earlier_context_is_refused() -> None:
    """Its gradients would go to aliases that nobody delivers."""
    model, squares = net(), Squares(net())
    squares.watch(model)
    with squares:
        late = loss_of(model)
        loss_of(model).backward()
    with pytest.raises(RuntimeError, match="after the context of its forward pass had ended"), squares:
        late.backward()


def test_autocast_around_a_context_forgets_what_it_has_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a copy of every alias until it is left, which may be after many contexts."""
    layer, x, cleared, real = nn.Linear(4, 2), torch.randn(4, 4), [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(real()))
    with torch.autocast("cpu", torch.bfloat16):
        for contexts in (1, 2):
            with Squares(layer):
                layer(x).float().sum().backward()
            assert len(cleared) == contexts
