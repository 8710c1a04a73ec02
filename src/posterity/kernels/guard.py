"""All small checks of a step in one launch: in a graph each launch costs two microseconds."""

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

# Values per tensor and program of :func:`accept`.
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
    """The same as :func:`posterity.train.cuda_graph.verdict`, for float32."""
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
    """The same as :func:`posterity.train.cuda_graph.report`; ``host`` may be pinned memory."""
    _report[(1,)](loss, ok, stuck, host, num_warps=1)


@triton.jit
def _finite(numbers, ok, count, PLACES: tl.constexpr):
    at = tl.arange(0, PLACES)
    sizes = tl.abs(tl.load(numbers + at, mask=at < count, other=0.0))
    good = sizes < float("inf")  # comparisons with NaN are false
    tl.store(ok, tl.min(good.to(tl.int32), 0) > 0)


def finite(numbers: Tensor) -> Tensor:
    """The same as :func:`posterity.optim.checks.finite`."""
    ok = torch.empty((), dtype=torch.bool, device=numbers.device)
    _all(len(numbers), numbers.dtype)(numbers, ok)
    return ok


@lru_cache(maxsize=64)
def _all(count: int, dtype: torch.dtype) -> Launch:
    """Programs for a number of values of a dtype."""
    return Launch(_finite, (1, 1, 1), (count, triton.next_power_of_2(count)), {"num_warps": 1})


@triton.jit
def _judge(flat, ok, table, most, COUNT: tl.constexpr):
    _, _, _, at, low, high, start, _ = _place(table, COUNT)
    flat += start
    for part in tl.static_range(4):
        here = at + part * COUNT
        size = tl.abs(tl.load(flat + here, mask=(here >= low) & (here < high), other=0.0))
        bad = tl.max(((size <= most) == 0).to(tl.int32), 0) > 0  # also for NaN
        tl.store(ok, bad == 0, mask=bad)


def judge(layout: Layout, flat: Tensor, most: float, ok: Tensor) -> None:
    """Clear a flag if a value in a block is larger than a limit, or NaN; padding is ignored."""
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
    """The same as :func:`posterity.optim.apply.accept`, for contiguous tensors of one dtype."""
    for start in range(0, len(pairs), 3):
        some = pairs[start : start + 3]
        given = [each for pair in (*some, some[0], some[0])[:3] for each in pair]
        _shares(given[0].numel(), len(some), given[0].dtype)(*given, ok)


@lru_cache(maxsize=1024)
def _shares(size: int, pairs: int, dtype: torch.dtype) -> Launch:
    """Programs for a number of pairs of tensors of one size and dtype."""
    return Launch(_accept, (triton.cdiv(size, _SHARE), 1, 1), (size, pairs, _SHARE), {})
