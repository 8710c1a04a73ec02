"""``compile_step`` with estimators is a plain loop's step, family by family, by loop, stack and graph."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance.families import FAMILIES
from conformance.families import PRIORS as OWN
from conformance.stand_in import install
from conformance.test_estimators import CASES, ESTIMATORS, LAYERS, table
from posterity import ByName, IsotropicGaussian, ScaleMixture, Variational, elbo, variational, warmup
from posterity.optim.state import FlatGroup
from posterity.train import blocks
from posterity.train.compiled import CapturedStep
from posterity.train.gradient import ByGradient
from posterity.train.step import TrainStep

N = 50
X = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(0, 2, (6,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """With a norm, whose weights have one draw with any estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.fc = nn.BatchNorm2d(1), nn.Conv2d(1, 3, 2), nn.Linear(27, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(self.norm(x))).flatten(1))


def model(family: str = "DiagonalGaussian", estimator: Any = "local", **more: Any) -> Variational:
    torch.manual_seed(0)
    options = {"std_init": 0.1, "seed": 3, "prior": OWN.get(family), **more}
    return variational(Net().double(), family=FAMILIES[family], estimator=estimator, **options)


def loss_fn(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def adam(m: Variational, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(m.parameters(), lr=0.01, **more)


def by_hand(
    m: Variational, opt: torch.optim.Optimizer, prior: Any = None, samples: int = 1, **more: Any
) -> Tensor:
    """A step of a plain loop."""
    x, y, clip, how = more.get("x", X), more.get("y", Y), more.get("max_norm"), more.get("how", "stack")
    opt.zero_grad()
    outputs = m(x)[None] if samples == 1 else m.outputs(x, samples=samples, how=how)
    nll = torch.stack([F.cross_entropy(each, y) for each in outputs]).mean() * more.get("scale", 1.0)
    divergence = m.kl() if prior is None else m.kl(prior)
    loss = elbo(nll, divergence, num_data=N, factor=more.get("factor", 0.3), step=more.get("step", 0))
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(m.parameters(), clip)
    opt.step()
    return loss.detach()


def grads(m: Variational) -> dict[str, Tensor]:
    return {f"grad {name}": p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


def everything(m: Variational, opt: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, Tensor]:
    found = {name: value for name, value in m.state_dict().items() if isinstance(value, Tensor)}
    for name, p in m.named_parameters():
        found |= {f"{key} of {name}": value.double() for key, value in opt.state[p].items()}
    found = {name: value.detach().clone() for name, value in found.items()}
    return found | grads(m) | {"losses": torch.stack(losses), "draws": torch.tensor(m.draws)}


def near(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(b[key], value, rtol=rtol, atol=rtol, msg=lambda m, key=key: f"{key}: {m}")


MIXED = {"conv.*": "flipout", "fc.*": "local", "*": "weight"}
PAIRS: list[tuple[str, Any]] = [
    ("DiagonalGaussian", "local"),
    ("DiagonalGaussian", "flipout"),
    ("DiagonalGaussian", MIXED),
    ("KernelGaussian", "flipout"),
    ("KernelGaussian", MIXED),
    ("ScaledGaussian", "local"),
    ("ScaledGaussian", "flipout"),
    ("NormalScales", "local"),
    ("NormalScales", "flipout"),
    ("LogNormalScales", "local"),
]
PRIORS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: IsotropicGaussian(0.5),
    "mixture": lambda: ByName({"*.bias": IsotropicGaussian(2.0), "*": ScaleMixture(0.3, 1.0, 0.1)}),
}
pairs = pytest.mark.parametrize(("family", "estimator"), PAIRS)


def prior_of(family: str, prior: str) -> Any:
    """None, for the model's own, where a family can have no other."""
    return None if family in OWN else PRIORS[prior]()


def both(
    make: Callable[[], Variational], steps: int = 2, *, samples: int = 1, loop: bool = False, **more: Any
) -> None:
    """Fail unless compiled steps and a plain loop learn the same."""
    results, options = [], {"factor": 0.3, "prior": None, "max_norm": None, **more}
    for compiled in (False, True):
        m = make()
        opt = adam(m)
        step = posterity.compile_step(m, loss_fn, opt, num_data=N, mc_samples=samples, **options)
        hand = {"how": "loop" if loop else "stack", **options}
        losses = [step(X, Y) if compiled else by_hand(m, opt, samples=samples, **hand) for _ in range(steps)]
        results.append(everything(m, opt, losses))
    near(*results)


@pytest.mark.parametrize("prior", PRIORS)
@pairs
def test_compiled_equals_the_plain_loop_to_rounding(family: str, estimator: Any, prior: str) -> None:
    for samples in (1, 3):
        both(lambda: model(family, estimator), prior=prior_of(family, prior), samples=samples, max_norm=0.5)


@pairs
def test_stack_and_loop_and_chunks_are_the_same(family: str, estimator: Any) -> None:
    both(lambda: model(family, estimator), samples=3, loop=True)
    results = []
    for chunk in (None, 1, 2):
        m = model(family, estimator)
        opt = adam(m)
        prior = prior_of(family, "mixture")
        step = posterity.compile_step(
            m, loss_fn, opt, prior=prior, num_data=N, mc_samples=3, chunk=chunk, parts=2
        )
        results.append(everything(m, opt, [step(X, Y) for _ in range(2)]))
    near(results[0], results[1])
    near(results[0], results[2])


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("padded", [False, True])
def test_pruned_weights_and_padding_between_blocks(
    monkeypatch: pytest.MonkeyPatch, estimator: str, padded: bool
) -> None:
    if padded:  # as a GPU has it
        monkeypatch.setattr(blocks, "FlatGroup", lambda *given, align: FlatGroup(*given))

    def pruned() -> Variational:
        whole = model(estimator=estimator)
        return Variational(whole.module, posterity.prune(whole.posterior, 0.4), seed=3, estimator=estimator)

    for prior in PRIORS.values():
        for samples in (1, 2):
            both(pruned, prior=prior(), samples=samples)
        both(lambda: model(estimator=estimator), prior=prior())
    m = pruned()
    kept = m.posterior.kept()
    step = posterity.compile_step(m, loss_fn, adam(m), num_data=N)
    step(X, Y)
    assert all(not bool(p[~kept[name]].any()) for name, p in m.module.named_parameters())


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_frozen_parameters_counts_and_schedules(estimator: str) -> None:
    results, factor = [], warmup(4)
    for compiled in (False, True):
        m = model(estimator=estimator, deterministic="norm.*")
        m.module.conv.weight.requires_grad_(False)
        m.posterior.block("fc.weight").raw.requires_grad_(False)
        opt = adam(m)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        step = posterity.compile_step(m, loss_fn, opt, num_data=N, factor=factor)
        losses = []
        for i in range(3):
            more = {"factor": factor, "step": i, "scale": 4.0}
            losses.append(step(X, Y, count=24) if compiled else by_hand(m, opt, **more))
            schedule.step()
        results.append(everything(m, opt, losses))
        assert m.module.conv.weight.grad is None
    near(*results)


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_a_prior_with_correlated_weights(estimator: str) -> None:
    prior = model("KernelGaussian", "weight").posterior.frozen()
    both(lambda: model(estimator=estimator), prior=prior)


@pytest.mark.parametrize("estimator", ["weight", "local"])
def test_half_precision_loss_has_an_accurate_kl(estimator: str) -> None:
    losses = []
    for compiled in (False, True):
        m = model(estimator=estimator).float()
        with torch.autocast("cpu", torch.bfloat16):
            if compiled:
                step = posterity.compile_step(
                    m, lambda net, x: net(x).sum() * 0.0, adam(m), num_data=N, mc_samples=2
                )
                losses.append(step(X.float()))
            else:
                m.outputs(X.float(), samples=2)
                losses.append(m.kl().detach() / N)
    torch.testing.assert_close(*losses)


@pairs
def test_resumed_run_is_bitwise_identical(family: str, estimator: Any) -> None:
    def begun() -> tuple[Variational, torch.optim.Optimizer, Any]:
        m = model(family, estimator)
        opt = adam(m)
        return m, opt, posterity.compile_step(m, loss_fn, opt, num_data=N, mc_samples=2)

    m, opt, step = begun()
    step(X, Y)
    saved = copy.deepcopy((m.state_dict(), opt.state_dict()))
    other, again, resumed = begun()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    found = [everything(a, b, [c(X, Y)]) for a, b, c in ((m, opt, step), (other, again, resumed))]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_the_loss_is_given_the_users_own_module() -> None:
    m = model()
    seen = []
    step = posterity.compile_step(
        m, lambda net, x, y: seen.append(net) or loss_fn(net, x, y), adam(m), num_data=N
    )
    step(X, Y)
    assert seen[0] is m.module


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised over weight samples")
@pytest.mark.parametrize(("row", "number", "estimator"), [case for case in CASES if case[2] != "weight"])
def test_layers_have_the_estimators_of_a_plain_loop(row: str, number: int, estimator: str) -> None:
    if "compile" in row:
        pytest.skip("refused when the model is built")
    said = table("By layer")[row][ESTIMATORS.index(estimator)]
    build, one, deterministic = LAYERS[row][number]
    x = one.expand(4, *one.shape[1:])
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        m = variational(build(), estimator=estimator, std_init=0.3, seed=2, deterministic=deterministic)
        if compiled:
            opt = torch.optim.SGD(m.parameters(), lr=0.0)
            step = posterity.compile_step(
                m, lambda net, x: net(x).square().mean(), opt, num_data=N, mc_samples=2, factor=0.0
            )
            if said == "refused":
                with pytest.raises(RuntimeError, match=r"'layer\.weight'.*: pass estimator="):
                    step(x)
                return
            step(x)
        elif said != "refused":
            m.outputs(x, samples=2).square().mean().backward()
        kl_only = {name: torch.zeros_like(p) for name, p in m.named_parameters()}
        found.append(kl_only | {name[5:]: grad for name, grad in grads(m).items()})
    near(*found, rtol=1e-5)


# As a graph, by a stand-in.


@pytest.mark.parametrize(("family", "estimator"), [*PAIRS, ("KernelGaussian", "weight")])
def test_a_captured_step_holds_back_gradients_that_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, family: str, estimator: Any
) -> None:
    made = install(monkeypatch)
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *_: ["cpu"]
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 4, bias=False), nn.Flatten()).double()
    estimators = {"*": estimator["conv.*"]} if isinstance(estimator, dict) else estimator
    options = {"std_init": 0.1, "seed": 3, "prior": OWN.get(family)}
    m = variational(net, family=FAMILIES[family], estimator=estimators, **options)

    def rooted(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        return F.cross_entropy(out, y) + out.square().sum().sqrt()  # at 0 its gradient is not a number

    inner = posterity.compile_step(m, rooted, adam(m), num_data=N)
    assert isinstance(inner, TrainStep)
    inner.learner.optimizer.make_capturable()
    step = CapturedStep(inner)
    for _ in range(4):
        step(X, Y)
    assert len(made) == 1
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    step(torch.zeros_like(X), Y)
    assert all(torch.equal(p, before[name]) for name, p in m.named_parameters())
    with pytest.raises(FloatingPointError):
        step(X, Y)


@pytest.mark.parametrize("prior", PRIORS)
@pairs
def test_replays_equal_the_plain_loop_through_schedules_and_ragged_batches(
    monkeypatch: pytest.MonkeyPatch, family: str, estimator: Any, prior: str
) -> None:
    made = install(monkeypatch)
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *_: ["cpu"]
    )
    results, factor = [], warmup(9)
    for graphs in (False, True):
        m = model(family, estimator)
        opt = adam(m)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        p = prior_of(family, prior)
        made_step = posterity.compile_step(
            m, loss_fn, opt, prior=p, num_data=N, factor=factor, mc_samples=2, max_norm=1.0
        )
        assert isinstance(made_step, TrainStep)
        assert isinstance(made_step.learner, ByGradient)
        made_step.learner.optimizer.make_capturable()
        step, losses = CapturedStep(made_step), []
        for i in range(6):
            x, y = (X[:4], Y[:4]) if i % 3 == 2 else (X, Y)
            more = {"factor": factor, "step": i, "x": x, "y": y, "max_norm": 1.0}
            losses.append(step(x, y) if graphs else by_hand(m, opt, p, 2, **more))
            schedule.step()
        found = everything(m, opt, losses)
        results.append({key: value for key, value in found.items() if not key.startswith("grad ")})
        assert len(made) == (2 if graphs else 0)
    near(*results, rtol=1e-5)  # a graph's learning rates and factors are in single precision


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("frozen", ["loc", "raw"])
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_means_or_stds_may_all_be_frozen(estimator: str, frozen: str, samples: int) -> None:
    def make() -> Variational:
        m = model(estimator=estimator)
        for leaf in m.posterior.blocks.values():
            getattr(leaf, frozen).requires_grad_(False)
        return m

    both(make, samples=samples)
