"""What every rule must do, whatever its mathematics."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import posterity
from conformance.rules import (
    ALL_WAYS,
    Rule,
    X,
    Y,
    by_chunks,
    by_closure,
    by_context,
    by_stack,
    drawing_rules,
    everything,
    layer_rules,
    loss_fn,
    net,
    rules,
    same,
    tensor_rules,
)
from posterity import VariationalOptimizer


@rules
def test_a_step_moves_means_and_stds_but_not_what_was_unused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    before = everything(model, opt)
    by_closure(model, opt)
    after = everything(model, opt)
    for name in ("first.weight", "last.bias"):
        assert not torch.equal(before[name], after[name])
        assert not torch.equal(before[f"std {name}"], after[f"std {name}"])
    assert torch.equal(before["unused"], after["unused"])
    assert torch.equal(before["std unused"], after["std unused"])


@rules
@pytest.mark.parametrize("way", [by_context, by_stack, by_chunks])
def test_all_ways_of_running_a_step_agree(rule: Rule, way: Callable[..., None]) -> None:
    results = []
    for run in (by_closure, way):
        model = net().double()
        opt = rule.make(model, deterministic="norm.*")
        for _ in range(5):
            run(model, opt, X.double())
        results.append(everything(model, opt))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-10, atol=1e-12, msg=key)


@rules
def test_a_closure_may_call_backward_itself(rule: Rule) -> None:
    results = []
    for calls_backward in (False, True):
        model = net()
        opt = rule.make(model)

        def closure(
            model: nn.Module = model, opt: VariationalOptimizer = opt, it: bool = calls_backward
        ) -> Tensor:
            opt.zero_grad()
            loss = loss_fn(model)
            if it:
                loss.backward()
            return loss

        loss = opt.step(closure, batch_size=16)
        assert loss is not None
        assert loss.shape == ()
        results.append(everything(model, opt))
    assert same(*results)


@rules
def test_a_closure_may_sample_itself_but_not_in_a_loop(rule: Rule) -> None:
    results = []
    for nested in (False, True):
        model = net()
        opt = rule.make(model)

        def closure(model: nn.Module = model, opt: VariationalOptimizer = opt, it: bool = nested) -> Tensor:
            if not it:
                return loss_fn(model)
            with opt.sampled_params():
                loss = loss_fn(model)
                loss.backward()
            return loss

        opt.step(closure, batch_size=16)
        results.append(everything(model, opt))
    assert same(*results)

    def loops() -> Tensor:
        for _ in range(2):
            with opt.sampled_params():
                loss = loss_fn(model)
        return loss

    before = everything(model, opt)
    with pytest.raises(RuntimeError, match="set mc_samples instead of a loop"):
        opt.step(loops, batch_size=16)
    assert same(before, everything(model, opt))


@rules
def test_the_means_come_back_after_an_exception(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    before = everything(model, opt)
    with pytest.raises(KeyError), opt.sampled_params():
        assert torch.equal(model.first.weight, before["first.weight"]) != rule.draws
        loss_fn(model).backward()
        raise KeyError

    def fails() -> Tensor:
        loss_fn(model).backward()
        raise KeyError

    with pytest.raises(KeyError):
        opt.step(fails, batch_size=16)
    assert same(before, everything(model, opt))
    by_closure(model, opt)  # and training goes on
    assert not same(before, everything(model, opt))


@rules
@pytest.mark.parametrize("when", ["start", "middle"])
def test_resume_is_bit_exact(rule: Rule, when: str) -> None:
    model = net()
    opt = rule.make(model, deterministic="norm.*")
    for _ in range(3 if when == "middle" else 0):
        by_closure(model, opt)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    by_closure(model, opt)
    by_closure(model, opt)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net(seed=9)
    resumed = rule.make(other, deterministic="norm.*", seed=77, mc_samples=1)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    by_closure(other, resumed)
    by_closure(other, resumed)
    assert same(everything(model, opt), everything(other, resumed))


@rules
def test_loading_state_never_casts_it(rule: Rule) -> None:
    model = net().to(torch.bfloat16)
    opt = rule.make(model)
    opt.step(lambda: loss_fn(model, X.bfloat16()), batch_size=16)
    other = net().to(torch.bfloat16)
    resumed = rule.make(other)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in opt.state[p].items():
            assert value.dtype == (torch.int64 if key == "step" else torch.float32)
            assert resumed.state[q][key].dtype == value.dtype
            assert torch.equal(resumed.state[q][key], value)
            assert resumed.state[q][key] is not value


@rules
def test_clipping_is_seen(rule: Rule) -> None:
    results = []
    for clip in (False, True):
        model = net()
        opt = rule.make(model, mc_samples=1, max_step=math.inf)  # else both move as far as they may
        with opt.sampled_params():
            loss_fn(model).backward()
        assert model.first.weight.grad is not None
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        opt.step(batch_size=16)
        results.append(everything(model, opt))
    start = net().state_dict()
    moved = [float((r["last.weight"] - start["last.weight"]).abs().max()) for r in results]
    assert moved[1] < (moved[0] / 10 if rule.streams else moved[0])
    # Clipping changes E[g] alone: the stds come from E[g·eps] or from squares.
    assert torch.equal(results[0]["std last.weight"], results[1]["std last.weight"])


@drawing_rules
def test_first_samples_buffers_are_kept_over_all_chunks(rule: Rule) -> None:
    results = []
    for chunk in (None, 2):  # two stacks of two samples each
        model = net()
        by_stack(model, rule.make(model, mc_samples=4), chunk=chunk)
        results.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)


@rules
def test_gradients_may_be_replaced_or_changed_in_place(rule: Rule) -> None:
    results = []
    for replaced in (False, True):
        model = net()
        opt = rule.make(model)
        for _ in range(opt.param_groups[0]["mc_samples"]):
            with opt.sampled_params():
                loss_fn(model).backward()
        for p in model.parameters():
            if p.grad is not None and replaced:
                p.grad = 0.5 * p.grad
            elif p.grad is not None:
                p.grad.mul_(0.5)
        opt.step(batch_size=16)
        results.append(everything(model, opt))
    assert same(*results)


@rules
def test_grad_holds_the_mean_over_samples(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    singles = []
    for _ in range(3):
        with opt.sampled_params():
            loss_fn(model).backward()
            assert model.last.weight.grad is not None
            singles.append(model.last.weight.grad.clone())
    torch.testing.assert_close(
        model.last.weight.grad, torch.stack(singles).sum(0) / opt.param_groups[0]["mc_samples"]
    )
    assert torch.equal(singles[0], singles[1]) != rule.draws  # fresh weights for every sample


@rules
def test_backwards_in_one_context_add_up(rule: Rule) -> None:
    results = []
    for halves in (1, 2):
        model = nn.Linear(5, 3)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        opt = rule.make(model, mc_samples=1)
        with opt.sampled_params():
            for x, y in zip(X.chunk(halves), Y.chunk(halves), strict=True):
                (F.cross_entropy(model(x), y) / halves).backward()
        opt.step(batch_size=16)
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results)


@drawing_rules
def test_zero_grad_inside_and_outside_a_context(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    for _ in range(3):
        with opt.sampled_params():
            opt.zero_grad()
            loss_fn(model).backward()
    opt.step(batch_size=16)
    other = net()
    twin = rule.make(other)
    by_context(other, twin)
    assert same(everything(model, opt), everything(other, twin))
    with opt.sampled_params():
        loss_fn(model).backward()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="no gradient at sampled weights"):
        opt.step(batch_size=16)


@rules
def test_the_untouched_loop_is_told_which_line_to_add(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    before = everything(model, opt)
    loss_fn(model).backward()
    buffers = everything(model, opt)
    with pytest.raises(RuntimeError, match=r"put `with optimizer.sampled_params\(\):` around forward"):
        opt.step(batch_size=16)
    assert same(buffers, everything(model, opt))
    assert torch.equal(before["last.weight"], model.last.weight)


@rules
def test_a_gradient_from_outside_is_refused_before_anything_moves(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1)
    with opt.sampled_params():
        loss_fn(model).backward()
    model.unused.sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"'unused' has a gradient from outside"):
        opt.step(batch_size=16)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@rules
@pytest.mark.parametrize("way", [by_closure, by_context, by_stack])
def test_nan_is_refused_and_nothing_touched(rule: Rule, way: Callable[..., None]) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    before = everything(model, opt)
    bad = X.clone()
    bad[3, 2] = torch.nan
    with pytest.raises(FloatingPointError, match="not touched"):
        way(model, opt, bad)
    assert same(before, everything(model, opt))
    twin_model = copy.deepcopy(model)
    by_closure(model, opt)  # goes on as if the bad batch had never been
    assert torch.isfinite(model.last.weight).all()
    assert not torch.equal(model.last.weight, twin_model.last.weight)


@rules
def test_an_infinite_gradient_is_refused_by_name(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1)
    with opt.sampled_params():
        loss_fn(model).backward()
    assert model.last.bias.grad is not None
    model.last.bias.grad[0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"gradient of 'last.bias' is not finite"):
        opt.step(batch_size=16)


@rules
@pytest.mark.parametrize("way", [by_closure, by_stack])
def test_a_loss_that_runs_away_is_warned_of_once(rule: Rule, way: Callable[..., None]) -> None:
    model = net()
    opt = rule.make(model, lr=0.0)
    way(model, opt)
    with torch.no_grad():
        model.last.weight.mul_(1e4)
    for _ in range(16):
        way(model, opt)
    with pytest.warns(
        posterity.DivergenceWarning,
        match=f"{rule.name} seems to diverge: the loss began at .*; lower lr, or {rule.make(net()).narrower}",
    ):
        way(model, opt)
    way(model, opt)  # a second warning would be an error here


@rules
def test_batch_norm_moves_once_per_step(rule: Rule) -> None:
    for way in (by_closure, by_context, by_stack, by_chunks):
        model = net()
        opt = rule.make(model)
        one = rule.make(twin := net(), mc_samples=1)
        way(model, opt)
        by_closure(twin, one)
        assert int(model.norm.num_batches_tracked) == 1
        # Sample 0 is the same in both; its statistics are the ones that are kept.
        torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)


@rules
def test_the_global_generator_is_untouched(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    state = torch.get_rng_state()
    by_closure(model, opt)
    by_stack(model, opt)
    opt.posterior().sample(2)
    posterity.predict(model, opt.posterior(), X)
    assert torch.equal(state, torch.get_rng_state())


@drawing_rules
def test_noise_depends_on_seed_step_and_sample_only(rule: Rule) -> None:
    draws = {}
    for seed in (0, 0, 1):
        model = net()
        opt = rule.make(model, seed=seed, mc_samples=2)
        for step in range(2):
            for sample in range(2):
                mean, std = model.first.weight.detach().clone(), opt.posterior().std()["first.weight"]
                with opt.sampled_params():
                    eps = (model.first.weight.detach() - mean) / std
                    loss_fn(model).backward()
                key = (seed, step, sample)
                torch.testing.assert_close(draws.setdefault(key, eps), eps)
            opt.step(batch_size=16)
    distinct = list(draws.values())
    assert len(distinct) == 8
    # Different noise, not the same noise on other means: correlations of 35 numbers, five standard errors.
    assert all(abs((a * b).mean()) < 5 / 35**0.5 for i, a in enumerate(distinct) for b in distinct[:i])


@rules
def test_dtypes_are_kept_and_state_is_full_precision(rule: Rule) -> None:
    model = net()
    model.first.to(torch.bfloat16)
    model.last.double()
    opt = rule.make(model)

    def closure() -> Tensor:
        hidden = F.relu(model.norm(model.first(X.bfloat16()).float()))
        return F.cross_entropy(model.last(hidden.double()), Y)

    for _ in range(2):
        opt.step(closure, batch_size=16)
    assert model.first.weight.dtype == torch.bfloat16
    assert opt.state[model.first.weight]["mean"].dtype == torch.float32
    assert torch.equal(opt.state[model.first.weight]["mean"].bfloat16(), model.first.weight)
    assert not torch.equal(opt.state[model.first.weight]["mean"], model.first.weight.float())
    q = opt.posterior()
    assert q.std()["first.weight"].dtype == torch.float32
    assert q.std()["last.weight"].dtype == torch.float64


@rules
def test_bf16_autocast_keeps_fp32_state(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt.step(lambda: loss_fn(model), batch_size=16)
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert all(value.dtype == torch.float32 for key, value in opt.state[p].items() if key != "step")


@rules
def test_param_groups_and_schedules_reach_the_rule(rule: Rule) -> None:
    model = net()
    named = list(model.named_parameters())
    opt = rule.make(
        [
            {"params": [(n, p) for n, p in named if n.startswith("first")], "lr": 0.0},
            {"params": [(n, p) for n, p in named if not n.startswith("first")]},
        ]
    )
    before = {name: p.detach().clone() for name, p in named}
    by_context(model, opt)
    assert torch.equal(before["first.weight"], model.first.weight)
    assert not torch.equal(before["last.weight"], model.last.weight)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.0 if epoch else 1.0)
    by_context(model, opt)
    scheduler.step()
    stopped = model.last.weight.detach().clone()
    by_context(model, opt)
    assert torch.equal(stopped, model.last.weight)


@rules
def test_named_parameters_and_bare_tensors_will_do(rule: Rule) -> None:
    model = nn.Linear(5, 3)
    opt = rule.make(model.named_parameters())
    opt.step(lambda: loss_fn(model), batch_size=16)
    assert set(opt.posterior().mean()) == {"weight", "bias"}
    opt = rule.make(model.parameters())
    opt.step(lambda: loss_fn(model), batch_size=16)
    with pytest.raises(ValueError, match=r"'param.0', but the model has no such parameter"):
        posterity.predict(model, opt.posterior(), X)


@rules
def test_a_state_without_names_loads_where_parameters_have_them(rule: Rule) -> None:
    model = nn.Linear(5, 3)
    unnamed = rule.make(model.parameters())
    unnamed.step(lambda: loss_fn(model), batch_size=16)
    opt = rule.make(model)
    opt.load_state_dict(unnamed.state_dict())
    q = opt.posterior()
    assert list(q.mean()) == ["weight", "bias"]
    assert all(map(torch.equal, q.std().values(), unnamed.posterior().std().values()))
    posterity.predict(model, q, X)
    with pytest.raises(ValueError, match=r"the state has 'weight' where this optimiser has 'param.0'"):
        unnamed.load_state_dict(opt.state_dict())


@tensor_rules
def test_deterministic_parameters_learn_without_noise(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, deterministic=posterity.names_of(model, nn.BatchNorm1d), deterministic_lr=0.01)
    before = model.norm.weight.detach().clone()
    with opt.sampled_params():
        assert torch.equal(model.norm.weight, before)
        assert not torch.equal(model.last.weight, net().last.weight)
    by_closure(model, opt)
    # Adam's first step has the size of its learning rate.
    torch.testing.assert_close((model.norm.weight - before).abs(), torch.full((7,), 0.01), rtol=1e-3, atol=0)
    assert not any(name.startswith("norm") for name in opt.posterior().blocks)


@tensor_rules
def test_deterministic_parameters_follow_torch_adam(rule: Rule) -> None:
    model, twin = net(), net()
    opt = rule.make(model, deterministic="*", deterministic_lr=0.01)
    adam = torch.optim.Adam(twin.parameters(), lr=0.01)
    for _ in range(10):
        by_closure(model, opt)
        adam.zero_grad()
        loss_fn(twin).backward()
        adam.step()
    torch.testing.assert_close(model.last.weight, twin.last.weight, rtol=1e-4, atol=1e-6)


@layer_rules
def test_a_rule_of_layers_trains_deterministic_parameters_itself(rule: Rule) -> None:
    model = net()
    prior = {} if rule.streams else {"prior_precision": 5.0}
    groups = [{"params": list(model.named_parameters()), "lr": 0.03, **prior}]
    opt = rule.make(groups, deterministic="norm.*", max_step=math.inf)
    drawn, fixed = opt.param_groups
    assert (fixed["lr"], drawn["lr"]) == (0.03, 0.03)
    for key in prior:
        assert (fixed[key], drawn[key]) == (0.0, 5.0)
    before = model.norm.weight.detach().clone()
    with opt.sampled_params():
        assert torch.equal(model.norm.weight, before)
    by_closure(model, opt)
    assert opt.state[model.norm.weight].keys() == opt.state[model.last.bias].keys()
    state = opt.state[model.norm.weight]
    rate = (
        0.03 / state["evidence"]
        if rule.streams
        else 0.03 * fixed["lr_unit"] / (state["hess"] + fixed["damping"])
    )
    torch.testing.assert_close(model.norm.weight, before - rate * model.norm.weight.grad)
    assert not any(name.startswith("norm") for name in opt.posterior().blocks)
    if rule.streams:
        return
    with pytest.raises(ValueError, match="damping must be greater than 0 if prior_precision is 0"):
        rule.make(net(), deterministic="norm.*", damping=0.0)


@layer_rules
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_a_rule_of_layers_refuses_weights_that_are_used_otherwise(
    rule: Rule, way: Callable[..., None]
) -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)), nn.Linear(7, 3))
    name, reason = "0.parametrizations.weight.original", "is used by an operation that is not a known layer"
    opt = rule.make(model)
    before = everything(model, opt)
    with pytest.raises(
        RuntimeError, match=f"'{name}' {reason}, so {rule.name} has no per-example .* or freeze it"
    ):
        way(model, opt)
    assert same(before, everything(model, opt))
    opt.step(lambda layer=model[-1]: layer(torch.ones(16, layer.in_features)).square().mean())


@layer_rules
def test_tied_weights_learn_in_all_ways_alike(rule: Rule) -> None:
    results = []
    for way in ALL_WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
        model[2].weight = model[0].weight
        opt = rule.make(model)
        for _ in range(2):
            way(model, opt)
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


@rules
def test_a_pattern_that_matches_nothing_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"no parameter is named like 'batchnorm\*'; the names are 'unused'"):
        rule.make(net(), deterministic="batchnorm*")


@rules
def test_bad_hyper_parameters_are_refused_by_name(rule: Rule) -> None:
    for key, values in rule.bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{key} must"):
                rule.make(net(), **{key: value})
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        rule.make(nn.ReLU())
    with pytest.raises(ValueError, match="empty list"):
        rule.make([])
    with pytest.raises(TypeError, match="not a single tensor"):
        rule.make(torch.zeros(2, requires_grad=True))
    with pytest.raises(TypeError, match="only real floating-point weights"):
        rule.make([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(ValueError, match="one number for the whole optimiser"):
        rule.make([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2)], "mc_samples": 5}])


@rules
def test_sparse_gradients_are_refused(rule: Rule) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    opt = rule.make(model)
    before = model.weight.detach().clone()
    with pytest.raises(TypeError, match="sparse=False"), opt.sampled_params():
        model(torch.tensor([1])).sum().backward()
    assert torch.equal(before, model.weight)


@rules
def test_forward_pass_without_backward_does_not_count(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    with opt.sampled_params(), torch.no_grad():
        model(X)
    model.load_state_dict(net().state_dict())
    by_context(model, opt)
    other = net()
    twin = rule.make(other)
    by_context(other, twin)
    assert same(everything(model, opt), everything(other, twin))


@rules
def test_the_posterior_is_a_copy(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    q = opt.posterior()
    before = {name: value.clone() for name, value in (q.mean() | {"s": q.std()["last.weight"]}).items()}
    by_closure(model, opt)
    assert same(before, q.mean() | {"s": q.std()["last.weight"]})


@rules
def test_going_on_from_a_pruned_posterior_keeps_zeros(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    pruned = posterity.prune(opt.posterior(), 0.5)
    fresh = net(seed=3)
    opt = rule.make(fresh)
    opt.load_posterior(pruned)
    kept = pruned.kept()["first.weight"]
    assert not kept.all()
    torch.testing.assert_close(opt.posterior().std()["first.weight"], pruned.std()["first.weight"])
    for way in (by_closure, by_stack):
        way(fresh, opt)
        with opt.sampled_params():
            assert not fresh.first.weight[~kept].any()
        assert not fresh.first.weight[~kept].any()
        assert fresh.first.weight[kept].all()
        assert not opt.posterior().std()["first.weight"][~kept].any()
    with pytest.raises(ValueError, match=r"'w' that this optimiser does not have"):
        opt.load_posterior(posterity.Factorised({"w": posterity.DiagonalGaussian(torch.zeros(1), 1.0)}))
    with pytest.raises(ValueError, match=r"'first.weight' has shape \(2,\) in the posterior and \(7, 5\)"):
        opt.load_posterior(
            posterity.Factorised({"first.weight": posterity.DiagonalGaussian(torch.zeros(2), 1.0)})
        )


class Reader(nn.Module):
    """Texts of three words and much padding, whose row is not zero, as BERT's is not."""

    words = torch.cat([torch.randint(1, 6, (16, 3)), torch.full((16, 9), 5)], 1)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4, padding_idx=-1)
        nn.init.normal_(self.embed.weight)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(self.words).mean(1))


@rules
@pytest.mark.parametrize("zero", [False, True])
def test_a_padding_row_is_certain_and_stays(rule: Rule, zero: bool, tmp_path) -> None:
    model = Reader()
    if zero:  # as torch initialises it
        nn.init.zeros_(model.embed.weight[5])
    row = model.embed.weight[5].detach().clone()

    def certain(q: posterity.Factorised) -> None:
        assert torch.equal(q.mean()["embed.weight"][5], row)
        assert not q.std()["embed.weight"][5].any()
        assert q.std()["embed.weight"][:5].all()
        assert torch.equal(q.sample(3)["embed.weight"][:, 5], row.expand(3, -1))
        assert math.isfinite(posterity.kl(q, posterity.IsotropicGaussian()))

    opt = rule.make(model)
    certain(opt.posterior())
    for way in ALL_WAYS:
        way(model, opt)
        assert torch.equal(model.embed.weight[5], row)
    with opt.sampled_params():
        assert torch.equal(model.embed.weight[5], row)
    q = opt.posterior()
    certain(q)
    q.save(tmp_path / "q")
    certain(posterity.Factorised.load(tmp_path / "q", model))
    assert torch.equal(posterity.prune(q, 0.3).sample(1)["embed.weight"][0, 5], row)
    again = rule.make(model)
    again.load_state_dict(opt.state_dict())
    by_stack(model, again)
    certain(again.posterior())
    for other in (posterity.BGD(model), posterity.BGD(list(model.named_parameters()))):
        if rule.captures:  # K-FAC's blocks have several tensors
            other.load_posterior(q)
            other.step(lambda: loss_fn(model), batch_size=16)
            certain(other.posterior())


@rules
def test_a_padding_row_that_an_output_layer_uses_too_learns(rule: Rule) -> None:
    model = Reader()
    model.head = nn.Linear(4, 6, bias=False)
    model.head.weight = model.embed.weight
    row = model.embed.weight[5].detach().clone()
    opt = rule.make(model)
    by_closure(model, opt)
    assert opt.posterior().std()["embed.weight"][5].all()
    assert not torch.equal(model.embed.weight[5], row)


@rules
def test_deep_copy_of_model_and_optimiser_continues_identically(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, deterministic="norm.*")
    by_closure(model, opt)
    twin_model, twin = copy.deepcopy((model, opt))
    for way in (by_closure, by_stack):
        way(model, opt)
        way(twin_model, twin)
    assert same(everything(model, opt), everything(twin_model, twin))
    assert int(twin_model.norm.num_batches_tracked) == 3


@tensor_rules
def test_tied_weights_are_one_block(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    opt = rule.make(model)
    assert list(opt.posterior().blocks) == ["0.weight", "2.weight", "2.bias"]
    results = []
    for way in (by_closure, by_stack):
        twin = copy.deepcopy(model)
        opt = rule.make(twin)
        way(twin, opt)
        assert twin[1].weight is twin[0].weight
        results.append(twin[0].weight.detach().clone())
    torch.testing.assert_close(*results)


def test_bgd_needs_a_batch_size_and_says_so_before_running() -> None:
    model = net()
    opt = posterity.BGD(model.parameters())
    called = []
    with pytest.raises(ValueError, match=r"pass step\(..., batch_size=len\(x\)\)"):
        opt.step(lambda: called.append(1) or loss_fn(model))
    assert not called


@drawing_rules
@pytest.mark.parametrize("way", [by_closure, by_context])
def test_samples_have_weights_of_their_own_under_one_autocast(rule: Rule, way: Callable[..., None]) -> None:
    """It remembers what it has cast until it ends."""
    results = []
    for outside in (False, True):
        model = net()
        opt = rule.make(model, deterministic="norm.*")
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            for _ in range(2):
                if outside:
                    way(model, opt)
                else:
                    for _ in range(opt.param_groups[0]["mc_samples"]):
                        with opt.sampled_params():
                            with torch.autocast("cpu", torch.bfloat16):
                                loss = loss_fn(model)
                            loss.backward()
                    opt.step(batch_size=16)
        results.append(everything(model, opt))
    assert same(*results)


@drawing_rules
def test_what_autocast_has_cast_before_is_not_used_after_a_change(rule: Rule) -> None:
    def output() -> Tensor:
        return model(X).detach()

    model = net().eval()
    opt = rule.make(model, mc_samples=1, deterministic="norm.*")  # which autocast does not cast
    with torch.autocast("cpu", torch.bfloat16):
        mean = output()
        with opt.sampled_params():
            assert not torch.equal(output(), mean)
            loss_fn(model).backward()
        assert torch.equal(output(), mean)
        opt.step(batch_size=16)
        moved = output()
    assert not torch.equal(moved, mean)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output(), moved)


class Checkpointed(nn.Module):
    """Runs its layers again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.again = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.again else self.layers(x)


@tensor_rules
@pytest.mark.parametrize(
    ("samples", "way"), [(1, by_stack), (3, partial(by_stack, chunk=1)), (3, by_closure), (3, by_context)]
)
def test_layers_that_run_again_have_the_weights_of_the_sample(
    rule: Rule, samples: int, way: Callable[..., None]
) -> None:
    results = []
    for again in (False, True):
        model = Checkpointed(again)
        opt = rule.make(model, mc_samples=samples)
        for _ in range(2):
            way(model, opt)
        results.append(everything(model, opt))
    assert same(*results)


def test_a_stack_of_samples_does_not_run_again_in_silence() -> None:
    model = Checkpointed(True)
    opt = posterity.BGD(model, mc_samples=3)
    with pytest.raises(CheckpointError):
        by_stack(model, opt)


@rules
def test_what_is_pruned_does_not_move(rule: Rule) -> None:
    """Its std is nobody's, and would go wherever it likes."""
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    opt.load_posterior(posterity.prune(opt.posterior(), 0.5))
    kept = opt.state[model.first.weight]["keep"]
    assert 0 < kept.sum() < kept.numel()

    def values() -> dict[str, Tensor]:
        state = opt.state[model.first.weight]
        return {key: value.clone() for key, value in state.items() if value.shape == kept.shape}

    before = values()
    for _ in range(3):
        by_closure(model, opt)
    for key, value in values().items():
        if rule.captures:  # a matrix moves as a whole
            assert torch.equal(value[~kept], before[key][~kept]), key
        if key not in ("keep", "known", "prior_mean", "start", "unit"):
            assert not torch.equal(value[kept], before[key][kept]), key
    assert not model.first.weight[~kept].any()


@drawing_rules
def test_seeds_may_be_numpys(rule: Rule) -> None:
    results = []
    for seed in (3, np.int64(3)):
        model = net()
        opt = rule.make(model, seed=seed)
        by_closure(model, opt)
        results.append(everything(model, opt))
    assert same(*results)


@tensor_rules
def test_weights_loaded_into_a_half_precision_model_count(rule: Rule) -> None:
    model = net().bfloat16()
    opt = rule.make(model)
    by_closure(model, opt, X.bfloat16())
    model.float()
    with torch.no_grad():
        model.last.weight.fill_(5.0)
    assert (opt.posterior().mean()["last.weight"] == 5.0).all()
    by_closure(model, opt)
    assert (model.last.weight > 4.0).all()


def test_one_batch_has_one_size() -> None:
    layers = [dict(layer.named_parameters()) for layer in (nn.Linear(2, 2), nn.Linear(2, 2))]
    groups = [
        {"params": [(f"{i}.{name}", p) for name, p in each.items()], "batch_size": 8 * (i + 1)}
        for i, each in enumerate(layers)
    ]
    with pytest.raises(ValueError, match="batch_size must be one number for the whole optimiser"):
        posterity.BGD(groups)
