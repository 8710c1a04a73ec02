"""Noise made where it is used, so that no byte of it goes through memory.

One launch serves all blocks of a layout: its table tells every program which chunk of which block it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.philox import normals
from posterity.layout import CHUNK, Layout

if TYPE_CHECKING:
    from posterity.noise import Noise


@triton.jit
def _place(table, COUNT: tl.constexpr):
    """What a program has, as the table says."""
    entry = table + tl.program_id(0) * 7
    block, first = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    quarter, size = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    at = first + tl.arange(0, COUNT)
    # Past the quarter's end the next one begins: those places are another program's.
    return block, at, at < quarter, quarter, size, tl.load(entry + 4), entry + 5


@triton.jit(do_not_specialize=["seed", "first", "rows"])
def _perturb(mean, std, out, table, step, seed, first, rows, SCALED: tl.constexpr, COUNT: tl.constexpr):
    block, at, mine, quarter, size, start, _ = _place(table, COUNT)
    a0, a1, a2, a3 = at, at + quarter, at + 2 * quarter, at + 3 * quarter
    i0, i1, i2, i3 = mine & (a0 < size), mine & (a1 < size), mine & (a2 < size), mine & (a3 < size)
    key, number = seed.to(tl.int64), tl.load(step)
    mean += start
    std += start
    out += start * rows
    if SCALED:
        m0, s0 = tl.load(mean + a0, mask=i0), tl.load(std + a0, mask=i0)
        m1, s1 = tl.load(mean + a1, mask=i1), tl.load(std + a1, mask=i1)
        m2, s2 = tl.load(mean + a2, mask=i2), tl.load(std + a2, mask=i2)
        m3, s3 = tl.load(mean + a3, mask=i3), tl.load(std + a3, mask=i3)
    for row in tl.range(0, rows, loop_unroll_factor=2):
        e0, e1, e2, e3 = normals(key, number, first + row, block, at)
        if SCALED:
            e0, e1, e2, e3 = m0 + s0 * e0, m1 + s1 * e1, m2 + s2 * e2, m3 + s3 * e3
        tl.store(out + a0, e0, mask=i0)
        tl.store(out + a1, e1, mask=i1)
        tl.store(out + a2, e2, mask=i2)
        tl.store(out + a3, e3, mask=i3)
        out += size


@triton.jit(do_not_specialize=["seed", "first", "rows"])
def _moments(grads, total, product, table, step, seed, first, rows, COUNT: tl.constexpr):
    block, at, mine, quarter, size, start, rest = _place(table, COUNT)
    a0, a1, a2, a3 = at, at + quarter, at + 2 * quarter, at + 3 * quarter
    i0, i1, i2, i3 = mine & (a0 < size), mine & (a1 < size), mine & (a2 < size), mine & (a3 < size)
    key, number = seed.to(tl.int64), tl.load(step)
    total += start
    product += start
    grads += tl.load(rest + 1) * rows
    t0, p0 = tl.load(total + a0, mask=i0), tl.load(product + a0, mask=i0)
    t1, p1 = tl.load(total + a1, mask=i1), tl.load(product + a1, mask=i1)
    t2, p2 = tl.load(total + a2, mask=i2), tl.load(product + a2, mask=i2)
    t3, p3 = tl.load(total + a3, mask=i3), tl.load(product + a3, mask=i3)
    for row in tl.range(0, rows, loop_unroll_factor=2):
        g0, g1 = tl.load(grads + a0, mask=i0).to(tl.float32), tl.load(grads + a1, mask=i1).to(tl.float32)
        g2, g3 = tl.load(grads + a2, mask=i2).to(tl.float32), tl.load(grads + a3, mask=i3).to(tl.float32)
        e0, e1, e2, e3 = normals(key, number, first + row, block, at)
        t0, p0 = t0 + g0, p0 + g0 * e0
        t1, p1 = t1 + g1, p1 + g1 * e1
        t2, p2 = t2 + g2, p2 + g2 * e2
        t3, p3 = t3 + g3, p3 + g3 * e3
        grads += size
    tl.store(total + a0, t0, mask=i0)
    tl.store(total + a1, t1, mask=i1)
    tl.store(total + a2, t2, mask=i2)
    tl.store(total + a3, t3, mask=i3)
    tl.store(product + a0, p0, mask=i0)
    tl.store(product + a1, p1, mask=i1)
    tl.store(product + a2, p2, mask=i2)
    tl.store(product + a3, p3, mask=i3)


@triton.jit
def _transfer(pointers, flat, table, READ: tl.constexpr, COUNT: tl.constexpr):
    _, at, mine, quarter, size, start, rest = _place(table, COUNT)
    apart = tl.load(pointers + tl.load(rest)).to(tl.pointer_type(flat.dtype.element_ty))
    flat += start
    for part in tl.static_range(4):
        here = at + part * quarter
        inside = mine & (here < size)
        if READ:
            tl.store(flat + here, tl.load(apart + here, mask=inside), mask=inside)
        else:
            tl.store(apart + here, tl.load(flat + here, mask=inside), mask=inside)


def transfer(layout: Layout, pointers: Tensor, flat: Tensor, *, read: bool) -> None:
    """Copy contiguous tensors, given by their addresses, into a flat buffer, or back."""
    table = layout.table(range(len(layout)), flat.device)
    if len(table):
        _transfer[(len(table),)](pointers, flat, table, READ=read, COUNT=CHUNK)


def normal(noise: Noise) -> Tensor:
    """The normals of all blocks, stacked, in float32."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, out, out, out, scaled=False)


def perturb(noise: Noise, mean: Tensor, std: Tensor) -> Tensor:
    """``mean + std · eps`` of all blocks, stacked."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, mean, std, out, scaled=True)


def moments(
    noise: Noise, first: int, blocks: list[int], grads: Tensor, total: Tensor, product: Tensor
) -> None:
    """Add Σ g and Σ g · eps over samples from ``first`` on, of some blocks' gradients end to end."""
    table = noise.layout.table(blocks, noise.device)
    if len(table):
        rows = grads.numel() // sum(noise.layout.sizes[i] for i in blocks)
        step, seed, _ = address(noise)
        _moments[(len(table),)](grads, total, product, table, step, seed, first, rows, COUNT=CHUNK)


def address(noise: Noise) -> tuple[Tensor, int, int]:
    """Step (on the device, where a graph can read it anew), seed, first sample."""
    step = noise.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int32, device=noise.device)
    return step, noise.seed & 0x7FFFFFFFFFFFFFFF, noise.samples.start


def _stacked(noise: Noise, mean: Tensor, std: Tensor, out: Tensor, *, scaled: bool) -> Tensor:
    table = noise.layout.table(range(len(noise.layout)), noise.device)
    if len(table):
        rows = len(noise.samples)
        _perturb[(len(table),)](mean, std, out, table, *address(noise), rows, SCALED=scaled, COUNT=CHUNK)
    return out
