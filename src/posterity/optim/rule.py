"""What a method supplies: pure functions of one block, and attributes that say what its rule wants.

A block is what a rule treats as one: a tensor or, for a rule with ``matrices``, a layer's weight and bias.
What a function needs it is given, or has from its class: compiled, it serves all optimisers of a kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from posterity.curvature import Collector
from posterity.optim.blocks import Moving
from posterity.optim.groups import Group
from posterity.optim.slab import State
from posterity.optim.statistics import Statistics
from posterity.posterior import DiagonalGaussian, Leaf


class Rule(ABC):
    """How a posterior over one block begins, is drawn from, and moves.

    Attributes:
        needs_batch_size: Whether it asks for the number of examples behind a step.
        collects: The curvature that it consumes, instead of E[g·eps].
        draws: Whether gradients are wanted at drawn weights; else at the means.
        matrices: Keys of a state that are no values of single weights, but matrices of a block of tensors.
        live: Entries of a group that may change at every step; a captured step reads them anew.
        without_noise: What differs in groups without a posterior, if the rule itself trains these; None: Adam
            does.
    """

    needs_batch_size: ClassVar[bool] = False
    collects: ClassVar[type[Collector] | None] = None
    draws: ClassVar[bool] = True
    matrices: ClassVar[tuple[str, ...]] = ()
    live: ClassVar[tuple[str, ...]] = ("lr",)
    without_noise: ClassVar[Group | None] = None

    @abstractmethod
    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """State of a block at the start, or, given a std, such that the posterior has it."""

    @abstractmethod
    def std(self, state: State, group: Group) -> Tensor:
        """Standard deviation of the block's weights."""

    @abstractmethod
    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """The block's new mean and new state."""

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise ValueError, in one sentence, for a hyper-parameter out of range."""

    # What one supplies besides if its blocks are matrices.

    def perturb(self, state: State, noise: Tensor, group: Group) -> Tensor:
        """How far weights are drawn from their mean, given standard normals."""
        return self.std(state, group) * noise

    def updates(self, blocks: Sequence[Moving]) -> Sequence[tuple[Tensor, State]]:
        """New means and states of all blocks that are matrices; what is left out of a state stays."""
        return [self.update(*block) for block in blocks]

    def leaf(self, mean: Sequence[Tensor], state: State, keep: Tensor | None, group: Group) -> Leaf:
        """The posterior of a block, given the means of its tensors."""
        return DiagonalGaussian(mean[0], self.std(state, group), keep=keep)

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """State of a block such that the posterior is a leaf, whose mean and std are given."""
        return self.init(mean, std, group)

    def captures(self) -> bool:
        """Whether the step that comes next may be a CUDA graph."""
        return True
