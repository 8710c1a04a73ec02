"""What only a GPU shows of rules that collect curvature: the same numbers in loop, stack and graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).cuda()


X, Y = torch.randn(16, 3, 6, 6), torch.randint(0, 5, (16,))


@pytest.mark.parametrize("method", ["1", "4", "ogn"])
def test_graph_equals_loop_with_schedules(method: str) -> None:
    x, y = X.cuda(), Y.cuda()
    temperature = posterity.warmup(20, start=0.1)
    results = []
    for captured in (False, True):
        model = net()
        common = {"num_data": 1000, "lr": 1e-3, "betas": (0.9, 0.9), "deterministic": "1.*"}
        opt = (
            posterity.OGN(model, **common)
            if method == "ogn"
            else posterity.VOGN(model, mc_samples=int(method), seed=0, **common)
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
        step = posterity.compile_step(model, loss_fn, opt)
        for i in range(30):
            for group in opt.param_groups:
                group["temperature"] = temperature(i)
            n = 7 if i % 5 == 4 else 16
            batch = x[:n], y[:n]
            step(*batch) if captured else opt.step(lambda m=model, b=batch: loss_fn(m, *b), batch_size=n)
            schedule.step()
        if captured:
            assert len(step._graphs) == 2
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=5e-3, atol=5e-4, msg=key)


def test_non_finite_batch_leaves_a_captured_posterior_unchanged() -> None:
    x, y = X.cuda(), Y.cuda()
    model = net()
    opt = posterity.VOGN(model, num_data=1000, mc_samples=2)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(4):
        step(x, y)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stds = opt.posterior().std()
    step(x * torch.nan, y)
    torch.cuda.synchronize()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(FloatingPointError, match="not touched"):
        step(x, y)
    assert all(torch.equal(stds[name], value) for name, value in opt.posterior().std().items())
