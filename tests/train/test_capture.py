"""Captured steps on a machine without a GPU: a stand-in for a CUDA graph runs what was captured again.

What a graph does on the device is tested in test_cuda.py; here is what surrounds it: when a graph is made and
thrown away, what reaches it between replays, what it leaves behind.
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import posterity
from conformance.rules import (
    Rule,
    X,
    Y,
    by_closure,
    captured_layer_rules,
    captured_momentum_rules,
    captured_rules,
    captured_squares_rules,
    everything,
    loss_fn,
    net,
    same,
)
from conformance.stand_in import captured, install, near
from posterity.train import compiled


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def test_graphs_are_for_parameters_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.noise, "kernels", object())
    opt = posterity.BGD(net())
    assert not compiled.can_capture({p.device for p in opt.parameters()})
    for devices, can in ((["cuda:0"] * 2, True), (["cuda:0", "cuda:1"], False), (["cuda:0", "cpu"], False)):
        assert compiled.can_capture({torch.device(each) for each in devices}) == can


def test_a_graph_is_for_one_mode_of_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = install(monkeypatch), net()
    step = captured(model, posterity.BGD(model, seed=0))

    def replays() -> list[int]:
        return [len(graph.replays) for graph in made]

    for _ in range(3):
        step(X, Y)
    assert replays() == [2]
    model.norm.eval()  # of one part alone
    step(X, Y)
    assert replays() == [2]  # what was captured would normalise by the batch's own statistics
    step(X, Y)
    assert replays() == [2, 1]
    model.norm.train()
    step(X, Y)
    assert replays() == [3, 1]


@captured_rules
def test_replays_equal_the_loop_through_changes_of_lr_and_ragged_batches(rule: Rule) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model, deterministic="norm.*", batch_size=None) if rule.streams else rule.make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        step = captured(model, opt)
        losses = []
        for i in range(20):
            n = (16, 16, 7)[i % 3]
            x, y = X[:n], Y[:n]
            loss = (
                step(x, y) if graphs else opt.step(lambda m=model, x=x, y=y: loss_fn(m, x, y), batch_size=n)
            )
            losses.append(float(loss))
            schedule.step()
        assert len(step._graphs) == (2 if graphs else 0)
        results.append({**everything(model, opt), "losses": torch.tensor(losses)})
    near(*results)


@captured_rules
def test_replays_see_loaded_state_posteriors_freezing_and_hyperparameters(rule: Rule) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model)
        step = captured(model, opt)

        def go(times: int, model=model, opt=opt, step=step, graphs=graphs) -> None:
            for _ in range(times):
                step(X, Y) if graphs else by_closure(model, opt)

        go(4)
        state, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
        go(2)
        opt.load_state_dict(state)
        model.load_state_dict(weights)
        go(3)
        opt.load_posterior(posterity.prune(opt.posterior(), 0.5))
        go(3)
        model.first.requires_grad_(False)
        go(3)
        model.first.requires_grad_(True)
        opt.param_groups[0]["seed"] = 5
        go(3)
        opt.state[model.last.weight]["step"] = opt.state[model.last.weight]["step"] + 0  # a new tensor
        go(3)
        results.append(everything(model, opt))
        assert int(opt.state[model.last.weight]["step"]) == 12  # since the posterior was taken up
    near(*results)


@captured_rules
def test_outside_gradient_is_refused_unless_dropped(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    loss_fn(model).backward()  # adds to what the graph has left
    with pytest.raises(RuntimeError, match="from outside"):
        step(X, Y)
    opt.zero_grad()
    step(X, Y)
    model.unused.sum().backward()
    with pytest.raises(RuntimeError, match="'unused' has a gradient from outside"):
        step(X, Y)
    opt.zero_grad()
    before = model.last.weight.detach().clone()
    step(X, Y)
    assert not torch.equal(before, model.last.weight)
    assert model.last.weight.grad is not None


@captured_rules
def test_nan_in_a_graph_is_raised_by_the_next_call(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = X.clone()
    bad[0, 0] = torch.nan
    step(bad, Y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(FloatingPointError, match="not touched"):
        step(X, Y)
    step(X, Y)
    assert torch.isfinite(model.last.weight).all()
    assert not torch.equal(before["last.weight"], model.last.weight)


def test_bad_step_is_raised_after_later_replays() -> None:
    model = net()
    step = captured(model, posterity.BGD(model, batch_size=16))
    for _ in range(3):
        step(X, Y)
    step(torch.full_like(X, torch.nan), Y)
    (graph,) = step._graphs.values()
    graph.host_loss.zero_()  # as if the next replay had been queued before this one was done
    step(X, Y)
    with pytest.raises(FloatingPointError, match="not touched"):
        step(X, Y)
    step(X, Y)
    step(X, Y)  # said once


def test_bad_graph_step_raises_before_the_posterior_is_read() -> None:
    model = net()
    opt = posterity.BGD(model, batch_size=16)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
        step(X[:7], Y[:7])
    step(torch.full_like(X, torch.nan), Y)
    step(X[:7], Y[:7])
    with pytest.raises(FloatingPointError, match="not touched"):
        opt.state_dict()
    opt.posterior()


@captured_rules
def test_the_norm_of_the_mean_gradient_is_clipped(rule: Rule) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model)
        step = captured(model, opt, max_norm=1e-3)
        for _ in range(4):
            if graphs:
                step(X, Y)
                continue
            for _ in range(opt.param_groups[0]["mc_samples"]):
                with opt.sampled_params():
                    loss_fn(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            opt.step(batch_size=16)
        results.append(everything(model, opt))
    near(*results)
    with pytest.raises(ValueError, match="max_norm must be greater than 0, not 0"):
        captured(model, opt, max_norm=0)


def test_what_cannot_be_captured_says_so_once_and_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the device says no\nand more")

    monkeypatch.setattr(compiled, "Graph", fails)
    model = net()
    step = captured(model, posterity.BGD(model, batch_size=16))
    step(X, Y)
    with pytest.warns(
        UserWarning, match=r"cannot be captured \(the device says no\); it runs without a graph"
    ):
        step(X, Y)
    before = model.last.weight.detach().clone()
    step(X, Y)
    assert not torch.equal(before, model.last.weight)


def test_failed_capture_concerns_one_batch_shape() -> None:
    model = net()
    opt = posterity.BGD(model, batch_size=16)
    step = captured(model, opt)
    step(X, Y)
    loss_fn(model).backward()
    with pytest.raises(RuntimeError, match="from outside"):
        step(X, Y)
    opt.zero_grad()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step(X[:, :3], Y)  # of a wrong width
    step(X, Y)
    assert len(step._graphs) == 1


def test_shapes_in_turn_do_not_push_each_other_out() -> None:
    model = net()
    step = captured(model, posterity.BGD(model))
    for _ in range(4):
        for n in (16, 15, 14, 13, 12, 11):
            step(X[:n], Y[:n])
    graphs = list(step._graphs)
    assert len(graphs) == 4
    for _ in range(120):
        step(X[:16], Y[:16])
    for _ in range(2):
        step(X[:11], Y[:11])
    assert len(step._graphs) <= 4
    assert list(step._graphs) != graphs  # those not used for long have made room


def test_learning_rate_in_a_tensor_is_followed() -> None:
    model = net()
    opt = posterity.BGD(model, lr=torch.tensor(1.0), batch_size=16)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    opt.param_groups[0]["lr"].fill_(0.5)
    step(X, Y)
    opt.param_groups[0]["lr"].fill_(0.0)  # a second time, in the same tensor
    before = model.last.weight.detach().clone()
    step(X, Y)
    assert torch.equal(before, model.last.weight)


@pytest.mark.parametrize("name", ["temperature", "lr"])
def test_an_entry_that_no_rule_can_use_is_refused_before_a_replay(name: str) -> None:
    model = net()
    opt = posterity.VOGN(model, num_data=100)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    before, steps = everything(model, opt), opt.param_groups[0]["steps"]
    (graph,) = step._graphs.values()
    good, opt.param_groups[0][name] = opt.param_groups[0][name], torch.nan
    with pytest.raises(ValueError, match=f"^{name} must be .*finite.*, not nan"):
        step(X, Y)
    opt.param_groups[0][name] = good
    assert same(before, everything(model, opt))
    assert opt.param_groups[0]["steps"] == steps
    step(X, Y)
    assert list(step._graphs.values()) == [graph]
    assert not same(before, everything(model, opt))


@captured_rules
def test_batches_in_dicts_and_lists_are_captured_by_their_form(rule: Rule) -> None:
    def nested(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch["x"][0], batch.pop("y"))

    def one(i: int) -> Any:
        x, other = {"x": [X]}, {"other": [-X]}
        return {**x, **other, "y": Y} if i % 3 else {**other, **x, "y": Y}  # of the same shapes

    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model, deterministic="norm.*")
        step = compiled.CapturedStep(posterity.compile_step(model, nested, opt))  # type: ignore[arg-type]
        for i in range(18):
            if graphs:
                step(one(i))
            else:
                opt.step(lambda m=model, i=i: nested(m, one(i)), batch_size=16)
        assert len(step._graphs) == (2 if graphs else 0)
        results.append(everything(model, opt))
    near(*results)


def test_batches_with_non_tensors_run_without_a_graph() -> None:
    model = net()
    opt = posterity.BGD(model)
    step = compiled.CapturedStep(
        posterity.compile_step(model, lambda m, b, scale: scale * loss_fn(m, **b), opt)  # type: ignore[arg-type]
    )
    for _ in range(3):
        before = model.last.weight.detach().clone()
        step(UserDict(x=X, y=Y), 2.0)
        assert not torch.equal(before, model.last.weight)
    assert not step._graphs


@captured_rules
def test_temporarily_unused_parameter_keeps_its_own_update_count(rule: Rule) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model, deterministic="norm.*")
        step = captured(model, opt)
        for i in range(24):
            model.first.requires_grad_(not 6 <= i < 18)
            step(X, Y) if graphs else by_closure(model, opt)
        results.append(everything(model, opt))
    near(*results)


def test_replaced_graph_reports_its_bad_step_first() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    step(torch.full_like(X, torch.nan), Y)
    model.first.requires_grad_(False)
    by_closure(model, opt)  # the graph's counts are stale after it
    model.first.requires_grad_(True)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step(X, Y)
    step(X, Y)


def test_train_step_inside_a_context_is_refused() -> None:
    model = net()
    opt = posterity.BGD(model, batch_size=16)
    step = captured(model, opt)
    for _ in range(3):
        step(X, Y)
    before = model.first.weight.detach().clone()
    for each in (step, step.step):
        with pytest.raises(RuntimeError, match="call it outside the context"), opt.sampled_params():
            each(X, Y)
        assert torch.equal(before, model.first.weight)


def test_a_process_group_of_one_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    opt = posterity.BGD(model, batch_size=16)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    by_closure(model, opt)
    assert opt.world.size == 1


@captured_layer_rules
def test_changing_temperature_needs_no_new_graph(rule: Rule) -> None:
    results = []
    temperature = posterity.warmup(10, start=0.1)
    for graphs in (False, True):
        model = net()
        opt = rule.make(model, deterministic="norm.*")
        step = captured(model, opt)
        for i in range(12):
            for group in opt.param_groups:
                group["temperature"] = temperature(i)
            step(X, Y) if graphs else by_closure(model, opt)
        assert len(step._graphs) == len(step._seen) == graphs
        results.append(everything(model, opt))
    near(*results)
    opt.param_groups[0]["max_step"] *= 2  # what is not live does
    step(X, Y)
    assert len(step._seen) == 2


def test_changing_bgd_temperature_needs_no_new_graph() -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = posterity.BGD(model, std_init=0.05)
        step = captured(model, opt)
        for i in range(6):
            opt.param_groups[0].update(temperature=1.0 / (i + 1), lr=1.0 / (i + 1))
            step(X, Y) if graphs else by_closure(model, opt)
        assert len(step._graphs) == graphs
        results.append(everything(model, opt))
    near(*results)


@captured_momentum_rules
@pytest.mark.parametrize("keep", [False, True])
def test_learning_rate_drop_respects_keep_velocity(rule: Rule, keep: bool) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = rule.make(model, keep_velocity=keep, max_step=math.inf)  # a bound would set the pace
        schedule = torch.optim.lr_scheduler.MultiStepLR(opt, [6], 0.01)
        step = captured(model, opt)
        for i in range(8):
            before = model.last.weight.detach().clone()
            step(X, Y) if graphs else by_closure(model, opt)
            schedule.step()
            if i == 5:
                pace = (model.last.weight - before).norm()
            elif i == 6:
                slowed = (model.last.weight - before).norm() / pace
        assert len(step._graphs) == graphs
        # The momentum of 0.9 stays, or the step is a hundredth; the curvature moves by a factor below 2.
        assert (0.4 < slowed < 1.6) if keep else (slowed < 0.03)
        results.append(everything(model, opt))
    near(*results)


@captured_squares_rules
def test_squares_that_overflow_in_a_graph_move_nothing(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    scale = torch.ones(())
    step = compiled.CapturedStep(
        posterity.compile_step(model, lambda m, x, y: loss_fn(m, x, y) * scale, opt)  # type: ignore[arg-type]
    )
    for _ in range(3):
        step(X, Y)
    before = everything(model, opt)
    for learn in (lambda: step(X, Y), opt.posterior, opt.state_dict):
        scale.fill_(1e25)  # gradients are finite, their squares are not
        step(X, Y)
        scale.fill_(1.0)
        with pytest.raises(FloatingPointError, match="not touched"):
            learn()
        assert same(before, everything(model, opt))
    step(X, Y)
    assert not torch.equal(before["last.weight"], model.last.weight)


@captured_rules
@pytest.mark.parametrize("graphs", [False, True])
def test_arrays_are_learned_from_as_tensors(rule: Rule, graphs: bool) -> None:
    def nested(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch["x"], batch["y"])

    results = []
    for arrays in (False, True):
        model = net()
        opt = rule.make(model)
        step = posterity.compile_step(model, nested, opt)
        learn = compiled.CapturedStep(step) if graphs else step  # type: ignore[arg-type]
        for _ in range(4):
            learn({"x": X.numpy() if arrays else X, "y": Y.numpy() if arrays else Y})
        assert not graphs or len(learn._graphs) == 1
        results.append(everything(model, opt))
    near(*results)
