"""All small arithmetic that judges a step in one launch: a graph pays two microseconds for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.flat import Layout
from posterity.kernels.launch import Launch
from posterity.kernels.noise import _launch, _place

# Numbers of each tensor that a program of :func:`accept` has.
_SHARE = 1024


@triton.jit(do_not_specialize=["count"])
def _verdict(losses, poison, stuck, clock, loss, ok, count, PLACES: tl.constexpr):
    at = tl.arange(0, PLACES)
    mean = tl.sum(tl.load(losses + at, mask=at < count, other=0.0), 0) / count
    good = tl.abs(mean) + tl.load(poison) < float("inf")
    tl.store(stuck, tl.load(stuck) + tl.where(good, 0.0, float("nan")))
    tl.store(clock, tl.load(clock) + 1)
    tl.store(loss, mean)
    tl.store(ok, good)


def verdict(losses: Tensor, poison: Tensor, stuck: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`posterity.train.cuda_graph.verdict` says, of float32 numbers."""
    loss, ok = torch.empty_like(stuck), torch.empty_like(stuck, dtype=torch.bool)
    places = triton.next_power_of_2(len(losses))
    _verdict[(1,)](
        losses.contiguous(), poison, stuck, clock, loss, ok, len(losses), PLACES=places, num_warps=1
    )
    return loss, ok


@triton.jit
def _report(loss, ok, stuck, host):
    told = tl.load(stuck) + tl.where(tl.load(ok) == 0, float("-inf"), 0.0)
    tl.store(stuck, told)
    tl.store(host, tl.load(loss) + told)


def report(loss: Tensor, ok: Tensor, stuck: Tensor, host: Tensor) -> None:
    """What :func:`posterity.train.cuda_graph.report` does; ``host`` may be pinned memory."""
    _report[(1,)](loss, ok, stuck, host, num_warps=1)


@triton.jit
def _finite(numbers, ok, count, PLACES: tl.constexpr):
    at = tl.arange(0, PLACES)
    sizes = tl.abs(tl.load(numbers + at, mask=at < count, other=0.0))
    good = sizes < float("inf")  # NaN is less than nothing
    tl.store(ok, tl.min(good.to(tl.int32), 0) > 0)


def finite(numbers: Tensor) -> Tensor:
    """What :func:`posterity.optim.checks.finite` says."""
    ok = torch.empty((), dtype=torch.bool, device=numbers.device)
    _all(len(numbers), numbers.dtype)(numbers, ok)
    return ok


@lru_cache(maxsize=64)
def _all(count: int, dtype: torch.dtype) -> Launch:
    """Programs for so many numbers of a type."""
    return Launch(_finite, (1, 1, 1), (count, triton.next_power_of_2(count)), {"num_warps": 1})


@triton.jit
def _judge(flat, ok, table, most, COUNT: tl.constexpr):
    _, _, _, at, low, high, start, _ = _place(table, COUNT)
    flat += start
    for part in tl.static_range(4):
        here = at + part * COUNT
        size = tl.abs(tl.load(flat + here, mask=(here >= low) & (here < high), other=0.0))
        bad = tl.max(((size <= most) == 0).to(tl.int32), 0) > 0  # NaN is not, either
        tl.store(ok, bad == 0, mask=bad)


def judge(layout: Layout, flat: Tensor, most: float, ok: Tensor) -> None:
    """Let a flag fall if a number of a block is larger than that, or none; what is between blocks may be."""
    _launch(_judge, layout, range(len(layout)), (flat, ok), (float(most),), ())


@triton.jit
def _accept(a, new_a, b, new_b, c, new_c, ok, size, PAIRS: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    mine = at < tl.where(tl.load(ok) == 0, 0, size)
    tl.store(a + at, tl.load(new_a + at, mask=mine), mask=mine)
    if PAIRS > 1:
        tl.store(b + at, tl.load(new_b + at, mask=mine), mask=mine)
    if PAIRS > 2:
        tl.store(c + at, tl.load(new_c + at, mask=mine), mask=mine)


def accept(pairs: Sequence[tuple[Tensor, Tensor]], ok: Tensor) -> None:
    """What :func:`posterity.optim.apply.accept` does, to contiguous tensors of one type."""
    for start in range(0, len(pairs), 3):
        some = pairs[start : start + 3]
        given = [each for pair in (*some, some[0], some[0])[:3] for each in pair]
        _shares(given[0].numel(), len(some), given[0].dtype)(*given, ok)


@lru_cache(maxsize=1024)
def _shares(size: int, pairs: int, dtype: torch.dtype) -> Launch:
    """Programs for so many pairs of tensors of a size and a type."""
    return Launch(_accept, (triton.cdiv(size, _SHARE), 1, 1), (size, pairs, _SHARE), {})
