"""What a step does with a rule, compiled once for all optimisers of its kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch

from posterity.torch_private import dynamo_config

# By default the compiler starts a process for every core, each of which imports torch.
_ONE_KERNEL: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}
# Settings of a rule in one process that are compiled; those that come later run as they are written.
_SETTINGS = 64


@cache
def fused(function: Any, kind: Any) -> Callable[..., Any]:
    """A function of a rule and tensors as one kernel, for rules of one kind.

    A compilation serves all sizes and optimisers; each setting has its own. Given an optimiser it would be
    compiled anew for every other one. A rule is made of pure functions, so one that was never begun serves
    all of its kind.
    """
    # A copy, since the compiler counts what it has compiled by a function's code, which kinds share.
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    method: Callable[..., Any] = MethodType(own, object.__new__(kind))
    compiled = torch.compile(method, dynamic=True, options=_ONE_KERNEL)

    def run(*args: Any) -> Any:
        # Else hyper-parameters would be dynamic too, and of some the compiler keeps the first value it sees.
        with dynamo_config(specialize_float=True, recompile_limit=_SETTINGS):
            return compiled(*args)

    return run
