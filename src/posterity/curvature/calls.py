"""Which calls of torch are layers, and what each of them is given: ``CALLS`` reads one as a :class:`Call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from posterity.curvature.conv import Sizes
from posterity.curvature.layers import (
    BatchNorm,
    Conv,
    Convolving,
    Embedding,
    GroupedConv,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
)


class Call(NamedTuple):
    """A layer that was called.

    Attributes:
        layer: What it is.
        x: Its inputs.
        weight: Its weight, if it has one.
        bias: Its bias, if it has one.
        leading: How many of the inputs' first axes may count examples; the first one does where it is 1.
        extras: Other tensors that its backward pass needs.
    """

    layer: Layer
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    leading: int
    extras: Sequence[Tensor] = ()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(_LINEAR, input, weight, bias, input.dim() - 1) if weight.dim() == 2 else None


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call:
    shape, how = weight.shape, (stride, padding, dilation)
    try:
        layer = _conv_layer(shape[2:], *how, groups)
    except TypeError:  # lists have no hash
        layer = _conv_layer(shape[2:], *(x if isinstance(x, int | str) else tuple(x) for x in how), groups)
    return Call(layer, input, weight, bias, int(input.dim() == len(shape)))


@lru_cache(maxsize=1024)
def _conv_layer(taps: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Convolving:
    axes = len(taps)
    dilation = _each(dilation, axes)
    totals = [d * (t - 1) if padding == "same" else 0 for t, d in zip(taps, dilation, strict=True)]
    padding = 0 if isinstance(padding, str) else padding
    sizes = Sizes(
        _plane(taps, 1),
        _plane(_each(stride, axes), 1),
        _plane(_each(padding, axes), 0),
        _plane(dilation, 1),
        groups,
    )
    # Torch puts the odd zero at the end.
    before = tuple(side for total in reversed(totals) for side in (total // 2, total - total // 2))
    kind = Conv if groups == 1 else GroupedConv
    return kind(sizes, axes, before)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call:
    if training or running_mean is None or running_var is None:
        return Call(_batch_norm_layer(eps, False), input, weight, bias, 1)
    return Call(_batch_norm_layer(eps, True), input, weight, bias, 1, (running_mean, running_var))


_batch_norm_layer = lru_cache(maxsize=1024)(BatchNorm)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Call:
    shape = tuple(normalized_shape)
    return Call(LayerNorm(shape, eps), input, weight, bias, input.dim() - len(shape))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Call:
    return Call(GroupNorm(num_groups, eps), input, weight, bias, 1)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    if scale_grad_by_freq or sparse:
        return None
    padding = None if padding_idx is None else padding_idx % len(weight)
    return Call(Embedding(len(weight), padding), input, weight, None, input.dim())


def _each(size: Any, axes: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes if len(sizes) == axes else sizes * axes


def _plane(sizes: tuple[int, ...], height: int) -> tuple[int, int]:
    """Sizes of a plane; that of one axis lies in its width."""
    return (height, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


_LINEAR = Linear()
# By operation: what reads its arguments, which have the names and the order that torch gives them; None if
# that is not known here.
CALLS: dict[Any, Callable[..., Call | None]] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.embedding: _embedding,
}
