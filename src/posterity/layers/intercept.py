"""The only torch function mode: fast forms for stacks of samples, and reports of watched layers.

Inside vmap a supported operation uses its fast form for stacks. A layer with a watched weight gets an *alias*
of it, a leaf in the same memory, and reports its inputs and its outputs' gradient in the backward pass; what
becomes of the alias's gradient is in :mod:`posterity.layers.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity.layers.attention import Attention, attention_forward, examples_axis
from posterity.layers.calls import Call, LayerCall, Sink
from posterity.layers.conv import Conv
from posterity.layers.embedding import (
    Embedding,
    Rows,
    rows_by_example,
    shared_rows,
    shares_positions,
    with_batch_axis,
)
from posterity.layers.estimators import estimate
from posterity.layers.linear import Linear
from posterity.layers.losses import TERMS, Notes, of_a_guess
from posterity.layers.norm import BatchNorm, GroupNorm, LayerNorm
from posterity.layers.passes import Function, Passes
from posterity.layers.stacks import CrossEntropy, MaxPool2d, inside, samples_axis, stack, stacking
from posterity.layers.stand_ins import StandIn, drawn_arguments
from posterity.layers.watched import Watched, tap
from posterity.torch_private import (
    add_hook,
    function_modes,
    functorch,
    graph_task_id,
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
_NOTHING = nullcontext()


@final
class Intercept(TorchFunctionMode):
    """A context in which supported operations on stacks use their fast form, and watched layers report to
    listeners.

    Args:
        sinks: By stacked weight; what they take, autograd does not return.
        notes: Records layers and losses.
        fused: Whether attention may use fused operations, which have no forward derivatives. Attention
            modules do not use their own fused path inside a mode.

    Attributes:
        passes: The listeners, and the backward passes inside.
    """

    def __init__(
        self, sinks: Mapping[Tensor, Sink] | None = None, notes: Notes | None = None, *, fused: bool = True
    ) -> None:
        super().__init__()
        self._fused = fused
        self._sinks, self._notes = sinks or {}, notes
        # While an attention layer runs: examples, and on which axis the model has them.
        self._attending: tuple[int, int | None] | None = None
        self.passes = Passes()

    @staticmethod
    def current() -> Intercept | None:
        """The active one in this thread, if any."""
        return next((mode for mode in function_modes() if isinstance(mode, Intercept)), None)

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Most calls are not ours, and this is all the overhead that they get.
        handle = _HANDLERS.get(func)
        if handle is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._notes is not None and func in LAYERS:
            self._notes.layer(LAYERS[func](*args, **(kwargs or {})))
        if types and StandIn in types:
            return self._estimated(func, args, kwargs or {})
        return handle(self, func, args, kwargs or {})

    def _backward(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.passes.backward(func, args, kwargs) if self.passes.watched else func(*args, **kwargs)

    def _grad(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.passes.grad(func, args, kwargs) if self.passes.watched else func(*args, **kwargs)

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
        listened = self.passes.watched and torch.is_grad_enabled()
        if not stacked and not listened:
            return func(*args, **kwargs)
        call = LAYERS[func](*args, **kwargs)
        out = self._listened(func, call, stacked) if listened else NotImplemented
        if stacked and out is NotImplemented:
            out = call.stacked(self._sinks)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _estimated(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation on placeholders: by their estimator, or at one draw of their weights."""
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

    def _listened(self, func: Function, call: LayerCall, stacked: bool) -> Any:
        """The outputs of a reporting layer; NotImplemented without a listener, or if it cannot report."""
        passes = self.passes
        weight, bias = passes.find(call.weight), passes.find(call.bias)
        if weight is None and bias is None:
            return NotImplemented
        vmap = stacking() if stacked else None
        x, x_axis, axis, weight_axis = call.input, None, None, None
        if stacked:
            x, x_axis, weight_axis = inside(x), samples_axis(x), samples_axis(call.weight)
        if not call.known() or id(x) in passes.watched:
            return NotImplemented
        calls = self._reporting(call, weight, bias, vmap)
        if not calls:
            return NotImplemented
        level, samples = vmap or (None, 1)
        brought = weight is not None and len(calls) == 1 and call.listener.brings_gradient(call)
        shared = type(call) is Embedding and shares_positions(call, passes.aranges)
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
            # Later operations may change it in place, which would skip a view's node.
            y = unsafe_view(y, y.shape)
        for each in calls:
            each.ran(x, x_axis, y, axis)
            if not shared:
                each.listener.begin(each)
            if not (shared or brought):
                add_hook(y, each)
        if weight is not None and shared:
            rows = shared_rows(out, calls, level, partial(passes.unreport, weight))
            passes.rows[id(rows.given)] = rows
            return rows.given
        if weight is not None and brought:
            if stacked or not (y.requires_grad and weight.alias.is_leaf):
                with temporarily_pop_interpreter_stack() if stacked else _NOTHING:
                    y = tap(y, weight.alias, call, weight_axis, stacked)
            else:
                call.alias, passes.edgeless = weight.alias, True
                add_hook(y, call)
        out = y if level is None else stack(y, level, axis)
        if type(call) is Embedding and call.counted is None:  # a row for each example, as far as can be seen
            passes.rows[id(out)] = Rows(out, out, calls, False)
        return out

    def _reporting(
        self,
        call: LayerCall,
        weight: Watched | None,
        bias: Watched | None,
        vmap: tuple[int | None, int] | None,
    ) -> list[LayerCall]:
        """The call, once for each of its listeners; none if it cannot report to one.

        A layer that cannot report gets the weight itself, whose gradient is then refused.

        Args:
            call: The layer's call.
            weight: The watched part of its weight.
            bias: The watched part of its bias.
            vmap: The level of vmap, if it is the only transform, and its samples; None outside vmap.
        """
        calls: list[LayerCall] = []
        for listener in self.passes.listeners:
            parts = weight and weight.parts.get(listener), bias and bias.parts.get(listener)
            if parts == (None, None):
                continue
            each = copy(call) if calls else call
            each.listened(listener, parts, 1 if vmap is None else vmap[1])
            if vmap is not None and (
                vmap[0] is None
                or not listener.stacked
                or any(part and part.sample is not None for part in parts)
            ):
                reason = (
                    "is used inside torch.compile (train the model that is not compiled), or in a transform "
                    "of torch.func that stacks no samples"
                )
            elif not each.find_examples(self._attending):
                reason = f"is used on inputs {list(call.input.shape)} without an axis of examples"
            elif graph_task_id() != -1:
                listener.refuse(each.names, "is used in a backward pass, as checkpointing does")
                return []
            else:
                calls.append(each)
                continue
            self.passes.reasons.update(dict.fromkeys(each.names, reason))
            return []
        return calls

    def _attention(
        self, func: Function, args: Sequence[Any], kwargs: dict[str, Any], estimated: bool = False
    ) -> Any:
        """Attention with its layers in sight: torch turns its examples to axis 1 before it calls it."""
        listened = self.passes.watched and torch.is_grad_enabled()
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
        if self.passes.watched:
            self.passes.aranges[id(out)] = out
        return out

    def _viewed(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        rows = self.passes.rows.get(id(args[0])) if self.passes.rows and args else None
        if rows is not None and out.shape == (1, *rows.given.shape):
            self.passes.rows[id(out)] = with_batch_axis(rows, out)
        return out

    def _broadcast(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.passes.rows and len(args) == 2:
            own = [self.passes.rows.get(id(each)) for each in args]
            args = [
                each if rows is None else rows_by_example(rows, other)
                for each, rows, other in zip(args, own, reversed(args), strict=True)
            ]
        return func(*args, **kwargs)


# Handlers by torch operation; all other operations run unchanged.
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
