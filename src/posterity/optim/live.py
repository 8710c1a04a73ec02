"""Values that change from step to step, where a captured step can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from posterity.optim.groups import Group


@dataclass
class Live:
    """What a captured step reads from the device where an eager one asks Python.

    Attributes:
        clock: The optimiser's count of steps, which addresses noise; int32, one element. When the statistics
            have been judged it counts the step under way.
        ahead: What to add to it then for the number of the update that a parameter is having.
        entries: Of each group, by its number: those whose values may change from step to step.
    """

    clock: Tensor
    ahead: dict[Tensor, int]
    entries: list[dict[str, Tensor]]

    def step(self, p: Tensor) -> Tensor:
        """The number of the update that a parameter is having."""
        ahead = self.ahead[p]
        return self.clock + ahead if ahead else self.clock


def under_way(groups: Sequence[Group], live: Live | None) -> Sequence[Group]:
    """Groups as the step that is under way sees them: a captured one, with tensors for what may change."""
    if live is None:
        return groups
    return [{**group, **entries} for group, entries in zip(groups, live.entries, strict=True)]
