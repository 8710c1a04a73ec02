"""Running a model under K sets of weights: one after another (loop) or in one vectorised pass (stack).

Both give the same numbers for the same weights. In both, a model's buffers (BatchNorm's running statistics)
are moved by the first sample alone. Models that cannot be vectorised fall back to the loop with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from posterity.optim.variational import VariationalOptimizer

How: TypeAlias = Literal["stack", "loop"]
LossFn: TypeAlias = Callable[..., Tensor]

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
    for rows in _chunks(samples, 1 if how == "loop" else chunk):
        part = {name: value[rows.start : rows.stop] for name, value in weights.items()}
        output, moved = _pass(model, part, buffers, args, kwargs, stacked=how == "stack")
        outputs.append(output)
        if rows.start == 0:
            _set_buffers(model, moved)
    return torch.cat(outputs)


def compile_step(
    model: nn.Module, loss_fn: LossFn, optimizer: VariationalOptimizer, *, chunk: int | None = None
) -> Callable[..., Tensor]:
    """A training step that evaluates all weight samples in one pass: ``loss = train_step(x, y)``.

    It draws the same noise and takes the same statistics as ``optimizer.step(closure)``.

    Args:
        model: The module whose parameters the optimiser holds.
        loss_fn: ``loss_fn(model, *batch)`` gives the mean loss of a batch.
        optimizer: A rule such as BGD or IVON; it decides the number of samples.
        chunk: At most this many samples at once.

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(4, 2)
        >>> loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
        >>> train_step = compile_step(model, loss_fn, BGD(model))
        >>> train_step(torch.randn(8, 4), torch.randint(0, 2, (8,))).shape
        torch.Size([])
    """
    target = _Loss(model, loss_fn)

    def train_step(*batch: Tensor) -> Tensor:
        samples = optimizer.param_groups[0]["mc_samples"]
        before = {name: value.clone() for name, value in target.named_buffers()}
        losses: list[Tensor] = []
        try:
            for rows in _chunks(samples, chunk):
                drawn = {f"model.{name}": pair for name, pair in optimizer.draw(rows).items()}
                theta = {name: value.requires_grad_() for name, (value, _) in drawn.items()}
                loss, moved = _pass(target, theta, before, batch, {}, stacked=True)
                if rows.start == 0:
                    _set_buffers(target, moved)
                losses.append(loss.detach())
                _absorb(optimizer, target, loss, theta, {name: eps for name, (_, eps) in drawn.items()})
            mean_loss = torch.cat(losses).mean()
            optimizer.watch(mean_loss)
            optimizer.step(batch_size=len(batch[0]))
        except BaseException:
            _set_buffers(target, before)
            optimizer.zero_grad()
            raise
        return mean_loss

    return train_step


@final
class _Loss(nn.Module):
    """A loss function as a module, so that weights can be swapped underneath it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss_fn(self.model, *batch)


def _absorb(
    optimizer: VariationalOptimizer,
    target: nn.Module,
    losses: Tensor,
    theta: dict[str, Tensor],
    noise: dict[str, Tensor],
) -> None:
    """Gradients of each sample's loss at its own weights, handed to the optimiser; unused ones skipped."""
    fixed = {name: p for name, p in target.named_parameters() if name not in theta and p.requires_grad}
    wanted = {**theta, **fixed}
    grads = torch.autograd.grad(losses.sum(), list(wanted.values()), allow_unused=True)
    optimizer.absorb(
        {
            name.removeprefix("model."): (grad, noise.get(name))
            for name, grad in zip(wanted, grads, strict=True)
            if grad is not None
        },
        len(losses),
    )


def _pass(
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
        name = type(model.model if isinstance(model, _Loss) else model).__name__
        warnings.warn(
            f"{name} cannot be vectorised over weight samples ({reason}); "
            "running one sample after another instead",
            stacklevel=4,
        )
    return torch.stack(looped), states[0]


@torch.no_grad()
def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _count(weights: Mapping[str, Tensor]) -> int:
    if not weights:
        raise ValueError("no weights were given: pass the draws of a posterior")
    return len(next(iter(weights.values())))


def _chunks(samples: int, chunk: int | None) -> Iterator[range]:
    size = samples if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    for start in range(0, samples, size):
        yield range(start, min(start + size, samples))
