"""Both ends of a layer that is listened to: nodes and hooks that hear of its backward pass.

In a plain loop a GPU waits for what Python does here, once for every layer and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from posterity.curvature.uses import Listener, Use


@final
class Ends:
    """Who hears of a layer's backward pass, and what it is told.

    Called, it is the hook of a node of torch's own that keeps all that is wanted of the forward pass.

    Args:
        listener: Who is told.
        use: Of which layer.
        kept: Under which names that node keeps inputs, and then extras.
        dtype: Of the weight, if the listener brings its gradient.
        axis: Where the weight has its samples, if it has any.
    """

    __slots__ = ("_axis", "_dtype", "_kept", "_listener", "_use")

    def __init__(
        self,
        listener: Listener,
        use: Use,
        kept: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        axis: int | None = None,
    ) -> None:
        self._listener, self._use, self._kept, self._dtype, self._axis = listener, use, kept, dtype, axis

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Before the layer's own node, of which these are the outputs' gradients."""
        grad = grads[0]
        if grad is None:
            return
        # To hold on to the node, which holds on to this, would be a circle that nobody frees.
        node = torch._C._current_autograd_node()
        # Nobody looks at these operations, and none is cast.
        with torch._C.DisableTorchFunction(), _uncast(grad):
            x, *extras = [getattr(node, name) for name in self._kept]
            self._tell(grad, x, extras)

    def weight_grad(self, grad: Tensor, x: Tensor | None, extras: Sequence[Tensor]) -> Tensor | None:
        """The same in a node of ours; the weight's gradient, if the listener brings it."""
        with torch._C.DisableTorchFunction(), _uncast(grad):
            into = self._tell(grad, x, extras)
            if into is None or self._dtype is None:
                return None
            if self._axis is not None:
                into = into.movedim(0, self._axis)
            elif not self._use.site.alone:
                into = into[0] if len(into) == 1 else into.sum(0)
            return into if into.dtype is self._dtype else into.to(self._dtype)

    def _tell(self, grad: Tensor, x: Tensor | None, extras: Sequence[Tensor]) -> Tensor | None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient that is differentiated again (create_graph=True) is not that of single examples: "
                "use a method that collects no curvature"
            )
        into = self._listener.heard(self._use, x, grad, extras)
        self._use.fresh = False
        return into


class _Tap(torch.autograd.Function):
    """Nothing, forward; backward, the ends hear what comes by."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor | None, ends: Ends, x: Tensor | None, *extras: Tensor
    ) -> Tensor:
        ctx.ends = ends
        ctx.save_for_backward(x, *extras)
        # The same memory, but no view in the eyes of autograd: what follows may change it in place.
        return y.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *extras = ctx.saved_tensors
        return (grad, ctx.ends.weight_grad(grad, x, extras), None, None, *[None] * len(extras))


def tap(
    y: Tensor, weight: Tensor | None, ends: Ends, x: Tensor | None, extras: Sequence[Tensor] = ()
) -> Tensor:
    """Outputs, behind a node that tells the ends what comes by.

    Args:
        y: A layer's outputs.
        weight: Whose gradient the listener brings; None if it brings none.
        ends: To be told.
        x: The layer's inputs, where they matter.
        extras: Other tensors that its backward pass needs.
    """
    return _apply(y, weight, ends, x, *extras)


@final
class Notes:
    """Hooks that note the name of each gradient that is made, by the backward pass.

    They go by one number: to make a handle for each takes longer than all that the hooks do.

    Args:
        tensors: Whose gradients, by name.

    Attributes:
        reached: Names, by the backward pass.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.reached: defaultdict[int, set[str]] = defaultdict(set)
        self._places: list[dict[int, Callable[[Tensor], None]]] = []
        self._number, reached, now = -1, self.reached, torch._C._current_graph_task_id
        for name, tensor in tensors:
            if tensor._backward_hooks is None:  # torch makes the place for them
                tensor.register_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
            place = cast("dict[int, Callable[[Tensor], None]]", tensor._backward_hooks)
            if self._number < 0:
                self._number = RemovableHandle(place).id
            place[self._number] = lambda _, name=name: reached[now()].add(name)  # type: ignore[misc]
            self._places.append(place)

    def remove(self) -> None:
        """Take the hooks away."""
        for place in self._places:
            place.pop(self._number, None)


# What Function.apply() calls where no transform of torch.func runs: the rest takes as long again.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Tap).apply
_AS_IT_IS = nullcontext()


def _uncast(x: Tensor) -> AbstractContextManager[Any]:
    """Where autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IT_IS
