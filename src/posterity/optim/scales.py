"""A check in the first step that inputs and targets are about as large as default settings assume."""

from __future__ import annotations

import math
from typing import final

from torch import Tensor

from posterity.caller import warn
from posterity.layers.calls import LayerCall
from posterity.layers.conv import Conv
from posterity.layers.linear import Linear
from posterity.layers.norm import BatchNorm, GroupNorm, LayerNorm
from posterity.layers.stacks import innermost

# At a root mean square of 3 (targets) to 8 (pixels) rules do as well as at 1; at 10 and 30 they no longer do.
_LARGE = 8.0
_NORMS = (BatchNorm, GroupNorm, LayerNorm)


class ScaleWarning(UserWarning):
    """Inputs or targets are far from standardised, and default settings do not suit them.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=ScaleWarning)  # stop at the first step
    """


@final
class Scales:
    """Checks the first layer's inputs and a regression's first errors, and warns if they are large.

    A norm among the first two layers compensates for any scale of inputs, and embeddings have none.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self._layers: list[type[LayerCall]] = []
        self._inputs: Tensor | None = None
        self._errors: Tensor | None = None

    def add_layer(self, call: LayerCall) -> None:
        """Check a layer, if it is one of the first two without frozen weights; norms may have no weights."""
        if len(self._layers) == 2 or not (call.weight is None or innermost(call.weight).requires_grad):
            return
        if not self._layers and isinstance(call, Linear | Conv) and type(call.input) is Tensor:
            self._inputs = innermost(call.input).detach().float().square().mean()
        self._layers.append(type(call))

    def add_loss(self, name: str, value: Tensor) -> None:
        """Check a loss, if it is the first mean of squared errors."""
        if name == "mse_loss" and self._errors is None:
            self._errors = innermost(value).detach().float().mean()

    def judge(self) -> None:
        """Warn if values are large; this waits for the device."""
        inputs, errors = (
            0.0 if each is None else float(each) ** 0.5 for each in (self._inputs, self._errors)
        )
        if _LARGE < inputs < math.inf and not any(issubclass(each, _NORMS) for each in self._layers):
            warn(
                f"the inputs of the first layer have a root mean square of {inputs:.3g}, and default "
                "settings are meant for about 1: standardise inputs by the mean and std of the "
                "training data, or divide pixels by 255",
                ScaleWarning,
            )
        if _LARGE < errors < math.inf:  # what is not finite is refused
            warn(
                f"mse_loss begins with a root mean square error of {errors:.3g}, and default settings "
                "are meant for about 1: standardise targets by the mean and std of the training data",
                ScaleWarning,
            )
