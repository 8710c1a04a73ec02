"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def hint(
    word: str, known: Iterable[str], lead: str = "choose from", key: Callable[[str], str] = str.lower
) -> str:
    """The end of a sentence about an unknown name: the nearest known one or, if none is near, all of them.

    Args:
        word: The unknown name.
        known: The names that there are.
        lead: What to say before all of them.
        key: The part of a name that is compared.

    Example:
        >>> "there is no method 'bdg'" + hint("bdg", ["bgd", "ivon"])
        "there is no method 'bdg', did you mean 'bgd'?"
        >>> hint("laplace", ["bgd", "ivon"])
        ': choose from bgd, ivon'
    """
    names = {key(name): name for name in known}
    near = difflib.get_close_matches(key(word), names, n=1)
    return f", did you mean {names[near[0]]!r}?" if near else f": {lead} {', '.join(names.values())}"
