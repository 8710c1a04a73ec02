"""``F.scaled_dot_product_attention`` of stacks, and attention modules with their layers in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, final

from torch import Tensor
from torch.nn import functional as F

from posterity.layers.calls import Call, Sink
from posterity.layers.stacks import batched, front, level_of, stack
from posterity.torch_private import temporarily_pop_interpreter_stack


@final
class Attention(Call):
    """Queries, keys and values ``[B, …, T, D]``; samples of a stack are more of the first axis.

    vmap's own way keeps statistics of the rows in a layout that torch's backward kernels refuse.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self._texts, self._mask = (query, key, value), attn_mask
        self._options: dict[str, Any] = {
            "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
        }  # fmt: skip

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """By torch's own kernels, outside vmap; masks of dropout differ from sample to sample, by vmap."""
        level, query = level_of(*self._texts, self._mask), self._texts[0]
        batch = {each.shape[0] for each in self._texts}
        if level is None or self._options["dropout_p"] or query.dim() < 3 or len(batch) > 1:
            return NotImplemented
        if {each.dim() for each in self._texts} != {query.dim()}:
            return NotImplemented
        samples = next(len(front(each)) for each in (*self._texts, self._mask) if batched(each))
        with temporarily_pop_interpreter_stack():
            texts, mask = [_folded(each, samples, query) for each in self._texts], self._mask
            if mask is not None and (batched(mask) or (mask.dim() == query.dim() and len(mask) > 1)):
                mask = _folded(mask, samples, query)
            query, key, value = texts
            out = F.scaled_dot_product_attention(query, key, value, mask, **self._options)
        return stack(out.view(samples, -1, *out.shape[1:]), level)


def _folded(x: Tensor, samples: int, query: Tensor) -> Tensor:
    """``[K·B, …]`` of a tensor that broadcasts with ``[B, …]``, which samples may share."""
    dims, own = x.dim(), front(x)
    own = own if batched(x) else own.expand(samples, *own.shape)
    own = own.reshape(samples, *[1] * (query.dim() - dims), *own.shape[1:])
    return own.expand(samples, query.shape[0], *own.shape[2:]).flatten(0, 1)


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, as it is, that shows what it calls to a mode, but not itself."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


attention_forward = _unseen(F.multi_head_attention_forward)
