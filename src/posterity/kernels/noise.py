"""Triton kernels: Philox noise made where it is used, so that no byte of it goes through memory."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from posterity.kernels.philox import eps

if TYPE_CHECKING:
    from posterity.noise import Noise

_BLOCK = 512


@triton.jit(do_not_specialize=["seed", "first", "block", "size"])
def _perturb(mean, std, out, step, seed, first, block, size, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    row = tl.program_id(1)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    value = eps(seed.to(tl.int64), tl.load(step), first + row, block, start, BLOCK)
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
        b += grad * eps(seed.to(tl.int64), number, first + row, block, start, BLOCK)
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
