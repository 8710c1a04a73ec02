"""How much memory does a BGD step need, compared with storing all samples' weights, noise and gradients?

    posterity bench memory --device cuda

An MLP 784-W-W-10. A number is the peak of allocated memory during a step minus that before it, including
state. `compile_step` is measured three times, since a graph allocates when it is captured and not
when it is replayed: an eager step, the step that captures, a replay; the highest counts. A CPU has no such
counter: there both steps run, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers import OURS, Loss, arithmetic, batch, count, for_device, fresh_row, maker
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import posterity
from posterity_lab.bench import Ratio, Record, parser, positive

STORED = "all samples stored"
MIB = 2**20


def stored_step(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int) -> Callable[[], None]:
    """The peer: theta, noise and gradients [K, ...] of every tensor, stacked by torch.func."""
    means = {name: p.detach() for name, p in model.named_parameters()}
    stds = {name: torch.full_like(mean, 0.02) for name, mean in means.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return loss_fn(lambda inputs: functional_call(model, weights, (inputs,)), x, y)

    @torch.no_grad()
    def step() -> None:
        noise = {name: torch.randn(samples, *mean.shape, device=x.device) for name, mean in means.items()}
        theta = {name: mean + stds[name] * noise[name] for name, mean in means.items()}
        grads = vmap(grad(loss))(theta)
        for name, mean in means.items():
            std = stds[name]
            average = len(x) * grads[name].mean(0)
            product = len(x) * (grads[name] * noise[name]).mean(0)
            mean.sub_(1e-6 * std**2 * average)
            std.copy_(std * torch.sqrt(1 + (0.5 * std * product) ** 2) - 0.5 * std**2 * product)

    return step


def peak(step: Callable[[], object], device: str) -> float | None:
    """MiB that a step allocates at its height above what is there before; None on a CPU."""
    if device == "cpu":
        step()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def cell(peaks: list[float], setting: str) -> dict[str, Any]:
    """A column of the record; the highest peak is its number."""
    highest = max(peaks)
    return {
        "value": highest,
        "lowest": min(peaks),
        "highest": highest,
        "rounds": len(peaks),
        "steps": 1,
        "setting": setting,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--widths", type=positive, nargs="+", default=[2000])
    options.add_argument("--precision", nargs="+", choices=["fp32", "tf32"], help="tf32 on a GPU")
    options.add_argument("--samples", type=positive, default=10)
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    given.precision = for_device(options, given.device, given.precision, ["tf32"])
    record = Record("memory", given, "MiB at the peak of a step", OURS, statistic="highest")
    for precision in given.precision:
        for width in given.widths:
            fresh_row(given.device)
            make = maker(f"mlp-{width}-{width}", [784], given.device)
            loss_fn = Loss(precision, given.device)
            x, y = batch([given.batch, 784], given.device)
            with arithmetic(precision):
                model = make()
                opt = posterity.BGD(model, lr=1e-6, mc_samples=given.samples)
                train_step = posterity.compile_step(model, loss_fn, opt)
                half = (given.batch + 1) // 2
                train_step(x[:half], y[:half])  # makes the state, and no graph for the shape that is measured
                ours = [peak(partial(train_step, x, y), given.device) for _ in range(3)]
                stored = stored_step(make(), loss_fn, x, y, given.samples)
                stored()
                peer = [peak(stored, given.device) for _ in range(3)]
            case = f"BGD K = {given.samples}, MLP 2x{width}"
            weights = count(model)
            if None in ours + peer:
                record.note("the memory of a step is not measured on a CPU: choose --device cuda")
                record.add(case, precision, {}, parameters=weights)
                continue
            columns = {OURS: cell(ours, precision), STORED: cell(peer, precision)}
            standard = (given.samples, given.batch, width) == (10, 128, 2000)
            ratios = [Ratio(OURS, STORED, at_most=0.6 if standard else None)]
            parts = dict(zip(("eager", "capture", "replay"), ours, strict=True))
            record.add(case, precision, columns, ratios, parameters=weights, ours_mib=parts)
    record.close()


if __name__ == "__main__":
    main()
