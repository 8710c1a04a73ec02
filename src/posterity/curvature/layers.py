"""What each kind of layer has to say of single examples: their gradients' squares, and Kronecker factors.

All functions see whole stacks, ``x [K, B, …]`` and ``grad [K, B, …]``, the loss's gradient in the layer's
outputs: K weight samples (1 where nothing is stacked) and B examples. An example under one of the samples is
one term: squares are taken of each, and summed over all K·B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.curvature.conv import Sizes, at_once, conv2d_squares, wide_dtype, windows
from posterity.noise import kernels


class Found(NamedTuple):
    """What single examples have to say of a layer's weights.

    Attributes:
        gradient: The weight's Σ g of every sample ``[K, *shape]``, if the layer brings it.
        weight: Σ g² of the weight, over examples and samples.
        bias: Σ g² of the bias, if it was asked for.
    """

    gradient: Tensor | None
    weight: Tensor
    bias: Tensor | None


class Terms(NamedTuple):
    """The same, not yet summed over examples: many layers' may be at once.

    Attributes:
        both: Squares of every example's gradients of weight and bias, which are as long, ``[2, B, n]``.
    """

    both: Tensor


class Layer(ABC):
    """A kind of layer, as it was called."""

    # Whether squares() brings the gradient too, so that autograd need not make it again.
    brings_gradient: ClassVar[bool] = False
    # By the name of torch's own autograd node: under which names that keeps x, and then extras, if it does.
    keeps: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @abstractmethod
    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """Of the weight, and of the bias if it is wanted too."""

    def of_one(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found | Terms | None:
        """The same of one sample, from ``[B, …]`` as they are, with less to do; None where that is no use.

        The gradient is that of the sample, ``[*shape]``.
        """
        return None

    def bias_squares(self, grad: Tensor) -> Tensor:
        """Σ g² of the bias over examples and samples, of sums over positions; features come last."""
        return _squared(_positions(grad).sum(1, dtype=wide_dtype(grad.dtype)))


class ByChannel(Layer):
    """A layer whose bias is one number for each channel, the axis after the examples."""

    def bias_squares(self, grad: Tensor) -> Tensor:
        """Of sums over positions, which come after the channels."""
        return _squared(_channels(grad))


class Multiplying(Layer):
    """A layer whose weight is a matrix that multiplies inputs, so that it has Kronecker factors."""

    @abstractmethod
    def inputs(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """What the matrix multiplies at all T positions, ``[I, n·T]`` for some examples after others."""

    @abstractmethod
    def grads(self, grad: Tensor) -> Tensor:
        """The gradients of its products, ``[O, K·B, T]``."""


@final
class Linear(Multiplying):
    """``x [K, B, T…, I]``, ``grad [K, B, T…, O]``."""

    keeps: ClassVar = {"AddmmBackward0": ("_saved_mat1",), "MmBackward0": ("_saved_self",)}

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """``(grad²)ᵀ x²``; with several positions, which share the weight, example by example."""
        wide = wide_dtype(grad.dtype)
        if grad.dim() == 3:
            own = grad.to(wide).square()
            # What all samples share is multiplied once.
            own, rows = (own.sum(0), x[0]) if x.stride(0) == 0 else (own.flatten(0, 1), x.flatten(0, 1))
            return Found(None, own.mT @ rows.to(wide).square(), own.sum(0) if bias else None)
        shift = self.bias_squares(grad) if bias else None
        if kernels is not None and kernels.multiplies(grad):
            # A convolution by one tap, over a picture of one row.
            rows, own = (each.flatten(2, -2).mT.unsqueeze(3) for each in (x, grad))
            return Found(None, kernels.conv2d_squares(rows, own, (1, 1))[1].flatten(1), shift)
        squares = grad.new_zeros(grad.shape[-1], x.shape[-1], dtype=wide)
        x, grad = _positions(x.to(grad.dtype)), _positions(grad)
        step = at_once(grad, squares.numel())
        for rows, own in zip(torch.split(x, step), torch.split(grad, step), strict=True):
            squares += (own.mT @ rows).to(wide).square_().sum(0)
        return Found(None, squares, shift)

    def of_one(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found | None:
        """Where there is one position, and nothing to cast."""
        if grad.dim() != 2 or x.dtype is not grad.dtype or grad.dtype is not wide_dtype(grad.dtype):
            return None
        own = grad.square()
        return Found(None, own.mT @ x.square(), own.sum(0) if bias else None)

    def inputs(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """As they are."""
        yield x.reshape(-1, x.shape[-1]).mT

    def grads(self, grad: Tensor) -> Tensor:
        """As they are."""
        return _positions(grad).movedim(2, 0)


@dataclass(frozen=True)
class Convolving(ByChannel):
    """``x [K, B, C, H, W]``, ``grad [K, B, O, P, Q]``; without heights if there is one axis.

    Attributes:
        sizes: Of the convolution.
        axes: 1 or 2.
        before: Zeros that padding="same" puts on the sides of each axis, last axis first.
    """

    brings_gradient = True
    sizes: Sizes
    axes: int
    before: tuple[int, ...]

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """From the same products, example by example."""
        sums, squares = conv2d_squares(*self._planes(x, grad), self.sizes)
        if self.axes == 1:
            sums, squares = sums.squeeze(-2), squares.squeeze(-2)
        return Found(sums, squares, self.bias_squares(grad) if bias else None)

    def of_one(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found | None:
        """Where nothing must be cast or put in shape for the kernel."""
        if kernels is None or not self._plain or x.dtype is not grad.dtype or not kernels.multiplies(grad):
            return None
        sums, squares = kernels.conv2d_squares(x, grad, *self._plain)
        return Found(sums, squares, self.bias_squares(grad[None]) if bias else None)

    @cached_property
    def _plain(self) -> Sequence[tuple[int, int]]:
        """Sizes for the kernel, if it can have inputs as they are; else nothing."""
        return () if self.axes == 1 or self.sizes.groups > 1 or any(self.before) else self.sizes[:4]

    def _planes(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pad(x.to(grad.dtype), self.before) if any(self.before) else x.to(grad.dtype)
        return (x, grad) if self.axes == 2 else (x.unsqueeze(-2), grad.unsqueeze(-2))


@final
class Conv(Convolving, Multiplying):
    """One whose filters see all channels: flat, they are rows of a matrix."""

    def inputs(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """What each output sees, in the order of the filters' numbers."""
        planes, _ = self._planes(x, grad)
        return (seen.flatten(1) for _, seen in windows(planes.flatten(0, 1), self.sizes))

    def grads(self, grad: Tensor) -> Tensor:
        """By places of the picture."""
        return grad.flatten(0, 1).flatten(2).movedim(1, 0)


@final
class GroupedConv(Convolving):
    """One whose channels are in groups."""


@final
@dataclass(frozen=True)
class BatchNorm(ByChannel):
    """``x [K, B, C, T…]``.

    Extras are what inputs are normalised by, ``[K, C]``, or ``[C]`` for all samples; without them the batch's
    statistics are made again.

    Attributes:
        eps: Added to the variance.
        fixed: Whether extras are mean and variance, not the batch's but given; else mean and 1 / √(variance +
            eps).
    """

    keeps = dict.fromkeys(
        ("CudnnBatchNormBackward0", "MiopenBatchNormBackward0", "NativeBatchNormBackward0"),
        ("_saved_input", "_saved_result1", "_saved_result2"),
    )
    eps: float
    fixed: bool

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """Of normalised inputs; what an example does to the batch's statistics is in ``grad`` already."""
        wide, shape = wide_dtype(x.dtype), (*x.shape[:3], -1)
        x, grad = x.reshape(shape), grad.reshape(shape)
        if extras and not self.fixed:
            mean, rstd = extras
        else:
            mean, var = extras if self.fixed else torch.var_mean(x.to(wide), (1, 3), correction=0)[::-1]
            rstd = torch.rsqrt(var.to(wide) + self.eps)
        mean, rstd = mean.to(wide).contiguous(), rstd.to(wide).contiguous()
        if kernels is not None and _fuses(grad):
            scale, shift = kernels.batch_norm_squares(x, grad, mean, rstd).sum(1).unbind()
            return Found(None, scale, shift if bias else None)
        mean, rstd = mean.view(-1, 1, shape[2], 1), rstd.view(-1, 1, shape[2], 1)
        normal = (x.to(wide) - mean) * rstd
        return Found(None, _squared(_channels(normal * grad)), self.bias_squares(grad) if bias else None)

    def of_one(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Terms | None:
        """With the batch's statistics as torch keeps them."""
        if kernels is None or self.fixed or not extras or not _fuses(grad):
            return None
        mean, rstd = extras
        if mean.dtype is not torch.float32 or not (mean.is_contiguous() and rstd.is_contiguous()):
            return None
        return Terms(kernels.batch_norm_squares(x, grad, mean, rstd, axis=1))


@final
@dataclass(frozen=True)
class LayerNorm(Layer):
    """``x [K, B, T…, *shape]``."""

    shape: tuple[int, ...]
    eps: float

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """Of normalised inputs, summed over positions."""
        normal = F.layer_norm(x.to(wide_dtype(x.dtype)), self.shape, eps=self.eps)
        return Found(None, self.bias_squares(normal * grad), self.bias_squares(grad) if bias else None)

    def bias_squares(self, grad: Tensor) -> Tensor:
        """Of sums over positions."""
        terms = grad.reshape(grad.shape[0] * grad.shape[1], -1, *self.shape)
        return _squared(terms.sum(1, dtype=wide_dtype(grad.dtype)))


@final
@dataclass(frozen=True)
class GroupNorm(ByChannel):
    """``x [K, B, C, T…]``."""

    groups: int
    eps: float

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """Of normalised inputs, summed over positions."""
        normal = F.group_norm(x.flatten(0, 1).to(wide_dtype(x.dtype)), self.groups, eps=self.eps)
        squares = _squared(_channels(normal.view(x.shape) * grad))
        return Found(None, squares, self.bias_squares(grad) if bias else None)


@final
@dataclass(frozen=True)
class Embedding(Layer):
    """``x [K, B, T…]``, whole numbers, ``grad [K, B, T…, D]``.

    Attributes:
        rows_in_all: Of the table.
        padding: The row that learns nothing, if there is one.
    """

    rows_in_all: int
    padding: int | None

    def squares(self, x: Tensor, grad: Tensor, extras: Sequence[Tensor], bias: bool) -> Found:
        """A word that an example has several times has the sum of their gradients, s, and Σ_t g_t·s = s²."""
        words = x.reshape(x.shape[0] * x.shape[1], -1)
        own = grad.reshape(*words.shape, grad.shape[-1]).to(wide_dtype(grad.dtype))
        if self.padding is not None:
            own = own * (words != self.padding)[..., None]
        squares = own.new_zeros(self.rows_in_all, own.shape[-1])
        step = at_once(own, words.shape[1] ** 2)
        for word, each in zip(torch.split(words, step), torch.split(own, step), strict=True):
            same = (word[:, :, None] == word[:, None, :]).to(each)
            squares.index_add_(0, word.flatten(), ((same @ each) * each).flatten(0, 1))
        return Found(None, squares, None)


def _positions(x: Tensor) -> Tensor:
    """``[K, B, T…, F]`` as ``[K·B, T, F]``."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def _channels(x: Tensor) -> Tensor:
    """Sums of ``[K, B, C, T…]`` over positions: ``[K·B, C]``."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], -1).sum(2, dtype=wide_dtype(x.dtype))


def _squared(terms: Tensor) -> Tensor:
    """Σ g² of the terms, which lie along the first axis."""
    return terms.square().sum(0)


def _fuses(x: Tensor) -> bool:
    """Whether a kernel may walk over such numbers: it sums in float32."""
    return x.is_cuda and wide_dtype(x.dtype) == torch.float32
