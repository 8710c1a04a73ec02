"""Watching the loss: what is not finite is refused, what runs away is warned of."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

UNTOUCHED = (
    "the posterior was not touched: look for bad values in the batch, or lower the learning rate or the "
    "initial std"
)


class DivergenceWarning(UserWarning):
    """The loss has run away from where it began.

    Example:
        >>> warnings.filterwarnings("error", category=DivergenceWarning)  # stop a sweep's run at once
    """


class LossWatch:
    """Looks at every loss of one optimiser.

    Args:
        name: The optimiser's, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: float | None = None

    def __call__(self, loss: Tensor | float) -> None:
        """Refuse a loss that is not finite; warn, once, of one that has run away from where it began."""
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value:g}; {UNTOUCHED}")
        if self._first is None:
            self._first = value
        elif self._first < math.inf and value > 10.0 * (abs(self._first) + 1.0):
            warnings.warn(
                f"{self.name} seems to diverge: the loss began at {self._first:.3g} and is {value:.3g}; "
                "lower the learning rate or the initial std",
                DivergenceWarning,
                stacklevel=5,
            )
            self._first = math.inf  # said once
