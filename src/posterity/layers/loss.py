"""``F.cross_entropy`` of stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posterity.layers.calls import Call, Sink
from posterity.layers.stacked import FLOATS, Stacked
from posterity.layers.stacks import batched, front, level_of, stack
from posterity.noise import kernels


@final
class CrossEntropy(Call):
    """The mean loss of logits ``[B, C]`` and labels ``[B]``, with nothing else asked for."""

    __slots__ = ("_both", "_ignore_index", "_plain")

    def __init__(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self._both, self._ignore_index = (input, target), ignore_index
        unasked = all(each is None for each in (weight, size_average, reduce))
        self._plain = unasked and (reduction, label_smoothing) == ("mean", 0.0)

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By a kernel."""
        input, target = self._both
        level = level_of(input, target)
        if (
            kernels is None
            or level is None
            or not self._plain
            or not batched(input)
            or not input.is_cuda
            or input.dtype not in FLOATS
            or (input.dim(), target.dim(), target.dtype) != (2, 1, torch.int64)
        ):
            return NotImplemented
        loss, _ = StackedCrossEntropy.apply(front(input), front(target), self._ignore_index)  # type: ignore[no-untyped-call]
        return stack(loss, level)


@final
class StackedCrossEntropy(Stacked):
    """Mean loss of every sample, ``[K]``, of logits ``[K, B, C]``."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, ignore_index: int) -> Any:
        return kernels.cross_entropy(logits, target, ignore_index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, None, None]).to(slope.dtype), None, None
