"""``F.embedding``, also of positions that all examples share.

An embedding of shared positions returns a leaf. If an addition, a difference or a product combines this leaf
with the examples' own rows, it gets the rows expanded to all examples instead, and their gradients are
reported. Any other use sends a gradient to the leaf, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from posterity.layers.calls import Found, LayerCall, chunks, spread, wide_dtype
from posterity.layers.stacks import inside, samples_axis, stack
from posterity.torch_private import add_hook, temporarily_pop_interpreter_stack

_SHARED = (
    "is used on positions that all examples share, other than by adding its rows to the examples' own (pass "
    "positions [B, T])"
)
_ALIKE = (
    "has a row for each example, which is added to all of them (make positions by torch.arange() in "
    "forward(), or as [1, T])"
)


@final
@dataclass(eq=False)
class Embedding(LayerCall):
    """``x [N, T…]`` of integers, ``grad [N, T…, D]``."""

    input: Tensor
    weight: Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def known(self) -> bool:
        """Whether its gradients are neither sparse nor scaled."""
        return not (self.scale_grad_by_freq or self.sparse)

    def leading(self) -> int:
        """All axes."""
        return self.input.dim()

    def keep(self, out: Tensor) -> None:
        """Keep the number of words, and which one is padding."""
        self.count = len(self.weight)
        self.padding = None if self.padding_idx is None else self.padding_idx % self.count

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """A repeated word of an example has the sum s of its gradients, and Σ_t g_t·s = s²."""
        words, own = self._words(spread(x, grad), grad)
        squares = own.new_zeros(self.count, own.shape[-1])
        for word, each in chunks(words.shape[1] ** 2, words, own):
            same = (word[:, :, None] == word[:, None, :]).to(each)
            squares.index_add_(0, word.flatten(), ((same @ each) * each).flatten(0, 1))
        return Found(squares)

    def held(self, x: Tensor, grad: Tensor) -> int:
        """The size of a table."""
        return self.count * grad.shape[-1]

    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """Tables with the sums of each word's gradients."""
        words, own = self._words(x, grad)
        tables = own.new_zeros(len(words), self.count, own.shape[-1])
        first = self.count * torch.arange(len(words), device=words.device)
        tables.flatten(0, 1).index_add_(0, (words + first[:, None]).flatten(), own.flatten(0, 1))
        return tables

    def bias_terms(self, grad: Tensor) -> Tensor:
        """An embedding has no bias."""
        raise NotImplementedError

    def _words(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Words ``[N, T]`` and gradients ``[N, T, D]``, zero where a word is padding."""
        words = x.reshape(len(x), -1)
        own = grad.reshape(*words.shape, grad.shape[-1]).to(wide_dtype(grad.dtype))
        return words, own if self.padding is None else own * (words != self.padding)[..., None]


class Rows(NamedTuple):
    """The outputs of an embedding.

    Attributes:
        given: The tensor that the model gets.
        out: The embedding's output.
        calls: The embedding's calls, one for each listener.
        shared: Whether all examples share the rows; if not, there may be a row for each example.
    """

    given: Tensor
    out: Tensor
    calls: Sequence[LayerCall]
    shared: bool


def shares_positions(call: LayerCall, aranges: Mapping[int, Tensor]) -> bool:
    """Whether all examples share the inputs of an embedding.

    Args:
        call: The embedding's call.
        aranges: By id, results of torch.arange(), which number positions, not examples.
    """
    ids, examples = call.input, call.listener.seen_examples()
    made = id(ids) in aranges or id(ids._base) in aranges
    if call.counted is None:  # only one axis
        return made or (examples is not None and call.examples != examples)
    return call.examples == 1 and (made or examples not in (None, 1))


def shared_rows(
    out: Tensor, calls: Sequence[LayerCall], level: int | None, refuse: Callable[[str, Tensor], None]
) -> Rows:
    """A leaf in place of an embedding's outputs; gradients that reach it are refused."""
    with nullcontext() if level is None else temporarily_pop_interpreter_stack():
        leaf = inside(out).detach().requires_grad_()
    add_hook(leaf, lambda grad: refuse(_SHARED, grad))
    return Rows(leaf if level is None else stack(leaf, level, samples_axis(out)), out, calls, True)


def with_batch_axis(rows: Rows, given: Tensor) -> Rows:
    """The same rows with an axis of length 1 in front: ``pos(arange(T))[None]``.

    Rows of examples would not be used like this.
    """
    calls = [copy(call) for call in rows.calls]
    for call in calls:
        if not rows.shared:
            call.listener.refuse(call.names, _ALIKE)
        # With one more axis, as if its inputs had been [1, T].
        call.input, call.axis, call.counted, call.examples = call.input[None], 0, 0, 1
        call.x_axis = None if call.x_axis is None else call.x_axis + 1
    return Rows(given, rows.out[None], calls, rows.shared)


def rows_by_example(rows: Rows, other: Any) -> Tensor:
    """The operand in place of given rows in a sum with another tensor: the rows of all examples."""
    one, out, calls, shared = rows
    if not isinstance(other, Tensor):
        return one
    if not shared:
        for call in calls if other.dim() > one.dim() else ():
            call.listener.refuse(call.names, _ALIKE)
        return one
    shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
    more = len(shape) - one.dim()
    if any(call.counted is None and more <= call.listener.batch_dim for call in calls):
        return one  # no axis for the examples
    whole = out.expand(shape)
    for call in calls:
        each = copy(call)
        each.axis = call.listener.batch_dim if call.counted is None else call.axis + more
        each.examples, each.counted, each.grad_axis = shape[each.axis], each.axis, samples_axis(whole)
        ids, samples = call.input, ()
        if call.x_axis is not None:
            ids = ids.movedim(call.x_axis, 0)
            samples, each.x_axis = ids.shape[:1], 0
        ids = ids.reshape(*samples, *[1] * more, *ids.shape[len(samples) :])
        each.input, each.version = ids.expand(*samples, *shape[:-1]), ids._version
        each.listener.begin(each)
        add_hook(inside(whole), each)
    return whole
