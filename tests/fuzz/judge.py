"""What became of one call: right, refused, or one of three faults.

- *right*: it returned, its result has no NaN that its arguments had not, and the posterior is finite, with
  stds above 0;
- *refused*: it raised an error of ours, and everything is bit for bit as it was;
- *silent* (a fault): it returned, and the above does not hold;
- *destroyed* (a fault): it raised, and a weight, a buffer, a state or a setting has changed;
- *obscure* (a fault): it raised an error that is not ours.

An error is ours if a ``raise`` statement of the library made it, which the last frame of its traceback tells
(the instruction there raises; operations of torch and of Python fail at others), and if its message is one
line. So are errors of the operating system that name a file. A model or a loss function that refuses an input
by itself may say so in its own words: then the library need only pass them on, and change nothing.
"""

from __future__ import annotations

import dis
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import posterity

LIBRARY = str(Path(posterity.__file__).parent) + os.sep
FAULTS = ("silent", "destroyed", "obscure")
VERDICTS = ("right", "refused", *FAULTS)


@dataclass
class Trial:
    """One call.

    Attributes:
        call: Makes it.
        says: How it looks.
        watched: Models, optimisers, posteriors and tensors that it may change if it returns, and only then.
        plain: What the user's own model does with the same input, which may raise.
        clean: Whether all arguments are finite.
    """

    call: Callable[[], Any]
    says: str
    watched: Sequence[Any] = ()
    plain: Callable[[], Any] | None = None
    clean: bool = True
    results: list[Any] = field(default_factory=list)


def judged(trial: Trial) -> tuple[str, str]:
    """The verdict on a call, and why."""
    before = [list(state_of(each)) for each in trial.watched]
    try:
        result = trial.call()
    except Exception as error:
        if changed := _changed(before, trial.watched):
            return "destroyed", f"{changed} after {type(error).__name__}: {error}"
        if ours(error) or _raises(trial.plain):
            return "refused", f"{type(error).__name__}: {error}"
        return "obscure", f"{type(error).__name__}: {error} [{_last(error.__traceback__)}]"
    if trial.clean and _has_nan(result):
        return "silent", "the result has NaN"
    for each in trial.watched:
        try:
            q = each.posterior() if isinstance(each, posterity.VariationalOptimizer) else each
        except Exception as error:
            return "silent", f"afterwards posterior() raises {type(error).__name__}: {error}"
        if isinstance(q, posterity.Factorised) and (reason := _unfit(q)):
            return "silent", reason
    return "right", ""


def ours(error: BaseException) -> bool:
    """Whether the library made an error, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    message, at = str(error.args[0]) if error.args else "", error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or not at.tb_frame.f_code.co_filename.startswith(LIBRARY):
        return False
    raising = any(
        each.offset == at.tb_lasti and each.opname in ("RAISE_VARARGS", "RERAISE")
        for each in dis.get_instructions(at.tb_frame.f_code)
    )
    return raising and len(message) > 10 and "\n" not in message


def state_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """All that a call might change of something, copied."""
    if isinstance(thing, Tensor):
        yield "a tensor", thing.detach().clone()
    elif isinstance(thing, nn.Module):
        for name, value in thing.state_dict().items():
            yield name, value.detach().clone() if isinstance(value, Tensor) else repr(value)
        for name, module in thing.named_modules():
            yield f"training of {name!r}", module.training
        for name, p in thing.named_parameters():
            yield f"requires_grad of {name!r}", p.requires_grad
    elif isinstance(thing, torch.optim.Optimizer):
        for i, group in enumerate(thing.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key} of group {i}", repr(value)
            for p, name in zip(group["params"], group["param_names"], strict=True):
                yield f"value of {name}", p.detach().clone()
                for key, value in thing.state[p].items():
                    yield f"{key} of {name}", value.detach().clone()


def _changed(before: Sequence[list[tuple[str, Any]]], watched: Sequence[Any]) -> str | None:
    for old, each in zip(before, watched, strict=True):
        new = dict(state_of(each))
        if new.keys() != dict(old).keys():
            return "other entries"
        for name, value in old:
            if not _same(value, new[name]):
                return f"{name} has changed"
    return None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and (a.is_meta or bool(((a == b) | ((a != a) & (b != b))).all()))
    )


def _raises(plain: Callable[[], Any] | None) -> bool:
    if plain is None:
        return False
    try:
        with torch.no_grad():
            plain()
    except Exception:
        return True
    return False


def _has_nan(result: Any) -> bool:
    if isinstance(result, Tensor):
        return not result.is_meta and bool(torch.isnan(result).any())
    if isinstance(result, float):
        return math.isnan(result)
    if isinstance(result, Mapping):
        return any(map(_has_nan, result.values()))
    if isinstance(result, list | tuple):
        return any(map(_has_nan, result))
    return False


def _unfit(q: posterity.Factorised) -> str | None:
    for name, leaf in q.blocks.items():
        std = leaf.std()[leaf.varying]
        if not bool(torch.isfinite(leaf.mean()).all()):
            return f"the means of {name!r} are not finite"
        if not bool(((std > 0) & torch.isfinite(std)).all()):
            return f"a std of {name!r} is not a positive number"
    return None


def _last(at: TracebackType | None) -> str:
    found = ""
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if name.startswith(LIBRARY):
            found = f"{name.removeprefix(LIBRARY)}:{at.tb_lineno}"
        at = at.tb_next
    return found
