"""The one place that knows layers: arguments, forms for stacks, and what single examples say of weights."""

from posterity.layers.calls import Found, LayerCall, Multiplying, Part, Sink, chunks, wide_dtype
from posterity.layers.intercept import Intercept
from posterity.layers.stand_ins import Estimator

__all__ = [
    "Estimator",
    "Found",
    "Intercept",
    "LayerCall",
    "Multiplying",
    "Part",
    "Sink",
    "chunks",
    "wide_dtype",
]
