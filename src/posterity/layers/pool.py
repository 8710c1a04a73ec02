"""``F.max_pool2d`` of stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor
from torch.autograd.function import once_differentiable

from posterity.layers.calls import Call, Sink
from posterity.layers.stacked import Stacked, channels_last, pair
from posterity.layers.stacks import batched, level_of, stack
from posterity.noise import kernels


@final
class MaxPool2d(Call):
    """``x [B, C, H, W]``."""

    __slots__ = ("_kernel", "_plain", "_sizes", "_x")

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
