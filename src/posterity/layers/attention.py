"""``F.scaled_dot_product_attention`` of stacks, and attention modules whose layers are visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import currentframe
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.layers.calls import Call, Sink
from posterity.layers.stacks import batched, front, level_of, stack
from posterity.torch_private import attention_in_parts, temporarily_pop_interpreter_stack


def examples_axis() -> int | None:
    """The axis of the examples in the inputs of the running attention module, if there is one.

    Only the module knows it: inside the module they are on axis 1, whatever its ``batch_first``.
    """
    frame = currentframe()
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is nn.MultiheadAttention.forward.__code__:
            return 0 if frame.f_locals["self"].batch_first else 1
    return None


# Frames from a module's forward(), through torch's handling of modes, to here.
_FRAMES = 16


@final
@dataclass(eq=False)
class Attention(Call):
    """Queries, keys and values ``[B, …, T, D]``; samples of a stack extend the first axis.

    Under vmap, statistics of the rows would have a layout that torch's backward kernels refuse.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By torch's kernels, outside vmap; with dropout, whose masks differ between samples, by vmap."""
        texts, mask = (self.query, self.key, self.value), self.attn_mask
        level, dims = level_of(*texts, mask), self.query.dim()
        alike = {(each.dim(), each.shape[0]) for each in texts} == {(dims, self.query.shape[0])}
        if level is None or self.dropout_p or dims < 3 or not alike:
            return NotImplemented
        samples = next(len(front(each)) for each in (*texts, mask) if batched(each))
        with temporarily_pop_interpreter_stack():
            if mask is not None and (batched(mask) or (mask.dim() == dims and len(mask) > 1)):
                mask = _folded(mask, samples, self.query)
            query, key, value = (_folded(each, samples, self.query) for each in texts)
            options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.enable_gqa}
            out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, self.is_causal, **options)
        return stack(out.view(samples, -1, *out.shape[1:]), level)

    def in_parts(self) -> Tensor:
        """By operations that are differentiable any number of times."""
        texts, mask = (self.query, self.key, self.value), self.attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(self.query.dtype)
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.enable_gqa}
        return attention_in_parts(*texts, mask, self.dropout_p, self.is_causal, None, **options)[0]


def _folded(x: Tensor, samples: int, query: Tensor) -> Tensor:
    """``[K·B, …]`` from a tensor that broadcasts to ``[B, …]``, and that samples may share."""
    dims, own = x.dim(), front(x)
    own = own if batched(x) else own.expand(samples, *own.shape)
    own = own.reshape(samples, *[1] * (query.dim() - dims), *own.shape[1:])
    return own.expand(samples, query.shape[0], *own.shape[2:]).flatten(0, 1)


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a torch function that function modes do not see, while they see the functions it calls."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


attention_forward = _unseen(F.multi_head_attention_forward)
