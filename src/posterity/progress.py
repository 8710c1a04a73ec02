"""Progress bars, for those who want them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def shown(parts: Iterable[T], doing: str) -> Iterable[T]:
    """The same parts, with a bar that says what is being done to them.

    Example:
        >>> list(shown([1, 2], "counting"))
        [1, 2]
    """
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise ImportError("a progress bar needs rich: pip install 'posterity[lab]'") from error
    return track(parts, description=doing, console=Console(stderr=True))
