"""Watched weights, and the aliases that layers get in their place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.layers.calls import LayerCall, Listener, Part
from posterity.layers.stacks import rows_of
from posterity.torch_private import fast_apply


class Watched(NamedTuple):
    """A watched tensor, or a part of one.

    Attributes:
        tensor: The whole tensor.
        alias: The tensor that layers get instead, a leaf in the same memory; for a part, a view of that.
        parts: The part that it is for each listener.
    """

    tensor: Tensor
    alias: Tensor
    parts: dict[Listener, Part]

    def part(self, some: Tensor, samples_axis: int | None) -> Watched | None:
        """The rows, the sample, or the rows of a sample that another tensor is a view of, if any.

        Args:
            some: The other tensor.
            samples_axis: The axis of its vmap samples, if it has any.
        """
        whole, alias, sample, at = self.tensor, self.alias, None, 0 if samples_axis is None else 1
        if samples_axis not in (None, 0):
            return None
        if some.dim() < whole.dim() and at == 0 and all(listener.stacked for listener in self.parts):
            sample = (some.storage_offset() - whole.storage_offset()) // max(whole.stride(0), 1)
            if not 0 <= sample < len(whole):
                return None
            whole, alias = whole.detach()[sample], alias[sample]
        rows, span = rows_of(some, whole, at), None
        if rows is None:
            return None
        if rows != (0, whole.shape[at]):
            span, alias = (*rows, whole.shape[at]), alias.narrow(at, rows[0], rows[1] - rows[0])
        parts = {listener: Part(part.name, span, sample) for listener, part in self.parts.items()}
        return Watched(self.tensor, alias, parts)


class _Tap(torch.autograd.Function):
    """The identity; in the backward pass a layer reports, and may return the gradient of its weight."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, alias: Tensor, call: LayerCall, axis: int | None, stacked: bool
    ) -> Tensor:
        ctx.call, ctx.dtype, ctx.how = call, alias.dtype, (axis, stacked)
        # The same memory, but not a view for autograd: later operations may change it in place.
        return y.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        into, (axis, stacked) = ctx.call.report(grad), ctx.how
        if into is not None and stacked:
            into = into if ctx.call.samples > 1 else into[None]
            into = into.sum(0) if axis is None else into.movedim(0, axis)
        if into is not None and into.dtype is not ctx.dtype:
            into = into.to(ctx.dtype)
        return grad, into, None, None, None


# From y, the alias, the call, the axis of the weight's samples, and whether vmap runs: y after a node that
# reports.
tap = fast_apply(_Tap)
