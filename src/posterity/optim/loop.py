"""A step in a loop: contexts that draw weights, closures that run in them, and sums that go to the rule.

What happens inside a context, and what a rule makes of the sums, is in :mod:`posterity.optim.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.arguments import described, is_dense
from posterity.optim import checks, counting
from posterity.optim.overlap import Flight
from posterity.optim.pooling import complete, mean_loss, pool, share_buffers, summed
from posterity.optim.step import apply, one_sample
from posterity.sharding import gradient

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


@contextmanager
def sampled(opt: VariationalOptimizer) -> Iterator[None]:
    """One context of a loop, in which the model has drawn weights."""
    if opt.entered is not None:
        opt.entered += 1
        if opt.entered > 1:
            raise RuntimeError(
                "sampled_params() was entered again inside itself; step(closure) draws the samples: set "
                "mc_samples instead of a loop inside the closure"
            )
        yield
        return
    opt.check_changed()
    if not torch.is_grad_enabled():
        with one_sample(opt, next(opt.peeks), 0.0):
            yield
        return
    if opt.taken() and all(p.grad is None for p in opt.parameters()):
        opt.reset()  # somebody has dropped all gradients, as zero_grad() does
    elif opt.taken():
        opt.ledger.refuse_changed(opt.named())
    taken = opt.taken()
    with (
        sending(opt) as flight,
        _next_sample(opt, flight),
        opt.watch.listen(None if opt.sharded else opt.module) as heard,
    ):
        yield
    if opt.taken() > taken:
        if heard is not None:
            opt.watch.hear(heard.found, 1 / opt.own_samples())
        if opt.pools and not opt.apart:
            pool(opt, [], flight=flight)
        if opt.local is opt.sums or not opt.local.samples:
            opt.sums.publish()
        opt.ledger.remember(opt.parameters())


@contextmanager
def sending(opt: VariationalOptimizer, behind: float | None = None) -> Iterator[Flight | None]:
    """Around the last context of a step: its gradients are sent as they are made, with ``overlap=True``.

    If this process raises then, it sends the rest all the same, and all others raise: so they stay in step.

    Args:
        opt: The optimiser.
        behind: What the loss is a mean of, if the user says so.
    """
    flight = _flight(opt, behind)
    try:
        yield flight
    except BaseException as error:
        if flight is not None and flight.works and isinstance(error, Exception):
            with suppress(RuntimeError):  # that of all processes
                pool(opt, [], behind, flight, failed=True)
        elif flight is not None and flight.here is not None:
            opt.zero_grad()  # what was to be sent is in the sums of the step
        raise


def _flight(opt: VariationalOptimizer, behind: float | None = None) -> Flight | None:
    return Flight(opt, behind) if opt.overlap and opt.pools else None


def _next_sample(opt: VariationalOptimizer, flight: Flight | None) -> AbstractContextManager[None]:
    weight = 1 / opt.own_samples()
    if opt.taken() == 0:
        opt.refuse_foreign()
    elif weight != (opt.local if opt.local.samples else opt.sums).weight:
        raise RuntimeError("mc_samples was changed while samples wait: call step() or zero_grad() first")
    return one_sample(opt, opt.taken(), weight, flight)


def run(opt: VariationalOptimizer, closure: Callable[[], Tensor | float], behind: float | None) -> Tensor:
    """Run a closure under ``mc_samples`` weight samples; its mean loss, over ``behind`` terms."""
    params = opt.parameters()
    losses: list[Tensor] = []
    for left in reversed(range(opt.own_samples())):
        last = nullcontext() if left else sending(opt, behind)
        with last as flight, _next_sample(opt, flight), torch.enable_grad():
            loss = closure()
            if not isinstance(loss, Tensor | float | int):
                raise TypeError(f"the closure must return the loss, not {type(loss).__name__}")
            if isinstance(loss, Tensor) and not (is_dense(loss) and loss.numel() == 1):
                raise ValueError(
                    f"the closure must return the mean loss, one number, not {described(loss)} of shape "
                    f"{list(loss.shape)}"
                )
            if isinstance(loss, Tensor) and loss.requires_grad and all(p.grad is None for p in params):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(_number(loss))
    if opt.pools:
        losses = pool(opt, losses, behind, flight)
    elif opt.world.size > 1:
        losses = mean_loss(opt, losses)
    opt.sums.publish()
    opt.sums.losses += losses
    return torch.stack(losses).mean(0)


def close(opt: VariationalOptimizer) -> None:
    """After the contexts of a step: add up what no_sync() has kept back, and refuse an unfinished step."""
    if opt.local is not opt.sums and opt.local.samples:
        pool(opt, [], flight=_flight(opt))
        opt.sums.publish()
    checks.refuse_partial(opt.param_groups, opt.sums, type(opt).__name__)


def asked_for_state(opt: VariationalOptimizer) -> bool:
    """Whether torch.distributed.checkpoint makes this step, only to have the state created."""
    grads = list(map(gradient, opt.parameters()))
    return (
        not (opt.state or opt.taken() or any(group["lr"] for group in opt.param_groups))
        and all(grad is not None for grad in grads)
        and not any(bool(grad.any()) for grad in grads if grad is not None)
    )


def learn(opt: VariationalOptimizer, batch_size: int | None, count: float | None) -> None:
    """Judge what was absorbed, and apply it."""
    checks.refuse_missing(opt.param_groups, opt.sums, type(opt).__name__)
    opt.cache.groups()  # a user may have changed state since the draw
    if opt.world.size > 1 and not opt.pools:
        complete(opt, first=not opt.averaged)
        opt.averaged = True
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
    # What may fail in the middle of a step is not for a device alone to judge.
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


def _number(loss: Tensor | float) -> Tensor:
    """A loss as a real number, without its graph."""
    found = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
    return found if found.is_floating_point() else found.float()
