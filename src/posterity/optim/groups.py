"""Parameter groups in torch.optim's form, in which every parameter has a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

Group: TypeAlias = dict[str, Any]
Params: TypeAlias = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]


def named_groups(params: Params, numbered: int = 0) -> list[Group]:
    """What a user passes, as groups whose ``params`` are (name, tensor) pairs.

    A module gives its own names, as do named parameters; tensors without a name are numbered, from
    ``numbered`` on.
    """
    if isinstance(params, nn.Module):
        owned = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        if not owned:
            raise ValueError(f"{type(params).__name__} has no parameter that requires a gradient")
        return [{"params": owned}]
    if isinstance(params, Tensor):
        raise TypeError("pass a module, model.named_parameters() or groups, not a single tensor")
    entries: list[Any] = list(params)
    if not entries:
        raise ValueError("the optimiser got an empty list of parameters")
    groups = [dict(entry) for entry in entries] if isinstance(entries[0], dict) else [{"params": entries}]
    unnamed = numbered
    for group in groups:
        members: list[Any] = (
            [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        )
        for index, member in enumerate(members):
            if isinstance(member, Tensor):
                members[index] = (f"param.{unnamed}", member)
                unnamed += 1
        group["params"] = members
    return groups


def split_groups(groups: list[Group], deterministic: set[str], without_noise: Group | None) -> list[Group]:
    """Each group without its deterministic members, which get a group of their own.

    Args:
        groups: With named members.
        deterministic: Names.
        without_noise: What a group for these has other than the group they come from; None if nothing of that
            is meant for them.
    """
    split: list[Group] = []
    for group in groups:
        drawn = [(name, p) for name, p in group["params"] if name not in deterministic]
        fixed = [(name, p) for name, p in group["params"] if name in deterministic]
        split += [{**group, "params": drawn}] if drawn else []
        entries = {} if without_noise is None else {**group, **without_noise}
        split += [{**entries, "params": fixed, "deterministic": True}] if fixed else []
    return split


def members(group: Group) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of a group."""
    return zip(group["param_names"], group["params"], strict=True)


def checked_group(group: Group, held: list[Group]) -> Group:
    """A group with named members that may join those an optimiser holds; otherwise an error says why not."""
    names = {name for other in held for name in other["param_names"]}
    group = named_groups([group], numbered=len(names))[0]
    for name, p in group["params"]:
        if name in names:
            raise ValueError(f"two parameters are named {name!r}: give each its own, as the model does")
        names.add(name)
        if not p.is_floating_point():
            raise TypeError(f"{name!r} is {p.dtype}: only real floating-point weights have a posterior")
    if held:
        group["steps"] = held[0]["steps"]
    return group
