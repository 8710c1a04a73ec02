"""Variational models in CUDA graphs, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity import ByName, IsotropicGaussian, ScaleMixture, Variational, variational, warmup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

N = 500
X = torch.randn(32, 20, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(2))
PRIORS = [
    IsotropicGaussian(0.5),
    ScaleMixture(),
    ByName({"*.bias": IsotropicGaussian(2.0), "*": ScaleMixture(0.3, 1.0, 0.1)}),
]
OPTIMISERS: list[Any] = [
    lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    lambda params: torch.optim.Adam(params, lr=0.01),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
]


def model() -> Variational:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 33, bias=False), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 3))
    return variational(net.cuda(), std_init=0.1, seed=3, deterministic="1.*")


def loss_fn(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("make", OPTIMISERS)
@pytest.mark.parametrize("prior", PRIORS)
def test_graph_equals_plain_loop_through_schedules_and_ragged_batches(
    prior: Any, make: Any, samples: int
) -> None:
    results = []
    x, y, factor = X.cuda(), Y.cuda(), warmup(9)
    for graphs in (False, True):
        m = model()
        opt = make(m.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
        if graphs:
            step: Any = posterity.compile_step(
                m, loss_fn, opt, prior=prior, num_data=N, factor=factor, mc_samples=samples, max_norm=1.0
            )
        losses = []
        for i in range(15):
            n = 7 if i % 3 == 2 else 32
            if graphs:
                losses.append(step(x[:n], y[:n]))
            else:
                opt.zero_grad()
                outputs = m(x[:n])[None] if samples == 1 else m.outputs(x[:n], samples=samples)
                nll = torch.stack([F.cross_entropy(each, y[:n]) for each in outputs]).mean()
                loss = posterity.elbo(nll, m.kl(prior), num_data=N, factor=factor, step=i)
                loss.backward()
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                opt.step()
                losses.append(loss.detach())
            schedule.step()
        if graphs:
            assert len(step._graphs) == 2
        results.append({**dict(m.named_parameters()), "losses": torch.stack(losses)})
    for key, value in results[0].items():
        torch.testing.assert_close(
            results[1][key], value, rtol=2e-3, atol=2e-4, msg=lambda s, k=key: f"{k}: {s}"
        )


@pytest.mark.parametrize("make", OPTIMISERS)
def test_non_finite_replay_changes_nothing(make: Any) -> None:
    m = model()
    opt = make(m.parameters())
    step = posterity.compile_step(m, loss_fn, opt, num_data=N)
    x, y = X.cuda(), Y.cuda()
    for _ in range(5):
        step(x, y)
    before = [p.detach().clone() for p in m.parameters()]
    states = [v.clone() for p in m.parameters() for v in opt.state[p].values() if isinstance(v, Tensor)]
    buffers = [b.clone() for b in m.buffers()]
    step(torch.full_like(x, torch.nan), y)
    torch.cuda.synchronize()
    after = [v for p in m.parameters() for v in opt.state[p].values() if isinstance(v, Tensor)]
    for a, b in zip([*before, *states, *buffers], [*m.parameters(), *after, *m.buffers()], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(FloatingPointError, match="not touched"):
        step(x, y)
    step(x, y)
    torch.cuda.synchronize()
    assert not torch.equal(before[0], next(iter(m.parameters())))


def test_sgd_without_fused_says_so() -> None:
    m = model()
    with pytest.warns(UserWarning, match="steps of SGD are not captured"):
        step = posterity.compile_step(m, loss_fn, torch.optim.SGD(m.parameters(), lr=0.1), num_data=N)
    for _ in range(4):
        step(X.cuda(), Y.cuda())
    assert m.draws == 4
