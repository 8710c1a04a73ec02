"""The end of a step: its sums are checked and passed to the rule, whose results become the posterior.

What the rule returns for all groups is judged as a whole before any of it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posterity.noise import kernels
from posterity.optim import checks, counting
from posterity.optim.adam import adam_update
from posterity.optim.agreement import refuse_unaveraged
from posterity.optim.pooling import complete, share_buffers, summed
from posterity.optim.state import FlatGroup, Group, State
from posterity.optim.statistics import Statistics, Sums
from posterity.optim.step import multiplies

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


def learn(opt: VariationalOptimizer, batch_size: int | None, count: float | None) -> None:
    """Check the absorbed statistics, and apply them."""
    checks.refuse_missing(opt.param_groups, opt.sums, type(opt).__name__)
    opt.cache.groups()  # a user may have changed state since the draw
    if opt.world.size > 1 and not opt.pools:
        if not opt.averaged:
            refuse_unaveraged(opt)
        complete(opt)
    inputs, alone = opt.sums.counted(), opt.world.size == 1
    total = (batch_size, count) if alone else (summed(opt, batch_size), summed(opt, count))
    behind = counting.behind(opt, total[0], inputs, total[1])
    size = float(behind.batch_size) if alone else float(batch_size or 0)  # each looks at losses of its own
    opt.terms.judge(size, inputs if alone else None, counted=count is not None)
    opt.watch.guess = opt.terms.guess
    if (opt.pools or opt.sharded is not None) and opt.module is not None:
        share_buffers(opt.world, opt.module)  # before the verdict: some processes may replay this step
    opt.unfrozen.look(type(opt).__name__)
    opt.settle_step()
    opt.sums.finish()
    verdict = checks.Verdict(opt.sums, None if opt.sharded is None else opt.world)
    # A step that can fail halfway must be checked by the host.
    waits = bool(opt.matrices) or not checks.runs_ahead_of({flat.device for flat in opt.cache.latest})
    if waits:
        verdict.report(opt.watch, None if verdict.passed else checks.bad_gradient(opt.named()))
    opt.ok = None if waits else verdict.ok
    opt.cache.reread()
    moved = apply(opt, behind, opt.ok)
    opt.buffers.undo_unless(opt.ok)
    if not waits:
        verdict.send()
        opt.pending = verdict, moved
    opt.watch.close()
    opt.advance()


class Moved(NamedTuple):
    """A rule's results for parameters of a group, not written yet.

    Attributes:
        flat: The group.
        numbers: The parameters' numbers.
        spans: Their spans in the flat buffers.
        results: New means and states of each span; empty if these are in the cache already.
    """

    flat: FlatGroup
    numbers: list[int]
    spans: list[slice | None]
    results: list[tuple[Tensor, State]]


def settle(
    opt: VariationalOptimizer, verdict: checks.Verdict, moved: list[tuple[FlatGroup, list[int]]]
) -> None:
    """Wait for the device's check of a step, and raise its error; returns what the step has moved."""
    bad = None
    if not verdict.passed:  # it was held back on the device: uncount it
        for flat, numbers in moved:
            flat.count(numbers, -1)
        opt.advance(-1)
        bad = opt.ledger.not_finite(opt.named())
    verdict.report(opt.watch, bad, checks.overshot(opt), " of the last step")


@torch.no_grad()
def apply(
    opt: VariationalOptimizer, behind: counting.Behind, ok: Tensor | None
) -> list[tuple[FlatGroup, list[int]]]:
    """Update every parameter that has a gradient, or none; returns the updated ones of each group.

    What the rule returns is judged as a whole before any of it is written.

    Args:
        opt: The optimiser.
        behind: The examples in the step, and the scale of its loss.
        ok: A flag on the device that enables writing, if the host does not wait; cleared if a result is
            invalid.

    Raises:
        FloatingPointError: A result is invalid, and the host waits.
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
            checks.refuse_unfit(opt, everything, values)
        else:
            checks.hold_back(ok, everything, values, None if opt.sharded is None else opt.world)
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
    opt: VariationalOptimizer, sums: Sums, moved: list[int], behind: counting.Behind, ok: Tensor | None
) -> Moved:
    """The rule's results for some parameters of a group."""
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
    # The host checks a group as a whole, not in cache-sized parts.
    whole = bool(places) and similar and ok is None
    return Moved(flat, moved, [None] if whole else [span for _, span in places], results)


# What no step changes.
_FIXED = ("keep", "prior_mean", "known", "start", "unit")


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
    """Run the rule: new means and state. It is a function of numbers, so that it can be fused.

    With ``marks`` a mean is NaN where the state or the std is invalid, so that checking means is enough.
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
            new_mean = mean + (settled(group, step) * (new_mean - mean)).clamp(-reach, reach)
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


def settled(group: Group, step: int | Tensor) -> Any:
    """What a weight's t-th step is multiplied by: 1 / sqrt(1 + t / settle_after)."""
    return (1 + step / group["settle_after"]) ** -0.5


def furthest(group: Group, step: int | Tensor) -> Any:
    """How many scales a weight may move in update t: max_step · (1 − β1^t) / sqrt(1 + t / settle_after).

    The average of the first gradients is less than those to come by 1 − β1^t, for rules that have one.
    """
    begun = 1 - group["betas"][0] ** step if "betas" in group else 1.0
    return group["max_step"] * begun * settled(group, step)


def accept(pairs: Sequence[tuple[Tensor, Tensor]], ok: Tensor | None) -> None:
    """Overwrite old values with new ones of the same size, unless a flag on the device is not set."""
    if ok is None:
        for old, new in pairs:
            old.copy_(new)
    elif kernels is not None and ok.is_cuda and _plain(pairs):
        kernels.accept(pairs, ok)
    else:
        for old, new in pairs:
            torch.where(ok, new, old, out=old)


def _plain(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all have one dtype and are contiguous."""
    kinds = {(each.dtype, each.shape, each.is_contiguous()) for pair in pairs for each in pair}
    return len(kinds) == 1 and pairs[0][0].is_contiguous()


def _part(flat: Tensor, span: slice | None) -> Tensor:
    """The part in a span, or all."""
    return flat if span is None else flat[span]
