"""Noise that is generated inside the kernels that use it, so that it never goes through memory.

One launch handles all blocks of a layout: a table gives every program its tile of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.flat import TILE, Layout
from posterity.kernels.launch import Launch
from posterity.kernels.philox import normals

if TYPE_CHECKING:
    from posterity.noise import Noise


@triton.jit
def _place(table, COUNT: tl.constexpr):
    """A program's row of the table: hash and size of its block, its counters, the place in the block of each
    one's first normal (the other three follow COUNT places apart), begin and end of its part of the block,
    start of the block, and the rest of the row."""
    entry = table + tl.program_id(0) * 9
    each = tl.arange(0, COUNT)
    counter, at = tl.load(entry + 1).to(tl.int32) + each, tl.load(entry + 2).to(tl.int32) + each
    block, size = tl.load(entry).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    low, high = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    return block, size, counter, at, low, high, tl.load(entry + 6), entry + 7


@triton.jit(do_not_specialize=["step", "key", "first", "rows"])
def _perturb(
    mean, std, out, clock, table, step, key, first, rows,
    SCALED: tl.constexpr, LIVE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    block, size, counter, at, low, high, start, _ = _place(table, COUNT)
    a0, a1, a2, a3 = at, at + COUNT, at + 2 * COUNT, at + 3 * COUNT
    i0, i1 = (a0 >= low) & (a0 < high), (a1 >= low) & (a1 < high)
    i2, i3 = (a2 >= low) & (a2 < high), (a3 >= low) & (a3 < high)
    number = tl.load(clock) if LIVE else step
    mean += start
    std += start
    out += start * rows
    if SCALED:
        m0, s0 = tl.load(mean + a0, mask=i0), tl.load(std + a0, mask=i0)
        m1, s1 = tl.load(mean + a1, mask=i1), tl.load(std + a1, mask=i1)
        m2, s2 = tl.load(mean + a2, mask=i2), tl.load(std + a2, mask=i2)
        m3, s3 = tl.load(mean + a3, mask=i3), tl.load(std + a3, mask=i3)
    for row in tl.range(0, rows, loop_unroll_factor=2):
        e0, e1, e2, e3 = normals(key, number, first + row, block, counter)
        if SCALED:
            e0, e1, e2, e3 = m0 + s0 * e0, m1 + s1 * e1, m2 + s2 * e2, m3 + s3 * e3
        tl.store(out + a0, e0, mask=i0)
        tl.store(out + a1, e1, mask=i1)
        tl.store(out + a2, e2, mask=i2)
        tl.store(out + a3, e3, mask=i3)
        out += size


@triton.jit
def _sum_up(into, at, mine, value, FRESH: tl.constexpr):
    """Add to existing sums, if there are any; the result is 0, or NaN where a sum is not finite."""
    if not FRESH:
        value += tl.load(into + at, mask=mine, other=0.0)
    tl.store(into + at, value, mask=mine)
    return value * 0.0


@triton.jit(do_not_specialize=["step", "key", "first", "rows"])
def _moments(
    grads, places, total, product, poison, clock, table, step, key, first, rows, weight,
    APART: tl.constexpr, FRESH: tl.constexpr, LIVE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    block, size, counter, at, low, high, start, rest = _place(table, COUNT)
    a0, a1, a2, a3 = at, at + COUNT, at + 2 * COUNT, at + 3 * COUNT
    i0, i1 = (a0 >= low) & (a0 < high), (a1 >= low) & (a1 < high)
    i2, i3 = (a2 >= low) & (a2 < high), (a3 >= low) & (a3 < high)
    number = tl.load(clock) if LIVE else step
    if APART:
        grads = tl.load(places + tl.load(rest)).to(tl.pointer_type(grads.dtype.element_ty))
    else:
        grads += tl.load(rest + 1) * rows
    t0 = tl.zeros([COUNT], tl.float32)
    t1, t2, t3, p0, p1, p2, p3 = t0, t0, t0, t0, t0, t0, t0
    for row in tl.range(0, rows, loop_unroll_factor=2):
        g0 = tl.load(grads + a0, mask=i0, other=0.0).to(tl.float32)
        g1 = tl.load(grads + a1, mask=i1, other=0.0).to(tl.float32)
        g2 = tl.load(grads + a2, mask=i2, other=0.0).to(tl.float32)
        g3 = tl.load(grads + a3, mask=i3, other=0.0).to(tl.float32)
        e0, e1, e2, e3 = normals(key, number, first + row, block, counter)
        t0, p0 = t0 + g0, p0 + g0 * e0
        t1, p1 = t1 + g1, p1 + g1 * e1
        t2, p2 = t2 + g2, p2 + g2 * e2
        t3, p3 = t3 + g3, p3 + g3 * e3
        grads += size
    total += start
    product += start
    bad = _sum_up(total, a0, i0, weight * t0, FRESH)
    bad += _sum_up(total, a1, i1, weight * t1, FRESH)
    bad += _sum_up(total, a2, i2, weight * t2, FRESH)
    bad += _sum_up(total, a3, i3, weight * t3, FRESH)
    bad += _sum_up(product, a0, i0, weight * p0, FRESH)
    bad += _sum_up(product, a1, i1, weight * p1, FRESH)
    bad += _sum_up(product, a2, i2, weight * p2, FRESH)
    bad += _sum_up(product, a3, i3, weight * p3, FRESH)
    if tl.max((bad != 0.0).to(tl.int32), 0) > 0:
        tl.store(poison, float("nan"))


@triton.jit
def _transfer(
    flat, pointers, ok, poison, table,
    READ: tl.constexpr, ASKS: tl.constexpr, CHECKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    _, _, _, at, low, high, start, rest = _place(table, COUNT)
    if ASKS:
        high = tl.where(tl.load(ok) == 0, high, low)
    apart = tl.load(pointers + tl.load(rest)).to(tl.pointer_type(flat.dtype.element_ty))
    flat += start
    for part in tl.static_range(4):
        here = at + part * COUNT
        inside = (here >= low) & (here < high)
        if READ:
            value = tl.load(apart + here, mask=inside, other=0)
            tl.store(flat + here, value, mask=inside)
            if CHECKS:
                bad = tl.max((value * 0.0 != 0.0).to(tl.int32), 0) > 0
                tl.store(poison, float("nan"), mask=bad)
        else:
            tl.store(apart + here, tl.load(flat + here, mask=inside), mask=inside)


def transfer(
    layout: Layout,
    pointers: Tensor,
    flat: Tensor,
    *,
    read: bool,
    unless: Tensor | None = None,
    poison: Tensor | None = None,
) -> None:
    """Copy contiguous tensors, given by their addresses, into a flat buffer or back.

    Args:
        layout: The buffer's layout.
        pointers: Addresses of the tensors.
        flat: The buffer; the tensors have its dtype.
        read: Whether the buffer is written.
        unless: A flag; if it is set, nothing changes.
        poison: One number, of the buffer's dtype, which becomes NaN if a value that is read is not finite.
    """
    asks, checks = unless is not None, poison is not None
    _launch(
        _transfer,
        layout,
        range(len(layout)),
        (flat, pointers, flat if unless is None else unless, flat if poison is None else poison),
        (),
        (read, asks, checks),
    )


@triton.jit
def _add(flat, pointers, poison, table, weight, COUNT: tl.constexpr):
    _, _, _, at, low, high, start, rest = _place(table, COUNT)
    apart = tl.load(pointers + tl.load(rest)).to(tl.pointer_type(flat.dtype.element_ty))
    flat += start
    for part in tl.static_range(4):
        here = at + part * COUNT
        inside = (here >= low) & (here < high)
        value = weight * tl.load(apart + here, mask=inside, other=0.0)
        bad = _sum_up(flat, here, inside, value, False)
        tl.store(poison, float("nan"), mask=tl.max((bad != 0.0).to(tl.int32), 0) > 0)


def add(
    layout: Layout, blocks: tuple[int, ...], pointers: Tensor, flat: Tensor, weight: float, poison: Tensor
) -> None:
    """Add contiguous tensors, given by their addresses, to some blocks of a flat buffer.

    Args:
        layout: The buffer's layout.
        blocks: The numbers of the blocks.
        pointers: Addresses of the tensors, which have the buffer's dtype.
        flat: The buffer.
        weight: Factor on the tensors.
        poison: One number, of the buffer's dtype, which becomes NaN if a sum is not finite.
    """
    _launch(_add, layout, blocks, (flat, pointers, poison), (float(weight),), ())


def normal(noise: Noise) -> Tensor:
    """The normals of all blocks, stacked, in float32."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, out, out, out, scaled=False)


def perturb(noise: Noise, mean: Tensor, std: Tensor) -> Tensor:
    """``mean + std · eps`` of all blocks, stacked."""
    out = torch.empty(len(noise.samples) * noise.layout.size, device=noise.device)
    return _stacked(noise, mean, std, out, scaled=True)


def moments(
    noise: Noise,
    samples: range,
    blocks: list[int],
    grads: Tensor,
    sums: Tensor,
    poison: Tensor,
    *,
    fresh: bool,
    places: Tensor | None = None,
) -> None:
    """Add weighted Σ g and Σ g · eps over some samples, of some blocks' gradients.

    Args:
        noise: The samples' noise; its weight is theirs.
        samples: The sample numbers.
        blocks: The numbers of the blocks.
        grads: The blocks' gradients ``[len(samples), *shape]``, end to end; with ``places``, any one of them.
        sums: Both sums of all blocks, ``[2, size]``.
        poison: One number, which becomes NaN if a sum is not finite.
        fresh: Whether these gradients are the first, so that there are no sums to add to.
        places: Addresses of all blocks' contiguous gradients, if these are separate tensors.
    """
    clock, given = _address(noise, samples)
    _launch(
        _moments,
        noise.layout,
        tuple(blocks),
        (
            grads,
            grads if places is None else places,
            sums[0],
            sums[1],
            poison,
            poison if clock is None else clock,
        ),
        (*given, noise.weight),
        (places is not None, fresh, clock is not None),
    )


def _stacked(noise: Noise, mean: Tensor, std: Tensor, out: Tensor, *, scaled: bool) -> Tensor:
    clock, given = _address(noise, noise.samples)
    tensors = (mean, std, out, out if clock is None else clock)
    _launch(_perturb, noise.layout, range(len(noise.layout)), tensors, given, (scaled, clock is not None))
    return out


def _address(noise: Noise, samples: range) -> tuple[Tensor | None, tuple[int, ...]]:
    """The address of the step, if a graph reads it; step, key, first sample and number of samples."""
    clock, step = (noise.step, 0) if isinstance(noise.step, Tensor) else (None, noise.step)
    # Kernels are compiled for the numbers' types: steps always have 32 bits, keys never.
    return clock, (int(step) & 0x7FFFFFFF, noise.key, samples.start, len(samples))


def _launch(
    kernel: Any,
    layout: Layout,
    blocks: range | tuple[int, ...],
    tensors: tuple[Tensor, ...],
    given: tuple[float, ...],
    numbers: tuple[bool, ...],
) -> None:
    """Run a kernel over some blocks of a layout; only the first tensor may have different dtypes."""
    first = tensors[0]
    key = (kernel.__name__, first.device, first.dtype, numbers, blocks)
    found = layout.launches.get(key)
    if found is None:
        table = layout.table(blocks, first.device)
        found = layout.launches[key] = (table, Launch(kernel, (len(table), 1, 1), (*numbers, TILE // 4), {}))
    table, launch = found
    launch(*tensors, table, given=given)
