"""From a posterior to the state of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from posterity.optim.groups import Group
from posterity.optim.statistics import state_dtype, zero
from posterity.posterior import Factorised

Init = Callable[[Tensor, Tensor | None, Group], dict[str, Tensor]]


def states_from(
    posterior: Factorised, blocks: Mapping[str, tuple[Tensor, Group]], init: Init
) -> dict[Tensor, dict[str, Tensor]]:
    """New states, with means, of the parameters that a posterior names; what does not fit is refused.

    Args:
        posterior: Where means, stds and masks come from; nothing of it is shared.
        blocks: The optimiser's parameters and their groups, by name.
        init: The rule's state for a mean and a std.
    """
    for name, leaf in posterior.blocks.items():
        if name not in blocks:
            raise ValueError(f"the posterior has a block {name!r} that this optimiser has not")
        if blocks[name][0].shape != leaf.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(leaf.shape)} in the posterior and "
                f"{tuple(blocks[name][0].shape)} in this optimiser"
            )
    states = {}
    for name, leaf in posterior.blocks.items():
        p, group = blocks[name]
        mean = leaf.mean().detach().to(p.device, state_dtype(p), copy=True)
        std = leaf.std().detach().to(mean, copy=True)
        if leaf.keep is not None:  # masked wherever it matters; any positive std will do
            std = torch.where(leaf.keep.to(p.device), std, 1.0)
        try:
            state = {"step": zero(), "mean": mean, **init(mean, std, group)}
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        if leaf.keep is not None:
            state["keep"] = leaf.keep.to(p.device, copy=True)
        states[p] = state
    return states
