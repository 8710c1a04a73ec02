"""A model at a posterior's means, as a graph from ``torch.export``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export

from posterity.buffers import Keeper
from posterity.names import inner
from posterity.posterior import Factorised
from posterity.torch_private import tree_leaves, tree_map

# Tolerance for sums in another order: units in the last place of the largest output, and an upper limit.
_ROUNDING, _HALF = 1e4, 0.1


def at_means(model: nn.Module, posterior: Factorised | None = None) -> nn.Module:
    """A copy of a model for evaluation, at the posterior's means if there is one.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"bias": DiagonalGaussian(torch.ones(2), 0.1)})
        >>> at_means(nn.Linear(3, 2), q).bias.tolist()
        [1.0, 1.0]
    """
    found = inner(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from torch, about copies of exported graphs
        plain = copy.deepcopy(found).eval()
    for p in plain.parameters():  # layers without gradients are fused, which hides them from the graph
        p.requires_grad_(p.is_floating_point())
    if posterior is not None:
        plain.load_state_dict(posterior.check(found).mean(), strict=False)
    return plain


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The graph of a model, for batches of any size if possible.

    Raises:
        ValueError: The model does not accept these inputs, or torch.export cannot follow it.

    Example:
        >>> exported(nn.Linear(3, 2).eval(), (torch.ones(4, 3),), {}).module()(torch.ones(7, 3)).shape
        torch.Size([7, 2])
    """
    if any(isinstance(each, Tensor) and not each.numel() for each in tree_leaves((args, kwargs))):
        raise ValueError("the example has an empty tensor: pass a batch of at least one input")
    try:
        outputs(model, args, kwargs)
    except Exception as error:
        raise ValueError(f"the model does not take this example: {_first_line(error)}") from error
    program = None
    for several in _several(model, args, kwargs):
        program = _exported(model, *several)
        if all(
            len(node.meta["val"]) == 1
            for node in fixed_inputs(program.graph, program.graph_signature.user_inputs)
        ):
            break
        program = None  # the graph depends on the number of examples
    program = _exported(model, args, kwargs) if program is None else program
    for p in program.parameters():
        p.requires_grad_(False)
    # Files would contain these: the example's data (for a slice, the whole tensor), and paths of this
    # machine.
    program.example_inputs = tree_map(_blank, program.example_inputs)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
        node.meta.pop("from_node", None)
    return program


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    free: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Tensor) and each.dim() and len(each) > 1:
            free[each] = {0: Dim.AUTO}
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch, about the traced code
            return export(model, args, kwargs, dynamic_shapes=free, strict=False)
    except Exception as error:
        raise ValueError(f"torch.export cannot follow the model: {_first_line(error)}") from error


def is_fixed(node: fx.Node, dim: int) -> bool:
    """Whether a size is the same for batches of all sizes."""
    return str(node.meta["val"].shape[dim]).isdecimal()  # a specialised symbol is a number, but no int


def fixed_inputs(graph: fx.Graph, names: Collection[Any] | None = None) -> list[fx.Node]:
    """The inputs whose first axis must have the example's size; only those of some names if given."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if (names is None or node.name in names)
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].dim()
        and is_fixed(node, 0)
    ]


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """A context after which a module's buffers are restored."""
    keeper = Keeper(module)
    keeper.keep()
    try:
        yield
    finally:
        keeper.restore()


def outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module's outputs; its buffers are not changed.

    Example:
        >>> outputs(nn.BatchNorm1d(3), (torch.ones(4, 3),), {}).shape
        torch.Size([4, 3])
    """
    with torch.no_grad(), buffers_kept(module):
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, module(*args, **kwargs))


def compare(found: Any, want: Any) -> None:
    """Raise if outputs differ by more than rounding.

    Example:
        >>> compare(torch.ones(2), torch.ones(2) + 1e-6)
    """
    error = distance(found, want)
    if error:
        raise RuntimeError(
            f"the smaller net's outputs are off by {error:g}: report the model, and use the large one"
        )


def distance(found: Any, want: Any) -> float:
    """The largest difference of outputs; 0 if it is within rounding.

    Example:
        >>> distance([torch.ones(2), None], [torch.ones(2) + 1e-6, None])
        0.0
    """
    for one, other in zip(tree_leaves(found), tree_leaves(want), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point() and other.numel():
            scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
            error = float((one - other).where(one != other, 0.0).abs().max())
            if not error <= min(_ROUNDING * torch.finfo(other.dtype).eps, _HALF) * (1.0 + scale):
                return error
    return 0.0


def _several(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Two copies of a single example, which would fix the batch size, if the model accepts them."""
    found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()]
    if not found or max(map(len, found)) > 1:
        return
    for more in (found, found[:1]):  # other tensors may be settings
        ids = {id(each) for each in more}
        twice = tree_map(lambda x, ids=ids: torch.cat([x, x]) if id(x) in ids else x, (args, kwargs))
        with suppress(Exception):  # the first axis is not a batch
            outputs(model, *twice)
            yield twice


def _blank(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, Tensor) else x


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
