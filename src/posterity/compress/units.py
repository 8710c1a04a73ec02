"""Which entries of a net's tensors belong together, followed through the graph that torch.export gives.

An entry of an axis that layers make and use as a whole (a neuron, a channel) is a *unit*. What one layer
makes, the next ones use: rows of one weight, entries of BatchNorm, columns of another weight are one unit,
and can only be removed together. A residual sum ties the units of its terms. An operation that is not known
here freezes the units of its inputs: they stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn

# Why units stay that no operation is to blame for.
INPUT, OUTPUT = "it is the net's input", "it is the net's output"
# Relative difference up to which an entry has the same value at all positions: rounding of one product.
_SAME = 1e-5


@final
class Units:
    """Units by number, in sets that stay or go as one.

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
        """So many that nothing ties to others yet; with a reason, they stay."""
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
        """Let units stay."""
        for unit in units:
            self._reasons.setdefault(self.root(unit), reason)

    def reason(self, unit: int) -> str | None:
        """Why a unit stays, if it must."""
        return self._reasons.get(self.root(unit))


@dataclass(frozen=True)
class Axis:
    """The axis of a tensor whose entries are units.

    Attributes:
        dim: Which.
        units: Of its entries.
        constant: Which entries are the same whatever the net's input is.
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
        bias: Name of its bias, if it has one.
        rows: Units of its rows.
        columns: Units of its columns.
        values: What each column is multiplied with where that can be added to the bias; else NaN.
    """

    node: fx.Node
    weight: str
    bias: str | None
    rows: list[int]
    columns: list[int]
    values: Tensor


_Rule: TypeAlias = Callable[["Followed", fx.Node, dict[str, Any], Any], Axis | None]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@final
class Followed(fx.Interpreter):
    """Runs an exported graph once, and finds the units of all its tensors.

    Args:
        graph: From ``torch.export.export(...).module()``, in evaluation mode.

    Attributes:
        units: All of them.
        labels: For every parameter and buffer that a known operation uses, the units of each axis, or None.
        uses: Every product with a weight.
        tensors: The parameters and buffers of the graph, by their first names.
        resized: Sizes in the graph that units decide: the operation, its argument, the position in it.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.units = Units()
        self.labels: dict[str, list[list[int] | None]] = {}
        self.uses: list[Use] = []
        self.tensors: dict[str, Tensor] = {}
        self.resized: list[tuple[fx.Node, int, int | None, list[int]]] = []
        self._axes: dict[fx.Node, Axis | None] = {}
        self._lost: dict[fx.Node, str] = {}  # why nothing is known of a result
        self._names: dict[int, str] = {}  # the first name of a tensor that has several
        self._by_node: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation, then follow the units through it."""
        found = super().run_node(n)
        if n.op == "get_attr" and isinstance(found, Tensor):
            self._by_node[n] = name = self._names.setdefault(id(found), str(n.target))
            self.tensors[name] = found
        elif n.op == "call_function":
            self._axes[n] = axis = self._followed(n, found)
            behind = [self._lost[each] for each in n.all_input_nodes if each in self._lost]
            if axis is None and behind:
                self._lost.setdefault(n, behind[0])
        elif n.op == "output":
            self.freeze(n, OUTPUT)
        return found

    def axis(self, node: object) -> Axis | None:
        """The units of an operation's result."""
        return self._axes.get(node) if isinstance(node, fx.Node) else None

    def held(self, node: object) -> str | None:
        """Of the parameter or buffer that a node holds."""
        return self._by_node.get(node) if isinstance(node, fx.Node) else None

    def name_of(self, tensor: Tensor) -> str | None:
        """The same of the tensor itself; None if the graph does not use it."""
        return self._names.get(id(tensor))

    def add(self, name: str, use: Use) -> str:
        """A zero bias for a product without one; the name that it got."""
        while name in self.tensors:
            name += "_"
        weight = self.tensors[use.weight]
        self.tensors[name] = nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
        self.labels[name] = [use.rows]
        return name

    def value(self, node: fx.Node) -> Any:
        """What a node was at this run."""
        return self.env[node]

    def label(self, name: str, shape: Sequence[int], dim: int, units: list[int]) -> None:
        """Let these be the units of a parameter's axis."""
        own = self.labels.setdefault(name, [None] * len(shape))
        known = own[dim]
        if known is None:
            own[dim] = units
        else:
            self.units.join(known, units)

    def _followed(self, node: fx.Node, found: Any) -> Axis | None:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and isinstance(found, Tensor | int):
            named = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
            named |= dict(zip([each.name for each in schema.arguments], node.args, strict=False))
            named |= node.kwargs
            rule = _RULES.get(schema.name.removeprefix("aten::"))
            if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
                rule = _pointwise
            if rule is not None:
                return rule(self, node, named, found)
        return self.freeze(node, f"{self.title(node)} is not followed")

    def freeze(self, node: fx.Node, reason: str) -> Axis | None:
        """Let all units that an operation takes stay; nothing is known of its result."""
        self._lost[node] = reason
        for each in node.all_input_nodes:
            axis, name = self.axis(each), self.held(each)
            if axis is not None:
                self.units.freeze(axis.units, reason)
            if name is not None:
                tensor = self.value(each)
                for dim, size in enumerate(tensor.shape):
                    self.label(name, tensor.shape, dim, self.units.fresh(size, reason))
        return None

    @staticmethod
    def title(node: fx.Node) -> str:
        """What an operation is called."""
        schema = getattr(node.target, "_schema", None)
        return node.name if schema is None else str(schema.name).removeprefix("aten::")

    def incoming(self, node: fx.Node, dim: int) -> Axis:
        """The units on an axis of a tensor; frozen ones where none are known there."""
        axis, shape = self.axis(node), self.value(node).shape
        if axis is not None and axis.dim == dim % len(shape):
            return axis
        if axis is not None:
            self.units.freeze(axis.units, f"{self.title(node)} has two axes that layers make")
        reason = self._lost.get(node, INPUT)
        made = self.units.fresh(shape[dim], reason)
        return Axis(dim % len(shape), made, torch.zeros(shape[dim], dtype=torch.bool))

    def product(self, node: fx.Node, named: dict[str, Any], dim: int, padded: bool) -> Axis | None:
        """A weight ``[O, I, ...]`` times the units on an axis of the input."""
        name, bias = self.held(named["weight"]), self.held(named.get("bias"))
        if name is None or (named.get("bias") is not None and bias is None):
            return self.freeze(node, f"the weight of {self.title(node)} is computed, not a parameter")
        x, weight = self.value(named["input"]), self.value(named["weight"])
        axis = self.incoming(named["input"], dim)
        rows = self.units.fresh(len(weight))
        self.label(name, weight.shape, 0, rows)
        self.label(name, weight.shape, 1, axis.units)
        if bias is not None:
            self.label(bias, [len(weight)], 0, rows)
        values = torch.where(axis.constant, _same_everywhere(x, axis.dim), torch.nan)
        if padded:  # what is beyond the edge is zero, whatever the unit is
            values = torch.where(values == 0, values, torch.nan)
        for number, use in enumerate(self.uses):  # shared, and constants may differ from use to use
            if name == use.weight or (bias is not None and bias == use.bias):
                values = torch.where(values == 0, values, torch.nan)
                self.uses[number] = replace(use, values=torch.where(use.values == 0, use.values, torch.nan))
        self.uses.append(Use(node, name, bias, rows, axis.units, values))
        depends = (weight.detach().flatten(2) if weight.dim() > 2 else weight.detach()[..., None]) != 0
        constant = ~(depends.any(-1) & ~axis.constant.to(weight.device)).any(1).cpu()
        return Axis(axis.dim, rows, constant)


def _same_everywhere(x: Tensor, dim: int) -> Tensor:
    """The value of each entry of an axis that has the same at all positions; NaN for others."""
    rows = x.detach().movedim(dim, 0).flatten(1).double().cpu()
    first = rows[:, 0]
    same = (rows - first[:, None]).abs().amax(1) <= _SAME * first.abs()
    return torch.where(same, first, torch.nan)


@_rule("linear")
def _linear(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis = self.product(node, named, -1, padded=False)
    return None if axis is None else Axis(found.dim() - 1, axis.units, axis.constant)


@_rule("conv1d", "conv2d", "conv3d")
def _conv(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    weight, dim = self.value(named["weight"]), found.dim() - self.value(named["weight"]).dim() + 1
    groups, channels = named["groups"], self.value(named["input"]).shape[dim]
    if groups == 1:
        padding = named["padding"]
        padded = padding != "valid" if isinstance(padding, str) else any(padding)
        return self.product(node, named, dim, padded)
    name, bias = self.held(named["weight"]), self.held(named.get("bias"))
    if groups != channels or len(weight) != channels or name is None:
        return self.freeze(node, "a convolution in groups is not followed")
    axis = self.incoming(named["input"], dim)  # every channel by itself
    self.label(name, weight.shape, 0, axis.units)
    if bias is not None:
        self.label(bias, [channels], 0, axis.units)
    self.resized.append((node, 6, None, axis.units))
    zero = (weight.detach().flatten(1) == 0).all(1).cpu()
    return Axis(dim, axis.units, axis.constant | zero)


@_rule("batch_norm", "instance_norm")
def _norm(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    if named.get("training") or named.get("use_input_stats") or found.dim() < 2:
        return self.freeze(node, "statistics of a batch are not followed")
    axis = self.incoming(named["input"], 1)
    constant = axis.constant
    for key in ("weight", "bias", "running_mean", "running_var"):
        name = self.held(named.get(key))
        if name is not None:
            self.label(name, [found.shape[1]], 0, axis.units)
            if key == "weight":
                constant = constant | (self.value(named[key]).detach() == 0).cpu()
    return Axis(1, axis.units, constant)


@_rule("embedding")
def _embedding(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    name = self.held(named["weight"])
    if name is None:
        return None
    weight = self.value(named["weight"]).detach()
    units = self.units.fresh(weight.shape[1])
    self.label(name, weight.shape, 1, units)
    return Axis(found.dim() - 1, units, (weight == weight[:1]).all(0).cpu())


@_rule("dropout", "feature_dropout", "alpha_dropout", "contiguous", "detach", "to", "_to_copy", "alias")
def _unchanged(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    return self.axis(node.all_input_nodes[0])


def _pointwise(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """An operation entry by entry, after broadcasting."""
    title = self.title(node)
    axes = [
        Axis(axis.dim - self.value(each).dim() + found.dim(), axis.units, axis.constant)
        for each in node.all_input_nodes
        if (axis := self.axis(each)) is not None
    ]
    if any(each.dim != axes[0].dim or len(each.units) != found.shape[each.dim] for each in axes):
        return self.freeze(node, f"{title} combines two axes")
    if not axes:
        return self.freeze(node, INPUT)
    dim, units = axes[0].dim, axes[0].units
    constant = torch.stack([each.constant for each in axes]).all(0)
    for other in axes[1:]:
        self.units.join(units, other.units)
    for each in node.all_input_nodes:
        tensor, name = self.value(each), self.held(each)
        if not isinstance(tensor, Tensor) or self.axis(each) is not None:
            continue
        own = dim - found.dim() + tensor.dim()
        wide = own >= 0 and tensor.shape[own] > 1
        if name is None:  # it depends on the net's input
            constant = torch.zeros_like(constant)
            if wide:
                self.units.freeze(units, f"{title} combines it with what no layer makes")
        elif wide:
            self.label(name, tensor.shape, own, units)
    return Axis(dim, units, constant)


@_rule("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d")
@_rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d")
@_rule("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "upsample_nearest3d", "upsample_trilinear3d")
def _pool(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis = self.axis(node.all_input_nodes[0])
    spatial = int(self.title(node)[-2])
    if axis is not None and axis.dim >= found.dim() - spatial:
        return self.freeze(node, f"{self.title(node)} is over its units")
    return axis


@_rule("mean", "sum", "amax", "amin")
def _reduction(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis, over = self.axis(node.all_input_nodes[0]), named.get("dim")
    if axis is None:
        return None
    rank = self.value(node.all_input_nodes[0]).dim()
    over = [over] if isinstance(over, int) else over
    dims = {each % rank for each in over} if over else set(range(rank))
    if axis.dim in dims:
        return self.freeze(node, f"{self.title(node)} is over its units")
    gone = 0 if named.get("keepdim") else sum(each < axis.dim for each in dims)
    return Axis(axis.dim - gone, axis.units, axis.constant)


@_rule("transpose", "permute")
def _moved(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis, rank = self.axis(node.all_input_nodes[0]), found.dim()
    if axis is None:
        return None
    order = list(range(rank))
    if "dims" in named:
        order = [each % rank for each in named["dims"]]
    else:
        one, other = named["dim0"] % rank, named["dim1"] % rank
        order[one], order[other] = other, one
    return Axis(order.index(axis.dim), axis.units, axis.constant)


@_rule("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze")
def _reshaped(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """An axis that stays itself, or becomes part of a longer one."""
    axis = self.axis(node.all_input_nodes[0])
    if axis is None:
        return None
    before, after = list(self.value(node.all_input_nodes[0]).shape), list(found.shape)
    size, behind = before[axis.dim], math.prod(before[axis.dim + 1 :])  # numbers in memory between two units
    rests = [math.prod(after[dim + 1 :]) for dim in range(len(after))]
    found_at = [d for d, rest in enumerate(rests) if rest * after[d] == size * behind and behind % rest == 0]
    if not found_at or size == 1:
        return self.freeze(node, f"{self.title(node)} splits its units")
    dim = found_at[0]
    inner = behind // rests[dim]
    units = [unit for unit in axis.units for _ in range(inner)]
    sizes = node.args[1] if len(node.args) > 1 else None
    if isinstance(sizes, list | tuple) and isinstance(sizes[dim], int) and sizes[dim] >= 0:
        self.resized.append((node, 1, dim, units))
    return Axis(dim, units, axis.constant.repeat_interleave(inner))


@_rule("cat")
def _joined(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    parts, dim = named["tensors"], named["dim"] % found.dim()
    axes = [self.axis(each) for each in parts]
    if all(axis is not None and axis.dim == dim for axis in axes):
        known = [axis for axis in axes if axis is not None]
        units = [unit for axis in known for unit in axis.units]
        return Axis(dim, units, torch.cat([axis.constant for axis in known]))
    return self.freeze(node, "cat is of what no layer makes, or of other axes")


@_rule("sym_size")
def _size(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis = self.axis(node.all_input_nodes[0])
    if axis is not None and named["dim"] % self.value(node.all_input_nodes[0]).dim() == axis.dim:
        self.freeze(node, "the net counts them")
    return None
