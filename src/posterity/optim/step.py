"""One training step: weights are drawn, their gradients absorbed, and the statistics applied.

A sample of a step is :func:`draw`, a forward and a backward pass inside :func:`collecting`, and
:func:`absorb`. After the last one :func:`apply` hands the statistics to the rule. Loop, stack and CUDA graph
all run these functions; they differ in who calls them, and in where :class:`Numbers` come from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posterity.curvature import NothingCollected
from posterity.noise import Noise, kernels
from posterity.optim.adam import adam_update
from posterity.optim.checks import hold_back, refuse_unfit, refuse_unreported
from posterity.optim.counting import Behind, ModuleCalls
from posterity.optim.state import FlatGroup, Group, State, members
from posterity.optim.statistics import Statistics, Sums
from posterity.sharding import gradient

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer
    from posterity.optim.overlap import Flight


class Draw(NamedTuple):
    """Weights drawn for the parameters of a group.

    Attributes:
        group: Whose.
        noise: Behind them.
        flat: All of them, each block stacked over the samples, in the parameters' dtype.
    """

    group: FlatGroup
    noise: Noise
    flat: Tensor

    def weights(self) -> list[Tensor]:
        """``[samples, ...]`` of every parameter."""
        return self.group.layout.stacked(self.flat, len(self.noise.samples))


class Numbers:
    """What changes from step to step without a tensor being replaced, and how a rule is run on it.

    These are an eager step's: Python's own numbers. Those of a captured step are tensors.

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
        """The number of the update that a parameter is having, which the host has counted."""
        return count

    def read(self, sums: Tensor) -> list[Any]:
        """What processes have added up, number by number."""
        return list(sums.tolist())

    def row(self, values: Sequence[float], device: torch.device) -> Tensor:
        """Numbers that processes are to add up, in one tensor."""
        return row(values, device)

    def run(self, rule: VariationalOptimizer, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a rule and more, as it is run for this rule."""
        return partial(function, rule)


def row(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers in one tensor, in double precision."""
    return torch.tensor(values, dtype=torch.float64, device=device)


# Draw.


@torch.no_grad()
def draw(opt: VariationalOptimizer, samples: range, weight: float) -> list[Draw]:
    """Weights of every stochastic parameter, with their noise; the parameters' own are kept.

    Args:
        opt: The optimiser.
        samples: Numbers of the samples.
        weight: Of each in the statistics.
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


@contextmanager
def one_sample(
    opt: VariationalOptimizer, number: int, weight: float, flight: Flight | None = None
) -> Iterator[None]:
    """Inside, the model has drawn weights; gradients that were taken there are absorbed.

    Whatever is raised inside, the means come back, and nothing is absorbed. So it is without a weight.

    Args:
        opt: The optimiser.
        number: Of the sample.
        weight: Of the sample; 0 if nothing is to be learned from it.
        flight: What sends gradients as soon as they are there.
    """
    params = opt.parameters()
    before = [p.grad for p in params]
    opt.buffers.enter(number)
    used, failed, drawn = False, True, list[Draw]()
    calls, handle = ModuleCalls(opt.batch_dim, params, opt.sharded), None
    try:
        one = range(number, number + 1)
        drawn = draw(opt, opt.numbered(one) if weight else one, weight)
        with torch.no_grad():
            for each in drawn:
                each.group.put(each.flat)
        if opt.sharded is not None:
            opt.sharded.drop_gathered(failed=False)
        torch.clear_autocast_cache()  # it casts a weight once, and would use it in all samples
        for p, grad in zip(params, before, strict=True):
            if grad is not None:
                p.grad = None
        opt.entered = 0
        if flight is not None:
            flight.listen(drawn, calls.examples, weight)
        if opt.module is not None and weight:
            handle = opt.module.register_forward_hook(calls, with_kwargs=True)
        terms = opt.terms.watch(opt.module, lambda: calls.last) if weight else nullcontext()
        collector = collecting(opt)
        with terms, collector if opt.collector is None else _if_any(collector):
            yield
        grads = list(map(gradient, params))
        if any(grad.is_sparse for grad in grads if grad is not None):
            raise TypeError("sparse gradients are not supported: build the Embedding with sparse=False")
        if weight and any(grad is not None for grad in grads):
            begun = flight is not None and flight.here is not None
            if not begun:
                expect(opt, drawn, calls.examples(), weight)
            absorb(opt, grads, drawn, 1, weight, flight.absorbed if flight else ())
            if not begun:
                opt.local.add_inputs(calls.examples())
            used = True
        elif weight and opt.world.mesh is not None:  # others may have examples in this context
            opt.local.skip(weight)
        elif weight and opt.sharded is not None and calls.reached():
            raise RuntimeError(
                "a backward pass inside sampled_params() has left no gradient: take all backward passes of a "
                "step in one context, and set_requires_gradient_sync(True) before the last"
            )
        failed = False
    finally:
        calls.inside = False
        if flight is not None:
            flight.close()
        if handle is not None:
            handle.remove()
        if not used:  # an error, or a forward pass alone: as if nothing had happened
            for p, grad in zip(params, before, strict=True):
                p.grad = grad
        opt.entered = None
        with torch.no_grad():
            for each in drawn:
                each.group.locate()
                each.group.put(each.group.weights)
        if opt.sharded is not None:
            opt.sharded.drop_gathered(failed)
        torch.clear_autocast_cache()
        opt.buffers.leave(number, used)


@contextmanager
def _if_any(context: AbstractContextManager[object]) -> Iterator[None]:
    """A collector's context, in which a backward pass may be missing: then there is nothing to collect."""
    context.__enter__()
    try:
        yield
    except BaseException:
        context.__exit__(*sys.exc_info())
        raise
    with suppress(NothingCollected):
        context.__exit__(None, None, None)


# Absorb.


def expect(opt: VariationalOptimizer, drawn: Sequence[Draw], examples: float | None, weight: float) -> None:
    """Weight a step's gradients by their number of examples, before the first of them are added.

    If the weight turns out to be another, sums are corrected before they are sent.
    """
    if opt.pools and not opt.local.samples:
        opt.local.scale = float(examples or 1.0)
    for each in drawn:
        each.noise.weight = weight * opt.local.scale


def collecting(
    opt: VariationalOptimizer, drawn: Mapping[Tensor, Tensor] | None = None, *, stacked: bool = False
) -> AbstractContextManager[object]:
    """What forward and backward passes are run inside: layers report the curvature that the rule wants.

    Args:
        opt: The optimiser.
        drawn: Tensors in the place of parameters, if any.
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
    """Whether the step that comes next has the second of a rule's statistics, as the first group says."""
    every = group.get("factors_every", group.get("second_every", 1))
    return bool(group["steps"] % every == 0)


def multiplies(opt: VariationalOptimizer) -> bool:
    """Whether the step that comes next wants products of gradients and noise, E[g·eps]."""
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

    Those of one sample lack the leading dimension, as do those of deterministic parameters, which are sums
    over the samples.

    Args:
        opt: The optimiser.
        grads: Of its parameters, in their order.
        drawn: The weights.
        samples: How many.
        weight: Of each.
        done: Parameters whose gradients are added already.
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


# Apply.


class Moved(NamedTuple):
    """What a rule has made of parameters of a group, which is not theirs yet.

    Attributes:
        flat: The group.
        numbers: Of the parameters.
        spans: Where they lie.
        results: New means and states of each span; none where these are in the cache already.
    """

    flat: FlatGroup
    numbers: list[int]
    spans: list[slice | None]
    results: list[tuple[Tensor, State]]


@torch.no_grad()
def apply(opt: VariationalOptimizer, behind: Behind, ok: Tensor | None) -> list[tuple[FlatGroup, list[int]]]:
    """Move every parameter that has a gradient, or none; which of each group were moved.

    What the rule returns is judged as a whole before any of it is written.

    Args:
        opt: The optimiser.
        behind: The examples behind the step, and what makes of the loss a mean over these.
        ok: A flag on the device that lets values through, if the host does not wait for it; it falls if a
            result is not fit.

    Raises:
        FloatingPointError: A result is not fit, and the host waits.
    """
    made = opt.blocks.made(opt, behind) if opt.matrices else None
    done = made.params if made is not None else set[Tensor]()
    everything = []
    try:
        for sums in opt.sums:
            moved = [i for i, p in enumerate(sums.group.params) if p.grad is not None and p not in done]
            if moved:
                everything.append(_run_rule(opt, sums, moved, behind, ok))
        values = {} if made is None else made.values()
        if ok is None:
            refuse_unfit(opt, everything, values)
        else:
            hold_back(ok, everything, values, None if opt.sharded is None else opt.world)
    except BaseException:
        for flat in opt.cache.latest:
            flat.load()
        raise
    if made is not None:
        opt.blocks.write(made, ok)
        for sums in opt.sums:  # which has written to state that is cached, and of no more use there
            sums.group.keep_in_mind()
    for flat, moved, spans, results in everything:
        for span, (mean, state) in zip(spans, results, strict=False):
            old = [(_part(flat.state[key], span), value) for key, value in state.items()]
            accept([(_part(flat.mean, span), mean), *old], ok)
        flat.count(moved)
        flat.write(moved)
        flat.save([key for key in flat.state if key not in _FIXED], moved)
    torch.clear_autocast_cache()  # of weights that were
    return [(flat, moved) for flat, moved, *_ in everything]


def _run_rule(
    opt: VariationalOptimizer, sums: Sums, moved: list[int], behind: Behind, ok: Tensor | None
) -> Moved:
    """What the rule makes of some parameters of a group."""
    flat, numbers, run_move = sums.group, opt.numbers, opt.numbers.run(opt, move)
    collected = multiplies(opt) or opt.sums.collected
    group = numbers.groups[flat.number]
    grad, counts = sums.mean_grad, [int(step) + 1 for step in flat.steps]
    similar = len(moved) == len(flat.params) and len(set(counts)) == 1
    places, results = list(flat.spans(None if similar else moved)), []
    for i, span in places:
        mean = _part(flat.mean, span)
        own = {key: _part(value, span) for key, value in flat.state.items() if key != "mean"}
        new_mean, new_state = run_move(
            mean,
            own,
            _part(grad, span),
            None if opt.by_adam(group) else _part(sums.second, span if collected else slice(0)),
            sums.factor,
            *behind,
            numbers.updates(flat.params[i], counts[i]),
            group,
            own.pop("keep", None),
            ok is not None,
        )
        if ok is None:  # while it is in a CPU's cache; the optimiser's own tensors are as they were
            accept([(mean, new_mean), *((own[key], value) for key, value in new_state.items())], None)
        else:
            results.append((new_mean, new_state))
    # A host judges a group as a whole, not by parts that fit into a cache.
    whole = bool(places) and similar and ok is None
    return Moved(flat, moved, [None] if whole else [span for _, span in places], results)


# What no step changes.
_FIXED = ("keep", "prior_mean", "known")


def move(
    rule: VariationalOptimizer,
    mean: Tensor,
    state: State,
    grad: Tensor,
    second: Tensor | None,
    factor: float | Tensor,
    batch_size: float,
    scale: float | Tensor | None,
    step: int | Tensor,
    group: Group,
    keep: Tensor | None,
    marks: bool,
) -> tuple[Tensor, State]:
    """The rule: new means and state. It is a function of numbers, so that it fuses.

    With ``marks`` a mean is NaN where the state or the std is not fit, so that means alone tell of all.
    """
    if second is None:
        new_mean, new_state = adam_update(mean, state, grad, step, group)
    else:
        none = second[:0]
        if isinstance(factor, Tensor) or factor != 1.0:
            second = factor * second
        if scale is not None:  # of a mean over other things than examples
            grad, second = scale * grad, (scale if rule.collects is None else scale * scale) * second
        noise, squares = (second, none) if rule.collects is None else (none, second)
        stats = Statistics(grad, noise, batch_size, step, squares)
        new_mean, new_state = rule.update(mean, state, stats, group)
        if group["max_step"] < math.inf:
            reach = furthest(group, step) * rule.scale(state, group)
            new_mean = mean + (new_mean - mean).clamp(-reach, reach)
    if marks:
        unfit = [~torch.isfinite(each) for each in new_state.values()]
        if second is not None and not group["deterministic"]:
            std = rule.std({**state, **new_state}, group)
            unfit.append(~((std > 0) & (std < math.inf)))
        for each in unfit:
            new_mean = torch.where(each, math.nan, new_mean)
    if keep is not None:  # others do not move: their std, which no gradient knows, might overflow
        new_mean = torch.where(keep, new_mean, mean)
        new_state = {key: torch.where(keep, value, state[key]) for key, value in new_state.items()}
    return new_mean, new_state


def furthest(group: Group, step: int | Tensor) -> Any:
    """How many scales a weight may move in its t-th update: max_step / sqrt(1 + t / settle_after)."""
    return group["max_step"] / (1 + step / group["settle_after"]) ** 0.5


def accept(pairs: Sequence[tuple[Tensor, Tensor]], ok: Tensor | None) -> None:
    """Write new values over old ones, all of one size, unless a flag on the device is not set."""
    if ok is None:
        for old, new in pairs:
            old.copy_(new)
    elif kernels is not None and ok.is_cuda and _plain(pairs):
        kernels.accept(pairs, ok)
    else:
        for old, new in pairs:
            torch.where(ok, new, old, out=old)


def _plain(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all are of one type, and end to end."""
    kinds = {(each.dtype, each.shape, each.is_contiguous()) for pair in pairs for each in pair}
    return len(kinds) == 1 and pairs[0][0].is_contiguous()


def _part(flat: Tensor, span: slice | None) -> Tensor:
    """What lies in a span, or all."""
    return flat if span is None else flat[span]
