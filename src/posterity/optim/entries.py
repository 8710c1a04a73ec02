"""What entries of groups may be, said once for all rules."""

from __future__ import annotations

import math
from collections.abc import Collection
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from posterity.optim.groups import Group

# One number for the whole optimiser: a step has all groups at once.
_SHARED = ("mc_samples", "factors_every", "batch_size")


def refuse_misspelt(group: Group, known: Collection[str]) -> None:
    """Raise for an entry of a user's group that is one of ours but for some letters: nothing would read it.

    Args:
        group: As it was given.
        known: Names of entries that are read.
    """
    for key in group.keys() - known:
        for near in get_close_matches(key, known, n=1, cutoff=0.8):
            raise ValueError(f"a group has an entry {key!r}, did you mean {near!r}?")


def check_common(group: Group, first: Group) -> None:
    """Refuse values of entries that all rules have in common.

    Args:
        group: The group.
        first: Of all groups of the optimiser.
    """
    at_least_zero(group, "lr")
    if "betas" in group:
        _check_betas(group["betas"])
    if not isinstance(group["seed"], Integral):
        raise ValueError(f"seed must be a whole number, not {_shown(group['seed'])}")
    whole(group, "mc_samples")
    for key in _SHARED:
        if group.get(key) != first.get(key):
            raise ValueError(f"{key} must be one number for the whole optimiser: set it outside the groups")


def above_zero(group: Group, *keys: str) -> None:
    """Refuse what is no finite number greater than 0."""
    for key in keys:
        if not 0 < number(group, key) < math.inf:
            raise ValueError(f"{key} must be finite and greater than 0, not {group[key]}")


def at_least_zero(group: Group, *keys: str) -> None:
    """Refuse what is no finite number of at least 0."""
    for key in keys:
        if not 0 <= number(group, key) < math.inf:
            raise ValueError(f"{key} must be 0 or more, and finite, not {group[key]}")


def whole(group: Group, *keys: str) -> None:
    """Refuse what is no whole number of at least 1."""
    for key in keys:
        value = group[key]
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, not {_shown(value)}")


def number(group: Group, key: str) -> Any:
    """A value that is a number, or a tensor of one; else an error says so."""
    value = group[key]
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return value
    raise ValueError(f"{key} must be a number, not {_shown(value)}")


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(isinstance(b, Real) for b in betas):
        raise ValueError(f"betas must be two numbers, such as (0.9, 0.999), not {_shown(betas)}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), not {betas}")


def _shown(value: object) -> str:
    """A value as users write it; of an object, its kind."""
    plain = value is None or isinstance(value, str | Real | tuple | list)
    return repr(value) if plain else f"a {type(value).__name__}"
