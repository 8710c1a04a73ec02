"""Estimators that draw outputs per example, instead of one draw of the weights for the whole batch.

Let w = μ + Δ be the weights, b = μ_b + Δ_b the biases, and x the inputs of a layer:

    local     out ~ N(x μ + μ_b, x² σ² + σ_b²), independently for all outputs
    flipout   out = x μ + μ_b + ((x ⊙ s) Δ + Δ_b) ⊙ r, with random signs s [B, C] of an example's input
              channels and r [B, O] of its output channels, the same at all positions

Weights z · (μ + Δ) with a random scale z of each input or output channel have separate scales [B, C] or
[B, O] for each example, with either estimator: x ⊙ z replaces x, or z · (x μ) replaces x μ.

``x μ`` is the layer's operation, such as a product or a convolution. With flipout an example's weights are
μ + r sᵀ ⊙ Δ: each example has its own exact draw if the distribution of Δ does not change with the signs of
whole kernels. With local only the moments of single outputs are exact: outputs that share a weight (at other
positions of an image or a text) are correlated under q, but are drawn independently.

A layer has an estimator if its weight or bias is a stand-in (:mod:`posterity.layers.stand_ins`).

References: Kingma, Salimans, Welling: "Variational Dropout and the Local Reparameterization Trick", NIPS
2015. Wen, Vicol, Ba, Tran, Grosse: "Flipout", ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from posterity.layers.calls import LayerCall, Multiplying
from posterity.layers.stacks import autocast_dtype
from posterity.layers.stand_ins import Drawn, StandIn
from posterity.torch_private import apply_of, lasting, threshold_backward, transforms


def estimate(func: Callable[..., Any], call: LayerCall, attending: tuple[int, int | None] | None) -> Any:
    """The outputs of a layer whose weight or bias is a stand-in; NotImplemented if no estimator applies.

    Args:
        func: The torch operation.
        call: Its call.
        attending: Inside an attention layer, the number of examples and their axis in the layer's inputs.
    """
    if not isinstance(call, Multiplying) or isinstance(call.input, StandIn):
        return NotImplemented
    weight, bias = _served(call, attending)
    if weight is bias is None:
        return NotImplemented
    means = call.weight if weight is None else weight.mean(), call.bias if bias is None else bias.mean()
    scales = None if weight is None else _scales(call, weight)
    out = _applied(func, call, call.input, *means, scales)
    for estimator, add in (("local", _with_noise), ("flipout", _with_signs)):
        own = weight if weight is not None and weight.estimator == estimator else None
        shift = bias if bias is not None and bias.estimator == estimator else None
        if own is not None:
            out = add(func, call, out, own, None if shift is None else shift.spread(), scales)
        elif shift is not None:
            out = _with_bias(call, out, shift)
    return out


def _served(call: Multiplying, attending: tuple[int, int | None] | None) -> tuple[Drawn | None, Drawn | None]:
    """The weight and the bias if their estimators apply to the call; otherwise the call gets their draw."""
    roles = {"weight": call.weight, "bias": call.bias}
    given = {role: each.drawn for role, each in roles.items() if isinstance(each, StandIn)}
    if not call.known():
        return None, None
    first = next(iter(given.values()))
    call.listener = first  # type: ignore[assignment]  # it only provides the axis of the examples
    found = call.find_examples(attending)
    served = {
        role: each
        for role, each in given.items()
        if (found or not each.by_example) and each.serves(call.examples, first.name)
    }
    for role in given.keys() - served.keys() if served else ():
        setattr(call, role, given[role].value())
        given[role].use()
    return served.get("weight"), served.get("bias")


def _scales(call: Multiplying, weight: Drawn) -> Tensor | None:
    """Scales of each example's outputs without the bias; scales of inputs multiply the inputs here."""
    if weight.draws.scaled_axis is None:
        return None
    scales = weight.draws.scales(call.examples)
    if weight.draws.scaled_axis == 0:
        return _spread(scales, call)
    # Groups of filters share the scales.
    groups = call.input.shape[call.channel_axis] // scales.shape[1]
    call.input = call.input * _spread(scales.repeat(1, groups), call)
    return None


def _applied(
    func: Callable[..., Any],
    call: Multiplying,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None = None,
) -> Tensor:
    """The layer's outputs for other inputs and weights, with scales for all but the bias."""
    other = copy(call)
    other.input, other.weight, other.bias = x, weight, bias if scales is None else None
    out = other.stacked({}) if transforms() else NotImplemented
    made: Tensor = other.call(func) if out is NotImplemented else out
    if scales is None:
        return made
    scaled = made * scales
    return (scaled if bias is None else scaled + call.by_channel(bias)).to(made.dtype)


def _with_bias(call: Multiplying, out: Tensor, bias: Drawn) -> Tensor:
    """Outputs with only the bias's noise or signs."""
    local = bias.estimator == "local"
    factor = bias.normal("out", out.shape) if local else _signs(bias, "out", call, out)
    return out + (call.by_channel(bias.spread()) * factor).to(out.dtype)


def _with_noise(
    func: Callable[..., Any],
    call: Multiplying,
    out: Tensor,
    weight: Drawn,
    shift: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """Outputs at the mean plus noise with the outputs' variance."""
    x, std = call.input, weight.spread()
    narrow = torch.float16 in (x.dtype, autocast_dtype(x))
    # Squares of stds would be zero in half precision.
    wide = [each.float() if narrow and each is not None else each for each in (std, shift, scales)]
    squares = (None if each is None else square(each) for each in wide)
    with torch.autocast(x.device.type, enabled=False) if narrow else nullcontext():
        variance = _applied(func, call, square(x.float() if narrow else x), *squares)
    root: Tensor = square_root(variance)
    return torch.addcmul(out, root.to(out.dtype), weight.normal("out", out.shape).to(out.dtype))


def _with_signs(
    func: Callable[..., Any],
    call: Multiplying,
    out: Tensor,
    weight: Drawn,
    shift: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """Outputs at the mean plus one deviation of all weights, with separate signs for each example."""
    x = call.input * _signs(weight, "in", call, call.input)
    # The bias takes the sign of its output channel only.
    deviation = _applied(func, call, x, weight.spread(), shift, scales)
    return torch.addcmul(out, deviation, _signs(weight, "out", call, out))


def _signs(drawn: Drawn, what: str, call: Multiplying, like: Tensor) -> Tensor:
    """1 or -1 for each example and channel, in a shape that broadcasts to ``like``."""
    signs = drawn.signs(what, (call.examples, like.shape[call.channel_axis]))
    return _spread(signs.to(like.dtype), call)


def _spread(values: Tensor, call: Multiplying) -> Tensor:
    """Values ``[B, C]`` of examples and channels, in a shape that broadcasts to inputs or outputs."""
    shape = [1] * (call.input.dim() + call.folded)
    shape[call.axis], shape[call.channel_axis] = values.shape
    values = values.view(shape)
    if not call.folded:
        return values
    return values.expand(call.input.shape[0] // call.examples, -1, -1).flatten(0, 1)


@final
class Square(torch.autograd.Function):
    """The square, whose gradient takes only one pass over a possibly large tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.addcmul(_zero(x.device, x.dtype), grad, x, value=2.0)


@final
class Root(torch.autograd.Function):
    """The square root, without a gradient at 0 (padding, pruned weights) or below (rounding)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(variance: Tensor) -> Tensor:
        return variance.clamp_min(0.0).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        slope = torch.addcdiv(_zero(root.device, root.dtype), grad, root, value=0.5)
        into: Tensor = threshold_backward(slope, root, 0.0)
        return into


@lru_cache(maxsize=64)
@lasting()
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A zero, so that a sum and a product with a factor are one operation."""
    return torch.zeros((), device=device, dtype=dtype)


square, square_root = apply_of(Square), apply_of(Root)
