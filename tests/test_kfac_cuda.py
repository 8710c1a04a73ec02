"""What only a GPU shows of K-FAC: the same numbers in loop and stack, and after resuming."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity.optim.inverses import inverse_roots
from posterity.posterior.matrix import damped
from posterity.train_step import TrainStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def make(
    samples: int, dtype: torch.dtype
) -> tuple[nn.Module, posterity.VariationalOptimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )
    x, y = torch.randn(16, 3, 4, 4), torch.randint(0, 5, (16,))
    model = model.to("cuda", dtype)
    shared = {"num_data": 1000, "lr": 1e-3, "factors_every": 2}
    opt = (
        posterity.NoisyKFAC(model, mc_samples=samples, **shared)
        if samples
        else posterity.KFAC(model, **shared)
    )
    return model, opt, x.to("cuda", dtype), y.cuda()


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_loop_and_stack_agree_and_nothing_is_captured(samples: int) -> None:
    results = []
    for stacked in (False, True):
        model, opt, x, y = make(samples, torch.float64)
        step = posterity.compile_step(model, loss_fn, opt)
        assert isinstance(step, TrainStep)
        for _ in range(6):
            step(x, y) if stacked else opt.step(lambda m=model, x=x, y=y: loss_fn(m, x, y))
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-6, atol=1e-8, msg=key)


@pytest.mark.parametrize("damping", [1e-9, 1e-4, 1e-1])
def test_inverses_are_right_whatever_products_are_allowed(damping: float) -> None:
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    factors = {}
    for number, size in enumerate((1500, 40, 40)):  # one by itself, two together
        a, s = torch.rand(size, 3, device="cuda"), torch.randn(30, 20, device="cuda")
        factors[number] = (s @ s.mT, a @ a.mT, damping)
    torch.set_float32_matmul_precision("high")
    try:
        found = inverse_roots(factors)
    finally:
        torch.set_float32_matmul_precision(before)
    for (*pair, _), roots in zip(factors.values(), found.values(), strict=True):
        for precision, root in zip(damped(*(each.double() for each in pair), damping), roots, strict=True):
            precision.diagonal().add_(torch.finfo(torch.float32).eps * precision.trace())
            left = root.double().mT @ precision @ root.double()
            ends = torch.linalg.eigvalsh(precision)[[0, -1]]
            # What rounding to float32 makes of an inverse; tf32 would be a thousand times worse.
            error = 4 * torch.finfo(torch.float32).eps * float(ends[1] / ends[0])
            torch.testing.assert_close(left, torch.eye(len(left)).to(left), rtol=0, atol=max(error, 1e-4))


def test_state_stays_on_the_device_through_saving() -> None:
    model, opt, x, y = make(2, torch.float32)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(3):
        step(x, y)
    other, resumed, _, _ = make(2, torch.float32)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    again = posterity.compile_step(other, loss_fn, resumed)
    for _ in range(3):
        step(x, y)
        again(x, y)
    assert resumed.state[other[0].weight]["rows"].is_cuda
    for (key, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=key)
