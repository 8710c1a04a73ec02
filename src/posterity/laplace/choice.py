"""The weights that get a posterior: those of the last layer, of the whole net, or picked by a filter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from posterity.curvature.fisher import chosen
from posterity.inputs import Inputs, Pick, called
from posterity.names import NameFilter, select

# BatchNorm2d, LayerNorm, RMSNorm, …, also those of other libraries, by the name of a class or its base.
_NORM = re.compile(r"Norm(\d+[dD])?$")


def picked(model: nn.Module, names: NameFilter) -> dict[str, Tensor]:
    """The trainable parameters that a filter picks; the pattern ``"*"`` leaves out norm layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> list(picked(net, "*")), list(picked(net, ["*", "1.bias"]))
        (['0.weight', '0.bias'], ['0.weight', '0.bias', '1.bias'])
    """
    if callable(names):
        return chosen(model, names)
    patterns = [names] if isinstance(names, str) else list(names)
    if "*" not in patterns:
        return chosen(model, patterns)
    params = chosen(model, "*")
    norms = {p for module in model.modules() if _is_norm(module) for p in module.parameters()}
    others = [each for each in patterns if each != "*"]
    wanted = select(params, others) | {name for name, p in params.items() if p not in norms}
    if not wanted:
        raise ValueError("the model has norm layers only, which '*' leaves out: name them by names=")
    return {name: p for name, p in params.items() if name in wanted}


def last_layer(model: nn.Module, x: Inputs, output: Pick | None) -> dict[str, Tensor]:
    """The trainable parameters of the last layer that runs on a batch.

    A layer is a module that owns a weight with two or more dimensions and is not a norm; a scale or a
    temperature behind it does not count. The last one is found by running the model: modules may be
    registered in any order, and some may not affect the output.
    """
    params = chosen(model, "*")
    uses = _Uses(params)
    with torch.enable_grad():
        with uses:
            out = called(model, x, output)
        reached = torch.autograd.grad(out.sum(), list(params.values()), allow_unused=True)
    used = {name for name, grad in zip(params, reached, strict=True) if grad is not None}
    for name in reversed(uses.order):
        for module in model.modules():
            own = {id(p): p for p in _own(module)}
            layer = {each: p for each, p in params.items() if each in used and id(p) in own}
            if name in layer and not _is_norm(module) and any(p.dim() > 1 for p in layer.values()):
                return layer
    raise ValueError(
        "no layer with trainable weights ran, other than norm layers: choose weights by names=, such "
        "as names='*'"
    )


@final
class _Uses(TorchFunctionMode):
    """Records, in order, which parameters torch's operations are called with."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self.order: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.order += [self._names[id(each)] for each in _flat((args, kwargs)) if id(each) in self._names]
        return func(*args, **kwargs)


def _flat(value: Any) -> Iterator[Any]:
    """An operation's arguments, without the lists, tuples and dicts around them."""
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flat(each)
    else:
        yield value


def _own(module: nn.Module) -> list[Tensor]:
    """A module's own parameters, including the originals of a parametrisation such as a weight norm."""
    own: list[Tensor] = [*module.parameters(recurse=False)]
    if parametrize.is_parametrized(module):
        own += cast(nn.Module, module.parametrizations).parameters()
    return own


def _is_norm(module: nn.Module) -> bool:
    return any(_NORM.search(kind.__name__) for kind in type(module).__mro__)
