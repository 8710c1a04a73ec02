"""How operations treat units: a rule for each operation, by its aten name.

A rule gets a node of the graph, its arguments by name, and its result. It returns the units of the result,
ties units that must be removed together, and labels the parameters of the operation. A unit may be removed if
the operation without it gives the rest of the result; if that depends on a size in the graph, the rule adds
the size to ``resized``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from posterity.compress.trace import is_fixed
from posterity.compress.units import INPUT, Axis, Followed, Rule, same_everywhere

RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@_rule("linear")
def _linear(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis = self.product(node, named, -1, padded=False)
    return None if axis is None else replace(axis, dim=found.dim() - 1)


@_rule("conv1d", "conv2d", "conv3d")
def _conv(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    weight, dim = self.value(named["weight"]), found.dim() - self.value(named["weight"]).dim() + 1
    groups, channels = named["groups"], self.value(named["input"]).shape[dim]
    if groups == 1:
        padding = named["padding"]
        padded = padding != "valid" if isinstance(padding, str) else any(padding)
        return self.product(node, named, dim, padded)
    name, bias = self.held(named["weight"]), self.held(named.get("bias"))
    if groups != channels or name is None or (named.get("bias") is not None and bias is None):
        return self.freeze(node, "a convolution in groups is not followed")
    axis = self.incoming(named["input"], dim)  # every channel is separate, with all outputs made from it
    units = [unit for unit in axis.units for _ in range(len(weight) // groups)]
    self.label(name, 0, units)
    if bias is not None:
        self.label(bias, 0, units)
    self.resized.append((node, 6, None, axis.units))
    zero = (weight.detach().flatten(1) == 0).all(1).cpu()
    return Axis(dim, units, axis.constant.repeat_interleave(len(weight) // groups) | zero)


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    if named["groups"] != 1:
        return self.freeze(node, "a convolution in groups is not followed")
    dim = found.dim() - self.value(named["weight"]).dim() + 1
    return self.product(node, named, dim, padded=True, transposed=True)  # the edge gets fewer terms


@_rule("addmm")
def _added(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    bias = self.held(named["self"])
    if (named["alpha"], named["beta"]) != (1, 1) or bias is None or self.tensors[bias].dim() != 1:
        return self.freeze(node, "addmm is not followed")
    named = {"input": named["mat1"], "weight": named["mat2"], "bias": named["self"]}
    return self.product(node, named, 1, padded=False, transposed=True)


@_rule("batch_norm", "instance_norm", "prelu")
def _by_channel(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """Each channel separately, with its own parameters."""
    if (named.get("training") and named["running_mean"] is not None) or found.dim() < 2:
        return self.freeze(node, "statistics of a batch are not followed")
    axis = self.incoming(node.all_input_nodes[0], 1)
    constant = axis.constant
    for key in ("weight", "bias", "running_mean", "running_var"):
        name = self.held(named.get(key))
        if named.get(key) is not None and name is None:
            return self.freeze(node, f"the {key} of {self.title(node)} is computed, not a parameter")
        if name is not None and len(self.tensors[name]) == found.shape[1]:
            self.label(name, 0, axis.units)
            if key == "weight" and "running_var" in named:
                constant = constant | (self.value(named[key]).detach() == 0).cpu()
        elif name is not None:
            self.label_whole(name, "all channels share it")
    return Axis(1, axis.units, constant)


@_rule("group_norm")
def _group_norm(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    if named["num_groups"] != found.shape[1]:
        return self.freeze(node, "group_norm is over its units")
    axis = _by_channel(self, node, named, found)
    assert not isinstance(axis, list)
    if axis is not None:
        self.resized.append((node, 1, None, axis.units))
    return axis


@_rule("layer_norm", "rms_norm", "softmax", "log_softmax")
def _along(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """Along axes that must differ from the units'."""
    axis = self.axis(node.all_input_nodes[0])
    along = range(-len(named["normalized_shape"]), 0) if "normalized_shape" in named else [named["dim"]]
    if axis is None or axis.dim in [each % found.dim() for each in along]:
        return self.freeze(node, f"{self.title(node)} is over its units")
    for each in node.all_input_nodes[1:]:
        if (name := self.held(each)) is not None:
            self.label_whole(name, INPUT)
    return axis


@_rule("embedding")
def _embedding(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    name = self.held(named["weight"])
    if name is None:
        return self.freeze(node, "the weight of embedding is computed, not a parameter")
    weight = self.value(named["weight"]).detach()
    units = self.units.fresh(weight.shape[1])
    self.label_whole(name, INPUT, except_dim=1)
    self.label(name, 1, units)
    return Axis(found.dim() - 1, units, (weight == weight[:1]).all(0).cpu())


@_rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
@_rule("contiguous", "detach", "to", "_to_copy", "alias")
def _unchanged(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    return self.axis(node.all_input_nodes[0])


@_rule("pointwise", "hardswish", "log_sigmoid", "ones_like", "zeros_like", "full_like")
def _pointwise(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """An elementwise operation, after broadcasting."""
    axis = _together(self, node, node.all_input_nodes, found)
    if axis is None or self.title(node) not in ("mul", "mul_"):
        return axis
    return replace(axis, constant=axis.constant | _zero(self, node.all_input_nodes, len(axis.units)))


def _zero(self: Followed, factors: Sequence[fx.Node], count: int) -> Tensor:
    """Which units of a product are zero, because a factor is a constant zero."""
    zero = torch.zeros(count, dtype=torch.bool)
    for each in factors:
        axis = self.axis(each)
        if axis is not None and len(axis.units) == count:
            zero |= axis.constant & (same_everywhere(self.value(each), axis.dim) == 0)
    return zero


def _together(self: Followed, node: fx.Node, terms: Sequence[fx.Node], found: Tensor) -> Axis | None:
    """The units of tensors that are broadcast together, all along the same axis."""
    title, axes, followed = self.title(node), [], []
    for each in terms:
        axis = self.axis(each)
        if axis is None:
            continue
        dim = axis.dim - self.value(each).dim() + found.dim()
        if len(axis.units) == found.shape[dim]:
            axes.append(replace(axis, dim=dim))
            followed.append(each)
        else:  # one for all
            self.units.freeze(axis.units, INPUT)
    if not axes:
        return self.freeze(node, INPUT)
    dim, units, constant = axes[0].dim, axes[0].units, axes[0].constant
    if any(each.dim != dim for each in axes):
        return self.freeze(node, f"{title} combines two axes")
    for other in axes[1:]:
        self.units.join(units, other.units)
        constant = constant & other.constant
    for each in terms:
        tensor, name, axis = self.value(each), self.held(each), self.axis(each)
        if each in followed:
            continue
        if axis is not None:
            constant = constant & axis.constant
        elif name is None:  # it depends on the net's input, or on the size of the batch
            constant = torch.zeros_like(constant)
        if not isinstance(tensor, Tensor):
            continue
        own = dim - found.dim() + tensor.dim()
        wide = own >= 0 and tensor.shape[own] > 1
        if name is not None:
            self.label_whole(name, INPUT, except_dim=own)
            if wide:
                self.label(name, own, units)
        elif wide:
            self.units.freeze(units, f"{title} combines it with what no layer makes")
    return Axis(dim, units, constant)


@_rule("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d")
@_rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d")
@_rule("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "upsample_nearest3d", "upsample_trilinear3d")
@_rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_bicubic2d", "pad")
def _positions(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | list[Axis] | None:
    """Along the last axes, which are positions."""
    x, title = node.all_input_nodes[0], self.title(node)
    axis = self.axis(x)
    count = len(named["pad"]) // 2 if title == "pad" else int(title[-2])
    if axis is not None and axis.dim >= self.value(x).dim() - count:
        return self.freeze(node, f"{title} is over its units")
    return axis if axis is None or isinstance(found, Tensor) else [axis] * len(found)


@_rule("mean", "sum", "amax", "amin")
def _reduction(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, over, rank = self.axis(x), named.get("dim"), self.value(x).dim()
    over = [over] if isinstance(over, int) else over
    dims = {each % rank for each in over} if over else set(range(rank))
    if axis is None or axis.dim in dims:
        return self.freeze(node, f"{self.title(node)} is over its units" if axis is not None else INPUT)
    gone = 0 if named.get("keepdim") else sum(each < axis.dim for each in dims)
    counted = self.title(node) == "sum" and not all(is_fixed(x, each) for each in dims)
    constant = axis.constant & (not counted)  # a sum of constants over a batch depends on its size
    return Axis(axis.dim - gone, axis.units, constant)


@_rule("transpose", "permute", "movedim", "t", "flip")
def _moved(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    x = node.all_input_nodes[0]
    axis = self.axis(x)
    if axis is None or (self.title(node) == "flip" and axis.dim in [d % found.dim() for d in named["dims"]]):
        return self.freeze(node, "flip is over its units" if axis is not None else INPUT)
    # Apply the operation to a tensor whose axes have size 1, except that of the units.
    probe = torch.empty([2 if dim == axis.dim else 1 for dim in range(found.dim())])
    moved = node.target(probe, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return replace(axis, dim=list(moved.shape).index(2))


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshaped(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """An axis that stays, becomes part of a longer one, or is split: neighbours are then tied."""
    x = node.all_input_nodes[0]
    axis = self.axis(x)
    if axis is None:
        return None
    before, after = list(self.value(x).shape), list(found.shape)
    if len(axis.units) == 1:  # a layer's only unit always stays
        return None
    size, behind = before[axis.dim], math.prod(before[axis.dim + 1 :])  # numbers in memory between two units
    units, constant = axis.units, axis.constant
    for dim in range(len(after)):
        rest = math.prod(after[dim + 1 :])
        span, whole = rest * after[dim], size * behind
        repeats = span // whole
        if after[dim] == 1 or (repeats > 1 and not is_fixed(node, dim)):
            continue
        if span % whole == 0 and behind % rest == 0:
            inner = behind // rest
            units = [unit for unit in units for _ in range(inner)] * repeats
            constant = constant.repeat_interleave(inner).repeat(repeats)
            break
        if span == whole and rest % behind == 0:
            inner = rest // behind
            for number in range(inner):
                self.units.join(units[::inner], units[number::inner])
            units, constant = units[::inner], constant.view(-1, inner).all(1)
            break
    else:
        return self.freeze(node, f"{self.title(node)} splits its units")
    key = "sizes" if self.title(node) == "unflatten" else "size" if "size" in named else "shape"
    sizes, first = named.get(key), named["dim"] % len(before) if key == "sizes" else 0
    if sizes is not None and 0 <= dim - first < len(sizes):
        literal = sizes[dim - first]
        if isinstance(literal, int) and literal >= 0:
            self.resized.append((node, 2 if key == "sizes" else 1, dim - first, units))
    return Axis(dim, units, constant)


@_rule("expand")
def _expanded(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    x = node.all_input_nodes[0]
    axis = self.axis(x)
    if axis is None or len(axis.units) == 1:
        return None
    dim = axis.dim - self.value(x).dim() + found.dim()
    if isinstance(named["size"][dim], int) and named["size"][dim] >= 0:
        self.resized.append((node, 1, dim, axis.units))
    return replace(axis, dim=dim)


@_rule("cat", "stack")
def _joined(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    parts, dim = named["tensors"], named["dim"] % found.dim()
    if self.title(node) == "cat" and any((axis := self.axis(each)) and axis.dim == dim for each in parts):
        axes = [self.incoming(each, dim) for each in parts]
        for each in parts:
            name = self.held(each)
            if name is not None:
                self.label_whole(name, "cat takes all of it")
        units = [unit for axis in axes for unit in axis.units]
        return Axis(dim, units, torch.cat([axis.constant for axis in axes]))
    known = [axis for each in parts if (axis := self.axis(each)) is not None]
    if len(known) < len(parts) or len({axis.dim for axis in known}) > 1:
        return self.freeze(node, f"{self.title(node)} combines it with what no layer makes, or on other axes")
    for axis in known[1:]:
        self.units.join(known[0].units, axis.units)
    constant = torch.stack([axis.constant for axis in known]).all(0)
    behind = self.title(node) == "stack" and known[0].dim >= dim
    return Axis(known[0].dim + behind, known[0].units, constant)


@_rule("chunk", "split", "split_with_sizes", "unsafe_split", "unsafe_chunk")
def _split(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> list[Axis] | None:
    axis = self.axis(node.all_input_nodes[0])
    if axis is None:
        return None
    if named["dim"] % found[0].dim() != axis.dim:
        return [axis] * len(found)
    sizes, start, parts = [each.shape[axis.dim] for each in found], 0, []
    node.target = torch.ops.aten.split_with_sizes.default  # parts lose different units
    node.args, node.kwargs = (node.args[0], sizes, axis.dim), {}
    for number, size in enumerate(sizes):
        parts.append(Axis(axis.dim, axis.units[start : start + size], axis.constant[start : start + size]))
        self.resized.append((node, 1, number, parts[-1].units))
        start += size
    return parts


@_rule("getitem")
def _item(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    return self.part(node.all_input_nodes[0], node.args[1])  # type: ignore[arg-type]


@_rule("glu")
def _gated(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis = self.axis(node.all_input_nodes[0])
    if axis is None or named["dim"] % found.dim() != axis.dim:
        return axis
    half = len(axis.units) // 2
    self.units.join(axis.units[:half], axis.units[half:])
    return Axis(axis.dim, axis.units[:half], axis.constant[:half] & axis.constant[half:])


@_rule("slice", "select")
def _sliced(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    x = node.all_input_nodes[0]
    axis, rank = self.axis(x), self.value(x).dim()
    if axis is None:
        return None
    dim, select = named["dim"] % rank, self.title(node) == "select"
    if dim != axis.dim:
        return replace(axis, dim=axis.dim - (select and dim < axis.dim))
    start, end, step = (named.get(each) for each in ("start", "end", "step"))
    if select or step != 1 or not isinstance(start, int | None) or not isinstance(end, int | None):
        return self.freeze(node, f"{self.title(node)} takes some of its units")
    start, end, _ = slice(start, end).indices(len(axis.units))
    node.args, node.kwargs = (x, dim, start, end), {}
    self.resized += [(node, 2, None, axis.units[:start]), (node, 3, None, axis.units[:end])]
    return Axis(dim, axis.units[start:end], axis.constant[start:end])


@_rule("index_select")
def _selected(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    axis, name = self.axis(named["self"]), self.held(named["index"])
    if axis is None or named["dim"] % found.dim() != axis.dim:
        if name is not None:
            self.label_whole(name, INPUT)
        return axis
    if name is None or self.shared(name):
        return self.freeze(node, "index_select takes some of its units")
    places = self.value(named["index"]).tolist()
    units = [axis.units[place] for place in places]
    self.label(name, 0, units)
    self.selections[name] = axis.units
    return Axis(axis.dim, units, axis.constant[places])


@_rule("scaled_dot_product_attention", "matmul", "bmm")
def _attended(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> Axis | None:
    """Heads, whose queries, keys and values are tied; or products of two tensors, in the same way."""
    weight = self.held(named.get("other"))
    if weight is not None and self.tensors[weight].dim() == 2:
        taken = {"input": named["self"], "weight": named["other"]}
        axis = self.product(node, taken, -1, padded=True, transposed=True)  # it has no bias to add to
        return None if axis is None else replace(axis, dim=found.dim() - 1)
    heads = [self.axis(each) for each in node.all_input_nodes[:3]]
    known = [axis for axis in heads if axis is not None]
    ranks = {self.value(each).dim() for each in node.all_input_nodes}
    dims = {axis.dim for axis in known}
    if (
        len(known) < len(node.all_input_nodes)
        or len(dims) > 1
        or ranks != {found.dim()}
        or known[0].dim >= found.dim() - 2
        or any(len(axis.units) != found.shape[axis.dim] for axis in known)
    ):
        return self.freeze(node, f"{self.title(node)} is not followed")
    for axis in known[1:]:
        self.units.join(known[0].units, axis.units)
    factors = [named["value"]] if "value" in named else node.all_input_nodes
    constant = torch.stack([axis.constant for axis in known]).all(0)
    return replace(known[0], constant=constant | _zero(self, factors, len(constant)))


@_rule("sym_size")
def _size(self: Followed, node: fx.Node, named: dict[str, Any], found: Any) -> list[Axis] | None:
    axis = self.axis(node.all_input_nodes[0])
    if axis is not None and named["dim"] % self.value(node.all_input_nodes[0]).dim() == axis.dim:
        self.units.freeze(axis.units, "the net counts them")
    return []  # it has no units
