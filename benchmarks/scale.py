"""How much data do processes that train together send in a step, and how long would that take?

    posterity bench scale
    posterity bench scale --worlds 128 --rules noisy-kfac
    posterity bench scale --measure 1 2 4
    posterity bench scale --alone --device cuda

Collectives and bytes are counted, not estimated: one process runs steps of ResNet-18 on 32x32 images as the
first of a world of up to 128, on torch's `fake` backend, which sends nothing. `ivon-10` has
`second_every=10`: a mean over ten steps. K-FAC's steps are those with factors, one of fifty by default.
**Times of these rows are a model**: a ring sends 2 (W - 1) / W of the bytes through each link, at the
bandwidth of a data sheet, without latency and without overlap with computation. An all-reduce that overlaps
with the backward pass, like DistributedDataParallel's, costs less time; shared links cost more.

`--measure` trains in that many real processes, with gloo on this machine's CPU and the same number of
examples for each (weak scaling). If there are more processes than cores, they share them: a step of 4 on 2
cores takes at least twice the time.

`--alone` measures the cost before anything is sent: steps of `compile_step` by the only process of a group
(NCCL, or gloo on a CPU), compared with the same steps without a group. It runs everything that one of many
processes runs, including the collectives, and should take at most 1.02 times as long on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import Loss, arithmetic, batch, count, for_device, fresh_row, maker, timing
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import posterity
from posterity_lab import nets
from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

N = 50_000
RULES: dict[str, Callable[..., posterity.VariationalOptimizer]] = {
    "ivon": lambda p, **k: posterity.IVON(p, num_data=N, mc_samples=1, seed=0, **k),
    "ivon-10": lambda p, **k: posterity.IVON(p, num_data=N, mc_samples=1, second_every=10, seed=0, **k),
    "vogn": lambda p, **k: posterity.VOGN(p, num_data=N, mc_samples=1, seed=0, **k),
    "noisy-kfac": lambda p, **k: posterity.NoisyKFAC(  # inverses take long, and are not sent
        p, num_data=N, mc_samples=1, seed=0, factors_every=1, inverses_every=1000, **k
    ),
}
# At these small learning rates, and with stds that stay, thousands of steps on one batch are all alike.
STILL: dict[str, dict[str, Any]] = {
    "VOGN": {"num_data": N, "lr": 1e-6, "damping": 1.0},
    "IVON": {"num_data": N, "lr": 1e-6},
    "BGD": {"lr": 1e-6, "temperature": 128},
}
ALONE, GROUP = "no group", "group of one"
# GB/s of a link in one direction, from data sheets.
BANDWIDTHS = {"NVLink 4": 450.0, "8 x InfiniBand NDR": 400.0, "100 Gb Ethernet": 12.5}
MB = 1e6


class Traffic(TorchDispatchMode):
    """Counts all-reduces and their bytes, and gives the sum of a world whose processes are all alike."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.collectives, self.bytes = world, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func.namespace == "c10d":
            if "broadcast" in str(func):  # of DistributedDataParallel's buckets, once
                return found
            if "allreduce" not in str(func):
                raise RuntimeError(f"{func} is not counted")
            for tensor in args[0]:
                self.bytes += tensor.numel() * tensor.itemsize
                tensor.mul_(self.world)
            self.collectives += 1
        return found


def count_bucket(traffic, bucket):
    """For DistributedDataParallel's own all-reduce; torch refuses annotations that are strings."""
    traffic.bytes += bucket.buffer().numel() * bucket.buffer().itemsize
    traffic.collectives += 1
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def fake(world: int) -> Iterator[None]:
    """Inside, this is the first process of a world that is not there."""
    distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def stepper(
    rule: str, way: str, net: nn.Module, traffic: Traffic, device: str
) -> tuple[Callable[[], object], int]:
    """One training step of this process, and after how many they send the same again."""
    x, y = torch.randn(2, 3, 32, 32, device=device), torch.tensor([0, 1], device=device)
    if way == "ddp":
        hooked = DistributedDataParallel(net, init_sync=False)
        hooked.register_comm_hook(traffic, count_bucket)
        opt: Any = torch.optim.Adam(net.parameters()) if rule == "adam" else RULES[rule](hooked)
    else:
        hooked, opt = net, RULES[rule](net, mesh=init_device_mesh(device, (distributed.get_world_size(),)))
    if rule != "adam":  # there is nobody to be compared with
        opt.met = opt.averaged = True

    def step() -> None:
        opt.zero_grad()
        if rule == "adam":
            F.cross_entropy(hooked(x), y).backward()
        else:
            with opt.sampled_params():
                F.cross_entropy(hooked(x), y).backward()
        opt.step()

    return step, opt.param_groups[0].get("second_every", 1)


def counted(rule: str, way: str, world: int, given: argparse.Namespace) -> Traffic:
    """What a step sends, on average over a cycle, after some that made buffers."""
    net = nets.build(given.net, [3, 32, 32], 10).to(given.device)
    for module in net.modules():  # of the gradient, not of statistics
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    with fake(world), Traffic(world) as traffic:
        step, cycle = stepper(rule, way, net, traffic, given.device)
        for _ in range(2):  # buffers and buckets are made
            step()
        traffic.collectives = traffic.bytes = 0.0
        for _ in range(cycle):
            step()
        traffic.collectives, traffic.bytes = traffic.collectives / cycle, traffic.bytes / cycle
    return traffic


def model_ms(sent: float, world: int) -> dict[str, float]:
    """Milliseconds of a ring, by link."""
    return {link: 2 * (world - 1) / world * sent / (rate * 1e6) for link, rate in BANDWIDTHS.items()}


def cell(
    value: float, setting: str, lowest: float | None = None, highest: float | None = None
) -> dict[str, Any]:
    """A column."""
    ends = {"lowest": value if lowest is None else lowest, "highest": value if highest is None else highest}
    return {"value": value, **ends, "rounds": 1, "steps": 1, "setting": setting}


def measured(rule: str, world: int, given: argparse.Namespace) -> list[float]:
    """Milliseconds of each of some steps of the first of real processes."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--worker", folder, rule, given.net, str(world), str(given.rounds)]
        workers = [subprocess.Popen([*line, str(rank)]) for rank in range(world)]
        codes = [each.wait() for each in workers]  # all of them, also if one failed
        if any(codes):
            raise RuntimeError(f"a worker of {world} failed")
        times: list[float] = json.loads((Path(folder) / "times.json").read_text())
    return times


def worker(folder: str, rule: str, name: str, world: str, rounds: str, rank: str) -> None:
    """One of several processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world)
    )
    net = nets.build(name, [3, 32, 32], 10)
    opt = RULES[rule](net, mesh=init_device_mesh("cpu", (int(world),)))
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    times = []
    for _ in range(int(rounds) + 2):
        distributed.barrier()
        begun = time.perf_counter()
        opt.zero_grad()
        with opt.sampled_params():
            F.cross_entropy(net(x), y).backward()
        opt.step()
        times.append(1e3 * (time.perf_counter() - begun))
    if rank == "0":
        (Path(folder) / "times.json").write_text(json.dumps(times[2:]))
    distributed.barrier()
    distributed.destroy_process_group()


def alone(given: argparse.Namespace, record: Record) -> None:
    """A row for each rule: steps of a process in a group of its own, beside steps without a group."""
    distributed.init_process_group(
        "nccl" if given.device == "cuda" else "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    mesh, shape = init_device_mesh(given.device, (1,)), [3, 32, 32]
    (where,) = for_device(argparse.ArgumentParser(), given.device, None, ["tf32 nchw"])
    precision, layout = where.split()
    for rule, settings in STILL.items():
        fresh_row(given.device)
        make, loss_fn = maker(given.net, shape, given.device, layout), Loss(precision, given.device)
        data, columns = batch([given.batch, *shape], given.device, layout), {}
        with arithmetic(precision):
            for name, more in {ALONE: {}, GROUP: {"mesh": mesh}}.items():
                net = make()
                plain = posterity.names_of(net, nn.BatchNorm2d)
                opt = getattr(posterity, rule)(
                    net, mc_samples=1, seed=0, deterministic=plain, **settings, **more
                )
                step = posterity.compile_step(net, loss_fn, opt)
                columns[name] = Column(partial(step, *data), where)
            times = measure(columns, **timing(given))
        ratios = [Ratio(GROUP, ALONE, at_most=1.02 if given.device == "cuda" else None)]
        record.add(f"{rule} K = 1, {given.net}", where, times, ratios, parameters=count(make()))
    distributed.destroy_process_group()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--net", default="resnet18")
    options.add_argument("--worlds", type=positive, nargs="+", default=[2, 8, 32, 128])
    options.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    options.add_argument("--measure", type=positive, nargs="*", default=[], help="real processes instead")
    options.add_argument("--alone", action="store_true", help="a group of one process instead")
    options.add_argument("--batch", type=positive, default=128, help="of --alone")
    given = options.parse_args()
    if given.alone:
        record = Record("scale", given, "ms per step", GROUP)
        alone(given, record)
        record.close()
        return
    record = Record("scale", given, "MB per step; ms per step where measured", "Adam, ddp", statistic="count")
    parameters = sum(p.numel() for p in nets.build(given.net, [3, 32, 32], 10).parameters())
    for world in [] if given.measure else given.worlds:
        columns, collectives, model = {}, {}, {}
        for rule, way in [("adam", "ddp"), *((rule, way) for rule in given.rules for way in ("ddp", "mesh"))]:
            traffic = counted(rule, way, world, given)
            name = f"{'Adam' if rule == 'adam' else rule}, {way}"
            columns[name] = cell(traffic.bytes / MB, "counted")
            collectives[name], model[name] = traffic.collectives, model_ms(traffic.bytes, world)
        extras = {"collectives": collectives, "model_ms": model}
        record.add(f"{given.net}, {world} processes", "fp32", columns, parameters=parameters, **extras)
    for rule in given.rules if given.measure else []:
        columns = {}
        for world in given.measure:
            times = measured(rule, world, given)
            columns[f"{world} processes"] = cell(median(times), "measured, ms", min(times), max(times))
        record.add(f"{given.net}, {rule}, 16 examples each, gloo", "fp32", columns, parameters=parameters)
    if not given.measure:
        record.note("model_ms in the record is a model, bytes over bandwidth: nothing was sent")
    record.close()


if __name__ == "__main__":
    worker(*sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main()
