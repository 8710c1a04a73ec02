"""How much accuracy does it cost to send IVON's second sum, E[g·eps], less often?

    posterity bench second_every

An MLP learns digits like four processes with separate samples (`compile_step(parts=4)`), and is tested on a
held-out fifth of the training images: with an estimate of the Hessian in every step, in one of 10 and of 100
(`second_every=`), and in every step with the sum rounded to bfloat16 once, the least that a collective in
that type would do. Numbers are medians over seeds, with their range. `std_difference` in the record is the
median over weights of the relative difference of their stds from those of the first column; the column
"another seed" shows the difference from other noise alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import IVON, compile_step, metrics, predict
from posterity.optim.state import Group, State
from posterity.optim.statistics import Statistics
from posterity_lab.bench import Record, parser, positive
from posterity_lab.data import Split, batches, load
from posterity_lab.nets import initialise, mlp

PARTS, SAMPLES, BATCH = 4, 32, 32
EVERY: dict[str, dict[str, Any]] = {
    "every step": {},
    "one of 10": {"second_every": 10},
    "one of 100": {"second_every": 100},
    "bfloat16": {},
    "another seed": {},
}


def round_sums(opt: IVON) -> None:
    """Let the rule see E[g·eps] as a bfloat16 has it."""
    update = opt.update

    def rounded(mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        noise = stats.grad_noise.bfloat16().to(mean.dtype)
        return update(mean, state, replace(stats, grad_noise=noise), group)

    opt.update = rounded  # type: ignore[method-assign]


def learned(
    column: str, beta2: float, seed: int, data: Split, epochs: int
) -> tuple[IVON, nn.Module, list[float]]:
    """A trained net, and the losses of its steps."""
    net = initialise(mlp(64, [100, 100], 10), seed)
    noise = seed + 1000 * (column == "another seed")
    opt = IVON(net, num_data=len(data), betas=(0.9, beta2), seed=noise, **EVERY[column])
    if column == "bfloat16":
        round_sums(opt)
    step = compile_step(net, lambda net, x, y: F.cross_entropy(net(x), y), opt, parts=PARTS)
    losses = []
    for epoch in range(epochs):
        for x, y in batches(data, BATCH, seed=seed, epoch=epoch):
            losses.append(float(step(x, y)))
    return opt, net, losses


def cell(values: list[float], steps: int) -> dict[str, Any]:
    """A column: median and range over seeds."""
    extent = {"value": median(values), "lowest": min(values), "highest": max(values)}
    return {**extent, "rounds": len(values), "steps": steps, "setting": "fp32"}


def rows(record: Record, beta2: float, given: argparse.Namespace) -> None:
    """NLL and error of every column."""
    train = load("digits").train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    held_out, data = (train.subset(some) for some in (order[: len(train) // 5], order[len(train) // 5 :]))
    nll: dict[str, list[float]] = {name: [] for name in EVERY}
    errors: dict[str, list[float]] = {name: [] for name in EVERY}
    apart: dict[str, list[float]] = {name: [] for name in EVERY}
    steps = weights = 0
    for seed in given.seeds:
        first = torch.empty(0)
        for name in EVERY:
            opt, net, losses = learned(name, beta2, seed, data, given.epochs)
            q = opt.posterior()
            steps, weights = len(losses), sum(p.numel() for p in net.parameters())
            p = predict(net, q, held_out.x, samples=SAMPLES, seed=seed)
            nll[name].append(metrics.nll(p.probs, held_out.y))
            errors[name].append(100 * (1 - metrics.accuracy(p.probs, held_out.y)))
            stds = torch.cat([std.flatten() for std in q.std().values()])
            first = stds if name == "every step" else first
            apart[name].append(float((stds / first - 1).abs().median()))
    case = f"MLP 64-100-100-10 on digits, beta2 {beta2:g}"
    more = {"parameters": weights, "std_difference": {name: median(each) for name, each in apart.items()}}
    for what, found in (("error in %", errors), ("NLL", nll)):
        columns = {name: cell(each, steps) for name, each in found.items()}
        record.add(case, what, columns, metric=what, beta2=beta2, **more)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--beta2", type=float, nargs="+", default=[0.9999, 0.999])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epochs", type=positive, default=30)
    given = options.parse_args()
    record = Record("second_every", given, "on held-out images", "every step")
    for beta2 in given.beta2:
        rows(record, beta2, given)
    record.close()


if __name__ == "__main__":
    main()
