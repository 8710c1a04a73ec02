"""Backwards add, inside a context and across contexts; the sum is divided by ``mc_samples``."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance.rules import (
    RULES,
    Rule,
    X,
    Y,
    by_context,
    everything,
    layer_rules,
    loss_fn,
    net,
    rules,
    same,
)
from posterity import VariationalOptimizer
from posterity.optim.entries import constructor


def plain(seed: int = 0) -> nn.Module:
    """Without BatchNorm, whose statistics are those of micro-batches."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def sharp(rule: Rule, model: nn.Module, **more: object) -> VariationalOptimizer:
    """With weights so certain that all samples are the mean, to rounding; a bound in stds would hold them."""
    # A step of BGD is as short as its variance.
    own: dict[str, object] = (
        {"std_init": 1e-7, "lr": 1e12 if rule.name == "BGD" else 0.1} if rule.streams else {}
    )
    # The Hessian of IVON is estimated from noise over its std, which is no small number.
    own |= {"betas": (0.9, 1 - 1e-14), "lr": 0.1} if rule.name == "IVON" else {}
    own |= {} if rule.streams else {"num_data": 10**16, "damping" if rule.layers else "hess_init": 0.1}
    return rule.make(model, max_step=math.inf, **own, **more)


def learn(rule: Rule, contexts: str, opt: VariationalOptimizer, model: nn.Module) -> dict[str, Tensor]:
    x, halves = X.double(), 2
    for _ in range(3):
        for _ in range(opt.param_groups[0]["mc_samples"]):
            if contexts == "whole":
                with opt.sampled_params():
                    F.cross_entropy(model(x), Y).backward()
            elif contexts == "one":
                with opt.sampled_params():
                    for a, b in zip(x.chunk(halves), Y.chunk(halves), strict=True):
                        (F.cross_entropy(model(a), b) / halves).backward()
            else:
                for a, b in zip(x.chunk(halves), Y.chunk(halves), strict=True):
                    with opt.sampled_params():
                        (F.cross_entropy(model(a), b) / halves).backward()
        opt.step(batch_size=16)
    state = {
        f"{name} {key}": value for name, p in model.named_parameters() for key, value in opt.state[p].items()
    }
    return {**everything(model, opt), **{key: value.clone() for key, value in state.items()}}


def bounded(found: dict[str, Tensor], free: dict[str, Tensor]) -> bool:
    """Whether a bound on steps has had a part in what was found."""
    return not torch.allclose(found["2.weight"], free["2.weight"], rtol=1e-4)


@rules
@pytest.mark.parametrize("mc_samples", [1, 2])
def test_micro_batches_in_one_context_equal_the_whole_batch(rule: Rule, mc_samples: int) -> None:
    """They have the same weights, so that it holds at any std and under any bound on steps."""
    if mc_samples > 1 and not rule.draws:
        pytest.skip("it draws nothing")
    found = {}
    for contexts, settings in (("whole", {}), ("one", {}), ("free", {"max_step": math.inf})):
        model = plain()
        opt = rule.make(model, mc_samples=mc_samples, **settings)
        found[contexts] = learn(rule, "one" if contexts == "one" else "whole", opt, model)
    assert bounded(found["whole"], found["free"])
    for key, value in found["whole"].items():
        torch.testing.assert_close(found["one"][key], value, rtol=1e-9, atol=1e-12, msg=key)


@rules
@pytest.mark.parametrize("mc_samples", [1, 2])
def test_micro_batches_in_separate_contexts_equal_the_whole_batch(rule: Rule, mc_samples: int) -> None:
    if mc_samples > 1 and not rule.draws:
        pytest.skip("it draws nothing")
    found = {}
    for contexts in ("whole", "each"):
        model = plain()
        found[contexts] = learn(rule, contexts, sharp(rule, model, mc_samples=mc_samples), model)
    start = dict(plain().named_parameters())
    assert not torch.allclose(found["whole"]["2.bias"], start["2.bias"], rtol=5e-3)
    for key, value in found["whole"].items():
        # Weights are drawn within a few millionths of their means.
        torch.testing.assert_close(found["each"][key], value, rtol=1e-3, atol=1e-6, msg=key)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.draws], ids=repr)
def test_bounded_steps_at_the_means_are_those_of_the_whole_batch(rule: Rule) -> None:
    found = {}
    for contexts, settings in (("whole", {}), ("each", {}), ("free", {"max_step": math.inf})):
        model = plain()
        found[contexts] = learn(
            rule, "each" if contexts == "each" else "whole", rule.make(model, **settings), model
        )
    assert bounded(found["whole"], found["free"])
    for key, value in found["whole"].items():
        torch.testing.assert_close(found["each"][key], value, rtol=1e-9, atol=1e-12, msg=key)


@rules
def test_ragged_micro_batches_count_by_their_examples(rule: Rule) -> None:
    results = []
    for cuts in ([16], [12, 4]):
        model = plain()
        opt = sharp(rule, model, mc_samples=1)
        for x, y in zip(X.double().split(cuts), Y.split(cuts), strict=True):
            with opt.sampled_params():
                (F.cross_entropy(model(x), y) * len(x) / 16).backward()
        opt.step(batch_size=16)
        results.append(everything(model, opt))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-4, atol=1e-9, msg=key)


def test_step_with_missing_samples_is_refused() -> None:
    model, twin = net(), net()
    opt, other = (posterity.BGD(each, mc_samples=3, batch_size=16, seed=0) for each in (model, twin))
    for _ in range(2):
        with opt.sampled_params():
            loss_fn(model).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"averages mc_samples=3 weight samples and has 2: enter sampled_"):
        opt.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with opt.sampled_params():
        loss_fn(model).backward()
    opt.step()
    by_context(twin, other)
    assert same(everything(model, opt), everything(twin, other))


@rules
def test_backward_after_the_context_raises_with_advice(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with opt.sampled_params():
        loss = loss_fn(model)
    with pytest.raises(RuntimeError, match=r"after (sampled_params\(\)|the context).* had ended.*: call"):
        loss.backward()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    opt.zero_grad()
    by_context(model, opt)
    assert not model._forward_hooks


@rules
def test_entries_of_torch_optimizers_are_refused_with_ours(rule: Rule) -> None:
    p = [torch.zeros(2, requires_grad=True)]
    ours = {
        "weight_decay": "leave it out" if rule.streams else "set prior_precision, weight_decay · num_data",
        "momentum": "leave it out" if rule.streams else "set betas",
        "eps": "set damping" if rule.layers and not rule.streams else "leave it out",
        "nesterov": "leave it out",
    }
    for key, use in ours.items():
        with pytest.raises(ValueError, match=f"an entry '{key}', which {rule.name} does not use: {use}"):
            rule.make([{"params": p, key: 0.1}])
        with pytest.raises(TypeError, match=f"{rule.name} has no {key}: {use}"):
            rule.make(p, **{key: 0.1})


@rules
def test_a_missing_setting_and_a_misspelt_one_are_named(rule: Rule) -> None:
    made = type(rule.make(net(), deterministic="norm.*"))
    with pytest.raises(TypeError, match=f"^{rule.name} has no mc_sample: did you mean 'mc_samples'"):
        rule.make(net(), mc_sample=3)
    with pytest.raises(TypeError, match=f"^{rule.name} has no colour: see its docstring"):
        rule.make(net(), colour=3)
    if not rule.streams:
        with pytest.raises(TypeError, match=f"^{rule.name} needs num_data, the number of training examples"):
            made(net())


def test_custom_rule_requires_settings_without_default() -> None:
    class Own:
        @constructor
        def __init__(self, module: nn.Module, *, rate: float) -> None:
            self.rate = rate

    with pytest.raises(TypeError, match=r"^Own needs rate, which has no default$"):
        Own(net())
    assert Own(net(), rate=1.0).rate == 1.0


@rules
def test_prefixes_of_wrappers_are_no_part_of_names(rule: Rule) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.module(x)
            return out

    model = plain()
    opt = rule.make(Wrapper(model))
    assert set(opt.posterior().mean()) == {name for name, _ in model.named_parameters()}
    bare = rule.make(model.parameters())
    named = bare.posterior(Wrapper(model))
    assert set(named.mean()) == set(opt.posterior().mean())
    posterity.predict(model, named, X.double())
    with pytest.raises(ValueError, match=r"'param.0' is not a parameter of the model"):
        bare.posterior(plain())


@rules
def test_state_is_made_of_tensors_of_its_own(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, deterministic="norm.*")
    by_context(model, opt)
    for p in model.parameters():
        for key, value in opt.state[p].items():
            assert value._base is None, key
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), key
    file = io.BytesIO()
    torch.save(opt.state[model.norm.bias], file)
    assert len(file.getvalue()) < 10_000


@rules
def test_a_dropped_cache_changes_nothing(rule: Rule) -> None:
    results = []
    for drop in (False, True):
        model = net()
        opt = rule.make(model)
        for _ in range(3):
            by_context(model, opt)
            if drop:
                opt.cache.drop()
        results.append(everything(model, opt))
    assert same(*results)


class Positions(nn.Module):
    """Adds a parameter to its inputs, which no layer reports."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(5))
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.position)
        return out


@layer_rules
def test_adam_trains_what_no_layer_reports(rule: Rule) -> None:
    model = Positions()
    with pytest.raises(RuntimeError, match=r"\(deterministic='position', deterministic_lr=1e-3\)"):
        by_context(model, rule.make(model))
    opt = rule.make(model, deterministic="position", deterministic_lr=0.01)
    before = copy.deepcopy(model)
    by_context(model, opt)
    torch.testing.assert_close(
        (model.position - before.position).abs(), torch.full((5,), 0.01), rtol=1e-3, atol=0
    )
    assert not torch.equal(model.layer.weight, before.layer.weight)
    assert not any("position" in name for name in opt.posterior().blocks)


def test_what_draws_nothing_has_one_sample() -> None:
    for make in (posterity.OGN, posterity.KFAC):
        with pytest.raises(ValueError, match=f"mc_samples must be 1: {make.__name__} draws no weights"):
            make(net(), num_data=8, mc_samples=2)
