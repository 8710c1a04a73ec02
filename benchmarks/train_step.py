"""How long is one BGD step with K weight samples? Beside it: a plain loop over K, and one Adam step.

    python benchmarks/train_step.py --device cuda --widths 400 1200 2000
    python benchmarks/train_step.py --widths 200 400 --steps 20

All columns are measured in one run, on an MLP 784-W-W-10 and a batch of 128; a number is the median over
rounds of the mean time per step. The loop is Algorithm 1 of the BGD paper as its authors run it: weights
sampled, forward and backward, one sample after another, statistics added up per tensor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity_lab.nets import initialise, mlp
from posterity_lab.record import environment

BATCH = 128


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def loop_step(model: nn.Module, stds: list[Tensor], samples: int, x: Tensor, y: Tensor) -> None:
    """The peer: every sample by itself, the update written out."""
    params = list(model.parameters())
    means = [p.detach().clone() for p in params]
    grads, products = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for _ in range(samples):
        noise = [torch.randn_like(p) for p in params]
        with torch.no_grad():
            for p, mean, std, eps in zip(params, means, stds, noise, strict=True):
                p.copy_(mean + std * eps)
        for p in params:
            p.grad = None
        loss_fn(model, x, y).backward()
        for p, grad, product, eps in zip(params, grads, products, noise, strict=True):
            grad += BATCH * p.grad / samples
            product += BATCH * p.grad * eps / samples
    with torch.no_grad():
        for p, mean, std, grad, product in zip(params, means, stds, grads, products, strict=True):
            p.copy_(mean - 1e-6 * std**2 * grad)
            std.copy_(std * torch.sqrt(1 + (0.5 * std * product) ** 2) - 0.5 * std**2 * product)


def measure(step: Callable[[], Any], steps: int, rounds: int, device: str) -> dict[str, float]:
    """Milliseconds per step: median and range over the rounds."""
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):  # compiles, captures, fills caches
        step()
    times = []
    for _ in range(rounds):
        synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise()
        times.append(1000 * (time.perf_counter() - start) / steps)
    return {"ms": median(times), "lowest": min(times), "highest": max(times)}


def compare(width: int, samples: int, steps: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    x = torch.rand(BATCH, 784, generator=torch.Generator().manual_seed(0)).to(device)
    y = torch.randint(0, 10, (BATCH,), generator=torch.Generator().manual_seed(1)).to(device)

    def net() -> nn.Module:
        return initialise(mlp(784, [width, width], 10), seed=0).to(device)

    looped = net()
    stds = [torch.full_like(p, 0.02) for p in looped.parameters()]
    stacked = net()
    train_step = posterity.compile_step(stacked, loss_fn, posterity.BGD(stacked, lr=1e-6, mc_samples=samples))
    plain = net()
    adam = torch.optim.Adam(plain.parameters(), fused=True)

    def adam_step() -> None:
        adam.zero_grad()
        loss_fn(plain, x, y).backward()
        adam.step()

    return {
        "loop over samples": measure(
            lambda: loop_step(looped, stds, samples, x, y), max(steps // 10, 1), rounds, device
        ),
        "compile_step": measure(lambda: train_step(x, y), steps, rounds, device),
        "one Adam step": measure(adam_step, steps, rounds, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=[200, 400, 1200])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tf32", action="store_true", help="matrix products in tf32 (GPU)")
    parser.add_argument("--out", type=Path, help="JSON record to write")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    rows = {}
    for width in options.widths:
        row = compare(width, options.samples, options.steps, options.rounds, options.device)
        rows[width] = row
        loop, ours = row["loop over samples"]["ms"], row["compile_step"]["ms"]
        cells = "  ".join(f"{name} {value['ms']:.3f} ms" for name, value in row.items())
        print(
            f"2x{width}, K = {options.samples}: {cells}  loop / compile_step {loop / ours:.1f}x", flush=True
        )
    if options.out is not None:
        config = {key: value for key, value in vars(options).items() if key != "out"}
        record = {"config": config, "batch": BATCH, "rows": rows, "environment": environment()}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
