"""What several processes do with a model whose parameters are sharded: fully_shard and tensor parallel.

Each case runs in every process, as those of ``runs.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_

import posterity
from distributed.runs import RULES, STEPS, batches, learned, loss_of, model, share
from distributed.semantics import CLIP, moments, said
from distributed.semantics import posterior as whole_posterior
from posterity import VariationalOptimizer
from posterity.sharding import local, whole

SHARDED = ("bgd", "ivon", "ivon-seldom")
Pairs = Iterable[tuple[Tensor, Tensor]]


class Words(nn.Module):
    """A net with a padding row, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=4)
        self.head = nn.Linear(5, 3)
        self.spare = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x[:, :2].abs() * 10).long() % 7
        words[:, 0] = 4
        return self.head(self.words(words).sum(1) + x)


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def by_layers(net: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Every layer with parameters by itself, and the rest."""
    for each in net.children():
        if any(True for _ in each.parameters()):
            fully_shard(each, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def tensor_parallel(net: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def built(
    world: int, rule: str, net: nn.Module, way: str = "fsdp", **settings: Any
) -> tuple[nn.Module, VariationalOptimizer, int]:
    """A sharded net, its optimiser, and into how many shares a batch is cut."""
    options: dict[str, Any] = {"reshard_after_forward": False} if way == "kept" else {}
    shares = world
    if way in ("fsdp", "kept"):
        net = by_layers(net, init_device_mesh("cpu", (world,)), **options)
    elif way == "whole":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif way == "hybrid":
        net = by_layers(net, init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "shard")))
    elif way == "tp":
        net, shares = tensor_parallel(net, init_device_mesh("cpu", (world,))), 1
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tp"))
        net, shares = by_layers(tensor_parallel(net, mesh["tp"]), mesh["data"]), world // 2
    return net, RULES[rule](net, **{"mc_samples": 1, "seed": 7, **settings}), shares


def own(rank: int, world: int, shares: int) -> list[tuple[Tensor, Tensor]]:
    """This process's share of every batch."""
    number = rank * shares // world
    return [(share(x, number, shares, None), share(y, number, shares, None)) for x, y in batches()]


def found(opt: VariationalOptimizer) -> dict[str, Tensor]:
    """The posterior, and parameters that have none, whole."""
    return moments(opt) | {f"weight {name}": whole(p.detach()).clone() for name, p in opt.named()}


def one(
    net: nn.Module,
    opt: VariationalOptimizer,
    pairs: Pairs,
    before: Callable[[nn.Module, VariationalOptimizer], object] = lambda net, opt: None,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """A plain loop, in one process or in one of several, and what the means give after every step."""
    probe, outputs = next(batches())[0], {}
    for number, (x, y) in enumerate(pairs):
        opt.zero_grad()
        for _ in range(opt.param_groups[0]["mc_samples"]):
            before(net, opt)
            with opt.sampled_params():
                loss_of(net, x, y).backward()
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        opt.step()
        with torch.no_grad():
            outputs[f"output {number}"] = net(probe) + 0.0  # which is there
    return found(opt) | outputs


def loop(
    rule: str,
    rank: int,
    world: int,
    way: str = "fsdp",
    make: Callable[[], nn.Module] = model,
    before: Callable[[nn.Module, VariationalOptimizer], object] = lambda net, opt: None,
    clip: float | None = None,
    **settings: Any,
) -> Any:
    net, opt, parts = built(world, rule, make(), way, **settings)
    return one(net, opt, own(rank, world, parts), before, clip)


def closure(rule: str, rank: int, world: int, way: str = "fsdp") -> Any:
    net, opt, parts = built(world, rule, model(), way, mc_samples=2)
    loss = None
    for x, y in own(rank, world, parts):
        opt.zero_grad()
        loss = opt.step(lambda x=x, y=y: loss_of(net, x, y))
    return learned(opt, loss)


def accumulated(rule: str, contexts: bool, rank: int, world: int) -> Any:
    """Micro-batches in contexts of their own, or in one, where gradients travel once."""
    net, opt, parts = built(world, rule, model())
    for x, y in own(rank, world, parts):
        opt.zero_grad()
        micro = list(zip(x.chunk(2), y.chunk(2), strict=True))
        if contexts:
            for x, y in micro:
                with opt.sampled_params():
                    (loss_of(net, x, y) / 2).backward()
        else:
            with opt.sampled_params():
                for number, (x, y) in enumerate(micro):
                    net.set_requires_gradient_sync(number == 1)
                    (loss_of(net, x, y) / 2).backward()
        opt.step()
    return found(opt)


def unsynced(rank: int, world: int) -> Any:
    """A context whose gradients do not travel."""
    net, opt, parts = built(world, "ivon", model())
    net.set_requires_gradient_sync(False)
    x, y = own(rank, world, parts)[0]

    def context() -> None:
        with opt.sampled_params():
            loss_of(net, x, y).backward()

    return {"message": said(context)}


# What leaves gathered weights behind, before every context.


def passes(net: nn.Module, opt: VariationalOptimizer) -> None:
    """A forward pass at the means, without a backward pass."""
    net(next(batches())[0])


def looks(net: nn.Module, opt: VariationalOptimizer) -> None:
    """A forward pass at weights that training never sees."""
    with torch.no_grad(), opt.sampled_params():
        net(next(batches())[0])


def keeps(net: nn.Module, opt: VariationalOptimizer) -> None:
    """Weights that stay gathered after backward passes."""
    net.set_reshard_after_backward(False)


def gathers(net: nn.Module, opt: VariationalOptimizer) -> None:
    """Weights that somebody asks for and does not wait for."""
    net[0].unshard(async_op=True)


def fails(net: nn.Module, opt: VariationalOptimizer) -> None:
    """An error in the middle of a forward pass at drawn weights."""

    def stop(*_: object) -> None:
        raise KeyError("stop")

    handle = net[1].register_forward_pre_hook(stop)
    with suppress(KeyError), opt.sampled_params():
        net(next(batches())[0])
    handle.remove()


TRAPS = {each.__name__: each for each in (passes, looks, keeps, gathers, fails)}


def bad(what: str, rule: str, rank: int, world: int) -> Any:
    """Something that is not finite in one process, in the second step."""
    net, opt, parts = built(world, rule, model(), max_step=math.inf)
    messages = []
    before: dict[str, Tensor] = {}
    for number, (x, y) in enumerate(own(rank, world, parts)):
        wrong = number == 1 and rank == 0
        if wrong and what == "input":
            x = torch.full_like(x, math.nan)
        opt.zero_grad()
        with opt.sampled_params():
            loss_of(net, x, y).backward()
        grad = local(opt.parameters()[0].grad)
        if wrong and what == "gradient":
            grad[0, 0] = math.nan
        if wrong and what == "result":
            grad[0, 0] = 1e308
        before = found(opt)
        messages.append(said(opt.step))
        if number == 1:
            same = all(torch.equal(value, before[key]) for key, value in found(opt).items())
    return {"messages": messages, "same": same, "learned": found(opt)}


# State.


def reloaded(rule: str, rank: int, world: int) -> Any:
    """A run that goes on from its posterior, and another from what it has saved."""
    net, opt, parts = built(world, rule, model())
    pairs = own(rank, world, parts)
    one(net, opt, pairs[: STEPS // 2])
    opt.load_posterior(opt.posterior())
    state, weights = deepcopy(opt.state_dict()), {k: whole(v).clone() for k, v in net.state_dict().items()}
    plain = model()
    plain.load_state_dict(weights)
    again, other, _ = built(world, rule, plain, seed=1)
    other.load_state_dict(state)
    return {
        "learned": one(net, opt, pairs[STEPS // 2 :]),
        "again": one(again, other, pairs[STEPS // 2 :]),
    }


def checkpointed(rule: str, start: int, stop: int, rank: int, world: int, folder: Path) -> Any:
    """Some steps, from one checkpoint of shards to the next."""
    net, opt, parts = built(world, rule, model(), seed=7 if start == 0 else 1, deterministic="2.bias")
    lr = [group["lr"] for group in opt.param_groups]
    path = folder / f"sharded {rule}"
    if start:
        load(path / f"{start}", net, opt)
    else:
        get_optimizer_state_dict(net, opt)
    fresh = [group["lr"] for group in opt.param_groups] == lr
    for x, y in own(rank, world, parts)[start:stop]:
        opt.zero_grad()
        with opt.sampled_params():
            loss_of(net, x, y).backward()
        opt.step()
    save(path / f"{stop}", net, opt)
    return {"learned": found(opt), "fresh": fresh}


def through_one(rule: str, folder: Path, into: Path) -> None:
    """One process, whose model is whole, takes a step between two checkpoints of shards."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=1, deterministic="2.bias")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of processes that there are none of
        load(folder / f"sharded {rule}" / "1", net, opt)
        one(net, opt, list(batches())[1:2])
        save(into / f"sharded {rule}" / "2", net, opt)


def load(path: Path, net: nn.Module, opt: VariationalOptimizer) -> None:
    weights, state = get_state_dict(net, opt)
    checkpoint.load({"model": weights, "opt": state}, checkpoint_id=path)
    set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)


def save(path: Path, net: nn.Module, opt: VariationalOptimizer) -> None:
    weights, state = get_state_dict(net, opt)
    checkpoint.save({"model": weights, "opt": state}, checkpoint_id=path)


# Gradient methods.


def by_gradient(net: nn.Module, plain: posterity.Variational, pairs: Pairs, prior: Any) -> dict[str, Tensor]:
    """Bayes by Backprop, and what it predicts."""
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    for x, y in pairs:
        opt.zero_grad()
        nll = loss_of(net, x, y)
        posterity.elbo(nll, plain.kl(prior), num_data=96).backward()
        opt.step()
    if isinstance(net, FSDPModule):
        net.unshard()
    q = plain.posterior
    found = {f"mean {name}": value.detach().clone() for name, value in q.mean().items()}
    found |= {f"std {name}": value.detach().clone() for name, value in q.std().items()}
    p = posterity.predict(plain, q, next(batches())[0], samples=3, seed=1)
    return found | {"prediction": p.probs}


GRADIENT: dict[str, tuple[dict[str, Any], Any]] = {
    "weight": ({}, posterity.IsotropicGaussian(1.0)),
    "resharded": ({}, posterity.ScaleMixture()),
}


def variational(what: str, rank: int, world: int) -> Any:
    settings, prior = GRADIENT[what]
    torch.manual_seed(rank)
    plain = posterity.variational(model(), std_init=0.1, seed=7, **settings)
    options: dict[str, Any] = {"reshard_after_forward": True} if what == "resharded" else {}
    net = fully_shard(plain, mesh=init_device_mesh("cpu", (world,)), **options)
    if what == "resharded":
        net(next(batches())[0])
        scattered = said(plain.kl)
        register_fsdp_forward_method(net, "kl")
        plain.draws = 0
        return {"message": scattered, "learned": by_gradient(net, plain, own(rank, world, world), prior)}
    return by_gradient(net, plain, own(rank, world, world), prior)


def refused(rank: int, world: int) -> Any:
    """What a sharded model cannot have."""
    mesh = init_device_mesh("cpu", (world,))
    net = by_layers(model(), mesh)
    opt = RULES["ivon"](net)
    return {
        **{rule: said(lambda rule=rule: RULES[rule](net)) for rule in ("vogn", "ogn", "kfac", "noisy-kfac")},
        "mesh": said(lambda: RULES["ivon"](net, mesh=mesh)),
        "names": said(lambda: RULES["ivon"](net.named_parameters())),
        "compiled": said(lambda: posterity.compile_step(net, loss_of, opt)),
        "variational": said(lambda: posterity.variational(net)),
        "predict": said(lambda: posterity.predict(net, whole_posterior(), next(batches())[0])),
    }


CASES: dict[str, Callable[..., Any]] = {}
FOUR: dict[str, Callable[..., Any]] = {}
for _rule in SHARDED:
    for _way in ("fsdp", "whole", "kept", "tp"):
        CASES[f"sharded {_way} {_rule}"] = partial(loop, _rule, way=_way)
    for _way in ("fsdp", "tp"):
        CASES[f"sharded-samples {_way} {_rule}"] = partial(loop, _rule, way=_way, mc_samples=2)
        CASES[f"sharded-closure {_way} {_rule}"] = partial(closure, _rule, way=_way)
        CASES[f"sharded-clipped {_way} {_rule}"] = partial(loop, _rule, way=_way, clip=CLIP)
    CASES[f"sharded-adam fsdp {_rule}"] = partial(loop, _rule, deterministic="0.*")
    CASES[f"sharded-words fsdp {_rule}"] = partial(loop, _rule, make=words)
    CASES[f"sharded-contexts fsdp {_rule}"] = partial(accumulated, _rule, True)
    CASES[f"sharded-passes fsdp {_rule}"] = partial(accumulated, _rule, False)
    CASES[f"sharded-reloaded fsdp {_rule}"] = partial(reloaded, _rule)
    CASES[f"sharded-saved fsdp {_rule}"] = partial(checkpointed, _rule, 0, 1)
    for _what in ("input", "gradient"):
        CASES[f"sharded-bad {_what} {_rule}"] = partial(bad, _what, _rule)
    for _way in ("fsdp", "hybrid", "both"):
        FOUR[f"sharded {_way} {_rule}"] = partial(loop, _rule, way=_way)
    FOUR[f"sharded-words fsdp {_rule}"] = partial(loop, _rule, make=words)
    FOUR[f"sharded-saved fsdp {_rule}"] = partial(checkpointed, _rule, 2, STEPS)
for _name, _trap in TRAPS.items():
    CASES[f"sharded-trap {_name} ivon"] = partial(loop, "ivon", before=_trap)
CASES |= {f"sharded-gradient {what} ffg": partial(variational, what) for what in GRADIENT}
CASES["sharded-bad result bgd"] = partial(bad, "result", "bgd")
CASES |= {"sharded-unsynced": unsynced, "sharded-refused": refused}
