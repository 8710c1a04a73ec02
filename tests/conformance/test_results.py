"""What a rule returns is judged before it is written: a bad result moves nothing, whoever finds it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from conformance import stand_in
from conformance.rules import (
    RULES,
    Rule,
    X,
    Y,
    by_closure,
    by_context,
    by_stack,
    everything,
    net,
    rules,
    same,
)
from posterity import VariationalOptimizer
from posterity.optim import checks

BAD = ("mean", "nan", "state", "std", "adam")


def complete(model: nn.Module, opt: VariationalOptimizer) -> dict[str, Tensor]:
    """Weights, buffers, all state and all counts."""
    state = copy.deepcopy(opt.state_dict())
    found = {f"{i} {key}": v for i, values in state["state"].items() for key, v in values.items()}
    counts = {f"steps {i}": torch.tensor(group["steps"]) for i, group in enumerate(state["param_groups"])}
    return {**everything(model, opt), **found, **counts}


def spoil(monkeypatch: pytest.MonkeyPatch, kind: type[VariationalOptimizer], what: str) -> None:
    """Let the results of a rule be bad in one weight."""

    def spoiled(mean: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mean, state = mean.clone(), {key: value.clone() for key, value in state.items()}
        if what == "state":
            next(iter(state.values())).view(-1)[0] = math.inf
        elif what == "std":  # finite as they are, but not what is made of them
            for key, value in {"std": 0.0, "hess": -1e9, "evidence": -1.0}.items():
                if key in state:
                    state[key].view(-1)[0] = value
        else:
            mean.view(-1)[0] = math.nan if what == "nan" else -math.inf
        return mean, state

    if what == "adam":
        adam = posterity.optim.apply.adam_update
        monkeypatch.setattr(posterity.optim.apply, "adam_update", lambda *given: spoiled(*adam(*given)))
        return
    update, updates = kind.update, kind.updates
    monkeypatch.setattr(kind, "update", lambda *given: spoiled(*update(*given)))
    if kind.matrices:
        monkeypatch.setattr(kind, "updates", lambda *given: [spoiled(*each) for each in updates(*given)])


def made(rule: Rule) -> tuple[nn.Module, VariationalOptimizer]:
    """A net of which Adam trains a part, if the rule does not."""
    model = net()
    return model, rule.make(model, deterministic="norm.*", deterministic_lr=1e-3, max_step=math.inf)


@rules
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("way", [by_closure, by_context, by_stack])
def test_bad_result_changes_nothing_and_names_the_setting(
    rule: Rule, what: str, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, opt), (twin, other) = made(rule), made(rule)
    way(model, opt)
    way(twin, other)
    before = complete(model, opt)
    with monkeypatch.context() as patch:
        spoil(patch, type(opt), what)
        if what == "std" and not rule.captures:  # its blocks have factors, not stds
            return
        with pytest.raises(
            FloatingPointError, match=r"step would give .*; the posterior was not touched: lower lr="
        ):
            way(model, opt)
    assert same(before, complete(model, opt))
    way(model, opt)
    way(twin, other)
    assert same(complete(model, opt), complete(twin, other))  # as if there had been no such step


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.captures], ids=repr)
@pytest.mark.parametrize("what", BAD)
def test_a_host_that_runs_ahead_raises_with_the_next_call(
    rule: Rule, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "runs_ahead_of", lambda devices: True)
    (model, opt), (twin, other) = made(rule), made(rule)
    by_closure(model, opt)
    by_closure(twin, other)
    before = complete(model, opt)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patch:
        spoil(patch, type(opt), what)
        by_closure(model, opt)
        assert same(weights, model.state_dict())  # before anybody has asked, buffers as well
    with pytest.raises(FloatingPointError, match="step would give"):
        opt.posterior()
    assert same(before, complete(model, opt))
    by_closure(model, opt)
    by_closure(twin, other)
    assert same(complete(model, opt), complete(twin, other))


@rules
@pytest.mark.parametrize("what", BAD)
def test_a_captured_step_holds_its_result_back(
    rule: Rule, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    model = net()
    some = {} if rule.captures else {"factors_every": 50}
    opt = rule.make(model, deterministic="norm.*", deterministic_lr=1e-3, max_step=math.inf, **some)
    step = stand_in.captured(model, opt)
    for _ in range(4):
        step(X, Y)
    before = {key: value for key, value in complete(model, opt).items() if "step" not in key}
    if what == "std" and not rule.captures:
        return
    with monkeypatch.context() as patch:
        spoil(patch, type(opt), what)
        step(X, Y)
    opt.graphs.clear()  # nobody has asked yet
    after = {key: value for key, value in complete(model, opt).items() if "step" not in key}
    assert same(before, after)
    with pytest.raises(FloatingPointError, match="step would give"):
        step(X, Y)
    step(X, Y)
    assert not torch.equal(before["last.weight"], model.last.weight)


def test_settings_that_overflow_are_named() -> None:
    """The posterior had means of minus infinity once, and the next step said that it was not touched."""
    model = nn.Linear(5, 3)
    opt = posterity.BGD(model, std_init=300, preset="zeno2018", batch_size=16)
    opt.posterior()  # which gives it its state
    before = complete(model, opt)
    with pytest.raises(FloatingPointError, match=r"lower lr=1, or lower std_init=300"):
        opt.step(lambda: 1e32 * model(X).sum())
    assert same(before, complete(model, opt))


def test_a_mean_that_half_precision_cannot_hold_is_refused() -> None:
    model = nn.Linear(4, 2).half()
    opt = posterity.IVON(model, num_data=10, lr=1e6, preset="shen2024", seed=0)
    opt.posterior()
    before = complete(model, opt)
    with opt.sampled_params():
        for p in model.parameters():
            p.grad = torch.full_like(p, 100.0)
    with pytest.raises(FloatingPointError, match="'weight' a mean that is not finite"):
        opt.step(batch_size=4)
    assert same(before, complete(model, opt))
