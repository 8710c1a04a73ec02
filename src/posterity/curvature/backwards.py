"""What a backward pass will come by: parameters whose use no call has shown.

A mode sees functions of torch. An autograd function of a user's own, or a scripted one, it does not: where a
parameter has such a use beside others, only the graph tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from posterity.curvature.uses import Part

BACKWARDS = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


@final
class Seen:
    """Calls that were seen to use wanted parameters, each a ``with`` block, by the nodes that they made.

    Autograd numbers its nodes: those of a call are the ones from its begin to its end.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __enter__(self) -> None:
        self._begins.append(_number())

    def __exit__(self, *_: object) -> None:
        self._ends.append(_number())

    def unseen(self, outputs: Any, wanted: Mapping[int, tuple[Tensor, Part]]) -> dict[str, str]:
        """Why wanted parameters that the outputs depend on are to be refused, by name.

        Args:
            outputs: A tensor or several, as ``torch.autograd.grad`` takes them.
            wanted: Tensors and what they are, by ``id``.
        """
        refused: dict[str, str] = {}
        with torch._C.DisableTorchFunction():  # nobody looks at these operations
            made = {tensor.grad_fn: part for tensor, part in wanted.values() if tensor.grad_fn is not None}

            def part_of(node: Any) -> Part | None:
                """What a node's gradient is that of, if it is wanted."""
                if node.name() == _LEAF:
                    found = wanted.get(id(node.variable))
                    return None if found is None else found[1]
                # Autocast casts a weight once, for all calls until it ends.
                below = node.next_functions[0][0] if node.name() == _CAST else None
                return made.get(node) if below is None else part_of(below)

            nodes = set(_nodes(outputs))
            waiting = list(nodes)
            while waiting:
                node = waiting.pop()
                for below, _ in node.next_functions:
                    if below is None:
                        continue
                    part = part_of(below)
                    if part is not None and node.name() != _CAST and not self._made(node):
                        refused[part.name] = f"is used by an operation that cannot be seen, {node.name()}"
                    if below not in nodes:
                        nodes.add(below)
                        waiting.append(below)
        return refused

    def _made(self, node: Node) -> bool:
        """Whether a call that was seen has made it."""
        number = node._sequence_nr()
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]


def _nodes(outputs: Any) -> Iterable[Node]:
    for each in (outputs,) if isinstance(outputs, Tensor) else outputs:
        node = each.grad_fn if isinstance(each, Tensor) else each.node
        if node is not None:
            yield node


_LEAF, _CAST = "torch::autograd::AccumulateGrad", "ToCopyBackward0"
_number = torch._C._autograd._get_sequence_nr
