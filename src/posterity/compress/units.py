"""Which entries of a net's tensors belong together, found by following the graph from torch.export.

An entry of an axis that layers produce and use as a whole (a neuron, a channel) is a *unit*. A row of one
weight, an entry of BatchNorm and a column of the next weight are one unit, and can only be removed together.
A residual sum ties the units of its terms. An operation without a rule in `operations` freezes the units of
its inputs: they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx

# Reasons of units that stay not because of an operation.
INPUT, OUTPUT = "it is the net's input", "it is the net's output"
# Up to this relative difference, in units of the last place, values count as equal at all positions: the
# rounding of one product.
_SAME = 100.0


@final
class Units:
    """Units by number, in sets that are kept or removed together.

    Example:
        >>> units = Units()
        >>> one, other = units.fresh(2), units.fresh(2)
        >>> units.join(one, other)
        >>> units.freeze(other[:1], "the reason")
        >>> [units.reason(each) for each in one]
        ['the reason', None]
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._reasons: dict[int, str] = {}

    def fresh(self, count: int, reason: str | None = None) -> list[int]:
        """New units, not tied to others; with a reason, they stay."""
        made = list(range(len(self._parents), len(self._parents) + count))
        self._parents += made
        if reason is not None:
            self.freeze(made, reason)
        return made

    def root(self, unit: int) -> int:
        """The number of a unit's set."""
        while self._parents[unit] != unit:
            self._parents[unit] = self._parents[self._parents[unit]]
            unit = self._parents[unit]
        return unit

    def join(self, ones: Sequence[int], others: Sequence[int]) -> None:
        """Tie units in pairs."""
        for one, other in zip(ones, others, strict=True):
            a, b = self.root(one), self.root(other)
            if a != b:
                self._parents[b] = a
                if b in self._reasons:
                    self._reasons.setdefault(a, self._reasons[b])

    def freeze(self, units: Sequence[int], reason: str) -> None:
        """Mark units as ones that stay."""
        for unit in units:
            self._reasons.setdefault(self.root(unit), reason)

    def reason(self, unit: int) -> str | None:
        """Why a unit stays, if it must."""
        return self._reasons.get(self.root(unit))


@dataclass(frozen=True)
class Axis:
    """The axis of a tensor whose entries are units.

    Attributes:
        dim: The axis.
        units: The units of its entries.
        constant: Which entries are the same for every input of the net.
    """

    dim: int
    units: list[int]
    constant: Tensor


@dataclass(frozen=True, eq=False)
class Use:
    """A product of units with a weight's columns.

    Attributes:
        node: The operation.
        weight: Name of the weight ``[O, I, ...]``.
        transposed: Whether it is ``[I, O, ...]`` instead.
        bias: Name of its bias, if it has one.
        rows: Units of its rows.
        columns: Units of its columns.
        values: The constant input of each column if the product can be added to the bias; otherwise NaN.
    """

    node: fx.Node
    weight: str
    bias: str | None
    rows: list[int]
    columns: list[int]
    values: Tensor
    transposed: bool = False


# A function from an operation's arguments, by name, and its result to the units of the result: a list if the
# result is a list, None if they are unknown.
Rule: TypeAlias = Callable[["Followed", fx.Node, dict[str, Any], Any], Axis | list[Axis] | None]


@final
class Followed(fx.Interpreter):
    """Runs an exported graph once, and finds the units of all its tensors.

    Args:
        graph: From ``torch.export.export(...).module()``, in evaluation mode.
        rules: Rules by name of an operation; ``pointwise`` is for all elementwise operations.

    Attributes:
        units: All units.
        labels: For every parameter and buffer that a known operation uses, the units of each axis, or None.
        uses: Every product with a weight.
        tensors: The parameters and buffers of the graph, by their first names.
        resized: Sizes in the graph that depend on units: the operation, its argument, the position in it.
        selections: By name of a tensor with indices of units, the units that they refer to.
    """

    def __init__(self, graph: fx.GraphModule, rules: Mapping[str, Rule]) -> None:
        super().__init__(graph)
        self.units = Units()
        self.labels: dict[str, list[list[int] | None]] = {}
        self.uses: list[Use] = []
        self.tensors: dict[str, Tensor] = {}
        self.resized: list[tuple[fx.Node, int, int | None, Sequence[int]]] = []
        self.selections: dict[str, Sequence[int]] = {}
        self._rules = rules
        self._axes: dict[fx.Node, Axis | list[Axis] | None] = {}
        self._lost: dict[fx.Node, str] = {}  # why a result's units are unknown
        self._names: dict[int, str] = {}  # the first name of a tensor that has several
        self._by_node: dict[fx.Node, str] = {}
        self._labelled: set[str] = set()  # by the current operation

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation, then follow the units through it."""
        found = super().run_node(n)
        if n.op == "get_attr" and isinstance(found, Tensor):
            self._by_node[n] = name = self._names.setdefault(id(found), str(n.target))
            self.tensors[name] = found
        elif n.op == "call_function":
            self._axes[n] = self._followed(n, found)
            self._refuse_changed(n)
        elif n.op == "output":
            self.freeze(n, OUTPUT)
        return found

    def axis(self, node: object) -> Axis | None:
        """The units of an operation's result."""
        found = self._axes.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Axis) else None

    def part(self, node: fx.Node, number: int) -> Axis | None:
        """The units of one of an operation's results."""
        found = self._axes.get(node)
        return found[number] if isinstance(found, list) else None

    def held(self, node: object) -> str | None:
        """The name of the parameter or buffer that a node holds."""
        return self._by_node.get(node) if isinstance(node, fx.Node) else None

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a tensor; None if the graph does not use it."""
        return self._names.get(id(tensor))

    def shared(self, name: str) -> bool:
        """Whether more than one operation takes a parameter."""
        return sum(len(node.users) for node, held in self._by_node.items() if held == name) > 1

    def is_constant(self) -> bool:
        """Whether all outputs are known, and are the same for every input."""
        axes = [self.axis(node) for node in self.module.graph.output_node().all_input_nodes]  # type: ignore[union-attr,operator]
        return all(axis is not None and bool(axis.constant.all()) for axis in axes)

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor to the graph, and return the name that it got."""
        while name in self.tensors:
            name += "_"
        self.tensors[name] = tensor
        return name

    def value(self, node: fx.Node) -> Any:
        """The value of a node in this run."""
        return self.env[node]

    def label(self, name: str, dim: int, units: list[int]) -> None:
        """Set the units of a parameter's axis."""
        self._labelled.add(name)
        own = self.labels.setdefault(name, [None] * self.tensors[name].dim())
        known = own[dim]
        if known is None:
            own[dim] = units
        else:
            self.units.join(known, units)

    def label_whole(self, name: str, reason: str, except_dim: int | None = None) -> None:
        """Keep a parameter whole, along all axes or all but one."""
        self._labelled.add(name)
        for dim, size in enumerate(self.tensors[name].shape):
            if size > 1 and dim != except_dim:
                self.label(name, dim, self.units.fresh(size, reason))

    def _followed(self, node: fx.Node, found: Any) -> Axis | list[Axis] | None:
        self._labelled = set()
        schema = getattr(node.target, "_schema", None)
        rule = self._rules.get(self.title(node))
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = self._rules["pointwise"]
        if rule is None or (schema is not None and not isinstance(found, Tensor | int | list | tuple)):
            return self.freeze(node, f"{self.title(node)} is not followed")
        axis = rule(self, node, _arguments(node, schema), found)
        if axis is None:
            return self.freeze(node, INPUT)
        for each in node.all_input_nodes:
            used = self.held(each)
            if used is not None and used not in self._labelled:
                self.label_whole(used, f"{self.title(node)} takes all of it")
        return axis

    def freeze(self, node: fx.Node, reason: str) -> Axis | None:
        """Keep all units of an operation's inputs; the units of its result are unknown (None)."""
        behind = [self._lost[each] for each in node.all_input_nodes if each in self._lost]
        self._lost.setdefault(node, behind[0] if behind and reason == INPUT else reason)
        for each in node.all_input_nodes:
            name, axes = self.held(each), self._axes.get(each)
            for axis in axes if isinstance(axes, list) else [axes]:
                if axis is not None:
                    self.units.freeze(axis.units, self._lost[node])
            if name is not None:
                taken = f"{self.title(node)} takes all of it"
                self.label_whole(name, taken if self._lost[node] == INPUT else self._lost[node])
        return None

    def _refuse_changed(self, node: fx.Node) -> None:
        """Mark tensors that an operation changed under another name as unknown."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        changed = self.value(node.all_input_nodes[0]).untyped_storage().data_ptr()
        for other, value in list(self.env.items()):
            if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() != changed:
                continue
            reason, name, axis = f"{self.title(node)} changes it in place", self.held(other), self.axis(other)
            if name is not None:
                self.label_whole(name, reason)
            if axis is not None and any(node < user for user in other.users):
                self.units.freeze(axis.units, reason)
                self._axes[other], self._lost[other] = None, reason

    @staticmethod
    def title(node: fx.Node) -> str:
        """An operation's name."""
        schema = getattr(node.target, "_schema", None)
        name = getattr(node.target, "__name__", node.name)
        return str(name) if schema is None else str(schema.name).removeprefix("aten::")

    def incoming(self, node: fx.Node, dim: int) -> Axis:
        """The units along an axis of a tensor; frozen ones if they are unknown."""
        axis, shape = self.axis(node), self.value(node).shape
        if axis is not None and axis.dim == dim % len(shape):
            return axis
        reason = self._lost.get(node, INPUT)
        if axis is not None:
            reason = "layers make two of its axes"
            self.units.freeze(axis.units, reason)
        made = self.units.fresh(shape[dim], reason)
        return Axis(dim % len(shape), made, torch.zeros(shape[dim], dtype=torch.bool))

    def product(
        self, node: fx.Node, named: dict[str, Any], dim: int, padded: bool, transposed: bool = False
    ) -> Axis | None:
        """A weight ``[O, I, ...]`` times the units on an axis of the input."""
        name, bias = self.held(named["weight"]), self.held(named.get("bias"))
        if name is None or (named.get("bias") is not None and bias is None):
            return self.freeze(node, f"the weight of {self.title(node)} is computed, not a parameter")
        x, weight = self.value(named["input"]), self.value(named["weight"])
        axis = self.incoming(named["input"], dim)
        rows = self.units.fresh(weight.shape[transposed])
        self.label(name, int(transposed), rows)
        self.label(name, int(not transposed), axis.units)
        if bias is not None:
            self.label(bias, 0, rows)
        values = torch.where(axis.constant, same_everywhere(x, axis.dim), torch.nan)
        if padded or (bias is not None and self.shared(bias)):
            # Beyond the edge inputs are zero for every unit, and a shared bias must not change.
            values = torch.where(values == 0, values, torch.nan)
        self.uses.append(use := Use(node, name, bias, rows, axis.units, values, transposed))
        depends = used(weight, use)
        constant = ~(depends & ~axis.constant.to(weight.device)).any(1).cpu()
        return Axis(axis.dim, rows, constant)


def used(weight: Tensor, use: Use) -> Tensor:
    """``[O, I]``: which rows of a weight use which columns."""
    weight = weight.detach().transpose(0, 1) if use.transposed else weight.detach()
    return (weight.flatten(2) if weight.dim() > 2 else weight[..., None]).ne(0).any(-1)


def same_everywhere(x: Tensor, dim: int) -> Tensor:
    """The value of each entry of an axis if it is equal at all positions; otherwise NaN."""
    rows = x.detach().movedim(dim, 0).reshape(x.shape[dim], -1).double().cpu()
    if not rows.numel() or not x.is_floating_point():
        return torch.full([len(rows)], torch.nan, dtype=torch.double)
    first = rows[:, 0]
    same = (rows - first[:, None]).abs().amax(1) <= _SAME * torch.finfo(x.dtype).eps * first.abs()
    return torch.where(same, first, torch.nan)


def _arguments(node: fx.Node, schema: Any) -> dict[str, Any]:
    """The arguments of an aten operation, by name."""
    given = () if schema is None else schema.arguments
    named = {each.name: each.default_value for each in given if each.has_default_value()}
    named |= dict(zip([each.name for each in given], node.args, strict=False))
    return named | node.kwargs
