"""Several processes that learn one posterior together.

Each sees its share of a batch. There are three ways:

- **A wrapper averages gradients** (``DistributedDataParallel``): all processes draw the same weights. What
  the wrapper gives is E[g] already, from which E[g·eps] follows without more communication; curvature is
  added up here.
- **A mesh** (``mesh=`` of an optimiser, and no wrapper): every process draws its own weights for its share,
  as in Osawa et al. 2019, and the sums of a step are added up here, once. A dimension named ``"mc"`` splits
  the weight samples of one share.
- **A sharded model** (``fully_shard``, ``parallelize_module``): its own passes gather weights and average
  gradients, and every process updates its shards; see :mod:`posterity.sharding`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SAMPLES = "mc"
# Steps in single precision add up to less, of the norm of a tensor; tensors of other seeds differ by more.
_ROUNDING = 1e-4
T = TypeVar("T")


def several() -> bool:
    """Whether this process is one of several that torch.distributed knows.

    Example:
        >>> several()
        False
    """
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@final
class World:
    """The processes that learn together.

    Args:
        mesh: The processes, with at most one dimension ``"mc"``; None for all.
        shares: The number of shares of a batch, without a mesh; by default the number of processes.

    Attributes:
        size: The number of processes; 1 if there are no others.
        rank: The rank of this process.
        parts: The number of shares of a batch.
        split: The number of processes with the same share; with a mesh, they split its weight samples.

    Example:
        >>> World(None).size
        1
    """

    def __init__(self, mesh: DeviceMesh | None, shares: int | None = None) -> None:
        self.mesh = mesh
        self.size, self.rank, self.split = 1, 0, 1
        self._groups: list[Any] = []
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names or range(mesh.ndim), mesh.shape, strict=True))
            self.size, self.split = mesh.size(), sizes.get(SAMPLES, 1)
            place = dict(zip(sizes, mesh.get_coordinate() or (), strict=True))
            for name in sorted(
                sizes, key=lambda name: name == SAMPLES
            ):  # samples of a share lie side by side
                self.rank = self.rank * sizes[name] + place[name]
            self._groups = mesh.get_all_groups()
        elif several():
            self.size, self.rank = distributed.get_world_size(), distributed.get_rank()
            self._groups = [None]
            self.split = 1 if shares is None else self.size // shares
        self.parts = self.size // self.split

    def share(self, samples: int) -> int:
        """This process's number of weight samples, of those of its share of the batch."""
        if self.mesh is None:
            return samples
        if samples % self.split:
            raise ValueError(
                f"mc_samples={samples} cannot be split over the {self.split} processes of the mesh's "
                f"dimension {SAMPLES!r}: choose a multiple"
            )
        return samples // self.split

    def numbered(self, samples: range, own: int) -> range:
        """The global numbers of some of this process's samples; every process draws up to ``own``.

        All processes pass the same ``own``, even one that draws fewer; otherwise two would draw the same
        noise.
        """
        if self.mesh is None:
            return samples
        window, first = divmod(samples.start, own)
        start = (window * self.size + self.rank) * own + first
        return range(start, start + len(samples))

    def add_up(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over all processes."""
        for tensor in tensors:
            for group in self._groups:
                distributed.all_reduce(tensor, group=group)

    def begin(self, tensor: Tensor) -> Any:
        """Start replacing a tensor by its sum; returns the handle for :meth:`end`."""
        if self._groups:
            return distributed.all_reduce(tensor, group=self._groups[0], async_op=True)
        return None

    def end(self, works: Sequence[tuple[Tensor, Any]]) -> None:
        """Wait for the started operations, in order, until all tensors are sums."""
        for tensor, work in works:
            if work is not None:
                work.wait()
            for group in self._groups[1:]:
                distributed.all_reduce(tensor, group=group)

    def worst(self, numbers: Tensor) -> None:
        """Replace sizes by the largest over all processes; NaN counts as infinite."""
        numbers.nan_to_num_(nan=math.inf, posinf=math.inf)  # of a NaN, backends take what they like
        for group in self._groups:
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=group)

    def complaint(self, mine: str | None, device: torch.device) -> str | None:
        """The complaint of the first process that has one, in all of them."""
        flag = torch.tensor(float(mine is not None), device=device)
        self.worst(flag)
        return next(each for each in self.gathered(mine) if each is not None) if flag else None

    def gathered(self, mine: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        found = [mine]
        for group in self._groups:
            several: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(several, found, group=group)
            found = [each for some in several for each in some]
        return found

    def refuse_others(
        self, mine: Mapping[str, Any], what: str, advice: str = "start all of them alike"
    ) -> None:
        """Raise in every process if values differ between them.

        Args:
            mine: This process's values, by name.
            what: What they are, for the message.
            advice: What to do.
        """
        found = self.gathered(mine)
        for name in dict.fromkeys(name for each in found for name in each):
            values = [each.get(name, "nothing") for each in found]
            if any(value != values[0] for value in values):
                number = next(i for i, value in enumerate(values) if value != values[0])
                raise RuntimeError(
                    f"processes differ in {what} {name}: {values[0]} in process 0, {values[number]} in "
                    f"process {number}: {advice}"
                )


@final
@dataclass(eq=False)
class Fingerprint:
    """A fingerprint of a tensor; equal for tensors that are the same to rounding.

    A process that replays a graph of a step rounds differently from one that runs the step eagerly.

    Attributes:
        shape: Its shape.
        digest: Equal for equal bits.
        sums: The sum of each sixteenth of its numbers, and the norm; empty for integers.
    """

    shape: list[int]
    digest: str
    sums: list[float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self.shape != other.shape:
            return False
        if self.digest == other.digest:
            return True
        pairs = list(zip(self.sums, other.sums, strict=False))
        return bool(pairs) and all(abs(a - b) <= _ROUNDING * max(pairs[-1]) for a, b in pairs)

    def __str__(self) -> str:
        return f"{self.shape} {self.digest}"


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The fingerprint of a tensor, a few bytes.

    Example:
        >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(3))
        True
    """
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()[:12]
    sums: list[float] = []
    if values.is_floating_point():
        wide = values.double()
        sums = torch.stack([*(part.sum() for part in wide.chunk(16)), wide.norm()]).tolist()
    return Fingerprint(list(tensor.shape), digest, sums)
