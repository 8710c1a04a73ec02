"""Names of settings as users give them, to a rule or in a parameter group: torch's own, and misspelt ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

from posterity.optim.state import Group

P = ParamSpec("P")
# Entries of torch's own optimisers: those for which one of ours does the job, and others.
_OURS = {
    "weight_decay": ("prior_precision", "weight_decay · num_data / temperature"),
    "momentum": ("betas", "(momentum, …)"),
    "eps": ("damping", "eps"),
}
_FOREIGN = (
    *("amsgrad", "centered", "dampening", "nesterov", "maximize"),
    *("foreach", "fused", "capturable", "differentiable"),
)
# What a rule cannot do without, in words, and how to pass it.
_NEEDED = {"num_data": "the number of training examples: pass num_data=len(dataset)"}


def constructor(init: Callable[P, None]) -> Callable[P, None]:
    """Let a rule's ``__init__`` say in one sentence which setting is missing, or is not one of its own.

    Example:
        >>> from torch import nn
        >>> from posterity import IVON
        >>> IVON(nn.Linear(3, 2))
        Traceback (most recent call last):
            ...
        TypeError: IVON needs num_data, the number of training examples: pass num_data=len(dataset)
    """
    params = inspect.signature(init).parameters
    settings = {name: each for name, each in params.items() if each.kind is each.KEYWORD_ONLY}
    passes_on = any(each.kind is each.VAR_KEYWORD for each in params.values())  # to another, which judges

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        rule = type(args[0]).__name__
        for name in () if passes_on else kwargs.keys() - params.keys():
            raise TypeError(f"{rule} has no {name}: {_instead(name, settings) or 'see its docstring'}")
        for name, each in settings.items():
            if each.default is each.empty and name not in kwargs:
                raise TypeError(f"{rule} needs {name}, {_NEEDED.get(name, 'which has no default')}")
        init(*args, **kwargs)

    return checked


def refuse_unknown(group: Group, known: Collection[str], rule: str) -> None:
    """Raise for an entry of a user's group that nothing would read: one of torch's, or one of ours misspelt.

    Args:
        group: As it was given.
        known: Names of entries that are read.
        rule: Name of the optimiser.
    """
    for key in group.keys() - known:
        advice = _instead(key, known)
        if advice is not None:
            raise ValueError(f"a group has an entry {key!r}, which {rule} does not use: {advice}")


def _instead(name: str, known: Collection[str]) -> str | None:
    """What to do about a name, if it is one of torch's, or near one of ours."""
    if name in _OURS or name in _FOREIGN:
        ours, value = _OURS.get(name, ("", ""))
        return f"set {ours}, {value}" if ours in known else "leave it out"
    return next((f"did you mean {near!r}?" for near in get_close_matches(name, known, n=1, cutoff=0.8)), None)
