"""Embeddings of positions that all examples share: these are told apart where the rows are added to theirs.

The embedding itself gives a leaf. An addition (or a difference, or a product) that is given this leaf and the
examples' own rows gets, in its place, the rows expanded to all examples, whose gradients are reported. Any
other use sends its gradient to the leaf, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from posterity.layers.calls import LayerCall
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


class _Rows(NamedTuple):
    """The outputs of an embedding.

    Attributes:
        given: To the model.
        out: As the embedding made them.
        calls: Of the embedding, one for each listener.
        shared: Whether all examples share them; else there is, perhaps, a row for each example.
    """

    given: Tensor
    out: Tensor
    calls: Sequence[LayerCall]
    shared: bool


@final
class Positions:
    """What embeddings of positions have given in this forward pass.

    Attributes:
        rows: By the id of what was given.
    """

    def __init__(self) -> None:
        self._aranges: dict[int, Tensor] = {}
        self.rows: dict[int, _Rows] = {}

    def clear(self) -> None:
        """Forget all, after a backward pass."""
        self._aranges.clear()
        self.rows.clear()

    def count(self, ids: Tensor) -> None:
        """Numbers that torch.arange() has made count positions, not examples."""
        self._aranges[id(ids)] = ids

    def shared(self, ids: Tensor, call: LayerCall) -> bool:
        """Whether all examples share the inputs of an embedding."""
        examples = call.listener.seen_examples()
        made = id(ids) in self._aranges or id(ids._base) in self._aranges
        if ids.dim() == 1:
            return made or (examples is not None and call.examples != examples)
        return call.examples == 1 and (made or examples not in (None, 1))

    def share(
        self,
        out: Tensor,
        calls: Sequence[LayerCall],
        level: int | None,
        refuse: Callable[[str, Tensor], None],
    ) -> Tensor:
        """What such an embedding gives in the place of its outputs; gradients of that itself are refused."""
        with nullcontext() if level is None else temporarily_pop_interpreter_stack():
            leaf = inside(out).detach().requires_grad_()
        add_hook(leaf, lambda grad: refuse(_SHARED, grad))
        given = leaf if level is None else stack(leaf, level, samples_axis(out))
        self.rows[id(given)] = _Rows(given, out, calls, True)
        return given

    def remember(self, out: Tensor, calls: Sequence[LayerCall]) -> None:
        """One row for each example, as far as can be seen yet."""
        self.rows[id(out)] = _Rows(out, out, calls, False)

    def told_apart(self, one: Any, other: Any) -> Any:
        """An operand, or in its place the rows of all examples if they share it."""
        rows = self.rows.get(id(one))
        if rows is None or not isinstance(other, Tensor):
            return one
        if not rows.shared:
            if other.dim() > one.dim():
                for call in rows.calls:
                    call.listener.refuse(call.names, _ALIKE)
            return one
        shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
        more, out = len(shape) - one.dim(), rows.out
        for call in rows.calls:
            if call.leading == 1 and more <= call.listener.batch_dim:
                return one  # no axis for the examples
        whole = out.expand(shape)
        for call in rows.calls:
            each = copy(call)
            each.axis = call.listener.batch_dim if call.leading == 1 else call.axis + more
            each.examples, each.counted, each.grad_axis = shape[each.axis], each.axis, samples_axis(whole)
            ids, samples = call.x, ()
            if call.x_axis is not None:
                ids = ids.movedim(call.x_axis, 0)
                samples, each.x_axis = ids.shape[:1], 0
            ids = ids.reshape(*samples, *[1] * more, *ids.shape[len(samples) :])
            each.x, each.version = ids.expand(*samples, *shape[:-1]), ids._version
            each.listener.begin(each)
            add_hook(inside(whole), each)
        return whole
