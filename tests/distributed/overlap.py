"""Steps whose sums travel during the backward pass: what each process does, and in which order.

Pieces are so small here that every layer has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from distributed.runs import BATCH, RULES, batches, learned, loss_of, model, share
from distributed.semantics import CLIP, branches, moments, said, weights
from posterity import VariationalOptimizer
from posterity.optim import overlap


@contextmanager
def small_pieces() -> Iterator[list[str]]:
    """Inside, each tensor travels by itself; how many numbers each collective had, and what came between."""
    events, send = list[str](), distributed.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **more: Any) -> Any:
        events.append(f"sent {tensor.numel()}")
        return send(tensor, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "PIECE", 1)
        patch.setattr(distributed, "all_reduce", all_reduce)
        yield events


def built(rule: str, world: int, net: nn.Module, **settings: Any) -> VariationalOptimizer:
    mesh = init_device_mesh("cpu", (world,))
    return RULES[rule](net, **{"mc_samples": 1, "seed": 7, "mesh": mesh, "overlap": True, **settings})


def pairs(rank: int, world: int, sizes: list[int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in batches():
        yield share(x, rank, world, sizes), share(y, rank, world, sizes)


def loop(
    rule: str, rank: int, world: int, sizes: list[int] | None = None, clip: float | None = None, **more: Any
) -> Any:
    """A plain loop, of which a process may have no examples."""
    net = model()
    opt = built(rule, world, net, **more)
    with small_pieces() as events:
        net[0].weight.register_hook(lambda _: events.append("first layer"))
        for x, y in pairs(rank, world, sizes):
            opt.zero_grad()
            with opt.sampled_params():
                if len(x):
                    loss_of(net, x, y).backward()
                    events.append("backward")
            if clip is not None:
                clip_grad_norm_(net.parameters(), clip)
            opt.step()
    return {"learned": moments(opt), "events": events}


def split(rule: str, rank: int, world: int) -> Any:
    """Two samples of each share, one in each of two processes."""
    net = model()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "mc"))
    opt = built(rule, world, net, mesh=mesh, mc_samples=2)
    with small_pieces():
        for x, y in pairs(rank // 2, world // 2):
            opt.zero_grad()
            with opt.sampled_params():
                if rank != 1:  # which has its examples later than the others
                    loss_of(net, x, y).backward()
                else:
                    with opt.no_sync():
                        loss_of(net, x, y).backward()
            opt.step()
    return moments(opt)


def by_closure(rule: str, samples: int, rank: int, world: int, by: str = "", **more: Any) -> Any:
    """All samples of a step travel with its last."""
    net = model()
    opt = built(rule, world, net if not by else net.named_parameters(), mc_samples=samples, **more)
    sizes, loss = [BATCH - 3, 3] if by else None, None
    with small_pieces() as events:
        for x, y in pairs(rank, world, sizes):
            opt.zero_grad()

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = loss_of(net, x, y)
                loss.backward()
                events.append("backward")
                return loss

            loss = opt.step(closure, **({by: len(x)} if by else {}))
    return {"learned": learned(opt, loss), "events": events}


def accumulated(rule: str, contexts: bool, rank: int, world: int, **more: Any) -> Any:
    """Micro-batches in a context each, or in one; all but the last inside no_sync()."""
    net = model()
    opt = built(rule, world, net, **more)
    with small_pieces() as events:
        for x, y in pairs(rank, world):
            opt.zero_grad()
            with nullcontext() if contexts else opt.sampled_params():
                for number, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                    with (
                        nullcontext() if number else opt.no_sync(),
                        opt.sampled_params() if contexts else nullcontext(),
                    ):
                        (loss_of(net, a, b) / 2).backward()
                events.append("backward")
            opt.step()
    return {"learned": moments(opt), "events": events}


def unused(rule: str, rank: int, world: int, **more: Any) -> Any:
    """Each process takes a branch of its own, and nobody the last."""
    net = branches()
    opt = built(rule, world, net, **more)
    with small_pieces() as events:
        for x, y in pairs(rank, world):
            opt.zero_grad()
            with opt.sampled_params():
                nn.functional.cross_entropy(net(x, rank), y).backward()
            opt.step()
    return {"learned": moments(opt), "events": events}


def bad(rule: str, what: str, rank: int, world: int) -> Any:
    """In the second step the last process sees a NaN, raises, or changes what was sent."""
    net = model()
    opt = built(rule, world, net)
    messages, same = [], True

    def step(x: Tensor, y: Tensor, odd: bool) -> None:
        opt.zero_grad()
        with opt.sampled_params():
            handle = net[0].weight.register_hook(_fail) if odd and what == "raises early" else None
            try:
                loss_of(net, x * torch.nan if odd and what == "input" else x, y).backward()
            finally:
                if handle is not None:
                    handle.remove()
            if odd and what == "raises":
                raise ValueError("of the user")
            if odd and what == "again":
                loss_of(net, x, y).backward()
            if odd and what == "clipped":
                clip_grad_norm_(net.parameters(), CLIP)
            if odd and what == "zeroed":
                opt.zero_grad()
        opt.step()

    with small_pieces() as events:
        for number, (x, y) in enumerate(pairs(rank, world)):
            before = weights(opt)
            messages.append(said(partial(step, x, y, number == 1 and rank == world - 1)))
            if number == 1:
                same = all(torch.equal(value, before[name]) for name, value in weights(opt).items())
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())
    found = {"messages": messages, "same": same, "hooks": hooks}
    return {**found, "collectives": len(events), "learned": moments(opt)}


def _fail(grad: Tensor) -> None:
    raise ValueError("of the user")


def compared(case: Callable[..., Any], rank: int, world: int) -> Any:
    """With overlap, and without."""
    found = case(rank=rank, world=world)
    return {**found, "plain": case(rank=rank, world=world, overlap=False)}


def alike(rule: str) -> dict[str, Callable[..., Any]]:
    """What overlap does not change."""
    return {
        "loop": partial(loop, rule),
        "idle": partial(loop, rule, sizes=[BATCH, 0]),
        "clipped": partial(loop, rule, clip=CLIP),
        "deterministic": partial(loop, rule, deterministic="0.*"),
        "closure": partial(by_closure, rule, 2),
        "ragged": partial(by_closure, rule, 1, by="batch_size"),
        "contexts": partial(accumulated, rule, True),
        "passes": partial(accumulated, rule, False),
        "unused": partial(unused, rule),
    }


CASES: dict[str, Callable[..., Any]] = {
    f"overlap {name} {rule}": partial(compared, case)
    for rule in ("bgd", "ivon", "ivon-seldom")
    for name, case in alike(rule).items()
}
CASES |= {
    f"spoilt {what} {rule}": partial(bad, rule, what)
    for rule in ("bgd", "ivon")
    for what in ("input", "raises", "raises early", "again", "clipped", "zeroed")
}
FOUR: dict[str, Callable[..., Any]] = {
    f"overlap split {rule}": partial(split, rule) for rule in ("bgd", "ivon")
}
