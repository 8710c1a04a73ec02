"""K-FAC's captured steps, with a stand-in for CUDA graphs: those that collect factors stay eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import posterity
from conformance.rules import X, Y, everything, loss_fn, net
from conformance.stand_in import Graph, captured, install, near

Make = Callable[..., posterity.VariationalOptimizer]
rules = pytest.mark.parametrize("make", [posterity.NoisyKFAC, posterity.KFAC])


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return install(monkeypatch)


def optimizer(make: Make, model: torch.nn.Module, **more: object) -> posterity.VariationalOptimizer:
    return make(model, **{"num_data": 100, "lr": 0.01, "factors_every": 5, "deterministic": "norm.*", **more})


def complete(model: torch.nn.Module, opt: posterity.VariationalOptimizer) -> dict[str, Tensor]:
    """Everything, and all of the state, as copies."""
    states = {
        f"{name} {key}": value.clone()
        for name, p in model.named_parameters()
        for key, value in opt.state[p].items()
    }
    return everything(model, opt) | states


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_replays_between_factors_equal_eager_steps(make: Make, dtype: torch.dtype, made: list[Graph]) -> None:
    results = []
    for graphs in (False, True):
        model = net().to(dtype)
        opt = optimizer(make, model, **({"mc_samples": 2} if make is posterity.NoisyKFAC else {}))
        step = captured(model, opt)
        losses = []
        for i in range(23):
            if graphs and i == 13:  # what is saved is all there is to go on from
                saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
                model = net(1).to(dtype)
                opt = optimizer(make, model, lr=1.0)
                model.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
                step = captured(model, opt)
            for group in opt.param_groups:
                group["temperature"] = 0.5 if i < 8 else 1.0
                group["lr"] *= 0.5 if i in (4, 18) else 1.0
            n = 7 if i % 6 == 2 else 16
            x, y = X[:n].to(dtype), Y[:n]
            losses.append(float(step(x, y) if graphs else step.step(x, y)))
        results.append({**complete(model, opt), "losses": torch.tensor(losses)})
    near(*results)
    replayed = sorted(number for graph in made for number in graph.replays)
    # Others are the first of their shape: since step 0 has told of blocks, and since state was loaded.
    assert replayed == [i for i in range(23) if i % 5 and i not in (1, 2, 13, 14)]
    assert len(made) == 3  # two shapes, later one; none anew for other factors


@rules
def test_steps_that_make_inverses_alone_are_no_replays(make: Make, made: list[Graph]) -> None:
    results = []
    for graphs in (False, True):
        model = net()
        opt = optimizer(make, model, factors_every=6, inverses_every=4)
        step = captured(model, opt)
        for _ in range(14):
            step(X, Y) if graphs else opt.step(lambda m=model: loss_fn(m))
        results.append(complete(model, opt))
    near(*results)
    (graph,) = made
    assert graph.replays == [2, 3, 5, 7, 9, 10, 11, 13]


def test_factors_in_every_step_leave_nothing_to_capture(made: list[Graph]) -> None:
    model = net()
    step = captured(model, optimizer(posterity.NoisyKFAC, model, factors_every=1))
    for _ in range(4):
        step(X, Y)
    assert not made


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad_at", [3, 4, 5])
def test_what_is_not_finite_moves_nothing_and_is_raised(make: Make, dtype: torch.dtype, bad_at: int) -> None:
    model = net().to(dtype)
    opt = optimizer(make, model)
    step = captured(model, opt)
    x, bad = X.to(dtype), torch.full_like(X, torch.nan, dtype=dtype)
    for _ in range(bad_at):
        step(x, Y)

    def values() -> dict[str, Tensor]:
        tensors = {f"{i}": value for i, value in enumerate(opt.cache.tensors()) if value.is_floating_point()}
        return {key: value.clone() for key, value in {**model.state_dict(), **tensors}.items()}

    before = values()
    if bad_at == 5:  # it collects factors, is eager, and waits
        with pytest.raises(FloatingPointError, match="not touched"):
            step(bad, Y)
    else:
        step(bad, Y)
    assert all(torch.equal(value, before[key]) for key, value in values().items())
    if bad_at == 4:  # the step that comes next is no replay, and learns
        step(x, Y)
        assert not torch.equal(before["last.weight"], model.last.weight)
    if bad_at < 5:
        with pytest.raises(FloatingPointError, match="not touched"):
            step(x, Y)
    before = values()
    step(x, Y)
    assert not torch.equal(before["last.weight"], model.last.weight)
    assert all(torch.isfinite(value).all() for value in values().values())


def test_updates_of_blocks_are_counted_from_their_own_start(made: list[Graph]) -> None:
    seen: list[list[int]] = []

    class Counts(posterity.NoisyKFAC):  # type: ignore[misc]
        def updates(self, blocks):  # type: ignore[no-untyped-def]
            seen.append(sorted(int(stats.step) for _, _, stats, _ in blocks))
            return super().updates(blocks)

    model = net()
    opt = optimizer(Counts, model)
    step = captured(model, opt)
    for i in range(9):
        model.first.requires_grad_(i >= 3)
        step(X, Y)
        assert int(opt.state[model.last.weight]["step"]) == i + 1
        assert int(opt.state[model.first.bias]["step"]) == max(0, i - 2)
        assert seen[-1] == ([i + 1] if i < 5 else [i - 2, i + 1])  # layers tell of blocks in step 5
    assert made[-1].replays == [7, 8]
