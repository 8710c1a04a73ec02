"""States from elsewhere: what no step can go on from is refused in one sentence, and nothing changes."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import posterity
from conformance.rules import RULES, Rule, by_closure, by_stack, everything, net, rules, same
from conformance.test_results import complete


def first(state: dict[str, Any], key: str | None = None) -> Tensor:
    """A tensor of the state that has a value for every weight."""
    own = state["state"][1]  # of "first.weight"
    return own[key or next(key for key in ("std", "hess", "evidence") if key in own)]


def fill(value: float) -> Callable[[dict[str, Any]], object]:
    return lambda state: first(state).view(-1)[:1].fill_(value)


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nan": (fill(math.nan), "state of 'first.weight' has a .* that is not finite"),
    "inf": (fill(math.inf), "state of 'first.weight' has a .* that is not finite"),
    "no std": (fill(-1e12), "state of 'first.weight' has a std that is not a positive number"),
    "nothing": (lambda state: state.clear(), "the state has no 'param_groups'"),
    "no state": (lambda state: state.pop("state"), "the state has no 'state'"),
    "empty": (lambda state: state["state"].clear(), "the state is empty after 2 steps"),
    "cut": (lambda state: state["state"][1].pop("step"), "state of 'first.weight' has no 'step'"),
    "no tensor": (
        lambda state: state["state"][1].update(step=3),
        "'step' of 'first.weight' must be a tensor",
    ),
    "count": (lambda state: state["state"][1]["step"].neg_(), "'step' of 'first.weight' is not a count"),
    "group": (lambda state: state["param_groups"].append(3), "a group without 'params'"),
    "params": (
        lambda state: state["param_groups"][0]["params"].pop(),
        r"has a dict for \d, not the state of a param",
    ),
    "shape": (
        lambda state: state["state"].update({1: {k: v.reshape(-1) for k, v in state["state"][1].items()}}),
        r"'first.weight' has shape \(35,\) in the state, \(7, 5\) here",
    ),
}


@rules
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_state_is_refused_and_nothing_changes(rule: Rule, bad: tuple[Any, str]) -> None:
    change, match = bad
    model, other = net(), net(1)
    opt, saved = rule.make(model), rule.make(other)
    for _ in range(2):
        by_closure(model, opt)
        by_closure(other, saved)
    before = complete(model, opt)
    state = copy.deepcopy(saved.state_dict())
    change(state)
    with pytest.raises((TypeError, ValueError), match=match) as refusal:
        opt.load_state_dict(state)
    assert "\n" not in str(refusal.value)
    assert same(before, complete(model, opt))
    opt.load_state_dict(saved.state_dict())


def test_a_state_is_a_dict() -> None:
    with pytest.raises(TypeError, match="a state is what state_dict"):
        posterity.BGD(net()).load_state_dict(None)  # type: ignore[arg-type]


@rules
def test_state_of_an_optimiser_that_has_not_begun_is_loaded(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.state[model.first.weight] == {}  # which asking has made
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    by_closure(model, opt)


@rules
def test_numbers_of_numpy_become_pythons(rule: Rule) -> None:
    results = []
    for number, whole in ((float, int), (np.float64, np.int64)):
        model = net()
        some = {"mc_samples": whole(1), "seed": whole(3)} if rule.draws else {}
        opt = rule.make(model, lr=number(0.5), max_step=number(0.1), settle_after=whole(10), **some)
        opt.param_groups[0]["lr"] = number(0.25)
        by_closure(model, opt)
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        twin = net()
        twin.load_state_dict(model.state_dict())
        other = rule.make(twin, **({"seed": 9} if rule.draws else {}))
        other.load_state_dict(state)
        by_stack(twin, other)
        results.append(everything(twin, other))
    assert same(*results)


CALLS: dict[str, Callable[[posterity.VariationalOptimizer], object]] = {
    "state_dict": lambda opt: opt.state_dict(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "add_param_group": lambda opt: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "load_state_dict": lambda opt: opt.load_state_dict({"param_groups": [], "state": {}}),
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.draws], ids=repr)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inside_a_context_nothing_is_saved_or_added(rule: Rule, call: Callable[[Any], object]) -> None:
    opt = rule.make(net())
    groups = len(opt.param_groups)
    with opt.sampled_params(), pytest.raises(RuntimeError, match="inside sampled_params"):
        call(opt)
    assert len(opt.param_groups) == groups


@pytest.mark.parametrize("value", [math.nan, math.inf])
@rules
def test_posterior_whose_means_are_not_finite_is_not_loaded(rule: Rule, value: float) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    before = complete(model, opt)
    mean = torch.full((7, 5), value)
    bad = posterity.Factorised({"first.weight": posterity.DiagonalGaussian(mean, 0.01)})
    with pytest.raises(ValueError, match=r"means of 'first\.weight' are not finite"):
        opt.load_posterior(bad)
    assert same(before, complete(model, opt))
