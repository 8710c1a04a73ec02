"""In which kernels does a captured step spend its time?

    posterity bench step_kernels --device cuda --steps bgd-mlp-2000-2000 ivon-resnet18 adam-resnet18

A step is a method and a net: `bgd` with K = 10, `ivon` or `vogn` with K = 1, or `adam`, on a batch of 128.
Times are the profiler's, per step; on a CPU they are those of torch's operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from ivon_step import ours_compiled
from peers import (
    Loss,
    adam_eager,
    adam_graph,
    arithmetic,
    batch,
    bgd_ours,
    count,
    for_device,
    fresh_row,
    maker,
    net,
    setting,
    vogn_ours,
)
from torch.profiler import ProfilerActivity, profile

from posterity_lab.bench import Record, parser, positive

USUAL = ["bgd-mlp-400-400", "bgd-mlp-2000-2000", "bgd-resnet18", "ivon-resnet18", "adam-resnet18"]
METHODS = ("bgd", "ivon", "vogn", "adam")


def step_name(text: str) -> str:
    """An option's value: a method and a net, with a hyphen between them."""
    method, _, name = text.partition("-")
    if method not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with one of {', '.join(METHODS)}")
    net(name)
    return text


def make_step(method: str, name: str, where: str, device: str, size: int) -> tuple[Callable[[], object], int]:
    """The step, and the parameters of its net."""
    precision, layout = where.split()
    shape = [784] if name.startswith("mlp") else [3, 32, 32]
    x, y = batch([size, *shape], device, layout if len(shape) == 3 else "nchw")
    model, loss_fn = maker(name, shape, device, layout)(), Loss(precision, device)
    if method == "bgd":
        step: Callable[[], object] = bgd_ours(model, loss_fn, x, y, 10)
    elif method == "ivon":
        step = ours_compiled(model, loss_fn, x, y)
    elif method == "vogn":
        step = vogn_ours(model, loss_fn, x, y)
    else:
        step = (adam_graph if device == "cuda" else adam_eager)(model, loss_fn, x, y)
    return step, count(model)


def kernels(step: Callable[[], object], device: str, steps: int) -> list[dict[str, float | str]]:
    """Microseconds and launches per step by kernel, the longest first."""
    for _ in range(4):
        step()
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    rows = []
    for event in profiled.key_averages():
        spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if spent > 0:
            rows.append({"kernel": event.key[:120], "us": spent / steps, "launches": event.count / steps})
    return sorted(rows, key=lambda row: -float(row["us"]))


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--steps", type=step_name, nargs="+", default=USUAL, metavar="METHOD-NET", help=" ".join(USUAL)
    )
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    options.add_argument("--batch", type=positive, default=128)
    options.add_argument("--times", type=positive, default=10, help="steps that are profiled")
    options.add_argument("--rows", type=positive, default=25, help="kernels to keep of each step")
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("step_kernels", given, "us per step", "all kernels", statistic="mean")
    for where in given.settings:
        for each in given.steps:
            method, _, name = each.partition("-")
            fresh_row(given.device)
            with arithmetic(where.split()[0]):
                step, weights = make_step(method, name, where, given.device, given.batch)
                found = kernels(step, given.device, given.times)
            del step
            total = sum(float(row["us"]) for row in found)
            cell = dict.fromkeys(("value", "lowest", "highest"), total)
            columns = {"all kernels": {**cell, "rounds": 1, "steps": given.times, "setting": where}}
            launches = sum(float(row["launches"]) for row in found)
            shown = found[: given.rows]
            case = f"{method}, {name}"
            record.add(case, where, columns, parameters=weights, launches=launches, kernels=shown)
            for row in shown:
                print(f"  {row['us']:10.1f} us x {row['launches']:5.1f}  {row['kernel']}")
    record.close()


if __name__ == "__main__":
    main()
