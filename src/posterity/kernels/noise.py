"""Noise made where it is used, so that no byte of it goes through memory.

One launch serves all blocks of a layout: its table tells every program which chunk of which block it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.philox import eps
from posterity.layout import CHUNK

if TYPE_CHECKING:
    from posterity.noise import Noise


@triton.jit(do_not_specialize=["seed", "first"])
def _perturb(mean, std, out, table, step, seed, first, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    entry = table + tl.program_id(0) * 5
    start, size, begin = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    row = tl.program_id(1)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    block, local = tl.load(entry).to(tl.int32), start.to(tl.int32)
    value = eps(seed.to(tl.int64), tl.load(step), first + row, block, local, BLOCK)
    if SCALED:
        value = tl.load(mean + begin + at, mask=inside) + tl.load(std + begin + at, mask=inside) * value
    tl.store(out + begin * tl.num_programs(1) + row * size + at, value, mask=inside)


@triton.jit(do_not_specialize=["seed", "first", "rows"])
def _moments(grads, total, product, table, step, seed, first, rows, BLOCK: tl.constexpr):
    entry = table + tl.program_id(0) * 5
    start, size, begin, past = (
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
    )
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    block, local = tl.load(entry).to(tl.int32), start.to(tl.int32)
    number = tl.load(step)
    a = tl.load(total + begin + at, mask=inside, other=0.0)
    b = tl.load(product + begin + at, mask=inside, other=0.0)
    for row in range(rows):
        grad = tl.load(grads + past * rows + row * size + at, mask=inside, other=0.0)
        a += grad
        b += grad * eps(seed.to(tl.int64), number, first + row, block, local, BLOCK)
    tl.store(total + begin + at, a, mask=inside)
    tl.store(product + begin + at, b, mask=inside)


def normal(noise: Noise) -> Tensor:
    """The normals of all blocks, stacked, in float32."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, out, out, out, scaled=False)


def perturb(noise: Noise, mean: Tensor, std: Tensor) -> Tensor:
    """``mean + std · eps`` of all blocks, stacked."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, mean, std, out, scaled=True)


def moments(noise: Noise, blocks: list[int], grads: Tensor, total: Tensor, product: Tensor) -> None:
    """Add Σ g and Σ g · eps over the samples, of some blocks' gradients end to end."""
    table = noise.layout.table(blocks, noise.device)
    if len(table):
        rows = len(noise.samples)
        _moments[(len(table),)](grads, total, product, table, *address(noise), rows, BLOCK=CHUNK)


def address(noise: Noise) -> tuple[Tensor, int, int]:
    """Step (on the device, where a graph can read it anew), seed, first sample."""
    step = noise.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int32, device=noise.device)
    return step, noise.seed & 0x7FFFFFFFFFFFFFFF, noise.samples.start


def _stacked(noise: Noise, mean: Tensor, std: Tensor, out: Tensor, *, scaled: bool) -> Tensor:
    table = noise.layout.table(range(len(noise.layout)), noise.device)
    if len(table):
        grid = (len(table), len(noise.samples))
        _perturb[grid](mean, std, out, table, *address(noise), SCALED=scaled, BLOCK=CHUNK)
    return out
