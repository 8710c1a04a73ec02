"""Sparse matrices (CSR), in the layers where they are faster on this machine.

Removing single weights leaves no dead units, so a net keeps its shape. A product with a large, very sparse
matrix can still be faster if it skips the zeros. Whether it is depends on the machine, its threads and the
batch: every layer is timed both ways, and keeps the faster one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from posterity.arguments import MODULE, NUMBER, takes
from posterity.compress.cost import refuse_seconds
from posterity.compress.functional import callable_graph
from posterity.compress.trace import at_means, compare, exported
from posterity.torch_private import tree_leaves

# Share of zeros above which a layer is timed.
_SPARSE = 0.5
# CSR must take less than this share of the dense product's time: smaller differences are noise.
_FASTER = 0.9


@final
@dataclass(frozen=True)
class SparseNet:
    """A net with CSR matrices where these are faster.

    Attributes:
        module: The net, for evaluation. Its CSR weights keep their names, and cannot be trained.
        milliseconds: By weight that was timed: the times of the dense and of the sparse product.
        weights: The names of CSR weights.
    """

    module: nn.Module
    milliseconds: dict[str, tuple[float, float]]
    weights: tuple[str, ...]


@takes(model=MODULE, seconds=NUMBER)
def sparse_layers(model: nn.Module, example: Any, /, *, seconds: float = 0.05, **kwargs: Any) -> SparseNet:
    """Store the weights of linear layers as CSR where that is faster, for batches like the example.

    Files of ``export`` cannot hold CSR: call this where the net is served, after loading a file.

    Args:
        model: Any module that ``torch.export`` supports, with pruned weights, such as the module of
            :func:`~posterity.compress.shrink`; it is not changed.
        example: Its first input, a batch as it will be served; a tuple of several inputs.
        seconds: How long to time each product.
        kwargs: Keyword arguments of the model.

    Example:
        >>> net = nn.Linear(2000, 2000)
        >>> with torch.no_grad():
        ...     _ = net.weight[5:].zero_()
        >>> sparse_layers(net, torch.randn(1, 2000)).weights
        ('weight',)
    """
    refuse_seconds(seconds)
    args = example if isinstance(example, tuple) else (example,)
    net = exported(at_means(model), args, kwargs).module(check_guards=False)
    with torch.no_grad():
        want = net(*args, **kwargs)
        net = callable_graph(net, *args, *kwargs.items(), gives=want)
        seen = _Inputs(net)
        seen.run(*tree_leaves((args, kwargs)))
        milliseconds = {
            name: (_time(F.linear, x, weight, bias, seconds), _time(product, x, _csr(weight), bias, seconds))
            for name, (_, x, weight, bias) in seen.layers.items()
            if x.dim() > 1 and float((weight == 0).double().mean()) >= _SPARSE
        }
        names = tuple(name for name, (dense, csr) in milliseconds.items() if csr < _FASTER * dense)
        for name in names:
            seen.layers[name].node.target = product
            path, _, last = name.rpartition(".")
            csr = _csr(seen.layers[name].weight)
            setattr(net.get_submodule(path), last, nn.Parameter(csr, requires_grad=False))
        net.recompile()
        compare(net(*args, **kwargs), want)
    return SparseNet(net, milliseconds, names)


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of inputs ``[..., I]`` with a CSR weight ``[O, I]``.

    Example:
        >>> product(torch.ones(2, 4, 3), _csr(torch.eye(3))).shape
        torch.Size([2, 4, 3])
    """
    columns = input.flatten(0, -2).t()
    out = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return torch.unflatten(out.t(), 0, input.shape[:-1])


class _Layer(NamedTuple):
    node: fx.Node
    input: Tensor
    weight: Tensor
    bias: Tensor | None


class _Inputs(fx.Interpreter):
    """A run that keeps the inputs of linear layers whose weights are not shared."""

    def __init__(self, net: fx.GraphModule) -> None:
        super().__init__(net)
        self.layers: dict[str, _Layer] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation."""
        if n.target is F.linear:
            (x,), named = self.fetch_args_kwargs_from_env(n)
            weight = n.kwargs["weight"]
            if isinstance(weight, fx.Node) and weight.op == "get_attr" and len(weight.users) == 1:
                self.layers[str(weight.target)] = _Layer(n, x, named["weight"], named.get("bias"))
        return super().run_node(n)


def _csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch, about its support of CSR
        return weight.detach().to_sparse_csr()


def _time(function: Callable[..., Tensor], *arguments: Any) -> float:
    """Median time in milliseconds; the last argument is the time to run for, in seconds."""
    timer = Timer("f(*x)", globals={"f": function, "x": arguments[:-1]})
    return 1e3 * timer.blocked_autorange(min_run_time=arguments[-1]).median
