"""The evidence lower bound per example, with an explicit scale of the KL.

The loss of every gradient method is

    mean NLL of the batch + factor · KL(q ‖ p) / num_data

so that a whole epoch counts the KL once if ``factor`` is 1. A factor is a number (KL down-scaling) or a
function of the step, such as those of :func:`blundell` and :func:`warmup`.

In a plain loop only ``elbo`` sees the NLL. So a KL carries a reference to the :class:`NllWatch` of its model,
in the metadata of its autograd node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast, final
from weakref import proxy, ref

import torch
from torch import Tensor, nn

from posterity.arguments import NUMBER, TENSOR, WHOLE, Kind, described, is_number, takes
from posterity.caller import warn
from posterity.optim.watch import LossWatch, Untrained, noise_of
from posterity.posterior import Factorised

Factor: TypeAlias = float | Callable[[int], float]
# The key in the metadata of a KL's autograd node: unlike an attribute of the tensor, it is not saved with it.
_WATCH = "posterity_watch"
_FACTOR = Kind("a number, or a function of the step", lambda factor: is_number(factor) or callable(factor))


@takes(nll=TENSOR, divergence=TENSOR, num_data=NUMBER, factor=_FACTOR, step=WHOLE)
def elbo(
    nll: Tensor, divergence: Tensor, *, num_data: int, factor: Factor = 1.0, step: int | None = None
) -> Tensor:
    """The negative ELBO per example: the loss to minimise.

    Args:
        nll: Mean negative log-likelihood of the batch, at sampled weights.
        divergence: KL(q ‖ p), summed over weights.
        num_data: Training examples.
        factor: Scale of the KL, on top of 1 / num_data, or a function of the step that gives it.
        step: Number of the batch, counted from 0 at the start; needed if ``factor`` is a function.

    Example:
        >>> import torch
        >>> elbo(torch.tensor(0.5), torch.tensor(100.0), num_data=1000)
        tensor(0.6000)
    """
    refuse_num_data(num_data)
    if divergence.dim() and divergence.shape != nll.shape:
        raise ValueError(
            f"the divergence must be one number, summed over weights, not of shape {list(divergence.shape)}"
        )
    if nll.numel() != 1 and divergence.shape != nll.shape:
        raise ValueError(f"nll must be one number, the mean of the batch, not of shape {list(nll.shape)}")
    if nll.requires_grad and nll.numel() == 1:
        found = _notes(divergence).get(_WATCH)
        if found is not None and (watch := found()) is not None:
            watch.follow(nll)
    return nll + (factor_at(factor, step) / num_data) * divergence


def watched_by(divergence: Tensor, watch: NllWatch) -> Tensor:
    """The same KL, with a watch to which ``elbo`` passes the NLL while the watch is alive."""
    _notes(divergence)[_WATCH] = ref(watch)
    return divergence


def _notes(tensor: Tensor) -> dict[str, Any]:
    """The metadata of a tensor's autograd node; an empty dict without a node, or under the compiler."""
    if torch.compiler.is_compiling() or tensor.grad_fn is None:
        return {}
    return cast(dict[str, Any], tensor.grad_fn.metadata)  # torch's stubs type this property as a method


class Trained(Protocol):
    """A module whose posterior is trained by gradient: :class:`~posterity.Variational`."""

    module: nn.Module
    posterior: Factorised
    draws: int

    def versions(self) -> list[int]:
        """Numbers that change whenever the posterior does."""


@final
class NllWatch:
    """Watches the NLLs to which a loop adds a model's KL, and warns about a run that goes wrong.

    Args:
        model: The model of the KL; it owns this object, which holds only a weak reference to it.
    """

    def __init__(self, model: Trained) -> None:
        self._model: Trained = proxy(model)
        self._losses = loss_watch(self._model, "the variational() model")
        self._untrained: Untrained | None = None  # from the first step on
        self._versions: list[int] = []  # of the posterior, at the last step

    def follow(self, nll: Tensor) -> None:
        """Take the NLL of a step; only the first if a step has several."""
        if nll.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        before, self._versions = self._versions, self._model.versions()
        if before == self._versions:
            return
        if not (before or self._model.draws or self._reached(nll)):
            warn(
                "elbo() got the NLL of a model whose weights were never drawn, which trains no std: call the "
                "model that variational() returned, not the module inside it"
            )
        self._losses.follow(nll)
        if self._untrained is None:
            self._untrained = Untrained(*self._learned())
        self._untrained.look()

    def _reached(self, nll: Tensor) -> bool:
        """Whether an NLL depends on parameters outside the module, such as stds."""
        _, others = self._learned()
        grads = torch.autograd.grad(nll, others, retain_graph=True, allow_unused=True) if others else ()
        return not others or any(grad is not None for grad in grads)

    def _learned(self) -> tuple[list[Tensor], list[Tensor]]:
        """The posterior's trainable parameters: the means, shared with the module, and all others."""
        own = {id(p) for p in self._model.module.parameters()}
        learned = [p for p in self._model.posterior.parameters() if p.requires_grad]
        return [p for p in learned if id(p) in own], [p for p in learned if id(p) not in own]


def loss_watch(model: Trained, name: str) -> LossWatch:
    """The watch over the NLLs of a gradient method, whose warnings name the method's settings.

    Args:
        model: The trained model.
        name: Who is named in messages.
    """
    return LossWatch(
        name,
        "pass a smaller std_scale to variational(), or lower the KL's factor",
        lambda: noise_of(model.posterior.blocks.values()),
        fresh=model.draws == 0,
        otherwise="try another lr, and norm layers if the net is deep",
    )


def refuse_num_data(num_data: int) -> None:
    """Raise if the number of examples is below 1."""
    if not 1 <= num_data < math.inf:
        raise ValueError(f"num_data must be at least 1, not {num_data}")


def factor_at(factor: Factor, step: int | None) -> float:
    """The KL's factor at a step, a number that is 0 or more."""
    if callable(factor):
        if step is None:
            raise ValueError("factor is a function of the step: pass step=, the number of the batch")
        factor = factor(step)
        if not is_number(factor):
            raise TypeError(f"factor must give a number at every step, not {described(factor)}")
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor must be 0 or more, and finite, not {factor}: it scales the KL")
    return factor


@takes(num_batches=WHOLE)
def blundell(num_batches: int) -> Callable[[int], float]:
    """Blundell et al. 2015, eq. (9): batch i of M weights the KL by 2^(M−i) / (2^M − 1), early batches most.

    Example:
        >>> factor = blundell(3)  # times num_batches, since elbo() divides by num_data
        >>> [round(factor(step) / 3 * 7) for step in range(3)]
        [4, 2, 1]
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, not {num_batches}")

    @takes(step=WHOLE)
    def factor(step: int) -> float:
        return num_batches * 0.5 ** (step % num_batches + 1) / (1.0 - 0.5**num_batches)

    return factor


@takes(steps=WHOLE, delay=WHOLE, start=NUMBER, end=NUMBER)
def warmup(steps: int, *, delay: int = 0, start: float = 0.0, end: float = 1.0) -> Callable[[int], float]:
    """``start`` for ``delay`` steps, then a straight line to ``end`` over ``steps`` more steps.

    A factor of the KL may start at 0; a temperature must start above 0.

    Example:
        >>> [warmup(4, delay=2)(step) for step in (0, 2, 4, 6, 100)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if not (0 <= start < math.inf and 0 <= end < math.inf):
        raise ValueError(f"start and end must be 0 or more, and finite, not {start} and {end}")

    @takes(step=WHOLE)
    def factor(step: int) -> float:
        return start + (end - start) * min(max((step - delay) / steps, 0.0), 1.0)

    return factor
