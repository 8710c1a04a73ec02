"""Backward passes of watched layers: reports to listeners, and gradients for the weights.

Autograd delivers a known layer's gradient to its weight's alias, never to the weight: a gradient that reaches
the weight itself was reported by no layer, and is refused by the parameter's name. After each backward pass
the gradients of aliases are delivered to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from posterity.layers.calls import Listener, Part
from posterity.layers.embedding import Rows
from posterity.layers.stacks import inside, samples_axis
from posterity.layers.watched import Watched
from posterity.torch_private import DisableTorchFunction, any_autocast_enabled, has_hooks, hooks_of

Function: TypeAlias = Callable[..., Any]
_UNREPORTED = "is used by an operation that is not a known layer"


@final
class Passes:
    """The weights that are watched inside an :class:`Intercept`, and the backward passes there.

    Attributes:
        watched: Watched weights, by id.
        listeners: The listeners that watch them.
        reasons: Why a layer reports nothing, by the parameter's name.
        edgeless: Whether a layer has no edge to its weight's alias.
        aranges: By id, the results of torch.arange() in this forward pass.
        rows: The rows of embeddings, by the id of their output.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.watched: dict[int, Watched] = {}
        self._memory: dict[int, list[Watched]] = {}  # the same, by memory address
        self._unreported: dict[int, tuple[Watched, str]] = {}
        self.reasons: dict[str, str] = {}
        self.edgeless = False
        self.aranges: dict[int, Tensor] = {}
        self.rows: dict[int, Rows] = {}

    # Listeners.

    def listen(self, listener: Listener, parts: Iterable[tuple[Tensor, Part]]) -> None:
        """From here on, layers that use these tensors report to a listener."""
        self.listeners.append(listener)
        self._memory.clear()
        for tensor, part in parts:
            watched = self.watched.get(id(tensor))
            if watched is None:
                watched = Watched(tensor, tensor.detach().requires_grad_(), {})
                self.watched[id(tensor)] = watched
                hooks_of(tensor)[self] = partial(self.unreport, watched, _UNREPORTED)
            watched.parts[listener] = part

    def leave(self, listener: Listener, failed: bool) -> None:
        """Remove a listener, and make the last checks unless something else has failed."""
        try:
            if failed:
                self._drop()
            else:
                self._end_pass()
        finally:
            self.listeners.remove(listener)
            self._memory.clear()
            if any_autocast_enabled():
                torch.clear_autocast_cache()  # it would keep casts of removed aliases
            for key, (tensor, _, parts) in list(self.watched.items()):
                parts.pop(listener, None)
                if not parts:
                    del self.watched[key]
                    hooks_of(tensor).pop(self, None)

    def find(self, tensor: Tensor | None) -> Watched | None:
        """The watched part of a layer's weight: all of it, some rows, or one sample."""
        found = self.watched.get(id(tensor))
        if found is not None or tensor is None:
            return found
        axis, own = samples_axis(tensor), inside(tensor)
        found = self.watched.get(id(own))
        if found is not None or not own.requires_grad:
            return found
        if not self._memory:
            for each in self.watched.values():
                self._memory.setdefault(each.tensor.untyped_storage().data_ptr(), []).append(each)
        there = self._memory.get(own.untyped_storage().data_ptr(), ())
        return next((part for each in there if (part := each.part(own, axis)) is not None), None)

    def unreport(self, watched: Watched, reason: str, _: Tensor) -> None:
        """The hook on a watched tensor: no known layer sends it a gradient."""
        self._unreported[id(watched.tensor)] = watched, reason

    # Backward passes.

    def backward(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of backward(), whose gradients reach the aliases, and then the weights."""
        kept: list[tuple[Tensor, Tensor | None]] = []
        if (given := kwargs.get("inputs")) is not None:
            given = (given,) if isinstance(given, Tensor) else tuple(given)
            inputs = [*self._aliases(given), *given]
            more = self._more(args[0], inputs)
            kept = [(leaf, leaf.grad) for leaf in more]
            kwargs = {**kwargs, "inputs": [*inputs, *more]}
        with self._one_pass(bool(kwargs.get("retain_graph"))):
            for leaf, _ in kept:
                leaf.grad = None
            try:
                return func(*args, **kwargs)
            finally:
                for leaf, grad in kept:
                    leaf.grad = grad
                if given is not None:
                    self._keep_grads(given)

    def grad(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Gradients of watched inputs are those of their aliases."""
        outputs, given = args
        watched = [self.watched.get(id(each)) for each in given]
        inputs = [*self._aliases(given), *(each.tensor for each in watched if each)]
        may_lack = kwargs.get("allow_unused") or kwargs.get("materialize_grads")
        with self._one_pass():
            inputs += self._more(outputs, inputs)
            grads = func(outputs, inputs, **{**kwargs, "allow_unused": True})
            unreported = iter(grads[len(given) :])
            found: list[Tensor | None] = []
            for grad, each in zip(grads, watched, strict=False):
                parts = [grad] if each is None else [grad, each.alias.grad, next(unreported)]
                parts = [part for part in parts if part is not None]
                found.append(sum(parts[1:], parts[0]) if parts else None)
            self._keep_grads(())
        if not may_lack and any(each is None for each in found):
            raise RuntimeError(
                "one of the tensors to differentiate was not used: pass allow_unused=True if that is intended"
            )
        return tuple(found)

    def _keep_grads(self, inputs: Sequence[Any]) -> None:
        """Drop the gradients of all aliases except those of some inputs."""
        kept = set(map(id, inputs))
        for key, watched in self.watched.items():
            if key not in kept:
                watched.alias.grad = None

    @contextmanager
    def _one_pass(self, keep_graph: bool = True) -> Iterator[None]:
        """A context for a backward pass; if the pass fails, everything from it is dropped."""
        try:
            yield
        except BaseException:
            self._drop()
            raise
        self._end_pass(keep_graph)

    def _more(self, outputs: Any, inputs: Sequence[Any]) -> list[Tensor]:
        """The other leaves that a backward pass to some inputs must reach, so that all layers report.

        A layer whose gradient comes from a listener has no edge to its weight's alias, and rows that all
        examples share are a leaf.
        """
        if not (self.edgeless or self.rows):
            return []
        there = set(map(id, inputs))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return [leaf for leaf in leaves(outputs) if id(leaf) not in there]

    def _aliases(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of a restricted backward pass, with aliases in place of watched weights."""
        found = [self.watched.get(id(each)) for each in inputs]
        for listener in self.listeners:
            listener.only = {each.parts[listener].name for each in found if each and listener in each.parts}
        return [each if own is None else own.alias for each, own in zip(inputs, found, strict=True)]

    def _end_pass(self, keep_graph: bool = True) -> None:
        """Refuse parameters that no layer reported, let listeners sum reports, and deliver gradients."""
        unreported = list(self._unreported.values())
        self._forget()
        made = [watched for watched in self.watched.values() if watched.alias.grad is not None]
        for watched in made:
            for listener, part in watched.parts.items():
                if part.name not in listener.reported:  # by a layer whose hook was lost
                    unreported.append((watched, _UNREPORTED))
        try:
            for listener in self.listeners:
                reasons: dict[str, list[str]] = {}
                for watched, reason in unreported:
                    if listener in watched.parts:
                        name = watched.parts[listener].name
                        reasons.setdefault(self.reasons.get(name, reason), []).append(name)
                for reason, names in reasons.items():
                    listener.refuse(sorted(names), reason)
                listener.end_pass()
        except BaseException:
            self._drop()
            raise
        finally:
            self.reasons.clear()
        if made:
            self._deliver(made, keep_graph)
        self._unreported.clear()  # delivery has called the hooks on parameters

    @torch.no_grad()
    def _deliver(self, made: Iterable[Watched], keep_graph: bool) -> None:
        """Give weights the gradients of their aliases.

        Autograd takes twenty times as long as an assignment, so it is used only where it makes a difference:
        with hooks, in several processes, or for weights computed from others by a graph, which may have to be
        kept.
        """
        everyone = torch.distributed.is_available() and torch.distributed.is_initialized()
        weights, grads = list[Tensor](), list[Tensor | None]()
        for weight, alias, _ in made:
            if everyone or not weight.is_leaf or has_hooks(weight, own=1):
                weights.append(weight)
                grads.append(alias.grad)
            elif weight.grad is None:
                weight.grad = alias.grad
            elif alias.grad is not None:
                weight.grad.add_(alias.grad)
            alias.grad = None
        if weights:
            with torch.enable_grad(), DisableTorchFunction():
                root = _Deliver.apply(grads, *weights)  # type: ignore[no-untyped-call]
                del grads
                torch.autograd.backward(root, retain_graph=keep_graph)

    def _drop(self) -> None:
        """Forget the gradients of a pass that failed."""
        self._forget()
        self._keep_grads(())

    def _forget(self) -> None:
        self._unreported.clear()
        self.aranges.clear()
        self.rows.clear()
        for listener in self.listeners:
            listener.only = None


class _Deliver(torch.autograd.Function):
    """A node with an edge to every weight: autograd adds gradients as usual, and calls hooks."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *weights: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Without other references to them, autograd does not copy them.
        grads = (None, *ctx.grads)
        ctx.grads = None
        return grads


def leaves(outputs: Iterable[Any]) -> list[Tensor]:
    """All leaves that outputs depend on and that require a gradient."""
    nodes = {each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs} - {None}
    waiting, found = list(nodes), []
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        below = {each for each, _ in node.next_functions if each is not None} - nodes
        nodes |= below
        waiting += below
    return found
