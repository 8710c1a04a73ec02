"""Type checks of public functions' arguments, with a clear message for a wrong type.

Functions check the range of a value themselves.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


class Kind(NamedTuple):
    """A type of argument.

    Attributes:
        words: Its name in messages.
        fits: Whether a value has this type.
    """

    words: str
    fits: Callable[[Any], bool]


def instance(words: str, *types: type[Any]) -> Kind:
    """An instance of one of some types.

    Example:
        >>> instance("a text", str).fits("x")
        True
    """
    return Kind(words, lambda value: isinstance(value, types))


def is_number(value: object) -> bool:
    """Whether it is a real number (or NaN or infinity) that a float can hold.

    Example:
        >>> is_number(1.5), is_number(10**400), is_number("1.5")
        (True, False, False)
    """
    if not isinstance(value, Real):
        return False
    return not isinstance(value, Integral) or abs(int(value)) <= sys.float_info.max


def is_whole(value: object) -> bool:
    """Whether it is a whole number of at most 64 bits.

    Example:
        >>> is_whole(3), is_whole(3.0)
        (True, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 1 << 63


def is_dense(value: object) -> bool:
    """Whether it is a dense tensor of real numbers on a device with memory.

    Example:
        >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
        (True, False)
    """
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_complex() or value.is_quantized)
    )


def described(value: object) -> str:
    """A value as users write it, in one short line; for an object, its type.

    Example:
        >>> described(3), described(nn.ReLU()), described(torch.ones(2, device="meta"))
        ('3', 'a ReLU', 'a meta tensor of float32')
    """
    if isinstance(value, Tensor) and is_dense(value) and value.dim() == 0:
        return str(value.item())
    if isinstance(value, Tensor):
        kinds = {torch.sparse_coo: "sparse ", torch.strided: ""}
        layout = "meta " if value.is_meta else kinds.get(value.layout, f"{value.layout} ")
        return f"a {layout}tensor of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value) if value is None or isinstance(value, str | Real | tuple | list) else ""
    return text if text and len(text) < 60 and "\n" not in text else f"a {type(value).__name__}"


def _is_filter(value: object) -> bool:
    if isinstance(value, str) or callable(value):
        return True
    if isinstance(value, list | tuple | set | frozenset | dict):
        return all(isinstance(each, str) for each in value)
    return (
        isinstance(value, Iterable)
        and not isinstance(value, bytes | Tensor)
        and not hasattr(value, "__array__")
    )


def _is_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and is_dense(v) for k, v in value.items())


NUMBER = Kind("a number", is_number)
WHOLE = Kind("a whole number", is_whole)
TENSOR = Kind("a dense tensor of real numbers", is_dense)
TENSORS = Kind("dense tensors of real numbers by name", _is_tensors)
MODULE = instance("a module", nn.Module)
FUNCTION = Kind("a function", callable)
FILTER = Kind("a pattern of names, several, or a function of a name", _is_filter)
TEXT = instance("a text", str)
FLAG = instance("True or False", bool)
PICK = Kind("a key, an index or a function", lambda pick: isinstance(pick, str | Integral) or callable(pick))
PATH = instance("a path", str, os.PathLike)
_NONE = object()


def takes(**kinds: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function refuse arguments of wrong types; None is allowed if it is the default.

    Example:
        >>> @takes(steps=WHOLE)
        ... def run(steps): return 2 * steps
        >>> run("x")
        Traceback (most recent call last):
            ...
        TypeError: run() takes a whole number for steps, not 'x'
    """

    def checking(function: Callable[P, T]) -> Callable[P, T]:
        params = list(inspect.signature(function).parameters.values())
        named = function.__qualname__.removesuffix(".__init__")
        wanted = [
            (
                i if each.kind is not each.KEYWORD_ONLY else sys.maxsize,
                each.name,
                kinds[each.name],
                (_NONE, None) if each.default is None else (_NONE,),
            )
            for i, each in enumerate(params)
            if each.name in kinds
        ]
        assert len(wanted) == len(kinds), "a kind of no argument"

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for place, name, kind, others in wanted:
                value = args[place] if place < len(args) else kwargs.get(name, _NONE)
                if not any(value is other for other in others) and not kind.fits(value):
                    raise TypeError(f"{named}() takes {kind.words} for {name}, not {described(value)}")
            return function(*args, **kwargs)

        return checked

    return checking
