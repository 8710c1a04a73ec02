"""The examples behind a step are counted in the inputs of the module, on the axis ``batch_dim``."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import posterity
from conformance import stand_in
from conformance.rules import Rule, everything, layer_rules, rules
from posterity import BGD, CountWarning

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def bgd(params: Any, **more: Any) -> BGD:
    return BGD(params, std_init=0.3, mc_samples=2, seed=0, **more)


def told(sizes: list[int]) -> dict[str, Tensor]:
    """Batches of some sizes, one after another, with the size of each given to step()."""
    model = net()
    opt = bgd(list(model.named_parameters()))
    for x, y in zip(X.split(sizes), Y.split(sizes), strict=True):
        opt.step(lambda x=x, y=y: loss_fn(model, x, y), batch_size=len(x))
    return everything(model, opt)


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("way", ["closure", "context", "stack", "loop", "graph"])
def test_smaller_last_batch_is_counted(
    way: str, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    opt = bgd(model, batch_size=batch_size)
    step = posterity.compile_step(model, loss_fn, opt, chunk=1 if way == "loop" else None)
    if way == "graph":
        stand_in.install(monkeypatch)
        step = posterity.train.compiled.CapturedStep(step)
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        if way == "closure":
            opt.step(lambda x=x, y=y: loss_fn(model, x, y))
        elif way == "context":
            for _ in range(2):
                with opt.sampled_params():
                    loss_fn(model, x, y).backward()
            opt.step()
        else:
            step(x, y)
    torch.testing.assert_close(everything(model, opt), told([8, 4]), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("contexts", ["one", "each"])
def test_micro_batches_add_up_and_samples_count_once(contexts: str) -> None:
    results = []
    for given in ({}, {"batch_size": 12}):
        model = net()
        opt = bgd(model)
        for _ in range(2):
            if contexts == "one":
                with opt.sampled_params():
                    for x, y in zip(X.split([8, 4]), Y.split([8, 4]), strict=True):
                        (loss_fn(model, x, y) * len(x) / 12).backward()
            else:
                for x, y in zip(X.split([8, 4]), Y.split([8, 4]), strict=True):
                    with opt.sampled_params():
                        (loss_fn(model, x, y) * len(x) / 12).backward()
        opt.step(**given)
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=0, atol=0)


class Named(nn.Module):
    """Takes its inputs by name, and gives its outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, *, flag: float, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.inner(batch["x"])}


def test_inputs_by_name_in_dicts_are_counted() -> None:
    results = []
    for given in ({}, {"batch_size": 12}):
        model = Named()
        opt = bgd(model)
        opt.step(lambda m=model: F.cross_entropy(m(flag=1.0, batch={"x": X})["logits"], Y), **given)
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def teacher(model: nn.Module) -> Tensor:
    """Another call without gradients, as for a target."""
    with torch.no_grad():
        model(X[:3])
    return loss_fn(model, X, Y)


def unused(model: nn.Module) -> Tensor:
    """Another call whose outputs the loss does not use."""
    model(X[:3]).detach()
    return loss_fn(model, X, Y)


def adversarial(model: nn.Module) -> Tensor:
    """Inputs that a gradient has changed."""
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_fn(model, x, Y), x)
    return loss_fn(model, X + 0.1 * grad.sign(), Y)


def dropped(model: nn.Module) -> Tensor:
    """Gradients that nobody wants."""
    loss_fn(model, X[:3], Y[:3]).backward()
    model.zero_grad()
    return loss_fn(model, X, Y)


def two_losses(model: nn.Module) -> Tensor:
    """Two backward passes of one call."""
    out = model(X)
    (0.5 * F.cross_entropy(out, Y)).backward(retain_graph=True)
    loss = 0.5 * F.cross_entropy(out, Y)
    loss.backward()
    return loss


def checkpointed(model: nn.Module) -> Tensor:
    """A call that is run again in the backward pass."""
    return F.cross_entropy(checkpoint(model, X, use_reentrant=False), Y)


@pytest.mark.parametrize("closure", [teacher, unused, adversarial, dropped, two_losses, checkpointed])
def test_calls_count_once_if_their_gradients_are_used(closure: Any) -> None:
    results = []
    for given in ({}, {"batch_size": 12}):
        model = net()
        opt = bgd(model)
        opt.step(lambda m=model: closure(m), **given)
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(6, 6), (8, 4)])
def test_several_calls_before_one_backward_need_a_batch_size(sizes: tuple[int, int]) -> None:
    """They may be a siamese net's, or two batches."""
    model = net()
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        return sum(loss_fn(model, x, y) for x, y in zip(X.split(sizes), Y.split(sizes), strict=True))

    with pytest.raises(ValueError, match=r"its module is called once before each backward\(\): pass step"):
        bgd(model).step(closure)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    bgd(model).step(closure, batch_size=6)
    bgd(model, batch_size=6).step(closure)


def test_waiting_samples_survive_a_step_that_lacks_a_batch_size() -> None:
    model = net()
    opt = bgd(list(model.named_parameters()))
    for _ in range(2):
        with opt.sampled_params():
            loss_fn(model, X, Y).backward()
    with pytest.raises(ValueError, match="needs the number of examples behind each step"):
        opt.step()
    opt.step(batch_size=12)
    torch.testing.assert_close(everything(model, opt), told([12]))


def test_the_step_overrides_what_is_counted() -> None:
    results = []
    for size in (12, 120):
        model = net()
        before = model[0].weight.detach().clone()
        opt = bgd(model, batch_size=8, max_step=math.inf)
        opt.step(lambda m=model: loss_fn(m, X, Y), batch_size=size)
        results.append(model[0].weight.detach() - before)
    torch.testing.assert_close(10 * results[0], results[1])


def test_more_examples_than_the_batch_size_of_the_optimiser_are_refused() -> None:
    model = net()
    opt = bgd(model, batch_size=8)
    with pytest.raises(ValueError, match=r"have 12 examples on axis 0, more than batch_size=8: leave it out"):
        opt.step(lambda: loss_fn(model, X, Y))
    with pytest.raises(ValueError, match="more than batch_size=8"):
        posterity.compile_step(model, loss_fn, opt)(X, Y)


class Folds(nn.Module):
    """Takes the positions of its inputs for examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view(*x.shape[:2], -1).mean(1)


@layer_rules
def test_layers_that_see_other_examples_than_the_model_are_refused(rule: Rule) -> None:
    model = Folds()
    opt = rule.make(model)
    x = X.view(4, 3, 5)
    with pytest.raises(ValueError, match=r"saw 12 examples, not the 4 of the model's inputs: pass step"):
        opt.step(lambda: loss_fn(model, x, Y[:4]))
    opt.step(lambda: loss_fn(model, x, Y[:4]), batch_size=12)


# Examples on another axis.


class Words(nn.Module):
    """Of texts, one output for each; attention, norms and linear layers over all words."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.last = nn.Linear(8, 3)
        self.axis = 1 if batch_first else 0
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.layer(self.embed(ids))).mean(self.axis)


IDS = torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(3))


def run(way: str, model: nn.Module, opt: posterity.VariationalOptimizer, x: Tensor, y: Tensor) -> None:
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(3):
        if way == "closure":
            opt.step(lambda: loss_fn(model, x, y))
        elif way == "stack":
            step(x, y)
        else:
            for _ in range(opt.param_groups[0]["mc_samples"]):
                with opt.sampled_params():
                    loss_fn(model, x, y).backward()
            opt.step()


@rules
@pytest.mark.parametrize("way", ["closure", "context", "stack"])
def test_time_first_equals_batch_first(rule: Rule, way: str) -> None:
    results = []
    for batch_first in (True, False):
        model = Words(batch_first)
        more = {"batch_size": None} if rule.streams else {}
        opt = rule.make(model, batch_dim=0 if batch_first else 1, **more)
        opt = copy.deepcopy({"model": model, "opt": opt})  # an axis is copied with its optimiser
        run(way, *opt.values(), IDS if batch_first else IDS.T, Y[:6])
        results.append(everything(*opt.values()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


class Plain(nn.Module):
    """Linear layers over all words, each of which has an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@rules
def test_linear_layers_over_time_first(rule: Rule) -> None:
    x, y, results = X.view(4, 3, 5), Y.view(4, 3), []
    for axis in (0, 1):
        model = Plain()
        more = {"batch_size": None} if rule.streams else {}
        opt = rule.make(model, batch_dim=axis, **more)
        for _ in range(3):
            opt.step(
                lambda m=model, a=axis: F.cross_entropy(m(x.movedim(0, a)).movedim(a, 0).mT, y), count=12
            )
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@layer_rules
def test_time_first_attention_without_batch_dim_is_refused(rule: Rule) -> None:
    for ids in (IDS.T, IDS[:4].T):  # as many words as examples, too
        model = Words(batch_first=False)
        with pytest.raises(RuntimeError, match=r"pass batch_dim=1 for \[T, B, …\]"):
            rule.make(model).step(lambda m=model, ids=ids: loss_fn(m, ids, Y[: ids.shape[1]]))


def test_time_first_inputs_of_bgd_warn_without_batch_dim() -> None:
    model = Words(batch_first=False)
    with pytest.warns(CountWarning, match="a mean over 6 terms, .* the mean over 4 examples"):
        bgd(model).step(lambda: loss_fn(model, IDS.T, Y[:6]))


@pytest.mark.parametrize("way", ["closure", "compiled"])
@rules
def test_time_first_inputs_are_told_of_batch_dim(rule: Rule, way: str) -> None:
    """``count=`` alone would leave the number of examples wrong."""

    class Pooled(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean(0)

    x, y = X.view(4, 3, 5), Y[:3]

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    more = {"batch_size": None} if rule.streams else {}

    def learn(axis: int) -> None:
        model = Pooled()
        opt = rule.make(model, batch_dim=axis, **more)
        if way == "closure":
            opt.step(lambda: loss(model, x, y))
        else:
            posterity.compile_step(model, loss, opt)(x, y)

    with pytest.warns(CountWarning, match=r"or build \w+ with batch_dim=1 if examples are on axis 1, see"):
        learn(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        learn(1)


@rules
@pytest.mark.parametrize("axis", [-1, 0.5, "1"])
def test_an_axis_that_is_none_is_refused(rule: Rule, axis: Any) -> None:
    with pytest.raises(ValueError, match="batch_dim must be a whole number of at least 0"):
        rule.make(net(), batch_dim=axis)


def test_parts_are_cut_of_the_first_axis_alone() -> None:
    model = net()
    with pytest.raises(ValueError, match="parts=2 splits axis 0, but examples are on axis 1"):
        posterity.compile_step(model, loss_fn, bgd(model, batch_dim=1), parts=2)


@pytest.mark.parametrize("rule", ["BGD", "IVON"])
def test_a_compiled_module_is_counted_and_compiled_once(rule: str) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    results = []
    for given in ({}, {"batch_size": 12}):
        model = torch.compile(net(), backend=backend)
        opt = bgd(model) if rule == "BGD" else posterity.IVON(model, num_data=12, seed=0)
        for _ in range(3):
            opt.step(lambda m=model: loss_fn(m, X, Y), **given)
        results.append(everything(model, opt))
        assert len(graphs) <= 1
        graphs.clear()
    torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.compiler.reset()
