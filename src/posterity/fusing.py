"""Functions of tensors that a captured step compiles, where all other steps run them as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from posterity.torch_private import transforms

F = TypeVar("F", bound=Callable[..., Any])
_compiler: ContextVar[Callable[[Any], Callable[..., Any]] | None] = ContextVar("compiler", default=None)


def fusible(function: F) -> F:
    """Mark a function of tensors, and of tuples, leaves and settings, as one that may be compiled.

    Example:
        >>> @fusible
        ... def double(x): return 2 * x
        >>> with fusing(lambda function: lambda x: function(x) + 1):
        ...     double(1)
        3
        >>> double(1)
        2
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not is_fusing():  # a part of what is compiled, or none is
            return function(*args)
        compiler = _compiler.get()
        assert compiler is not None
        return compiler(function)(*args)

    return cast(F, run)


@contextmanager
def fusing(compiler: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, functions that are marked run as a compiler returns them."""
    before = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(before)


def is_fusing() -> bool:
    """Whether functions that are marked are compiled here; inside transforms of torch.func they are not."""
    return _compiler.get() is not None and not transforms()
