"""Where the backward pass of a layer is listened to.

:class:`Taps` sees every call of torch while it is entered. Behind each layer that uses a wanted parameter it
puts a node that does nothing, forward, and backward hands the layer's inputs and its outputs' gradient to
whoever listens; where torch's own node of the layer keeps these anyway, that one is listened to. It sees
operations, not modules, so the model may be called as it is, by ``functional_call`` with drawn weights, or by
``vmap`` with stacks of them. Entered after :class:`~posterity.routes.StackedRoutes`, it leaves the layer's
own work to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # vmap's own: which tensors are stacked, and where
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity.curvature.calls import Call, layer_call
from posterity.curvature.stacks import (
    inside,
    rows_of,
    sample_of,
    samples_axis,
    samples_first,
    stacking,
)
from posterity.curvature.uses import Listener, Part, Use


class Place(NamedTuple):
    """Where a layer's inputs and outputs have their samples and examples.

    Attributes:
        axis: Of the examples, samples aside.
        fold: Examples, where they are one axis together with the positions, positions outside; else None.
        samples: K, or 1.
        counted: The axis of the examples as the model has them around the layer; None if nothing tells.
    """

    axis: int
    fold: int | None
    samples: int
    counted: int | None = None

    def front(self, x: Tensor, axis: int | None) -> Tensor:
        """``[K, B, …]`` of a tensor with its samples on some axis."""
        x = x[None] if axis is None else x.movedim(axis, 0)
        x = x if self.fold is None else x.reshape(x.shape[0], -1, self.fold, *x.shape[2:])
        x = x if self.axis == 0 else x.movedim(self.axis + 1, 1)
        return x if x.shape[0] == self.samples else x.expand(self.samples, *[-1] * (x.dim() - 1))


@final
class Taps(TorchFunctionMode):
    """Inside, layers with wanted parameters tell a listener of their backward passes.

    Args:
        listener: Who is told.
        batch_dim: The axis that counts examples, where a layer leaves a choice.
    """

    def __init__(self, listener: Listener, batch_dim: int = 0) -> None:
        super().__init__()
        self._listener, self._batch_dim = listener, batch_dim
        # While an attention layer runs: examples, and on which axis the model has them.
        self._attending: tuple[int, int | None] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        values = (*args, *kwargs.values()) if kwargs else args
        parts, stacked = self._listener.parts, functorch.peek_interpreter_stack() is not None
        found: dict[Part, Tensor] = {}
        for value in values:  # most calls are none of ours, and this is all that they wait for
            if stacked or type(value) in _NESTED:
                wanted = ((self._wanted(each), each) for each in _tensors((value,)))
                found.update((part, each) for part, each in wanted if part is not None)
            elif id(value) in parts:
                found[parts[id(value)][1]] = value
        if not found or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attention(args, kwargs)
        call = layer_call(func, args, kwargs)
        if call is not None:
            use = Use(call.layer, self._wanted(call.weight), self._wanted(call.bias))
            if len(use.parts) == len(found):
                return self._tapped(func, args, kwargs, call, use)
        versions = [each._version for each in found.values()]
        out = func(*args, **kwargs)
        changed = versions != [each._version for each in found.values()]
        for result in _tensors((out,)):
            if inside(result).requires_grad and (changed or not self._rows(result, found)):
                names = sorted({part.name for part in found})
                self._listener.refuse(names, f"is used by {getattr(func, '__name__', func)}()")
                break
        return out

    def _wanted(self, tensor: Tensor | None) -> Part | None:
        found = self._listener.parts.get(id(inside(tensor)))
        return None if found is None else found[1]

    def _rows(self, result: Tensor, found: Mapping[Part, Tensor]) -> bool:
        """Whether a result is some rows, or one sample, of what was found, and so is wanted itself."""
        for part, whole in found.items():
            rows = rows_of(result, whole)
            sample = sample_of(result, whole) if self._listener.stacked and part.sample is None else None
            if sample is not None:
                some = Part(part.name, None, sample)
            elif rows is not None:
                first, _, count = part.rows or (0, 0, len(whole))
                some = Part(part.name, (first + rows[0], first + rows[1], count), part.sample)
            else:
                continue
            self._listener.parts[id(inside(result))] = inside(result), some
            return True
        return False

    def _attention(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Attention with its projections seen: torch turns its examples to axis 1 before it calls it."""
        query = args[0] if args else kwargs["query"]
        examples, counted = 1, None
        if query.dim() == 3:
            examples = query.shape[1]
            if min(query.shape[:2]) > 1:  # with batch_first=True it is a transposed view
                counted = int(query.stride(0) > query.stride(1))
        before, self._attending = self._attending, (examples, counted)
        try:
            with self:  # torch has left it to look at this call
                return _attention_forward(*args, **kwargs)
        finally:
            self._attending = before

    def _place(self, call: Call, samples: int) -> Place | None:
        if self._attending is not None:
            examples, counted = self._attending
            return Place(1, examples if call.x.dim() == 2 else None, samples, counted)
        if call.leading < 1:
            return None
        axis = min(self._batch_dim, call.leading - 1)
        return Place(axis, None, samples, axis if call.leading > 1 else None)

    def _tapped(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], call: Call, use: Use
    ) -> Any:
        level, samples = stacking()
        place = self._place(call, samples)
        if level is not None and (
            level is NotImplemented
            or not self._listener.stacked
            or any(part.sample is not None for part in use.parts)
        ):
            self._listener.refuse(
                use.names, "is used inside a transform of torch.func that stacks no samples"
            )
        elif place is None:
            self._listener.refuse(
                use.names, f"is used on inputs {list(call.x.shape)} without an axis of examples"
            )
        elif self._listener.begin(use, place.fold or call.x.shape[place.axis], place.counted):
            return self._listened(func, args, kwargs, call, use, place, level)
        return func(*args, **kwargs)

    def _listened(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: Call,
        use: Use,
        place: Place,
        level: int | None,
    ) -> Any:
        weight = call.weight
        brings = use.weight is not None and self._listener.brings_gradient(use)
        if brings and weight is not None:  # then autograd has no need to make the gradient
            held = weight.detach()
            args = [held if each is weight else each for each in args]
            kwargs = {key: held if each is weight else each for key, each in kwargs.items()}
        out = func(*args, **kwargs)
        if not brings and not inside(out).requires_grad:
            return out
        into = inside(weight) if brings else None
        seen = None if use.weight is None else inside(call.x)  # a bias has no need of them
        if level is None:
            ends = _Ends(self._listener, use, place, None, None, None)
            if seen is not None and not brings and not call.extras and out.grad_fn.name() in use.layer.keeps:
                out.grad_fn.register_prehook(_Ear(ends))
                return out
            return _Tap.apply(out, into, ends, seen, *call.extras)  # type: ignore[no-untyped-call]
        axis, y = samples_axis(out), inside(out)
        if axis is None:  # the same for all samples, whose gradients are not
            axis, y = 0, out.expand(place.samples, *out.shape).clone()
        extras = [samples_first(each) for each in call.extras]
        ends = _Ends(self._listener, use, place, axis, samples_axis(call.x), samples_axis(weight))
        with temporarily_pop_interpreter_stack():
            result = _Tap.apply(y, into, ends, seen, *extras)  # type: ignore[no-untyped-call]
        return functorch._add_batch_dim(result, axis, level)


class _Ends(NamedTuple):
    """What a tap needs to know of both sides of a layer."""

    listener: Listener
    use: Use
    place: Place
    out_axis: int | None
    x_axis: int | None
    weight_axis: int | None

    def tell(self, grad: Tensor, x: Tensor | None, extras: Sequence[Tensor]) -> Tensor | None:
        """The listener hears of a backward pass; the weight's gradient, if it brings it."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient that is differentiated again (create_graph=True) is not that of single examples: "
                "use a method that collects no curvature"
            )
        own = self.place.front(grad, self.out_axis)
        # Where only a bias is wanted, nothing looks at the inputs.
        seen = own if x is None else self.place.front(x, self.x_axis)
        into = self.listener.heard(self.use, seen, own, extras)
        self.use.fresh = False
        return into


class _Tap(torch.autograd.Function):
    """Nothing, forward; backward, the listener hears what comes by."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor | None, ends: _Ends, x: Tensor | None, *extras: Tensor
    ) -> Tensor:
        ctx.ends, ctx.dtype = ends, None if weight is None else weight.dtype
        ctx.save_for_backward(x, *extras)
        # The same memory, but no view in the eyes of autograd: what follows may change it in place.
        return y.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *extras = ctx.saved_tensors
        # Nobody looks at these operations, and none is cast.
        with torch._C.DisableTorchFunction(), _uncast(grad.device.type):
            into = ctx.ends.tell(grad, x, extras)
            if ctx.dtype is not None:
                axis = ctx.ends.weight_axis
                if axis is not None:
                    into = into.movedim(0, axis)
                else:
                    into = into[0] if len(into) == 1 else into.sum(0)
                into = into.to(ctx.dtype)
        return grad, into, None, None, *(None for _ in extras)


class _Ear:
    """Instead of a tap, where the layer's own node keeps all that is wanted of the forward pass."""

    __slots__ = ("_ends",)

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[0]
        if grad is None:
            return
        # To hold on to the node, which holds on to this, would be a circle that nobody frees.
        node = torch._C._current_autograd_node()
        names = self._ends.use.layer.keeps[node.name()]
        with torch._C.DisableTorchFunction(), _uncast(grad.device.type):
            x, *extras = [getattr(node, name) for name in names]
            self._ends.tell(grad, x, extras)


def _uncast(device: str) -> AbstractContextManager[Any]:
    """Where autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, as it is, that shows what it calls to a mode, but not itself."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_forward = _unseen(F.multi_head_attention_forward)


_NESTED = (list, tuple)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
