"""On a GPU: the same sums, inside a captured graph too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import buffers
from posterity.curvature import Factors, Squares
from posterity.mc import stacked_pass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Flatten(2),
        nn.LayerNorm(64),
        nn.Linear(64, 16),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(24, 16, 8, 8), torch.randint(0, 10, (24,))


def numbers(collector: Squares | Factors, samples: int = 1) -> dict[str, Tensor]:
    if isinstance(collector, Squares):
        return collector.mean(24, samples)
    blocks, diagonal = collector.mean(24, samples)
    factors = {f"{name}.{each}": getattr(block, each) for name, block in blocks.items() for each in "AS"}
    return {**diagonal, **factors}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].cpu() - value.cpu()).norm() < share * value.cpu().norm(), name


@pytest.mark.parametrize("kind", [Squares, Factors])
def test_a_captured_pass_gathers_the_same(kind: type[Squares]) -> None:
    model = net().cuda()
    params = list(model.parameters())
    x, y = (each.cuda() for each in batch(1))
    collector = kind(model)

    def gather() -> dict[str, Tensor]:
        collector.clear()
        with collector:
            torch.autograd.grad(F.cross_entropy(model(x), y), params)
        return numbers(collector)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gather()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gather()
    for mine, other in zip((x, y), batch(2), strict=True):
        mine.copy_(other)
    graph.replay()
    assert_close(captured, gather(), 1e-3)


@pytest.mark.parametrize("kind", [Squares, Factors])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.01), (torch.bfloat16, 0.1)])
def test_stacks_are_collected_on_a_gpu_as_on_a_cpu(
    kind: type[Squares], dtype: torch.dtype, share: float
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = net().to(device)
        x, y = (each.to(device) for each in batch(1))
        torch.manual_seed(3)
        drawn = {
            name: (p.detach().cpu() + 0.02 * torch.randn(4, *p.shape)).to(device).requires_grad_()
            for name, p in model.named_parameters()
        }
        collector = kind()
        low = torch.autocast(device, dtype, enabled=device == "cuda" and dtype != torch.float32)
        with collector.watch(drawn, stacked=True), low:
            before = buffers.snapshot(model)
            out, _ = stacked_pass(model, drawn, before, (x,), {}, stacked=True)
            loss = F.cross_entropy(out.float().movedim(0, 2), y[:, None].expand(-1, 4), reduction="sum") / 24
            torch.autograd.grad(loss, list(drawn.values()))
        found.append(numbers(collector, samples=4))
    assert_close(found[1], found[0], share)
