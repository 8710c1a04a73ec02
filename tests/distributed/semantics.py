"""What several processes do beside learning: faults, refusals, what they save, and what they leave alone.

Each case runs in every process, as those of ``runs.py``, and returns what a test looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import posterity
from distributed.runs import BATCH, RULES, STEPS, batches, learned, loss_of, model, share
from posterity import VariationalOptimizer
from posterity.train import gradient as gradients
from posterity.train import rule as rules

CLIP = 0.01
WAYS = ("mesh", "ddp")
OPTIONS: dict[str, dict[str, bool]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "buffers": {"broadcast_buffers": False},
}


class Branches(nn.Module):
    """A net of which an input may take one branch or another, as experts are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(5)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.first(x).tanh())


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches().double()


def normed() -> nn.Module:
    """A net whose BatchNorm sees the inputs, whatever the weights, and buffers of other types."""
    net = nn.Sequential(nn.BatchNorm1d(5), model()).double()
    net.register_buffer("flags", torch.tensor([True, False, True]))
    net.register_buffer("big", torch.tensor([1 << 60, -1]))
    return net


def built(
    way: str, rule: str, world: int, net: nn.Module, wrapper: dict[str, bool] | None = None, **settings: Any
) -> tuple[nn.Module, VariationalOptimizer]:
    """A net as the loop calls it, and its optimiser."""
    settings = {"mc_samples": 1, "seed": 7, **settings}
    if way == "mesh":
        return net, RULES[rule](net, mesh=init_device_mesh("cpu", (world,)), **settings)
    wrapped = DistributedDataParallel(net, **wrapper or {})
    return wrapped, RULES[rule](wrapped, **settings)


def trained(
    net: nn.Module,
    opt: VariationalOptimizer,
    pairs: Iterable[tuple[Tensor, Tensor]],
    clip: float | None = None,
) -> None:
    for x, y in pairs:
        opt.zero_grad()
        with opt.sampled_params():
            loss_of(net, x, y).backward()
        if clip is not None:
            clip_grad_norm_(opt.parameters(), clip)
        opt.step()


def shares(rank: int, world: int, start: int = 0, stop: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    return [
        (share(x, rank, world, None), share(y, rank, world, None)) for x, y in list(batches())[start:stop]
    ]


def steepness(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradients do not depend on the weights."""
    return (net(x) * (1 + nn.functional.one_hot(y, 3))).sum(1).mean()


def in_parts(rule: str, rank: int, world: int) -> Any:
    """Shares of which one is cut into two parts, and the other is not."""
    torch.manual_seed(0)
    net = nn.Linear(5, 3).double()
    more = {"mesh": init_device_mesh("cpu", (world,))} if world > 1 else {}
    opt = RULES[rule](net, mc_samples=1, seed=7, **more)
    step = posterity.compile_step(net, steepness, opt, parts=world)
    for x, y in batches():
        loss = step(*(share(each[:9], rank, world, [5, 4] if more else None) for each in (x, y)))
    return learned(opt, 0.0 * loss)


def watched(seen: list[int], call: Callable[..., Any], numbers: Callable[..., range]) -> Callable[..., Any]:
    """A function that keeps numbers of the noise it is called for."""

    def watching(*args: Any, **more: Any) -> Any:
        seen.extend(numbers(*args, **more))
        return call(*args, **more)

    return watching


def numbers_in_parts(rank: int, world: int) -> Any:
    """Numbers of the noise of shares that are cut into four parts and into two, by a rule and a gradient."""
    torch.manual_seed(0)
    opt = RULES["ivon"](
        nn.Linear(5, 3).double(), mc_samples=2, seed=7, mesh=init_device_mesh("cpu", (world,))
    )
    m = posterity.variational(nn.Linear(5, 3).double(), seed=7, estimator="flipout")
    adam = torch.optim.Adam(m.parameters())
    by_rule = posterity.compile_step(opt.module, steepness, opt, parts=4)
    by_adam = posterity.compile_step(m, steepness, adam, parts=4, mc_samples=2, num_data=96)
    found: dict[str, list[int]] = {"rule": [], "gradient": []}
    draw = watched(found["rule"], rules.draw, lambda opt, samples, weight: samples)
    of_gradient = watched(
        found["gradient"],
        gradients.parameters_of,
        lambda *args, ahead, **_: range(args[3].start + ahead, args[3].stop + ahead),
    )
    x, y = (share(each[:10], rank, world, [4, 6]) for each in next(iter(batches())))
    with patch.object(rules, "draw", draw), patch.object(gradients, "parameters_of", of_gradient):
        by_rule(x, y)
        by_adam(x, y)
    return found


def said(call: Callable[[], Any]) -> str:
    """What is raised, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# What is learned: the test compares it with one process.


def options(option: str, rule: str, rank: int, world: int) -> Any:
    net, opt = built("ddp", rule, world, model(), OPTIONS[option])
    trained(net, opt, shares(rank, world))
    return moments(opt)


def closure(rule: str, samples: int, rank: int, world: int) -> Any:
    net, opt = built("ddp", rule, world, model(), mc_samples=samples)
    loss = None
    for x, y in shares(rank, world):
        opt.zero_grad()
        loss = opt.step(lambda x=x, y=y: loss_of(net, x, y))
    return learned(opt, loss)


def with_settings(way: str, rule: str, rank: int, world: int, **settings: Any) -> Any:
    net, opt = built(way, rule, world, model(), **settings)
    trained(net, opt, shares(rank, world))
    return moments(opt) | weights(opt)


def moments(opt: VariationalOptimizer) -> dict[str, Tensor]:
    """Means and stds."""
    return {name: value for name, value in learned(opt, 0.0).items() if name != "loss"}


def weights(opt: VariationalOptimizer) -> dict[str, Tensor]:
    """All parameters, also those without a posterior."""
    return {f"weight {name}": p.detach().clone() for name, p in opt.named()}


def clipped(way: str, rule: str, rank: int, world: int) -> Any:
    net, opt = built(way, rule, world, model())
    trained(net, opt, shares(rank, world), CLIP)
    return moments(opt)


def unused(way: str, rule: str, rank: int, world: int) -> Any:
    """Each process takes a branch of its own, and nobody the last."""
    net, opt = built(way, rule, world, branches(), {"find_unused_parameters": True})
    for x, y in shares(rank, world):
        opt.zero_grad()
        with opt.sampled_params():
            nn.functional.cross_entropy(net(x, rank), y).backward()
        opt.step()
    return moments(opt)


def with_zero_grad(way: str, rule: str, rank: int, world: int) -> Any:
    """Between two contexts everything is dropped."""
    net, opt = built(way, rule, world, model())
    for x, y in shares(rank, world):
        for scale in (10.0, 1.0):
            opt.zero_grad()
            with opt.sampled_params():
                (scale * loss_of(net, x, y)).backward()
        opt.step()
    return moments(opt)


def bad_batch(way: str, rule: str, what: str, rank: int, world: int) -> Any:
    """The second batch of the last process is bad: it is as if no process had seen it."""
    net, opt = built(way, rule, world, model())
    messages, same = [], True
    for number, (x, y) in enumerate(shares(rank, world)):
        bad = number == 1 and rank == world - 1
        before = weights(opt)

        def loss(x: Tensor = x, y: Tensor = y, bad: bool = bad) -> Tensor:
            if bad and what == "input":
                x = x.clone().fill_(torch.nan)
            return loss_of(net, x, y) + (torch.nan if bad and what == "loss" else 0.0)

        def step(loss: Callable[[], Tensor] = loss) -> None:
            opt.zero_grad()
            if what == "loss":
                opt.step(loss)
                return
            with opt.sampled_params():
                loss().backward()
            opt.step()

        messages.append(said(step))
        if number == 1:
            same = all(torch.equal(value, before[name]) for name, value in weights(opt).items())
    return {"messages": messages, "same": same, "learned": moments(opt)}


def alone_at_times(way: str, rule: str, rank: int, world: int) -> Any:
    """The first process looks at samples between steps, and the last one too, more often."""
    net, opt = built(way, rule, world, model())
    plain = net.module if way == "ddp" else net
    for x, y in shares(rank, world):
        for _ in range(2 * rank + 1 if rank in (0, world - 1) else 0):
            with torch.no_grad(), opt.sampled_params():
                assert torch.isfinite(plain(x)).all()
            assert opt.posterior().std()
        trained(net, opt, [(x, y)])
    return moments(opt)


def ragged_closure(rule: str, by: str, rank: int, world: int) -> Any:
    """Shares of unlike sizes that only the user knows: the optimiser holds parameters, not the module."""
    net = model()
    mesh = init_device_mesh("cpu", (world,))
    opt = RULES[rule](net.named_parameters(), mc_samples=1, seed=7, mesh=mesh)
    loss = None
    for x, y in batches():
        x, y = (share(each, rank, world, [BATCH - 3, 3]) for each in (x, y))
        opt.zero_grad()
        loss = opt.step(lambda x=x, y=y: loss_of(net, x, y), **{by: len(x)})
    return learned(opt, loss)


def ragged_terms(rule: str, rank: int, world: int) -> Any:
    """As many examples in all processes, of which unlike numbers count."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7, mesh=init_device_mesh("cpu", (world,)))
    step = posterity.compile_step(net, loss_of, opt)
    loss = torch.zeros(())
    for x, y in batches():
        x, y = (share(each, rank, world, None) for each in (x, y))
        y[: 2 * rank + 1] = -100  # which cross_entropy ignores
        loss = step(x, y, count=int((y >= 0).sum()))
    return learned(opt, loss)


# What processes save, and go on from.


def resumed(way: str, rule: str, rank: int, world: int, *, folder: Path, name: str = "one") -> Any:
    """The second half of a run that others began."""
    net, opt = built(way, rule, world, model(), seed=1)
    saved = torch.load(folder / f"{name} {rule}.pt", weights_only=False)
    net.load_state_dict({f"module.{k}" if way == "ddp" else k: v for k, v in saved["model"].items()})
    opt.load_state_dict(saved["opt"])
    trained(net, opt, shares(rank, world, STEPS // 2))
    return moments(opt)


def halves(way: str, rule: str, rank: int, world: int) -> Any:
    """The first half, as it is saved, and all of a run that goes on from it in a fresh optimiser."""
    net, opt = built(way, rule, world, model())
    trained(net, opt, shares(rank, world, 0, STEPS // 2))
    plain = net.module if way == "ddp" else net
    saved = deepcopy({"model": plain.state_dict(), "opt": opt.state_dict()})
    other, again = built(way, rule, world, model(), seed=1)
    other.load_state_dict(net.state_dict())
    again.load_state_dict(saved["opt"])
    trained(net, opt, shares(rank, world, STEPS // 2))
    trained(other, again, shares(rank, world, STEPS // 2))
    names = [name for group in saved["opt"]["param_groups"] for name in group["param_names"]]
    return {
        "saved": saved,
        "names": names,
        "through": moments(opt),
        "resumed": moments(again),
    }


def loaded(way: str, rule: str, rank: int, world: int) -> Any:
    """Go on from a posterior, in the middle of a run."""
    net, opt = built(way, rule, world, model())
    trained(net, opt, shares(rank, world, 0, STEPS // 2))
    opt.load_posterior(opt.posterior())
    trained(net, opt, shares(rank, world, STEPS // 2))
    return moments(opt)


def statistics(way: str, rank: int, world: int) -> Any:
    """Buffers after some steps."""
    net, opt = built(way, "ivon", world, normed(), deterministic="0.*")
    trained(net, opt, shares(rank, world))
    return {name: value.clone() for name, value in net.named_buffers()}


# What is refused, in all processes.


def unlike(what: str, rank: int, world: int) -> Any:
    """The last process is not like the others."""
    odd = rank == world - 1
    net = model()
    settings: dict[str, Any] = {"lr": 0.1, "seed": 7}
    if odd and what in settings:
        settings[what] = {"lr": 0.2, "seed": 8}[what]
    rule = "vogn" if odd and what == "rule" else "ivon"
    if odd and what == "weights":
        with torch.no_grad():
            net[0].bias[0] += 1e-2
    if odd and what == "model":
        net = nn.Sequential(net, nn.Linear(3, 3)).double()
    kind = {"ivon": posterity.IVON, "vogn": posterity.VOGN}[rule]
    opt = kind(net, num_data=96, std_init=0.1, mesh=init_device_mesh("cpu", (world,)), **settings)
    if odd and what == "state":
        opt.load_posterior(kind(net, num_data=96, std_init=0.2).posterior())
    before = weights(opt)
    message = said(lambda: trained(net, opt, shares(rank, world, 0, 1)))
    return {"message": message, "same": all(torch.equal(v, before[k]) for k, v in weights(opt).items())}


def unseeded(way: str, rank: int, world: int) -> Any:
    """Without a seed all take the first one's."""
    net = model()
    torch.manual_seed(rank)
    net, opt = built(way, "ivon", world, net, seed=None)
    first = opt.param_groups[0]["seed"]
    trained(net, opt, shares(rank, world, 0, 1))
    return {"seed": opt.param_groups[0]["seed"], "first": first}


def refused_wrappers(rank: int, world: int) -> Any:
    """Wrappers that a rule cannot learn with."""
    return {
        "mesh": said(
            lambda: posterity.IVON(
                DistributedDataParallel(model()), num_data=96, mesh=init_device_mesh("cpu", (world,))
            )
        ),
        **{
            option: said(lambda option=option: built("ddp", "vogn", world, model(), {option: True}))
            for option in ("find_unused_parameters", "static_graph")
        },
    }


def unwrapped(rule: str, rank: int, world: int) -> Any:
    """Neither a wrapper nor a mesh; and a wrapper whose no_sync() holds a context of its own."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    forgotten = said(lambda: trained(net, opt, shares(rank, world, 0, 1)))
    wrapped, opt = built("ddp", rule, world, model())

    def apart() -> None:
        for (x, y), context in zip(
            shares(rank, world, 0, 2), (wrapped.no_sync(), nullcontext()), strict=True
        ):
            with context, opt.sampled_params():
                loss_of(wrapped, x, y).backward()
        opt.step()

    return {"forgotten": forgotten, "apart": said(apart)}


# Gradient methods.


def by_gradient(
    net: nn.Module, plain: posterity.Variational, pairs: Iterable[Any], look: bool = False
) -> Any:
    """Bayes by Backprop, with a KL that is estimated at the drawn weights."""
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    prior = posterity.ScaleMixture()
    for x, y in pairs:
        if look:
            with torch.no_grad():
                plain(x)
        opt.zero_grad()
        nll = loss_of(net, x, y)
        posterity.elbo(nll, plain.kl(prior), num_data=96).backward()
        opt.step()
    means, stds = plain.posterior.mean(), plain.posterior.std()
    found = {f"mean {name}": value.detach().clone() for name, value in means.items()}
    return found | {f"std {name}": value.detach().clone() for name, value in stds.items()}


def variational(seed: int | None, rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    plain = posterity.variational(model(), std_init=0.1, seed=seed)
    if seed is None:
        plain.seed += rank
    first = plain.seed
    found = by_gradient(DistributedDataParallel(plain), plain, shares(rank, world), look=rank == 0)
    return {"learned": found, "first": first, "seed": plain.seed}


def unlike_draws(rank: int, world: int) -> Any:
    plain = posterity.variational(model(), std_init=0.1, seed=rank)
    net = DistributedDataParallel(plain)
    inside = said(lambda: posterity.variational(DistributedDataParallel(model())))
    return {"seeds": said(lambda: by_gradient(net, plain, shares(rank, world))), "inside": inside}


def predicted(keep: bool | None, rank: int, world: int) -> Any:
    """Seven batches, which processes take in turn, and one, which leaves others without any."""
    mesh, q, x = init_device_mesh("cpu", (world,)), posterior(), next(batches())[0]
    unlike = said(lambda: posterity.predict(model(), q, x, seed=rank, mesh=mesh))
    found = [
        posterity.predict(model(), q, x, samples=5, batch_size=size, chunk=2, keep_samples=keep, mesh=mesh)
        for size in (2, 100)
    ]
    return {"unlike": unlike, "learned": [(p.probs, p.mutual_information) for p in found]}


def posterior() -> posterity.Factorised:
    return posterity.IVON(model(), num_data=96, std_init=0.1).posterior()


CASES: dict[str, Callable[..., Any]] = {}
for _rule in ("ivon", "ivon-seldom", "vogn", "noisy-kfac"):
    _graphs = _rule.startswith("ivon")  # no layer reports
    for _option in OPTIONS if _graphs else ("views", "buffers"):
        CASES[f"options {_option} {_rule}"] = partial(options, _option, _rule)
    for _way in WAYS:
        if _graphs or _way == "mesh":
            CASES[f"unused {_way} {_rule}"] = partial(unused, _way, _rule)
        CASES[f"clipped {_way} {_rule}"] = partial(clipped, _way, _rule)
        CASES[f"zeroed {_way} {_rule}"] = partial(with_zero_grad, _way, _rule)
        CASES[f"looked {_way} {_rule}"] = partial(alone_at_times, _way, _rule)
        CASES[f"loaded {_way} {_rule}"] = partial(loaded, _way, _rule)
        CASES[f"halves {_way} {_rule}"] = partial(halves, _way, _rule)
        CASES[f"resumed {_way} {_rule}"] = partial(resumed, _way, _rule)
        for _what in ("loss", "input"):
            CASES[f"bad {_what} {_way} {_rule}"] = partial(bad_batch, _way, _rule, _what)
    CASES[f"ragged batch_size {_rule}"] = partial(ragged_closure, _rule, "batch_size")
    CASES[f"ragged terms {_rule}"] = partial(ragged_terms, _rule)
    CASES[f"unwrapped {_rule}"] = partial(unwrapped, _rule)
for _rule in RULES:
    CASES[f"closure {_rule}"] = partial(closure, _rule, 1 if _rule in ("ogn", "kfac") else 2)
for _way in WAYS:
    for _rule in ("bgd", "ivon", "vogn"):  # by Adam, and by the rule
        CASES[f"deterministic {_way} {_rule}"] = partial(with_settings, _way, _rule, deterministic="0.*")
    CASES[f"statistics {_way}"] = partial(statistics, _way)
    CASES[f"unseeded {_way}"] = partial(unseeded, _way)
CASES |= {
    "variational seeded": partial(variational, 7),
    "variational unseeded": partial(variational, None),
    "unlike-draws": unlike_draws,
}
CASES["numbers"] = numbers_in_parts
CASES |= {f"parts {rule}": partial(in_parts, rule) for rule in ("bgd", "vogn", "noisy-kfac")}
CASES |= {f"predicted {keep}": partial(predicted, keep) for keep in (True, False, None)}
CASES["wrappers"] = refused_wrappers
CASES |= {
    f"unlike {what}": partial(unlike, what) for what in ("lr", "seed", "rule", "weights", "model", "state")
}

FOUR: dict[str, Callable[..., Any]] = {}
for _rule in ("ivon", "vogn"):
    for _way in WAYS:
        FOUR[f"resumed {_way} {_rule}"] = partial(resumed, _way, _rule, name=f"two {_way}")
        FOUR[f"bad input {_way} {_rule}"] = partial(bad_batch, _way, _rule, "input")
    FOUR[f"unused mesh {_rule}"] = partial(unused, "mesh", _rule)
