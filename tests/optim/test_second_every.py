"""IVON's steps between two estimates of the Hessian: however they are run, they are the same steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import posterity
from conformance.rules import X, Y, everything, loss_fn, net
from conformance.stand_in import captured, install, near

STEPS = 8


def optimizer(model: nn.Module, **more: object) -> posterity.IVON:
    settings = {"num_data": 100, "mc_samples": 2, "betas": (0.9, 0.9), "second_every": 3, "seed": 0}
    return posterity.IVON(model, **{**settings, **more})


def hessians(opt: posterity.IVON) -> Tensor:
    return torch.cat([opt.state[p]["hess"].flatten() for p in opt.parameters() if "hess" in opt.state[p]])


def by_contexts(model: nn.Module, opt: posterity.IVON, x: Tensor = X) -> None:
    opt.zero_grad()
    for _ in range(2):
        with opt.sampled_params():
            loss_fn(model, x).backward()
    opt.step()


def test_the_hessian_moves_in_every_third_step_alone() -> None:
    model = net().double()
    opt = optimizer(model, deterministic="norm.*")
    step = posterity.compile_step(model, loss_fn, opt)
    moved = []
    before = torch.tensor(opt.param_groups[0]["hess_init"]).double()
    for _ in range(STEPS):
        step(X.double(), Y)
        moved.append(not bool((hessians(opt) == before).all()))
        before = hessians(opt).clone()
    assert moved == [i % 3 == 0 for i in range(STEPS)]


def test_contexts_closures_and_stacks_take_the_same_steps() -> None:
    results, x = [], X.double()
    for how in ("contexts", "closure", "stack"):
        model = net().double()
        opt = optimizer(model)
        step = posterity.compile_step(model, loss_fn, opt)
        for _ in range(STEPS):
            if how == "contexts":
                by_contexts(model, opt, x)
            elif how == "closure":
                opt.step(lambda m=model: loss_fn(m, x))
            else:
                step(x, Y)
        results.append(everything(model, opt))
    for other in results[1:]:
        for key, value in results[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_run_resumes_bitwise_from_any_checkpoint(stop: int) -> None:
    model = net()
    opt = optimizer(model)
    for _ in range(stop):
        by_contexts(model, opt)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    again = net(1)
    other = optimizer(again, seed=1, second_every=1)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for one, its in ((model, opt), (again, other)):
        for _ in range(STEPS):
            by_contexts(one, its)
    for key, value in everything(model, opt).items():
        assert torch.equal(value, everything(again, other)[key]), key


def test_graphs_are_of_steps_between(monkeypatch: pytest.MonkeyPatch) -> None:
    made, results = install(monkeypatch), []
    for graphs in (False, True):
        model = net()
        opt = optimizer(model)
        step = captured(model, opt)
        for _ in range(STEPS):
            step(X, Y) if graphs else opt.step(lambda m=model: loss_fn(m))
        results.append(everything(model, opt))
    near(*results)
    (graph,) = made
    assert graph.replays == [i for i in range(2, STEPS) if i % 3]


def test_groups_share_the_setting() -> None:
    opt = optimizer(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="second_every"):
        opt.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))], "second_every": 2})
