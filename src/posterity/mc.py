"""Running a model under K sets of weights: one after another (loop) or in one vectorised pass (stack).

Both give the same numbers for the same weights. In both, only the first sample updates a model's buffers
(BatchNorm's running statistics). Models that cannot be vectorised fall back to the loop with one warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from posterity import buffers
from posterity.arguments import MODULE, TENSORS, TEXT, WHOLE, described, is_dense, takes
from posterity.caller import warn
from posterity.inputs import Pick, arguments, batches, is_loader, moved, tensor_of
from posterity.layers import Intercept
from posterity.replica import origin, replica
from posterity.torch_private import no_fallback_warnings, read_forward_derivatives

How: TypeAlias = Literal["stack", "loop"]

# Modules that failed to vectorise once are not tried, or warned of, again.
_unstackable: WeakSet[nn.Module] = WeakSet()
# torch counts levels of forward derivatives per process, not per thread, so threads take turns.
_forward_derivatives = threading.RLock()


@takes(model=MODULE, how=TEXT, chunk=WHOLE, around=TENSORS)
def run(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    /,
    *args: Any,
    how: How = "stack",
    chunk: int | None = None,
    output: Pick | None = None,
    around: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Outputs ``[K, B, ...]`` of a model under K sets of weights.

    The model runs as a replica: its own weights and the attributes that its ``forward`` sets do not change.
    Only buffers that the first sample updates are updated in the model itself: BatchNorm's statistics in
    training mode.

    Args:
        model: Any module.
        weights: Named parameters with a leading dimension K; those not named keep the model's values.
        args: The model's inputs, the same for all samples: tensors or arrays, alone or in tuples and dicts;
            or a DataLoader of batches, whose outputs are joined.
        how: ``"stack"`` for one vectorised pass, ``"loop"`` for one pass per sample.
        chunk: At most this many samples at once, to cap the memory of a stacked pass.
        output: Which of the model's outputs: a key, an index or a function. Without it the model must return
            a tensor, or something with ``logits``.
        around: One value μ for each of these weights: run the model linearised there, f(x, μ) + J(x) (θ − μ),
            which updates no buffers.
        kwargs: The model's keyword arguments.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> run(model, {"weight": torch.zeros(5, 2, 3)}, torch.ones(4, 3)).shape
        torch.Size([5, 4, 2])
    """
    if how not in ("stack", "loop"):
        raise ValueError(f"how must be 'stack' or 'loop', not {how!r}")
    twin = replica(model)
    before = buffers.writable(twin)
    versions = buffers.versions(before)
    options: dict[str, Any] = {"how": how, "chunk": chunk, "output": output, "around": around}
    loader = len(args) == 1 and is_loader(args[0])
    calls = map(arguments, batches(args[0], 1)) if loader else [(args, {})]
    outputs = [run_replica(twin, weights, *a, **options, **{**k, **kwargs}) for a, k in calls]
    if buffers.versions(before) != versions:
        buffers.restore(model, before)
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def run_replica(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    /,
    *args: Any,
    how: How,
    chunk: int | None = None,
    output: Pick | None = None,
    around: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """The same as :func:`run`, in a module that nothing else uses: its weights are swapped."""
    args, kwargs = moved((args, kwargs), model)
    samples = _count(weights)
    if around is not None:
        # Before rounding to the model's dtype: in half precision a difference of rounded weights is coarse.
        if missing := weights.keys() - around.keys():
            raise ValueError(f"around= has no value for {min(missing)!r}: give one for each of the weights")
        weights = _checked(model, weights, samples)
        shifts = _checked(model, {name: each - around[name] for name, each in weights.items()}, samples)
        return _linear_pass(model, shifts, around, args, kwargs, how, chunk, output)
    weights = _checked(model, weights, samples)
    before = buffers.snapshot(model)
    outputs: list[Tensor] = []
    for rows in chunks(samples, 1 if how == "loop" else chunk):
        part = {name: value[rows.start : rows.stop] for name, value in weights.items()}
        with Intercept():
            found, after = stacked_pass(
                model, part, before, args, kwargs, stacked=how == "stack", output=output
            )
        outputs.append(found)
        if rows.start == 0 and after is not None:
            buffers.restore(model, after)
    return torch.cat(outputs)


def one_pass(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Pick | None = None,
) -> Tensor:
    """Output under one set of weights; buffers are read from ``state``, and updated there."""
    return tensor_of(functional_call(model, {**weights, **state}, args, kwargs), output)


def stacked_pass(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    stacked: bool,
    own: bool = False,
    output: Pick | None = None,
    more: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Outputs under the given weights, and the first sample's buffers, if it updated them.

    Each sample starts from the given buffers.

    Args:
        model: What to run.
        weights: ``[K, ...]`` by name.
        before: The buffers, by name.
        args: The model's inputs.
        kwargs: Its keyword arguments, the same for all.
        stacked: Whether to use one pass, if possible.
        own: Whether the inputs are tensors ``[K, ...]``, one for each sample; else all samples share them.
        output: Which of the model's outputs, as for :func:`run`.
        more: Computes the model's parameters from the weights of one pass, or of one sample.
    """

    def call(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], *mine: Tensor) -> Tensor:
        given = weights if more is None else more(weights)
        return one_pass(model, given, state, mine if own else args, kwargs, output)

    rows = range(_count(weights))
    inputs = args if own else ()
    reason = ""
    if stacked and len(rows) > 1 and origin(model) not in _unstackable:
        after = buffers.copied(
            {name: value.expand(len(rows), *value.shape) for name, value in before.items()}
        )
        versions = buffers.versions(after)
        try:
            with no_fallback_warnings():
                outputs = vmap(call, randomness="different")(weights, after, *inputs)
            moved = buffers.versions(after) != versions
            return outputs, {name: value[0] for name, value in after.items()} if moved else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
    states = [buffers.copied(before) for _ in rows]
    versions = buffers.versions(states[0])
    looped = [
        call({name: value[k] for name, value in weights.items()}, states[k], *(each[k] for each in inputs))
        for k in rows
    ]
    if reason:  # the loop went well, so it was vectorising that failed, not the model
        _warn_of_loop(model, reason)
    return torch.stack(looped), states[0] if buffers.versions(states[0]) != versions else None


def _linear_pass(
    model: nn.Module,
    shifts: Mapping[str, Tensor],
    around: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    how: How,
    chunk: int | None,
    output: Pick | None,
) -> Tensor:
    """Outputs of the linearised model, for shifts ``[K, ...]`` of the weights.

    One pass gives f(x, μ), whatever K; the layers before the first shifted one run once.
    """
    mean = {name: around[name].to(shift.dtype) for name, shift in shifts.items()}
    before = buffers.snapshot(model)

    def network(weights: dict[str, Tensor]) -> Tensor:
        # Copies, since a transformed function may not change tensors other than its arguments.
        return one_pass(model, weights, buffers.copied(before), args, kwargs, output)

    def along(shift: dict[str, Tensor]) -> Tensor:
        at_mean, moved = cast("tuple[Tensor, Tensor]", jvp(network, (mean,), (shift,)))
        return at_mean + moved

    rows, reason = range(_count(shifts)), ""
    with _forward_derivatives, Intercept(fused=False), no_fallback_warnings():
        read_forward_derivatives()
        if how == "stack" and len(rows) > 1 and origin(model) not in _unstackable:
            try:
                return vmap(along, chunk_size=chunk, randomness="different")(dict(shifts))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                reason = str(error).partition("\n")[0]
        looped = [along({name: shift[k] for name, shift in shifts.items()}) for k in rows]
    if reason:
        _warn_of_loop(model, reason)
    return torch.stack(looped)


def _warn_of_loop(model: nn.Module, reason: str) -> None:
    """Once for a model: it is not vectorised again."""
    model = origin(model)
    _unstackable.add(model)
    warn(
        f"{getattr(model, 'title', type(model).__name__)} cannot be vectorised over weight samples "
        f"({reason}); "
        "running one sample after another instead"
    )


def _count(weights: Mapping[str, Tensor]) -> int:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"pass draws of the weights, such as posterior.sample(n), not a {type(weights).__name__}"
        )
    if not weights:
        raise ValueError("no weights were given: pass the draws of a posterior")
    if not all(isinstance(value, Tensor) and value.dim() for value in weights.values()):
        raise TypeError("pass draws of the weights, tensors with one row per sample")
    return len(next(iter(weights.values())))


def _checked(model: nn.Module, weights: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """The weights in the model's dtypes; raises for weights that would not be used."""
    params = dict(model.named_parameters())
    for name, value in weights.items():
        if name not in params:
            raise ValueError(f"the model has no parameter {name!r}")
        if not is_dense(value):
            raise TypeError(f"the weights of {name!r} must be a dense tensor, not {described(value)}")
        if value.shape != (samples, *params[name].shape):
            raise ValueError(
                f"the weights of {name!r} have shape {tuple(value.shape)}, not "
                f"{(samples, *params[name].shape)}: one row per sample"
            )
    return {name: value.to(params[name].dtype) for name, value in weights.items()}


def chunks(samples: int, chunk: int | None) -> Iterator[range]:
    """Sample numbers, at most ``chunk`` at once."""
    size = samples if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    for start in range(0, samples, size):
        yield range(start, min(start + size, samples))
