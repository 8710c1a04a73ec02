"""Which runs are warned of: those that diverge or learn nothing, and no others."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posterity
from conformance.rules import ALL_WAYS, Rule, X, Y, by_closure, by_context, loss_fn, net, rules
from posterity import diagnostics
from posterity.diagnostics import PosteriorWarning
from posterity.optim import handover
from posterity.optim.watch import LossWatch, Roots

Learn: TypeAlias = Callable[[nn.Module, posterity.VariationalOptimizer], None]


def messages(losses: Iterable[float], noise: float = 0.1, fresh: bool = True, slow: str = "") -> list[str]:
    return messages_of(LossWatch("VOGN", "raise damping", lambda: noise, fresh, lambda: slow), losses)


def messages_of(watch: LossWatch, losses: Iterable[float]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses:
            watch(loss)
    assert all(each.category is posterity.DivergenceWarning for each in caught)
    return [str(each.message) for each in caught]


def run(loss: Callable[[int], float], spread: float, steps: int = 1000) -> list[float]:
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(0)) * spread
    return [loss(step) + float(noise[step]) for step in range(steps)]


SICK = {
    "chance": (run(lambda t: 2.303, 0.02), 0.1, "has not lowered its loss in 300 steps .*: try another lr"),
    "worse than chance": (run(lambda t: 2.303 + 0.002 * t, 0.02), 0.1, "300 steps .*: lower lr"),
    "worse by the chance of batches": (
        [4.6 + (0.3 if t % 2 else -0.3) + (0.15 if t >= 10 else 0.0) for t in range(1000)],
        0.1,
        "300 steps .*: try another lr or a larger max_step, and norm layers",
    ),
    "noise": (run(lambda t: 3.0, 0.6), 2.0, "300 steps .*: its stds outweigh its weights, raise damping"),
    "noise that was worse": (
        run(lambda t: 2.3 + 12 * math.exp(-t / 40), 0.1),
        2.0,
        r"hardly lowers its loss any more \([\d.]+ after 300 steps, [\d.]+ now\): its stds .*, raise damping",
    ),
    "three times": (
        run(lambda t: 2.3 if t < 100 else 7.5, 0.1),
        0.1,
        "the loss began at 2.[1-3]\\d* and is [5-7].* on average; lower lr, or raise damping",
    ),
    "ten times, for seventeen steps": (
        run(lambda t: 40.0 if 30 <= t < 47 else 2.3 * math.exp(-t / 100), 0.1),
        0.1,
        "and is [1-4]\\d.* on average",
    ),
}
WELL = {
    "learns": (run(lambda t: 2.3 * math.exp(-t / 200), 0.1), 0.1),
    "learns at once": (run(lambda t: 0.3 if t > 2 else 2.3, 0.05), 0.1),
    "learns under noise": (run(lambda t: 0.4 + 2.3 * math.exp(-t / 200), 0.4), 2.0),
    "learns little": (run(lambda t: 0.3 + 0.2 * math.exp(-t / 50), 0.05), 0.1),
    "was trained before": (run(lambda t: 0.05, 0.02), 0.1),
    "changes tasks": (run(lambda t: 2.6 * math.exp(-(t % 280) / 50), 0.1), 0.1),
    "has a bad batch": (run(lambda t: 20.0 if t == 80 else 2.3 * math.exp(-t / 200), 0.1), 0.1),
    "has a very bad batch": (run(lambda t: 400.0 if t == 80 else 2.3 * math.exp(-t / 200), 0.1), 0.1),
    "has its labels flipped": (
        run(lambda t: 0.7 * math.exp(-t / 50) if t < 300 else 25.0 * math.exp((300 - t) / 12), 0.02),
        0.1,
    ),
    "is below zero": (run(lambda t: -1.0 - 0.002 * t, 0.1), 0.1),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_warned_of_once(name: str) -> None:
    losses, noise, message = SICK[name]
    (found,) = messages(losses, noise)
    assert re.search(message, found), found


@pytest.mark.parametrize("name", WELL)
def test_healthy_run_does_not_warn(name: str) -> None:
    assert messages(*WELL[name]) == []


def test_resumed_run_without_progress_does_not_warn() -> None:
    losses, noise, _ = SICK["chance"]
    assert messages(losses, noise, fresh=False) == []


def test_hardly_falling_loss_with_a_tiny_learning_rate_warns() -> None:
    """On digits VOGN at lr=1e-3 has lowered it by a hundredth after 300 steps, and is at chance.

    A run of a hundred steps is told so, which any other reason may need longer for.
    """
    losses = run(lambda t: 2.3 - 2e-4 * t, 0.02)
    assert messages(losses) == []
    (found,) = messages(losses, slow="raise lr")
    assert re.fullmatch(r"VOGN has (hardly|not) lowered its loss in 100 steps \(.* now\): raise lr", found)
    assert messages(losses[:100], slow="raise lr") == [found]
    assert messages(SICK["chance"][0][:299]) == []
    (late,) = messages(run(lambda t: 2.3 - 2e-3 * min(t, 50), 0.02), slow="raise lr")
    assert late.startswith("VOGN has hardly lowered its loss in 300 steps")
    assert messages(run(lambda t: 2.3 - 1.5e-3 * t, 0.02), slow="raise lr") == []


def test_run_at_chance_with_worse_first_losses_warns() -> None:
    """Of ten classes a guess costs log 10, to which a net that begins above it may come down and stay."""
    losses = run(lambda t: 2.31 + 0.3 * math.exp(-t / 60), 0.02)
    assert messages(losses) == []
    watch = LossWatch("VOGN", "raise damping", lambda: 0.1, True)
    watch.guess = losses[0], math.log(10)
    (found,) = messages_of(watch, losses)
    assert re.fullmatch(
        r"VOGN has a loss no better than a guess in 300 steps \(.* now\): try another lr.*", found
    )
    watch = LossWatch("VOGN", "raise damping", lambda: 0.1, True)
    watch.guess = 0.9 * losses[0], math.log(10)  # there is more in the loss than what is known of
    assert messages_of(watch, losses) == []


@pytest.mark.parametrize("way", ALL_WAYS)
@rules
def test_what_a_guess_costs_is_taken_from_the_first_step(rule: Rule, way: Learn) -> None:
    model = net()
    opt = rule.make(model)
    way(model, opt)
    first, guess = opt.watch.guess
    assert guess == pytest.approx(math.log(3))
    assert first == pytest.approx(opt.watch.losses.first, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "guess"),
    [
        (lambda out, y: F.nll_loss(out.log_softmax(1), y), math.log(3)),
        (lambda out, y: F.cross_entropy(out[:, :, None], y[:, None]), math.log(3)),
        (lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.clamp(0, 1).float()), math.log(2)),
        (lambda out, y: F.cross_entropy(out, y, weight=torch.ones(3)), math.inf),
        (lambda out, y: F.mse_loss(out[:, 0], y.float()), math.inf),
    ],
)
def test_a_guess_costs_the_log_of_the_number_of_classes(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], guess: float
) -> None:
    model = net()
    opt = posterity.IVON(model, num_data=16)
    opt.step(lambda: loss(model(X), Y), count=16)
    assert opt.watch.guess[1] == pytest.approx(guess)


@rules
def test_resumed_and_loaded_runs_are_not_fresh(rule: Rule) -> None:
    model = net()
    opt = rule.make(model)
    assert opt.watch.fresh
    by_closure(model, opt)
    again = rule.make(model)
    again.load_state_dict(opt.state_dict())
    assert not again.watch.fresh
    other = rule.make(model)
    other.load_posterior(opt.posterior())
    assert not other.watch.fresh


@pytest.mark.parametrize("learn", [by_closure, by_context])
@rules
def test_stalled_run_warning_names_lr(rule: Rule, learn: Learn) -> None:
    model = net()
    # In 300 steps of a tenth each, noise alone would make the stds of IVON wide.
    slow = {"betas": (0.9, 0.9999)} if rule.name == "IVON" else {}
    opt = rule.make(model, lr=0.0, mc_samples=1, std_init=0.01, **slow)

    def steps(count: int) -> None:
        for _ in range(count):
            learn(model, opt)

    steps(95)  # in contexts one step of five is looked at
    message = f"{rule.name} has not lowered its loss in 100 steps .* raise lr: it is 0, and the default is"
    with pytest.warns(posterity.DivergenceWarning, match=message) as caught:
        steps(5)
    assert [Path(each.filename).name for each in caught] == ["rules.py"]  # where step() is called


@pytest.mark.parametrize("samples", [1, 3])
def test_loss_of_contexts_sums_backward_passes_and_averages_samples(
    samples: int,
) -> None:
    model = net()
    opt = posterity.BGD(model, mc_samples=samples, batch_size=16, seed=0)
    halves, seen = [slice(0, 8), slice(8, 16)], []

    def backward(loss: torch.Tensor) -> None:
        seen.append(float(loss.detach()))
        loss.backward()

    with opt.sampled_params():
        loss_fn(model, X, Y).backward()
    opt.zero_grad()  # drops it
    with suppress(ZeroDivisionError), opt.sampled_params():
        loss_fn(model, X, Y).backward()
        raise ZeroDivisionError
    for _ in range(samples):
        with opt.sampled_params():
            for half in halves:
                backward(F.cross_entropy(model(X[half]), Y[half]) / 2)
            (0 * model(X) + 1).mean().backward(torch.tensor(1.0))  # with a gradient it is no loss
    opt.step(batch_size=16)
    assert opt.watch.losses.count == 1
    assert opt.watch.losses.first == pytest.approx(sum(seen) / samples, rel=1e-6)


def test_context_losses_are_watched_until_a_fresh_run_has_learned() -> None:
    model = net()
    opt = posterity.IVON(model, num_data=100, seed=0)

    def listens() -> bool:
        return isinstance(opt.watch.listen(model), Roots)

    heard = []
    for step in range(30):
        heard += [step] * listens()
        by_context(model, opt)
    assert heard == [*range(10), 10, 15, 20, 25]
    assert opt.watch.losses.count == 30
    assert isinstance(opt.watch.listen(None), nullcontext)
    assert messages_of(opt.watch, [2.3] * 470) != []
    assert listens()  # has learned nothing
    assert messages_of(opt.watch, [0.5] * 100) == []
    assert not listens()
    opt = posterity.IVON(model, num_data=100, seed=0)
    assert listens()
    opt.load_posterior(opt.posterior())
    assert not listens()


@pytest.mark.parametrize("learn", ["closure", "context", "engine"])
def test_a_small_regression_that_diverges_is_warned_of(learn: str) -> None:
    """torch.autograd.backward() shows no loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(442, 10, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(442, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
    opt = posterity.VOGN(model, num_data=442, preset="osawa2019", lr=1e-2, seed=0)

    def run() -> None:
        for _ in range(500):
            chosen = torch.randint(0, 442, (32,), generator=generator)

            def loss(chosen=chosen) -> torch.Tensor:
                return 0.5 * F.mse_loss(model(x[chosen]), y[chosen])

            if learn == "closure":
                opt.step(loss)
                continue
            with opt.sampled_params():
                if learn == "context":
                    loss().backward()
                else:
                    torch.autograd.backward(loss())
            opt.step()

    what = "its largest gradient was" if learn == "engine" else "the loss began at"
    with pytest.warns(posterity.DivergenceWarning, match=f"VOGN seems to diverge: {what} .*; lower lr"):
        run()
    with torch.no_grad():
        assert F.mse_loss(model(x), y) > 100


@rules
def test_stds_larger_than_weights_warn(rule: Rule) -> None:
    model = net()
    wide = {"std_init": 1.0} if rule.streams else {"std_init": 1.0, "prior_precision": 0.01}
    opt = rule.make(model, lr=0.0, mc_samples=1, **wide)
    start = opt.posterior()  # before the first step there is nothing to say
    assert handover.unfit(opt, start.blocks.values()) is None
    by_context(model, opt)
    for step in range(60):  # a rule that draws is judged by the losses it has seen
        opt.watch(2.3 + 0.3 * math.sin(step))
    message = rf"stds of {rule.name}'s posterior are .* times its weights, .*, {opt.narrower}$"
    with pytest.warns(PosteriorWarning, match=message):
        q = opt.posterior()
    with pytest.warns(PosteriorWarning, match=message):
        diagnostics.check(q, start, opt)


@rules
def test_healthy_posterior_does_not_warn(rule: Rule) -> None:
    model = net()
    opt = rule.make(model, mc_samples=1, std_init=0.01)
    for _ in range(2):
        by_context(model, opt)
    assert handover.unfit(opt, opt.posterior().blocks.values()) is None
    opt.load_posterior(posterity.prune(opt.posterior(), 0.99))
    by_context(model, opt)
    assert handover.unfit(opt, opt.posterior().blocks.values()) is None


def test_wide_stds_that_were_learned_with_are_no_reason_to_warn() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    opt = posterity.BGD(model, std_init=0.6, lr=0.1, mc_samples=10, batch_size=16, seed=0)
    y = X[:, :3].argmax(1)
    for _ in range(60):
        opt.step(lambda: F.cross_entropy(model(X), y))
    with torch.no_grad():
        model.weight.mul_(0.01)  # whatever the stds are now, they outweigh this
    assert opt.watch.learned
    assert handover.unfit(opt, opt.posterior().blocks.values()) is None
    assert loss_fn(model, X, Y).isfinite()


@pytest.mark.parametrize(
    ("rule", "lr", "said"),
    [
        ("IVON", 1e-3, True),
        ("IVON", 0.2, False),
        ("BGD", 1e-3, True),
        ("BGD", 0.2, False),
        ("VOGN", 1e-3, True),
    ],
)
def test_stalled_run_with_adams_learning_rate_warns_about_it(rule: str, lr: float, said: bool) -> None:
    given = {} if rule == "BGD" else {"num_data": 16}
    opt: posterity.VariationalOptimizer = getattr(posterity, rule)(nn.Linear(5, 3), lr=lr, **given)
    assert (f"raise lr: it is {lr:g}, and the default is" in handover.slow(opt)) == said


def test_a_papers_small_learning_rate_is_not_taken_for_adams() -> None:
    assert handover.slow(posterity.VOGN(nn.Linear(5, 3), num_data=16, preset="osawa2019")) == ""


@rules
def test_stalled_run_warning_names_tiny_stds(rule: Rule) -> None:
    """Steps are bounded by stds: with tiny ones nothing moves, whatever the rate."""
    model = net()
    opt = rule.make(model, std_scale=1e-5, lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", posterity.DivergenceWarning)
        for _ in range(100):
            by_closure(model, opt)
    (found,) = caught
    assert re.search("100 steps .*: raise std_scale: stds begin at .*, and by default at", str(found.message))
    assert "raise std_init: " in handover.slow(rule.make(net(), std_init=1e-6, lr=1.0))
    assert handover.slow(rule.make(net(), std_scale=0.1, lr=1.0)) == ""


@rules
@pytest.mark.parametrize("trained", [False, True])
def test_parameter_unfrozen_after_construction_warns(rule: Rule, trained: bool) -> None:
    """By whoever trains it else it is changed, and then nobody forgot it."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    opt = rule.make(model, mc_samples=1)
    adam = torch.optim.Adam(model[0].parameters())
    for step in range(3):
        opt.zero_grad()
        adam.zero_grad()
        late = step == 2 and not trained
        with pytest.warns(UserWarning, match="'0.weight' has a gradient, and") if late else nullcontext():
            by_context(model, opt)
        if trained:
            adam.step()
        model[0].requires_grad_()  # from the second step on


@rules
def test_a_group_of_the_modules_parameters_has_its_names(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    opt = rule.make(model, mc_samples=1)
    by_context(model, opt)
    opt.add_param_group({"params": model[0].requires_grad_().parameters()})
    for _ in range(3):
        by_context(model, opt)
    assert {*opt.posterior().mean()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    posterity.predict(model, opt.posterior(), X, samples=2)
