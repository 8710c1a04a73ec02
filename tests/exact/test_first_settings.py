"""What makes the defaults serve at the first try, each against a plain transcription in double precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import posterity
from posterity import BGD, IVON, KFAC, OGN, VOGN, DiagonalGaussian, Factorised, NoisyKFAC
from posterity.optim.bgd import bgd_std
from posterity.optim.presets import TABLE

B = 8
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "BGD": lambda model, **kw: BGD(model, mc_samples=2, seed=0, **kw),
    "IVON": lambda model, **kw: IVON(model, num_data=40, seed=0, **kw),
    "VOGN": lambda model, **kw: VOGN(model, num_data=40, seed=0, **kw),
    "OGN": lambda model, **kw: OGN(model, num_data=40, **kw),
}
BLOCKS: dict[str, Callable[..., Any]] = {
    "NoisyKFAC": lambda model, **kw: NoisyKFAC(model, num_data=40, seed=0, **kw),
    "KFAC": lambda model, **kw: KFAC(model, num_data=40, **kw),
}
elementwise = pytest.mark.parametrize("rule", ELEMENTWISE)
blocks = pytest.mark.parametrize("rule", BLOCKS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(B, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (B,), generator=generator)


def step(model: nn.Module, opt: posterity.VariationalOptimizer, number: int) -> None:
    x, y = batch(number)
    opt.step(lambda: F.cross_entropy(model(x), y))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def squares(model: nn.Module, number: int) -> dict[str, Tensor]:
    """The mean of squared gradients of single examples, by a loop over them."""
    x, y = batch(number)
    params = dict(model.named_parameters())
    found = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(B):
        loss = F.cross_entropy(functional_call(model, params, (x[i : i + 1],)), y[i : i + 1])
        for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
            found[name] += grad.square() / B
    return found


def unbounded(
    model: nn.Module, opt: posterity.VariationalOptimizer
) -> tuple[nn.Module, posterity.VariationalOptimizer]:
    """A copy whose next step has no bound."""
    model, opt = copy.deepcopy((model, opt))
    for group in opt.param_groups:
        group["max_step"] = math.inf
    return model, opt


# max_step.


@elementwise
def test_max_step_clamps_each_weight_in_its_stds(rule: str) -> None:
    model = net()
    opt = ELEMENTWISE[rule](model)
    bound, held, all_of_them = 0.2, 0, 0
    opt.param_groups[0] |= {"max_step": bound, "settle_after": 3.0}
    without_data = opt.posterior().std()
    for number in range(4):
        free_model, free = unbounded(model, opt)
        before, std = weights(model), opt.posterior().std() if rule == "BGD" else without_data
        step(model, opt, number)
        step(free_model, free, number)
        after, far = weights(model), weights(free_model)
        for name, start in before.items():
            settled = 1 / math.sqrt(1 + (number + 1) / 3)
            begun = 1.0 if rule == "BGD" else 1 - 0.9 ** (number + 1)
            reach, away = begun * bound * settled * std[name], settled * (far[name] - start)
            expected = start + torch.minimum(torch.maximum(away, -reach), reach)
            torch.testing.assert_close(after[name], expected, rtol=1e-12, atol=1e-15)
            held += int((away.abs() > reach).sum())
            all_of_them += start.numel()
        if rule != "BGD":  # whose bound is one on its stds as well
            torch.testing.assert_close(opt.posterior().std(), free.posterior().std(), rtol=1e-12, atol=0)
    assert 0 < held < all_of_them


@blocks
@pytest.mark.parametrize("bound", [1e-3, 0.06, 1e3])
def test_max_step_shortens_a_block_to_its_root_mean_square_in_stds(rule: str, bound: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    settings = {"prior_precision": 3.0, "temperature": 0.7, "augmentation": 2.0, "settle_after": 4}
    opt = BLOCKS[rule](model, max_step=10 * bound * math.sqrt(1 + 1 / 4), **settings)  # 1 − β1 is a tenth
    before = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], 1)
    step(model, opt, 0)
    group, state = opt.param_groups[0], opt.state[model.weight]
    N, decay = 80 / 0.7, 0.7 * 3.0 / 80
    root = math.sqrt(decay + group["damping"])
    A, S = state["inputs"], state["outputs"]
    pi = torch.sqrt((A.trace() / 5) / (S.trace() / 3))
    A, S = A + pi * root * torch.eye(5).double(), S + root / pi * torch.eye(3).double()
    precision = N * torch.kron(S, A)
    momentum = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1) + decay * before
    rate = group["lr"] * group["lr_unit"] / math.sqrt(1 + 1 / 4)
    free = -rate * N * torch.linalg.solve(precision, momentum.flatten())
    std = 1 / math.sqrt(N * (decay + group["damping"]))  # without data
    length = torch.sqrt(free @ free / 15) / std
    moved = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], 1) - before
    expected = free * min(1.0, bound / float(length))
    torch.testing.assert_close(moved.flatten(), expected, rtol=1e-8, atol=1e-14)
    found = torch.sqrt(moved.flatten() @ moved.flatten() / 15) / std
    assert float(found) == pytest.approx(min(bound, float(length)), rel=1e-8)
    assert (bound < float(length)) == (bound < 1e3)  # both sides of the bound are seen


def test_bgd_bounds_the_logarithm_of_stds() -> None:
    std = torch.tensor([0.3, 0.3, 0.3, 0.01], dtype=torch.float64)
    noise = torch.tensor([40.0, -40.0, 0.5, 3.0], dtype=torch.float64)
    change = (bgd_std(std, noise, 0.2) / std).log()
    expected = [
        -math.asinh(max(-0.2, min(0.2, 0.5 * float(s) * float(g)))) for s, g in zip(std, noise, strict=True)
    ]
    torch.testing.assert_close(change, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    model = net()
    opt = BGD(model, max_step=0.1, mc_samples=2, seed=0)
    free_model, free = unbounded(model, opt)
    before = opt.posterior().std()
    step(model, opt, 0)
    step(free_model, free, 0)
    held = 0
    for name, wide in free.posterior().std().items():
        most, change = math.asinh(0.1), (wide / before[name]).log()
        found = (opt.posterior().std()[name] / before[name]).log()
        torch.testing.assert_close(found, change.clamp(-most, most), rtol=1e-9, atol=1e-14)
        held += int((change.abs() > most).sum())
    assert held > 0


# Stds at the start.


def conv_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 5)).double()


# 108 weights of the convolution have a fan-in of 27, 40 of the other layer one of 8.
MEAN_FAN_IN = (108 * 27 + 40 * 8) / 148


@pytest.mark.parametrize("make", [VOGN, OGN, NoisyKFAC, KFAC, IVON])
@pytest.mark.parametrize("more", [{}, {"std_scale": 0.3}, {"std_init": 0.02}])
def test_the_first_std_is_std_scale_over_the_root_of_the_mean_fan_in(
    make: Any, more: dict[str, float]
) -> None:
    settings = {"num_data": 500, "prior_precision": 7.0, "temperature": 0.3, **more}
    if make is not IVON:
        settings["augmentation"] = 4.0
    stds = make(conv_net(), **settings).posterior().std()
    scale = more.get("std_scale", TABLE["VOGN" if make is not IVON else "IVON"]["default"]["std_scale"])
    expected = more.get("std_init", scale / math.sqrt(MEAN_FAN_IN))
    for name, std in stds.items():
        torch.testing.assert_close(std, torch.full_like(std, expected), rtol=1e-12, atol=0, msg=name)


def test_the_first_std_of_bgd_is_that_of_its_own_fan_in() -> None:
    stds = BGD(conv_net(), std_scale=0.5).posterior().std()
    fans = {"0.weight": 27, "0.bias": 4, "1.weight": 4, "1.bias": 4, "3.weight": 8, "3.bias": 5}
    assert stds.keys() == fans.keys()
    for name, std in stds.items():
        torch.testing.assert_close(std, torch.full_like(std, 0.5 / math.sqrt(fans[name])), rtol=1e-12, atol=0)


def test_a_std_wider_than_the_priors_is_refused() -> None:
    for make in (VOGN, NoisyKFAC, IVON):
        with pytest.raises(ValueError, match=r"a std of 0.5 at the start is wider than the prior's, 0.1:"):
            make(net(), num_data=10, std_init=0.5, prior_precision=100.0)


# lr_unit.


@pytest.mark.parametrize("make", [VOGN, OGN, NoisyKFAC, KFAC])
def test_lr_is_sgds_without_curvature(make: Any) -> None:
    settings = {"num_data": 50, "prior_precision": 5.0, "temperature": 0.5, "betas": (0.7, 0.9)}
    group = make(net(), hess_init=0.2, damping=0.3, augmentation=2.0, **settings).param_groups[0]
    assert group["lr_unit"] == pytest.approx(0.3 * (0.2 + 0.3 + 0.5 * 5.0 / 100), rel=1e-12)
    # At the start, with momentum that has settled and no curvature from data, a step is lr · gradient.
    opt = make(net(), **settings)
    state = {"hess": torch.zeros(1, dtype=torch.float64)}
    rate = float(opt.rate(state, opt.param_groups[0], B))
    assert rate / (1 - 0.7) == pytest.approx(opt.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize("make", [VOGN, OGN, NoisyKFAC, KFAC])
def test_lr_and_its_unit_are_one_rate(make: Any) -> None:
    found = []
    unit = make(net(), num_data=40).param_groups[0]["lr_unit"]
    for settings in ({"lr": 0.5}, {"lr": 0.5 * unit, "lr_unit": 1.0}):
        model = net()
        opt = (
            make(model, num_data=40, **settings)
            if make in (OGN, KFAC)
            else make(model, num_data=40, seed=0, **settings)
        )
        for number in range(3):
            step(model, opt, number)
        found.append(weights(model))
    assert not torch.equal(found[0]["0.weight"], weights(net())["0.weight"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make", [VOGN, OGN, NoisyKFAC, KFAC])
def test_a_run_without_damping_moves(make: Any) -> None:
    model = net()
    opt = make(model, num_data=40, damping=0.0)
    step(model, opt, 0)
    for name, before in weights(net()).items():
        assert not torch.equal(weights(model)[name], before), name


# The running mean of squares.


def test_early_curvature_is_the_mean_over_batches() -> None:
    model = net()
    opt = OGN(model, num_data=40, lr=0.0, betas=(0.9, 0.75))
    expected: dict[str, Tensor] = {}
    for number in range(7):
        step(model, opt, number)
        own = squares(model, number)
        weight = max(1 / (number + 1), 0.25)
        expected = {name: torch.lerp(expected.get(name, ĥ), ĥ, weight) for name, ĥ in own.items()}
        if number == 2:
            every = [squares(model, each) for each in range(3)]
            plain = {name: sum(each[name] for each in every) / 3 for name in own}
            torch.testing.assert_close(plain, expected, rtol=1e-12, atol=0)
        for name, p in model.named_parameters():
            torch.testing.assert_close(opt.state[p]["hess"], expected[name], rtol=1e-10, atol=1e-14)


def test_curvature_of_norms_is_the_mean_of_the_batches_that_have_factors() -> None:
    model = net()
    opt = KFAC(model, num_data=40, lr=0.0, betas=(0.9, 0.75), factors_every=3)
    expected, seen = {}, 0
    for number in range(17):
        step(model, opt, number)
        if number % 3 == 0:
            seen += 1
            weight = max(1 / seen, 0.25)
            own = {name: ĥ for name, ĥ in squares(model, number).items() if name.startswith("1.")}
            expected = {
                name: (1 - weight) * expected.get(name, 0 * ĥ) + weight * ĥ for name, ĥ in own.items()
            }
        for name, p in model[1].named_parameters(prefix="1"):
            torch.testing.assert_close(opt.state[p]["hess"], expected[name], rtol=1e-10, atol=1e-14)
    assert seen > 1 / 0.25


# What is handed on.


def test_hand_over_of_averaged_curvature_is_unbiased_in_every_period() -> None:
    model = net()
    opt = OGN(model, num_data=40, lr=0.0, betas=(0.9, 0.75), temperature=0.5, augmentation=2.0)
    N, mean = 80 / 0.5, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number in range(6):
        step(model, opt, number)
        weight = max(1 / (number + 1), 0.25)
        mean = {name: (1 - weight) * mean[name] + weight * ĥ for name, ĥ in squares(model, number).items()}
    opt.hand_over()
    for name, p in model.named_parameters():
        torch.testing.assert_close(opt.state[p]["known"], N * mean[name], rtol=1e-10, atol=1e-12)
    # From here on the average begins with 0, and is divided by the weight of what it has seen.
    later = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number in range(6, 9):
        step(model, opt, number)
        later = {name: 0.75 * later[name] + 0.25 * ĥ for name, ĥ in squares(model, number).items()}
    opt.hand_over()
    for name, p in model.named_parameters():
        expected = N * (mean[name] + later[name] / (1 - 0.75**3))
        torch.testing.assert_close(opt.state[p]["known"], expected, rtol=1e-10, atol=1e-12)


def narrow(model: nn.Module, seed: int = 3) -> Factorised:
    generator = torch.Generator().manual_seed(seed)
    return Factorised(
        {
            name: DiagonalGaussian(
                p.detach().clone(), 0.01 + 0.01 * torch.rand(p.shape, generator=generator, dtype=p.dtype)
            )
            for name, p in model.named_parameters()
        }
    )


@pytest.mark.parametrize("make", [VOGN, OGN, NoisyKFAC, KFAC])
def test_loaded_posterior_keeps_its_stds_up_to_one_batch(make: Any) -> None:
    model = net()
    opt = make(model, num_data=40, lr=0.0, betas=(0.9, 0.99))
    q = narrow(model)
    opt.load_posterior(q)
    own = squares(model, 0) if make in (OGN, KFAC) else None
    step(model, opt, 0)
    single = [name for name in q.tensors if name.startswith("1.")] if opt.matrices else list(q.tensors)
    group = opt.param_groups[0]
    shift = group["prior_precision"] / 40 + group["damping"]
    for name in single:
        before, after = q.std()[name], opt.posterior().std()[name]
        hess = 1 / (40 * before**2) - shift
        # The batch's own curvature is at least 0.
        assert bool((after**-2 >= 0.99 * (40 * hess) + 40 * shift - 1e-9).all()), name
        if own is not None:
            torch.testing.assert_close(after**-2, 40 * (0.99 * hess + 0.01 * own[name] + shift))


@blocks
def test_factors_of_a_loaded_posterior_are_averaged_with_the_batches(rule: str) -> None:
    model = net()
    opt = BLOCKS[rule](model, lr=0.0, betas=(0.9, 0.99))
    step(model, opt, 0)
    q = opt.posterior()
    other = BLOCKS[rule](model, lr=0.0, betas=(0.9, 0.99))
    other.load_posterior(q)
    step(model, other, 1)
    for name, std in q.std().items():
        torch.testing.assert_close(other.posterior().std()[name], std, rtol=0.05, atol=0, msg=name)


@blocks
def test_a_posterior_of_some_weights_of_a_layer_can_be_loaded(rule: str) -> None:
    for only in ("0.bias", "0.weight"):
        model = net()
        opt = BLOCKS[rule](model)
        opt.load_posterior(Factorised({only: narrow(model).block(only)}))
        for number in range(2):
            step(model, opt, number)
        assert "0.weight+0.bias" in opt.posterior().blocks


# Presets, and the numbers that follow from others.

MAKERS: dict[Any, str] = {
    BGD: "BGD",
    IVON: "IVON",
    VOGN: "VOGN",
    OGN: "VOGN",
    NoisyKFAC: "NoisyKFAC",
    KFAC: "NoisyKFAC",
}
makers = pytest.mark.parametrize("make", MAKERS)


def required(make: Any) -> dict[str, int]:
    return {} if make is BGD else {"num_data": 40}


@makers
def test_an_unknown_preset_is_refused_with_those_that_exist(make: Any) -> None:
    with pytest.raises(ValueError, match="there is no preset 'osawa': choose one of 'default'") as error:
        make(net(), preset="osawa", **required(make))
    message = str(error.value)
    assert "\n" not in message
    assert all(repr(name) in message for name in TABLE[MAKERS[make]])


@makers
def test_settings_are_the_users_then_the_presets_then_the_defaults(make: Any) -> None:
    presets = TABLE[MAKERS[make]]
    for preset, own in presets.items():
        group = make(net(), preset=preset, **required(make)).param_groups[0]
        for key, value in {**presets["default"], **own}.items():
            assert group[key] == (tuple(value) if isinstance(value, list) else value), (preset, key)
        given = make(net(), preset=preset, max_step=0.5, lr=0.25, **required(make)).param_groups[0]
        assert (given["max_step"], given["lr"]) == (0.5, 0.25)
        left = make(net(), preset=preset, max_step=None, lr=None, **required(make)).param_groups[0]
        assert (left["max_step"], left["lr"]) == (group["max_step"], group["lr"])


DERIVED = {IVON: ("hess_init",), VOGN: ("damping", "lr_unit"), NoisyKFAC: ("damping", "lr_unit")}
deriving = pytest.mark.parametrize("make", DERIVED)


@deriving
def test_resuming_keeps_derived_numbers(make: Any) -> None:
    model, other = net(), net()
    opt = make(model, num_data=40, std_scale=0.2, prior_precision=2.0, seed=0)
    step(model, opt, 0)
    resumed = make(other, num_data=1000, seed=5)
    old, new = opt.param_groups[0], resumed.param_groups[0]
    assert all(old[key] != new[key] for key in DERIVED[make])
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    new = resumed.param_groups[0]
    assert all(old[key] == new[key] for key in (*DERIVED[make], "std_scale", "max_step", "num_data"))
    for number in (1, 2):
        step(model, opt, number)
        step(other, resumed, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@deriving
def test_added_group_has_its_own_derived_settings(make: Any) -> None:
    model = net()
    named = list(model.named_parameters())
    opt = make(named[:2], num_data=40, std_scale=0.2)
    opt.add_param_group({"params": named[4:]})
    opt.add_param_group({"params": named[2:4], "std_scale": 0.4})
    stds = opt.posterior().std()
    expected = {
        "0.weight": 0.2 / 2,
        "0.bias": 0.2 / 2,
        "3.weight": 0.2 / math.sqrt(6),
        "1.weight": 0.4 / math.sqrt(6),
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            stds[name], torch.full_like(stds[name], value), rtol=1e-12, atol=0, msg=name
        )
    for key in DERIVED[make]:
        assert len({group[key] for group in opt.param_groups}) == 3, key


@pytest.mark.parametrize(
    ("make", "preset", "given"),
    [
        (posterity.BGD, "zeno2018", {"std_scale": 0.4}),
        (partial(posterity.IVON, num_data=100), "shen2024", {"std_scale": 0.4}),
        (partial(posterity.IVON, num_data=100), "shen2024", {"std_init": 0.2}),
        (partial(posterity.VOGN, num_data=100), "osawa2019", {"std_scale": 0.4}),
        (partial(posterity.VOGN, num_data=100), "osawa2019", {"std_init": 0.2}),
        (partial(posterity.KFAC, num_data=100), "osawa2019", {"std_init": 0.2}),
    ],
)
def test_a_users_width_sets_aside_the_presets(make: Any, preset: str, given: dict[str, float]) -> None:
    layer = nn.Linear(4, 2, bias=False)
    extra = {} if make is posterity.BGD else {"prior_precision": 1.0}
    if preset == "osawa2019":
        extra["hess_init"] = 0.0
    std = make(layer, preset=preset, **given, **extra).posterior().std()["weight"]
    torch.testing.assert_close(std, torch.full_like(std, 0.2))
    group = {"params": list(layer.named_parameters()), **given}
    std = make([group], preset=preset, **extra).posterior().std()["weight"]
    torch.testing.assert_close(std, torch.full_like(std, 0.2))


def test_two_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="std_init and damping set the std at the start"):
        posterity.VOGN(nn.Linear(2, 1), num_data=10, std_init=0.1, damping=0.1)
