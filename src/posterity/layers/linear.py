"""``F.linear``: over whatever positions it shares its weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posterity.layers.calls import Found, Multiplying, Sink, positions, wide_dtype
from posterity.layers.stacks import StackedLayer, batched, column_sums, inside, level_of, operands, stack
from posterity.noise import kernels

# More rows than these fill a GPU, and torch's own products are the faster.
_FEW_ROWS = 512


@final
@dataclass(eq=False)
class Linear(Multiplying):
    """``x [N, T…, I]``, ``grad [N, T…, O]``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def known(self) -> bool:
        """Whether its weight is a matrix."""
        return self.weight.dim() == 2

    def leading(self) -> int:
        """All axes but that of the features."""
        return self.input.dim() - 1

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """As one product of stacks."""
        x, weight, bias = self.input, self.weight, self.bias
        level = level_of(x, weight, bias)
        if level is None or not batched(weight) or weight.dim() != 2 or x.shape[-1] != weight.shape[-1]:
            return NotImplemented
        rows, w, b, low = operands(x, weight, bias)
        # Inputs that all samples share stay one matrix.
        rows = rows.reshape(*([len(w)] if batched(x) else []), -1, rows.shape[-1])
        out = StackedLinear.apply(rows, w, b, low, sinks.get(inside(weight)))  # type: ignore[no-untyped-call]
        return stack(out.view(len(w), *x.shape[:-1], w.shape[1]), level)

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """``(grad²)ᵀ x²``; with several positions, which share the weight, example by example."""
        wide = wide_dtype(grad.dtype)
        if grad.dim() == 2:
            own = (grad if grad.dtype is wide else grad.to(wide)).square()
            shift = own.sum(0) if bias else None
            if x.shape[0] != grad.shape[0]:  # what all samples share is multiplied once
                own = own.view(self.samples, -1, own.shape[1]).sum(0)
            return Found(torch.mm(own.t(), (x if x.dtype is wide else x.to(wide)).square()), shift)
        if kernels is None or not kernels.multiplies(grad):
            return super().squares(x, grad, bias)
        # A convolution by one tap, over a picture of one row.
        rows, own = (each.flatten(1, -2).mT.unsqueeze(2) for each in (x, grad))
        if len(rows) != len(own):
            own = own.view(self.samples, *rows.shape[:1], *own.shape[1:])
            rows = rows.expand(self.samples, *rows.shape)
        squares = kernels.conv2d_squares(rows, own, (1, 1))[1].flatten(1)
        return Found(squares, self.bias_squares(grad) if bias else None)

    def held(self, x: Tensor, grad: Tensor) -> int:
        """A matrix."""
        return grad.shape[-1] * x.shape[-1]

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Products of gradients and inputs, summed over positions."""
        return (positions(grad).mT @ positions(x.to(grad.dtype))).to(wide_dtype(grad.dtype))

    def bias_terms(self, grad: Tensor) -> Tensor:
        """Sums over positions."""
        return positions(grad).sum(1, dtype=wide_dtype(grad.dtype))

    def columns(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """As they are."""
        yield x.reshape(-1, x.shape[-1]).mT

    def products(self, grad: Tensor) -> Tensor:
        """As they are."""
        return positions(grad).movedim(2, 0)


@final
class StackedLinear(StackedLayer):
    """``x [K, B, I]`` or ``[B, I]``, ``weight [K, O, I]``, ``bias [K, O]`` or None → ``[K, B, O]``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sink: Any) -> Any:
        if kernels is not None and kernels.multiplies(low) and x.shape[-2] <= _FEW_ROWS:
            return kernels.linear(x, low, bias)
        x = x.expand(len(low), -1, -1)
        if bias is None:
            return torch.bmm(x, low.mT)
        if not x.is_cuda or x.shape[1] <= _FEW_ROWS:
            return torch.baddbmm(bias[:, None], x, low.mT)
        # Each product fills the GPU, and adds its bias as it goes; a stack's would be written out first.
        out = x.new_empty(*x.shape[:2], low.shape[1])
        for each in range(len(low)):
            torch.addmm(bias[each], x[each], low[each].mT, out=out[each])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.bmm(grad, weight)
            back = back if x.dim() == 3 else back.sum(0)
        rows = x.expand(len(grad), -1, -1)
        into = StackedLayer.into_weight(ctx, lambda part: torch.bmm(grad[part].mT, rows[part]))
        return back, into, column_sums(grad) if ctx.needs_input_grad[2] else None, None, None
