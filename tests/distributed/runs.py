"""What processes run, and what one process runs to compare: short trainings in float64, by name.

Started as ``python runs.py FOLDER RANK WORLD CASE...``, each process writes what it has learned to FOLDER.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import posterity
from posterity import VariationalOptimizer

N, STEPS, BATCH = 96, 4, 12
WITHOUT_NOISE = ("ogn", "kfac")  # they draw no weights, and take one sample
RULES: dict[str, Callable[..., VariationalOptimizer]] = {
    "bgd": lambda p, **k: posterity.BGD(p, std_init=0.1, **k),
    "ivon": lambda p, **k: posterity.IVON(p, num_data=N, lr=0.1, std_init=0.1, **k),
    "ivon-seldom": lambda p, **k: posterity.IVON(
        p, num_data=N, lr=0.1, std_init=0.1, betas=(0.9, 0.9), second_every=3, **k
    ),
    "vogn": lambda p, **k: posterity.VOGN(p, num_data=N, std_init=0.1, **k),
    "ogn": lambda p, **k: posterity.OGN(p, num_data=N, **k),
    "kfac": lambda p, **k: posterity.KFAC(p, num_data=N, factors_every=2, **k),
    "noisy-kfac": lambda p, **k: posterity.NoisyKFAC(p, num_data=N, std_init=0.1, factors_every=2, **k),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 3, (BATCH,), generator=generator)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def learned(opt: VariationalOptimizer, loss: Tensor | float) -> dict[str, Tensor]:
    q = opt.posterior()
    found = {f"mean {name}": value for name, value in q.mean().items()}
    found |= {f"std {name}": value for name, value in q.std().items()}
    return found | {"loss": torch.as_tensor(loss, dtype=torch.float64)}


def alone(rule: str, parts: int = 1, samples: int = 1) -> dict[str, Tensor]:
    """One process, whose samples see parts of the batch."""
    net = model()
    opt = RULES[rule](net, mc_samples=samples, seed=7)
    step = posterity.compile_step(net, loss_of, opt, parts=parts)
    loss = torch.zeros(())
    for x, y in batches():
        loss = step(x, y)
    return learned(opt, loss)


def share(x: Tensor, rank: int, world: int, sizes: list[int] | None) -> Tensor:
    """The part of a batch that a process sees."""
    return x.split(sizes or [len(x) // world] * world)[rank]


def accumulated_alone(rule: str, world: int) -> dict[str, Tensor]:
    """The micro-batches of all processes, one after another, in the order of their samples."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    for x, y in batches():
        parts = [[share(each, rank, world, None).chunk(2) for each in (x, y)] for rank in range(world)]
        opt.zero_grad()
        for micro in range(2):
            for part in parts:
                with opt.sampled_params():
                    (loss_of(net, part[0][micro], part[1][micro]) / (2 * world)).backward()
        opt.step()
    return learned(opt, 0.0)


# What each of several processes does: rank, number of processes → what it has learned.


def mesh_loop(rule: str, samples: int, rank: int, world: int, sizes: list[int] | None = None) -> Any:
    """A plain loop with own samples; an empty share takes part without a backward pass."""
    net = model()
    opt = RULES[rule](net, mc_samples=samples, seed=7, mesh=init_device_mesh("cpu", (world,)))
    loss = torch.zeros(())
    for x, y in batches():
        x, y = (share(each, rank, world, sizes) for each in (x, y))
        opt.zero_grad()
        for _ in range(samples):
            with opt.sampled_params():
                if len(x):
                    loss = loss_of(net, x, y)
                    loss.backward()
        opt.step()
    return {k: v for k, v in learned(opt, loss).items() if k != "loss"}


def mesh_closure(rule: str, samples: int, rank: int, world: int) -> Any:
    """Own samples by step(closure)."""
    net = model()
    opt = RULES[rule](net, mc_samples=samples, seed=7, mesh=init_device_mesh("cpu", (world,)))
    loss = None
    for x, y in batches():
        x, y = (share(each, rank, world, None) for each in (x, y))
        opt.zero_grad()
        loss = opt.step(lambda x=x, y=y: loss_of(net, x, y))
    return learned(opt, loss)


def mesh_compiled(rule: str, samples: int, rank: int, world: int, split: int = 1, parts: int = 1) -> Any:
    """Own samples in compiled steps, those of a share over ``split`` processes."""
    net = model()
    mesh = init_device_mesh("cpu", (world // split, split), mesh_dim_names=("data", "mc"))
    opt = RULES[rule](net, mc_samples=samples, seed=7, mesh=mesh)
    step = posterity.compile_step(net, loss_of, opt, parts=parts)
    loss = torch.zeros(())
    for x, y in batches():
        loss = step(*(share(each, rank // split, world // split, None) for each in (x, y)))
    return learned(opt, loss)


def mesh_accumulated(rule: str, rank: int, world: int) -> Any:
    """Two micro-batches a step, whose gradients travel once."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7, mesh=init_device_mesh("cpu", (world,)))
    for x, y in batches():
        x, y = (share(each, rank, world, None).chunk(2) for each in (x, y))
        opt.zero_grad()
        with opt.no_sync(), opt.sampled_params():
            (loss_of(net, x[0], y[0]) / 2).backward()
        with opt.sampled_params():
            (loss_of(net, x[1], y[1]) / 2).backward()
        opt.step()
    return {k: v for k, v in learned(opt, 0.0).items() if k != "loss"}


def ddp_loop(rule: str, samples: int, rank: int, world: int, **options: Any) -> Any:
    """A plain loop around DistributedDataParallel."""
    net = DistributedDataParallel(model(), **options)
    opt = RULES[rule](net, mc_samples=samples, seed=7)
    for x, y in batches():
        x, y = (share(each, rank, world, None) for each in (x, y))
        opt.zero_grad()
        for _ in range(samples):
            with opt.sampled_params():
                loss_of(net, x, y).backward()
        opt.step()
    return {k: v for k, v in learned(opt, 0.0).items() if k != "loss"}


def ddp_compiled(rule: str, samples: int, rank: int, world: int, sizes: list[int] | None = None) -> Any:
    """Compiled steps of a wrapped model, with shares of unlike sizes."""
    net = DistributedDataParallel(model())
    opt = RULES[rule](net, mc_samples=samples, seed=7)
    step = posterity.compile_step(net, loss_of, opt)
    loss = torch.zeros(())
    for x, y in batches():
        loss = step(*(share(each, rank, world, sizes) for each in (x, y)))
    return learned(opt, loss)


CASES: dict[str, Callable[..., Any]] = {}
for _rule in RULES:
    _k = 1 if _rule in WITHOUT_NOISE else 2
    CASES |= {
        f"mesh loop {_rule}": partial(mesh_loop, _rule, 1),
        f"mesh closure {_rule}": partial(mesh_closure, _rule, _k),
        f"mesh compiled {_rule}": partial(mesh_compiled, _rule, _k),
        f"mesh accumulated {_rule}": partial(mesh_accumulated, _rule),
        f"mesh idle {_rule}": partial(mesh_loop, _rule, 1, sizes=[BATCH, 0]),
        f"ddp loop {_rule}": partial(ddp_loop, _rule, 1),
        f"ddp samples {_rule}": partial(ddp_loop, _rule, _k),
        f"ddp ragged {_rule}": partial(ddp_compiled, _rule, _k, sizes=[BATCH - 1, 1]),
    }
    if _k > 1:
        CASES[f"mesh split {_rule}"] = partial(mesh_compiled, _rule, _k, split=2)
# Four processes: shares, and samples too.
FOUR: dict[str, Callable[..., Any]] = {}
for _rule in ("bgd", "ivon", "vogn", "noisy-kfac"):
    FOUR |= {
        f"mesh compiled {_rule}": partial(mesh_compiled, _rule, 2),
        f"mesh both {_rule}": partial(mesh_compiled, _rule, 2, split=2),
        f"ddp loop {_rule}": partial(ddp_loop, _rule, 1),
    }


def main() -> None:
    from distributed import captured, gradients, overlap, semantics, sharded

    folder, rank, world, *chosen = sys.argv[1:]
    more = (semantics, sharded, gradients, captured, overlap)
    cases = dict(CASES if world == "2" else FOUR)
    for each in more:
        cases |= each.CASES if world == "2" else each.FOUR
    torch.set_num_threads(1)
    warnings.simplefilter("error", posterity.CountWarning)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    found: dict[str, Any] = {}
    for name in chosen or cases:
        here = {"folder": Path(folder)} if "folder" in signature(cases[name]).parameters else {}
        try:
            found[name] = cases[name](rank=int(rank), world=int(world), **here)
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
    os._exit(0)  # threads of gloo may wait for processes that have ended


if __name__ == "__main__":
    main()
