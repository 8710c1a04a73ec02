"""The one place that knows layers: their arguments, their forms for stacks, and what single examples say of them."""

from posterity.layers.calls import Found, LayerCall, Multiplying, Part, Sink, chunks, wide_dtype
from posterity.layers.intercept import Intercept

__all__ = ["Found", "Intercept", "LayerCall", "Multiplying", "Part", "Sink", "chunks", "wide_dtype"]
