"""A host that runs ahead of its device: what is not finite moves nothing, and is raised one call late.

Here the device is the CPU, which the guard is told not to wait for; test_cuda.py has a real one.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from conformance.rules import RULES, X, Y, by_closure, by_context, by_stack, everything, loss_fn, net, same
from posterity.optim import checks
from posterity.optim.checks import runs_ahead_of
from posterity.train.cuda_graph import report, verdict

WAYS = (by_closure, by_context, by_stack)
rules = pytest.mark.parametrize("rule", [rule for rule in RULES if rule.captures], ids=repr)


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "runs_ahead_of", lambda devices: True)


def complete(model: nn.Module, opt: posterity.VariationalOptimizer) -> dict[str, Tensor]:
    """Weights, buffers, all state and all counts."""
    state = copy.deepcopy(opt.state_dict())
    found = {f"{i} {key}": v for i, values in state["state"].items() for key, v in values.items()}
    counts = {f"steps {i}": torch.tensor(group["steps"]) for i, group in enumerate(state["param_groups"])}
    return {**everything(model, opt), **found, **counts}


def bad_input() -> Tensor:
    bad = X.clone()
    bad[0, 0] = torch.nan
    return bad


@rules
@pytest.mark.parametrize("way", WAYS)
def test_bad_step_changes_nothing_then_raises_then_training_continues(rule: Any, way: Any) -> None:
    model, twin = net(), net()
    opt, other = rule.make(model), rule.make(twin)
    for _ in range(2):
        way(model, opt)
        way(twin, other)
    before = complete(model, opt)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    way(model, opt, bad_input())
    assert same(weights, model.state_dict())  # buffers as well, before anybody has asked
    with pytest.raises(FloatingPointError, match="the posterior was not touched"):
        way(model, opt)
    assert same(before, complete(model, opt))
    for _ in range(2):
        way(model, opt)
        way(twin, other)
    assert same(complete(twin, other), complete(model, opt))


def test_showing_or_loading_a_posterior_raises_a_bad_step() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)
    q, state = opt.posterior(), copy.deepcopy(opt.state_dict())
    by_context(model, opt)
    before = complete(model, opt)
    calls: list[Callable[[], Any]] = [
        opt.posterior,
        opt.state_dict,
        lambda: opt.load_posterior(q),
        lambda: opt.load_state_dict(state),
        lambda: opt.add_param_group({"params": [("more", torch.zeros(2, requires_grad=True))]}),
        lambda: copy.deepcopy(opt),
        lambda: pickle.dumps(opt),
    ]
    for call in calls:
        by_context(model, opt, bad_input())
        with pytest.raises(FloatingPointError, match="not touched"):
            call()
        assert same(before, complete(model, opt))  # said once


def test_the_gradient_is_named_while_it_is_there() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)

    def spoil() -> None:
        with opt.sampled_params():
            loss_fn(model).backward()
        model.last.bias.grad[0] = torch.inf
        opt.step()

    spoil()
    with pytest.raises(FloatingPointError, match=r"the gradient of 'last.bias' of the last step is not"):
        opt.posterior()
    spoil()
    opt.zero_grad()
    with pytest.raises(FloatingPointError, match="a gradient of the last step is not finite"):
        opt.posterior()


def test_a_statistic_and_a_loss_are_named() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)
    with opt.sampled_params():
        loss_fn(model).backward()
    next(iter(opt.sums)).poison.fill_(torch.nan)
    opt.step()
    with pytest.raises(FloatingPointError, match=r"E\[gradient · noise\] of the last step is not finite"):
        opt.state_dict()
    # Its gradients are finite.
    opt.step(lambda: loss_fn(model) + torch.inf)
    with pytest.raises(FloatingPointError, match="the loss is inf; the posterior was not touched"):
        opt.state_dict()


def test_several_samples_and_a_loss_that_runs_away() -> None:
    model = net()
    opt = posterity.BGD(model, mc_samples=3, batch_size=16)
    calls = iter(range(100))
    opt.step(lambda: loss_fn(model) * (torch.nan if next(calls) == 1 else 1.0))
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        opt.posterior()
    by_closure(model, opt)
    for _ in range(17):
        opt.step(lambda: loss_fn(model) * 0 + 1e6)
    with pytest.warns(posterity.DivergenceWarning, match="BGD seems to diverge"):
        by_closure(model, opt)


def test_a_step_given_up_leaves_no_loss_to_the_next() -> None:
    model = net()
    opt = posterity.BGD(model.parameters(), mc_samples=2)

    def closure() -> Tensor:
        return loss_fn(model) * torch.nan

    with pytest.raises(ValueError, match="needs the number of examples"):
        opt.step(closure)
    calls = iter(range(100))

    def fails() -> Tensor:
        if next(calls) == 1:
            raise KeyError
        return closure()

    with pytest.raises(KeyError):
        opt.step(fails, batch_size=16)
    by_closure(model, opt)
    opt.posterior()


def test_finiteness_check_sees_clipped_dropped_and_replaced_gradients() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)
    with opt.sampled_params():
        loss_fn(model).backward()
    model.first.weight.grad = model.first.weight.grad * torch.nan
    before = model.last.weight.detach().clone()
    opt.step()
    assert torch.equal(before, model.last.weight)
    with pytest.raises(FloatingPointError):
        opt.posterior()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    opt = posterity.IVON(model, num_data=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_closure(model, opt, X.to(dtype))
    before = everything(model, opt)
    by_closure(model, opt, bad_input().to(dtype))
    with pytest.raises(FloatingPointError):
        opt.posterior()
    assert same(before, everything(model, opt))


def test_parameters_on_one_gpu_are_run_ahead_of() -> None:
    def ahead(*devices: str) -> bool:
        return runs_ahead_of({torch.device(device) for device in devices})

    assert ahead("cuda:0", "cuda:0")
    assert not any((ahead("cpu"), ahead("cuda:0", "cuda:1"), ahead("cpu", "cuda:0"), ahead()))


def test_rules_with_matrices_are_waited_for() -> None:
    model = net()
    opt = posterity.NoisyKFAC(model, num_data=100)
    with pytest.raises(FloatingPointError, match="not touched"):
        opt.step(lambda: loss_fn(model, bad_input(), Y), batch_size=16)


@pytest.mark.parametrize("bad", [None, "loss", "poison", "result"])
def test_the_verdict_of_a_captured_step(bad: str | None) -> None:
    losses = torch.tensor([1.0, 2.0, torch.inf if bad == "loss" else 6.0])
    poisons = [torch.zeros(()), torch.tensor(torch.nan if bad == "poison" else 0.0)]
    stuck, host, clock = torch.zeros(()), torch.full((), 7.0), torch.tensor(4, dtype=torch.int32)
    loss, ok = verdict(losses, poisons, stuck, clock)
    assert bool(ok) == (bad in (None, "result"))
    assert int(clock) == 5
    assert float(loss) == (torch.inf if bad == "loss" else 3.0)
    report(loss, ok.logical_and_(torch.tensor(bad != "result")), stuck, host)
    told = {None: 3.0, "result": -torch.inf}.get(bad, torch.nan)
    torch.testing.assert_close(host, torch.tensor(told), equal_nan=True)
    loss, ok = verdict(torch.ones(3), [torch.zeros(())], stuck, clock)
    report(loss, ok, stuck, host)
    assert bool(ok)
    told = {None: 1.0, "result": -torch.inf}.get(bad, torch.nan)  # until somebody has looked
    torch.testing.assert_close(host, torch.tensor(told), equal_nan=True)


class Caching(nn.Module):
    """Makes a buffer in its first pass, and a larger one for a larger batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.register_buffer("cache", torch.zeros(len(x)))
        self.cache += 1
        out: Tensor = self.linear(x)
        return out


def test_buffers_that_a_pass_makes_or_lets_grow_do_no_harm() -> None:
    torch.manual_seed(0)
    model = Caching()
    opt = posterity.IVON(model, num_data=100)
    for rows in (2, 2, 5, 3):
        x = torch.randn(rows, 4)
        opt.step(lambda x=x: model(x).square().mean())  # type: ignore[misc]
    assert opt.param_groups[0]["steps"] == int(opt.state[model.linear.weight]["step"]) == 4


def test_replaced_state_keeps_counts_after_a_bad_step() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)
    by_context(model, opt)
    by_context(model, opt, bad_input())
    first = model.first.weight
    opt.state[first]["hess"] = opt.state[first]["hess"].clone()
    with pytest.raises(FloatingPointError, match="the posterior was not touched"):
        by_context(model, opt)
    assert int(opt.state[first]["step"]) == 1
    assert opt.param_groups[0]["steps"] == 1


def test_a_parameter_without_numbers_is_finite() -> None:
    model = nn.Linear(4, 3)
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    groups = [{"params": [("none", model.none)]}, {"params": list(model.named_parameters())[:2]}]
    for name in ("BGD", "IVON"):
        opt = getattr(posterity, name)(
            groups, **({"num_data": 8} if name == "IVON" else {"batch_size": 8, "mc_samples": 1})
        )
        with opt.sampled_params():
            (model(torch.randn(8, 4)).square().mean() + model.none.sum()).backward()
        opt.step()
        assert opt.posterior().mean()["none"].shape == (0,)
