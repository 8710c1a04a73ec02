"""Noise that is addressed, not streamed.

Every standard normal that the library draws is a pure function of (seed, step, sample, block). A loop over
samples and one stacked pass therefore see the same numbers on one device, resuming needs two integers, and
torch's global generators are never touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """The finaliser of splitmix64: neighbouring integers become unrelated ones."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def address(seed: int, step: int, sample: int, block: str) -> int:
    """The generator seed that belongs to one draw of one block."""
    key = zlib.crc32(block.encode())
    for part in (sample, step, seed):
        key = _mix(key ^ _mix(part & _MASK))
    # CPU generators keep 32 bits of a seed, so the well mixed low ones must carry the address.
    return key & 0x7FFFFFFFFFFFFFFF


def normal(
    samples: range,
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    block: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normals ``[len(samples), *shape]`` for the given sample numbers of one block.

    Example:
        >>> both = normal(range(2), (3,), seed=0, step=5, block="fc.weight")
        >>> second = normal(range(1, 2), (3,), seed=0, step=5, block="fc.weight")
        >>> bool((both[1:] == second).all())
        True
    """
    out = torch.empty((len(samples), *shape), dtype=dtype, device=device)
    generator = torch.Generator(out.device)
    for row, sample in enumerate(samples):
        out[row].normal_(generator=generator.manual_seed(address(seed, step, sample, block)))
    return out
