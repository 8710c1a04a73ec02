"""Weights that several layers use in one forward pass: their gradients for an example add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor

from posterity.layers import LayerCall, Part, chunks
from posterity.layers.calls import spread
from posterity.layers.embedding import Embedding


@final
@dataclass(eq=False)
class Run:
    """A forward pass under a collector.

    Attributes:
        context: The context in which it runs.
        examples: Number of examples in the layer that was called last.
        uses: For each parameter, the parts that layers use.
        repeated: Whether a parameter has several uses.
        begun: Samples whose backward pass has begun.
        matched: Number of examples in the layers that have reported.
        counted: The axis of the examples, if it is known.
        tasks: By parameter and sample, the backward pass that reported it first.
    """

    context: object
    examples: int | None = None
    uses: dict[str, list[Part]] = field(default_factory=dict)
    repeated: bool = False
    begun: set[int | None] = field(default_factory=set)
    matched: int | None = None
    counted: int | None = None
    tasks: dict[tuple[str, int | None], int] = field(default_factory=dict)

    def several(self, part: Part) -> bool:
        """Whether several layers use a part."""
        uses = self.uses[part.name]
        return len(uses) > 1 and sum(map(part.meets, uses)) > 1


class Report(NamedTuple):
    """A layer's report: inputs if its weight is watched, gradient, and whether it is the first one."""

    call: LayerCall
    x: Tensor | None
    grad: Tensor
    fresh: bool


class _Use(NamedTuple):
    """A part used by a layer, as its weight (role 0) or its bias (role 1)."""

    part: Part
    role: int
    report: Report


def gathered(reports: list[Report]) -> tuple[list[Report], list[tuple[Part, list[_Use]]]]:
    """Reports whose parameters are in no other report, and the uses of all other parameters.

    A report that shares one parameter with others appears once for each of its parameters.
    """
    uses = [
        _Use(part, role, report)
        for report in reports
        for role, part in enumerate(report.call.parts)
        if part is not None
    ]
    groups: list[list[_Use]] = []
    for use in uses:
        group, apart = [use], []
        for other in groups:
            if any(use.part.meets(each.part) for each in other):
                group += other
            else:
                apart.append(other)
        groups = [*apart, group]
    split = {id(use.report) for group in groups if len(group) > 1 for use in group}
    found = []
    for group in groups:
        if id(group[0].report) in split:
            spans = {use.part.rows for use in group}
            found.append((group[0].part._replace(rows=spans.pop() if len(spans) == 1 else None), group))
    return [report for report in reports if id(report) not in split], found


def several_batches(group: list[_Use]) -> bool:
    """Whether uses may come from several batches with different examples.

    The sign is different inputs from outside the model. Inputs of embeddings always come from outside, so
    there every parameter must also be used several times.
    """
    data = [use.report for use in group if use.role == 0 and use.report.call.from_data]
    if len({each.x.data_ptr() for each in data if each.x is not None}) < 2:
        return False
    once = any(len(uses) == 1 for uses in data[0].call.run.uses.values())
    return not (once and all(type(each.call) is Embedding for each in data))


def added_squares(group: list[_Use]) -> Tensor:
    """Σ_i (Σ_u g_iu)² over uses u; for all rows, unless all uses have the same rows."""
    tensors, numbers = [], 0
    for _, role, (call, x, grad, _) in group:
        own = grad if role == 1 or x is None else spread(call.prepared(x), grad)
        tensors += [own, grad]
        numbers += 1 if role == 1 or x is None else call.held(own, grad)
    spans = {use.part.rows for use in group}
    total: Tensor | None = None
    for some in chunks(numbers, *tensors):
        sums: Tensor | None = None
        for number, (part, role, (call, *_)) in enumerate(group):
            x, grad = some[2 * number : 2 * number + 2]
            terms = call.terms(x, grad) if role == 0 else call.bias_terms(grad)
            if len(spans) == 1:
                sums = terms if sums is None else sums.add_(terms)
                continue
            start, stop, count = part.rows or (0, terms.shape[1], terms.shape[1])
            if sums is None:
                sums = terms.new_zeros(len(terms), count, *terms.shape[2:])
            sums[:, start:stop].add_(terms)
        assert sums is not None
        squares = sums.square_().sum(0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
    return total
