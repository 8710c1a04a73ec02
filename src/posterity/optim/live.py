"""Values that change from step to step, where a captured step can read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Live:
    """What a captured step reads from the device where an eager one asks Python.

    Attributes:
        clock: Step number of the block with the fewest steps, int32, one element.
        ahead: How many steps each parameter is ahead of that.
        lr: Learning rate of each group, by its number.
        ok: Whether the statistics of this step are finite.
    """

    clock: Tensor
    ahead: dict[Tensor, int]
    lr: list[Tensor]
    ok: Tensor | None = None

    def step(self, p: Tensor) -> Tensor:
        """The parameter's step number before this update."""
        return self.clock + self.ahead[p] if self.ahead[p] else self.clock
