"""IVON against a scalar transcription of its Algorithm 1."""

import math
from functools import partial
from shutil import which

import pytest
import torch
from torch import nn

from posterity import IVON, VOGN
from posterity.noise import normal
from posterity.optim.apply import move
from posterity.optim.ivon import ivon_hess
from posterity.train import cuda_graph as fused


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_equals_the_scalar_transcription(every: int) -> None:
    torch.manual_seed(4)
    model = nn.Linear(1, 1, bias=False).double()
    x, y = torch.randn(6, 1).double(), torch.randn(6, 1).double()
    n, delta_prior, tau, b1, b2, h0, lr, radius = 50, 3.0, 0.5, 0.8, 0.95, 0.4, 0.3, 0.5
    opt = IVON(
        model,
        num_data=n,
        prior_precision=delta_prior,
        temperature=tau,
        betas=(b1, b2),
        hess_init=h0,
        lr=lr,
        clip_radius=radius,
        max_step=math.inf,
        mc_samples=3,
        second_every=every,
        seed=0,
    )
    lam, delta = n / tau, tau * delta_prior / n
    m, h, gbar = model.weight.item(), h0, 0.0
    clipped = 0
    for t in range(1, 8):
        sigma = 1 / math.sqrt(lam * (h + delta))
        eps = (
            normal(range(3), (1, 1), seed=0, step=t - 1, block="weight", dtype=torch.float64)
            .flatten()
            .tolist()
        )
        grads = [
            sum(float(xi) * ((m + sigma * e) * float(xi) - float(yi)) for xi, yi in zip(x, y, strict=True))
            / 6
            for e in eps
        ]
        g = sum(grads) / 3
        h_hat = sum(a * e / sigma for a, e in zip(grads, eps, strict=True)) / 3
        gbar = b1 * gbar + (1 - b1) * g
        if t % every == 1 % every:  # the first step, and every so many after it
            b = b2**every
            h = b * h + (1 - b) * h_hat + 0.5 * (1 - b) ** 2 * (h - h_hat) ** 2 / (h + delta)
        move = (gbar / (1 - b1**t) + delta * m) / (h + delta)
        clipped += abs(move) > radius
        m = m - lr * (h0 + delta) * max(-radius, min(radius, move))
        opt.step(lambda: 0.5 * (model(x) - y).square().mean())
        assert model.weight.item() == pytest.approx(m, rel=1e-11)
        assert opt.posterior().std()["weight"].item() == pytest.approx(
            1 / math.sqrt(lam * (h + delta)), rel=1e-11
        )
    assert 0 < clipped < 7  # both branches of the clip were taken


@pytest.mark.parametrize("estimate", [-1e6, -3.0, 0.0, 2.0, 1e6])
def test_the_hessian_keeps_its_precision_positive(estimate: float) -> None:
    h, delta = torch.tensor(0.5, dtype=torch.float64), 0.01
    for beta2 in (0.0, 0.9, 0.99999):
        assert float(ivon_hess(h, h + delta, torch.tensor(estimate).double(), beta2)) + delta > 0


@pytest.mark.skipif(
    not torch.cuda.is_available() and which("g++") is None, reason="needs what torch.compile compiles for"
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_groups_have_their_own_settings_in_a_compiled_rule() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = ((0.9, 0.99), (0.2, 0.99), (0.9, 0.5))
    groups = [{"params": [(str(betas), nn.Parameter(torch.zeros(2)))], "betas": betas} for betas in settings]
    opt = IVON(groups, num_data=100)
    for group in opt.param_groups:
        results = []
        for run in (partial(move, opt), fused.fused(move, IVON)):
            values = torch.rand(5, 700, generator=torch.Generator().manual_seed(0)).to(device)
            mean, momentum, hess, grad, second = values
            state = {"momentum": momentum, "hess": hess}
            step, ok = torch.tensor(3, device=device), torch.tensor(True, device=device)
            run(mean, state, grad, second, 1.0, 0, None, step, group, None, ok)
            results.append(values)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not torch.cuda.is_available() and which("g++") is None, reason="needs what torch.compile compiles for"
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_rule_is_shared_by_optimisers_and_sizes() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    fused.fused.cache_clear()  # of what tests without a compiler have left
    counts, scale = [], torch.tensor(2.0, device=device)
    for size, examples in ((300, 8), (400, 7), (500, 9), (600, 5)):
        opt = IVON([nn.Parameter(torch.zeros(2))], num_data=100)
        mean, momentum, hess, grad, second = torch.rand(5, size, device=device)
        step, ok = torch.tensor(3, device=device), torch.tensor(True, device=device)
        state = {"momentum": momentum, "hess": hess}
        more = (1.0, examples, scale / examples, step, opt.param_groups[0], None, ok)
        fused.fused(move, IVON)(mean, state, grad, second, *more)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(counts)) == 1, counts


@pytest.mark.skipif(
    not torch.cuda.is_available() and which("g++") is None, reason="needs what torch.compile compiles for"
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_many_settings_of_one_rule_leave_another_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(fused, "_SETTINGS", 2)
    torch._dynamo.reset()
    fused.fused.cache_clear()  # of what tests without a compiler have left

    def graphs(opt: IVON | VOGN) -> int:
        mean, momentum, hess, grad, second = torch.rand(5, 300, device=device)
        state, number = {"momentum": momentum, "hess": hess}, torch.tensor(3, device=device)
        given = (mean, state, grad, second, 1.0, 0, None, number, opt.param_groups[0], None, True)
        fused.fused(move, type(opt))(*given)
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    p = nn.Parameter(torch.zeros(2))
    found = [graphs(IVON([p], num_data=100, prior_precision=float(n))) for n in (2, 3, 4, 5)]
    assert found[-1] == found[1]  # no more than so many
    assert graphs(VOGN([p], num_data=100)) == found[-1] + 1
