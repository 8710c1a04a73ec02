"""Sending the sums of a step during the backward pass, for ``overlap=True`` with a mesh.

All processes send the same pieces in the same order: those of the last layers first, whose gradients are
computed first, and counts at the end. A piece is sent as soon as it and all before it are complete; the rest
is sent at the end of the context. So a process without examples, or without gradients of some parameters,
sends the same as others, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from posterity.flat import Layout
from posterity.optim.counting import behind_here
from posterity.optim.statistics import Sums
from posterity.optim.step import Draw, due, expect, multiplies
from posterity.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer

# Bytes of a piece of the gradients' sum: what torch's DistributedDataParallel sends at once.
PIECE = 25 << 20


class Piece(NamedTuple):
    """Sums of neighbouring blocks of a group.

    Attributes:
        sums: Of the group.
        blocks: Their numbers.
        grad: The first sum.
        second: The second, if it is sent; else empty.
        sent: Both, in as few tensors as they lie in.
    """

    sums: Sums
    blocks: Sequence[int]
    grad: Tensor
    second: Tensor
    sent: list[Tensor]

    def multiply(self, by: tuple[Any, Any]) -> None:
        """Multiply the first sum by one number and the second by another."""
        for flat, factor in zip((self.grad, self.second), by, strict=True):
            if isinstance(factor, Tensor) or factor != 1.0:
                flat.mul_(factor)


def whole(opt: VariationalOptimizer, every: Sequence[Sums]) -> list[Piece]:
    """All sums, a piece for each group."""
    both = due(opt.param_groups[0])  # in a step without the second statistic all have zeros there
    return [
        Piece(s, (), s.grad, s.second if both else s.second[:0], [s.both if both else s.grad]) for s in every
    ]


def pieces(opt: VariationalOptimizer, every: Sequence[Sums]) -> list[Piece]:
    """The same in pieces, last layers first."""
    found = []
    for each in reversed(every):
        layout = each.group.layout
        for first, last in _runs(layout, each.grad.itemsize):
            where = slice(layout.starts[first], layout.starts[last] + layout.sizes[last])
            sent = [each.grad[where], *([each.second[where]] if multiplies(opt) else [])]
            second = sent[1] if len(sent) > 1 else each.second[:0]
            found.append(Piece(each, range(first, last + 1), sent[0], second, sent))
    return found


def _runs(layout: Layout, itemsize: int) -> Iterator[tuple[int, int]]:
    """First and last of the blocks of each piece, from the end."""
    last, end = len(layout) - 1, layout.size
    for first in reversed(range(len(layout))):
        if (end - layout.starts[first]) * itemsize >= PIECE or first == 0:
            yield first, last
            last, end = first - 1, layout.starts[first]


@final
class Flight:
    """The pieces of a step while they are sent.

    Args:
        opt: The optimiser.
        behind: What the loss is a mean of, if the user says so.

    Attributes:
        here: The weight of this process in what was sent; None if nothing was.
        absorbed: Parameters whose gradients are in the sums, with these gradients and their versions.
        sent: How many pieces were sent.
        works: What was sent, until it is complete.
    """

    def __init__(self, opt: VariationalOptimizer, behind: float | None) -> None:
        self._opt, self._behind = opt, behind
        self.here: float | None = None
        self.absorbed: dict[Tensor, tuple[Tensor, int]] = {}
        self.sent, self.works = 0, list[tuple[Tensor, Any]]()
        self._handles: list[Any] = []
        self._route: list[Piece] | None = None

    def route(self) -> list[Piece]:
        """All pieces, in order."""
        if self._route is None:
            opt = self._opt
            self._route = pieces(opt, [opt.local.of(flat, None) for flat in opt.cache.latest])
        return self._route

    def listen(self, drawn: Sequence[Draw], examples: Callable[[], int | None], weight: float) -> None:
        """Send pieces as the coming backward passes complete them.

        Args:
            drawn: The weights that the model has.
            examples: Behind the gradients that there are.
            weight: Of the sample.
        """
        self._drawn, self._examples, self._weight = drawn, examples, weight
        self._noises = {each.group: each.noise for each in drawn if multiplies(self._opt)}
        trained = [p for p in self._opt.parameters() if p.requires_grad]
        self._missing = set(trained)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for p in trained
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _arrived(self, p: Tensor) -> None:
        """Called when a parameter's gradient is ready; sends all pieces that are now complete."""
        grad = p.grad
        if self._opt.apart or grad is None or grad.is_sparse:  # which is refused when the context is left
            return
        self._missing.discard(p)
        with DisableTorchFunction():
            route = self.route()
            while self.sent < len(route):
                piece = route[self.sent]
                if not self._missing.isdisjoint(piece.sums.group.params[i] for i in piece.blocks):
                    return
                self._send(piece)

    def _weighted(self) -> float:
        """What the loss is a mean of, as it is known when the first piece is sent."""
        if self.here is None:
            opt, examples = self._opt, self._examples()
            expect(opt, self._drawn, examples, self._weight)
            opt.local.weight = self._weight
            opt.local.add_inputs(examples)
            self.here, self._then = float(behind_here(opt, self._behind)), examples
        return self.here

    def _send(self, piece: Piece) -> None:
        opt, group, here = self._opt, piece.sums.group, self._weighted()
        grads = {i: grad for i in piece.blocks if (grad := group.params[i].grad) is not None}
        if grads:
            piece.sums.add(grads, self._noises.get(group), self._weight * opt.local.scale)
        for i, grad in grads.items():
            self.absorbed[group.params[i]] = grad, grad._version
        piece.multiply(opt.local.missing(here, squares=False))
        self.works += [(tensor, opt.world.begin(tensor)) for tensor in piece.sent]
        self.sent += 1

    def land(self, rest: Sequence[Tensor]) -> None:
        """Send the rest, and wait until all are summed over processes."""
        self.works += [(tensor, self._opt.world.begin(tensor)) for tensor in rest]
        self._opt.world.end(self.works)

    def changed(self, here: float) -> bool:
        """Whether anything has changed since it was sent.

        Args:
            here: The weight of this process, as it is known in the end.
        """
        if self.here is None:
            return False
        later = (p.grad is not grad or grad._version != then for p, (grad, then) in self.absorbed.items())
        return here != self.here or self._examples() != self._then or any(later)
