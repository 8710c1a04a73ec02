"""One kernel copies all parameters of a slab; it is given addresses, so these had better be right."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from posterity import IVON
from posterity.flat import Layout
from posterity.optim import state as state_module
from posterity.optim.state import FlatGroup


def transfer(
    layout: Layout, pointers: Tensor, flat: Tensor, *, read: bool, poison: Tensor | None = None
) -> None:
    """What the kernel does, on a CPU."""
    for place, start, size in zip(pointers.tolist(), layout.starts, layout.sizes, strict=True):
        here, count = flat.data_ptr() + start * flat.element_size(), size * flat.element_size()
        ctypes.memmove(*((here, place) if read else (place, here)), count)
    if poison is not None and not torch.isfinite(flat).all():
        poison.fill_(torch.nan)


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> FlatGroup:
    monkeypatch.setattr(state_module, "kernels", SimpleNamespace(transfer=transfer))
    params = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(5))]
    made = FlatGroup(0, ["a", "b"], params, {p: {"step": torch.tensor(0)} for p in params})
    made._fused = True
    made.locate()
    return made


def in_place(p: Tensor) -> None:
    p.data.copy_(torch.randn_like(p))


def elsewhere(p: Tensor) -> None:
    p.data = torch.randn_like(p)


def transposed(p: Tensor) -> None:
    p.data = p.data.t()  # the same address


def halved(p: Tensor) -> None:
    p.data = p.data.half()


@pytest.mark.parametrize("change", [in_place, elsewhere, transposed, halved])
def test_parameters_are_found_wherever_users_put_them(slab: FlatGroup, change) -> None:
    slab.read()
    change(slab.params[0])
    assert slab.locate() == (change is not halved)
    assert slab.locate() == (change is not halved)  # looking again does not make it fit
    slab.read()
    for view, p in zip(slab.layout.views(slab.weights), slab.params, strict=True):
        assert torch.equal(view, p.float())
    drawn = torch.arange(float(slab.layout.size))
    versions = [p._version for p in slab.params]
    with torch.no_grad():
        slab.put(drawn)
    for view, p, version in zip(slab.layout.views(drawn), slab.params, versions, strict=True):
        assert torch.equal(view, p.float())
        assert p._version > version


def test_gathered_gradients_hold_nothing_of_earlier_ones(slab: FlatGroup) -> None:
    first, second = slab.params
    first.grad, second.grad = torch.full((3, 3), torch.nan), torch.ones(5)
    slab.gather()
    first.grad = None
    a, b = slab.layout.views(slab.gather())
    assert torch.equal(b, torch.ones(5))
    assert torch.isfinite(a).all()


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_number_tells_of_gradients_that_are_not_finite(
    slab: FlatGroup, value: float, transposed: bool
) -> None:
    first, second = slab.params
    first.grad, second.grad = torch.ones(3, 3), torch.ones(5)
    first.grad[1, 2] = value
    if transposed:  # no kernel can have it
        first.grad = first.grad.t()
    number = torch.zeros(2)[1]
    slab.gather(number)
    assert bool(torch.isfinite(number)) == (value == 1.0)


def test_gradients_are_gathered_whatever_their_memory_and_type(slab: FlatGroup) -> None:
    first, second = slab.params
    second.grad = torch.randn(5)
    for grad in (torch.randn(3, 3), torch.randn(3, 3).t(), torch.randn(6, 6)[::2, ::2]):
        first.grad = grad
        a, b = slab.layout.views(slab.gather())
        assert torch.equal(a, grad)
        assert torch.equal(b, second.grad)
    half = FlatGroup(0, ["a"], [p := nn.Parameter(torch.randn(4).half())], {p: {"step": torch.tensor(0)}})
    half._fused = True
    half.params[0].grad = torch.randn(4).half()
    (a,) = half.layout.views(half.gather())
    assert torch.equal(a, half.params[0].grad.float())


def test_parameters_may_move_in_memory_around_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_module, "kernels", SimpleNamespace(transfer=transfer))
    model = nn.Linear(3, 2)
    opt = IVON(model, num_data=10)
    for slab in opt.cache.groups():
        slab._fused = True
    means = model.weight.detach().clone()
    with opt.sampled_params():
        model(torch.ones(4, 3)).sum().backward()
        left = model.weight.data  # its memory is not to be written to either
        model.weight.data = left.clone()
    assert torch.equal(model.weight, means)
    assert not torch.equal(left, means)
    model.weight.data = torch.full((2, 3), 5.0)
    opt.step()
    assert ((model.weight - 5.0).abs() < 1.0).all()
    assert not torch.equal(model.weight, torch.full((2, 3), 5.0))
