"""Squares of single examples' gradients: what VOGN, OGN and a diagonal Laplace approximation are made of."""

from __future__ import annotations

from typing import final

from torch import Tensor

from posterity.curvature.collector import Collector
from posterity.layers import LayerCall


@final
class Squares(Collector):
    """Σ g_i²: the squares of single examples' gradients, for the diagonal of an empirical Fisher matrix.

    Exact for linear layers (over whatever positions they share their weight), convolutions, embeddings,
    attention, and the scales and shifts of norms, biases included. Convolutions make the gradient from the
    same products.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> squares = Squares(model)
        >>> with squares:
        ...     model(torch.randn(8, 3)).square().mean().backward()
        >>> squares.sums["weight"].shape, squares.mean(batch_size=8)["bias"].shape
        (torch.Size([2, 3]), torch.Size([2]))
    """

    def mean(self, batch_size: int | None = None, samples: int = 1) -> dict[str, Tensor]:
        """(1/B) Σ_i g_i² of the examples' own losses, averaged over weight samples, by name.

        Args:
            batch_size: B, the examples that the loss was averaged over, of all passes together; if it is not
                given, what the layers saw.
            samples: K, weight samples behind the sums.
        """
        return self._mean(batch_size, samples).diagonal

    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() gives the gradient of such a layer's weight."""
        return call.brings_gradient

    def _take(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        return self._add_squares(call, x, grad)
