"""VOGN and OGN against a transcription of the algorithm, with a loop over examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import posterity
from posterity import OGN, VOGN
from posterity.noise import normal

B = 6
HYPER = {
    "num_data": 50,
    "prior_precision": 3.0,
    "temperature": 0.4,
    "betas": (0.8, 0.3),
    "damping": 0.02,
    "augmentation": 5.0,
    "preset": "osawa2019",
    "hess_init": 0.7,
    "lr": 0.01,
}


def data(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (B,), generator=generator)


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.double(), *data(4)


def conv_net() -> tuple[nn.Module, Tensor, Tensor]:
    """With BatchNorm that is frozen to its statistics, so that examples have losses of their own."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    model[1].eval()
    return model.double(), *data(2, 4, 4)


def transcribed(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    samples: int,
    fixed: str = "-",
    noisy: bool = True,
    lrs: Callable[[int], float] = lambda step: HYPER["lr"],
    taus: Callable[[int], float] = lambda step: HYPER["temperature"],
    handed: Mapping[int, float] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and stds by the algorithm's lines, one example after another.

    Before each step in ``handed`` the posterior becomes the prior, with that strength.
    """
    n, (b1, b2) = HYPER["num_data"] * HYPER["augmentation"], HYPER["betas"]
    mu = {name: p.detach().clone() for name, p in model.named_parameters()}
    m, s = {k: 0 * v for k, v in mu.items()}, {k: 0 * v + HYPER["hess_init"] for k, v in mu.items()}
    delta = {k: 0.0 if k.startswith(fixed) else HYPER["prior_precision"] for k in mu}
    prior_mean = {k: 0 * v for k, v in mu.items()}
    for t in range(steps + 1):
        if t in handed:
            since = max((earlier for earlier in handed if earlier < t), default=0)
            guess, share = (HYPER["hess_init"] * b2**t if t == min(handed) else 0.0), 1 - b2 ** (t - since)
            for k in mu:
                m[k] = 0 * m[k]
                if not k.startswith(fixed):
                    delta[k] = delta[k] + handed[t] * n * (s[k] - guess).clamp(min=0) / share / taus(t)
                    prior_mean[k], s[k] = mu[k], 0 * s[k]
        tau, lr = taus(min(t, steps - 1)), lrs(t)
        shift = {k: tau * delta[k] / n + HYPER["damping"] for k in mu}
        sigma = {k: (tau / (n * (s[k] + shift[k]))).sqrt() for k in mu}
        if t == steps:
            return mu, {k: v for k, v in sigma.items() if not k.startswith(fixed)}
        g, h = {k: 0 * v for k, v in mu.items()}, {k: 0 * v for k, v in mu.items()}
        for k in range(samples):
            theta = {}
            for name in mu:
                eps = normal(range(k, k + 1), mu[name].shape, seed=0, step=t, block=name, dtype=torch.float64)
                scale = 0.0 if name.startswith(fixed) or not noisy else sigma[name]
                theta[name] = (mu[name] + scale * eps[0]).requires_grad_()
            for i in range(B):
                loss = F.cross_entropy(functional_call(model, theta, (x[i : i + 1],)), y[i : i + 1])
                for name, grad in zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True):
                    g[name] += grad / B / samples
                    h[name] += grad**2 / B / samples
        for k in mu:
            m[k] = b1 * m[k] + (g[k] + tau * delta[k] / n * (mu[k] - prior_mean[k]))
            s[k] = b2 * s[k] + (1 - b2) * h[k]
            mu[k] = mu[k] - lr * m[k] / (s[k] + shift[k])
    raise AssertionError


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def compare(
    model: nn.Module, opt: posterity.VariationalOptimizer, exact: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    means, stds = exact
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), means[name], rtol=1e-9, atol=1e-12, msg=name)
    found = opt.posterior().std()
    assert found.keys() == stds.keys()
    for name, std in stds.items():
        torch.testing.assert_close(found[name], std, rtol=1e-9, atol=0, msg=name)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("build", "fixed"), [(mlp, "-"), (conv_net, "1.")])
def test_a_run_equals_the_transcription(
    build: Callable[[], tuple[nn.Module, Tensor, Tensor]], fixed: str, samples: int, way: str
) -> None:
    model, x, y = build()
    plain = () if fixed == "-" else f"{fixed}*"
    opt = VOGN(model, mc_samples=samples, deterministic=plain, seed=0, **HYPER)
    exact = transcribed(model, x, y, 6, samples, fixed)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(6):
        step(x, y) if way == "compiled" else opt.step(lambda: loss_fn(model, x, y), batch_size=B)
    compare(model, opt, exact)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_ogn_equals_the_transcription_without_noise(way: str) -> None:
    model, x, y = conv_net()
    opt = OGN(model, deterministic="1.*", **HYPER)
    exact = transcribed(model, x, y, 6, 1, "1.", noisy=False)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(6):
        step(x, y) if way == "compiled" else opt.step(lambda: loss_fn(model, x, y))
    compare(model, opt, exact)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("rule", [VOGN, OGN])
def test_a_posterior_handed_over_is_the_next_prior(rule: type[VOGN | OGN], way: str) -> None:
    model, x, y = conv_net()
    exact = transcribed(model, x, y, 12, 1, "1.", noisy=rule is VOGN, handed={4: 1.0, 8: 3.0})
    opt = rule(model, deterministic="1.*", **({"seed": 0} if rule is VOGN else {}), **HYPER)

    def learner(model: nn.Module, opt: VOGN | OGN) -> Callable[[], object]:
        step = posterity.compile_step(model, loss_fn, opt)
        if way == "compiled":
            return lambda: step(x, y)
        return lambda: opt.step(lambda: loss_fn(model, x, y), batch_size=B)

    learn = learner(model, opt)  # one for all tasks, whose graph, on a GPU, is used again
    for t in range(11):
        if t in (4, 8):
            opt.hand_over(1.0 if t == 4 else 3.0)
        learn()
    resumed = conv_net()[0]
    resumed.load_state_dict(model.state_dict())
    again = rule(resumed, deterministic="1.*", **HYPER)
    again.load_state_dict(opt.state_dict())
    learner(resumed, again)()
    compare(resumed, again, exact)


def test_what_no_data_has_moved_keeps_its_prior() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)).double()
    x, y = data(4)
    opt = VOGN(model, seed=0, **HYPER)
    for _ in range(3):
        opt.step(lambda: F.cross_entropy(model[0](x), y))
    before = opt.posterior().std()
    opt.hand_over()
    after = opt.posterior().std()
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert "known" not in opt.state[model[1].weight]
    assert bool((opt.state[model[0].weight]["known"] > 0).all())


@pytest.mark.parametrize("pruned", [False, True])
def test_loaded_posterior_is_handed_over_with_its_curvature(pruned: bool) -> None:
    model, x, y = mlp()
    x = x.clone()
    x[:, 0] = 0.0  # of an input that says nothing there is no curvature
    hyper = {**HYPER, "betas": (0.8, 0.9), "num_data": 1000}
    leaves = {name: (p.detach(), torch.full_like(p, 0.5)) for name, p in model.named_parameters()}
    wide = posterity.Factorised({name: posterity.DiagonalGaussian(*both) for name, both in leaves.items()})
    opt = VOGN(model, seed=0, **hyper)
    opt.load_posterior(posterity.prune(wide, 0.5) if pruned else wide)
    for t in range(40):
        if t in (3, 20):
            opt.hand_over(10.0)
            assert all(bool((opt.state[p]["known"] >= 0).all()) for p in model.parameters())
        loss = opt.step(lambda: loss_fn(model, x, y))
    assert loss is not None
    assert math.isfinite(float(loss))
    assert all(bool((std >= 0).all()) for std in opt.posterior().std().values())


def test_a_hand_over_counts_all_curvature_of_few_updates() -> None:
    model = nn.Linear(3, 2)  # in single precision, in which 0.9999 is rounded
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.ones(8, 3)
    hyper = {"num_data": 1000, "lr": 0.0, "betas": (0.9, 0.9999), "prior_precision": 1.0}
    opt = OGN(model, **hyper)
    for task in (1, 2):
        for _ in range(500):
            opt.step(lambda: model(x).sum(1).mean())  # every gradient is 1
        opt.hand_over()
        for p in model.parameters():
            torch.testing.assert_close(
                opt.state[p]["known"], torch.full_like(p, 1000.0 * task), rtol=1e-3, atol=0.0
            )
        opt.hand_over()  # nothing was learned since
        assert float(opt.state[model.bias]["known"].max()) < 1002.0 * task


def test_a_loaded_curvature_is_an_estimate_of_its_first_period() -> None:
    std, hyper = 0.1, {"num_data": 100, "lr": 0.0, "betas": (0.9, 0.99), "damping": 0.0}
    x = torch.ones(8, 3, dtype=torch.float64)
    loaded = {"weight": (2, 3), "bias": (2,)}
    q = posterity.Factorised(
        {
            name: posterity.DiagonalGaussian(torch.zeros(shape, dtype=torch.float64), std)
            for name, shape in loaded.items()
        }
    )
    first = 1 / std**2 - 1.0  # its precision without the prior's
    for steps in (0, 5):
        model = nn.Linear(3, 2).double()
        opt = OGN(model, **hyper)
        opt.load_posterior(q)
        for _ in range(steps):
            opt.step(lambda model=model: model(x).sum(1).mean())
        opt.hand_over()
        share = 0.99**steps
        known = torch.full_like(model.weight, share * first + (1 - share) * 100)
        torch.testing.assert_close(opt.state[model.weight]["known"], known)


def test_impossible_hand_over_is_refused_and_changes_nothing() -> None:
    model, x, y = mlp()
    opt = VOGN(model, seed=0, **HYPER)
    opt.step(lambda: loss_fn(model, x, y))
    before = opt.posterior()
    for strength in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="strength must be 0 or more, and finite, not"):
            opt.hand_over(strength)
    with opt.sampled_params(), pytest.raises(RuntimeError, match=r"hand_over\(\) inside sampled_params"):
        opt.hand_over()
    for name, std in opt.posterior().std().items():
        assert torch.equal(std, before.std()[name])
    assert "known" not in opt.state[next(model.parameters())]


def test_micro_batches_are_one_batch_and_schedules_are_followed() -> None:
    model, x, y = mlp()
    opt = VOGN(model, mc_samples=2, seed=0, **HYPER)
    schedule = torch.optim.lr_scheduler.MultiStepLR(opt, [3], 0.1)
    temperature = posterity.warmup(4, start=0.1)
    exact = transcribed(
        model, x, y, 6, 2, lrs=lambda t: HYPER["lr"] * (1.0 if t < 3 else 0.1), taus=temperature
    )
    for t in range(6):
        opt.param_groups[0]["temperature"] = temperature(t)
        for _ in range(2):
            with opt.sampled_params():
                for rows in (slice(0, 4), slice(4, 6)):
                    part = (rows.stop - rows.start) / B
                    (part * loss_fn(model, x[rows], y[rows])).backward()
        opt.step(batch_size=B)
        schedule.step()
    compare(model, opt, exact)


def test_keep_velocity_when_the_learning_rate_drops() -> None:
    results = []
    for keep in (False, True):
        model, x, y = mlp()
        opt = VOGN(model, keep_velocity=keep, seed=0, **HYPER)
        for t in range(6):
            if t == 3:
                opt.param_groups[0]["lr"] = 0.1 * HYPER["lr"]
                if not keep:
                    for p in model.parameters():
                        opt.state[p]["momentum"] *= 10.0
            opt.step(lambda m=model, x=x, y=y: loss_fn(m, x, y))
        results.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-10, atol=0)


def test_examples_that_do_not_add_up_are_refused() -> None:
    model, x, y = mlp()
    opt = VOGN(model, seed=0, **HYPER)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="the layers saw 6 examples, not batch_size=5"):
        opt.step(lambda: loss_fn(model, x, y), batch_size=5)
    assert torch.equal(before, model[0].weight)
    opt.step(lambda: loss_fn(model, x, y))


def test_squares_that_a_context_has_dropped_are_dropped() -> None:
    results = []
    for twice in (False, True):
        model, x, y = mlp()
        opt = VOGN(model, seed=0, **HYPER)
        with opt.sampled_params():
            if twice:
                (3 * loss_fn(model, x, y)).backward()
                opt.zero_grad()
            loss_fn(model, x, y).backward()
        opt.step(batch_size=B)
        results.append(opt.posterior().std()["0.weight"])
    assert torch.equal(*results)


def test_all_refused_weights_are_named_at_once() -> None:
    """Else a user of a GRU would meet four errors, one after another."""
    model = nn.ModuleDict({"cell": nn.GRU(3, 4, batch_first=True), "head": nn.Linear(4, 2)}).double()
    opt = VOGN(model, num_data=8, seed=0)
    x, y = torch.randn(8, 5, 3).double(), torch.randint(0, 2, (8,))
    with pytest.raises(RuntimeError, match=r"all 4 .* \(deterministic='cell\.\*', deterministic_lr=1e-3\)"):
        opt.step(lambda: F.cross_entropy(model["head"](model["cell"](x)[0].mean(1)), y))
    opt = VOGN(model, num_data=8, seed=0, deterministic="cell.*", deterministic_lr=1e-3)
    opt.step(lambda: F.cross_entropy(model["head"](model["cell"](x)[0].mean(1)), y))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_weight_without_visible_examples_is_refused_by_name(way: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    model = Scaled().double()
    x, y = data(4)
    opt = VOGN(model, mc_samples=3, seed=0, **HYPER)
    step = posterity.compile_step(model, loss_fn, opt)
    before = model.layer.weight.detach().clone()
    message = (
        "'scale' is used by an operation that is not a known layer, so VOGN has no per-example gradients of "
        r"it: leave it without noise .*\(deterministic='scale', deterministic_lr=1e-3\), or freeze it"
    )
    with pytest.raises(RuntimeError, match=message):
        step(x, y) if way == "compiled" else opt.step(lambda: loss_fn(model, x, y))
    assert torch.equal(before, model.layer.weight)
    model.scale.requires_grad_(False)
    step(x, y) if way == "compiled" else opt.step(lambda: loss_fn(model, x, y))
    assert not torch.equal(before, model.layer.weight)


def test_one_micro_batch_that_cannot_be_seen_is_enough_to_refuse() -> None:
    model, x, y = mlp()
    opt = VOGN(model, seed=0, **HYPER)
    with pytest.raises(RuntimeError, match=r"'2\.weight' is used by an operation"), opt.sampled_params():
        loss_fn(model, x, y).backward()
        (model[:2](x) @ model[2].weight.t()).sum().backward()
    with opt.sampled_params():
        loss_fn(model, x, y).backward()
        assert model[2].weight.detach().t().norm() > 0  # a look does no harm
    opt.step()


def test_nothing_is_drawn_for_ogn_but_its_posterior_has_a_std() -> None:
    model, x, y = mlp()
    opt = OGN(model, **HYPER)
    weight = model[0].weight.detach().clone()
    with opt.sampled_params():
        assert torch.equal(weight, model[0].weight)
        loss_fn(model, x, y).backward()
    opt.step()
    scale = 1 / (0.4 / (250 * (opt.state[model[0].weight]["hess"] + 0.4 * 3 / 250 + 0.02)))
    torch.testing.assert_close(opt.posterior().std()["0.weight"], 1 / scale.sqrt())


def test_loaded_posterior_keeps_its_stds() -> None:
    model, x, y = mlp()
    opt = VOGN(model, seed=0, **HYPER)
    opt.step(lambda: loss_fn(model, x, y))
    q = opt.posterior()
    other = VOGN(mlp()[0], seed=0, **{**HYPER, "temperature": 0.9})
    other.load_posterior(q)
    for name, std in q.std().items():
        torch.testing.assert_close(other.posterior().std()[name], std)
    assert math.isclose(other.param_groups[0]["temperature"], 0.9)
