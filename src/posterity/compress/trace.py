"""A model at a posterior's means, as the graph that ``torch.export`` gives."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export

from posterity.names import inner
from posterity.posterior import Factorised
from posterity.torch_private import tree_leaves, tree_map

# Sums in another order: this many units in the last place of the largest output.
_ROUNDING = 1e4


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
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of copies of exported graphs
        plain = copy.deepcopy(found).eval()
    for p in plain.parameters():  # layers whose weights want no gradient are fused, which no graph shows
        p.requires_grad_(p.is_floating_point())
    if posterior is not None:
        plain.load_state_dict(posterior.check(found).mean(), strict=False)
    return plain


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The graph of a model for batches of any size, if it can serve them.

    Raises:
        ValueError: The model does not take these inputs, or torch.export cannot follow it.

    Example:
        >>> exported(nn.Linear(3, 2).eval(), (torch.ones(4, 3),), {}).module()(torch.ones(7, 3)).shape
        torch.Size([7, 2])
    """
    if any(isinstance(each, Tensor) and not each.numel() for each in tree_leaves((args, kwargs))):
        raise ValueError("the example has an empty tensor: give a batch of at least one input")
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise ValueError(f"the model does not take this example: {_first_line(error)}") from error
    args, kwargs = tree_map(_several, (args, kwargs))
    free: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Tensor) and each.dim():
            free[each] = {0: Dim.AUTO}
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it traces
            program = export(model, args, kwargs, dynamic_shapes=free, strict=False)
    except Exception as error:
        raise ValueError(f"torch.export cannot follow the model: {_first_line(error)}") from error
    for p in program.parameters():
        p.requires_grad_(False)
    # A file would hold these: of a slice, all data that it is a slice of; and the paths of this machine.
    program.example_inputs = tree_map(_blank, (args, kwargs))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
        node.meta.pop("from_node", None)
    return program


def compare(found: Any, want: Any) -> None:
    """Refuse to hand out a net with other outputs.

    Example:
        >>> compare(torch.ones(2), torch.ones(2) + 1e-6)
    """
    for one, other in zip(tree_leaves(found), tree_leaves(want), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point():
            scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max()) if other.numel() else 0.0
            error = float((one - other).where(one != other, 0.0).abs().max()) if other.numel() else 0.0
            if not error <= _ROUNDING * torch.finfo(other.dtype).eps * (1.0 + scale):
                raise RuntimeError(
                    f"the smaller net's outputs are off by {error:g}: report the model, and use the large one"
                )


def _several(x: Any) -> Any:
    """Two examples in place of one, which would fix the size of the batch."""
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and len(x) == 1 else x


def _blank(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, Tensor) else x


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
