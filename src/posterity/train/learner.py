"""The interface of a method in a training step: drawing weights, absorbing gradients, and updating
parameters.

A step is ``begin``, for every chunk of samples ``draw`` and ``absorb`` around a forward and a backward pass,
then ``publish`` and ``learn``. With several processes, the results of ``pack`` are added up before
``publish``, and ``unpack`` takes the totals. In a captured step ``finish`` and ``move`` replace ``learn``,
with a flag on the device between them instead of a check, and a :class:`Replays` does the host's work around
each replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posterity.distributed import World
from posterity.optim.counting import Behind, LossTerms
from posterity.optim.pooling import SharedBuffers
from posterity.optim.statistics import Accumulator, Sink


class Drawn(NamedTuple):
    """Weights that take the place of a model's parameters in one pass.

    Attributes:
        weights: By parameter: ``[samples, ...]``; a single sample may lack that dimension.
        sinks: By weight: a sink that takes its gradient during a stacked backward pass.
        sources: The learner's sources of the draws.
        leaves: By parameter, of the module or not: the tensor with its gradient, if that is not a drawn
        weight.
        past: Tensors that no gradient may reach, since it would bypass the drawn weights; also filled in the
            forward pass.
    """

    weights: dict[Tensor, Tensor]
    sinks: dict[Tensor, Sink]
    sources: Sequence[Any]
    leaves: dict[Tensor, Tensor]
    past: list[Tensor]


class Learner(ABC):
    """The interface of a method in a training step.

    Attributes:
        module: The module whose weights are drawn.
        batch_dim: The axis of examples.
        sums: Gradients and their products with noise, over the samples of a step.
        terms: Checks the first losses.
        listens: Whether it collects curvature from layers in backward passes.
        estimates: Whether layers get placeholders for weights, with estimators.
        parts: Largest number of parts of a batch's share; samples of several processes are numbered by it,
            since each process only knows its own share.
        world: The processes that add up their sums, if several.
        generation: A number that changes whenever buffers have moved in memory.
    """

    module: nn.Module
    batch_dim: int
    listens: bool
    estimates: bool = False
    parts: int = 1
    sums: Accumulator
    terms: LossTerms
    world: World | None
    generation: int

    def stand_ins(self, samples: range, level: int | None) -> dict[Tensor, Tensor]:
        """Placeholders for parameters that are not drawn, new in every forward pass.

        Args:
            samples: Number of the sample, or numbers of all that vmap stacks.
            level: The level of vmap, if it stacks them.
        """
        return {}

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """The module's parameters whose gradients a step needs, drawn or not."""

    @abstractmethod
    def samples(self) -> int:
        """Number of weight samples of a step; 0 if gradients are taken at the means."""

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that have become invalid."""

    @abstractmethod
    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Raise, before anything changes, if a step is impossible or would lose gradients."""

    @abstractmethod
    def draw(self, rows: range, weight: float) -> Drawn:
        """Draw weights of some samples, each with a weight in the sums."""

    @abstractmethod
    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """A context for forward and backward passes."""

    @abstractmethod
    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add gradients ``[samples, ...]``, by parameter; those of one sample may lack the dimension."""

    @abstractmethod
    def publish(self, losses: Tensor, max_norm: float | None) -> Tensor:
        """After the last sample: set the parameters' gradients, if users can see them now, and clip."""

    @abstractmethod
    def learn(self, losses: Tensor, examples: int | None, count: float | Tensor | None) -> Tensor:
        """Check the absorbed statistics and update; returns the step's loss. If it raises, nothing has
        changed."""

    @abstractmethod
    def behind(self, examples: int | None, count: float | None) -> Behind:
        """The examples of a step, and the scale of its loss."""

    @abstractmethod
    def drop(self) -> None:
        """Drop a failed step."""

    @abstractmethod
    def overshot(self) -> str:
        """The error message for an invalid result."""

    # Several processes.

    def pooling(self) -> AbstractContextManager[object]:
        """A context for a step after ``begin``, in which sums are those of all processes."""
        return nullcontext()

    @abstractmethod
    def pack(self, losses: Tensor) -> list[Tensor]:
        """The tensors that processes add up, given the losses of this one's samples."""

    @abstractmethod
    def unpack(self, sent: list[Tensor], losses: Tensor) -> Tensor:
        """Take the totals; returns the losses of all processes."""

    @abstractmethod
    def postponed(self, step: Any) -> None:
        """Register a captured step whose ``wait()`` raises errors of this step, as for replays."""

    @abstractmethod
    def together(self, behind: Behind) -> Behind:
        """The examples of all processes' step, after ``unpack``; an eager step counts its own."""

    @abstractmethod
    def shared_buffers(self) -> SharedBuffers | None:
        """The module's buffers, which the first process sends to all; an eager ``learn`` sends them
        itself."""

    @property
    def ok(self) -> Tensor | None:
        """Whether the last step was accepted, as a flag on the device; None if the host knows."""
        return None

    # Captured steps.

    @abstractmethod
    def expect(self, examples: int | None, behind: Behind) -> None:
        """Set the number of examples of the current step, and the scale of its loss."""

    @abstractmethod
    def devices(self) -> set[torch.device]:
        """The devices of the parameters to update."""

    @abstractmethod
    def captures(self) -> bool:
        """Whether the next step may be a CUDA graph."""

    @abstractmethod
    def settle(self) -> None:
        """Raise a pending error of the last step, and refuse gradients that a capture would lose."""

    @abstractmethod
    def fixed(self) -> tuple[object, ...]:
        """Everything fixed in a graph: addresses of weights and state, and all settings that it does not
        read."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors that a step updates, except the module's buffers."""

    @abstractmethod
    def replays(self, device: torch.device) -> Replays:
        """The host's work before and after each replay."""

    @abstractmethod
    def finish(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """After the last sample: returns the losses to average, and numbers that are NaN if a sum is."""

    def objective(self, loss: Tensor) -> Tensor:
        """The value that a captured step returns for its mean loss, and that ``seen`` gets."""
        return loss

    @abstractmethod
    def move(self, behind: Behind, ok: Tensor | None) -> None:
        """Update all parameters, if a flag on the device allows it."""

    @abstractmethod
    def reset(self) -> None:
        """Start the next step."""

    @abstractmethod
    def seen(self, loss: float) -> None:
        """Check the loss of a captured step; raise if it is not finite."""


class Replays(ABC):
    """The host's part in a captured step.

    Attributes:
        clock: int32, one element: the number of the step, which addresses noise. The device counts.
    """

    clock: Tensor

    @abstractmethod
    def inside(self) -> AbstractContextManager[object]:
        """A context in which steps read tensors instead of numbers."""

    @abstractmethod
    def captured(self, graph: Any) -> None:
        """Called after a capture."""

    @abstractmethod
    def restored(self) -> None:
        """Called once the state from before the capture is restored."""

    @abstractmethod
    def stale(self) -> bool:
        """Whether the graph is out of date."""

    @abstractmethod
    def refuse(self) -> None:
        """Before a replay: refuse gradients that it would lose."""

    @abstractmethod
    def refresh(self) -> None:
        """Before a replay: copy changed numbers to the device."""

    @abstractmethod
    def replayed(self) -> None:
        """After a replay: count it."""

    @abstractmethod
    def undo(self) -> None:
        """Uncount the last replay, which was rejected."""


def settings(groups: Iterable[Mapping[str, Any]], unread: Collection[str]) -> tuple[object, ...]:
    """What the groups of an optimiser say, but for entries that a graph does not read."""
    return tuple(
        value if isinstance(value, Hashable) else str(value)
        for group in groups
        for key, value in group.items()
        if key not in unread
    )
