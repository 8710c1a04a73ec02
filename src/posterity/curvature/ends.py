"""Both ends of a layer that is listened to: nodes and hooks that hear of its backward pass.

In a plain loop a GPU waits for what Python does here, once for every layer and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from posterity.curvature.uses import Listener, Run, Site


@final
class Use:
    """One use of wanted parameters by a layer, whose listener hears of its backward pass.

    Called, it is the hook of a node of torch's own that keeps all that is wanted of the forward pass.

    Args:
        listener: Who is told.
        site: Where.
        run: In which forward pass.
        dtype: Of the weight, if the listener brings its gradient.
        axis: Where the weight has its samples, if it has any.

    Attributes:
        fresh: Whether its backward pass has not come yet; a graph that is kept may bring several.
        kept: Under which names that node keeps inputs, and then extras.
    """

    __slots__ = ("_axis", "_dtype", "_listener", "fresh", "kept", "run", "site")

    def __init__(
        self,
        listener: Listener,
        site: Site,
        run: Run,
        dtype: torch.dtype | None = None,
        axis: int | None = None,
    ) -> None:
        self._listener, self.site, self.run, self._dtype, self._axis = listener, site, run, dtype, axis
        self.fresh = True
        self.kept: Sequence[str] = ()

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Before the layer's own node, of which these are the outputs' gradients."""
        grad = grads[0]
        if grad is None:
            return
        # To hold on to the node, which holds on to this, would be a circle that nobody frees.
        node = torch._C._current_autograd_node()
        with torch._C.DisableTorchFunction():  # nobody looks at these operations
            x, *extras = [getattr(node, name) for name in self.kept]
            self._tell(grad, x, extras)

    def weight_grad(self, grad: Tensor, x: Tensor | None, extras: Sequence[Tensor]) -> Tensor | None:
        """The same in a node of ours; the weight's gradient, if the listener brings it."""
        with torch._C.DisableTorchFunction():
            into = self._tell(grad, x, extras)
            if into is None or self._dtype is None:
                return None
            if self._axis is not None:
                into = into.movedim(0, self._axis)
            elif not self.site.alone:
                into = into[0] if len(into) == 1 else into.sum(0)
            return into if into.dtype is self._dtype else into.to(self._dtype)

    def _tell(self, grad: Tensor, x: Tensor | None, extras: Sequence[Tensor]) -> Tensor | None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient that is differentiated again (create_graph=True) is not that of single examples: "
                "use a method that collects no curvature"
            )
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                into = self._listener.heard(self, x, grad, extras)
        else:
            into = self._listener.heard(self, x, grad, extras)
        self.fresh = False
        return into


class _Tap(torch.autograd.Function):
    """Nothing, forward; backward, the use hears what comes by."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor | None, use: Use, x: Tensor | None, *extras: Tensor
    ) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, *extras)
        # The same memory, but no view in the eyes of autograd: what follows may change it in place.
        return y.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (grad, ctx.use.weight_grad(grad, saved[0], saved[1:]), None, *[None] * len(saved))


def tap(
    y: Tensor, weight: Tensor | None, use: Use, x: Tensor | None, extras: Sequence[Tensor] = ()
) -> Tensor:
    """Outputs, behind a node that tells a use what comes by.

    Args:
        y: A layer's outputs.
        weight: Whose gradient the listener brings; None if it brings none.
        use: To be told.
        x: The layer's inputs, where they matter.
        extras: Other tensors that its backward pass needs.
    """
    return _apply(y, weight, use, x, *extras)


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
