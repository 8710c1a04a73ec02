"""Captured steps in several processes, by a stand-in for CUDA graphs: what each of them does.

Shares have lengths that change from step to step, so that often one process replays a graph while another
runs the same step as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import posterity
from conformance.stand_in import install
from distributed.runs import RULES, WITHOUT_NOISE, N, learned
from distributed.semantics import normed
from posterity.train import compiled

STEPS = 16
# Of each process in turn; three in four are of a shape that comes again.
LENGTHS = ((5, 5, 5, 4), (5, 5, 3, 5))
# A call, and the process whose batch is bad there: both replay it, or one does.
BAD = {"both": (9, 1), "first": (2, 0), "last": (2, 1)}


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def batch(call: int, rank: int) -> tuple[Tensor, Tensor]:
    """The share of a process."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    own = LENGTHS[rank]
    length = own[call % len(own)]
    x = torch.randn(length, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (length,), generator=generator)


def by_rule(way: str, rule: str, world: int) -> tuple[Any, Any, Callable[[], dict[str, Tensor]]]:
    """A step without a graph, its optimiser, and what it has learned."""
    net = normed()
    more: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))} if way == "mesh" else {}
    outer = net if more else DistributedDataParallel(net)
    opt = RULES[rule](outer, mc_samples=1 if rule in WITHOUT_NOISE else 2, seed=7, **more)
    step = posterity.compile_step(outer, loss_of, opt, max_norm=1.0)
    return step, opt, lambda: learned(opt, 0.0) | {f"of net {k}": v for k, v in net.state_dict().items()}


def by_gradient(estimator: Any, family: Any, world: int) -> tuple[Any, Any, Callable[[], dict[str, Tensor]]]:
    """The same for a gradient method."""
    torch.manual_seed(0)
    families = {} if family is None else {"family": family}
    m = posterity.variational(
        normed(), std_init=0.1, seed=7, estimator=estimator, deterministic="0.*", **families
    )
    opt = torch.optim.Adam(m.parameters(), lr=0.01, fused=True)
    step = posterity.compile_step(m, loss_of, opt, num_data=N, mc_samples=2, max_norm=1.0)
    return step, opt, lambda: {k: v for k, v in m.state_dict().items() if isinstance(v, Tensor)}


def run(
    make: Callable[..., Any],
    rank: int,
    world: int,
    graphs: bool,
    terms: bool = False,
    bad: str = "",
    skipped: tuple[int, ...] = (),
) -> Any:
    """What is learned, what each call has raised, and which of them were replays."""
    step, opt, found = make(world=world)
    step = compiled.CapturedStep(step) if graphs else step
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    said, losses, replayed = [], [], []
    for call in range(STEPS):
        x, y = batch(call, rank)
        if bad and (call, rank) == BAD[bad]:
            x = x * torch.nan
        counted = sum(len(graph.ran) for graph in step._graphs.values()) if graphs else 0
        try:
            if call not in skipped:
                losses.append(step(x, y, **({"count": 2 * len(x)} if terms else {})))
            said.append("nothing")
        except FloatingPointError as error:
            said.append(str(error))
        ran = sum(len(graph.ran) for graph in step._graphs.values()) if graphs else 0
        replayed.append(ran > counted)
        schedule.step()
    return {"said": said, "replayed": replayed, "losses": torch.stack(losses), **found()}


def both(make: Callable[..., Any], rank: int, world: int, **more: Any) -> Any:
    """The same run with and without graphs."""
    bad = BAD[more["bad"]][0] if "bad" in more else STEPS
    skipped = bad, bad + 1  # one moves nothing, the other says so
    plain = run(make, rank, world, False, **{**more, "bad": ""}, skipped=skipped)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        found = run(make, rank, world, True, **more)
    return {"plain": plain, "graphs": found}


CASES: dict[str, Callable[..., Any]] = {
    **{
        f"captured {way} {rule}": partial(both, partial(by_rule, way, rule))
        for way in ("mesh", "ddp")
        for rule in RULES
    },
    **{
        f"captured terms {rule}": partial(both, partial(by_rule, "ddp", rule), terms=True)
        for rule in ("bgd", "vogn")
    },
    **{
        f"captured bad {rule} {bad}": partial(both, partial(by_rule, "mesh", rule), bad=bad)
        for rule, bad in (("bgd", "both"), ("vogn", "first"), ("ivon", "last"), ("noisy-kfac", "both"))
    },
    "captured gradient weight": partial(both, partial(by_gradient, "weight", None)),
    "captured gradient local": partial(both, partial(by_gradient, "local", None)),
    "captured gradient mnf": partial(both, partial(by_gradient, "weight", posterity.mnf)),
    **{
        f"captured bad gradient {bad}": partial(both, partial(by_gradient, "weight", None), bad=bad)
        for bad in BAD
    },
    "captured terms gradient": partial(both, partial(by_gradient, "weight", None), terms=True),
}


def unreached(rank: int, world: int) -> Any:
    """Steps that do not reach all parameters are not captured: those of others might."""
    net = normed()
    net.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    opt = RULES["ivon"](net, mc_samples=1, seed=7, mesh=init_device_mesh("cpu", (world,)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        made = install(patch)
        step = compiled.CapturedStep(posterity.compile_step(net, loss_of, opt))
        for call in range(4):
            step(*batch(4 * call, rank))
    return {"said": [str(each.message) for each in said], "graphs": len(step._graphs), "made": len(made)}


def handed_over(make: Callable[..., Any], rank: int, world: int) -> Any:
    """Processes that have replayed different steps go on from what they have learned."""
    step, opt, found = make(world=world)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        graphs = compiled.CapturedStep(step)
        for call in range(8):
            graphs(*batch(call, rank))
        before = {key: value.clone() for key, value in found().items()}
        if isinstance(opt, posterity.VariationalOptimizer):
            opt.load_posterior(opt.posterior())
        else:
            step = posterity.compile_step(step.learner.model, loss_of, opt, num_data=N)
        step(*batch(8, rank))
        return {"before": before, "after": found()}


def shown(rule: str, bad: int, rank: int, world: int) -> Any:
    """A bad step of which the posterior is asked for before the next call: whether that and calls raise."""
    base, opt, _ = by_rule("mesh", rule, world)
    found = {"raised": list[bool]()}
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        step = compiled.CapturedStep(base)
        for call in range(bad):
            step(*batch(call, rank))
        x, y = batch(bad, rank)
        replays = [len(graph.ran) for graph in step._graphs.values()]
        step(x * (torch.nan if rank else 1.0), y)
        found["replayed"] = replays != [len(graph.ran) for graph in step._graphs.values()]
        rest: list[Callable[[], Any]] = [
            partial(step, *batch(call, rank)) for call in range(bad + 1, bad + 4)
        ]
        for each in (opt.posterior, *rest):
            try:
                each()
                found["raised"].append(False)
            except FloatingPointError:
                found["raised"].append(True)
    return found


CASES["unreached"] = unreached
CASES |= {f"shown {rule}": partial(shown, rule, bad) for rule, bad in (("vogn", 2), ("noisy-kfac", 3))}
CASES |= {
    "handed over rule": partial(handed_over, partial(by_rule, "mesh", "ivon")),
    "handed over gradient": partial(handed_over, partial(by_gradient, "weight", None)),
}
FOUR: dict[str, Callable[..., Any]] = {}
