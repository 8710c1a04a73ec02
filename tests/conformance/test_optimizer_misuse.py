"""What every rule must survive, refuse or say: freezing, foreign states and gradients, odd models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from conformance.rules import (
    ALL_WAYS,
    Rule,
    X,
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
from posterity.optim.state import members


@rules
@pytest.mark.parametrize("way", ALL_WAYS)
def test_parameter_frozen_midway_keeps_its_mean_and_is_still_sampled(
    rule: Rule, way: Callable[..., None]
) -> None:
    model = net()
    opt = rule.make(model)
    way(model, opt)
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    way(model, opt)
    assert torch.equal(before, model.first.weight)
    draws = []
    for _ in range(2):
        with opt.sampled_params():
            draws.append(model.first.weight.clone())
            loss_fn(model).backward()
        opt.zero_grad()
        by_context(model, opt)
    assert torch.equal(*draws) != rule.draws
    assert torch.equal(draws[0], before) != rule.draws


@rules
def test_frozen_model_is_refused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no gradient at sampled weights"):
        by_closure(model, opt)
    with pytest.raises(RuntimeError, match="requires a gradient: unfreeze one"):
        by_stack(model, opt)


@rules
@pytest.mark.parametrize("way", [by_closure, by_stack])
def test_a_step_in_inference_mode_is_refused_by_name(rule: Rule, way: Callable[..., None]) -> None:
    model = net()
    opt = rule.make(model)
    way(model, opt)
    before = everything(model, opt)
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"torch.inference_mode\(\) .*: take training steps outside of it"),
    ):
        way(model, opt)
    assert same(before, everything(model, opt))
    way(model, opt)


@drawing_rules
def test_no_grad_contexts_draw_fresh_networks_without_side_effects(rule: Rule) -> None:
    model, twin = net(), net()
    opt, other = rule.make(model), rule.make(twin)
    outputs = []
    for _ in range(3):
        with torch.no_grad(), opt.sampled_params():
            outputs.append(model(X))
    assert len({out.sum().item() for out in outputs}) == 3
    assert int(model.norm.num_batches_tracked) == 0
    by_context(model, opt)
    by_context(twin, other)
    assert same(everything(model, opt), everything(twin, other))


@rules
def test_loading_a_posterior_copies_it_and_starts_the_rule_afresh(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    q = opt.posterior()
    kept = {name: value.clone() for name, value in q.std().items()}
    with opt.sampled_params():
        loss_fn(model).backward()
    opt.load_posterior(q)
    assert int(opt.state[model.first.weight]["step"]) == 0
    with pytest.raises(RuntimeError, match="no gradient at sampled weights"):
        opt.step(batch_size=16)  # what was pending belonged to the posterior before
    by_closure(model, opt)
    assert same(kept, q.std())
    half = net().bfloat16()
    opt = rule.make(half)
    opt.load_posterior(q)
    assert torch.equal(opt.state[half.first.weight]["mean"], q.mean()["first.weight"])


@rules
def test_a_variational_model_is_refused(rule: Rule) -> None:
    with pytest.raises(
        TypeError, match=r"Variational has a posterior .* pass the plain model that variational"
    ):
        rule.make(posterity.variational(nn.Linear(5, 3)))


@rules
def test_a_state_of_other_parameters_is_refused_by_name(rule: Rule) -> None:
    model = net()
    state = rule.make(model, deterministic="first.*").state_dict()
    opt = rule.make(model, deterministic="last.*")
    with pytest.raises(ValueError, match=r"a group has|where this optimiser has|on one side only"):
        opt.load_state_dict(state)
    with pytest.raises(ValueError, match="the state has 2 parameter groups and this optimiser 1"):
        rule.make(model).load_state_dict(state)
    other = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"the state has '0.weight' where this optimiser has 'weight'"):
        rule.make(other[0]).load_state_dict(rule.make(other).state_dict())
    wide = nn.Linear(9, 3)
    opt = rule.make(wide)
    opt.step(lambda: wide(torch.ones(16, 9)).square().mean(), batch_size=16)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 9\) in the state, \(3, 5\) here"):
        rule.make(nn.Linear(5, 3)).load_state_dict(opt.state_dict())


@rules
def test_a_load_hook_has_the_last_word(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    state = copy.deepcopy(opt.state_dict())

    def double(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        given = copy.deepcopy(given)
        given["state"][1]["step"] += 40
        return given

    opt.register_load_state_dict_pre_hook(double)
    opt.load_state_dict(state)
    assert 41 in {int(opt.state[p]["step"]) for p in model.parameters() if "step" in opt.state[p]}


@rules
def test_calls_inside_a_context_are_refused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    q, state = opt.posterior(), opt.state_dict()
    by_context(model, opt)
    before = everything(model, opt)
    for call in (
        lambda: opt.step(batch_size=16),
        opt.posterior,
        lambda: opt.load_posterior(q),
        lambda: opt.load_state_dict(state),
    ):
        with pytest.raises(RuntimeError, match="would see sampled weights"), opt.sampled_params():
            call()
    assert same(before, everything(model, opt))


@rules
def test_gradient_before_the_first_sample_is_not_lost_silently(rule: Rule) -> None:
    for way in ALL_WAYS:
        model = net()
        opt = rule.make(model)
        way(model, opt)
        way(model, opt)  # a gradient left by our own step is fine, whatever was done to it
        loss_fn(model).backward()
        with pytest.raises(
            RuntimeError, match=r"from outside sampled_params\(\): take it inside the context, or drop"
        ):
            way(model, opt)
        opt.zero_grad()
        way(model, opt)


@rules
def test_names_are_distinct_and_a_refused_group_is_not_added(rule: Rule) -> None:
    a, b = nn.Linear(5, 3), nn.Linear(5, 3)
    with pytest.raises(ValueError, match="two parameters are named 'weight'"):
        rule.make([{"params": list(a.named_parameters())}, {"params": list(b.named_parameters())}])
    opt = rule.make(a.parameters())
    opt.add_param_group({"params": list(b.parameters())})
    assert [group["param_names"] for group in opt.param_groups] == [
        ["param.0", "param.1"],
        ["param.2", "param.3"],
    ]
    with pytest.raises(ValueError, match="lr must be 0 or more"):
        opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": -1.0})
    assert len(opt.param_groups) == 2


@tensor_rules
@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_buffers_that_forward_reads_and_writes_agree_in_all_ways(rule: Rule) -> None:
    results = []
    for way in ALL_WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)), nn.Linear(7, 3)
        ).double()
        opt = rule.make(model)
        for _ in range(3):
            way(model, opt, X.double())
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    for other in results[1:]:
        for key, value in results[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-11, msg=key)


@rules
def test_a_model_halved_after_building_gets_full_precision_means(rule: Rule) -> None:
    model = nn.Linear(5, 3)
    opt = rule.make(model)
    by_closure(model, opt)
    model.bfloat16()
    by_closure(model, opt, X.bfloat16())
    assert opt.state[model.weight]["mean"].dtype == torch.float32
    assert not torch.equal(opt.state[model.weight]["mean"], model.weight.float())


@tensor_rules
def test_odd_parameters_buffers_and_modes(rule: Rule) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.none = nn.Parameter(torch.zeros(0))
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("flat", torch.zeros(1).expand(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x + self.flat) + self.none.sum()

    results = []
    for way in ALL_WAYS:
        torch.manual_seed(0)
        model = Odd()
        opt = rule.make(model)
        with torch.inference_mode():
            opt.posterior()  # state made here must be of use later
        with torch.no_grad():
            way(model, opt) if way is not by_context else None
        way(model, opt) if way is by_context else None
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
        posterity.predict(model, opt.posterior(), X)
    for other in results[1:]:
        for key, value in results[0].items():
            torch.testing.assert_close(other[key], value, msg=key)


@rules
def test_a_refused_scaler_or_closure_does_no_lasting_harm(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    scaler = torch.amp.GradScaler("cpu")
    with opt.sampled_params():
        scaler.scale(loss_fn(model)).backward()
    with pytest.raises(RuntimeError, match="needs no scaler"):
        scaler.step(opt)
    opt.zero_grad()
    with pytest.raises(TypeError, match="the closure must return the loss, not NoneType"):
        opt.step(lambda: None, batch_size=16)
    by_closure(model, opt)


@drawing_rules
def test_a_broken_number_of_samples_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match="mc_samples must be a whole number"):
        rule.make(net(), mc_samples=2.5)


@rules
@pytest.mark.parametrize("way", ALL_WAYS)
def test_an_entry_changed_midway_is_checked_before_anything_moves(
    rule: Rule, way: Callable[..., None]
) -> None:
    model = net()
    opt = rule.make(model, deterministic="norm.*")
    way(model, opt)
    before, steps = everything(model, opt), opt.param_groups[0]["steps"]
    bad = [(opt.param_groups[0], key, value) for key, values in rule.bad.items() for value in values]
    fixed = opt.param_groups[1]
    last = ("betas", (0.9, 1.0)) if "betas" in fixed else ("consolidate_after", 0.0)
    bad += [(fixed, "lr", torch.nan), (fixed, *last)]
    for group, key, value in bad:
        if (way, key) == (by_context, "mc_samples"):
            continue  # who draws by hand counts by hand
        good, group[key] = group[key], value
        for call in (lambda: way(model, opt), opt.posterior):
            with pytest.raises(ValueError, match=f"^{key} must"):
                call()
        group[key] = good
    assert same(before, everything(model, opt))
    assert opt.param_groups[0]["steps"] == steps
    way(model, opt)
    assert not same(before, everything(model, opt))


@rules
def test_an_entry_changed_between_sample_and_step_loses_nothing(rule: Rule) -> None:
    results = []
    for bad in (False, True):
        model = net()
        opt = rule.make(model, mc_samples=1)
        with opt.sampled_params():
            loss_fn(model).backward()
        if bad:
            opt.param_groups[0]["temperature"] = torch.nan
            with pytest.raises(ValueError, match="temperature must be finite and greater than 0, not nan"):
                opt.step(batch_size=16)
            opt.param_groups[0]["temperature"] = 1.0
        opt.step(batch_size=16)
        results.append(everything(model, opt))
    assert same(*results)


@rules
def test_tensor_learning_rate_is_checked_after_an_in_place_change(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, lr=torch.tensor(0.01))
    by_closure(model, opt)
    before = everything(model, opt)
    opt.param_groups[0]["lr"].fill_(torch.inf)
    with pytest.raises(ValueError, match="lr must be 0 or more, and finite, not inf"):
        by_closure(model, opt)
    opt.param_groups[0]["lr"].fill_(0.02)
    by_closure(model, opt)
    assert not same(before, everything(model, opt))


@rules
def test_a_warm_up_of_the_temperature_may_not_start_at_zero(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    opt.param_groups[0]["temperature"] = posterity.warmup(10, start=0.0)(0)
    with pytest.raises(ValueError, match=r"temperature must be finite and greater than 0, not 0\.0"):
        by_closure(model, opt)


@rules
def test_a_state_with_entries_that_no_rule_can_use_is_refused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_closure(model, opt)
    before = everything(model, opt)
    for key, values in rule.bad.items():
        state = copy.deepcopy(opt.state_dict())
        state["param_groups"][0][key] = values[0]
        with pytest.raises(ValueError, match=f"^{key} must"):
            opt.load_state_dict(state)
    assert same(before, everything(model, opt))
    by_closure(model, opt)


@layer_rules
def test_a_state_may_have_other_numbers_for_the_whole_optimiser(rule: Rule) -> None:
    given = {"factors_every": 5} if "KFAC" in rule.name else {}
    model = net()
    state = rule.make(model, deterministic="norm.*", mc_samples=2, **given).state_dict()
    opt = rule.make(model, deterministic="norm.*")
    opt.load_state_dict(state)
    by_closure(model, opt)
    assert all(group.get("factors_every") == given.get("factors_every") for group in opt.param_groups)


@rules
def test_misspelt_entry_is_refused_but_a_custom_entry_is_not(rule: Rule) -> None:
    for key, near in (("lrr", "lr"), ("mc_sample", "mc_samples")):
        with pytest.raises(ValueError, match=f"an entry '{key}', which .* did you mean '{near}'"):
            rule.make([{"params": [torch.zeros(2, requires_grad=True)], key: 0.1}])
    rule.make([{"params": [torch.zeros(2, requires_grad=True)], "name": "head", "lr_scale": 0.5}])
    model = net()
    opt = rule.make(model, deterministic="norm.*")
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9, cycle_momentum=False)
    torch.optim.swa_utils.SWALR(opt, 0.1)
    groups = [{**group, "params": list(members(group))} for group in opt.param_groups]
    assert [each["max_lr"] for each in rule.make(groups).param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("make", [posterity.BGD, posterity.IVON, posterity.VOGN, posterity.OGN])
def test_a_std_that_a_rule_cannot_represent_is_refused(
    make: Callable[..., posterity.VariationalOptimizer],
) -> None:
    for std in (0.0, 1e-30):
        opt = make(nn.Linear(2, 1), **({} if make is posterity.BGD else {"num_data": 100}))
        leaf = posterity.DiagonalGaussian(torch.zeros(1, 2), std)
        with pytest.raises(ValueError, match=f"'weight': {make.__name__} needs a positive std"):
            opt.load_posterior(posterity.Factorised({"weight": leaf}))


@tensor_rules
def test_posterior_of_matrix_blocks_is_refused_with_advice(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    kfac = posterity.NoisyKFAC(model, num_data=16)
    by_closure(model, kfac)
    posterior, opt = kfac.posterior(), rule.make(model)
    with pytest.raises(ValueError, match=r"a block '0.weight\+0.bias' .*: load Factorised\(") as error:
        opt.load_posterior(posterior)
    way = str(error.value).partition(": load ")[2]
    opt.load_posterior(eval(way, {**vars(posterity), "posterior": posterior}))
    torch.testing.assert_close(opt.posterior().std(), dict(posterior.std()))


@rules
def test_statistics_that_overflow_are_refused(rule: Rule) -> None:
    model = nn.Linear(1, 1, bias=False)
    opt = rule.make(model, mc_samples=2 if rule.draws else 1)
    with opt.sampled_params():
        (model(torch.ones(1, 1)) * 3e38).sum().backward()
    with opt.sampled_params():
        (model(torch.ones(1, 1)) * 3e38).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert model.weight.grad is not None
    model.weight.grad.zero_()
    next(iter(opt.sums)).second.fill_(torch.inf)
    curvature = "a Kronecker factor of 'weight'" if opt.matrices else "the mean of squared gradients"
    what = curvature if rule.layers else r"E\[gradient · noise\]"
    with pytest.raises(FloatingPointError, match=f"{what} is not finite"):
        opt.step(batch_size=1 if rule.draws else 2)


@rules
def test_gradients_zeroed_in_place_are_no_gradients_from_outside(rule: Rule) -> None:
    for way in ALL_WAYS:
        model, twin = net(), net()
        opt, other = rule.make(model), rule.make(twin)
        for i in range(3):
            if i == 1:
                opt.zero_grad(set_to_none=False)
            elif i == 2:
                model.zero_grad(set_to_none=False)
            way(model, opt)
            way(twin, other)
        assert same(everything(model, opt), everything(twin, other))


@rules
def test_looking_between_clipping_and_step_undoes_nothing(rule: Rule) -> None:
    results = []
    for peek in (False, True):
        model = net()
        opt = rule.make(model, mc_samples=1)
        with opt.sampled_params():
            loss_fn(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if peek:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), opt.sampled_params():
                    model(X)
        opt.step(batch_size=16)
        results.append(everything(model, opt))
    assert same(*results)


@rules
def test_a_group_is_not_added_while_samples_wait(rule: Rule) -> None:
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    opt = rule.make(list(model[0].named_parameters()), mc_samples=1)
    with opt.sampled_params():
        loss_fn(model[0]).backward()
    with pytest.raises(RuntimeError, match="already has samples"):
        opt.add_param_group({"params": [("other", model[1].weight)]})
    opt.step(batch_size=16)
    opt.add_param_group({"params": [("other", model[1].weight)]})


@rules
@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_belong_to_the_user_until_the_step_reads_them(rule: Rule, samples: int) -> None:
    def scaled(p: nn.Parameter) -> None:
        p.grad.data.mul_(0.1)  # old code does, and no version counts it

    def replaced(p: nn.Parameter) -> None:
        p.grad = 0.1 * p.grad

    def dropped(p: nn.Parameter) -> None:
        p.grad = None

    def moved(p: nn.Parameter) -> None:
        p.data = torch.full_like(p, 0.5)

    results = {}
    for change in (None, scaled, replaced, dropped, moved):
        model = net()
        opt = rule.make(model, mc_samples=samples)
        by_context(model, opt)
        opt.zero_grad()
        for _ in range(samples):
            with opt.sampled_params():
                loss_fn(model).backward()
        held = {p: (p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None}
        if change is not None:
            held.pop(model.first.weight)
            change(model.first.weight)
        opt.step(batch_size=16 if rule.draws else 16 * samples)
        results[change] = model.first.weight.detach().clone(), model.last.weight.detach().clone()
        opt.zero_grad()
        by_context(model, opt)
        assert all(torch.equal(grad, value) for grad, value in held.values())
    first = {change: value for change, (value, _) in results.items()}
    assert torch.equal(first[scaled], first[replaced])
    assert len({tuple(value.flatten().tolist()) for value in first.values()}) == 4
    assert all(torch.equal(last, results[None][1]) for _, last in results.values())


@rules
def test_state_that_a_user_replaces_is_what_counts(rule: Rule) -> None:
    results = []
    for replace in (False, True):
        model = net()
        opt = rule.make(model)
        by_context(model, opt)
        for p in model.parameters():
            for key, value in opt.state[p].items():
                if key != "step" and replace:
                    opt.state[p][key] = 2 * value
                elif key != "step":
                    value.mul_(2)
        by_context(model, opt)
        results.append(everything(model, opt))
    assert same(*results)


@rules
def test_one_sample_is_learned_from_in_all_ways(rule: Rule) -> None:
    results = []
    for way in ALL_WAYS:
        model = net()
        opt = rule.make(model, mc_samples=1)
        for _ in range(2):
            way(model, opt)
        results.append(everything(model, opt))
        assert not torch.equal(model.first.weight, net().first.weight)
    for result in results[1:]:
        for name, value in result.items():
            torch.testing.assert_close(value, results[0][name], msg=name)


@rules
def test_evaluation_uses_buffers_set_between_steps(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    by_context(model, opt)
    model.norm.running_mean.fill_(3.0)
    with torch.no_grad(), opt.sampled_params():
        assert torch.equal(model.norm.running_mean, torch.full((7,), 3.0))


def test_the_state_of_another_kind_of_optimiser_is_refused() -> None:
    model = nn.Linear(4, 3)
    made = [
        posterity.BGD(model),
        posterity.IVON(model, num_data=8),
        posterity.VOGN(model, num_data=8),
        posterity.NoisyKFAC(model, num_data=8),
    ]
    for opt in made:
        for other in made:
            if opt is not other and set(opt.defaults) - set(other.defaults):
                with pytest.raises(ValueError, match="another kind of optimiser, or by an older version"):
                    opt.load_state_dict(other.state_dict())


def test_gradient_penalty_is_refused_by_rules_with_curvature() -> None:
    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for samples in (1, 2):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        step = posterity.compile_step(model, penalised, posterity.VOGN(model, num_data=6, mc_samples=samples))
        with pytest.raises(RuntimeError, match="create_graph"):
            step(x, y)


@rules
def test_gradients_changed_between_contexts_are_refused(rule: Rule) -> None:
    def sample() -> None:
        with opt.sampled_params():
            loss_fn(model).backward()

    model = net()
    opt = rule.make(model, mc_samples=1)
    sample()
    loss_fn(model).backward()
    with pytest.raises(RuntimeError, match="changed between two contexts of one step"):
        sample()
    opt.zero_grad()
    sample()
    model.last.bias.grad.mul_(0.0)
    with pytest.raises(RuntimeError, match=r"the gradient of 'last.bias' was changed between two contexts"):
        sample()
    opt.zero_grad()
    sample()
    model.zero_grad()  # a batch that is skipped
    sample()
    assert opt.sums.samples == 1
    opt.step(batch_size=16)


@rules
def test_a_step_after_all_gradients_were_dropped_is_refused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1)
    with opt.sampled_params():
        loss_fn(model).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="has no gradient at sampled weights"):
        opt.step(batch_size=16)
    by_context(model, opt)


@rules
def test_state_changed_between_sample_and_step_counts(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1)
    by_closure(model, opt)
    p, key = model.first.weight, {"BGD": "std", "BONG": "evidence"}.get(rule.name, "momentum")
    results = []
    for factor in (1.0, 10.0):
        twin_model, twin = copy.deepcopy((model, opt))
        with twin.sampled_params():
            loss_fn(twin_model).backward()
        twin.state[twin_model.first.weight][key].mul_(factor)
        twin.step(batch_size=16)
        results.append(twin_model.first.weight.detach().clone())
    assert not torch.equal(*results)
    with opt.sampled_params():
        loss_fn(model).backward()
    opt.state[p][key] = opt.state[p][key].clone()
    with pytest.raises(RuntimeError, match="were replaced in the middle of a step"), opt.sampled_params():
        loss_fn(model).backward()


@drawing_rules
def test_gradients_in_a_no_grad_context_are_ignored(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=2)
    with torch.no_grad(), opt.sampled_params(), torch.enable_grad():
        loss_fn(model).backward()
    assert opt.sums.samples == 0
    assert model.last.weight.grad is None
    with opt.sampled_params():
        loss_fn(model).backward()
    opt.param_groups[0]["mc_samples"] = 4
    with (
        pytest.raises(RuntimeError, match="mc_samples was changed in the middle of a step"),
        opt.sampled_params(),
    ):
        loss_fn(model).backward()


@rules
def test_copies_and_saving_inside_a_context_are_refused(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    group = {"params": [("more", torch.zeros(2, requires_grad=True))]}
    for call in (lambda: copy.deepcopy(opt), opt.state_dict, lambda: opt.add_param_group(group)):
        with pytest.raises(RuntimeError, match="would see sampled weights"), opt.sampled_params():
            call()


@rules
def test_parameter_outputs_and_other_collectors_do_no_harm(rule: Rule) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer.bias

    model = Scaled()
    opt = rule.make(model, mc_samples=1)
    for _ in range(2):
        with opt.sampled_params():
            model(X)[0].square().mean().backward()
        opt.step(batch_size=16)
    other = posterity.curvature.Squares(model)
    with pytest.raises(RuntimeError, match="nothing was collected"), opt.sampled_params(), other:
        model(X)
    with torch.inference_mode():
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    with opt.sampled_params():
        model(X)[0].square().mean().backward()
    opt.step(batch_size=16)


@rules
def test_whole_float_is_a_valid_number_of_samples(rule: Rule) -> None:
    learned = []
    for kind in (int, float):
        torch.manual_seed(0)
        model = net()
        opt = rule.make(model)
        opt.param_groups[0]["mc_samples"] = kind(opt.param_groups[0]["mc_samples"])
        opt.step(lambda model=model: loss_fn(model))
        learned.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*learned)
