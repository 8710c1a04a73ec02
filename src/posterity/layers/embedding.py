"""``F.embedding``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from posterity.layers.calls import Found, LayerCall, chunks, spread, wide_dtype


@final
class Embedding(LayerCall):
    """``x [N, T…]``, whole numbers, ``grad [N, T…, D]``."""

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        self.x, self.weight, self.bias, self.leading = input, weight, None, input.dim()
        self.options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        self.count = len(weight)
        self.padding = None if padding_idx is None else padding_idx % self.count

    def known(self) -> bool:
        """Whether its gradients are neither sparse nor scaled."""
        return not any(self.options[3:])

    def call(self, func: Callable[..., Any]) -> Any:
        """Call torch's."""
        return func(self.x, self.weight, *self.options)

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """A word that an example has several times has the sum of their gradients, s, and Σ_t g_t·s = s²."""
        words, own = self._words(spread(x, grad), grad)
        squares = own.new_zeros(self.count, own.shape[-1])
        for word, each in chunks(words.shape[1] ** 2, words, own):
            same = (word[:, :, None] == word[:, None, :]).to(each)
            squares.index_add_(0, word.flatten(), ((same @ each) * each).flatten(0, 1))
        return Found(squares)

    def held(self, x: Tensor, grad: Tensor) -> int:
        """A table."""
        return self.count * grad.shape[-1]

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Tables with the sums of their words' gradients."""
        words, own = self._words(x, grad)
        tables = own.new_zeros(len(words), self.count, own.shape[-1])
        first = self.count * torch.arange(len(words), device=words.device)
        tables.flatten(0, 1).index_add_(0, (words + first[:, None]).flatten(), own.flatten(0, 1))
        return tables

    def bias_terms(self, grad: Tensor) -> Tensor:
        """It has none."""
        raise NotImplementedError

    def _words(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, T]`` and ``[N, T, D]``, zeros where a word is padding."""
        words = x.reshape(len(x), -1)
        own = grad.reshape(*words.shape, grad.shape[-1]).to(wide_dtype(grad.dtype))
        return words, own if self.padding is None else own * (words != self.padding)[..., None]
