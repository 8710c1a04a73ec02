"""What only a GPU shows of K-FAC: the same numbers in loop, stack and graphs, and after resuming."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity.optim.kfac import inverse_roots
from posterity.posterior.algebra import damped
from posterity.train import compiled, cuda_graph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the steps that are replayed."""
    found: list[int] = []
    replay = cuda_graph.Graph.__call__

    def noted(self: cuda_graph.Graph, *given: Any) -> Tensor:
        found.append(self.live.opt.param_groups[0]["steps"])  # type: ignore[attr-defined]
        return replay(self, *given)

    monkeypatch.setattr(cuda_graph.Graph, "__call__", noted)
    return found


def make(
    samples: int, dtype: torch.dtype, **more: Any
) -> tuple[nn.Module, posterity.VariationalOptimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )
    x, y = torch.randn(16, 3, 4, 4), torch.randint(0, 5, (16,))
    model = model.to("cuda", dtype)
    shared = {"num_data": 1000, "lr": 1e-3, "factors_every": 2, **more}
    opt = (
        posterity.NoisyKFAC(model, mc_samples=samples, seed=0, **shared)
        if samples
        else posterity.KFAC(model, **shared)
    )
    return model, opt, x.to("cuda", dtype), y.cuda()


def results(model: nn.Module, opt: posterity.VariationalOptimizer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return {**found, **{f"std {name}": std for name, std in opt.posterior().std().items()}}


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_loop_eager_stack_and_graphs_agree(samples: int, replays: list[int]) -> None:
    found = []
    for way in ("loop", "stack", "graphs"):
        model, opt, x, y = make(samples, torch.float64, factors_every=5, deterministic="1.*")
        step = posterity.compile_step(model, loss_fn, opt)
        assert isinstance(step, compiled.CapturedStep)
        for i in range(23):
            for group in opt.param_groups:
                group["temperature"] = 0.5 if i < 8 else 1.0
                group["lr"] *= 0.5 if i in (4, 18) else 1.0
            n = 7 if i % 6 == 2 else 16
            if way == "loop":
                opt.step(lambda m=model, x=x[:n], y=y[:n]: loss_fn(m, x, y))
            else:
                (step if way == "graphs" else step.step)(x[:n], y[:n])
        found.append(results(model, opt))
    # The others collect factors, or are the first of their shape since step 0 has told of blocks.
    assert replays == [i for i in range(23) if i % 5 and i not in (1, 2)]
    assert len(step._graphs) == 2
    assert not step._failed
    for other in found[1:]:
        for key, value in found[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_batch_in_a_graph_moves_nothing_and_is_raised(
    samples: int, dtype: torch.dtype, replays: list[int]
) -> None:
    model, opt, x, y = make(samples, dtype, factors_every=10)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(4):
        step(x, y)
    tensors = [*model.state_dict().values(), *(each for each in opt.cache.tensors() if each.is_cuda)]
    before = [each.clone() for each in tensors]
    step(torch.full_like(x, torch.nan), y)
    torch.cuda.synchronize()
    assert replays == [2, 3, 4]
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    with pytest.raises(FloatingPointError, match="not touched"):
        step(x, y)
    step(x, y)
    opt.posterior()
    assert not torch.equal(model[0].weight, before[0])
    assert all(torch.isfinite(each).all() for each in tensors)


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
    for _ in range(5):
        step(x, y)
    other, resumed, _, _ = make(2, torch.float32)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    again = posterity.compile_step(other, loss_fn, resumed)
    for _ in range(6):
        step(x, y)
        again(x, y)
    assert len(step._graphs) == len(again._graphs) == 1
    assert resumed.state[other[0].weight]["rows"].is_cuda
    for (key, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=key)
