"""The host's part in captured steps: checks and copies before a replay, and counts after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from posterity.fusing import fusing
from posterity.optim import VariationalOptimizer
from posterity.optim.step import row
from posterity.train.cuda_graph import DeviceNumbers, Rows, fused
from posterity.train.learner import Replays

if TYPE_CHECKING:
    from posterity.train.gradient import ByGradient


@final
class RuleReplays(Replays):
    """The host's work around replays of a rule's step.

    Args:
        opt: The rule's optimiser.
        device: Of its parameters.
    """

    def __init__(self, opt: VariationalOptimizer, device: torch.device) -> None:
        self.opt, self.numbers = opt, DeviceNumbers(opt, device)

    @property
    def clock(self) -> Tensor:  # type: ignore[override]
        """The optimiser's count of steps."""
        return self.numbers.clock

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The optimiser reads numbers from the device."""
        eager, self.opt.numbers = self.opt.numbers, self.numbers
        try:
            yield
        finally:
            self.opt.numbers = eager

    def captured(self, graph: Any) -> None:
        """Record the gradients that every replay overwrites, and the parameters that it updates."""
        opt, params = self.opt, self.opt.parameters()
        self.grads = [(p, p.grad, p.grad._version) for p in params if p.grad is not None]
        self.unused = [p for p in params if p.grad is None]
        self.moved = [
            (flat, [i for i, p in enumerate(flat.params) if p.grad is not None])
            for flat in opt.cache.groups()
        ]
        opt.graphs.add(graph)

    def restored(self) -> None:
        """Record how far updates are ahead of steps."""
        self.counts = self._counts()

    def stale(self) -> bool:
        """Whether a parameter that it updates was left out of steps since; its update count is fixed in the
        graph."""
        return self._counts() != self.counts

    def _counts(self) -> list[int]:
        """How far each moved parameter's updates are ahead of the optimiser's steps."""
        steps = self.opt.param_groups[0]["steps"]
        return [int(flat.steps[i]) - steps for flat, moved in self.moved for i in moved]

    def refuse(self) -> None:
        """Refuse gradients that a replay would lose."""
        self.opt.refuse_inside("a training step")
        changed = not all(p.grad is grad and grad._version == version for p, grad, version in self.grads)
        self._fresh = changed or any(p.grad is not None for p in self.unused)
        if self._fresh:  # something happened to the gradients since the last replay
            self.opt.refuse_foreign()
        self.opt.settle_step()

    def refresh(self) -> None:
        """Copy learning rates and other scheduled entries."""
        self.numbers.refresh(self.opt)

    def replayed(self) -> None:
        """Count updates, and expose the gradients."""
        for flat, moved in self.moved:
            flat.count(moved)
        self.opt.advance()
        if self._fresh:
            self.grads = [(p, grad, grad._version) for p, grad, _ in self.grads]
            for p, grad, _ in self.grads:
                p.grad = grad
            self.opt.reset()

    def undo(self) -> None:
        """Uncount its updates."""
        for flat, moved in self.moved:
            flat.count(moved, -1)
        self.opt.advance(-1)


@final
class GradientReplays(Replays):
    """The step's number, the KL's share and learning rates, in tensors that a graph reads.

    Args:
        learner: The learner.
        device: Of its parameters.
    """

    def __init__(self, learner: ByGradient, device: torch.device) -> None:
        self._learner, self._groups = learner, learner.optimizer.groups
        self.clock = torch.zeros((), dtype=torch.int32, device=device)
        self._share = torch.zeros((), device=device)
        self._rates = [torch.zeros((), device=device) for _ in self._groups]
        self._known: list[float] = [math.nan] * (1 + len(self._rates))
        self._reads, self._rows = -1, Rows()
        self.refresh()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The learner's numbers and the optimiser's rates are tensors, and no step is counted."""
        learner, draws = self._learner, self._learner.model.draws
        rates = [group["lr"] for group in self._groups]
        learner._share, learner._clock, learner._row = self._share, self.clock, self._rows
        try:
            for group, rate in zip(self._groups, self._rates, strict=True):
                group["lr"] = rate
            with fusing(fused):
                yield
        finally:
            learner.model.draws, learner._row = draws, row
            for group, rate in zip(self._groups, rates, strict=True):
                group["lr"] = rate

    def captured(self, graph: Any) -> None:
        """Nothing: the graph only uses its own memory."""

    def restored(self) -> None:
        """The clock has counted."""
        self._reads = -1

    def stale(self) -> bool:
        """Never: any such change has another key."""
        return False

    def refuse(self) -> None:
        """Nothing to refuse: every step drops existing gradients."""

    def refresh(self) -> None:
        """Copy changed numbers to the device."""
        learner = self._learner
        if learner.model.draws != self._reads:
            self.clock.fill_(learner.model.draws)
        self._reads = learner.model.draws + 1
        values: list[Any] = [learner._share_now(), *(group["lr"] for group in self._groups)]
        for i, (value, there) in enumerate(zip(values, (self._share, *self._rates), strict=True)):
            if isinstance(value, Tensor):
                there.copy_(value, non_blocking=True)
            elif value != self._known[i]:
                self._known[i] = value
                there.fill_(value)

    def replayed(self) -> None:
        """Count the draw, and mark the parameters as changed."""
        self._learner.model.draws += 1
        torch.autograd.graph.increment_version(self._learner._own)

    def undo(self) -> None:
        """Uncount its draw."""
        self._learner.model.draws -= 1
