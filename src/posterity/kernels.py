"""Triton kernels: Philox noise made where it is used, so that no byte of it goes through memory."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from posterity.noise import Noise

_BLOCK = 512


@triton.jit
def _eps(seed, step, sample, block, start, BLOCK: tl.constexpr):
    """Normals of elements start … start + BLOCK: counter (element / 4, sample, step, block), key the seed."""
    index = start // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros_like(index)
    a, b, c, d = tl.philox(seed, index, zero + sample, zero + step, zero + block)
    e0, e1 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    e2, e3 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d))
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [BLOCK])


@triton.jit(do_not_specialize=["seed", "first", "block", "size"])
def _perturb(mean, std, out, step, seed, first, block, size, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    row = tl.program_id(1)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    value = _eps(seed.to(tl.int64), tl.load(step), first + row, block, start, BLOCK)
    if SCALED:
        value = tl.load(mean + at, mask=inside) + tl.load(std + at, mask=inside) * value
    tl.store(out + row.to(tl.int64) * size + at, value, mask=inside)


@triton.jit(do_not_specialize=["seed", "first", "block", "size", "rows"])
def _moments(grads, total, product, step, seed, first, block, size, rows, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(step)
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    for row in range(rows):
        grad = tl.load(grads + row.to(tl.int64) * size + at, mask=inside, other=0.0)
        a += grad
        b += grad * _eps(seed.to(tl.int64), number, first + row, block, start, BLOCK)
    tl.store(total + at, a, mask=inside)
    tl.store(product + at, b, mask=inside)


def normal(noise: Noise) -> Tensor:
    """The normals ``[K, *shape]`` in float32."""
    out = torch.empty((len(noise.samples), *noise.shape), device=noise.device)
    _perturb[_grid(out)](out, out, out, *_address(noise), out[0].numel(), SCALED=False, BLOCK=_BLOCK)
    return out


def perturb(noise: Noise, mean: Tensor, std: Tensor) -> Tensor:
    """``mean + std · eps``, ``[K, *shape]``."""
    out = torch.empty((len(noise.samples), *noise.shape), device=noise.device)
    mean, std = mean.contiguous(), std.contiguous()
    _perturb[_grid(out)](mean, std, out, *_address(noise), mean.numel(), SCALED=True, BLOCK=_BLOCK)
    return out


def moments(noise: Noise, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g and Σ g · eps over the samples."""
    grads = grads.contiguous()
    total, product = torch.empty_like(grads[0]), torch.empty_like(grads[0])
    grid = (triton.cdiv(total.numel(), _BLOCK),)
    _moments[grid](grads, total, product, *_address(noise), total.numel(), len(grads), BLOCK=_BLOCK)
    return total, product


def _grid(out: Tensor) -> tuple[int, int]:
    return triton.cdiv(out[0].numel(), _BLOCK), len(out)


def _address(noise: Noise) -> tuple[Tensor, int, int, int]:
    """Step (on the device, where a graph can read it anew), seed, first sample, block."""
    step = noise.step
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int32, device=noise.device)
    # Philox counters have 32 bits, signed here.
    block = zlib.crc32(noise.block.encode())
    return step, noise.seed & 0x7FFFFFFFFFFFFFFF, noise.samples.start, block - (block >> 31 << 32)
