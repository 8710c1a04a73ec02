"""What a training step needs of a method: weights to draw, gradients to absorb, and a move to make of them.

A step is ``begin``, for every chunk of samples ``draw`` and ``absorb`` around a forward and a backward pass,
then ``publish`` and ``learn``. Of several processes each adds up what ``pack`` gives before ``publish``, and
takes it in by ``unpack``. In a captured step ``finish`` and ``move`` stand for ``learn``, with a flag on the
device between them in place of a check, and a :class:`Replays` says what is new before each replay.
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
        weights: By parameter: ``[samples, ...]``, or of a single sample without that dimension.
        sinks: By weight: what may take its gradient in the middle of a stacked backward pass.
        sources: What the learner has drawn them from.
        leaves: By parameter, of the module or not: where its gradient is taken, if not in a drawn weight.
        past: What no gradient may reach, which would pass these by; filled in the forward pass, too.
    """

    weights: dict[Tensor, Tensor]
    sinks: dict[Tensor, Sink]
    sources: Sequence[Any]
    leaves: dict[Tensor, Tensor]
    past: list[Tensor]


class Learner(ABC):
    """A method, as a training step sees it.

    Attributes:
        module: Whose weights are drawn.
        batch_dim: The axis of examples.
        sums: Gradients and their products with noise, over the samples of a step.
        terms: Looks at the first losses.
        listens: Whether layers report to it in backward passes.
        estimates: Whether layers get stand-ins for weights, which have estimators of their own.
        parts: Into which a share of a batch is cut at most; samples of several processes are numbered by it,
            since each process knows its own share alone.
        world: The processes that add up their sums, if these do.
        generation: A number that is new whenever buffers lie elsewhere than before.
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
        """What takes the place of parameters that are not drawn, made anew in every forward pass.

        Args:
            samples: Number of the sample, or of all those that vmap stacks.
            level: Of vmap, if it stacks them.
        """
        return {}

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Parameters of the module whose gradients a step takes, drawn or not."""

    @abstractmethod
    def samples(self) -> int:
        """Weight samples of a step; 0 if its gradients are taken at the means."""

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that have changed to what nobody can use."""

    @abstractmethod
    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Refuse what a step cannot do, and what it would lose, before anything moves."""

    @abstractmethod
    def draw(self, rows: range, weight: float) -> Drawn:
        """Weights of some samples, each of which has a weight in the sums."""

    @abstractmethod
    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """What forward and backward passes are run inside."""

    @abstractmethod
    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add gradients ``[samples, ...]``, by parameter; those of one sample may lack the dimension."""

    @abstractmethod
    def publish(self, losses: Tensor, max_norm: float | None) -> Tensor:
        """After the last sample: give parameters their gradients, if a user may see them now, and clip."""

    @abstractmethod
    def learn(self, losses: Tensor, examples: int | None, count: float | Tensor | None) -> Tensor:
        """Judge what was absorbed, and move; the loss of the step. Nothing has moved if this raises."""

    @abstractmethod
    def behind(self, examples: int | None, count: float | None) -> Behind:
        """What is behind a step."""

    @abstractmethod
    def drop(self) -> None:
        """Forget a step that has failed."""

    @abstractmethod
    def overshot(self) -> str:
        """What to say of a step whose result is not fit."""

    # Several processes.

    def pooling(self) -> AbstractContextManager[object]:
        """What a step is run inside after ``begin``, so that sums are those of all processes."""
        return nullcontext()

    @abstractmethod
    def pack(self, losses: Tensor) -> list[Tensor]:
        """What all processes add up, given the losses of this one's samples."""

    @abstractmethod
    def unpack(self, sent: list[Tensor], losses: Tensor) -> Tensor:
        """Take that in, once it is added up; the losses of all processes."""

    @abstractmethod
    def postponed(self, step: Any) -> None:
        """Take note of a captured step whose ``wait()`` raises an error of this one, as replays do."""

    @abstractmethod
    def together(self, behind: Behind) -> Behind:
        """What is behind a step of all processes, after ``unpack``; an eager step counts by itself."""

    @abstractmethod
    def shared_buffers(self) -> SharedBuffers | None:
        """The module's buffers, which the first process gives to all; an eager ``learn`` sends them."""

    @property
    def ok(self) -> Tensor | None:
        """Whether the last step was let through, as a flag on the device; None if the host knows."""
        return None

    # Captured steps.

    @abstractmethod
    def expect(self, examples: int | None, behind: Behind) -> None:
        """Take note of the examples of the step that is under way, and of what is behind it."""

    @abstractmethod
    def devices(self) -> set[torch.device]:
        """Where there is something to move."""

    @abstractmethod
    def captures(self) -> bool:
        """Whether the step that comes next may be a CUDA graph."""

    @abstractmethod
    def settle(self) -> None:
        """Raise what is still to be known of the last step, and refuse what a capture would lose."""

    @abstractmethod
    def fixed(self) -> tuple[object, ...]:
        """What a graph has fixed: where weights and state lie, and all settings that it does not read."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that a step moves, the module's buffers apart."""

    @abstractmethod
    def replays(self, device: torch.device) -> Replays:
        """What a graph needs before and after each replay."""

    @abstractmethod
    def finish(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """After the last sample: the losses to average, and numbers that are NaN if a sum is."""

    def objective(self, loss: Tensor) -> Tensor:
        """What a captured step returns for its mean loss, which ``seen`` is told of."""
        return loss

    @abstractmethod
    def move(self, behind: Behind, ok: Tensor | None) -> None:
        """Move all parameters, if a flag on the device lets it."""

    @abstractmethod
    def reset(self) -> None:
        """Start the next step."""

    @abstractmethod
    def seen(self, loss: float) -> None:
        """Look at the loss of a captured step; raise if it is not finite."""


class Replays(ABC):
    """The host's part in a captured step.

    Attributes:
        clock: int32, one element: the number of the step, which addresses noise. The device counts.
    """

    clock: Tensor

    @abstractmethod
    def inside(self) -> AbstractContextManager[object]:
        """Inside, steps read tensors where they would read numbers."""

    @abstractmethod
    def captured(self, graph: Any) -> None:
        """Take note of what a capture has left."""

    @abstractmethod
    def restored(self) -> None:
        """The same, once everything is again as it was before the capture."""

    @abstractmethod
    def stale(self) -> bool:
        """Whether the graph no longer does what a step would do."""

    @abstractmethod
    def refuse(self) -> None:
        """Before a replay: refuse what it would lose."""

    @abstractmethod
    def refresh(self) -> None:
        """Before a replay: bring what has changed to the device."""

    @abstractmethod
    def replayed(self) -> None:
        """After a replay: count it."""

    @abstractmethod
    def undo(self) -> None:
        """Uncount the last replay, which was held back."""


def settings(groups: Iterable[Mapping[str, Any]], unread: Collection[str]) -> tuple[object, ...]:
    """What the groups of an optimiser say, but for entries that a graph does not read."""
    return tuple(
        value if isinstance(value, Hashable) else str(value)
        for group in groups
        for key, value in group.items()
        if key not in unread
    )
