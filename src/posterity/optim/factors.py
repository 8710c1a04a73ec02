"""Kronecker factors added up over processes, by their upper triangles in one buffer."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.optim.statistics import Accumulator

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


def sign(sums: Accumulator) -> tuple[float, float]:
    """A number that tells which layers have factors, and its square; sums of both tell if all agree."""
    known = sorted((key, len(each.A), len(each.S)) for key, each in sums.layers.items())
    number = zlib.crc32(repr(known).encode()) % (1 << 20)  # squares are exact, and their sums
    return float(number), float(number * number)


def summed_factors(
    opt: VariationalOptimizer, sums: Accumulator, squared: float, some: bool
) -> dict[str, Kronecker]:
    """Those of all processes.

    Args:
        opt: The optimiser.
        sums: Of this process.
        squared: What its factors of gradients are multiplied by.
        some: Whether processes may know of other layers than this one.
    """
    own = sums.layers
    known = {key: ((e.weight, e.bias, e.rows), len(e.A), len(e.S)) for key, e in own.items()}
    if some:
        for theirs in opt.world.gathered(known):
            known = {**theirs, **known}
    if not known:
        return {}
    like = opt.cache.latest[0].mean.new_zeros(())
    parts: list[Tensor] = []
    for key, (names, rows, columns) in sorted(known.items()):
        each = own.get(key)
        if each is None:
            each = Kronecker(*names, like.new_zeros(rows, rows), like.new_zeros(columns, columns), 0.0)
        parts += [_triangle(each.A), _triangle(each.S * squared), like.new_tensor([each.examples])]
    joined = torch.cat(parts)
    opt.world.add_up(joined)
    found, split = {}, iter(torch.split(joined, [len(part) for part in parts]))
    for key, (names, *sizes) in sorted(known.items()):
        A, S = (_symmetric(next(split), size) for size in sizes)
        found[key] = Kronecker(*names, A, S, float(next(split)))
    return found


def _triangle(whole: Tensor) -> Tensor:
    return whole[torch.triu_indices(*whole.shape).unbind()]


def _symmetric(triangle: Tensor, size: int) -> Tensor:
    whole = triangle.new_zeros(size, size)
    whole[torch.triu_indices(size, size).unbind()] = triangle
    return whole + whole.triu(1).mT
