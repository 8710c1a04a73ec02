"""From a posterior to the state of a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from posterity.optim.groups import Group
from posterity.optim.statistics import state_dtype, zero
from posterity.posterior import Factorised, Leaf

State: TypeAlias = dict[str, Tensor]
Adopt: TypeAlias = Callable[[Leaf, Tensor, Tensor, Group], State]


def states_from(
    posterior: Factorised,
    params: Mapping[str, tuple[Tensor, Group]],
    adopt: Adopt,
    matrices: Collection[str] = (),
) -> dict[Tensor, State]:
    """New states, with means, of the parameters that a posterior names; what does not fit is refused.

    Args:
        posterior: Where means, stds and masks come from; nothing of it is shared.
        params: The optimiser's parameters and their groups, by name.
        adopt: The rule's state for a leaf, its mean and its std.
        matrices: Keys of that state that are the block's, not those of single weights; a rule that has none
            takes blocks of one tensor.
    """
    for block, leaf in posterior.blocks.items():
        names = posterior.tensors[block]
        if any(name not in params for name in names):
            raise ValueError(f"the posterior has a block {block!r} that this optimiser has not")
        if len(names) > 1 and not matrices:
            raise ValueError(
                f"the posterior has a block {block!r} that this optimiser has not, whose weights are all "
                "independent: load Factorised({name: DiagonalGaussian(mean, posterior.std()[name]) for name, "
                "mean in posterior.mean().items()})"
            )
        for name, shape in zip(names, leaf.shapes, strict=True):
            if params[name][0].shape != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)} in the posterior and "
                    f"{tuple(params[name][0].shape)} in this optimiser"
                )
        if len({id(params[name][1]) for name in names}) > 1:
            raise ValueError(f"{block!r} is one block, whose tensors are in different groups here")
    states = {}
    for block, leaf in posterior.blocks.items():
        names = posterior.tensors[block]
        first, group = params[names[0]]
        mean = leaf.mean().detach().to(first.device, state_dtype(first), copy=True)
        std = leaf.std().detach().to(mean, copy=True)
        if leaf.keep is not None:  # masked wherever it matters; any positive std will do
            std = torch.where(leaf.keep.to(mean.device), std, 1.0)
        try:
            whole = {"mean": mean, **adopt(leaf, mean, std, group)}
        except ValueError as error:
            raise ValueError(f"{block!r}: {error}") from error
        if leaf.keep is not None:
            whole["keep"] = leaf.keep.to(mean.device, copy=True)
        single = {key: leaf.split(value) for key, value in whole.items() if key not in matrices}
        for i, name in enumerate(names):
            state = {"step": zero(), **{key: values[i].clone() for key, values in single.items()}}
            states[params[name][0]] = state
        states[first] |= {key: whole[key].clone() for key in matrices if key in whole}
    return states
