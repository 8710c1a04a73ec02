"""``F.batch_norm``, ``F.layer_norm`` and ``F.group_norm``: scales and shifts of normalised inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posterity.layers.calls import Found, LayerCall, Sink, wide_dtype
from posterity.layers.stacks import Stacked, batched, channels_last, front, level_of, stack
from posterity.noise import kernels


class ByChannel(LayerCall):
    """A norm of ``x [N, C, T…]`` with a scale and a shift for each channel."""

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradients times normalised inputs, summed over positions."""
        return self.bias_terms(x * grad)

    def bias_terms(self, grad: Tensor) -> Tensor:
        """Sums over positions."""
        return grad.reshape(*grad.shape[:2], -1).sum(2, dtype=wide_dtype(grad.dtype))


@final
@dataclass(eq=False)
class BatchNorm(ByChannel):
    """``grad`` already includes an example's effect on the batch's statistics."""

    # torch's nodes that keep the batch's mean and 1 / √(var + eps) as their second and third results.
    saved = ("CudnnBatchNormBackward0", "MiopenBatchNormBackward0", "NativeBatchNormBackward0")

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def keep(self, out: Tensor) -> None:
        """Keep the mean and 1 / √(var + eps) of the normalisation, ``[C]`` or ``[K, C]``, if known."""
        self.statistics: tuple[Tensor, Tensor] | None = None
        mean, var, node = self.running_mean, self.running_var, cast("Any", out.grad_fn)
        if not self.training and mean is not None and var is not None:
            self.statistics = front(mean), torch.rsqrt(front(var).to(wide_dtype(var.dtype)) + self.eps)
        elif self.grad_axis is None and node is not None and node.name() in self.saved:
            self.statistics = node._saved_result1, node._saved_result2

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """By a kernel if possible."""
        if kernels is None or not _fuses(grad):
            return super().squares(x, grad, bias)
        mean, rstd = self._statistics(x)
        if self.samples == 1:
            return Found(by_example=kernels.batch_norm_squares(x, grad, mean, rstd, axis=1))
        grad = grad.view(self.samples, self.examples, *grad.shape[1:])
        x = x.view(-1, self.examples, *x.shape[1:]).expand(grad.shape)
        return Found(by_example=kernels.batch_norm_squares(x, grad, mean, rstd))

    def prepared(self, x: Tensor) -> Tensor:
        """Normalised inputs."""
        mean, rstd = self._statistics(x)
        own = mean.view(-1, 1, *mean.shape[-1:], *[1] * (x.dim() - 2))
        scale = rstd.view(own.shape)
        rows = x.reshape(-1, self.examples, *x.shape[1:]).to(mean.dtype)
        return ((rows - own) * scale).flatten(0, 1)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and 1 / √(var + eps), contiguous, in single precision or wider."""
        wide = wide_dtype(x.dtype)
        if self.statistics is None:
            rows = x.reshape(-1, self.examples, x.shape[1], *x.shape[2:]).to(wide)
            var, mean = torch.var_mean(rows, (1, *range(3, rows.dim())), correction=0)
            return mean, torch.rsqrt(var + self.eps)
        mean, rstd = self.statistics
        if mean.dtype is not wide or not (mean.is_contiguous() and rstd.is_contiguous()):
            mean, rstd = mean.to(wide).contiguous(), rstd.to(wide).contiguous()
        return mean, rstd

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By kernels in training; otherwise as one product and sum."""
        input, running_mean, running_var = self.input, self.running_mean, self.running_var
        level = level_of(input, running_mean, running_var, self.weight, self.bias)
        x = channels_last(input) if level is not None and batched(input) else None
        rows = input.numel() // input.shape[1] if input.dim() > 1 else 0
        if level is None or x is None or rows < 2:
            return NotImplemented
        if not self.training:
            if running_mean is None or running_var is None:
                return NotImplemented
            shape = (1, -1, *[1] * (input.dim() - 2))
            scale = torch.rsqrt(running_var + self.eps)
            scale = scale if self.weight is None else self.weight * scale
            shift = -running_mean * scale if self.bias is None else self.bias - running_mean * scale
            return torch.addcmul(shift.view(shape), input, scale.view(shape)).to(input.dtype)
        if any(each is not None and not batched(each) for each in (running_mean, running_var)):
            return NotImplemented
        affine = [None if each is None else front(each) for each in (self.weight, self.bias)]
        flat = x.reshape(len(x), -1, x.shape[-1])
        out, mean, var, _ = StackedBatchNorm.apply(flat, *affine, self.eps)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, var * (rows / (rows - 1)))):
                if running is not None:
                    front(running).lerp_(now.to(running.dtype), self.momentum)
        return stack(out.view(x.shape).movedim(-1, 2), level)


@final
@dataclass(eq=False)
class LayerNorm(LayerCall):
    """``x [N, T…, *shape]``."""

    input: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def leading(self) -> int:
        """All axes except the normalised ones."""
        return self.input.dim() - len(self.normalized_shape)

    def prepared(self, x: Tensor) -> Tensor:
        """Normalised inputs."""
        return F.layer_norm(x.to(wide_dtype(x.dtype)), self.normalized_shape, eps=self.eps)

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradients times normalised inputs, summed over positions."""
        return self.bias_terms(x * grad)

    def bias_terms(self, grad: Tensor) -> Tensor:
        """Sums over positions."""
        return grad.reshape(len(grad), -1, *self.normalized_shape).sum(1, dtype=wide_dtype(grad.dtype))


@final
@dataclass(eq=False)
class GroupNorm(ByChannel):
    """``x [N, C, T…]``."""

    input: Tensor
    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def prepared(self, x: Tensor) -> Tensor:
        """Normalised inputs."""
        return F.group_norm(x.to(wide_dtype(x.dtype)), self.num_groups, eps=self.eps)


@final
class StackedBatchNorm(Stacked):
    """Training: ``x [K, M, C]``, weight and bias ``[K, C]``, ``[C]`` or None → the same, mean, variance."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        out, mean, rstd, var = kernels.batch_norm(x, weight, bias, eps)
        return out, mean, var, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _ = inputs
        ctx.save_for_backward(x, weight, output[1], output[3])
        ctx.bias_dim = None if bias is None else bias.dim()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise zeros would be written for those

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        back, *into = kernels.batch_norm_grad(x, grad.contiguous(), weight, mean, rstd)
        shared = (weight is None or weight.dim() == 1, ctx.bias_dim == 1)
        wanted = ctx.needs_input_grad[1:3]
        sums = [(each.sum(0) if one else each) for each, one in zip(into, shared, strict=True)]
        return back, *(each if want else None for each, want in zip(sums, wanted, strict=True)), None


def _fuses(x: Tensor) -> bool:
    """Whether a kernel supports such a tensor: kernels sum in float32."""
    return x.is_cuda and wide_dtype(x.dtype) == torch.float32
