"""Where the backward pass of a layer is listened to.

:class:`Taps` sees every call of torch while it is entered. Behind each layer that uses a wanted parameter it
puts a node that does nothing, forward, and backward hands the layer's inputs and its outputs' gradient to
whoever listens; where torch's own node of the layer keeps these anyway, that one is listened to. It sees
operations, not modules, so the model may be called as it is, by ``functional_call`` with drawn weights, or by
``vmap`` with stacks of them. Entered after :class:`~posterity.routes.StackedRoutes`, it leaves the layer's
own work to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # vmap's own: which tensors are stacked, and where
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from posterity.curvature.backwards import BACKWARDS, Seen
from posterity.curvature.calls import CALLS, Call
from posterity.curvature.ends import Use, tap
from posterity.curvature.stacks import (
    inside,
    rows_of,
    sample_of,
    samples_axis,
    samples_first,
    stacking,
)
from posterity.curvature.uses import Listener, Part, Place, Run, Site


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
        self._seen = Seen()
        self._within = False  # another collector's taps, which must see the weights too
        # While an attention layer runs: examples, and on which axis the model has them.
        self._attending: tuple[int, int | None] | None = None

    def __enter__(self) -> Self:
        self._within = any(isinstance(each, Taps) for each in _stack())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def forget(self) -> None:
        """Before a context: which calls were seen in others."""
        self._seen = Seen()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Most calls are none of ours, and what is done before they run is all that they wait for.
        kwargs = kwargs or {}
        if func in BACKWARDS:
            return self._backward(func, args, kwargs)
        parts, read = self._listener.parts, CALLS.get(func)
        plain = functorch.peek_interpreter_stack() is None
        if plain:
            values = (*args, *kwargs.values()) if kwargs else args
            if parts.keys().isdisjoint(map(id, values)) and (
                read is not None
                or _NESTED.isdisjoint(map(type, values))  # what layers have in lists are sizes
            ):
                return func(*args, **kwargs)
        call = read(*args, **kwargs) if read is not None and torch.is_grad_enabled() else None
        if call is not None:
            x, weight_in, bias_in = call[1:4] if plain else map(inside, call[1:4])
            weight, bias = parts.get(id(weight_in), _NONE)[1], parts.get(id(bias_in), _NONE)[1]
            if weight != bias and id(x) not in parts:
                return self._tapped(func, args, kwargs, call, weight, bias)
        return self._untapped(func, args, kwargs)

    def _backward(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A backward pass, before which its graph is looked at: what no call was seen to use may be there."""
        outputs = args[0] if args else next(iter(kwargs.values()))
        for name, reason in self._seen.unseen(outputs, self._listener.parts).items():
            self._listener.refuse([name], reason)
        return func(*args, **kwargs)

    def _untapped(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call that is no layer's, or not of a layer with a wanted parameter as its weight or bias."""
        found = {
            part: each
            for each in _tensors((*args, *kwargs.values()))
            if (part := self._wanted(each)) is not None
        }
        if not found or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attention(args, kwargs)
        versions = [each._version for each in found.values()]
        with self._seen:
            out = func(*args, **kwargs)
        changed = versions != [each._version for each in found.values()]
        for result in _tensors((out,)):
            if inside(result).requires_grad and (changed or not self._rows(result, found)):
                names = sorted({part.name for part in found})
                self._listener.refuse(names, f"is used by {getattr(func, '__name__', func)}()")
                break
        return out

    def _wanted(self, tensor: Tensor) -> Part | None:
        return self._listener.parts.get(id(inside(tensor)), _NONE)[1]

    def _rows(self, result: Tensor, found: Mapping[Part, Tensor]) -> bool:
        """Whether a result is some rows, or one sample, of what was found, and so is wanted itself."""
        for part, whole in found.items():
            rows = rows_of(result, whole)
            sample = sample_of(result, whole) if self._listener.stacked and part.sample is None else None
            if sample is not None:
                some = Part(part.name, None, sample)
            elif rows == (0, *whole.shape[:1]):
                some = part
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
        shape = call.x.shape
        if self._attending is not None:
            examples, counted = self._attending
            folded = len(shape) == 2
            return Place(examples if folded else shape[1], 1, folded, samples, counted)
        if call.leading < 1:
            return None
        axis = min(self._batch_dim, call.leading - 1)
        return Place(shape[axis], axis, False, samples, axis if call.leading > 1 else None)

    def _tapped(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: Call,
        weight: Part | None,
        bias: Part | None,
    ) -> Any:
        level, samples = stacking()
        place = self._place(call, samples)
        own = [part for part in (weight, bias) if part is not None]
        if level is not None and (
            level is NotImplemented
            or not self._listener.stacked
            or any(part.sample is not None for part in own)
        ):
            reason = "is used inside a transform of torch.func that stacks no samples"
        elif place is None:
            reason = f"is used on inputs {list(call.x.shape)} without an axis of examples"
        else:
            site = Site(call.layer, weight, bias, place)
            with self._seen:
                return self._listened(func, args, kwargs, call, site, level)
        self._listener.refuse([part.name for part in own], reason)
        return func(*args, **kwargs)

    def _listened(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: Call,
        site: Site,
        level: int | None,
    ) -> Any:
        run = self._listener.begin(site)
        if run is None:
            return func(*args, **kwargs)
        # A bias has no need of inputs.
        seen, extras = None if site.weight is None else call.x, call.extras
        brought = None
        if seen is not None and not self._within and self._listener.brings_gradient(site.layer):
            brought = call.weight
        if brought is not None:  # then autograd has no need to make the gradient
            held = brought.detach()
            args = [held if each is brought else each for each in args]
            if kwargs:
                kwargs = {key: held if each is brought else each for key, each in kwargs.items()}
        out = func(*args, **kwargs)
        if level is not None:
            return self._stack_listened(out, call, site, run, level, brought)
        if brought is not None:
            return tap(out, brought, Use(self._listener, site, run, brought.dtype), seen, extras)
        node = out.grad_fn
        if node is None:
            return out
        use = Use(self._listener, site, run)
        kept = None if seen is None or extras else site.layer.keeps.get(node.name())
        if kept is None:
            return tap(out, None, use, seen, extras)
        use.kept = kept
        node.register_prehook(use)
        return out

    def _stack_listened(
        self,
        out: Tensor,
        call: Call,
        site: Site,
        run: Run,
        level: int,
        brought: Tensor | None,
    ) -> Tensor:
        """The same inside vmap, whose samples are told of together."""
        axis, y = samples_axis(out), inside(out)
        if brought is None and not y.requires_grad:
            return out
        if axis is None:  # the same for all samples, whose gradients are not
            axis, y = 0, out.expand(site.place.samples, *out.shape).clone()
        site = Site(site.layer, site.weight, site.bias, site.place, samples_axis(call.x), axis)
        dtype = None if brought is None else brought.dtype
        use = Use(self._listener, site, run, dtype, samples_axis(brought))
        seen = None if site.weight is None else inside(call.x)
        with temporarily_pop_interpreter_stack():
            result = tap(y, inside(brought), use, seen, [samples_first(each) for each in call.extras])
        stacked: Tensor = functorch._add_batch_dim(result, axis, level)
        return stacked


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, as it is, that shows what it calls to a mode, but not itself."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_forward = _unseen(F.multi_head_attention_forward)


_NONE = None, None
_stack: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
_NESTED = frozenset((list, tuple))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
