"""The samples of a step: drawing weights, and absorbing the gradients taken there.

A sample is :func:`draw`, a forward and a backward pass inside :func:`collecting`, and :func:`absorb`. After
the last one the statistics go to the rule, in :mod:`posterity.optim.apply`. Loop, stack and CUDA graph all
use these functions; they differ in the caller, and in the source of :class:`Numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posterity.noise import Noise
from posterity.optim.checks import refuse_unreported
from posterity.optim.state import FlatGroup, Group, members

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


class Draw(NamedTuple):
    """Weights drawn for the parameters of a group.

    Attributes:
        group: The group.
        noise: Their noise.
        flat: All of them, each block stacked over the samples, in the parameters' dtype.
    """

    group: FlatGroup
    noise: Noise
    flat: Tensor

    def weights(self) -> list[Tensor]:
        """``[samples, ...]`` of every parameter."""
        return self.group.layout.stacked(self.flat, len(self.noise.samples))


class Numbers:
    """The numbers that change from step to step, and how a rule is run on them.

    This class is for an eager step, with Python numbers. In a captured step they are tensors.

    Attributes:
        groups: The optimiser's groups.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups

    @property
    def clock(self) -> int | Tensor:
        """The optimiser's count of steps, which addresses noise."""
        return int(self.groups[0]["steps"])

    def updates(self, p: Tensor, count: int) -> int | Tensor:
        """The number of a parameter's current update, counted by the host."""
        return count

    def read(self, sums: Tensor) -> list[Any]:
        """The numbers that processes have added up."""
        return list(sums.tolist())

    def row(self, values: Sequence[float], device: torch.device) -> Tensor:
        """Numbers for processes to add up, in one tensor."""
        return row(values, device)

    def run(self, rule: VariationalOptimizer, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function of a rule and other arguments."""
        return partial(function, rule)


def row(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers in one tensor, in double precision."""
    return torch.tensor(values, dtype=torch.float64, device=device)


# Draw.


@torch.no_grad()
def draw(opt: VariationalOptimizer, samples: range, weight: float) -> list[Draw]:
    """Draw weights of every stochastic parameter, with their noise; the parameters' own values are saved.

    Args:
        opt: The optimiser.
        samples: Numbers of the samples.
        weight: Weight of each in the statistics.
    """
    drawn, numbers = [], opt.numbers
    for flat in opt.cache.groups():
        flat.read()
        group = numbers.groups[flat.number]
        if group["deterministic"] or not opt.draws:
            continue
        noise = Noise(
            samples,
            flat.layout,
            seed=group["seed"],
            step=numbers.clock,
            weight=weight * opt.local.scale,
            device=flat.device,
            dtype=flat.mean.dtype,
            room=flat.room,
        )
        mean, std = flat.mean, numbers.run(opt, type(opt).std)(flat.state, group)
        if "keep" in flat.state:
            std = std * flat.state["keep"]
        drawn.append(Draw(flat, noise, noise.perturb(mean, std).to(flat.dtype)))
    if drawn and opt.matrices:
        opt.blocks.draw(opt, drawn)
    return drawn


# Absorb.


def expect(opt: VariationalOptimizer, drawn: Sequence[Draw], examples: float | None, weight: float) -> None:
    """Weight a step's gradients by their number of examples, before the first of them are added.

    If the weight turns out to be different, sums are corrected before they are sent.
    """
    if opt.pools and not opt.local.samples:
        opt.local.scale = float(examples or 1.0)
    for each in drawn:
        each.noise.weight = weight * opt.local.scale


def collecting(
    opt: VariationalOptimizer, drawn: Mapping[Tensor, Tensor] | None = None, *, stacked: bool = False
) -> AbstractContextManager[object]:
    """A context for forward and backward passes, in which layers report the curvature that the rule needs.

    Args:
        opt: The optimiser.
        drawn: Tensors in place of parameters, if any.
        stacked: Whether these are ``[samples, ...]``.
    """
    if opt.collector is None or not due(opt.param_groups[0]):
        return nullcontext()
    opt.collector.clear()
    drawn, groups = drawn or {}, [group for group in opt.param_groups if not opt.by_adam(group)]
    named = {name: drawn.get(p, p) for group in groups for name, p in members(group)}
    if not any(tensor.requires_grad for tensor in named.values()):
        return nullcontext()
    return opt.collector.watch(named, stacked=stacked)


def due(group: Group) -> bool:
    """Whether the next step has the second of a rule's statistics, by the settings of the first group."""
    every = group.get("factors_every", group.get("second_every", 1))
    return bool(group["steps"] % every == 0)


def multiplies(opt: VariationalOptimizer) -> bool:
    """Whether the next step needs products of gradients and noise, E[g·eps]."""
    return opt.collects is None and due(opt.param_groups[0])


def absorb(
    opt: VariationalOptimizer,
    grads: Sequence[Tensor | None],
    drawn: Sequence[Draw],
    samples: int,
    weight: float,
    done: Collection[Tensor] = (),
) -> None:
    """Add gradients ``[samples, ...]`` taken at drawn weights to the statistics.

    Gradients of one sample lack the leading dimension, as do those of deterministic parameters, which are
    sums over the samples.

    Args:
        opt: The optimiser.
        grads: Gradients of its parameters, in order.
        drawn: The weights.
        samples: Their number.
        weight: Weight of each.
        done: Parameters whose gradients have been added already.
    """
    sums, collector = opt.local, opt.collector
    found = {p: grad for p, grad in zip(opt.parameters(), grads, strict=True) if grad is not None}
    by_group = [
        (flat, {i: found[p] for i, p in enumerate(flat.params) if p in found}) for flat in opt.cache.latest
    ]
    noises = {each.group: each.noise for each in drawn if multiplies(opt)}
    reports = collector if due(opt.param_groups[0]) else None
    if reports is not None:  # before anything is added
        wanted = {
            flat.layout.names[i]: grad
            for flat, own in by_group
            if not opt.by_adam(opt.param_groups[flat.number])
            for i, grad in own.items()
        }
        refuse_unreported(reports, wanted, type(opt).__name__)
    sums.samples += samples
    sums.weight = weight
    for flat, own in by_group:
        if more := {i: grad for i, grad in own.items() if flat.params[i] not in done} if done else own:
            sums.of(flat, noises.get(flat)).add(more, noises.get(flat), weight * sums.scale)
    if reports is None:
        return
    for flat, own in by_group:
        names = flat.layout.names
        if squares := {i: reports.sums[names[i]] for i in own if names[i] in reports.sums}:
            each = sums.of(flat, None)
            flat.add(squares, each.second, weight * sums.scale**2, each.poison)
    sums.examples += reports.examples
    sums.add_layers(reports.blocks)
    reports.watch({}).clear()  # it would hold on to drawn weights and sums until the next pass
