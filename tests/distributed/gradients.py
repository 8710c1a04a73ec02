"""Gradient methods in several processes: what each of them does, and what one process does to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import posterity
from distributed.runs import BATCH, batches, loss_of, model, share
from posterity import Variational
from posterity.layers import Intercept

SIZES = [BATCH - 3, 3]


class Normed(nn.Module):
    """With BatchNorm and a parameter that is not drawn, and one that only the first process uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net, self.scale = nn.BatchNorm1d(5), model(), nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.net(x) * self.scale if len(x) > SIZES[1] else self.net(x)


def made(estimator: Any = "weight", family: str = "ffg", net: Callable[[], nn.Module] = model) -> Variational:
    torch.manual_seed(0)
    plain = ("scale", "norm.*") if net is Normed else ()
    return posterity.variational(
        net(), std_init=0.1, seed=7, estimator=estimator, deterministic=plain, **FAMILIES[family]
    )


def found_in(m: Variational, loss: Tensor | float) -> dict[str, Tensor]:
    state = {name: value for name, value in m.state_dict().items() if isinstance(value, Tensor)}
    found = {name: value.detach().double().clone() for name, value in state.items()}
    grads = {f"grad {name}": p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}
    return found | grads | {"loss": torch.as_tensor(loss).double()}


def step_of(m: Variational, outer: nn.Module | None = None, **more: Any) -> Callable[..., Tensor]:
    opt = torch.optim.Adam(m.parameters(), lr=0.05)
    return posterity.compile_step(outer or m, loss_of, opt, num_data=96, factor=0.5, **more)


def pieces(x: Tensor, y: Tensor, rank: int, world: int, sizes: list[int] | None) -> tuple[Tensor, Tensor]:
    return share(x, rank, world, sizes), share(y, rank, world, sizes)


PRIORS = {"gaussian": None, "mixture": posterity.ScaleMixture()}
FAMILIES: dict[str, dict[str, Any]] = {
    "ffg": {},
    "mnf": {"family": posterity.mnf},
    "gnj": {"family": posterity.gnj, "prior": posterity.GroupNormalJeffreys()},
}


def compiled(
    estimator: Any,
    family: str,
    prior: str,
    rank: int,
    world: int,
    *,
    wrapped: bool = False,
    terms: bool = False,
) -> Any:
    """Compiled steps on shares of unlike sizes."""
    m = made(estimator, family)
    more = {"prior": PRIORS[prior], "mc_samples": 2, "max_norm": 0.2}
    step = step_of(m, DistributedDataParallel(m) if wrapped else None, **more)
    loss = torch.zeros(())
    for x, y in batches():
        x, y = pieces(x, y, rank, world, SIZES)
        loss = step(x, y, count=2 * len(x)) if terms else step(x, y)
    return found_in(m, loss)


def compiled_alone(estimator: Any, family: str, prior: str, *, terms: bool = False, parts: int = 1) -> Any:
    m = made(estimator, family)
    step = step_of(m, prior=PRIORS[prior], mc_samples=2, max_norm=0.2, parts=parts)
    loss = torch.zeros(())
    for x, y in batches():
        loss = step(x, y, count=2 * len(x)) if terms else step(x, y)
    return found_in(m, loss)


def each_its_own(how: str, family: str, rank: int, world: int) -> Any:
    """Examples of each process have noise of their own with local, in compiled steps and in loops."""
    m = made("local", family)
    net = DistributedDataParallel(m) if how == "loop" else m
    opt = torch.optim.Adam(m.parameters(), lr=0.05)
    step = posterity.compile_step(net, loss_of, opt, num_data=96)
    loss = torch.zeros(())
    for x, y in batches():
        x, y = pieces(x, y, rank, world, None)
        if how == "loop":
            opt.zero_grad()
            posterity.elbo(loss_of(net, x, y), m.kl(), num_data=96).backward()
            opt.step()
        else:
            loss = step(x, y)
    return {name: value for name, value in found_in(m, loss).items() if name != "loss"}


def flipout_loop(rank: int, world: int) -> Any:
    """A plain loop with flipout: one deviation for all, signs by example."""
    m = made("flipout")
    net, opt = DistributedDataParallel(m), torch.optim.Adam(m.parameters(), lr=0.05)
    for x, y in batches():
        opt.zero_grad()
        posterity.elbo(loss_of(net, *pieces(x, y, rank, world, None)), m.kl(), num_data=96).backward()
        opt.step()
    return found_in(m, 0.0)


def flipout_alone(world: int) -> Any:
    """The same in one process, share by share."""
    m = made("flipout")
    opt = torch.optim.Adam(m.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches()):
        losses = []
        for rank in range(world):
            given, (own, labels) = m._given(range(1), None, number, rank), pieces(x, y, rank, world, None)
            with Intercept():
                out = functional_call(m.module, given, (own,))
            losses.append(nn.functional.cross_entropy(out, labels))
        opt.zero_grad()
        posterity.elbo(torch.stack(losses).mean(), m.kl(), num_data=96).backward()
        opt.step()
    return found_in(m, 0.0)


def normed(rank: int, world: int) -> Any:
    """BatchNorm's statistics are the first one's, and what is not drawn or not used everywhere learns."""
    m = made(net=Normed)
    step = step_of(m)
    loss = torch.zeros(())
    for x, y in batches():
        loss = step(*pieces(x, y, rank, world, SIZES))
    return found_in(m, loss)


def bad(rank: int, world: int) -> Any:
    """The second batch of the last process is bad: nothing moves anywhere, and the next step is in step."""
    m = made()
    step = step_of(m)
    messages = []
    for number, (x, y) in enumerate(batches()):
        x, y = pieces(x, y, rank, world, None)
        before = found_in(m, 0.0)
        try:
            step(x * torch.nan if number == 1 and rank == world - 1 else x, y)
            messages.append("nothing")
        except FloatingPointError as error:
            messages.append(str(error))
            same = all(torch.equal(before[name], p) for name, p in m.named_parameters())
    return {"messages": messages, "same": same, "learned": found_in(m, 0.0)}


def bad_alone() -> Any:
    m = made()
    step = step_of(m)
    for number, (x, y) in enumerate(batches()):
        if number != 1:
            step(x, y)
    return found_in(m, 0.0)


def unlike(what: str, rank: int, world: int) -> Any:
    m = made()
    if rank and what == "weights":
        with torch.no_grad():
            m.module[0].bias[0] += 1e-2
    opt = torch.optim.Adam(m.parameters(), lr=0.1 * (1 + rank * (what == "lr")))
    more = {"num_data": 96 + rank * (what == "num_data")}
    step = posterity.compile_step(m, loss_of, opt, **more)
    try:
        step(*next(batches()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


CASES: dict[str, Callable[..., Any]] = {
    "compiled weight ffg gaussian": partial(compiled, "weight", "ffg", "gaussian"),
    "compiled weight ffg mixture": partial(compiled, "weight", "ffg", "mixture"),
    "compiled weight mnf gaussian": partial(compiled, "weight", "mnf", "gaussian"),
    "wrapped weight ffg gaussian": partial(compiled, "weight", "ffg", "gaussian", wrapped=True),
    "terms weight ffg mixture": partial(compiled, "weight", "ffg", "mixture", terms=True),
    "terms weight mnf gaussian": partial(compiled, "weight", "mnf", "gaussian", terms=True),
    "own compiled ffg": partial(each_its_own, "compiled", "ffg"),
    "own compiled gnj": partial(each_its_own, "compiled", "gnj"),
    "own loop ffg": partial(each_its_own, "loop", "ffg"),
    "own loop gnj": partial(each_its_own, "loop", "gnj"),
    "flipout loop": flipout_loop,
    "normed gradient": normed,
    "bad gradient": bad,
    **{f"unlike-gradient {what}": partial(unlike, what) for what in ("weights", "lr", "num_data")},
}
FOUR: dict[str, Callable[..., Any]] = {}
