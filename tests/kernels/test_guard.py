"""One kernel says what plain torch says of a captured step."""

import os

import pytest
import torch

from posterity.flat import Layout
from posterity.optim.checks import finite
from posterity.train.cuda_graph import report, verdict

pytest.importorskip("triton", reason="needs Triton")
kernels = pytest.importorskip("posterity.kernels", reason="needs Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU or TRITON_INTERPRET=1"
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("samples", [1, 3, 10])
@pytest.mark.parametrize("loss", [2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("poison", [0.0, float("nan")])
@pytest.mark.parametrize("unfit", [False, True])
def test_the_verdict(samples: int, loss: float, poison: float, unfit: bool) -> None:
    results = []
    for fused in (True, False):
        device = DEVICE if fused else torch.device("cpu")
        host = torch.full((), 7.0) if device.type == "cpu" else torch.full((), 7.0).pin_memory()
        stuck, clock = torch.zeros((), device=device), torch.tensor(4, dtype=torch.int32, device=device)
        told = []
        for value in (loss, 1.0):  # a good step after what may be a bad one
            losses = torch.arange(float(samples), device=device)
            losses[-1] = value
            bad = torch.tensor(poison if value is loss else 0.0, device=device)
            say = kernels.verdict if fused else lambda losses, bad, *more: verdict(losses, [bad], *more)
            mean, ok = say(losses, bad, stuck, clock)
            assert ok.dtype == torch.bool
            if value is loss and unfit:
                ok.fill_(False)
            (kernels.report if fused else report)(mean, ok, stuck, host)
            if device.type == "cuda":
                torch.cuda.synchronize()
            told.append(torch.tensor([float(x) for x in (mean, ok, stuck, host, clock)]))
        results.append(torch.stack(told))
    torch.testing.assert_close(*results, equal_nan=True)
    seen = loss == 2.0 and poison == 0.0
    assert results[0][0, 1] == float(seen and not unfit)
    told = 0.0 if seen and not unfit else -torch.inf if seen else torch.nan
    assert torch.equal(results[0][1, 2].nan_to_num(7.0), torch.tensor(told).nan_to_num(7.0))  # stays so
    assert results[0][1, 4] == 6.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("value", [-3.0, float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_finite(value: float, count: int, dtype: torch.dtype) -> None:
    numbers = torch.zeros(count, dtype=dtype, device=DEVICE)
    numbers[-1] = value
    ok = kernels.finite(numbers)
    assert ok.dtype == torch.bool
    assert bool(ok) == bool(finite(numbers.cpu())) == (value == -3.0)


@pytest.mark.parametrize("ok", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 7, 1024, 2500])
def test_a_flag_lets_values_through(size: int, count: int, ok: bool) -> None:
    pairs = [(torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE)) for _ in range(count)]
    before = [(old.clone(), new.clone()) for old, new in pairs]
    kernels.accept(pairs, torch.tensor(ok, device=DEVICE))
    for (old, new), (was, given) in zip(pairs, before, strict=True):
        assert torch.equal(old, given if ok else was)
        assert torch.equal(new, given)


@pytest.mark.parametrize("value", [3.0, -70000.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("most", [65504.0, torch.finfo(torch.float32).max])
def test_flag_checks_values_in_blocks_but_not_padding(value: float, most: float) -> None:
    layout = Layout(["a", "b"], [(3, 50), (7,)])
    flat = torch.full((layout.size,), torch.nan, device=DEVICE)
    for view in layout.views(flat):
        view.fill_(1.0)
    for place in (149, layout.span(1).stop - 1):
        held, ok = flat.clone(), torch.tensor(True, device=DEVICE)
        held[place] = value
        kernels.judge(layout, held, most, ok)
        assert bool(ok) == (abs(value) <= most)
