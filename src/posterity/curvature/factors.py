"""Kronecker factors: what K-FAC, Noisy K-FAC and a Kronecker Laplace approximation are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from posterity.curvature.collector import Collector, Curvature, Kronecker
from posterity.curvature.conv import wide_dtype
from posterity.curvature.ends import Use
from posterity.curvature.layers import Layer, Multiplying
from posterity.curvature.uses import Part


@final
class Factors(Collector):
    """Kronecker factors of linear layers and convolutions, squares of all other parameters.

    A block is a weight with its bias, if that is wanted too: inputs get a last entry 1, and the weight
    ``[W | b]``, with filters flat, is ``[O, I + 1]``. With inputs a_t and the example's gradients g_t of the
    outputs at T positions (places in a picture, words of a text; one if nothing is shared), the factors are

        A = E[Σ_t a_t a_tᵀ],  S = E[Σ_t g_t g_tᵀ] / T

    as in KFC (Grosse & Martens 2016), with means over examples. The block of the Fisher matrix is A ⊗ S of
    the columns of [W | b] end to end, or ``torch.kron(S, A)`` of its rows, as ``flatten()`` has them. It is
    exact for T = 1 if inputs and gradients are independent. Convolutions in groups have squares only.

    ``blocks`` has sums over examples and samples, by the weight's name (and rows, if a layer uses some only).

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with Factors(model) as factors:
        ...     model(torch.randn(8, 3)).square().mean().backward()
        >>> block = factors.mean().kronecker["weight"]
        >>> block.A.shape, block.S.shape, block.bias
        (torch.Size([4, 4]), torch.Size([2, 2]), 'bias')
    """

    def mean(self, batch_size: int | None = None, samples: int = 1) -> Curvature:
        """Factors and squares of the examples' own losses, averaged over examples and weight samples.

        Args:
            batch_size: As in :meth:`posterity.curvature.Squares.mean`.
            samples: Likewise.
        """
        return self._mean(batch_size, samples)

    def brings_gradient(self, layer: Layer) -> bool:
        """Whether heard() gives the gradient of such a layer's weight."""
        return layer.brings_gradient and not isinstance(layer, Multiplying)

    def _take(self, use: Use, x: Tensor | None, grad: Tensor, extras: Sequence[Tensor]) -> Tensor | None:
        site = use.site
        if site.weight is None or not isinstance(site.layer, Multiplying):
            return self._add_squares(use, x, grad, extras)
        if not self.refused.keys().isdisjoint(site.names):
            self.refuse_block(*site.names)
        else:
            self._add_factors(use, site.layer, site.weight, *site.stacks(x, grad))
        return None

    def _add_factors(self, use: Use, layer: Multiplying, weight: Part, x: Tensor, grad: Tensor) -> None:
        rows = None if weight.rows is None else weight.rows[:2]
        key = weight.name if rows is None else f"{weight.name}[{rows[0]}:{rows[1]}]"
        bias = use.site.bias
        wide, extended = wide_dtype(grad.dtype), bias is not None
        grads = layer.grads(grad)
        g = grads.flatten(1).to(wide)
        samples, x = (len(x), x[:1]) if x.stride(0) == 0 else (1, x)  # the same inputs for all samples
        # They are the same in every backward pass of a graph, too.
        counted = use.fresh or key not in self.blocks
        for inputs in layer.inputs(x, grad) if counted else ():
            a, size = inputs.to(wide), len(inputs)
            if key not in self.blocks:
                zeros = a.new_zeros(size + extended, size + extended), g.new_zeros(len(g), len(g))
                self.blocks[key] = Kronecker(weight.name, bias and bias.name, rows, *zeros, examples=0)
            A = self.blocks[key].A
            A[:size, :size].addmm_(a, a.mT, alpha=samples)
            if extended:
                ones = a.sum(1)
                A[-1, :-1].add_(ones, alpha=samples)
                A[:-1, -1].add_(ones, alpha=samples)
                A[-1, -1].add_(samples * a.shape[1])
        block = self.blocks[key]
        block.S.addmm_(g, g.mT, alpha=1 / grads.shape[2])
        if counted:
            self.blocks[key] = replace(block, examples=block.examples + grads.shape[1])
