"""Whether a saved optimiser state fits, by name and shape rather than by position alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from posterity.optim.groups import Group


def saved_states(
    groups: list[Group], state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Each parameter with its saved state, in the order of the groups."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [p for group in groups for p in group["params"]]
    for index, p in zip(indices, params, strict=True):
        yield p, state_dict["state"].get(index, {})


def refuse_mismatch(
    groups: list[Group], state_dict: dict[str, Any], defaults: Collection[str], matrices: Collection[str] = ()
) -> None:
    """Raise, naming the first thing that differs, unless the state was saved for these parameters.

    Args:
        groups: Of the optimiser.
        state_dict: The state.
        defaults: Names of hyper-parameters.
        matrices: Keys of tensors that have no value for each weight.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"the state has {len(saved)} parameter groups and this optimiser {len(groups)}")
    for mine, theirs in zip(groups, saved, strict=True):
        for key in defaults:
            if key in mine and key not in theirs:
                raise ValueError(
                    f"the state has no {key!r}: it was saved by another kind of optimiser, or by an older "
                    "version, in which case add it to the state's param_groups"
                )
        if mine["deterministic"] != theirs.get("deterministic"):
            raise ValueError(f"{mine['param_names'][0]!r} is deterministic on one side only")
        names = theirs.get("param_names", [])
        if len(names) != len(mine["param_names"]):
            raise ValueError(
                f"a group has {len(names)} parameters in the state, {len(mine['param_names'])} here"
            )
        for here, there in zip(mine["param_names"], names, strict=True):
            if here != there:
                raise ValueError(f"the state has {there!r} where this optimiser has {here!r}")
    names = [name for group in groups for name in group["param_names"]]
    for name, (p, state) in zip(names, saved_states(groups, state_dict), strict=True):
        for key, value in state.items():
            if key != "step" and key not in matrices and value.shape != p.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(value.shape)} in the state, {tuple(p.shape)} here"
                )
