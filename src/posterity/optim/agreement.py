"""Checks before the first step that processes learn the same posterior, and that one place adds up
gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from posterity.distributed import Fingerprint, fingerprint
from posterity.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from posterity.optim.optimizer import VariationalOptimizer

_UNWRAPPED = (
    "wrap the model in DistributedDataParallel and take the backward passes of a step that are inside its "
    "no_sync() in one context with the last, or give the optimiser mesh="
)


def unwrapped(
    wrapper: DistributedDataParallel, rule: str, collects: bool, mesh: DeviceMesh | None
) -> nn.Module:
    """The module inside a wrapper that averages gradients as a rule needs; other wrappers are refused."""
    if mesh is not None:
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which already averages gradients over "
            "processes: leave mesh= out, or pass and call wrapper.module"
        )
    for option in ("find_unused_parameters", "static_graph"):
        if collects and getattr(wrapper, option):
            raise ValueError(
                f"DistributedDataParallel({option}=True) follows autograd's graph, but {rule} "
                f"collects per-example gradients outside it: leave {option} out, or use mesh= instead "
                "of the wrapper"
            )
    module: nn.Module = wrapper.module
    return module


def meet(opt: VariationalOptimizer) -> None:
    """Before the first step: refuse processes that differ, and use one seed in all."""
    if opt.mesh is None:  # processes may have come together after this was built
        opt.world = opt.all_processes()
    opt.met = True
    if opt.world.size == 1:
        return
    if not opt.seeded and not opt.param_groups[0]["steps"]:
        seed = opt.world.gathered(opt.param_groups[0]["seed"])[0]
        for group in opt.param_groups:
            group["seed"] = seed
    _refuse_unlike(opt)


def _refuse_unlike(opt: VariationalOptimizer) -> None:
    """Raise in all processes if their rules, settings, weights or states differ."""
    settings = {
        f"{key} of group {number}": repr(value)
        for number, group in enumerate(opt.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    own = {"rule": type(opt).__name__, "overlap": opt.overlap}
    opt.world.refuse_others({**own, **settings}, "the optimiser's")
    opt.world.refuse_others({name: _described(p) for name, p in opt.named()}, "the parameter")
    states = {
        f"{key} of {name}": _described(value)
        for name, p in opt.named()
        for key, value in opt.state.get(p, {}).items()
    }
    opt.world.refuse_others(states, "the state")


def _described(tensor: Any) -> str | Fingerprint:
    """The values that must be the same in all processes; for a sharded tensor, its sharding."""
    return f"{list(tensor.shape)} {tensor.placements}" if is_sharded(tensor) else fingerprint(tensor)


def refuse_unaveraged(opt: VariationalOptimizer) -> None:
    """Raise in all processes if no wrapper has averaged their gradients."""
    plain = ((name, p.grad) for name, p in opt.named() if not is_sharded(p))
    mine = {name: "none" if grad is None else fingerprint(grad) for name, grad in plain}
    opt.world.refuse_others(mine, "the gradient of", _UNWRAPPED)
    opt.averaged = True
