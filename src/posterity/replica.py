"""A second module structure around the same weights: running it never changes the model.

To run a module under other weights, torch swaps them *inside* the module; mode and buffers belong to modules
too. Threads can share one model only if each runs its own structure. A replica holds

- the model's own parameters, not copies of them;
- copies of its buffers, and of other tensors that are attributes;
- copies of its modules, lists, dicts and sets, in which everything leads to the replica and not back to the
  model: references from a module to itself or another, lists of modules, bound methods, hooks.

It costs a few microseconds per module, so one is made per call, and never is out of date.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from posterity import buffers
from posterity.sharding import is_sharded
from posterity.torch_private import wrap_script

_ORIGIN = "_posterity_origin"
# What leads to no module.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})


def replica(model: nn.Module) -> nn.Module:
    """A replica in the model's own mode.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> twin = replica(net)
        >>> twin[0] is net[0], twin[0].weight is net[0].weight
        (False, True)
        >>> _ = twin(torch.randn(4, 2))
        >>> net[1].num_batches_tracked, twin[1].num_batches_tracked
        (tensor(0), tensor(1))
    """
    return _Replication(_parts(model)).module(model)


def evaluating(model: nn.Module) -> nn.Module:
    """A replica in evaluation mode.

    Example:
        >>> net = nn.Dropout()
        >>> evaluating(net).training, net.training
        (False, True)
    """
    parts = _parts(model)
    if not any(module.training for module in parts):
        return _Replication(parts).module(model)
    if not any(map(_has_own_modes, parts)):
        return _Replication(parts, evaluating=True).module(model)
    # Its train() may do more, such as merge adapters into weights: it gets weights that it may change.
    values = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in model.parameters()}
    return _Replication(parts, values).module(model).eval()


def origin(model: nn.Module) -> nn.Module:
    """The user's module of which a replica was made; any other module itself.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> origin(evaluating(replica(net))) is net
        True
    """
    return cast(nn.Module, model.__dict__.get(_ORIGIN, model))


def _parts(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, faster than ``modules()``; raises if it has DTensors."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in [*waiting.pop()._modules.values()]:
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    if any(is_sharded(p) for module in found.values() for p in module._parameters.values() if p is not None):
        raise TypeError(
            "the model is sharded (it has DTensors): call model.unshard() in all processes first, or "
            "pass an unsharded model"
        )
    return [*found.values()]


def _has_own_modes(module: nn.Module) -> bool:
    kind = type(module)
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and (kind.train is not nn.Module.train or kind.eval is not nn.Module.eval)


@final
class _Replication:
    """Copies of one model's parts, each made once.

    Args:
        parts: The model's modules.
        weights: Replacements of its parameters by id, if any.
        evaluating: Whether the replica is in evaluation mode, whatever the model's mode.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        weights: Mapping[int, nn.Parameter] | None = None,
        *,
        evaluating: bool = False,
    ) -> None:
        self._parts = {id(module): module for module in parts}
        self._weights, self._evaluating = weights, evaluating
        # By the id of the original, which is kept alive here: a forward pass elsewhere may replace it in the
        # meantime.
        self._made: dict[int, Any] = {}
        self._held: list[object] = []
        own = {id(b): b for part in parts if part._buffers for b in part._buffers.values() if b is not None}
        if own:
            self._held += own.values()
            kept = buffers.copied({key: b for key, b in own.items() if buffers.is_writable(b)})
            self._made |= own | kept

    def _note(self, value: object, made: Any) -> Any:
        self._made[id(value)] = made
        self._held.append(value)
        return made

    def made(self, value: Any) -> Any:
        """The value's counterpart in the replica."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is nn.Parameter:
            return value if self._weights is None else self._weights.get(id(value), value)
        if id(value) in self._made:
            return self._made[id(value)]
        for base, make in _KINDS:
            if isinstance(value, base):
                return make(self, value)
        return self._holder(value)

    def module(self, module: nn.Module) -> nn.Module:
        """A replica of one module."""
        if isinstance(module, weakref.ProxyTypes):
            return cast(nn.Module, weakref.proxy(self.made(module.modules.__self__)))
        if isinstance(module, torch.jit.ScriptModule):
            return self._script(module)
        twin: nn.Module = self._note(module, object.__new__(type(module)))
        own = twin.__dict__ = module.__dict__.copy()
        for key, value in own.items():
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS and not value:
                own[key] = kind()
            elif key == "_parameters" and self._weights is None:
                own[key] = value.copy()
            elif key.endswith("_hooks"):
                own[key] = kind((number, self._hook(hook)) for number, hook in value.copy().items())
            elif key != _ORIGIN:
                own[key] = self.made(value)
        own.setdefault(_ORIGIN, module)
        if self._evaluating and "training" in own and id(module) in self._parts:
            own["training"] = False
        if "_compiled_call_impl" in own:  # what torch.compile makes, it would make again for each replica
            own["_compiled_call_impl"] = None
        if "_orig_mod" in own["_modules"]:
            own["forward"] = own["_modules"]["_orig_mod"].__call__
        return twin

    def _script(self, module: torch.jit.ScriptModule) -> nn.Module:
        twin = copy(module)
        for name, part in module.named_children():
            twin._c.setattr(name, self.made(part)._c)
        for name, buffer in module.named_buffers(recurse=False):
            twin._c.setattr(name, self.made(buffer))
        twin = self._note(module, wrap_script(twin._c))
        twin.__dict__[_ORIGIN] = origin(module)
        if self._evaluating:
            twin.training = False
        return cast(nn.Module, twin)

    def _hook(self, hook: Any) -> Any:
        """The same hook for the replica's modules; its owner may collect things in it."""
        if isinstance(hook, MethodType):
            return self._method(hook) if id(hook.__self__) in self._parts else hook
        return self.made(hook) if isinstance(hook, FunctionType | partial) else hook

    def _method(self, method: MethodType) -> Any:
        own = method.__self__
        return MethodType(method.__func__, self.made(own)) if isinstance(own, nn.Module) else method

    def _function(self, function: FunctionType) -> Any:
        """A function whose closure has the replica's modules instead of the model's; everything else is
        shared."""
        cells = tuple(map(self._cell, function.__closure__ or ()))
        if cells == (function.__closure__ or ()):
            return self._note(function, function)
        code, names = function.__code__, function.__globals__
        made = FunctionType(code, names, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        return self._note(function, made)

    def _cell(self, cell: CellType) -> CellType:
        try:
            own = self._part(cell.cell_contents)
        except ValueError:  # it is empty
            return cell
        return cell if own is cell.cell_contents else CellType(own)

    def _part(self, value: Any) -> Any:
        """The replica's counterpart of a module or of its method; any other value unchanged."""
        module = value.__self__ if isinstance(value, MethodType) else value
        return self.made(value) if id(module) in self._parts else value

    def _partial(self, call: partial[Any]) -> Any:
        args, kwargs = map(self._part, call.args), {k: self._part(v) for k, v in call.keywords.items()}
        return self._note(call, partial(self.made(call.func), *args, **kwargs))

    def _tensor(self, value: Tensor) -> Tensor:
        return value if value.requires_grad else cast(Tensor, self._note(value, value.clone()))

    def _reference(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return weakref.ref(self.made(target)) if isinstance(target, nn.Module) else value

    def _list(self, value: list[Any]) -> Any:
        made = self._note(value, copy(value))
        made[:] = map(self.made, made)
        return made

    def _dict(self, value: dict[Any, Any]) -> Any:
        made = self._note(value, value.copy() if type(value) is dict else copy(value))
        if any(isinstance(key, nn.Module) for key in made):
            items = [(self.made(key), each) for key, each in made.items()]
            made.clear()
            made.update(items)
        for key, each in made.items():
            if type(each) not in _PLAIN:
                made[key] = self.made(each)
        return made

    def _set(self, value: set[Any]) -> Any:
        made = self._note(value, copy(value))
        parts = [*map(self.made, made)]
        made.clear()
        made.update(parts)
        return made

    def _deque(self, value: deque[Any]) -> Any:
        made = self._note(value, copy(value))
        parts = [*map(self.made, made)]
        made.clear()
        made.extend(parts)
        return made

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        if _PLAIN.issuperset(map(type, value)):
            return value
        parts = [self.made(each) for each in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _holder(self, value: Any) -> Any:
        """Any other object, copied if it has modules among its attributes."""
        held = {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})
        found = {key: each for key, each in held.copy().items() if _holds(each)}
        if not found:
            return self._note(value, value)
        twin = self._note(value, copy(value))
        for key, each in found.items():
            twin.__dict__[key] = self.made(each)
        return twin


# Rebuilding functions by type of value.
_KINDS: tuple[tuple[Any, Callable[[_Replication, Any], Any]], ...] = (
    (nn.Module, _Replication.module),
    (dict, _Replication._dict),
    (tuple, _Replication._tuple),
    (list, _Replication._list),
    (set, _Replication._set),
    (deque, _Replication._deque),
    (Tensor, _Replication._tensor),
    (MethodType, _Replication._method),
    (FunctionType, _Replication._function),
    (partial, _Replication._partial),
    (weakref.ref, _Replication._reference),
)


def _holds(value: Any) -> bool:
    """Whether it is a module, a module's method, or contains one."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    parts: Iterable[Any] = value if isinstance(value, list | tuple | set) else (value,)
    return any(isinstance(getattr(each, "__self__", each), nn.Module) for each in parts)
