"""Squares of single examples' gradients, against one example after another, in double precision."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from curvature.problems import PROBLEMS, Problem
from posterity import buffers
from posterity.curvature import Factors, Squares
from posterity.layers import Intercept, calls, norm
from posterity.mc import stacked_pass

# Torch's own remark on even filters.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **close: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value, **(close or EXACT), msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(params=list(PROBLEMS))
def problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


def test_squares_are_those_of_a_loop_over_examples(problem: Problem) -> None:
    model, x, target = problem.build()
    plain = torch.autograd.grad(problem.loss(model, x, target), list(model.parameters()))
    squares = Squares(model, batch_dim=problem.batch_dim)
    expected = problem.naive(model, x, target)
    for _ in range(2):  # a collector is used again
        model.zero_grad()
        squares.clear()
        with squares:
            problem.loss(model, x, target).backward()
        assert squares.examples == len(target)
        assert_same(squares.mean(batch_size=len(target)), expected)
        for p, grad in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad, grad, **EXACT)


def test_a_layer_may_be_called_in_other_ways() -> None:
    weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 3, 3), (3,))
    )
    frozen, x = torch.randn(3, dtype=torch.float64), torch.randn(5, 2, 7, 7, dtype=torch.float64)
    squares = Squares({"weight": weight, "bias": bias}, strict=False)

    def check(x: Tensor, *how: object, **named: object) -> None:
        squares.clear()
        with squares:
            F.conv2d(x, weight, *how, **named).square().sum().backward()
        wanted = {
            "weight": weight,
            **({"bias": bias} if any(each is bias for each in (*how, *named.values())) else {}),
        }
        terms = [
            torch.autograd.grad(F.conv2d(one[None], weight, *how, **named).square().sum(), [*wanted.values()])
            for one in x
        ]
        sums = (torch.stack(each).square().sum(0) for each in zip(*terms, strict=True))
        assert_same(squares.sums, dict(zip(wanted, sums, strict=True)))

    for _ in range(2):
        check(x)
        check(x, bias)
        check(x, frozen)
        check(x[:3], bias)
        check(x, bias, 2)
        check(x, bias, (1, 2), 1)
        check(x, bias, [1, 2], 1)  # a list has no hash
        check(x, None, 1, "same")
        check(x, bias=bias, dilation=2)
    squares.clear()
    squares.watch({"other": weight})
    with squares:
        F.conv2d(x, weight).sum().backward()
    assert squares.sums.keys() == {"other"}
    with squares, torch.no_grad():
        F.conv2d(x, weight)
        with torch.enable_grad():
            F.conv2d(x, weight).sum().backward()
    assert squares.examples == 2 * len(x)


@pytest.mark.parametrize("name", ["conv in groups", "conv1d", "linear over words", "embedding with padding"])
def test_examples_come_in_parts_under_a_cap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build()
    monkeypatch.setitem(calls.AT_ONCE, "cpu", 300 if "conv" in name else 30)
    with Squares(model, batch_dim=problem.batch_dim) as squares:
        problem.loss(model, x, target).backward()
    assert_same(squares.mean(), problem.naive(model, x, target))


class Loss(nn.Module):
    """A problem's loss, with weights to be swapped underneath; one that looks at them cannot be stacked."""

    def __init__(self, problem: Problem, model: nn.Module, looks: bool = False) -> None:
        super().__init__()
        self.problem, self.model, self.looks = problem, model, looks

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.looks:
            assert next(self.model.parameters()).detach().sum().item() != 0
        return self.problem.loss(self.model, x, target)


def check_stack(problem: Problem, routes: bool, looks: bool = False, shared: str = "") -> None:
    """Three drawn sets of weights at once, against three plain passes; a shared one is the same in all."""
    model, x, target = problem.build()
    model.eval()
    drawn = {
        name: (p + 0.3 * torch.randn(3, *p.shape, dtype=p.dtype)).detach().requires_grad_()
        for name, p in model.named_parameters()
        if name != shared
    }
    each = [{name: value[k] for name, value in drawn.items()} for k in range(3)]
    squares = Squares(batch_dim=problem.batch_dim)
    kept = {shared: model.get_parameter(shared)} if shared else {}
    watched = {**drawn, **kept}
    loss_module = Loss(problem, model, looks)
    before = buffers.snapshot(loss_module)
    with Intercept() if routes else torch.enable_grad(), squares.watch(watched, stacked=True):
        named = {f"model.{name}": value for name, value in drawn.items()}
        loss, _ = stacked_pass(loss_module, named, before, (x, target), {}, stacked=True)
        grads = dict(zip(watched, torch.autograd.grad(loss.sum(), list(watched.values())), strict=True))
    naive = [problem.naive(model, x, target, {**weights, **kept}) for weights in each]
    assert squares.examples == 3 * len(target)
    mean = {name: sum(one[name] for one in naive) / 3 for name in watched}
    assert_same(squares.mean(len(target), samples=3), mean)
    for k, weights in enumerate(each):
        one = {name: value.detach().requires_grad_() for name, value in {**weights, **kept}.items()}
        plain = problem.loss(lambda x, one=one: functional_call(model, one, (x,)), x, target)
        own = dict(zip(one, torch.autograd.grad(plain, list(one.values())), strict=True))
        for name in drawn:
            torch.testing.assert_close(grads[name][k], own[name], **EXACT)
        for name in kept:
            grads[name] = grads[name] - own[name]
    for name in kept:  # all of it was the samples' gradients together
        torch.testing.assert_close(grads[name], torch.zeros_like(grads[name]), rtol=0, atol=1e-9)


def test_a_stack_of_samples_is_as_many_plain_passes(problem: Problem) -> None:
    check_stack(problem, routes=True)


@pytest.mark.parametrize("name", ["mlp", "linear over words", "transformer, examples second"])
def test_so_it_is_without_fast_routes(name: str) -> None:
    check_stack(PROBLEMS[name], routes=False)


@pytest.mark.parametrize("name", ["mlp", "conv", "attention, three texts"])
def test_so_it_is_for_models_that_cannot_be_stacked(name: str) -> None:
    with pytest.warns(UserWarning, match="cannot be vectorised"):
        check_stack(PROBLEMS[name], routes=True, looks=True)


@pytest.mark.parametrize(
    ("name", "shared"),
    [("mlp", "0.weight"), ("mlp", "2.weight"), ("transformer", "embed.weight"), ("conv", "1.weight")],
)
def test_so_it_is_for_weights_that_all_samples_share(name: str, shared: str) -> None:
    check_stack(PROBLEMS[name], routes=True, shared=shared)


class ResNet(nn.Module):
    """Two convolutions and a shortcut around them, with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu_()
        x = (x + self.norm2(self.conv2(x))).relu_()
        return self.head(x.mean((2, 3)))


def resnet_with_copies(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same, where every example has weights of its own, ``[B, …]``."""

    def conv(x: Tensor, weights: Tensor) -> Tensor:
        return torch.cat(
            [F.conv2d(one[None], weight, padding=1) for one, weight in zip(x, weights, strict=True)]
        )

    def norm(x: Tensor, name: str) -> Tensor:
        normal = F.batch_norm(x, None, None, training=True)
        return normal * w[f"{name}.weight"][..., None, None] + w[f"{name}.bias"][..., None, None]

    x = norm(conv(x, w["conv1.weight"]), "norm1").relu()
    x = (x + norm(conv(x, w["conv2.weight"]), "norm2")).relu()
    return torch.einsum("bc,boc->bo", x.mean((2, 3)), w["head.weight"]) + w["head.bias"]


@pytest.mark.parametrize("kept", [True, False])
def test_terms_with_batch_statistics(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.var_mean
    monkeypatch.setattr(torch, "var_mean", lambda *args, **more: made.append(args) or real(*args, **more))
    if not kept:  # as of a torch whose node has other names for them
        monkeypatch.setattr(norm.BatchNorm, "saved", {})
    model, x, y = ResNet().double(), torch.randn(6, 3, 5, 5).double(), torch.tensor([0, 1, 2, 0, 1, 1])
    copies = {
        name: p.detach().expand(6, *p.shape).clone().requires_grad_() for name, p in model.named_parameters()
    }
    loss = F.cross_entropy(resnet_with_copies(copies, x), y)
    terms = dict(zip(copies, torch.autograd.grad(loss, list(copies.values())), strict=True))
    with Squares(model) as squares:
        F.cross_entropy(model(x), y).backward()
    assert len(made) == (0 if kept else 2)
    assert_same(squares.sums, {name: grads.square().sum(0) for name, grads in terms.items()})
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, terms[name].sum(0), **EXACT)


@pytest.mark.parametrize("differentiated", [True, False])
def test_activations_live_no_longer_than_without_a_collector(differentiated: bool) -> None:
    """Until the backward pass, or until nobody has the loss; none waits for the garbage collector."""
    model, x, seen = ResNet(), torch.randn(2, 3, 5, 5), []
    gc.collect()
    gc.disable()
    try:
        with Squares(model):
            model(x).sum().backward()
            for layer in (model.conv2, model.norm2, model.head):
                layer.register_forward_hook(lambda _, args, out: seen.append(weakref.ref(args[0])))
            loss = model(x).sum()
            assert all(each() is not None for each in seen)
            if differentiated:
                loss.backward()
            else:
                del loss
            assert [each() for each in seen] == [None] * 3
    finally:
        gc.enable()


def test_backward_passes_add_up_and_sizes_may_differ() -> None:
    problem = PROBLEMS["conv"]
    model, x, target = problem.build()
    squares = Squares(model)
    with squares:
        for rows in (slice(0, 3), slice(3, 5)):
            (problem.loss(model, x[rows], target[rows]) * len(target[rows]) / 5).backward()
    expected = problem.naive(model, x, target)
    assert_same(squares.mean(5), expected)
    with squares, torch.no_grad():
        model(x)
        with torch.enable_grad():
            problem.loss(model, x, target).backward()
    assert squares.examples == 10
    squares.clear()
    own = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    squares.sums.update(own)
    with squares:
        problem.loss(model, x, target).backward()
    assert_same(squares.mean(5), expected)
    assert all(squares.sums[name] is own[name] for name in own)


@pytest.mark.parametrize("name", ["mlp", "conv", "BatchNorm2d", "transformer", "conv1d"])
@pytest.mark.parametrize("around", ["forward", "both"])
def test_bf16_autocast(name: str, around: str) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build(torch.float32)
    with Squares(model) as squares, torch.autocast("cpu", torch.bfloat16, enabled=around == "both"):
        with torch.autocast("cpu", torch.bfloat16):
            out = problem.outputs(model, x).float()
        ((out - target) ** 2).sum(1).mean().backward()
    assert {value.dtype for value in squares.sums.values()} == {torch.float32}
    found, expected = squares.mean(), problem.naive(model, x, target)
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        # A dozen roundings to 8 bits, in sums whose terms may cancel.
        assert (found[each] - value).norm() < 0.1 * value.norm()


def test_words_first_and_then_none() -> None:
    """A layer with one axis to choose from has its examples there, whatever batch_dim says."""
    first, last = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
    model, x = nn.ModuleList([first, last]), torch.randn(6, 5, 4).double()
    found = []
    for words, batch_dim in ((0, 1), (1, 0)):
        with Squares(model, batch_dim=batch_dim) as squares:
            hidden = first(x.movedim(0, words)).tanh().mean(words)
            last(hidden).square().sum(1).mean().backward()
        found.append(squares.mean(5))
    assert_same(*found)


def test_drawn_weights_under_functional_call() -> None:
    problem = PROBLEMS["conv"]
    model, x, target = problem.build()
    squares = Squares()
    for _ in range(2):
        drawn = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
        squares.clear()
        with squares.watch(drawn):
            problem.loss(lambda x, w=drawn: functional_call(model, w, (x,)), x, target).backward()
        assert_same(squares.mean(), problem.naive(model, x, target, drawn))


def test_unused_and_frozen_parameters_are_left_out() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "frozen": nn.Linear(2, 2), "unused": nn.Linear(3, 2)})
    model["frozen"].weight.requires_grad_(False)
    x = torch.randn(4, 3)
    with Squares(model) as squares:
        model["unused"](x)  # its outputs lead nowhere
        model["frozen"](model["used"](x)).square().mean().backward()
    assert sorted(squares.sums) == ["frozen.bias", "used.bias", "used.weight"]


def test_two_forward_passes_before_two_backward_passes_are_two_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(8, 5).double()
    for cut in (4, 6):
        both, one = Squares(model), Squares(model)
        with both:
            first, second = (model(part).square().sum() / 8 for part in (x[:cut], x[cut:]))
            first.backward()
            second.backward()
        with one:
            (model(x).square().sum() / 8).backward()
        assert both.examples == one.examples == 8
        torch.testing.assert_close(both.mean(8), one.mean(8))


def test_count_is_the_number_of_terms_of_the_mean() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(6, 5, 4).double(), torch.randn(6, 5, 3).double()
    results = []
    for count in (None, y.numel()):
        with Squares(model) as squares, Factors(model) as factors:
            F.mse_loss(model(x), y, reduction="sum").div(count or len(x)).backward()
        blocks = factors.mean(count=count).kronecker
        results.append({**squares.mean(count=count), "A": blocks["weight"].A, "S": blocks["weight"].S})
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="count must be greater than 0"):
        squares.mean(count=0)
