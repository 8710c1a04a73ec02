"""What is not finite is refused: at once or, where that would make the host wait for a GPU, one call late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, final
from weakref import WeakSet

import torch
from torch import Tensor

from posterity.noise import kernels
from posterity.optim.slab import Slab
from posterity.optim.statistics import Accumulator
from posterity.optim.watch import UNTOUCHED, LossWatch


class Waits(Protocol):
    """What can be waited for."""

    def wait(self) -> None:
        """Wait for verdicts, and raise them."""


@final
class Guard:
    """Sees every loss and all statistics of one optimiser.

    On a GPU a flag on the device lets a step through or holds it back. The numbers behind it travel to the
    host meanwhile, and :meth:`settle` reads them: the next step does, and what shows or saves the posterior.

    Args:
        name: The optimiser's, for messages.

    Attributes:
        device: The device that the host runs ahead of; None if it waits for every verdict.
        ok: Whether the step under way may move anything, as a flag on that device; None if it may.
        graphs: Captured steps, which have verdicts of their own.
    """

    def __init__(self, name: str) -> None:
        self.device: torch.device | None = None
        self.ok: Tensor | None = None
        self.graphs: WeakSet[Waits] = WeakSet()
        self._watch = LossWatch(name)
        self._losses: list[Tensor] = []
        self._pending: Callable[[], None] | None = None

    def watch(self, loss: Tensor | float) -> None:
        """Refuse a loss that is not finite, and warn of one that runs away; late, if its step is."""
        if isinstance(loss, Tensor) and loss.device == self.device:
            self._losses.append(loss.detach().reshape(1))
        else:
            self._watch(loss)

    def judge(self, sums: Accumulator, undo: Callable[[], str | None]) -> Callable[[], None]:
        """Decide on the device whether all that a step has seen is finite; the check to :meth:`expect` then.

        Args:
            sums: What it has seen, beside the losses.
            undo: Called when the host learns that it was not; it may know a name for what was at fault.
        """
        pairs = [each.judged() for each in sums if each.both.numel()]
        parts = [*pairs, *self._losses]
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._losses = []
        self.ok = finite(numbers)
        read, of, curvature = sent(numbers), 2 * len(pairs), sums.curvature

        def check() -> None:
            values = read()
            bad = None if all(map(math.isfinite, values)) else undo()
            for loss in values[of:]:
                self._watch(loss)
            if not all(map(math.isfinite, values)):
                what = curvature if all(map(math.isfinite, values[:of:2])) else bad or "a gradient"
                raise FloatingPointError(f"{what} of the last step is not finite; {UNTOUCHED}")

        return check

    def expect(self, check: Callable[[], None]) -> None:
        """Let the next call that settles wait for the verdict on a step."""
        self._pending = check

    def settle_step(self) -> None:
        """Wait for the verdict on the last step that was no replay of a graph, and raise it, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def settle(self) -> None:
        """Wait for the verdicts on all steps, and raise them, once."""
        self.settle_step()
        for graph in list(self.graphs):
            graph.wait()

    def forget(self) -> None:
        """Drop losses whose step was given up."""
        self._losses.clear()


def ahead_of(slabs: Sequence[Slab]) -> torch.device | None:
    """The device that a host can run ahead of: a GPU that has all parameters."""
    devices = {slab.device for slab in slabs}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def accept(pairs: Sequence[tuple[Tensor, Tensor]], ok: Tensor | None) -> None:
    """Write new values over old ones, all of one size, unless a flag on the device is not set."""
    if ok is None:
        for old, new in pairs:
            old.copy_(new)
    elif not torch.compiler.is_compiling() and kernels is not None and ok.is_cuda and _plain(pairs):
        kernels.accept(pairs, ok)
    else:
        for old, new in pairs:
            torch.where(ok, new, old, out=old)


def _plain(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all are of one type, and end to end."""
    kinds = {(each.dtype, each.shape, each.is_contiguous()) for pair in pairs for each in pair}
    return len(kinds) == 1 and pairs[0][0].is_contiguous()


def finite(numbers: Tensor) -> Tensor:
    """Whether all numbers are, as a flag where they are."""
    if kernels is not None and numbers.is_cuda:
        ok: Tensor = kernels.finite(numbers)
    else:
        ok = torch.linalg.vector_norm(numbers, math.inf) < math.inf
    return ok


def sent(numbers: Tensor) -> Callable[[], list[float]]:
    """Start to bring numbers to the host; calling the result waits for them."""
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        there.synchronize()
        values: list[float] = host.tolist()
        return values

    return read


def verdict(
    losses: Tensor, poisons: Sequence[Tensor], stuck: Tensor, host: Tensor, clock: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean loss of a captured step, and the flag that lets it through: whether all it has seen is finite.

    Args:
        losses: Of the samples.
        poisons: Of the sums of all slabs: 0, or NaN.
        stuck: Becomes NaN with the first step that is held back, and stays so.
        host: Memory of the host that gets the mean loss, or NaN once there was such a step.
        clock: Counts the step.
    """
    poison = poisons[0] if len(poisons) == 1 else torch.stack(list(poisons)).sum()
    if kernels is not None and losses.is_cuda and losses.dtype == poison.dtype == torch.float32:
        return kernels.verdict(losses, poison, stuck, host, clock)
    loss = losses.mean()
    ok = loss.abs() + poison < math.inf  # NaN is less than nothing
    stuck += torch.where(ok, 0.0, math.nan)
    host.copy_(loss + stuck, non_blocking=True)
    clock += 1
    return loss, ok
