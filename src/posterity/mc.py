"""Running a model under K sets of weights: one after another (loop) or in one vectorised pass (stack).

Both give the same numbers for the same weights. In both, a model's buffers (BatchNorm's running statistics)
are moved by the first sample alone. Models that cannot be vectorised fall back to the loop with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from posterity.routes import StackedRoutes

How: TypeAlias = Literal["stack", "loop"]

# Modules that failed to vectorise once are not tried, or warned of, again.
_unstackable: WeakSet[nn.Module] = WeakSet()


def run(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *args: Any,
    how: How = "stack",
    chunk: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Outputs ``[K, B, ...]`` of a model under K sets of weights.

    Args:
        model: Any module that returns one tensor.
        weights: Named parameters with a leading dimension K; those not named keep the model's values.
        args: The model's inputs, the same for all samples.
        how: ``"stack"`` for one vectorised pass, ``"loop"`` for one pass per sample.
        chunk: At most this many samples at once, to cap the memory of a stacked pass.
        kwargs: The model's keyword arguments.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> run(model, {"weight": torch.zeros(5, 2, 3)}, torch.ones(4, 3)).shape
        torch.Size([5, 4, 2])
    """
    samples = _count(weights)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    outputs: list[Tensor] = []
    for rows in chunks(samples, 1 if how == "loop" else chunk):
        part = {name: value[rows.start : rows.stop] for name, value in weights.items()}
        output, moved = stacked_pass(model, part, buffers, args, kwargs, stacked=how == "stack")
        outputs.append(output)
        if rows.start == 0:
            set_buffers(model, moved)
    return torch.cat(outputs)


def stacked_pass(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    stacked: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs under the given weights, every sample starting from ``buffers``, and the first's buffers."""

    def call(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Tensor:
        return cast(Tensor, functional_call(model, {**weights, **buffers}, args, kwargs))

    rows = range(_count(weights))
    reason = ""
    if stacked and model not in _unstackable:
        moved = {name: value.expand(len(rows), *value.shape).clone() for name, value in buffers.items()}
        try:
            with warnings.catch_warnings():
                # Operations without a batching rule still run, one sample after another.
                warnings.filterwarnings("ignore", message="There is a performance drop")
                with StackedRoutes():
                    outputs = vmap(call, randomness="different")(weights, moved)
            return outputs, {name: value[0] for name, value in moved.items()}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
    states = [{name: value.clone() for name, value in buffers.items()} for _ in rows]
    looped = [call({name: value[k] for name, value in weights.items()}, states[k]) for k in rows]
    if reason:  # the loop went well, so it was vectorising that failed, not the model
        _unstackable.add(model)
        warnings.warn(
            f"{getattr(model, 'title', type(model).__name__)} cannot be vectorised over weight samples "
            f"({reason}); "
            "running one sample after another instead",
            stacklevel=4,
        )
    return torch.stack(looped), states[0]


@torch.no_grad()
def set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module's buffers the given values, in place."""
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _count(weights: Mapping[str, Tensor]) -> int:
    if not weights:
        raise ValueError("no weights were given: pass the draws of a posterior")
    return len(next(iter(weights.values())))


def chunks(samples: int, chunk: int | None) -> Iterator[range]:
    """Sample numbers, at most ``chunk`` at once."""
    size = samples if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    for start in range(0, samples, size):
        yield range(start, min(start + size, samples))
