"""No use is taken for another, whatever was seen before; what is watched stays what it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import VOGN
from posterity.curvature import Squares
from posterity.layers import Intercept
from posterity.optim import step as opt_step

X = torch.randn(5, 3, dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def sums(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    """Of one example after another."""
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in x:
        grads = torch.autograd.grad(model(one[None]).square().sum(), list(model.parameters()))
        for total, grad in zip(found.values(), grads, strict=True):
            total += grad.square()
    return found


def check(squares: Squares, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(squares.sums[name], value)


def parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_rows_are_not_taken_for_other_rows() -> None:
    (weight,) = parameters((6, 3))
    squares = Squares({"weight": weight})
    for first in (0, 1, 2, 0, 3):
        squares.clear()
        with squares:
            F.linear(X, weight[first : first + 2]).square().sum().backward()
        rows = slice(first, first + 2)
        grads = [torch.autograd.grad(F.linear(one, weight[rows]).square().sum(), weight)[0] for one in X]
        check(squares, {"weight": torch.stack(grads).square().sum(0)})


def test_a_tensor_that_lies_where_another_was_is_not_taken_for_it() -> None:
    weight, bias = parameters((4, 3), (2,))
    squares = Squares({"weight": weight, "bias": bias})
    out = F.linear(X, weight[:2], bias)
    expected = ((2 * out).square().mT @ X.square()).detach()
    for _ in range(50):
        squares.clear()
        with squares:
            F.linear(X, weight.detach()[:2], bias)  # not differentiated, and gone
            whole = F.linear(X, weight[:2], bias).square().sum() + F.linear(X, weight[2:]).square().sum()
            whole.backward()
        torch.testing.assert_close(squares.sums["weight"][:2], expected)


def test_weight_used_as_input_is_refused_after_a_known_layer() -> None:
    weight, other = parameters((6, 3), (6, 3))
    squares = Squares({"weight": weight, "other": other}, strict=False)
    for inputs, refused in ((torch.randn_like(other), set()), (other, {"weight", "other"})):
        with squares:
            F.linear(inputs, weight).sum().backward()
        assert squares.refused.keys() == refused


def test_names_may_change_places() -> None:
    a, b = parameters((1, 3), (1, 3))
    squares = Squares({"a": a, "b": b})
    for watched in ({"a": a, "b": b}, {"b": a, "a": b}):
        squares.watch(watched).clear()
        with squares:
            (F.linear(X, a) + 10 * F.linear(X, b)).sum().backward()
        larger = next(name for name, p in watched.items() if p is b)
        check(squares, {larger: 100 * X.square().sum(0, keepdim=True)})


def test_filters_may_get_another_size() -> None:
    (weight,) = parameters((2, 3, 3, 3))
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    squares = Squares({"weight": weight})
    for size in ((3, 3), (1, 3), (3, 1), (1, 1)):
        weight.data, weight.grad = torch.randn(2, 3, *size, dtype=torch.float64), None
        squares.clear()
        with squares:
            F.conv2d(x, weight).square().sum().backward()
        grads = [torch.autograd.grad(F.conv2d(one, weight).square().sum(), weight)[0] for one in x.split(1)]
        check(squares, {"weight": torch.stack(grads).square().sum(0)})


def test_attention_with_some_weights_watched() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True).double().requires_grad_(False)
    weights = {name: getattr(model, name).requires_grad_() for name in ("q_proj_weight", "v_proj_weight")}
    query, key = (torch.randn(4, 5, size, dtype=torch.float64) for size in (8, 6))
    squares = Squares(model)
    for _ in range(2):
        squares.clear()
        with squares:
            model(query, key, key)[0].square().sum().backward()
        assert squares.examples == 4
    grads = [
        torch.autograd.grad(model(q, k, k)[0].square().sum(), list(weights.values()))
        for q, k in zip(query.split(1), key.split(1), strict=True)
    ]
    found = (torch.stack(each).square().sum(0) for each in zip(*grads, strict=True))
    check(squares, dict(zip(weights, found, strict=True)))


def test_a_layer_inside_attention_may_be_called_outside() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    squares, out = Squares({"weight": model.out_proj.weight, "bias": model.out_proj.bias}), model.out_proj
    x = torch.randn(4, 5, 8)
    for run, examples in (
        (lambda: model(x, x, x)[0], 4),
        (lambda: F.linear(x.flatten(0, 1), *out.parameters()), 20),
    ):
        for _ in range(2):
            squares.clear()
            with squares:
                run().square().sum().backward()
            assert squares.examples == examples


class Pixels(torch.Tensor):
    """A user's own kind of inputs."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_inputs_of_other_classes_hide_no_use() -> None:
    layer = nn.Linear(3, 3, bias=False).double()
    x = X.as_subclass(Pixels)
    for model in (layer, nn.Sequential(layer, nn.Tanh(), layer)):
        with Squares(model) as squares:
            model(x).square().sum().backward()
        check(squares, sums(model))


def test_what_is_watched_is_what_it_was() -> None:
    model = net()
    with Squares(model) as squares:
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        nn.Parameter(model[0].weight)
        copied(X).sum().backward()
        assert not squares.sums
        model(X).square().sum().backward()
    check(squares, sums(model))
    for other in (copied, pickled):
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_collector_is_copied_with_its_model() -> None:
    model, squares = copy.deepcopy((net(), Squares(net())))
    squares.watch(model)
    with pickle.loads(pickle.dumps(squares)).watch(model) as other, squares:
        model(X).square().sum().backward()
    check(squares, sums(model))
    assert not other.sums.keys() & other.refused.keys()


def test_two_models_are_watched_one_inside_the_other() -> None:
    models = net(), nn.Sequential(*net()[:2], nn.Linear(4, 3, dtype=torch.float64))
    first, second = map(Squares, models)
    with first, second:
        (models[0](X).square().sum() + models[1](X).square().sum()).backward()
    check(first, sums(models[0]))
    check(second, sums(models[1]))
    opts = [VOGN(model, num_data=5, lr=1e-3) for model in models]
    with opts[0].sampled_params(), opts[1].sampled_params():
        models[1](X).sum().backward()
        models[0](X).sum().backward()
    for opt in opts:
        opt.step()


def test_two_collectors_share_a_layer() -> None:
    layer = nn.Linear(3, 2).double()
    weight, bias = Squares({"weight": layer.weight}), Squares({"bias": layer.bias})
    with weight, bias:
        layer(X).square().sum().backward()
    expected = sums(layer)
    check(weight, {"weight": expected["weight"]})
    check(bias, {"bias": expected["bias"]})


def test_drawn_weights_are_let_go_when_all_is_reported() -> None:
    layer = nn.Linear(3, 2, bias=False)
    opt = VOGN(layer, num_data=8)
    (draw,) = opt_step.draw(opt, range(1), 1.0)
    drawn = draw.flat.clone()[:6].view(2, 3).requires_grad_()
    with opt_step.collecting(opt, {layer.weight: drawn}):
        F.linear(torch.randn(5, 3), drawn).sum().backward()
    opt_step.absorb(opt, [drawn.grad], [draw], 1, 1.0)
    assert opt.sums.examples == 5
    gone = weakref.ref(drawn)
    del drawn
    gc.collect()
    assert gone() is None


def test_nothing_is_left_of_a_context() -> None:
    layer = nn.Linear(3, 2).double()
    squares = Squares(layer)
    for _ in range(3):
        with squares:
            layer(X).square().sum().backward()
        assert squares._intercept is None
        assert not any(p._backward_hooks for p in layer.parameters())
        assert Intercept.current() is None
