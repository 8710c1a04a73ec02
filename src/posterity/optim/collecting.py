"""Curvature for a rule: passes are run inside a collector, which then has what it wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, final

from torch import Tensor

from posterity.curvature import Collector, Kronecker
from posterity.optim.groups import Group


class Told(NamedTuple):
    """What passes have told of the loss as backward saw it, summed over samples.

    Attributes:
        squares: Σ_i g_i², by the parameter's name.
        layers: Kronecker factors, by the layer's weight.
        examples: Behind each sample.
    """

    squares: Mapping[str, Tensor]
    layers: Mapping[str, Kronecker]
    examples: int


@final
class Collecting:
    """A collector for life, if a rule wants one.

    Args:
        kind: Of the collector.
        rule: The rule's name, for messages.
    """

    def __init__(self, kind: type[Collector] | None, rule: str) -> None:
        # What it cannot see is refused in taking: only there is it known which gradients are used.
        self._collector = None if kind is None else kind(strict=False, once=True)
        self._rule, self._told = rule, False

    def watch(
        self,
        params: Iterable[tuple[str, Tensor]],
        drawn: Mapping[Tensor, Tensor],
        *,
        stacked: bool,
        due: bool,
    ) -> AbstractContextManager[object]:
        """What forward and backward passes are run inside.

        Args:
            params: Parameters, by name.
            drawn: Tensors that take the place of some.
            stacked: Whether these are ``[samples, ...]``.
            due: Whether they are to tell of anything.
        """
        self._told = due
        if self._collector is None or not due:
            return nullcontext()
        self._collector.clear()
        named = {name: drawn.get(p, p) for name, p in params} if drawn else dict(params)
        if not any(tensor.requires_grad for tensor in named.values()):
            return nullcontext()
        return self._collector.watch(named, stacked=stacked)

    def clear(self) -> None:
        """Forget what passes have told since :meth:`watch`."""
        if self._collector is not None:
            self._collector.clear()

    def take(self, grads: Mapping[str, Tensor], samples: int) -> Told:
        """What passes have told of the loss as backward saw it.

        Args:
            grads: Gradients by name; one without its curvature is refused.
            samples: How many were run.
        """
        collector = self._collector
        if collector is None or not self._told:
            return Told({}, {}, 0)
        layers = collector.blocks
        inside = {name for each in layers.values() for name in (each.weight, each.bias)}
        for name in collector.several() & grads.keys():
            if grads[name]._version == 0:  # else the passes' gradients were added in it
                raise RuntimeError(
                    f"the gradient of {name!r} was dropped between backward passes that {self._rule} has "
                    "curvature of: call the optimiser's own zero_grad()"
                )
        for name in grads:
            if not (name in collector.sums or name in inside) or name in collector.refused:
                reason = collector.refused.get(name, "has a gradient that no layer reported")
                raise RuntimeError(
                    f"{name!r} {reason}, from which {self._rule} has no single examples' gradients: "
                    f"{_advice(name)}"
                )
        for each in layers.values():
            if each.rows is not None:
                raise RuntimeError(
                    f"{each.weight!r} is used in parts of its rows, of which {self._rule} has no blocks: "
                    f"{_advice(each.weight)}"
                )
        told = Told(collector.sums, layers, collector.examples // samples)
        collector.watch({}).clear()  # it would hold on to drawn weights and sums until the next pass
        return told


def due(group: Group) -> bool:
    """Whether the step that comes next is one of those that collect curvature, as the first group says."""
    return bool(group["steps"] % group.get("factors_every", 1) == 0)


def _advice(name: str) -> str:
    return (
        f"leave it without noise and let Adam train it (deterministic={name!r}, deterministic_lr=1e-3), or "
        "freeze it"
    )
