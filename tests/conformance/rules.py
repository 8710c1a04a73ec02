"""The table of rules that the conformance tests run over, and what they run. A new method is one more row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity import VariationalOptimizer


@dataclass(frozen=True)
class Rule:
    name: str
    make: Callable[..., VariationalOptimizer]
    bad: dict[str, list[Any]]  # hyper-parameters that must be refused
    draws: bool = True  # whether it learns from weight samples
    layers: bool = False  # whether it learns from layers alone, and trains what is deterministic itself
    streams: bool = False  # whether it counts the examples of a step, and not those of the data
    captures: bool = True  # whether every step may be a CUDA graph

    def __repr__(self) -> str:
        return self.name


_SHARED: dict[str, list[Any]] = {"mc_samples": [0, 2.5], "seed": [0.5, "0"]}
_STEPS: dict[str, list[Any]] = {
    "std_scale": [0.0, math.inf],
    "std_init": [-0.1, "0.1", math.inf],
    "max_step": [0.0, math.nan],
}
_GAUSS_NEWTON: dict[str, list[Any]] = {
    "num_data": [0, math.inf, torch.nn.Linear(1, 1)],
    "prior_precision": [-1.0, math.inf],
    "temperature": [0.0, math.inf, math.nan],
    "betas": [(1.0, 0.9), 0.9, (0.9,), ("0.9", 0.9)],
    "hess_init": [-1.0, math.inf],
    "damping": [-1e-3, math.inf],
    **_STEPS,
    "augmentation": [0.0, math.inf],
    "keep_velocity": [torch.ones(2).numpy(), 1],
    "lr_unit": [0.0, math.inf],
    "lr": [-1.0, math.nan, math.inf, torch.zeros(2)],
}
RULES = [
    Rule(
        "BGD",
        lambda params, **kw: posterity.BGD(params, **{"mc_samples": 3, "batch_size": 16, "seed": 0, **kw}),
        {
            **_STEPS,
            "lr": [-1.0, math.nan, math.inf],
            "temperature": [0.0, math.nan, math.inf],
            "batch_size": [0, 2.5, "16"],
            **_SHARED,
        },
        streams=True,
    ),
    Rule(
        "BONG",
        lambda params, **kw: posterity.BONG(params, **{"mc_samples": 3, "batch_size": 16, "seed": 0, **kw}),
        {
            **_STEPS,
            "lr": [-1.0, math.nan, math.inf],
            "consolidate_after": [0.0, math.nan, math.inf],
            "temperature": [0.0, math.nan, math.inf],
            "batch_size": [0, 2.5, "16"],
            **_SHARED,
        },
        layers=True,
        streams=True,
    ),
    Rule(
        "IVON",
        lambda params, **kw: posterity.IVON(
            # A second β that a few steps show the Hessian moving under.
            params,
            **{"num_data": 100, "mc_samples": 3, "betas": (0.9, 0.9), "seed": 0, **kw},
        ),
        {
            "num_data": [0, math.inf, torch.nn.Linear(1, 1)],
            "prior_precision": [-1.0, math.inf],
            "temperature": [0.0, math.nan, math.inf],
            "betas": [(0.9, 1.0), 0.9],
            "hess_init": [0.0, math.inf],
            "clip_radius": [0.0, math.nan, "1"],
            "second_every": [0, 2.5],
            **_STEPS,
            "lr": [-1.0, math.nan, math.inf],
            **_SHARED,
        },
    ),
    Rule(
        "VOGN",
        lambda params, **kw: posterity.VOGN(params, **{"num_data": 100, "mc_samples": 3, "seed": 0, **kw}),
        {**_GAUSS_NEWTON, **_SHARED},
        layers=True,
    ),
    Rule(
        "OGN",
        lambda params, mc_samples=1, seed=0, **kw: posterity.OGN(params, **{"num_data": 100, **kw}),
        _GAUSS_NEWTON,
        draws=False,
        layers=True,
    ),
    Rule(
        "NoisyKFAC",
        lambda params, **kw: posterity.NoisyKFAC(
            # Factors of every step, so that a few steps average some.
            params,
            **{"num_data": 100, "mc_samples": 3, "factors_every": 1, "seed": 0, **kw},
        ),
        {**_GAUSS_NEWTON, "factors_every": [0], "inverses_every": [1.5], **_SHARED},
        layers=True,
        captures=False,
    ),
    Rule(
        "KFAC",
        lambda params, mc_samples=1, seed=0, **kw: posterity.KFAC(
            params, **{"num_data": 100, "factors_every": 2, **kw}
        ),
        {**_GAUSS_NEWTON, "factors_every": [0], "inverses_every": [0]},
        draws=False,
        layers=True,
        captures=False,
    ),
]
rules = pytest.mark.parametrize("rule", RULES, ids=repr)
drawing_rules = pytest.mark.parametrize("rule", [rule for rule in RULES if rule.draws], ids=repr)
layer_rules = pytest.mark.parametrize("rule", [rule for rule in RULES if rule.layers], ids=repr)
# Rules with steps that may be CUDA graphs: of those that must not all be, most are.
_CAPTURED = [
    rule if rule.captures else replace(rule, make=partial(rule.make, factors_every=7)) for rule in RULES
]
captured_rules = pytest.mark.parametrize("rule", _CAPTURED, ids=repr)
captured_layer_rules = pytest.mark.parametrize("rule", [rule for rule in _CAPTURED if rule.layers], ids=repr)
captured_momentum_rules = pytest.mark.parametrize(
    "rule", [rule for rule in _CAPTURED if rule.layers and not rule.streams], ids=repr
)
captured_squares_rules = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.captures and rule.layers], ids=repr
)
# Those that take any weight, however it is used.
tensor_rules = pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.layers], ids=repr)

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Small, with BatchNorm and a parameter that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_fn(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(model(x), y)


def by_closure(model: nn.Module, opt: VariationalOptimizer, x: Tensor = X) -> None:
    opt.step(lambda: loss_fn(model, x), batch_size=16)


def by_context(model: nn.Module, opt: VariationalOptimizer, x: Tensor = X) -> None:
    for _ in range(opt.param_groups[0]["mc_samples"]):
        with opt.sampled_params():
            loss_fn(model, x).backward()
    opt.step(batch_size=16)


def by_stack(model: nn.Module, opt: VariationalOptimizer, x: Tensor = X, chunk: int | None = None) -> None:
    posterity.compile_step(model, loss_fn, opt, chunk=chunk)(x, Y)


def by_chunks(model: nn.Module, opt: VariationalOptimizer, x: Tensor = X) -> None:
    by_stack(model, opt, x, chunk=2)


def everything(model: nn.Module, opt: VariationalOptimizer) -> dict[str, Tensor]:
    """Weights, buffers and posterior stds, copied."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {f"std {name}": value.clone() for name, value in opt.posterior().std().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


ALL_WAYS = (by_closure, by_context, by_stack, by_chunks)
