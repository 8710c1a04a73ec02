"""A step in a loop: contexts in which the model has drawn weights, and closures that run in them.

Drawing weights and absorbing gradients are in :mod:`posterity.optim.step`, applying the sums is in
:mod:`posterity.optim.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.arguments import described, is_dense
from posterity.curvature import NothingCollected
from posterity.optim import checks
from posterity.optim.apply import learn
from posterity.optim.counting import ModuleCalls, as_count, refuse_unknown
from posterity.optim.overlap import Flight
from posterity.optim.pooling import mean_loss, pool
from posterity.optim.step import Draw, absorb, collecting, draw, expect
from posterity.sharding import gradient

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


def step(
    opt: VariationalOptimizer,
    closure: Callable[[], Tensor | float] | None,
    batch_size: int | None,
    count: float | Tensor | None,
) -> Tensor | None:
    """Learn from the contexts since the last step, or from a closure run in contexts; returns its loss."""
    if closure is not None and not callable(closure):
        raise TypeError(f"step() takes a function that computes the loss, not {described(closure)}")
    if closure is None and _asked_for_state(opt):
        opt.cache.groups()
        opt.blocks.expect(opt)
        return None
    opt.check_changed()
    checks.refuse_scaler(opt)
    count = as_count(count)
    refuse_unknown(opt, batch_size, count, runs=closure is not None)
    if closure is None:
        _close(opt)
    loss = None
    try:
        if closure is not None:
            loss = _run(opt, closure, count or batch_size)
        learn(opt, batch_size, count)
    except BaseException:
        opt.buffers.undo()
        opt.reset()
        raise
    opt.reset()
    return loss


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
        with _one_sample(opt, next(opt.peeks), 0.0):
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
def _one_sample(
    opt: VariationalOptimizer, number: int, weight: float, flight: Flight | None = None
) -> Iterator[None]:
    """A context in which the model has drawn weights; the gradients taken there are absorbed.

    If anything raises inside, the means are restored, and nothing is absorbed; likewise with weight 0.

    Args:
        opt: The optimiser.
        number: The sample's number.
        weight: Its weight; 0 to learn nothing from it.
        flight: Sends gradients as soon as they are ready.
    """
    params = opt.parameters()
    before = [p.grad for p in params]
    opt.buffers.enter(number)
    used, failed, entire, drawn = False, True, False, list[Draw]()
    calls, handle = ModuleCalls(opt.batch_dim, params, opt.sharded), None
    try:
        one = range(number, number + 1)
        drawn = draw(opt, opt.world.numbered(one, opt.own_samples()) if weight else one, weight)
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
        terms = opt.terms.watch(opt.module, lambda: (calls.last, calls.beside)) if weight else nullcontext()
        try:
            with terms, collecting(opt):
                yield
                entire = True
        except NothingCollected:  # a backward pass may be missing; what is raised inside is not
            if not entire:
                raise
        used = _take(opt, drawn, calls, weight, flight)
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


def _take(
    opt: VariationalOptimizer,
    drawn: Sequence[Draw],
    calls: ModuleCalls,
    weight: float,
    flight: Flight | None,
) -> bool:
    """Absorb a sample's gradients; returns whether there are any."""
    grads = list(map(gradient, opt.parameters()))
    if any(grad.is_sparse for grad in grads if grad is not None):
        raise TypeError("sparse gradients are not supported: build the Embedding with sparse=False")
    if not weight:
        return False
    if any(grad is not None for grad in grads):
        begun = flight is not None and flight.here is not None
        if not begun:
            expect(opt, drawn, calls.examples(), weight)
        absorb(opt, grads, drawn, 1, weight, flight.absorbed if flight else ())
        if not begun:
            opt.local.add_inputs(calls.examples())
        return True
    if opt.world.mesh is not None:  # others may have examples in this context
        opt.local.skip(weight)
    elif opt.sharded is not None and calls.reached():
        raise RuntimeError(
            "a backward pass inside sampled_params() has left no gradient: take all backward passes of a "
            "step in one context, and set_requires_gradient_sync(True) before the last"
        )
    return False


@contextmanager
def sending(opt: VariationalOptimizer, behind: float | None = None) -> Iterator[Flight | None]:
    """Around the last context of a step with ``overlap=True``: its gradients are sent as they are computed.

    If this process raises, it still sends the rest, and all others raise, so they stay in step.

    Args:
        opt: The optimiser.
        behind: Number of terms of the loss, if given by the user.
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
        raise RuntimeError("mc_samples was changed in the middle of a step: call step() or zero_grad() first")
    return _one_sample(opt, opt.taken(), weight, flight)


def _run(opt: VariationalOptimizer, closure: Callable[[], Tensor | float], behind: float | None) -> Tensor:
    """Run a closure under ``mc_samples`` weight samples; returns its mean loss, over ``behind`` terms."""
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


def _close(opt: VariationalOptimizer) -> None:
    """After the contexts of a step: add up sums held back by no_sync(), and refuse an unfinished step."""
    if opt.local is not opt.sums and opt.local.samples:
        pool(opt, [], flight=_flight(opt))
        opt.sums.publish()
    checks.refuse_partial(opt.param_groups, opt.sums, type(opt).__name__)


def _asked_for_state(opt: VariationalOptimizer) -> bool:
    """Whether this step is torch.distributed.checkpoint's, which only wants the state to be created."""
    if opt.state or opt.taken() or any(group["lr"] for group in opt.param_groups):
        return False
    return all(grad is not None and not bool(grad.any()) for grad in map(gradient, opt.parameters()))


def _number(loss: Tensor | float) -> Tensor:
    """A loss as a real number, without its graph."""
    found = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
    return found if found.is_floating_point() else found.float()
