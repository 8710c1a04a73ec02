"""``count=`` makes any mean the mean per example, for every rule and every way to run a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance import stand_in
from conformance.rules import Rule, captured_rules, everything, layer_rules, rules
from posterity import CountWarning, VariationalOptimizer
from posterity.train.compiled import CapturedStep

B, T, C = 6, 4, 3
X = torch.randn(B, T, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.randint(0, C, (B, T), generator=torch.Generator().manual_seed(2))
SOME = LABELS.masked_fill(torch.arange(T) > torch.arange(B)[:, None], -100)
NUMBERS = torch.randn(B, C, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WEIGHT = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)


class Case(NamedTuple):
    """A loss of outputs and targets that takes ``reduction=``, and the number of terms of its mean."""

    name: str
    loss: Callable[..., Tensor]
    x: Tensor
    y: Tensor
    count: float

    def mean(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(model(x), y, reduction="mean")

    def per_example(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(model(x), y, reduction="sum") / len(x)


def words(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **more)


def first(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHT.to(out), **more)


def binary(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y.sigmoid(), **more)


CASES = [
    Case("words", words, X, LABELS, B * T),
    Case("ignored words", words, X, SOME, int((SOME != -100).sum())),
    Case("ignored examples", F.cross_entropy, X[:, 0], SOME[:, 2], int((SOME[:, 2] != -100).sum())),
    Case("class weights", first, X[:, 0], LABELS[:, 0], float(WEIGHT[LABELS[:, 0]].sum())),
    Case("outputs", F.mse_loss, X[:, 0], NUMBERS, B * C),
    Case("binary outputs", binary, X[:, 0], NUMBERS, B * C),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, C)).to(dtype)


def by_closure(model: nn.Module, opt: VariationalOptimizer, loss: Any, case: Case, **more: Any) -> None:
    for _ in range(3):
        opt.step(lambda: loss(model, case.x, case.y), **more)


def by_context(model: nn.Module, opt: VariationalOptimizer, loss: Any, case: Case, **more: Any) -> None:
    for _ in range(3):
        for _ in range(opt.param_groups[0]["mc_samples"]):
            with opt.sampled_params():
                loss(model, case.x, case.y).backward()
        opt.step(**more)


def by_stack(model: nn.Module, opt: VariationalOptimizer, loss: Any, case: Case, **more: Any) -> None:
    step = posterity.compile_step(model, loss, opt)
    for _ in range(3):
        step(case.x, case.y, **more)


def by_loop(model: nn.Module, opt: VariationalOptimizer, loss: Any, case: Case, **more: Any) -> None:
    step = posterity.compile_step(model, loss, opt, chunk=1)
    for _ in range(3):
        step(case.x, case.y, **more)


WAYS = (by_closure, by_context, by_stack, by_loop)
ways = pytest.mark.parametrize("way", WAYS)


def learned(rule: Rule, way: Any, loss: Any, case: Case, **more: Any) -> dict[str, Tensor]:
    model = net()
    opt = rule.make(model, **({"batch_size": None} if rule.streams else {}))
    way(model, opt, loss, case, **more)
    state = {
        f"{name} {key}": value for name, p in model.named_parameters() for key, value in opt.state[p].items()
    }
    return {**everything(model, opt), **state}


@rules
@cases
@ways
def test_count_gives_the_posterior_of_the_mean_per_example(rule: Rule, case: Case, way: Any) -> None:
    counted = learned(rule, way, case.mean, case, count=case.count)
    right = learned(rule, way, case.per_example, case)
    torch.testing.assert_close(counted, right, rtol=1e-9, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CountWarning)
        wrong = learned(rule, way, case.mean, case)
    assert not torch.allclose(wrong["std 0.weight"], right["std 0.weight"], rtol=1e-5)


@rules
def test_count_of_micro_batches_is_their_sum(rule: Rule) -> None:
    results = []
    for cut in (False, True):
        model = net()
        opt = rule.make(model, **({"batch_size": None} if rule.streams else {}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(opt.param_groups[0]["mc_samples"]):
                with opt.sampled_params():
                    for x, y in zip(X.chunk(2), LABELS.chunk(2), strict=True) if cut else [(X, LABELS)]:
                        (words(model(x), y) / (1 + cut)).backward()
            opt.step(count=B * T)
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@captured_rules
def test_captured_step_reads_the_current_count(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_in.install(monkeypatch)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return words(model(x), y)

    results, x = [], X.float()
    targets = [LABELS.masked_fill(torch.arange(T) > i % T, -100) for i in range(9)]
    for graphs in (False, True):
        model = net(torch.float32)
        opt = rule.make(model, **({"batch_size": None} if rule.streams else {}))
        step = posterity.compile_step(model, loss_fn, opt)
        step = CapturedStep(step) if graphs else step  # type: ignore[arg-type]
        for y in targets:
            step(x, y, count=(y != -100).sum())
        results.append(everything(model, opt))
    assert len({number for graph in made for number in graph.replays}) > 3
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="count must be greater than 0, not 0"):
        step(x, LABELS, count=0)
    graphs_before = len(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CountWarning)
        for _ in range(9):
            step(x, LABELS)  # a mean as it is: another graph
    assert len(made) > graphs_before


@rules
def test_count_of_an_optimiser_without_a_module_needs_the_examples(rule: Rule) -> None:
    results = []
    for more in ({}, {"batch_size": B}):
        model = net()
        opt = rule.make(list(model.named_parameters()), **({"batch_size": None} if rule.streams else {}))
        for number in range(2):
            if rule.name in ("IVON", "KFAC") and not more and (rule.name == "IVON" or number == 1):
                with pytest.raises(
                    ValueError, match="count=24 also needs the number of examples: pass batch"
                ):
                    opt.step(lambda model=model: words(model(X), LABELS), count=B * T, **more)
                return
            opt.step(lambda model=model: words(model(X), LABELS), count=B * T, **more)
        results.append(everything(model, opt))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@rules
@pytest.mark.parametrize("count", [0, -1.0, float("inf"), float("nan")])
def test_a_count_that_is_none_is_refused(rule: Rule, count: float) -> None:
    model = net()
    opt = rule.make(model)
    with pytest.raises(ValueError, match="count must be greater than 0"):
        opt.step(lambda: words(model(X), LABELS), count=count)


# What warns.


@rules
@cases
@ways
def test_a_mean_over_other_things_warns_once_with_the_count(rule: Rule, case: Case, way: Any) -> None:
    model = net()
    opt = rule.make(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way(model, opt, case.mean, case)
    said = [each for each in caught if issubclass(each.category, CountWarning)]
    assert len(said) == 1
    assert f"takes it for the mean over {B} examples: pass count={case.count:g}" in str(said[0].message)
    assert "\n" not in str(said[0].message)


@rules
@cases
@ways
def test_no_warning_with_count_or_a_mean_over_examples(rule: Rule, case: Case, way: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        learned(rule, way, case.mean, case, count=B)
        learned(rule, way, case.per_example, case)
        for y in (LABELS[:, 0], LABELS[:, 0].eq(torch.arange(C)[:, None]).double().T):  # probabilities
            plain = Case("plain", F.cross_entropy, X[:, 0], y, B)
            learned(rule, way, plain.mean, plain)


@layer_rules
def test_a_loss_without_gradients_does_not_warn(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)

    def closure() -> Tensor:
        with torch.no_grad():
            F.mse_loss(model(X[:, 0]), NUMBERS)
        return F.cross_entropy(model(X[:, 0]), LABELS[:, 0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)


@rules
@ways
@pytest.mark.parametrize("beside", ["logged", "penalty"])
def test_extra_loss_term_does_not_warn(rule: Rule, way: Any, beside: str) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        other = F.mse_loss(out.detach() if beside == "logged" else out, torch.zeros_like(out))
        return F.cross_entropy(out, y) + 1e-3 * other

    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        learned(rule, way, loss, Case("plain", loss, X[:, 0], LABELS[:, 0], B))


@rules
@ways
def test_loss_without_gradient_is_ignored_in_counting(rule: Rule, way: Any) -> None:
    """A mean over examples that is only looked at does not make the loss one."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        F.mse_loss(out.detach()[:, 0, 0], torch.zeros(B, dtype=out.dtype))
        return words(out, y)

    with pytest.warns(CountWarning, match=f"pass count={B * T} "):
        learned(rule, way, loss, CASES[0])


@pytest.mark.parametrize("count", [None, B])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.poisson_nll_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
@rules
def test_outputs_that_are_compared_with_all_targets_are_warned_of(
    rule: Rule, loss: Any, count: int | None
) -> None:
    """Outputs [B, 1] and targets [B] have B² differences, of which no count makes the right loss."""
    model = nn.Linear(5, 1)
    x, y = torch.randn(B, 5), torch.ones(B)
    with pytest.warns(CountWarning, match=r"compares every output with every target, .*\[B, 1\]$") as caught:
        rule.make(model).step(lambda: loss(model(x), y), batch_size=B, count=count)
    assert sum(issubclass(each.category, CountWarning) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        rule.make(model).step(lambda: loss(model(x), y[:, None]), batch_size=B, count=count)
        rule.make(model).step(lambda: loss(model(x), torch.ones(B, 3)), batch_size=B, count=3 * B)


@pytest.mark.parametrize("name", ["BGD", "IVON"])
def test_losses_are_compared_with_the_batch_size_that_is_given(name: str) -> None:
    """A net of sets: its inputs are the elements of all of them."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).unflatten(0, (B, T)).sum(1)

    model = Sets()
    opt = posterity.BGD(model) if name == "BGD" else posterity.IVON(model, num_data=9)

    def closure() -> Tensor:
        for _ in range(2):  # micro-batches
            (F.cross_entropy(model(X.flatten(0, 1)), LABELS[:, 0]) / 2).backward()
        return torch.zeros(())

    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        opt.step(closure, batch_size=2 * B)
    model = Sets()
    opt = posterity.BGD(model) if name == "BGD" else posterity.IVON(model, num_data=9)
    advice = f"pass count={2 * B} to the step, or batch_size={2 * B} if these are its examples, see"
    with pytest.warns(CountWarning, match=advice):
        opt.step(closure)


def test_parts_of_a_batch_are_compared_with_their_own_terms() -> None:
    for loss, count in ((CASES[0].mean, B * T), (CASES[2].mean, None)):
        model = net()
        step = posterity.compile_step(model, loss, posterity.VOGN(model, num_data=9, mc_samples=2), parts=2)
        if count is None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(X[:, 0], LABELS[:, 0])
        else:
            with pytest.warns(CountWarning, match=f"over 12 terms, .* over 3 examples: pass count={count} "):
                step(X, LABELS)
