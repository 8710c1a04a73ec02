"""Captured steps with collectives of NCCL: a process that is alone in its group learns as without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import posterity
from distributed.runs import RULES
from posterity.train import gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CASES = ("bgd", "ivon", "vogn", "noisy-kfac", "variational")
STEPS, BAD = 24, 13
N = 96


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def loss_fn(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    length = 7 if step % 5 == 4 else 32
    x, y = torch.randn(length, 20, generator=generator), torch.randint(0, 5, (length,), generator=generator)
    return x.cuda(), y.cuda()


class Run:
    """A net that learns: in a group of one process or in none, as graphs or not."""

    def __init__(self, case: str, group: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))
        if case == "variational":  # which has no mesh: as if there were others
            for module in (posterity.distributed, gradient):
                monkeypatch.setattr(module, "several", lambda: group)
            net = posterity.variational(net.cuda(), std_init=0.1, seed=3, deterministic="1.*")
            self.opt: Any = torch.optim.Adam(net.parameters(), lr=0.01)
            more: dict[str, Any] = {"num_data": N, "mc_samples": 2}
        else:
            mesh = {"mesh": init_device_mesh("cuda", (1,))} if group else {}
            self.opt = RULES[case](net.cuda(), mc_samples=2, seed=7, deterministic="1.*", **mesh)
            more = {}
        self.net, self.pieces = net, 1 + group
        self.made = posterity.compile_step(net, loss_fn, self.opt, max_norm=1.0, **more)
        self.step = self.made if graphs else self.made.step
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.95)

    def go(self, first: int, last: int) -> Tensor:
        losses = []
        for i in range(first, last):
            losses.append(self.step(*batch(i)).detach())
            self.schedule.step()
        return torch.stack(losses)

    def found(self) -> dict[str, Tensor]:
        found = {
            key: value.clone() for key, value in self.net.state_dict().items() if isinstance(value, Tensor)
        }
        if isinstance(self.opt, posterity.VariationalOptimizer):
            found |= {f"std {name}": std for name, std in self.opt.posterior().std().items()}
        return found


def close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for key, value in want.items():
        torch.testing.assert_close(
            found[key], value, rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
def test_captured_eager_and_single_process_training_agree(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for group, graphs in ((False, True), (True, False), (True, True)):
        run = Run(case, group, graphs, monkeypatch)
        losses = run.go(0, STEPS)
        if graphs:
            assert run.made._graphs
            assert {len(graph.pieces) for graph in run.made._graphs.values()} == {run.pieces}
        results.append({**run.found(), "losses": losses})
    for other in results[1:]:
        close(other, results[0])


@pytest.mark.parametrize("case", CASES)
def test_a_new_learning_rate_reaches_a_graph_with_collectives(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(case, True, True, monkeypatch)
    run.go(0, 11)  # K-FAC's next step has no new factors
    graphs = dict(run.made._graphs)
    run.opt.param_groups[0]["lr"] = 0.0
    means = [p.detach().clone() for p in run.opt.param_groups[0]["params"]]
    run.step(*batch(11))
    assert dict(run.made._graphs) == graphs
    for before, p in zip(means, run.opt.param_groups[0]["params"], strict=True):
        assert torch.equal(before, p)


@pytest.mark.parametrize("case", CASES)
def test_nan_in_a_graph_with_collectives_raises_at_the_next_call(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(case, True, True, monkeypatch)
    run.go(0, BAD)
    before = {key: value.clone() for key, value in run.net.state_dict().items() if isinstance(value, Tensor)}
    x, y = batch(BAD)
    run.step(torch.full_like(x, torch.nan), y)
    torch.cuda.synchronize()
    for key, value in run.net.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(before[key], value), key
    with pytest.raises(FloatingPointError, match="not touched"):
        run.step(x, y)
    run.step(x, y)
    # As if the bad step and the one that raised it had not been there: neither is counted.
    other = Run(case, True, True, monkeypatch)
    other.go(0, BAD)
    other.step(x, y)
    close(run.found(), other.found())
