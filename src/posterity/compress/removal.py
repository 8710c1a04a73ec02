"""Removal of dead units: a smaller net with the outputs of the pruned one.

A unit (a neuron, a channel) is dead if no later weight uses it, or if it is the same for every input. The
contribution of a constant unit is added to the next bias. There is no list of architectures: units are
followed through the graph of ``torch.export``, and parts that cannot be followed stay unchanged and are
named.

A linear layer may use only few of its inputs although all of them must stay, such as the net's own inputs or
positions of flattened channels. Then it gets only the used ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, fx, nn

from posterity.arguments import MODULE, instance, takes
from posterity.compress.functional import callable_graph
from posterity.compress.operations import RULES
from posterity.compress.trace import at_means, buffers_kept, compare, distance, exported, outputs
from posterity.compress.units import INPUT, OUTPUT, Followed, Use, used
from posterity.posterior import DiagonalGaussian, Factorised
from posterity.torch_private import tree_leaves

# By tensor that becomes smaller: the entries that stay, for every axis.
_Kept: TypeAlias = dict[str, list[list[int]]]
# Weights that a linear layer must save before its inputs are selected: for fewer, the selection costs more.
_WORTH = 10_000


@final
@dataclass(frozen=True)
class Shrunk:
    """A net without its dead units.

    Attributes:
        module: The smaller net at its means, in evaluation mode; its weights keep their names.
        posterior: The posterior of its weights, for sampled predictions.
        shapes: Shapes before and after, of every parameter and buffer that became smaller.
        dense: Why dead units stayed: by parameter, a reason for each axis that could not be followed.
    """

    module: nn.Module
    posterior: Factorised
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dense: dict[str, str]


@takes(model=MODULE, posterior=instance("a Factorised posterior", Factorised))
def shrink(model: nn.Module, posterior: Factorised, example: Any, /, **kwargs: Any) -> Shrunk:
    """Remove the units that a pruned posterior does not use.

    The outputs equal those of the model at the pruned means, in evaluation mode, up to rounding; this is
    checked on the example before anything is returned. Sampled outputs have the same moments: a constant
    times a removed column is added to the bias with its variance.

    Args:
        model: Any module that ``torch.export`` supports; it is not changed.
        posterior: The pruned posterior of its weights: see :func:`~posterity.prune`.
        example: The model's first input, of any batch size; a tuple of several inputs.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: The model does not accept the example or returns NaN for it, or cannot be exported, or
            draws random numbers, or its output would be the same for every input.

    Example:
        >>> from posterity.compress import point_mass
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with torch.no_grad():
        ...     _ = net[2].weight[:, 2:].zero_()  # six of eight hidden units are unused
        >>> small = shrink(net, point_mass(net), torch.randn(5, 4))
        >>> small.shapes["0.weight"]
        ((8, 4), (2, 4))
    """
    args = example if isinstance(example, tuple) else (example,)
    plain = at_means(model, posterior)
    graph = exported(plain, args, kwargs).module(check_guards=False)
    followed = Followed(graph, RULES)
    with torch.no_grad(), buffers_kept(graph):
        want = followed.run(*tree_leaves((args, kwargs)))
    if any(isinstance(each, Tensor) and bool(each.isnan().any()) for each in tree_leaves(want)):
        raise ValueError(
            "the model's outputs for this example are nan at the posterior's means: look for nan in both"
        )
    if error := distance(outputs(graph, args, kwargs), want):
        raise ValueError(
            f"the model's outputs differ by {error:g} from call to call, so that no smaller net can be "
            "checked: turn off its randomness"
        )
    gone = _dead(followed)
    shifts = {}
    for number, use in enumerate(followed.uses):
        values = _constants(followed, use, gone)
        if bool(values.any()):
            followed.uses[number] = biased = _biased(graph, followed, use)
            shifts[biased] = values
    kept = _kept(followed, gone)
    _select_inputs(graph, followed, gone, kept)
    small = callable_graph(_rebuilt(graph, followed, gone, kept, shifts), *args, *kwargs.items(), gives=want)
    compare(outputs(small, args, kwargs), want)
    shapes = {name: (tuple(followed.tensors[name].shape), tuple(map(len, kept[name]))) for name in kept}
    named = {name: followed.name_of(plain.get_parameter(name)) for name in posterior.mean()}
    return Shrunk(small, _smaller(posterior, named, followed, kept, shifts), shapes, _dense(followed))


def _dead(followed: Followed) -> set[int]:
    """The sets of units that no remaining weight needs."""
    units, labels = followed.units, followed.labels.values()
    gone: set[int] = set()
    all_of_them = {units.root(unit) for axes in labels for axis in axes for unit in axis or ()}
    free = {root for root in all_of_them if units.reason(root) is None}
    while True:
        needed = {root for use in followed.uses for root in _needed(followed, use, gone)}
        if free - needed != gone:
            gone = free - needed
        elif lost := _without_units(followed, gone):
            free -= lost
            gone = set()
        else:
            return gone


def _without_units(followed: Followed, gone: set[int]) -> set[int]:
    """One set of units for every axis that would become empty: a dead branch keeps it."""
    lost = set()
    for name, axes in followed.labels.items():
        for dim, axis in enumerate(axes):
            if axis and not _staying(followed, axis, gone):
                if followed.is_constant():
                    raise ValueError(
                        f"nothing is left of {name!r} along axis {dim}, and the net gives the same for every "
                        "input: prune less, or spare that layer"
                    )
                followed.units.freeze(axis[:1], "a layer needs one unit")
                lost.add(followed.units.root(axis[0]))
    return lost


def _needed(followed: Followed, use: Use, gone: set[int]) -> set[int]:
    """Units whose columns are not zero, and cannot be added to a bias."""
    rows = _staying(followed, use.rows, gone)
    taken = used(followed.tensors[use.weight], use)[rows].any(0).cpu()
    columns = (taken & use.values.isnan()).nonzero().flatten().tolist()
    return {followed.units.root(use.columns[column]) for column in columns}


def _staying(followed: Followed, axis: Sequence[int], gone: set[int]) -> list[int]:
    return [place for place, unit in enumerate(axis) if followed.units.root(unit) not in gone]


def _kept(followed: Followed, gone: set[int]) -> _Kept:
    """The remaining entries of every tensor that becomes smaller."""
    kept = {}
    for name, axes in followed.labels.items():
        shape = followed.tensors[name].shape
        places = [
            list(range(size)) if axis is None else _staying(followed, axis, gone)
            for axis, size in zip(axes, shape, strict=True)
        ]
        if list(map(len, places)) != list(shape):
            kept[name] = places
    return kept


def _select_inputs(graph: fx.GraphModule, followed: Followed, gone: set[int], kept: _Kept) -> None:
    """Give linear layers that do without most of their inputs the others alone."""
    for use in followed.uses:
        weight = followed.tensors[use.weight]
        if followed.title(use.node) != "linear" or followed.shared(use.weight):
            continue
        rows, columns = kept.get(use.weight, [list(range(size)) for size in weight.shape])
        taken = used(weight, use)[rows][:, columns].any(0).cpu()
        places = taken.nonzero().flatten()
        if not len(places) or len(rows) * (len(columns) - len(places)) < _WORTH:
            continue
        name = followed.add(f"{use.weight}_inputs", places.to(weight.device))
        with graph.graph.inserting_before(use.node):
            selected = graph.graph.create_node("get_attr", name)
            x = graph.graph.call_function(torch.index_select, (use.node.args[0], -1, selected))
        use.node.update_arg(0, x)
        kept[use.weight] = [rows, [columns[place] for place in places.tolist()]]


def _constants(followed: Followed, use: Use, gone: set[int]) -> Tensor:
    """The constant inputs of removed columns; 0 for columns that stay or are zero."""
    removed = torch.tensor([followed.units.root(unit) in gone for unit in use.columns])
    return torch.where(removed, use.values, 0.0).nan_to_num()


def _biased(graph: fx.GraphModule, followed: Followed, use: Use) -> Use:
    """The same product, with a zero bias if it had none."""
    if use.bias is not None:
        return use
    weight = followed.tensors[use.weight]
    zero = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    name = followed.add(use.weight.rpartition("weight")[0] + "bias", nn.Parameter(zero))
    followed.labels[name] = [use.rows]
    with graph.graph.inserting_before(use.node):
        bias = graph.graph.create_node("get_attr", name)
    use.node.args = (*use.node.args[:2], bias, *use.node.args[3:])
    return replace(use, bias=name)


def _summed(weight: Tensor, use: Use) -> Tensor:
    """The sum over a kernel's positions, ``[O, I]``."""
    weight = weight.transpose(0, 1) if use.transposed else weight
    return weight.flatten(2).sum(-1) if weight.dim() > 2 else weight


def _rebuilt(
    graph: fx.GraphModule,
    followed: Followed,
    gone: set[int],
    kept: _Kept,
    shifts: Mapping[Use, Tensor],
) -> fx.GraphModule:
    """The graph with smaller tensors and the matching sizes."""
    values = {name: tensor.detach() for name, tensor in followed.tensors.items()}
    for use, constants in shifts.items():
        assert use.bias is not None
        shift = _summed(values[use.weight].double().cpu(), use) @ constants
        values[use.bias] = (values[use.bias].double().cpu() + shift).to(values[use.weight])
    for counted, units in followed.selections.items():
        numbers = {old: new for new, old in enumerate(_staying(followed, units, gone))}
        places = [numbers.get(old, 0) for old in values[counted].tolist()]
        values[counted] = values[counted].new_tensor(places)
    for node, number, place, units in followed.resized:
        left: Any = len(_staying(followed, units, gone))
        if place is not None:
            sizes = list(cast("Sequence[Any]", node.args[number]))
            sizes[place], left = left, sizes
        node.update_arg(number, left)
    for node in graph.graph.nodes:
        name = followed.held(node)
        if name is not None:
            node.target = name  # the first name, if a tensor has several
    parts = {str(node.target): graph.get_submodule(str(node.target)) for node in _parts(graph)}
    root: dict[str, Tensor | nn.Module] = {**parts}
    for name, value in values.items():
        part = _part(value, kept.get(name)).clone()
        root[name] = nn.Parameter(part) if isinstance(followed.tensors[name], nn.Parameter) else part
    small = fx.GraphModule(root, graph.graph)
    small.graph.lint()
    return small


def _parts(graph: fx.GraphModule) -> list[fx.Node]:
    """Nodes that hold subgraphs, of code without gradients or in another precision."""
    modules = dict(graph.named_modules())
    return [node for node in graph.graph.nodes if node.op == "get_attr" and node.target in modules]


def _part(value: Tensor, places: Sequence[list[int]] | None) -> Tensor:
    """The entries of a tensor at some indices of each axis."""
    for axis, here in enumerate(places or ()):
        value = value.index_select(axis, torch.tensor(here, device=value.device))
    return value


def _smaller(
    posterior: Factorised,
    named: Mapping[str, str | None],
    followed: Followed,
    kept: _Kept,
    shifts: Mapping[Use, Tensor],
) -> Factorised:
    """The marginal posterior of each remaining weight."""
    means, stds, masks = posterior.mean(), posterior.std(), posterior.kept()
    given = {inside: name for name, inside in named.items() if inside is not None}
    mean = {inside: means[name].detach() for inside, name in given.items()}
    variance = {inside: stds[name].detach().square() for inside, name in given.items()}
    keep = {inside: masks[name] for inside, name in given.items()}
    for use, constants in shifts.items():
        if use.weight not in mean or use.bias is None:
            continue
        like = mean[use.weight]
        if use.bias not in mean:
            mean[use.bias] = followed.tensors[use.bias].detach().to(like)
            variance[use.bias] = torch.zeros_like(mean[use.bias])
            keep[use.bias] = torch.zeros_like(mean[use.bias], dtype=torch.bool)
        at = constants.to(like)
        mean[use.bias] = mean[use.bias] + _summed(like, use) @ at
        variance[use.bias] = variance[use.bias] + _summed(variance[use.weight], use) @ at.square()
        keep[use.bias] = keep[use.bias] | (mean[use.bias] != 0)
    leaves = {}
    for name, each in mean.items():
        std, mask = (_part(value, kept.get(name)) for value in (variance[name].sqrt(), keep[name]))
        leaves[name] = DiagonalGaussian(_part(each, kept.get(name)), std, keep=mask)
    return Factorised(leaves)


def _dense(followed: Followed) -> dict[str, str]:
    """Why axes of parameters were left as they are, where an operation is to blame."""
    reasons = {}
    for name, axes in followed.labels.items():
        found = {followed.units.reason(unit) for axis in axes for unit in axis or ()}
        blamed = sorted(found - {None, INPUT, OUTPUT}, key=str)
        if blamed:
            reasons[name] = "; ".join(map(str, blamed))
    return reasons
