"""Noise that is addressed, not streamed.

Every standard normal that the library draws is a pure function of (seed, step, sample, block). A loop over
samples, one stacked pass and a captured graph therefore see the same numbers on one device, resuming needs
two integers, and torch's global generators are never touched.

On a GPU the numbers come from Philox inside the kernels that use them, so noise is made twice and never
stored; on a CPU, where making it is what costs, it is made once and kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

try:
    from posterity import kernels
except ImportError:  # Triton comes with torch's CUDA builds only
    kernels = None  # type: ignore[assignment]
HAS_KERNELS = kernels is not None

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


class Noise:
    """Standard normals ``[len(samples), *shape]`` of one block, by address.

    Args:
        samples: Numbers of the samples.
        shape: The block's shape.
        seed: Seed of the optimiser or of the call.
        step: Number of the step; inside a captured graph, the one-element int32 tensor that holds it.
        block: The block's name.
        device: Where the numbers are wanted.
        dtype: Their type.

    Example:
        >>> both = Noise(range(2), (3,), seed=0, step=5, block="fc.weight").values
        >>> second = Noise(range(1, 2), (3,), seed=0, step=5, block="fc.weight").values
        >>> bool((both[1:] == second).all())
        True
    """

    def __init__(
        self,
        samples: range,
        shape: Sequence[int],
        *,
        seed: int,
        step: int | Tensor,
        block: str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.samples, self.shape, self.seed, self.step, self.block = samples, tuple(shape), seed, step, block
        self.device, self.dtype = torch.device(device), dtype
        self._fused = self.device.type == "cuda" and HAS_KERNELS

    @cached_property
    def values(self) -> Tensor:
        """The numbers themselves."""
        if self._fused:
            return kernels.normal(self).to(self.dtype)
        if isinstance(self.step, Tensor):
            raise RuntimeError("a captured step needs Triton for its noise, and it is not installed")
        out = torch.empty((len(self.samples), *self.shape), dtype=self.dtype, device=self.device)
        generator = torch.Generator(out.device)
        for row, sample in enumerate(self.samples):
            key = address(self.seed, self.step, sample, self.block)
            out[row].normal_(generator=generator.manual_seed(key))
        return out

    def perturb(self, mean: Tensor, std: Tensor) -> Tensor:
        """``mean + std · eps`` for every sample."""
        if self._fused and self.dtype == torch.float32:
            return kernels.perturb(self, mean, std)
        return torch.addcmul(mean, std, self.values)

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of g and of g · eps over the samples, of gradients ``[len(samples), *shape]``."""
        if self._fused and self.dtype == torch.float32:
            return kernels.moments(self, grads)
        total, product = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
        for grad, eps in zip(grads, self.values, strict=True):
            total += grad
            product.addcmul_(grad, eps)
        return total, product


_fresh = count()


def fresh() -> tuple[int, int]:
    """A seed and a step that no other call in this process gets: noise for those who gave no seed."""
    return torch.initial_seed(), next(_fresh)


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
    """The numbers of :class:`Noise` at once."""
    return Noise(samples, shape, seed=seed, step=step, block=block, device=device, dtype=dtype).values
