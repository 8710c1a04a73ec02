"""Choosing parameters by name: "only the last layer" or "not the BatchNorm" is a filter, not a class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar, cast

from torch import Tensor, nn

from posterity.arguments import FILTER, MODULE, described, takes

T = TypeVar("T")
NameFilter: TypeAlias = str | Iterable[str] | Callable[[str], bool]


@takes(chosen=FILTER)
def select(names: Iterable[str], chosen: NameFilter) -> set[str]:
    """The names that a filter picks: a glob pattern, several, or a function of the name.

    Example:
        >>> sorted(select(["fc.weight", "fc.bias", "bn.bias"], "*.bias"))
        ['bn.bias', 'fc.bias']

    Raises:
        ValueError: If a pattern picks nothing, which is nearly always a typing error.
    """
    names = list(names)
    if callable(chosen):
        return {name for name in names if chosen(name)}
    picked: set[str] = set()
    for pattern in [chosen] if isinstance(chosen, str) else chosen:
        # A name is also a pattern for exactly that name, whatever special characters it has.
        matching = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"no parameter is named like {pattern!r}; the names are {_listed(names)}")
        picked |= matching
    return picked


def first_match(patterns: Mapping[str, T], name: str) -> T:
    """The value of the first pattern, in order, that matches a name.

    Example:
        >>> first_match({"*.bias": 1, "*": 2}, "fc.weight")
        2
    """
    for pattern, value in patterns.items():
        if name == pattern or fnmatchcase(name, pattern):
            return value
    raise KeyError(f"no pattern matches {name!r}: add one, or '*' as the last")


def refuse_unmatched(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise for a pattern other than ``"*"`` that matches no name, which is nearly always a typing error.

    Example:
        >>> refuse_unmatched(["fc.*", "*"], ["fc.weight"])
        >>> refuse_unmatched(["fx.*", "*"], ["fc.weight"])
        Traceback (most recent call last):
            ...
        ValueError: no parameter is named like 'fx.*'; the names are 'fc.weight'
    """
    select(names, [pattern for pattern in patterns if pattern != "*"])


@takes(model=MODULE)
def names_of(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Names of the trainable parameters that belong directly to modules of the given kinds.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> names_of(net, nn.BatchNorm1d)
        ['1.weight', '1.bias']
    """
    for kind in kinds:
        if not isinstance(kind, type):
            raise TypeError(
                f"names_of() takes types of modules, such as nn.BatchNorm2d, not {described(kind)}"
            )
    known = {p: name for name, p in model.named_parameters() if p.requires_grad}  # tied ones once
    owned = (
        p for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)
    )
    return [known[p] for p in dict.fromkeys(owned) if p in known]


def padding_rows(model: nn.Module) -> dict[Tensor, int]:
    """The row of every embedding's weight that ``padding_idx=`` keeps from learning.

    If another layer shares the weight, such as a tied output layer, its row does learn and is left out.

    Example:
        >>> words = nn.Embedding(9, 4, padding_idx=0)
        >>> head = nn.Linear(4, 9)
        >>> list(padding_rows(nn.Sequential(words, head)).values())
        [0]
        >>> head.weight = words.weight
        >>> padding_rows(nn.Sequential(words, head))
        {}
    """
    rows: dict[Tensor, set[int | None]] = {}
    for module in model.modules():
        row = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        for p in module.parameters(recurse=False):
            rows.setdefault(p, set()).add(None if row is None else int(row) % len(p))
    return {p: row for p, (row, *more) in rows.items() if row is not None and not more}


def inner(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> inner(nn.DataParallel(net)) is net
        True
    """
    while isinstance(module, _PARALLEL) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, _PARALLEL) else cast(nn.Module, module._orig_mod)
    return module


_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _listed(names: list[str], limit: int = 6) -> str:
    """A short enumeration for error messages."""
    tail = ", …" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + tail
