"""Curvature for a rule: passes are run inside a collector, which then has what it wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor

from posterity.curvature import Collector


@final
class Collecting:
    """A collector for life, if a rule wants one.

    Args:
        kind: Of the collector.
        rule: The rule's name, for messages.
    """

    def __init__(self, kind: type[Collector] | None, rule: str) -> None:
        # What it cannot see is refused in taking: only there is it known which gradients are used.
        self._collector = None if kind is None else kind(strict=False)
        self._rule = rule

    def watch(
        self, params: Iterable[tuple[str, Tensor]], drawn: Mapping[Tensor, Tensor], *, stacked: bool
    ) -> AbstractContextManager[object]:
        """What forward and backward passes are run inside.

        Args:
            params: Parameters, by name.
            drawn: Tensors that take the place of some.
            stacked: Whether these are ``[samples, ...]``.
        """
        if self._collector is None:
            return nullcontext()
        self._collector.clear()
        named = {name: drawn.get(p, p) for name, p in params}
        if not any(tensor.requires_grad for tensor in named.values()):
            return nullcontext()
        return self._collector.watch(named, stacked=stacked)

    def clear(self) -> None:
        """Forget what passes have told since :meth:`watch`."""
        if self._collector is not None:
            self._collector.clear()

    def take(self, names: Iterable[str], samples: int) -> tuple[Mapping[str, Tensor], int]:
        """Σ_i g_i² of the loss as backward saw it, over samples, by name; and the examples behind each.

        Args:
            names: Of the parameters that have a gradient; one without its squares is refused.
            samples: How many were run.
        """
        collector = self._collector
        if collector is None:
            return {}, 0
        for name in names:
            if name not in collector.sums or name in collector.refused:
                reason = collector.refused.get(name, "has a gradient that no layer has told of")
                raise RuntimeError(
                    f"{name!r} {reason}, from which {self._rule} has no single examples' gradients: freeze "
                    "it, or leave it to another optimiser"
                )
        taken = collector.sums, collector.examples // samples
        collector.watch({}).clear()  # it would hold on to drawn weights and sums until the next pass
        return taken
