"""Addressed noise: counter-based instead of streamed.

Every standard normal that the library draws is a pure function of (domain, seed, step, sample, block,
position). A loop over samples, one stacked pass and a captured graph therefore see the same numbers on one
device, a slice of a block can be drawn alone, resuming needs two integers, and torch's global generators are
never touched.

On a GPU the numbers come from Philox inside the kernels that use them, so noise is generated twice and never
stored; on a CPU, where generating it is expensive, it is generated once, by all threads, and kept.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import count
from operator import index

import torch
from torch import Tensor

from posterity.flat import Layout, Piece, single
from posterity.torch_private import flatten_dense_tensors, foreach_add_, foreach_addcmul_, foreach_norm

try:
    from posterity import kernels as kernels
except ImportError:  # Triton comes with torch's CUDA builds only
    kernels = None  # type: ignore[assignment]

_MASK = (1 << 64) - 1
# Fewer numbers than this are not worth the threads.
_WORTH_THREADS = 1 << 16
# Gradients of fewer numbers than this are put end to end for one launch; larger ones have one each.
_WORTH_A_LAUNCH = 1 << 20
# Gradients of a layer that are held at once.
_AT_ONCE = 1 << 25
_read_by_replays: ContextVar[list[Tensor] | None] = ContextVar("read_by_replays", default=None)
# Tables of graphs that users capture themselves: we cannot know when such a graph is freed, so they are kept.
_read_by_others: list[Tensor] = []


class Domain(IntEnum):
    """The purpose of noise. Equal seeds and steps in two domains give unrelated numbers."""

    TRAIN = 0
    SAMPLE = 1
    FRESH = 2
    LABELS = 3
    DROPOUT = 4


def _mixed(z: int, *parts: int) -> int:
    """64 bits that depend on a mixed number and all parts in their order, by splitmix64's finaliser."""
    for part in parts:
        z = ((z ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


@lru_cache(maxsize=256)
def _key(domain: Domain, seed: int) -> int:
    """Domain and seed as a kernel's key: 63 bits with the highest set, so that none fits in 32."""
    return _mixed(0, domain, seed) >> 2 | 1 << 62


def address(seed: int, step: int, sample: int, block: str, *, domain: Domain = Domain.TRAIN) -> int:
    """The generator seed of one draw of one block."""
    return _mixed(_key(domain, index(seed)), index(step), index(sample), zlib.crc32(block.encode()))


class Noise:
    """Standard normals of all blocks of a layout, for some samples, by address.

    Args:
        samples: Numbers of the samples.
        layout: Names and shapes of the blocks.
        seed: Seed of the optimiser or of the call.
        step: Number of the step; inside a captured graph, the one-element int32 tensor that holds it.
        weight: Weight of each sample in the sums of :meth:`moments`.
        device: Device of the numbers.
        dtype: Their dtype.
        room: Memory to reuse; earlier draws in it are overwritten.
        domain: The purpose of the noise.

    Example:
        >>> layout = Layout(["fc.weight"], [(3,)])
        >>> both = Noise(range(2), layout, seed=0, step=5).blocks[0]
        >>> second = Noise(range(1, 2), layout, seed=0, step=5).blocks[0]
        >>> bool((both[1:] == second).all())
        True
    """

    def __init__(
        self,
        samples: range,
        layout: Layout,
        *,
        seed: int,
        step: int | Tensor,
        weight: float = 1.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        room: Room | None = None,
        domain: Domain = Domain.TRAIN,
    ) -> None:
        self._room = Room() if room is None else room
        self.samples, self.layout, self.step = samples, layout, step
        self.key = _key(domain, index(seed))
        self.weight = weight
        self.device, self.dtype = torch.device(device), dtype
        on_gpu = self.device.type == "cuda" and kernels is not None
        self.fused = on_gpu and dtype == torch.float32
        # Whether the first sums of a block may be written over whatever is there; a step from Python looks at
        # all sums, those of blocks without a gradient too.
        self.overwrites = self.fused and isinstance(step, Tensor)
        self._philox = on_gpu

    @cached_property
    def values(self) -> Tensor:
        """The numbers of all blocks in one flat tensor, each block stacked over the samples."""
        if self._philox:
            return kernels.normal(self).to(self.dtype)
        out = self._room("noise", self)
        key, starts, sizes = _mixed(self.key, int(self.step)), self.layout.starts, self.layout.sizes
        jobs = [
            (
                len(self.samples) * starts[i] + row * sizes[i],
                piece,
                _mixed(key, sample, self.layout.hashes[i]),
            )
            for i, piece in self.layout.pieces
            for row, sample in enumerate(self.samples)
        ]
        count = torch.get_num_threads() if self.device.type == "cpu" and len(out) > _WORTH_THREADS else 1
        # All threads, this one too, take from the same list, so that they end at about the same time.
        left = iter(jobs)
        others = [_threads(count - 1, os.getpid()).submit(_fill, out, left) for _ in range(count - 1)]
        _fill(out, left)
        for other in others:
            other.result()
        return out

    @cached_property
    def blocks(self) -> list[Tensor]:
        """The numbers of every block, ``[len(samples), *shape]``."""
        return self.layout.stacked(self.values, len(self.samples))

    def perturb(self, mean: Tensor, std: Tensor) -> Tensor:
        """``mean + std · eps`` of flat means and stds, stacked over the samples."""
        if self.fused:
            return kernels.perturb(self, mean, std)
        out = self._room("weights", self)
        if len(self.samples) == 1:  # end to end as means and stds are
            return torch.mul(std, self.values, out=out).add_(mean)
        views = (self.layout.views(mean), self.layout.views(std), self.blocks)
        for m, s, eps, theta in zip(*views, self.layout.stacked(out, len(self.samples)), strict=True):
            torch.mul(s, eps, out=theta).add_(m)  # half the time of addcmul, which is not vectorised
        return out

    def moments(
        self,
        grads: Mapping[int, Tensor],
        sums: Tensor,
        poison: Tensor,
        rows: slice = slice(None),
        *,
        fresh: bool = False,
    ) -> None:
        """Add weighted Σ g and Σ g · eps of gradients ``[K, *shape]``, or of one ``shape``, by block.

        Args:
            grads: Gradients by block number.
            sums: Both sums of all blocks, ``[2, size]``.
            poison: One number; on a GPU it becomes NaN if a sum is not finite.
            rows: The samples of the gradients.
            fresh: Whether the sums of these blocks are uninitialised.
        """
        if self.fused:
            samples = self.samples[rows]
            blocks, values = list(grads), list(grads.values())
            if len(values) > 1 and not isinstance(self.step, Tensor) and alike(values, values[0].dtype):
                # Launches from Python cost more than a table of addresses, those of a graph do not.
                places = addresses(tuple(map(Tensor.data_ptr, values)), self.device)
                kernels.moments(self, samples, blocks, values[0], sums, poison, fresh=fresh, places=places)
                return
            large = {i for i, grad in grads.items() if grad.numel() >= _WORTH_A_LAUNCH}
            for i in large:
                kernels.moments(self, samples, [i], grads[i].contiguous(), sums, poison, fresh=fresh)
            if small := [i for i in grads if i not in large]:
                joined = flatten_dense_tensors([grads[i] for i in small])  # type: ignore[no-untyped-call]
                kernels.moments(self, samples, small, joined, sums, poison, fresh=fresh)
            return
        if len(grads) > 1 and len(self.samples) == 1:
            flats = (*sums, self.values)
            totals, products, noise = ([views[i] for i in grads] for views in map(self.layout.views, flats))
            pairs = zip(grads.values(), totals, strict=True)
            own = [grad if grad.dim() == total.dim() else grad[0] for grad, total in pairs]
            foreach_add_(totals, own, alpha=self.weight)
            foreach_addcmul_(products, own, noise, value=self.weight)
        else:
            for i, grad in grads.items():
                self._add(sums[:, self.layout.span(i)], grad, self.blocks[i][rows])
        if sums.is_cuda:
            own = [sums[:, self.layout.span(i)] for i in grads]
            poison += 0.0 * torch.stack(foreach_norm(own)).sum()

    def _add(self, sums: Tensor, grad: Tensor, noise: Tensor) -> None:
        """Both sums of one block over several samples."""
        total, product = sums
        noise, grad = (each.reshape(len(noise), len(total)) for each in (noise, grad))
        if noise.numel() <= _WORTH_THREADS:  # all at once: Python would take longer than the sums
            total.add_(grad.sum(0, dtype=total.dtype), alpha=self.weight)
            product.add_((grad * noise).sum(0), alpha=self.weight)
            return
        for each, eps in zip(grad, noise, strict=True):
            total.add_(each, alpha=self.weight)
            product.addcmul_(each, eps, value=self.weight)

    def parts(self, block: int) -> list[slice]:
        """The samples whose gradients of a block to compute and add at once; none if all can wait for other
        blocks.

        On a CPU one at a time, while it is in the cache, unless all fit into it. On a GPU small ones wait, to
        share a launch, and large ones come in parts, to save memory.
        """
        samples, size = len(self.samples), self.layout.sizes[block]
        if self.device.type == "cpu":
            together = samples if samples * size <= _WORTH_THREADS else 1
        elif samples * size < _WORTH_A_LAUNCH:
            return []
        else:
            together = max(1, _AT_ONCE // size)
        return [slice(start, min(start + together, samples)) for start in range(0, samples, together)]


class Room:
    """Buffers for a CPU's draws, kept from step to step: allocating memory there costs more than filling
    it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, use: str, noise: Noise) -> Tensor:
        """A buffer for the draws of all samples."""
        size = len(noise.samples) * noise.layout.size
        if noise.device.type != "cpu" or torch.is_inference_mode_enabled():
            return torch.empty(size, dtype=noise.dtype, device=noise.device)
        found = self._buffers.get(use)
        if found is None or len(found) < size or found.dtype != noise.dtype:
            self._buffers[use] = found = torch.empty(size, dtype=noise.dtype)
        return found[:size]


def alike(tensors: Collection[Tensor], dtype: torch.dtype) -> bool:
    """Whether one kernel can access all of them by address."""
    return all(map(Tensor.is_contiguous, tensors)) and {each.dtype for each in tensors} == {dtype}


def addresses(at: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses of tensors in a tensor for kernels; the host does not wait for the copy."""
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _addresses(at, device)
    # Each replay reads the host's memory again, and only this graph's replays write the device's.
    host = torch.tensor(at, dtype=torch.int64, pin_memory=True)
    held = _read_by_replays.get()
    (_read_by_others if held is None else held).append(host)
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _addresses(at: tuple[int, ...], device: torch.device) -> Tensor:
    """For so few bytes, the call returns after they have left the host's memory."""
    return torch.tensor(at, dtype=torch.int64).to(device, non_blocking=True)


@contextmanager
def read_by_replays(tensors: list[Tensor]) -> Iterator[None]:
    """A context for capturing a graph: host tensors that its replays read are added to the list, which the
    graph keeps.

    Example:
        >>> held = []
        >>> with read_by_replays(held):
        ...     _read_by_replays.get() is held
        True
    """
    before = _read_by_replays.set(tensors)
    try:
        yield
    finally:
        _read_by_replays.reset(before)


def _fill(out: Tensor, jobs: Iterator[tuple[int, Piece, int]]) -> None:
    """Draw pieces, each into a block's draw at an offset, by its address except for the chunk."""
    generator = torch.Generator(out.device)
    with torch.inference_mode(out.is_inference()):  # a mode belongs to a thread
        for at, (chunk, length, parts), key in jobs:
            # CPU generators keep 32 bits of a seed: the lowest, which are mixed as well as the others.
            generator.manual_seed(_mixed(key, chunk))
            begin, end, _ = parts[0]
            if end - begin == length:
                out[at + begin : at + end].normal_(generator=generator)
                continue
            drawn = out.new_empty(length).normal_(generator=generator)
            for begin, end, first in parts:
                out[at + begin : at + end] = drawn[first : first + end - begin]


@lru_cache(maxsize=1)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    # Drawing is the one operation here that torch runs on one thread alone, and without Python's lock.
    return ThreadPoolExecutor(count, thread_name_prefix="posterity-noise")


_fresh = count()
# Numbers of the forks that led to this process, each one's in its parent; that of the fork under way is its
# thread's own, as two threads may fork at once.
_forks: list[int] = []
_numbers = count(1)
_forking = threading.local()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=lambda: setattr(_forking, "number", next(_numbers)),
        after_in_child=lambda: _forks.append(_forking.number),
    )


def fresh() -> tuple[int, int]:
    """A seed and a step that no other call gets, here or in a forked process, for calls without a seed."""
    return _mixed(_key(Domain.FRESH, torch.initial_seed()), *_forks), next(_fresh)


def new_seed() -> int:
    """A default seed for new objects: one number from torch's CPU generator."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def normal(
    samples: range,
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    block: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    domain: Domain = Domain.TRAIN,
    whole: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """The numbers of one block, ``[len(samples), *shape]``.

    With ``whole`` they are those of a slice, at ``offset`` in a block of that shape.

    Example:
        >>> address = {"seed": 0, "step": 5, "block": "fc.weight"}
        >>> whole = normal(range(2), (6, 4), **address)
        >>> shard = normal(range(2), (3, 4), **address, whole=(6, 4), offset=(3, 0))
        >>> bool((shard == whole[:, 3:]).all())
        True
    """
    own = tuple(shape)
    layout = single(block, own, own if whole is None else tuple(whole), tuple(offset or [0] * len(own)))
    return Noise(samples, layout, seed=seed, step=step, device=device, dtype=dtype, domain=domain).blocks[0]
