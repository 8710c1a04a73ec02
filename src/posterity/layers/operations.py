"""Operations without weights that have fast forms for stacks: ``F.max_pool2d`` and ``F.cross_entropy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posterity.layers.calls import Call, Sink
from posterity.layers.stacks import FLOATS, Stacked, batched, channels_last, front, level_of, pair, stack
from posterity.noise import kernels


@final
class MaxPool2d(Call):
    """``x [B, C, H, W]``."""

    def __init__(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> None:
        self._x, self._kernel, self._plain = input, pair(kernel_size), not return_indices
        self._sizes = pair(stride or kernel_size), pair(padding), pair(dilation), ceil_mode

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By kernels."""
        input = self._x
        level = level_of(input)
        x = channels_last(input) if level is not None and batched(input) and input.dim() == 4 else None
        if level is None or x is None or not self._plain or not kernels.pools(self._kernel, *self._sizes):
            return NotImplemented
        out = StackedMaxPool2d.apply(x.flatten(0, 1), self._kernel)  # type: ignore[no-untyped-call]
        return stack(out.view(*x.shape[:2], *out.shape[1:]).movedim(-1, 2), level)


@final
class StackedMaxPool2d(Stacked):
    """``x [N, H, W, C]`` → ``[N, P, Q, C]``, by windows that do not overlap."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Any:
        return kernels.max_pool2d(x, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return kernels.max_pool2d_grad(x, grad.contiguous(), ctx.kernel), None


@final
class CrossEntropy(Call):
    """The mean loss of logits ``[B, C]`` and labels ``[B]``, with nothing else asked for."""

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
