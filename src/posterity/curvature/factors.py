"""Kronecker factors, for K-FAC, Noisy K-FAC and a Kronecker Laplace approximation."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard, final

from torch import Tensor

from posterity.curvature.collector import Collector
from posterity.curvature.results import Curvature, Kronecker
from posterity.layers import LayerCall, Multiplying, Part, wide_dtype

_SOME = "is used by one layer in some passes, and by several in others (watch its squares alone)"


@final
class Factors(Collector):
    """Kronecker factors of linear layers and convolutions, squares of all other parameters.

    A block is a weight with its bias, if that is watched too: inputs get a last entry 1, and the weight
    ``[W | b]``, with filters flat, is ``[O, I + 1]``. With inputs a_t and the example's gradients g_t of the
    outputs at T positions (pixels of an image, words of a text; one if nothing is shared), the factors are

        A = E[Σ_t a_t a_tᵀ],  S = E[Σ_t g_t g_tᵀ] / T

    as in KFC (Grosse & Martens 2016), with means over examples. The block of the Fisher matrix is A ⊗ S of
    the columns of [W | b] end to end, or ``torch.kron(S, A)`` of its rows, as ``flatten()`` has them. It is
    exact for T = 1 if inputs and gradients are independent. Grouped convolutions, and weights that several
    layers use, have squares only.

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

    def mean(self, batch_size: int | None = None, samples: int = 1, count: float | None = None) -> Curvature:
        """Factors and squares of the examples' own losses, averaged over examples and weight samples.

        Args:
            batch_size: As in :meth:`posterity.curvature.Squares.mean`.
            samples: Likewise.
            count: Likewise.
        """
        return self._mean(batch_size, samples, count)

    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() computes the gradient of such a layer's weight."""
        return call.brings_gradient and not _is_matrix(call)

    def _take(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        weight, bias = call.parts
        if weight is None or x is None or not _is_matrix(call):
            return self._add_squares(call, x, grad)
        if bias is not None and bias.rows != weight.rows:
            # Of another parameter than the weight's own: each of several projections has some rows of it.
            self._add(bias, call.bias_squares(grad))
            bias = None
        names = [weight.name] if bias is None else [weight.name, bias.name]
        if not self._squared.isdisjoint(names):
            self.refuse(names, _SOME)
        if not self.refused.keys().isdisjoint(names):
            self.refuse_block(*names)
        else:
            self._add_factors(call, weight, bias, x, grad)
        return None

    def clear(self) -> None:
        """Clear the sums, and outside the context the refusals."""
        super().clear()
        self._squared: set[str] = set()

    def _add(self, part: Part, squares: Tensor) -> None:
        if any(part.name in (block.weight, block.bias) for block in self.blocks.values()):
            self.refuse([part.name], _SOME)
        self._squared.add(part.name)
        super()._add(part, squares)

    def _add_factors(
        self, call: Multiplying, weight: Part, bias: Part | None, x: Tensor, grad: Tensor
    ) -> None:
        rows = None if weight.rows is None else weight.rows[:2]
        key = weight.name if rows is None else f"{weight.name}[{rows[0]}:{rows[1]}]"
        wide, extended = wide_dtype(grad.dtype), bias is not None
        grads = call.products(grad)
        g = grads.flatten(1).to(wide)
        samples = len(grad) // len(x)  # that share their inputs
        # They are the same in every backward pass of a graph, too.
        counted = call.fresh or key not in self.blocks
        for inputs in call.columns(x, grad) if counted else ():
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


def _is_matrix(call: LayerCall) -> TypeGuard[Multiplying]:
    return isinstance(call, Multiplying) and call.matrix
