"""Values that change from step to step, where a captured step can read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Live:
    """What a captured step reads from the device where an eager one asks Python.

    Attributes:
        clock: The optimiser's count of steps, which addresses noise; int32, one element.
        ahead: What to add to it for the number of the update that a parameter is having.
        entries: Of each group, by its number: those whose values may change from step to step.
        ok: Whether the statistics of this step are finite.
    """

    clock: Tensor
    ahead: dict[Tensor, int]
    entries: list[dict[str, Tensor]]
    ok: Tensor | None = None

    def step(self, p: Tensor) -> Tensor:
        """The number of the update that a parameter is having."""
        return self.clock + self.ahead[p]
