"""The one mode that sees calls of torch: fast forms for stacks of samples, and reports of watched layers.

Inside vmap a known operation takes its fast form for stacks. A layer with a watched weight gets an *alias*
of it, a leaf in the same memory, and reports its inputs and its outputs' gradient in the backward pass. So
autograd delivers a known layer's gradient to the alias, never to the weight: a gradient that reaches the
weight itself was reported by no layer, and is refused by the parameter's name. After each backward pass the
gradients of aliases are delivered to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity.layers.attention import Attention, attention_forward, examples_axis
from posterity.layers.calls import Call, LayerCall, Listener, Part, Sink
from posterity.layers.conv import Conv
from posterity.layers.embedding import (
    Embedding,
    Rows,
    rows_by_example,
    shared_rows,
    shares_positions,
    with_batch_axis,
)
from posterity.layers.estimators import StandIn, drawn_arguments, estimate
from posterity.layers.linear import Linear
from posterity.layers.losses import TERMS, Notes, of_a_guess
from posterity.layers.norm import BatchNorm, GroupNorm, LayerNorm
from posterity.layers.passes import Watched, deliver, leaves, tap
from posterity.layers.stacks import CrossEntropy, MaxPool2d, inside, samples_axis, stack, stacking
from posterity.torch_private import (
    add_hook,
    any_autocast_enabled,
    function_modes,
    functorch,
    graph_task_id,
    has_hooks,
    hooks_of,
    temporarily_pop_interpreter_stack,
    unsafe_view,
)

# By operation of torch, the class of its calls.
LAYERS: dict[Any, type[LayerCall]] = {
    F.linear: Linear,
    F.conv1d: Conv,
    F.conv2d: Conv,
    F.batch_norm: BatchNorm,
    F.layer_norm: LayerNorm,
    F.group_norm: GroupNorm,
    F.embedding: Embedding,
}
OPERATIONS: dict[Any, type[Call]] = {
    F.max_pool2d: MaxPool2d,
    F.cross_entropy: CrossEntropy,
    F.scaled_dot_product_attention: Attention,
}
Function: TypeAlias = Callable[..., Any]
_NOTHING = nullcontext()
_UNREPORTED = "is used by an operation that is not a known layer"


@final
class Intercept(TorchFunctionMode):
    """Inside, known operations on stacks take their fast form, and watched layers report to listeners.

    Args:
        sinks: By stacked weight; what they take, autograd does not return.
        notes: Where layers and losses are noted.
        fused: Whether attention may run by fused operations, which have no forward derivatives. Attention
            modules take no fused path of theirs where a mode is entered.
    """

    def __init__(
        self,
        sinks: Mapping[Tensor, Sink] | None = None,
        notes: Notes | None = None,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self._fused = fused
        self._sinks, self._notes = sinks or {}, notes
        self._listeners: list[Listener] = []
        self._watched: dict[int, Watched] = {}
        self._memory: dict[int, list[Watched]] = {}  # the same, by where they lie
        self._unreported: dict[int, tuple[Watched, str]] = {}
        self._reasons: dict[str, str] = {}  # why a layer reports nothing, by the parameter's name
        # While an attention layer runs: examples, and on which axis the model has them.
        self._attending: tuple[int, int | None] | None = None
        self._edgeless = False  # whether a layer has no edge to its weight's alias
        self._aranges: dict[int, Tensor] = {}  # by id, what torch.arange() has made in this forward pass
        self._rows: dict[int, Rows] = {}  # what embeddings have made, by the id of what they gave

    @staticmethod
    def current() -> Intercept | None:
        """The one that is entered in this thread, if any."""
        return next((mode for mode in function_modes() if isinstance(mode, Intercept)), None)

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Most calls are none of ours, and this is all that they wait for.
        handle = _HANDLERS.get(func)
        if handle is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._notes is not None and func in LAYERS:
            self._notes.layer(LAYERS[func](*args, **(kwargs or {})))
        if types and StandIn in types:
            return self._estimated(func, args, kwargs or {})
        return handle(self, func, args, kwargs or {})

    # Who listens to what.

    def listen(self, listener: Listener, parts: Iterable[tuple[Tensor, Part]]) -> None:
        """From here on, layers that use these tensors report to a listener."""
        self._listeners.append(listener)
        self._memory.clear()
        for tensor, part in parts:
            watched = self._watched.get(id(tensor))
            if watched is None:
                watched = Watched(tensor, tensor.detach().requires_grad_(), {})
                self._watched[id(tensor)] = watched
                hooks_of(tensor)[self] = partial(self._unreport, watched, _UNREPORTED)
            watched.parts[listener] = part

    def leave(self, listener: Listener, failed: bool) -> None:
        """No longer, and check what is left to check unless something else has failed."""
        try:
            if failed:
                self._drop()
            else:
                self._end_pass()
        finally:
            self._listeners.remove(listener)
            self._memory.clear()
            if any_autocast_enabled():
                torch.clear_autocast_cache()  # it would hold what it has made of aliases that are gone
            for key, (tensor, _, parts) in list(self._watched.items()):
                parts.pop(listener, None)
                if not parts:
                    del self._watched[key]
                    hooks_of(tensor).pop(self, None)

    def _unreport(self, watched: Watched, reason: str, _: Tensor) -> None:
        """The hook on a watched tensor, to which no layer that is known sends a gradient."""
        self._unreported[id(watched.tensor)] = watched, reason

    # Backward passes.

    def _backward(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._watched:
            return func(*args, **kwargs)
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

    def _grad(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Gradients of watched inputs are those of their aliases."""
        if not self._watched:
            return func(*args, **kwargs)
        outputs, given = args
        watched = [self._watched.get(id(each)) for each in given]
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
                "one of the tensors to differentiate in was not used: pass allow_unused=True if that is meant"
            )
        return tuple(found)

    def _keep_grads(self, inputs: Sequence[Any]) -> None:
        """Drop the gradients of all aliases but those of some inputs."""
        kept = set(map(id, inputs))
        for key, watched in self._watched.items():
            if key not in kept:
                watched.alias.grad = None

    @contextmanager
    def _one_pass(self, keep_graph: bool = True) -> Iterator[None]:
        """Inside, a backward pass runs; if it fails, nothing is left of it."""
        try:
            yield
        except BaseException:
            self._drop()
            raise
        self._end_pass(keep_graph)

    def _more(self, outputs: Any, inputs: Sequence[Any]) -> list[Tensor]:
        """What else a backward pass to some inputs must reach, so that all layers report.

        A layer whose gradient a listener brings has no edge to its weight's alias, and rows that all examples
        share are a leaf.
        """
        if not (self._edgeless or self._rows):
            return []
        there = set(map(id, inputs))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return [leaf for leaf in leaves(outputs) if id(leaf) not in there]

    def _aliases(self, inputs: Sequence[Any]) -> list[Any]:
        """What a backward pass is to be restricted to instead of some inputs."""
        found = [self._watched.get(id(each)) for each in inputs]
        for listener in self._listeners:
            listener.only = {each.parts[listener].name for each in found if each and listener in each.parts}
        return [each if own is None else own.alias for each, own in zip(inputs, found, strict=True)]

    def _end_pass(self, keep_graph: bool = True) -> None:
        """Refuse what no layer reported, let listeners add up, and deliver gradients."""
        unreported = list(self._unreported.values())
        self._forget()
        made = [watched for watched in self._watched.values() if watched.alias.grad is not None]
        for watched in made:
            for listener, part in watched.parts.items():
                if part.name not in listener.reported:  # by a layer whose hook was lost
                    unreported.append((watched, _UNREPORTED))
        try:
            for listener in self._listeners:
                reasons: dict[str, list[str]] = {}
                for watched, reason in unreported:
                    if listener in watched.parts:
                        name = watched.parts[listener].name
                        reasons.setdefault(self._reasons.get(name, reason), []).append(name)
                for reason, names in reasons.items():
                    listener.refuse(sorted(names), reason)
                listener.end_pass()
        except BaseException:
            self._drop()
            raise
        finally:
            self._reasons.clear()
        if made:
            self._deliver(made, keep_graph)
        self._unreported.clear()  # hooks on parameters hear of what is delivered

    @torch.no_grad()
    def _deliver(self, made: Iterable[Watched], keep_graph: bool) -> None:
        """Give weights the gradients of their aliases.

        Autograd takes twenty times as long for that as an assignment does: it is asked only where somebody
        would notice, by hooks or in other processes, or where weights were made of others.
        """
        everyone = torch.distributed.is_available() and torch.distributed.is_initialized()
        by_autograd = []
        for watched in made:
            weight, alias, _ = watched
            if everyone or not weight.is_leaf or has_hooks(weight, own=1):
                by_autograd.append(watched)
                continue
            if weight.grad is None:
                weight.grad = alias.grad
            elif alias.grad is not None:
                weight.grad.add_(alias.grad)
            alias.grad = None
        if by_autograd:
            deliver(by_autograd, keep_graph)

    def _drop(self) -> None:
        """Forget the gradients of a pass that failed."""
        self._forget()
        self._keep_grads(())

    def _forget(self) -> None:
        self._unreported.clear()
        self._aranges.clear()
        self._rows.clear()
        for listener in self._listeners:
            listener.only = None

    # Calls of layers.

    def _operation(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if functorch.peek_interpreter_stack() is not None:
            out = OPERATIONS[func](*args, **kwargs).stacked(self._sinks)
            if out is not NotImplemented:
                return out
        if func is F.scaled_dot_product_attention and not self._fused:
            return Attention(*args, **kwargs).in_parts()
        return func(*args, **kwargs)

    def _loss(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = self._operation(func, args, kwargs) if func in OPERATIONS else func(*args, **kwargs)
        if self._notes is not None and inside(out).requires_grad:
            terms = TERMS[func](*args, **kwargs)
            if terms is not None:
                self._notes.loss(func.__name__, terms, out, of_a_guess(func, args, kwargs))
        return out

    def _layer(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        stacked = functorch.peek_interpreter_stack() is not None
        listened = self._watched and torch.is_grad_enabled()
        if not stacked and not listened:
            return func(*args, **kwargs)
        call = LAYERS[func](*args, **kwargs)
        if listened:
            weight, bias = self._find(call.weight), self._find(call.bias)
            if weight is not None or bias is not None:
                out = self._listened(func, call, weight, bias, stacked)
                if out is not NotImplemented:
                    return out
        if stacked:
            out = call.stacked(self._sinks)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)

    def _estimated(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation that is given stand-ins: by their estimator, or at one draw of their weights."""
        if func is F.multi_head_attention_forward:
            return self._attention(func, args, kwargs, estimated=True)
        if func in LAYERS:
            out = estimate(func, LAYERS[func](*args, **kwargs), self._attending)
            if out is not NotImplemented:
                return out
        args, kwargs, drawn = drawn_arguments(args, kwargs)
        for each in drawn:
            each.use()
        return _HANDLERS[func](self, func, args, kwargs)

    def _find(self, tensor: Tensor | None) -> Watched | None:
        """What is watched of a layer's weight: all of it, some rows, or one sample."""
        found = self._watched.get(id(tensor))
        if found is not None or tensor is None:
            return found
        axis, own = samples_axis(tensor), inside(tensor)
        found = self._watched.get(id(own))
        if found is not None or not own.requires_grad:
            return found
        if not self._memory:
            for each in self._watched.values():
                self._memory.setdefault(each.tensor.untyped_storage().data_ptr(), []).append(each)
        there = self._memory.get(own.untyped_storage().data_ptr(), ())
        return next((part for each in there if (part := each.part(own, axis)) is not None), None)

    def _listened(
        self, func: Function, call: LayerCall, weight: Watched | None, bias: Watched | None, stacked: bool
    ) -> Any:
        """The outputs of a layer that reports; NotImplemented if it cannot."""
        level, samples, x, x_axis, axis, weight_axis = None, 1, call.input, None, None, None
        if stacked:
            (level, samples), x_axis, weight_axis = stacking(), samples_axis(x), samples_axis(call.weight)
            x = inside(x)
        if not call.known() or id(x) in self._watched:
            return NotImplemented
        calls: list[LayerCall] = []
        for listener in self._listeners:
            parts = weight and weight.parts.get(listener), bias and bias.parts.get(listener)
            if parts == (None, None):
                continue
            each = copy(call) if calls else call
            each.listened(listener, parts, samples)
            if not self._reports(each, level, stacked):
                return NotImplemented
            calls.append(each)
        brought = weight is not None and len(calls) == 1 and call.listener.brings_gradient(call)
        shared = type(call) is Embedding and shares_positions(call, self._aranges)
        if weight is not None:
            own = weight.alias.detach() if brought else weight.alias
            call.weight = own if level is None else stack(own, level, weight_axis)
        if bias is not None:
            call.bias = bias.alias if level is None else stack(bias.alias, level, samples_axis(call.bias))
        out = NotImplemented if level is None else call.stacked(self._sinks)
        y = out = call.call(func) if out is NotImplemented else out
        if level is not None:
            y, axis = inside(out), samples_axis(out)
            if axis is None:  # the same for all samples, whose gradients are not
                axis, y = 0, y.expand(samples, *y.shape).clone()
        if not (brought or shared) and y._is_view():
            # What follows may change it in place, and a view's node would then be left out.
            y = unsafe_view(y, y.shape)
        for each in calls:
            each.ran(x, x_axis, y, axis)
            if not shared:
                each.listener.begin(each)
            if not (shared or brought):
                add_hook(y, each)
        if weight is not None and shared:
            rows = shared_rows(out, calls, level, partial(self._unreport, weight))
            self._rows[id(rows.given)] = rows
            return rows.given
        if weight is not None and brought:
            if stacked or not (y.requires_grad and weight.alias.is_leaf):
                with temporarily_pop_interpreter_stack() if stacked else _NOTHING:
                    y = tap(y, weight.alias, call, weight_axis, stacked)
            else:
                call.alias, self._edgeless = weight.alias, True
                add_hook(y, call)
        out = y if level is None else stack(y, level, axis)
        if type(call) is Embedding and call.counted is None:  # a row for each example, as far as can be seen
            self._rows[id(out)] = Rows(out, out, calls, False)
        return out

    def _reports(self, call: LayerCall, level: int | None, stacked: bool) -> bool:
        """Whether a layer can report, with the axis of its examples found.

        One that cannot is given the weight itself, whose gradient is then refused.
        """
        listener = call.listener
        one_by_one = stacked and any(part and part.sample is not None for part in call.parts)
        if stacked and (level is None or one_by_one or not listener.stacked):
            reason = (
                "is used inside torch.compile (train the model that is not compiled), or in a transform of "
                "torch.func that stacks no samples"
            )
        elif not call.find_examples(self._attending):
            reason = f"is used on inputs {list(call.input.shape)} without an axis of examples"
        elif graph_task_id() != -1:
            listener.refuse(call.names, "is used in a backward pass, as checkpointing does")
            return False
        else:
            return True
        self._reasons.update(dict.fromkeys(call.names, reason))
        return False

    def _attention(
        self, func: Function, args: Sequence[Any], kwargs: dict[str, Any], estimated: bool = False
    ) -> Any:
        """Attention with its layers in sight: torch turns its examples to axis 1 before it calls it."""
        listened = self._watched and torch.is_grad_enabled()
        if not (listened or estimated) and functorch.peek_interpreter_stack() is None:
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        examples, counted = 1, None
        if query.dim() == 3:
            examples = query.shape[1]
            counted = examples_axis()
        before, self._attending = self._attending, (examples, counted)
        try:
            with self:  # torch has left it to look at this call
                return attention_forward(*args, **kwargs)
        finally:
            self._attending = before

    def _arange(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self._watched:
            self._aranges[id(out)] = out
        return out

    def _viewed(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        rows = self._rows.get(id(args[0])) if self._rows and args else None
        if rows is not None and out.shape == (1, *rows.given.shape):
            self._rows[id(out)] = with_batch_axis(rows, out)
        return out

    def _broadcast(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._rows and len(args) == 2:
            own = [self._rows.get(id(each)) for each in args]
            args = [
                each if rows is None else rows_by_example(rows, other)
                for each, rows, other in zip(args, own, reversed(args), strict=True)
            ]
        return func(*args, **kwargs)


# By operation of torch, who handles its calls; all others run as they are.
_HANDLERS: dict[Any, Callable[[Intercept, Function, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(LAYERS, Intercept._layer),
    **dict.fromkeys(OPERATIONS, Intercept._operation),
    **dict.fromkeys(TERMS, Intercept._loss),
    **dict.fromkeys((Tensor.backward, torch.autograd.backward), Intercept._backward),
    torch.autograd.grad: Intercept._grad,
    F.multi_head_attention_forward: Intercept._attention,
    torch.arange: Intercept._arange,
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze, Tensor.__getitem__), Intercept._viewed),
    **dict.fromkeys((torch.add, torch.sub, torch.mul), Intercept._broadcast),
    **dict.fromkeys((Tensor.add, Tensor.sub, Tensor.mul), Intercept._broadcast),
    **dict.fromkeys((Tensor.add_, Tensor.sub_, Tensor.mul_), Intercept._broadcast),
}
