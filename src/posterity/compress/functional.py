"""Graphs of aten operations rewritten as calls of torch's functions, as in a hand-written net.

``torch.export`` gives calls of aten. Their results are the same, but our layers do not see them, so rules
that need a layer's inputs could not train such a net further, and each call costs a microsecond more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from posterity.compress.trace import fixed_inputs
from posterity.torch_private import forget_tracer

_Arguments = dict[str, Any]


def _same(named: _Arguments) -> _Arguments:
    return named


def _without_cudnn(named: _Arguments) -> _Arguments:
    return {name: value for name, value in named.items() if not name.startswith("cudnn")}


def _embedding(named: _Arguments) -> _Arguments:
    padding = named.pop("padding_idx", -1)  # in aten -1 means none, in F the last row
    return {"input": named.pop("indices"), "padding_idx": None if padding == -1 else padding, **named}


# By aten operation: the function, and a map from aten's named arguments to its own.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[_Arguments], _Arguments]]] = {
    "linear": (F.linear, _same),
    "conv1d": (F.conv1d, _same),
    "conv2d": (F.conv2d, _same),
    "conv3d": (F.conv3d, _same),
    "batch_norm": (F.batch_norm, _without_cudnn),
    "layer_norm": (F.layer_norm, _without_cudnn),
    "group_norm": (F.group_norm, _without_cudnn),
    "embedding": (F.embedding, _embedding),
    "relu": (torch.relu, lambda named: {"input": named["self"]}),
    "max_pool2d": (F.max_pool2d, lambda named: {"input": named.pop("self"), **named}),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, _same),
}


def as_functions(graph: fx.Graph) -> None:
    """Replace aten calls by function calls where one exists, in place.

    Example:
        >>> from posterity.compress.trace import exported
        >>> net = exported(torch.nn.Linear(3, 2), (torch.ones(4, 3),), {}).module()
        >>> as_functions(net.graph)
        >>> [node.target is F.linear for node in net.graph.nodes if node.op == "call_function"]
        [True]
    """
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.op != "call_function":
            continue
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and name in _FUNCTIONS:
            function, arguments = _FUNCTIONS[name]
            named = dict(zip([each.name for each in schema.arguments], node.args, strict=False))
            named = arguments({**named, **node.kwargs})
            node.target, node.args = function, (named.pop("input"),) if "input" in named else ()
            node.kwargs = named


def first_size(x: Tensor, size: int) -> None:
    """Refuse an input of another size along its first axis, if the graph is valid only for one size.

    Example:
        >>> first_size(torch.ones(4, 3), 4)
    """
    if has_torch_function((x,)):  # from a tracer, which cannot follow branches
        handle_torch_function(first_size, (x,), x, size)
    elif x.shape[0] != size:
        raise ValueError(
            f"this net takes only inputs of {size} along the first axis, not {x.shape[0]}, since its model "
            "turns that size into a number, as len(x) does: use x.shape[0], or an example of this size"
        )


def _refuse_sizes(graph: fx.Graph) -> None:
    """Add checks of inputs whose first axis has a fixed size in the graph."""
    last = graph.find_nodes(op="placeholder")[-1:]
    for node in fixed_inputs(graph):
        with graph.inserting_after(last[0]):
            graph.call_function(first_size, (node, int(node.meta["val"].shape[0])))


def callable_graph(net: fx.GraphModule, *arguments: Any, gives: Any) -> fx.GraphModule:
    """A ``torch.export`` graph as a net in evaluation mode that calls functions and is called directly.

    Args:
        net: The net; its graph is changed.
        arguments: Arguments of a call.
        gives: The result of that call.

    Example:
        >>> from posterity.compress.trace import exported
        >>> x = torch.ones(4, 3)
        >>> net = exported(torch.nn.Linear(3, 2), (x,), {}).module(check_guards=False)
        >>> callable_graph(net, x, gives=net(x))(x).shape
        torch.Size([4, 2])
    """
    as_functions(net.graph)
    _refuse_sizes(net.graph)
    if all(isinstance(each, Tensor) for each in (gives, *arguments)):
        output = net.graph.output_node()  # packing tensors would take longer than a small net
        output.args = (cast("tuple[fx.Node]", output.args[0])[0],)
        net.graph.set_codegen(fx.graph.CodeGen())
    forget_tracer(net.graph)
    return fx.GraphModule(net, net.graph).eval()
