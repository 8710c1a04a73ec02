"""What several processes do with a model whose parameters are sharded among them: fully_shard, tensor parallel.

Each case runs in every process, as those of ``runs.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import posterity
from distributed.runs import BATCH, RULES, STEPS, batches, learned, loss_of, model, share
from distributed.semantics import CLIP, moments, said, shares, trained, weights
from posterity import VariationalOptimizer

SHARDED = ("bgd", "ivon")
Pairs = Iterable[tuple[Tensor, Tensor]]


class Words(nn.Module):
    """A net with a padding row, BatchNorm, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=4)
        self.norm = nn.BatchNorm1d(5, track_running_stats=False)
        self.head = nn.Linear(5, 3)
        self.spare = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x[:, :2].abs() * 10).long() % 7
        words[:, 0] = 4
        return self.head(self.words(words).sum(1) + x)


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def by_layers(net: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Every layer with parameters by itself, and the rest."""
    for each in net.children():
        if any(True for _ in each.parameters()):
            fully_shard(each, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def tensor_parallel(net: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def built(
    world: int, rule: str, net: nn.Module, way: str = "fsdp", **settings: Any
) -> tuple[nn.Module, VariationalOptimizer, int]:
    """A sharded net, its optimiser, and into how many shares a batch is cut."""
    options: dict[str, Any] = {"reshard_after_forward": False} if way == "kept" else {}
    shares = world
    if way in ("fsdp", "kept"):
        net = by_layers(net, init_device_mesh("cpu", (world,)), **options)
    elif way == "whole":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif way == "hybrid":
        net = by_layers(net, init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "shard")))
    elif way == "tp":
        net, shares = tensor_parallel(net, init_device_mesh("cpu", (world,))), 1
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tp"))
        net, shares = by_layers(tensor_parallel(net, mesh["tp"]), mesh["data"]), world // 2
    return net, RULES[rule](net, **{"mc_samples": 1, "seed": 7, **settings}), shares


def own(rank: int, world: int, shares: int) -> list[tuple[Tensor, Tensor]]:
    """This process's share of every batch."""
    number = rank * shares // world
    return [(share(x, number, shares, None), share(y, number, shares, None)) for x, y in batches()]


def loop(
    rule: str,
    samples: int,
    rank: int,
    world: int,
    way: str = "fsdp",
    make: Callable[[], nn.Module] = model,
    each: Callable[[nn.Module, Tensor], object] = lambda net, x: None,
    clip: float | None = None,
    **settings: Any,
) -> Any:
    """A plain loop; ``each`` happens before every context."""
    net, opt, parts = built(world, rule, make(), way, mc_samples=samples, **settings)
    for x, y in own(rank, world, parts):
        opt.zero_grad()
        for _ in range(samples):
            each(net, x)
            with opt.sampled_params():
                loss_of(net, x, y).backward()
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        opt.step()
    return moments(opt)


def closure(rule: str, samples: int, rank: int, world: int, way: str = "fsdp") -> Any:
    net, opt, parts = built(world, rule, model(), way, mc_samples=samples)
    loss = None
    for x, y in own(rank, world, parts):
        opt.zero_grad()
        loss = opt.step(lambda x=x, y=y: loss_of(net, x, y))
    return learned(opt, loss)


CASES: dict[str, Callable[..., Any]] = {}
FOUR: dict[str, Callable[..., Any]] = {}
for _rule in SHARDED:
    for _way in ("fsdp", "whole", "kept", "tp"):
        CASES[f"sharded {_way} {_rule}"] = partial(loop, _rule, 1, way=_way)
    for _way in ("fsdp", "tp"):
        CASES[f"sharded-samples {_way} {_rule}"] = partial(loop, _rule, 2, way=_way)
        CASES[f"sharded-closure {_way} {_rule}"] = partial(closure, _rule, 2, way=_way)
    for _way in ("fsdp", "hybrid", "both"):
        FOUR[f"sharded {_way} {_rule}"] = partial(loop, _rule, 1, way=_way)
