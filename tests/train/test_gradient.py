"""``compile_step`` of a variational model gives what a plain loop gives: by elbo(), backward() and step()."""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance.stand_in import install
from posterity import (
    ByName,
    DiagonalGaussian,
    DivergenceWarning,
    Factorised,
    IsotropicGaussian,
    Leaf,
    ScaleMixture,
    Variational,
    elbo,
    register_kl,
    variational,
    warmup,
)
from posterity.fusing import fusing
from posterity.optim.state import FlatGroup
from posterity.posterior.kernel import KernelGaussian
from posterity.posterior.scaled import ScaledGaussian
from posterity.train import blocks
from posterity.train.compiled import CapturedStep
from posterity.train.gradient import ByGradient
from posterity.train.step import TrainStep

N = 50
X = torch.randint(0, 9, (12, 4), generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """With a padding row, BatchNorm, a parameter that nothing uses and one that is not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, padding_idx=0)
        self.first = nn.Linear(20, 7, bias=False)  # of which BatchNorm would leave a gradient of rounding
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(self.words(x).flatten(1)))))


def model(**more: Any) -> Variational:
    torch.manual_seed(0)
    return variational(Net().double(), **{"std_init": 0.1, "seed": 3, "deterministic": "norm.*", **more})


def pruned() -> Variational:
    return Variational(model().module, posterity.prune(model().posterior, 0.4), seed=3)


def loss_fn(net: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(net(x), y)


PRIORS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: IsotropicGaussian(0.5),
    "mixture": ScaleMixture,
    "by name": lambda: ByName({"*.bias": IsotropicGaussian(2.0), "*": ScaleMixture(0.3, 1.0, 0.1)}),
    "posterior": lambda: model(std_init=0.2).posterior.frozen(),
}
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def by_hand(
    m: Variational,
    opt: torch.optim.Optimizer,
    prior: Any,
    samples: int = 1,
    factor: Any = 1.0,
    step: int = 0,
    x: Tensor = X,
    y: Tensor = Y,
    max_norm: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """A step of a plain loop."""
    opt.zero_grad()
    outputs = m(x)[None] if samples == 1 else m.outputs(x, samples=samples)
    nll = torch.stack([F.cross_entropy(each, y) for each in outputs]).mean() * scale
    loss = elbo(nll, m.kl(prior), num_data=N, factor=factor, step=step)
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(m.parameters(), max_norm)
    opt.step()
    return loss.detach()


def everything(m: Variational, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: value for name, value in m.state_dict().items() if isinstance(value, Tensor)}
    for name, p in m.named_parameters():
        found |= {f"{key} of {name}": value for key, value in opt.state[p].items() if value is not None}
    return {name: value.detach().clone() for name, value in found.items()} | {"draws": torch.tensor(m.draws)}


def near(a: Mapping[str, Tensor], b: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(
            b[key], value, rtol=rtol, atol=0.01 * rtol, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("prior", PRIORS)
def test_compiled_equals_plain_loop(prior: str, optimiser: str, samples: int) -> None:
    results = []
    for compiled in (False, True):
        m = model()
        opt, p = OPTIMISERS[optimiser](m.parameters()), PRIORS[prior]()
        step = posterity.compile_step(m, loss_fn, opt, prior=p, num_data=N, factor=0.3, mc_samples=samples)
        losses = [step(X, Y) if compiled else by_hand(m, opt, p, samples, 0.3, i) for i in range(4)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)


def test_masks_of_a_leaf_that_lies_alone_are_followed() -> None:
    def make(*keep: bool) -> tuple[Variational, Any]:
        leaf = DiagonalGaussian(torch.ones(1, 3).double(), 0.1, keep=torch.tensor([keep]), trainable=True)
        m = Variational(nn.Linear(3, 1, bias=False).double(), Factorised({"weight": leaf}), seed=3)
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        return m, posterity.compile_step(m, lambda net, x: net(x).square().mean(), opt, num_data=N)

    x, (m, step), (other, expected) = (
        torch.ones(2, 3).double(),
        make(True, True, False),
        make(False, True, True),
    )
    step(x)
    m.load_state_dict(other.state_dict())
    torch.testing.assert_close(step(x), expected(x), rtol=0, atol=0)
    for a, b in zip(m.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("make", [pruned, lambda: model(deterministic=())], ids=["pruned", "all drawn"])
@pytest.mark.parametrize("prior", ["gaussian", "mixture"])
def test_masks_and_buffers_are_as_in_a_plain_loop(
    prior: str, make: Callable[[], Variational], samples: int
) -> None:
    results = []
    for compiled in (False, True):
        m = make()
        opt, p = OPTIMISERS["Adam"](m.parameters()), PRIORS[prior]()
        step = posterity.compile_step(m, loss_fn, opt, prior=p, num_data=N, mc_samples=samples)
        row = m.module.words.weight[0].detach().clone()
        for i in range(3):
            step(X, Y) if compiled else by_hand(m, opt, p, samples, 1.0, i)
        assert torch.equal(m.module.words.weight[0], row)
        assert int(m.module.norm.num_batches_tracked) == 3
        results.append(everything(m, opt))
    near(*results)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("make", [pruned, model], ids=["pruned", "whole"])
@pytest.mark.parametrize("prior", ["gaussian", "mixture"])
def test_padding_between_blocks_is_ignored(
    monkeypatch: pytest.MonkeyPatch, prior: str, make: Callable[[], Variational], samples: int
) -> None:
    monkeypatch.setattr(blocks, "FlatGroup", lambda *given, align: FlatGroup(*given))
    results = []
    for compiled in (False, True):
        m = make()
        opt, p = OPTIMISERS["Adam"](m.parameters()), PRIORS[prior]()
        step = posterity.compile_step(m, loss_fn, opt, prior=p, num_data=N, mc_samples=samples)
        losses = [step(X, Y) if compiled else by_hand(m, opt, p, samples, 1.0, i) for i in range(3)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)


def test_chunks_of_samples_and_parts_of_the_batch() -> None:
    results = []
    for chunk in (None, 2):
        m = model()
        opt = OPTIMISERS["Adam"](m.parameters())
        prior = ByName({"*.bias": IsotropicGaussian(), "*": ScaleMixture()})
        step = posterity.compile_step(m, loss_fn, opt, prior=prior, num_data=N, mc_samples=5, chunk=chunk)
        losses = [step(X, Y) for _ in range(3)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)
    m = model(deterministic=())
    m.eval()
    opt = torch.optim.SGD(m.parameters(), lr=0.0)
    step = posterity.compile_step(m, loss_fn, opt, num_data=N, parts=2)
    q = m.posterior._sample(range(2), m.seed, 0, posterity.noise.Domain.TRAIN)
    halves = []
    for n in range(2):
        one = {name: w[n] for name, w in q.items()}
        halves.append(
            F.cross_entropy(
                torch.func.functional_call(m.module, one, (X[6 * n : 6 * n + 6],)), Y[6 * n :][:6]
            )
        )
    torch.testing.assert_close(step(X, Y), (torch.stack(halves).mean() + m.kl() / N).detach())


def test_clipping_schedules_counts_and_frozen_parameters() -> None:
    results = []
    for compiled in (False, True):
        m = model()
        m.module.first.weight.requires_grad_(False)
        m.posterior.block("last.weight").raw.requires_grad_(False)
        opt = torch.optim.Adam(m.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        prior, factor = ScaleMixture(), warmup(4)
        step = posterity.compile_step(m, loss_fn, opt, prior=prior, num_data=N, factor=factor, max_norm=0.05)
        losses = []
        for i in range(6):
            more = {"factor": factor, "step": i, "max_norm": 0.05, "scale": 4.0}
            losses.append(step(X, Y, count=48) if compiled else by_hand(m, opt, prior, **more))
            schedule.step()
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)


def test_batches_in_dicts() -> None:
    results = []
    for nested in (False, True):
        m = model()
        opt = OPTIMISERS["Adam"](m.parameters())
        one = (lambda net, b: loss_fn(net, b["x"], b["y"])) if nested else loss_fn
        step = posterity.compile_step(m, one, opt, num_data=N, mc_samples=2)
        for _ in range(2):
            step({"x": X, "y": Y}) if nested else step(X, Y)
        results.append(everything(m, opt))
    near(*results)


class InTraining(Leaf):
    """A leaf that is trained alone, neither pruned nor saved."""

    def pruned(self, keep: Tensor) -> Self:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        raise NotImplementedError


class Tilted(InTraining):
    """``loc + std · noise · z``, with one std, and one z for all weights: nothing that is diagonal."""

    def __init__(self, mean: Tensor, std: float) -> None:
        super().__init__(mean.shape)
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        self.log_std = nn.Parameter(torch.full((), math.log(std), dtype=mean.dtype))

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        return {"": self.shape, "z": torch.Size([1])}

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        z = noise["z"].reshape(-1, *[1] * len(self.shape))
        return self.loc + self.log_std.exp() * noise[""] * z

    def std(self) -> Tensor:
        return self.log_std.exp().expand(self.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.total(-((value - self.loc) * torch.exp(-self.log_std)).abs() - self.log_std)


@register_kl(Tilted, IsotropicGaussian, needs_draw=True)
def _(q: Tilted, p: IsotropicGaussian, noise: Mapping[str, Tensor]) -> Tensor:
    return (q.draw(noise) / p.std).square().sum((-2, -1)).mean() - q.shape.numel() * q.log_std


@pytest.mark.parametrize("samples", [1, 3])
def test_a_leaf_of_any_family_may_be_one_number(samples: int) -> None:
    net = Sloped()
    m = variational(net, family={"slope": Tilted, "*": DiagonalGaussian}, prior=ScaleMixture())
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    step = posterity.compile_step(m, loss_fn, opt, num_data=5, mc_samples=samples)
    before = net.slope.detach().clone()
    step(torch.randn(5, 4), torch.arange(5) % 3)
    assert net.slope != before


class Sloped(nn.Module):
    """With a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.slope = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * self.fc(x)


class Shifted(InTraining):
    """``loc + shift + noise``: autograd has one gradient for both parameters."""

    def __init__(self, mean: Tensor, std: float) -> None:
        super().__init__(mean.shape)
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        self.shift, self.number = nn.Parameter(torch.zeros_like(mean)), std

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        return {"": self.shape}

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return self.loc + self.shift + self.number * noise[""]

    def std(self) -> Tensor:
        return torch.full_like(self.loc, self.number)

    def log_prob(self, value: Tensor) -> Tensor:
        raise NotImplementedError


@register_kl(Shifted, IsotropicGaussian)
def _(q: Shifted, p: IsotropicGaussian) -> Tensor:
    return q.total(torch.full_like(q.loc, -math.log(q.number / p.std)))  # of stds alone, which are fixed


def test_gradients_that_are_one_tensor_are_clipped_once() -> None:
    m = variational(nn.Linear(4, 3, bias=False), family=Shifted, prior=IsotropicGaussian(1.0), std_init=0.1)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    step = posterity.compile_step(m, lambda net, x: net(x).square().mean(), opt, num_data=N, max_norm=1e-3)
    step(torch.ones(12, 4))
    norm = torch.stack([p.grad.norm() for p in m.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("samples", "chunk"), [(1, None), (3, None), (3, 2), (3, 1)])
@pytest.mark.parametrize("prior", ["gaussian", "mixture"])
def test_leaves_of_any_family_are_drawn_beside_the_diagonal_ones(
    prior: str, samples: int, chunk: int | None
) -> None:
    results = []
    for compiled in (False, True):
        m = model(family={"first.weight": Tilted, "*": DiagonalGaussian})
        opt, p = OPTIMISERS["Adam"](m.parameters()), PRIORS[prior]()
        more = {"num_data": N, "mc_samples": samples, "chunk": chunk}
        step = posterity.compile_step(m, loss_fn, opt, prior=p, **more)
        losses = [step(X, Y) if compiled else by_hand(m, opt, p, samples, 1.0, i) for i in range(3)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)


class Pictures(nn.Module):
    """Three layers with kernels, one of which has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Tanh())
        self.wide, self.fc = nn.Conv2d(2, 2, (1, 3), bias=False), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(
            self.wide(self.convs(x.double().view(-1, 1, 3, 4).tile(1, 1, 1, 2)[..., :5])).flatten(1)
        )


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("prior", ["gaussian", "mixture"])
@pytest.mark.parametrize("family", [KernelGaussian, ScaledGaussian])
def test_leaves_of_one_kind_learn_together_what_they_learn_alone(
    family: type[Leaf], prior: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = posterity.cfg if family is KernelGaussian else posterity.mnf
    x, results = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)), []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(family, "kind", None)
        torch.manual_seed(0)
        m = variational(Pictures().double(), family=make, std_init=0.1, seed=3)
        opt = OPTIMISERS["Adam"](m.parameters())
        more = {"prior": PRIORS[prior](), "mc_samples": samples, "chunk": 2}
        step = posterity.compile_step(m, loss_fn, opt, num_data=N, **more)
        losses = [step(x, Y) for _ in range(3)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)


def test_scales_of_as_many_weights_as_draws_stay_apart() -> None:
    """Two weights in all, and two draws: of the loss and of the KL."""
    data, results = Y[:, None], []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        m = variational(net, family=posterity.mnf, std_init=0.1, seed=3)
        opt = OPTIMISERS["SGD"](m.parameters())
        step = posterity.compile_step(m, lambda net, x: net(x).square().mean(), opt, num_data=N)
        if compiled:
            loss = step(data.double())
        else:
            loss = elbo(m(data.double()).square().mean(), m.kl(), num_data=N)
            loss.backward()
            opt.step()
        results.append(everything(m, opt) | {"loss": loss.detach()})
    near(*results)


@pytest.mark.parametrize("prior", ["gaussian", "mixture"])
def test_resuming_is_exact(prior: str) -> None:
    def make() -> tuple[Variational, torch.optim.Optimizer, Any]:
        m = model()
        opt = OPTIMISERS["Adam"](m.parameters())
        factor = warmup(5)
        return (
            m,
            opt,
            posterity.compile_step(
                m, loss_fn, opt, prior=PRIORS[prior](), num_data=N, factor=factor, mc_samples=2
            ),
        )

    m, opt, step = make()
    for _ in range(2):
        step(X, Y)
    saved = copy.deepcopy((m.state_dict(), opt.state_dict()))
    for _ in range(2):
        step(X, Y)
    other, again, resumed = make()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for _ in range(2):
        resumed(X, Y)
    a, b = everything(m, opt), everything(other, again)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_steps_with_other_priors_leaves_and_parameters_are_followed() -> None:
    m, prior = model(), model(std_init=0.2).posterior.frozen()
    other, same = model(), prior
    opts = [OPTIMISERS["Adam"](each.parameters()) for each in (m, other)]
    step = posterity.compile_step(m, loss_fn, opts[0], prior=prior, num_data=N)
    for i in range(4):
        if i == 1:
            with torch.no_grad():
                prior.block("last.weight").raw.mul_(2.0)  # in place
        if i == 2:
            for each in (m, other):
                held = torch.zeros(7, 20, dtype=torch.bool)
                held[0] = True
                each.posterior.block("first.weight").hold(held)
        if i == 3:
            for each in (m, other):
                each.module.last.bias.requires_grad_(False)
                each.posterior.block("first.weight").raw.requires_grad_(False)
        step(X, Y)
        by_hand(other, opts[1], same, 1, 1.0, i)
        near(everything(m, opts[0]), everything(other, opts[1]))


def test_non_finite_loss_or_gradient_changes_nothing() -> None:
    m = model(std_init=0.01)
    opt = OPTIMISERS["Adam"](m.parameters())
    bad = [False]

    def one(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = loss_fn(net, x, y)
        root = (net.last.bias - net.last.bias.detach()).abs().sum().sqrt()  # an infinite gradient of a zero
        return out * torch.nan if bad[0] == "loss" else out + root if bad[0] else out

    step = posterity.compile_step(m, one, opt, num_data=N)
    step(X, Y)
    before = everything(m, opt)
    for what, message in (
        ("loss", "the loss is nan; the posterior was not touched"),
        ("gradient", "not finite"),
    ):
        bad[0] = what
        with pytest.raises(FloatingPointError, match=message):
            step(X, Y)
        near(before, everything(m, opt))
    bad[0] = False
    step(X, Y)
    assert m.draws == 2


def test_non_finite_kl_changes_nothing() -> None:
    m = model()
    step = posterity.compile_step(m, loss_fn, OPTIMISERS["Adam"](m.parameters()), num_data=N, factor=1e308)
    before = everything(m, step.learner.optimizer.optimizer)
    with pytest.raises(FloatingPointError, match="the KL is inf; the posterior was not touched"):
        step(X, Y)
    near(before, everything(m, step.learner.optimizer.optimizer))


SEPARABLE = X.double() / 8, (X[:, 0] > 4).long()


@pytest.mark.parametrize("graphs", [False, True])
def test_run_at_chance_warns_once(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    install(monkeypatch)
    torch.manual_seed(0)
    m = variational(nn.Linear(4, 2).double(), seed=3)
    made = captured(m, torch.optim.Adam(m.parameters(), lr=1e-7, fused=True))
    step = made if graphs else made.step
    with pytest.warns(
        DivergenceWarning, match="Adam has not lowered its loss in 300 steps.*another lr"
    ) as all_of:
        deque(step(*SEPARABLE) for _ in range(305))
    assert len(all_of) == 1


def by_loop(
    m: Variational, lr: float, steps: int, samples: int = 1, by: Callable[..., Any] = loss_fn
) -> None:
    adam = torch.optim.Adam(m.parameters(), lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        for _ in range(samples):
            (elbo(by(m, *SEPARABLE), m.kl(), num_data=N, factor=0.01) / samples).backward()
        with torch.no_grad():
            elbo(by(m, *SEPARABLE), m.kl(), num_data=N)  # a user looks on
        adam.step()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("estimator", ["weight", "local"])
def test_elbo_loop_at_chance_warns_once(samples: int, estimator: Any) -> None:
    torch.manual_seed(0)
    m = variational(nn.Linear(4, 2).double(), seed=3, estimator=estimator)
    by_loop(m, 1e-7, 295, samples)  # a warning would be an error
    with pytest.warns(DivergenceWarning, match="model has not lowered its loss in 300 steps.*lr") as all_of:
        by_loop(m, 1e-7, 330, samples)
    assert len(all_of) == 1
    assert all_of[0].filename == __file__


def test_learning_or_resumed_elbo_loop_does_not_warn() -> None:
    torch.manual_seed(0)
    m = variational(nn.Linear(4, 2).double(), seed=3)
    by_loop(m, 0.05, 520)
    for again in (copy.deepcopy(m), variational(nn.Linear(4, 2).double())):
        again.load_state_dict(m.state_dict())
        by_loop(again, 1e-9, 320, by=lambda m, x, y: 2 + loss_fn(m, x, y))


def test_diverging_elbo_loop_warns() -> None:
    torch.manual_seed(0)
    m = variational(nn.Linear(4, 2).double(), seed=3)
    far = lambda m, x, y: loss_fn(m, x, y) * (1.0 if m.draws < 100 else 100.0)  # noqa: E731
    with pytest.warns(DivergenceWarning, match="seems to diverge.*pass a smaller std_scale"):
        by_loop(m, 1e-7, 320, by=far)


def test_a_kl_that_rises_by_schedule_is_no_divergence() -> None:
    torch.manual_seed(0)
    m = variational(nn.Linear(4, 2).double(), seed=3, std_init=1e-6)
    sgd = torch.optim.SGD(m.parameters(), lr=0.5)
    step = posterity.compile_step(m, loss_fn, sgd, num_data=N, factor=warmup(60, end=2.0))
    losses = torch.stack([step(*SEPARABLE) for _ in range(310)])
    assert losses[-50:].mean() > 3 * losses[0]  # a warning would be an error


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    m, net = model(), Net().double()
    adam = torch.optim.Adam(m.parameters())
    make: Any = posterity.compile_step
    with pytest.raises(ValueError, match="num_data is missing: pass the number of training examples"):
        make(m, loss_fn, adam)
    with pytest.raises(ValueError, match="num_data must be at least 1, not 0"):
        make(m, loss_fn, adam, num_data=0)
    for factor in (-0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"factor must be 0 or more, and finite, not {factor}"):
            make(m, loss_fn, adam, num_data=N, factor=factor)
    for samples in (0, 1.5):
        with pytest.raises(
            ValueError, match=f"mc_samples must be a whole number of at least 1, not {samples}"
        ):
            make(m, loss_fn, adam, num_data=N, mc_samples=samples)
    with pytest.raises(
        ValueError, match=r"Adam does not hold 'posterior\._leaves\.0\.raw': build it from the"
    ):
        make(m, loss_fn, torch.optim.Adam(m.module.parameters()), num_data=N)
    foreign = torch.optim.Adam([*m.parameters(), nn.Parameter(torch.zeros(2, 5))])
    with pytest.raises(ValueError, match=r"Adam holds a parameter of shape \[2, 5\] that the model does not"):
        make(m, loss_fn, foreign, num_data=N)
    with pytest.raises(TypeError, match="needs a torch optimiser such as Adam, not BGD"):
        make(m, loss_fn, posterity.BGD(m.module), num_data=N)
    with pytest.raises(TypeError, match="Adam does not learn a posterior of a plain Net: pass variational"):
        make(net, loss_fn, torch.optim.Adam(net.parameters()))
    with pytest.raises(TypeError, match=r"num_data= is for variational\(\) models: give it to BGD"):
        make(net, loss_fn, posterity.BGD(net), num_data=N)
    with pytest.raises(KeyError, match="has no block 'unused'"):
        make(m, loss_fn, adam, num_data=N, prior=variational(nn.Linear(2, 2)).posterior)
    shapes = {"last.weight": (3, 7), "last.bias": (3,)}
    means = [torch.zeros(shape).double() for shape in shapes.values()]
    matrix = posterity.MatrixGaussian(means, torch.eye(3).double(), torch.eye(8).double())
    joint = ByName({"last.*": Factorised({tuple(shapes): matrix}), "*": IsotropicGaussian()})
    assert torch.isfinite(m.kl(joint))
    with pytest.raises(ValueError, match=r"the prior holds 'last.weight\+last.bias' as one block, which"):
        make(m, loss_fn, adam, num_data=N, prior=joint)
    factor = [1.0]
    step = make(m, loss_fn, adam, num_data=N, factor=lambda _: factor[0])
    step(X, Y)
    before, factor[0] = everything(m, adam), -1.0
    with pytest.raises(ValueError, match="factor must be 0 or more"):
        step(X, Y)
    factor[0] = 1.0
    with pytest.raises(ValueError, match="count must be greater than 0, not 0"):
        step(X, Y, count=0)
    adam.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"shape \[3\] that the model does not have"):
        step(X, Y)
    near(before, everything(m, adam))


def test_loss_that_is_not_a_mean_over_examples_warns_once() -> None:
    m = variational(nn.Linear(4, 3), seed=0)
    adam = torch.optim.Adam(m.parameters())
    step = posterity.compile_step(m, lambda net, x: F.mse_loss(net(x), torch.zeros(12, 3)), adam, num_data=N)
    with pytest.warns(
        posterity.CountWarning, match="mse_loss is a mean over 36 terms, and the ELBO takes it"
    ):
        step(torch.ones(12, 4))
    step(torch.ones(12, 4))


# As a graph, by a stand-in.


def captured(m: Variational, opt: torch.optim.Optimizer, **more: Any) -> CapturedStep:
    step = posterity.compile_step(m, loss_fn, opt, num_data=N, **more)
    assert isinstance(step, TrainStep)
    assert isinstance(step.learner, ByGradient)
    step.learner.optimizer.make_capturable()
    return CapturedStep(step)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("prior", ["gaussian", "by name"])
@pytest.mark.parametrize("fused", [False, True])
def test_replays_equal_the_plain_loop_through_schedules_and_ragged_batches(
    monkeypatch: pytest.MonkeyPatch, prior: str, samples: int, fused: bool
) -> None:
    made = install(monkeypatch)
    adam = sys.modules["torch.optim.adam"]  # torch.optim hides it
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_: ["cpu"])
    results = []
    factor = warmup(9)
    for graphs in (False, True):
        m = model()
        opt = torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        p = PRIORS[prior]()
        step = captured(m, opt, prior=p, factor=factor, mc_samples=samples, max_norm=1.0)
        losses = []
        for i in range(12):
            x, y = (X[:7], Y[:7]) if i % 3 == 2 else (X, Y)
            more = {"factor": factor, "step": i, "x": x, "y": y, "max_norm": 1.0}
            losses.append(step(x, y) if graphs else by_hand(m, opt, p, samples, **more))
            schedule.step()
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
        assert len(made) == (2 if graphs else 0)
    for found in results:
        for key in [key for key in found if key.startswith("step of")]:
            found[key] = found[key].double()
    near(*results, rtol=1e-5)  # a graph's learning rates and factors are in single precision


@pytest.mark.parametrize("family", [posterity.cfg, posterity.mnf])
def test_replays_draw_leaves_of_one_kind_as_one(monkeypatch: pytest.MonkeyPatch, family: Any) -> None:
    made, x = install(monkeypatch), torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        m = variational(Pictures().double(), family=family, std_init=0.1, seed=3)
        opt = torch.optim.Adam(m.parameters(), lr=0.01, fused=True)
        step = captured(m, opt, mc_samples=2)
        losses = []
        for _ in range(6):
            if graphs:
                losses.append(step(x, Y))
                continue
            opt.zero_grad()
            outputs = m.outputs(x, samples=2)
            nll = torch.stack([F.cross_entropy(each, Y) for each in outputs]).mean()
            loss = elbo(nll, m.kl(), num_data=N)
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
        assert len(made) == graphs
    near(*results, rtol=1e-5)


def test_masks_that_change_in_place_have_a_graph_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = install(monkeypatch), torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    learned = variational(Pictures().double(), family=posterity.mnf, std_init=0.1, seed=3)
    first, second = (
        Variational(Pictures().double(), posterity.prune(learned.posterior, level), seed=3)
        for level in (0.4, 0.6)
    )
    step = captured(first, torch.optim.Adam(first.parameters(), lr=0.01, fused=True))
    for _ in range(4):
        step(x, Y)
    assert len(made) == 1
    first.load_state_dict(second.state_dict())
    for _ in range(4):
        step(x, Y)
    assert len(made) == 2


def test_captured_steps_compile_what_is_marked_for_it() -> None:
    compiled: set[str] = set()

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.add(function.__name__)
        return function

    results = []
    for fuse in (nullcontext(), fusing(compiler)):
        torch.manual_seed(0)
        m = variational(Pictures().double(), family=posterity.mnf, std_init=0.1, seed=3)
        opt = torch.optim.Adam(m.parameters(), lr=0.01)
        step = posterity.compile_step(m, loss_fn, opt, num_data=N)
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).double()
        with fuse:
            losses = [step(x, Y).detach() for _ in range(2)]
        results.append(everything(m, opt) | {"losses": torch.stack(losses)})
    near(*results)
    assert compiled == {"_drawn", "_auxiliary", "_normal_gaps", "_with_divergence"}


@pytest.mark.parametrize("fused", [False, True])
def test_non_finite_replay_changes_nothing_and_raises_at_the_next(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    made = install(monkeypatch)
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_: ["cpu"])
    m = model()
    opt = torch.optim.Adam(m.parameters(), lr=0.01, fused=fused)
    bad = torch.zeros((), dtype=torch.float64)
    step = captured(m, opt)
    step.step.target.loss_fn = lambda net, x, y: loss_fn(net, x, y) + bad
    for _ in range(4):
        step(X, Y)
    assert len(made) == 1
    before = everything(m, opt)
    bad.fill_(torch.nan)
    step(X, Y)
    bad.fill_(0.0)
    after = everything(m, opt)
    assert all(torch.equal(before[key], after[key]) for key in before if key != "draws")
    with pytest.raises(FloatingPointError, match="the loss is nan; the posterior was not touched"):
        step(X, Y)
    step(X, Y)
    assert not torch.equal(before["module.last.weight"], m.module.last.weight)


def test_uncapturable_optimiser_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(monkeypatch)
    m = model()
    with pytest.warns(
        UserWarning, match="steps of SGD are not captured as CUDA graphs: build it with capturable"
    ):
        step = captured(m, torch.optim.SGD(m.parameters(), lr=0.1))
    for _ in range(4):
        step(X, Y)
    assert not made
    assert m.draws == 4


@pytest.mark.filterwarnings("ignore:Net cannot be vectorised")  # before the loop is refused, too
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("family", [DiagonalGaussian, posterity.mnf])
def test_a_loss_that_passes_by_the_drawn_weights_is_refused(family: Any, samples: int) -> None:
    m = model(family=family)
    adam = torch.optim.Adam(m.parameters())
    means = list(m.module.last.parameters())
    losses: list[Callable[..., Tensor]] = [
        lambda _, x, y: F.cross_entropy(m(x), y),  # the Variational, in the place of what it is given
        lambda net, x, y: loss_fn(net, x, y) + m.kl() / N,
        lambda net, x, y: loss_fn(net, x, y) + sum(p.square().sum() for p in means),
        lambda net, x, y: loss_fn(net, x, y) + m.posterior.block("last.bias").std().sum(),
    ]
    before = everything(m, adam)
    for each in losses:
        step = posterity.compile_step(m, each, adam, num_data=N, mc_samples=samples)
        with pytest.raises(
            ValueError, match="the loss depends on parameters other than through the drawn weights"
        ):
            step(X, Y)
        m.draws = 0
        near(before, everything(m, adam))
    step = posterity.compile_step(
        m, lambda net, x, y: loss_fn(net, x, y) + net.last.weight.square().sum(), adam, num_data=N
    )
    assert torch.isfinite(step(X, Y))


def test_priors_by_name_that_are_replaced_are_followed() -> None:
    results = []
    for compiled in (False, True):
        m = model()
        adam = torch.optim.Adam(m.parameters())
        prior = ByName({"*.bias": ScaleMixture(), "*": IsotropicGaussian(2.0)})
        step = posterity.compile_step(m, loss_fn, adam, prior=prior, num_data=N)
        losses = []
        for following in (IsotropicGaussian(2.0), IsotropicGaussian(0.1), model(std_init=0.2).posterior):
            prior.priors["*"] = following
            losses.append(step(X, Y) if compiled else by_hand(m, adam, prior))
        results.append(everything(m, adam) | {"losses": torch.stack(losses)})
    near(*results)


@pytest.mark.parametrize("rule", [posterity.BGD, partial(posterity.VOGN, num_data=N)])
def test_loss_on_undrawn_weights_is_refused_for_rules(rule: Any) -> None:
    net = nn.Linear(4, 3).double()
    opt, params = rule(net), list(net.parameters())
    before = [p.detach().clone() for p in params]
    step = posterity.compile_step(
        net, lambda net, x, y: loss_fn(net, x, y) + sum(p.square().sum() for p in params), opt
    )
    with pytest.raises(ValueError, match="depends on parameters other than through the drawn weights"):
        step(X.double(), Y)
    assert all(map(torch.equal, params, before))
    step = posterity.compile_step(
        net, lambda net, x, y: loss_fn(net, x, y) + 0.0 * net.weight.sum().detach(), opt
    )
    assert torch.isfinite(step(X.double(), Y))
