"""Drawn weights in a model: put in for a while, and taken out again whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from posterity.buffers import Keeper
from posterity.noise import Noise
from posterity.optim.slab import Slab


class Draw(NamedTuple):
    """Weights drawn for the parameters of a slab.

    Attributes:
        slab: Whose.
        noise: Behind them.
        flat: All of them, each block stacked over the samples, in the parameters' dtype.
    """

    slab: Slab
    noise: Noise
    flat: Tensor

    def weights(self) -> list[Tensor]:
        """``[samples, ...]`` of every parameter."""
        return self.slab.layout.stacked(self.flat, len(self.noise.samples))


_sparse = attrgetter("is_sparse")


class _Unused(Exception):
    """No backward pass was run inside."""


@final
class Sampling:
    """Runs a model under one sample after another of the weights that an optimiser holds.

    Every sample of a step starts from the buffers (BatchNorm's statistics) before the step; those that the
    first one leaves are kept.

    Args:
        module: The model, if its buffers are to be looked after.

    Attributes:
        entered: How often a sample's context was entered again inside itself; None outside of it.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.entered: int | None = None
        model = nn.Module() if module is None else module
        self._first, self._later = Keeper(model), Keeper(model)
        self._before: Keeper | None = None  # the buffers as they were before the step

    @contextmanager
    def sample(
        self,
        number: int,
        params: list[Tensor],
        draw: Callable[[range], list[Draw]],
        absorb: Callable[[Callable[[Tensor], Tensor | None], list[Draw], int], None],
        collecting: AbstractContextManager[object],
    ) -> Iterator[None]:
        """Inside, the parameters have drawn weights; gradients that were taken there are absorbed.

        Args:
            number: Of the sample.
            params: All parameters of the optimiser.
            draw: Draws the weights of some samples.
            absorb: Takes gradients, the draws behind them and the number of samples.
            collecting: What forward and backward passes are run inside.
        """
        before = [p.grad for p in params]
        entry = self._first if number == 0 else self._later
        entry.keep()
        if number == 0:
            self._before = entry
        used = False
        drawn: list[Draw] = []
        try:
            drawn = draw(range(number, number + 1))
            with torch.no_grad():
                for each in drawn:
                    each.slab.put(each.flat)
            torch.clear_autocast_cache()  # it casts a weight once, and would use it in all samples
            if number > 0:
                self.restore()
            for p, grad in zip(params, before, strict=True):
                if grad is not None:
                    p.grad = None
            self.entered = 0
            with suppress(_Unused), collecting:
                yield
                with torch._C.DisableTorchFunction():  # what collects would look at each of these
                    grads = [grad for p in params if (grad := p.grad) is not None]
                    sparse = any(map(_sparse, grads))
                if not grads:
                    raise _Unused  # without a backward pass there was nothing to collect
                if sparse:
                    raise TypeError(
                        "sparse gradients are not supported: build the Embedding with sparse=False"
                    )
            if grads:
                absorb(attrgetter("grad"), drawn, 1)
                used = True
        finally:
            if not used:  # an error, or a forward pass alone: as if nothing had happened
                for p, grad in zip(params, before, strict=True):
                    p.grad = grad
            self.entered = None
            with torch.no_grad():
                for each in drawn:
                    each.slab.locate()
                    each.slab.put(each.slab.weights)
            torch.clear_autocast_cache()
            if not (used and number == 0):
                entry.restore()

    def restore(self) -> None:
        """Give the model the buffers that it had before the step, if one is under way."""
        if self._before is not None:
            self._before.restore()

    def restore_unless(self, ok: Tensor) -> None:
        """The same, if a flag on the device is not set."""
        if self._before is not None:
            self._before.restore_unless(ok)

    def finish(self) -> None:
        """Let the next sample be the first of another step."""
        self._before = None
