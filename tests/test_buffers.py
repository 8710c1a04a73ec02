"""Buffers are kept and put back, whatever a forward pass does with them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from posterity import buffers
from posterity.buffers import Keeper, StepBuffers
from posterity.flat import Layout


class Odd(nn.Module):
    """Buffers of several kinds: nested, shared, absent, expanded, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.twice = nn.ModuleList([self.norm, nn.Sequential()])
        self.other = nn.BatchNorm1d(3)
        self.register_buffer("absent", None)
        self.register_buffer("wide", torch.zeros(1, 3).expand(4, 3))
        self.register_buffer("table", torch.arange(6.0).view(2, 3), persistent=False)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def spoil(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if name != "wide":
            buffer.fill_(9)


@pytest.mark.usefixtures("_kernel")
def test_buffers_come_back_as_often_as_they_were_kept() -> None:
    model = Odd()
    keeper = Keeper(model)
    for number in range(3):
        model.norm.running_mean.fill_(number)
        before = values(model)
        keeper.keep()
        spoil(model)
        keeper.restore()
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "table", model.table + 1),  # as many a forward pass does
        lambda model: setattr(model, "other", nn.BatchNorm1d(3)),
        lambda model: model.norm.double(),
        lambda model: setattr(model.norm.running_var, "data", torch.full((3,), 5.0)),
    ],
)
def test_buffers_that_are_replaced_are_put_back_by_name(change, when: str) -> None:
    model = Odd()
    keeper = Keeper(model)
    keeper.keep()
    if when == "before":
        change(model)
        keeper.keep()
    before = values(model)
    if when == "within":
        change(model)
    spoil(model)
    keeper.restore()
    for name, value in model.named_buffers():
        assert torch.equal(value.double(), before[name].double()), name


def test_a_first_buffer_or_module_is_found() -> None:
    model = nn.Sequential(nn.ReLU())
    keeper = Keeper(model)
    keeper.keep()
    model[0].register_buffer("late", torch.ones(2))
    keeper.keep()
    model[0].norm = nn.BatchNorm1d(3)
    keeper.keep()
    before = values(model)
    assert len(before) == 4
    spoil(model)
    keeper.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_buffer_that_has_grown_is_kept_whole() -> None:
    model = Odd()
    keeper = Keeper(model)
    keeper.keep()
    model.table.resize_(3, 3).fill_(2.0)
    keeper.keep()
    spoil(model)
    keeper.restore()
    assert torch.equal(model.table, torch.full((3, 3), 2.0))


def test_keeping_begun_in_inference_mode_goes_on_outside() -> None:
    model = Odd()
    keeper = Keeper(model)
    with torch.inference_mode():
        keeper.keep()
    model.norm.running_mean.fill_(4.0)
    keeper.keep()
    spoil(model)
    keeper.restore()
    assert torch.equal(model.norm.running_mean, torch.full((3,), 4.0))


@pytest.fixture(params=[False, True], ids=["apart", "one kernel"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(buffers, "kernels", SimpleNamespace(transfer=transfer))
        monkeypatch.setattr(buffers._Words, "fit", lambda own: True)


def transfer(
    layout: Layout, pointers: Tensor, flat: Tensor, *, read: bool, unless: Tensor | None = None
) -> None:
    """What the kernel does, on a CPU."""
    for place, start, size in zip(pointers.tolist(), layout.starts, layout.sizes, strict=True):
        here, count = flat.data_ptr() + start * flat.element_size(), size * flat.element_size()
        if unless is None or not unless:
            ctypes.memmove(*((here, place) if read else (place, here)), count)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("ok", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: setattr(model, "table", model.table + 1),
        lambda model: model.norm.double(),
    ],
)
def test_a_flag_decides_whether_buffers_come_back(change, ok: bool) -> None:
    model = Odd()
    keeper = Keeper(model)
    for number in range(2):
        model.norm.running_mean.fill_(number)
        keeper.keep()
        before = values(model)
        spoil(model)
        model.norm.running_var.fill_(torch.nan)
        change(model)
        after = values(model)
        keeper.restore_unless(torch.tensor(ok))
        for name, value in model.named_buffers():
            expected = (after if ok else before)[name].to(value.dtype)
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_script_has_buffers_too() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    keeper = Keeper(model)
    for _ in range(2):
        keeper.keep()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(5, 3))
        keeper.restore()
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_samples_of_a_step_share_initial_buffers_and_the_first_result_is_kept() -> None:
    model = nn.BatchNorm1d(1)
    steps = StepBuffers(model)
    for step in range(2):
        before = float(model.running_mean)
        for number in range(3):
            steps.enter(number)
            assert float(model.running_mean) == before
            model.running_mean.add_(number + 1.0)
            steps.leave(number, used=True)
            assert float(model.running_mean) == before + 1.0
        steps.finish()
        assert float(model.running_mean) == step + 1.0
    steps.enter(0)
    model.running_mean.add_(5.0)
    steps.leave(0, used=False)  # a forward pass alone
    assert float(model.running_mean) == 2.0
