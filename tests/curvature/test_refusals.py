"""What cannot be collected is refused in a sentence, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from curvature.problems import PROBLEMS
from posterity.curvature import Factors, Squares, vmap_squares
from posterity.layers.stacks import rows_of
from posterity.mc import stacked_pass


class Model(nn.Module):
    """A linear layer, used in some way."""

    def __init__(self, use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.inner.weight, self.inner.bias)


class Product(torch.autograd.Function):
    """Modes do not see functions of autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0].T @ grad


UNKNOWN = "is used by an operation that is not a known layer"
WEIGHT, BIAS = f"'inner.weight' {UNKNOWN}", f"'inner.bias' {UNKNOWN}"
OTHER_USES = {
    "a product": (lambda x, w, b: x @ w.T + 0 * F.linear(x, w, b), WEIGHT),
    "a scale": (lambda x, w, b: F.linear(x, w) * b, BIAS),
    "a norm": (lambda x, w, b: F.linear(x, w, b) + torch.linalg.norm(w), "'inner.weight' is used by "),
    "a cast": (lambda x, w, b: F.linear(x.double(), w.double()), WEIGHT),
    "a list": (lambda x, w, b: F.linear(x, torch.cat([w, w]), None), WEIGHT),
    "an input": (
        lambda x, w, b: F.linear(x, w) + F.linear(b[None], torch.ones(3, 3)),
        "'inner.bias' is used",
    ),
    "columns": (lambda x, w, b: F.linear(x[:, :2], w[:, :2]), WEIGHT),
    "a change in place": (
        lambda x, w, b: F.linear(x, w.mul_(2)),
        "'inner.weight' was changed in place",
    ),
    "two batches": (
        lambda x, w, b: F.linear(x, w, b) + F.linear(x + 1, w, b),
        "'inner.weight' is used on several inputs from outside the model before a backward pass",
    ),
    "out of sight": (
        lambda x, w, b: Product.apply(x, w),
        WEIGHT,
    ),
    "positions as examples": (
        lambda x, w, b: F.linear(x, w) + F.linear(x.repeat(2, 1), torch.eye(3), b)[: len(x)],
        "'inner.weight' sees 5 examples where another layer saw 10",
    ),
    "no examples": (lambda x, w, b: F.linear(x[0], w), r"'inner.weight' is used on inputs \[3\] without"),
    "a vmap of one's own": (
        lambda x, w, b: vmap(lambda one: F.linear(one[None], w)[0])(x),
        "'inner.weight' is used .*in a transform of torch.func that stacks no samples",
    ),
    "itself": (
        lambda x, w, b: F.linear(w, w),
        WEIGHT,
    ),
    "checkpoints": (
        lambda x, w, b: checkpoint(F.linear, x.requires_grad_(), w, use_reentrant=True),
        WEIGHT,
    ),
}


@pytest.mark.parametrize("kind", [Squares, Factors])
@pytest.mark.parametrize("case", OTHER_USES)
def test_other_uses_are_refused_by_name(case: str, kind: type[Squares]) -> None:
    use, message = OTHER_USES[case]
    model, x = Model(use), torch.randn(5, 3)
    watched = dict(model.named_parameters())
    if case == "a change in place":  # parameters themselves cannot be changed there, drawn weights can
        model.inner.weight.requires_grad_(False)
        del model.inner.weight
        model.inner.weight = torch.randn(3, 3, requires_grad=True) * 1.0
        watched["inner.weight"] = model.inner.weight
    with pytest.raises(RuntimeError, match=message), kind(watched):
        model(x).square().sum(-1).mean().backward()


@pytest.mark.parametrize("case", ["a product", "a scale", "two batches", "a list"])
def test_what_is_refused_can_be_done_by_vmap(case: str) -> None:
    model, x = Model(OTHER_USES[case][0]).double(), torch.randn(5, 3).double()

    def loss_fn(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return model(x).square().sum(-1).mean()

    with Squares(model, strict=False) as squares:
        loss_fn(model, x).backward()
    found = {**squares.sums, **vmap_squares(model, loss_fn, (x,), chunk=2)}
    assert squares.refused.keys() & {"inner.weight", "inner.bias"}
    assert not squares.refused.keys() & squares.sums.keys()
    for name, p in model.named_parameters():
        grads = [torch.autograd.grad(loss_fn(model, one[None]), p, allow_unused=True)[0] for one in x]
        if grads[0] is not None:
            torch.testing.assert_close(found[name], torch.stack(grads).square().mean(0))


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_with_other_gradients_are_refused(option: str) -> None:
    model = nn.Embedding(5, 2, **{option: True})
    with pytest.raises(RuntimeError, match=f"'weight' {UNKNOWN}"), Squares(model):
        model(torch.tensor([0, 1, 1])).sum().backward()


@pytest.mark.parametrize("looks", [True, False])
def test_a_vmap_inside_a_stack_is_refused(looks: bool) -> None:
    """Both where samples are stacked and where they come one by one."""

    def use(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        assert not looks or w.detach().sum().item() != 0
        return vmap(lambda one: F.linear(one[None], w)[0])(x)

    drawn = {"inner.weight": torch.randn(3, 3, 3, requires_grad=True)}
    with (
        pytest.raises(
            RuntimeError,
            match=r"'inner\.weight' is used .*in a transform of torch\.func that stacks no samples",
        ),
        pytest.warns(UserWarning, match="cannot be vectorised") if looks else nullcontext(),
        Squares().watch(drawn, stacked=True),
    ):
        out, _ = stacked_pass(Model(use), drawn, {}, (torch.randn(5, 3),), {}, stacked=True)
        out.square().mean().backward()


def test_refused_weight_drops_its_existing_block() -> None:
    """The layer has reported first, and only then another use of its weight is found."""
    model, x = Model(lambda x, w, b: F.linear(x @ w, w, b)), torch.randn(5, 3)
    with Factors(model, strict=False) as factors:
        model(x).square().mean().backward()
    assert not factors.blocks
    assert not factors.sums
    assert factors.refused["inner.bias"] == "is in one block with a parameter that is refused"


def test_a_refused_bias_takes_its_block_along() -> None:
    model = Model(lambda x, w, b: F.linear(x, w, b) * b)
    for kind, left in ((Squares, ["inner.weight"]), (Factors, [])):
        with kind(model, strict=False) as collector:
            model(torch.randn(5, 3)).square().mean().backward()
        assert sorted(collector.sums) == left
        assert not collector.blocks
        assert sorted({*collector.refused, *left}) == ["inner.bias", "inner.weight"]


class Both(torch.autograd.Function):
    """A product with a gradient of both, out of sight."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


SCRIPTED = torch.jit.CompilationUnit("def product(x: Tensor, w: Tensor) -> Tensor:\n    return x @ w\n")
HIDDEN = {
    "a function of autograd": Both.apply,
    "a scripted function": SCRIPTED.product,
    "a checkpoint": lambda x, w: checkpoint(F.linear, x, w, use_reentrant=True),
}


@pytest.mark.parametrize("away", ["backward", "autograd.backward", "autograd.grad"])
@pytest.mark.parametrize("case", HIDDEN)
def test_unseen_use_is_refused_despite_a_seen_one(case: str, away: str) -> None:
    hidden, message = HIDDEN[case], WEIGHT
    model, x = Model(lambda x, w, b: hidden(F.linear(x, w, b).tanh(), w)), torch.randn(5, 3)
    if case == "a checkpoint" and away == "autograd.grad":
        message = "incompatible"  # torch itself refuses it
    with pytest.raises(RuntimeError, match=message), Squares(model):
        loss = model(x).square().mean()
        if away == "backward":
            loss.backward()
        elif away == "autograd.backward":
            torch.autograd.backward([loss])
        else:
            torch.autograd.grad(loss, list(model.parameters()))


def test_pass_in_another_thread_is_refused_despite_a_seen_one() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def backward() -> None:
        model(x).square().mean().backward()

    refused = pytest.raises(RuntimeError, match=f"'bias', 'weight' {UNKNOWN}")
    with refused, Squares(model):
        backward()
        away = Thread(target=backward)
        away.start()
        away.join()


def test_derived_drawn_weights_are_found_too() -> None:
    mean = torch.randn(3, 3, requires_grad=True)
    drawn = mean * 1.0
    for hidden in (False, True):
        refused = pytest.raises(RuntimeError, match=f"'w' {UNKNOWN}")
        with refused if hidden else nullcontext(), Squares({"w": drawn}):
            out = F.linear(torch.randn(5, 3), drawn)
            (Both.apply(out, drawn) if hidden else out).square().mean().backward(retain_graph=True)


def test_a_weight_that_autocast_has_cast_before_is_seen() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        with Squares(model) as squares:
            model(x).float().square().mean().backward()
    assert sorted(squares.sums) == ["bias", "weight"]
    wide = nn.Linear(3, 3)
    seen = pytest.raises(RuntimeError, match=f"'weight' {UNKNOWN}")
    with torch.autocast("cpu", torch.bfloat16), seen, Squares(wide):
        SCRIPTED.product(wide(x), wide.weight).float().square().mean().backward()


def test_two_collectors_of_one_convolution() -> None:
    model, x = nn.Conv1d(2, 3, 2).double(), torch.randn(4, 2, 5).double()
    with Squares(model) as expected:
        model(x).square().mean().backward()
    grad = model.weight.grad.clone()
    model.zero_grad()
    with Squares(model) as outer, Squares(model) as inner:
        model(x).square().mean().backward()
    torch.testing.assert_close(model.weight.grad, grad)
    for squares in (outer, inner):
        torch.testing.assert_close(squares.sums, expected.sums)


def test_the_first_reason_is_the_one_that_is_given() -> None:
    model = Model(lambda x, w, b: F.linear(x[0], w) + b)
    with Squares(model, strict=False) as squares:
        model(torch.randn(5, 3)).sum().backward()
    assert squares.refused["inner.weight"] == "is used on inputs [3] without an axis of examples"


def test_layers_are_measured_by_those_that_were_right() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(7, 4), nn.Embedding(3, 4)
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            places = self.inner(self.places(torch.arange(3)[None]))
            return self.head((self.words(x) + places).tanh().mean(1))

    model = Positions()
    with Squares(model, strict=False) as squares:
        model(torch.randint(0, 7, (6, 3))).square().mean().backward()
    assert sorted(squares.refused) == ["inner.bias", "inner.weight", "places.weight"]
    assert squares.refused["inner.weight"] == "sees 1 examples where another layer saw 6"
    assert squares.refused["places.weight"].startswith("is used on positions that all examples share")


def test_an_empty_batch() -> None:
    model = nn.Linear(3, 2)
    for kind in (Squares, Factors):
        with pytest.raises(ValueError, match="a batch has no examples: skip empty"), kind(model):
            model(torch.empty(0, 3)).sum().backward()
    with pytest.raises(ValueError, match="a batch has no examples: skip empty"):
        vmap_squares(model, lambda call, x: call(x).sum(), (torch.empty(0, 3),))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval()])
def test_batch_statistics_are_none_of_a_single_example(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="single examples have no batch statistics"):
        vmap_squares(module, lambda call, x: call(x).sum(), (torch.randn(4, 3),))


def test_sums_that_are_cleared_take_no_refusal_of_a_pass_along() -> None:
    model = Model(lambda x, w, b: F.linear(x, w, b) * w.sum())
    with Squares(model, strict=False) as squares:
        loss = model(torch.randn(5, 3)).square().mean()
        squares.clear()
        loss.backward()
    assert list(squares.refused) == ["inner.weight"]


def test_a_refusal_lasts_as_long_as_the_sums() -> None:
    model, x = Model(lambda x, w, b: F.linear(x, w) * b), torch.randn(5, 3)
    squares = Squares(model, strict=False)
    for use in (model.use, F.linear):
        model.use = use
        with squares:
            model(x).square().mean().backward()
            squares.sums.pop("inner.weight")
            model(x).square().mean().backward()
        assert list(squares.refused) == ["inner.bias"]
        assert list(squares.sums) == ["inner.weight"]  # of the bias some examples' only would be there
    squares.clear()
    with squares:
        model(x).square().mean().backward()
    assert not squares.refused
    assert sorted(squares.sums) == ["inner.bias", "inner.weight"]
    assert not any(p._backward_hooks for p in model.parameters())


def test_hooks_of_ones_own_stay() -> None:
    model, x, called = nn.Linear(3, 2), torch.randn(4, 3), []
    model.bias.register_hook(lambda _: called.append("before"))
    squares = Squares(model)
    with squares:
        model.bias.register_hook(lambda _: called.append("inside"))
        model.weight.register_hook(lambda _: called.append("weight"))
        model(x).square().mean().backward()
    assert sorted(called) == ["before", "inside", "weight"]
    model(x).square().mean().backward()
    assert sorted(called) == ["before", "before", "inside", "inside", "weight", "weight"]
    assert [len(p._backward_hooks) for p in (model.weight, model.bias)] == [1, 2]


def test_harmless_looks_at_a_weight_are_not_refused() -> None:
    def use(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        assert w.shape == (3, 3)
        assert float(w.detach().norm()) > 0
        with torch.no_grad():
            (w * 2).sum()
        return F.linear(x, w.to(x.dtype), b)

    model = Model(use)
    with Squares(model) as squares:
        model(torch.randn(5, 3)).square().mean().backward()
    assert sorted(squares.sums) == ["inner.bias", "inner.weight"]


def test_rows_of_a_weight_are_one_with_it() -> None:
    model, x = Model(lambda x, w, b: F.linear(x, w, b)).double(), torch.randn(5, 3).double()
    with Squares(model) as whole:
        model(x).square().mean().backward()
    model.use = lambda x, w, b: torch.cat([F.linear(x, w[:1], b[:1]), F.linear(x, *(w[1:], b[1:]))], 1)
    with Squares(model) as parts:
        model(x).square().mean().backward()
    for name, total in whole.sums.items():
        torch.testing.assert_close(parts.sums[name], total)


def test_a_context_in_which_nothing_happens_is_an_error() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with (
        pytest.raises(RuntimeError, match="nothing was collected: run forward and backward inside"),
        Squares(model),
    ):
        loss = model(x).mean()
    with pytest.raises(RuntimeError, match=r"after the context .* had ended: call it inside"):
        loss.backward()
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match="nothing was collected"), Squares(nn.Linear(3, 2)):
        model(x).mean().backward()
    with pytest.raises(RuntimeError, match="nothing to watch"), Squares(model.requires_grad_(False)):
        pass


def test_misuse() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    squares = Squares(model)
    with pytest.raises(RuntimeError, match="enter its context once"), squares, squares:
        pass
    with pytest.raises(RuntimeError, match="watch other parameters after leaving"), squares:
        squares.watch(model)
    with pytest.raises(ZeroDivisionError), squares:
        raise ZeroDivisionError
    with squares:  # and it is as good as new
        model(x).square().mean().backward()
    with pytest.raises(ValueError, match="the layers saw 4 examples, not 1 × 8"):
        squares.mean(8)
    with pytest.raises(ValueError, match="the layers saw 4 examples, not 3 × a batch"):
        squares.mean(samples=3)
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        squares.mean(samples=0)
    with pytest.raises(ValueError, match="the layers saw 0 examples"):
        Squares(model).mean()
    with pytest.raises(ValueError, match="batch_dim must be at least 0, not -1"):
        Squares(model, batch_dim=-1)


@pytest.mark.parametrize("name", ["conv", "GroupNorm", "transformer"])
def test_vmap_is_a_loop_over_examples(name: str) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build()
    found = vmap_squares(model, problem.loss, (x, target), chunk=2)
    expected = problem.naive(model, x, target)
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        torch.testing.assert_close(found[each], value, rtol=1e-9, atol=1e-12)


def test_what_rows_are() -> None:
    flat = torch.randn(10, 3)
    whole, square = flat[2:6], flat[2:5]
    assert rows_of(whole[1:3], whole) == (1, 3)
    assert rows_of(whole.view(4, 3), whole) == (0, 4)
    other = [flat[:4], flat[4:8], whole.clone(), whole[::2], whole[:, :2], whole[0], whole.view(12), whole.T]
    assert [rows_of(each, whole) for each in other] == [None] * len(other)
    assert rows_of(square.T, square) is None
    assert rows_of(flat.view(30)[7:16].view(3, 3), square) is None


def test_batch_statistics_have_no_fallback() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"single examples have no batch statistics: call model.eval\(\)"):
        vmap_squares(model, lambda call, x: call(x).mean(), (torch.randn(4, 3),))


def test_a_second_derivative_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    x = torch.randn(4, 3, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"create_graph=True does not work with per-example"),
        Squares(model),
    ):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)


def squares_of(model: nn.Module, run: Callable[[nn.Module, Tensor], object], **how: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with Squares(model, **how) as squares:
        run(model, torch.randn(4, 3))
    return squares.mean()


def plain(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def test_a_pass_that_only_looks_changes_nothing() -> None:
    def looking(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().mean()
        model(x[:3]).argmax(-1)  # such as an accuracy for a log
        loss.backward()

    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    expected = squares_of(model, plain)
    for name, value in squares_of(model, looking).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("wanted", ["inputs", "one layer"])
def test_backward_pass_without_a_weight_gradient_is_refused(wanted: str) -> None:
    def twice(model: nn.Module, x: Tensor) -> None:
        x.requires_grad_()
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x if wanted == "inputs" else model[0].weight, retain_graph=True)
        model(x).square().mean().backward()

    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="lies behind a backward pass that makes no gradient of it"):
        squares_of(model, twice)


def test_several_backwards_of_one_forward_are_refused() -> None:
    def halves(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().mean()
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()

    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="several backward passes of one forward pass"):
        squares_of(model, halves, once=True)
    for name, value in squares_of(model, halves).items():
        torch.testing.assert_close(value, squares_of(model, plain)[name] / 2)


def test_inputs_may_change_after_a_layer_with_only_a_trainable_bias() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    x = torch.randn(4, 3)
    with Squares(model) as squares:
        changed = x.tanh()
        out = model(changed)
        changed += 1
        (out + changed[:, :2]).square().mean().backward()
    assert list(squares.sums) == ["bias"]


@pytest.mark.parametrize("words", [5, 4])  # as many as examples, or not
def test_attention_and_other_layers_count_examples_on_one_axis(words: int) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # batch_first=False
    x = torch.randn(words, 5, 4)
    with pytest.raises(RuntimeError, match=r"on axis|another layer saw"), Squares(layer):
        layer(x).square().mean().backward()
    with Squares(layer, batch_dim=1) as right:
        layer(x).square().mean().backward()
    layer.self_attn.batch_first = True
    with Squares(layer) as first:
        layer(x.transpose(0, 1).contiguous()).square().mean().backward()
    for name, value in right.sums.items():
        torch.testing.assert_close(value, first.sums[name], rtol=1e-4, atol=1e-6)
