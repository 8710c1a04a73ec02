"""Converting an optimiser's state to a posterior, and a posterior to state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.optim import watch
from posterity.optim.presets import far_below, too_narrow
from posterity.optim.state import Group, State, state_dtype, zero
from posterity.posterior import Factorised, Leaf
from posterity.posterior.factorised import Key
from posterity.sharding import as_in, whole

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


def leaves(opt: VariationalOptimizer, called: Mapping[str, str]) -> dict[Key, Leaf]:
    """The posterior of every block, under the names that ``called`` gives to parameters."""
    found: dict[Key, Leaf] = {}
    within = opt.blocks.by_name()
    for name, p, group in opt.stochastic():
        block, state = within.get(name), opt.state[p]
        names: Key
        if block is None:
            state = {key: whole(value) for key, value in state.items() if key not in opt.matrices}
            names, means, keep = called[name], [state.get("mean", whole(p.detach()))], state.get("keep")
        elif name == block.names[0]:
            names = tuple(called[each] for each in block.names)
            means, keep = block.means(), block.keep()
        else:
            continue
        held = None
        if keep is not None:  # pruned weights are zero; others that do not move are held
            held = ~keep & ((means[0] if block is None else block.join(means)) != 0)
            keep = keep | held
        found[names] = opt.leaf(means, state, keep, group).hold(held)
    return found


def unfit(opt: VariationalOptimizer, leaves: Iterable[Leaf]) -> str | None:
    """Why an optimiser's posterior should not be sampled, with advice; None if it can be.

    Falling losses at sampled weights show that it can be. Without them, stds that outweigh weights show that
    it cannot.
    """
    if not opt.param_groups[0]["steps"] or (opt.draws and opt.watch.learned):
        return None
    noise = watch.noise_of(leaves)
    seen = "it has hardly learned" if opt.draws else "it has seen the loss at its means alone"
    return (
        f"the stds of {type(opt).__name__}'s posterior are {noise:.2g} times its weights, and {seen}: "
        f"sampled networks will not do what their mean does, {opt.narrower}"
        if noise > 1.0
        else None
    )


def slow(opt: VariationalOptimizer) -> str:
    """Advice on a learning rate or stds far below the usual ones; empty if neither is."""
    group = opt.param_groups[0]
    if group.get("lr_unit") == 1.0:  # a paper's own
        return ""
    rule = getattr(opt, "table", opt.__class__.__name__)
    return far_below(rule, float(group["lr"])) or too_narrow(rule, group, group["params"])


def noise(opt: VariationalOptimizer) -> float:
    """‖std‖ / ‖mean‖ of the weights at which losses are taken."""
    return watch.noise_of(leaves(opt, {name: name for name, _ in opt.named()}).values()) if opt.draws else 0.0


def take_up(opt: VariationalOptimizer, posterior: Factorised) -> None:
    """Set an optimiser's means and state so that it has the given posterior."""
    params = {name: (p, group) for name, p, group in opt.stochastic()}
    fresh = states_from(posterior, params, opt)
    opt.blocks.displace(posterior.tensors.values(), fresh)
    for p, state in fresh.items():
        p.copy_(state["mean"])
        if state_dtype(p) == p.dtype:
            del state["mean"]  # the parameter itself is the mean
        opt.state[p] = state


def states_from(
    posterior: Factorised, params: Mapping[str, tuple[Tensor, Group]], rule: VariationalOptimizer
) -> dict[Tensor, State]:
    """New states, with means, of the parameters that a posterior names; raises if they do not fit.

    Args:
        posterior: The source of means, stds and masks, which are copied.
        params: The optimiser's parameters and their groups, by name.
        rule: The optimiser, which defines its state for a leaf; one without matrices takes blocks of one
            tensor.
    """
    for block, leaf in posterior.blocks.items():
        names = posterior.tensors[block]
        if any(name not in params for name in names):
            raise ValueError(
                f"the posterior has a block {block!r} that this optimiser does not have: load the "
                "posterior of the same model"
            )
        if len(names) > 1 and not rule.matrices:
            raise ValueError(
                f"the posterior has a block {block!r} of several tensors, and all weights of this optimiser "
                "are independent: load Factorised({name: DiagonalGaussian(mean, posterior.std()[name]) for "
                "name, mean in posterior.mean().items()})"
            )
        for name, shape in zip(names, leaf.shapes, strict=True):
            if params[name][0].shape != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)} in the posterior and "
                    f"{tuple(params[name][0].shape)} in this optimiser: load the posterior of the "
                    "same model"
                )
        if len({id(params[name][1]) for name in names}) > 1:
            raise ValueError(
                f"{block!r} is one block, but its tensors are in different groups here: put them in one group"
            )
        if not bool(torch.isfinite(leaf.mean()).all()):
            raise ValueError(f"the posterior's means of {block!r} are not finite: load an earlier one")
    states = {}
    for block, leaf in posterior.blocks.items():
        names = posterior.tensors[block]
        first, group = params[names[0]]
        mean = leaf.mean().detach().to(first.device, state_dtype(first), copy=True).contiguous()
        std = leaf.std().detach().to(mean, copy=True)
        if not leaf.whole:  # masked wherever it matters; any positive std will do
            std = torch.where(leaf.varying.to(mean.device), std, 1.0)
        try:
            all_of = {"mean": mean, **rule.adopt(leaf, mean, std, group)}
        except ValueError as error:
            raise ValueError(f"{block!r}: {error}") from error
        if not leaf.whole:
            all_of["keep"] = leaf.varying.to(mean.device, copy=True)
        single = {key: leaf.split(value) for key, value in all_of.items() if key not in rule.matrices}
        for i, name in enumerate(names):
            own = {
                key: values[i].clone(memory_format=torch.contiguous_format) for key, values in single.items()
            }
            p = params[name][0]
            states[p] = {"step": zero(), **{key: as_in(value, p) for key, value in own.items()}}
        states[first] |= {key: all_of[key].clone() for key in rule.matrices if key in all_of}
    return states
