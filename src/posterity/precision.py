"""The library's own products, in the precision of their factors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """A function that autocast leaves alone: it is meant for a model's layers, not for a posterior.

    Example:
        >>> product = full_precision(torch.mm)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch.mm(torch.eye(2), torch.eye(2)).dtype, product(torch.eye(2), torch.eye(2)).dtype
        (torch.bfloat16, torch.float32)
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as off:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
