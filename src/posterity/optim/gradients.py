"""Which gradients a step may use: those taken at sampled weights, all of them finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed

from posterity.optim.groups import Group, members
from posterity.optim.statistics import Accumulator
from posterity.optim.watch import UNTOUCHED


class GradientLedger:
    """Tells gradients that a step has used up from gradients that appeared since."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def remember(self, params: Iterable[Tensor]) -> None:
        """Take note of the gradients that are there."""
        self._known = {id(p): (id(grad), grad._version) for p in params if (grad := p.grad) is not None}

    def refuse_foreign(self, groups: list[Group]) -> None:
        """Raise for a gradient that is new: it was taken at the means, and would be lost."""
        for group in groups:
            for name, p in members(group):
                if p.grad is None or self._knows(p):
                    continue
                if bool(p.grad.any()):  # one zeroed in place has lost nothing
                    raise RuntimeError(
                        f"{name!r} has a gradient from outside sampled_params(): take it inside the context, "
                        "or drop it with zero_grad()"
                    )

    def not_finite(self, groups: list[Group]) -> str | None:
        """The first gradient of those that a step has used up that is there yet, and not finite."""
        pairs = (pair for group in groups for pair in members(group))
        return _bad_gradient((name, p) for name, p in pairs if self._knows(p))

    def _knows(self, p: Tensor) -> bool:
        return p.grad is not None and self._known.get(id(p)) == (id(p.grad), p.grad._version)


def refuse_missing(groups: list[Group], sums: Accumulator, optimizer: str) -> None:
    """Raise, before anything moves, if there is no sample, or a gradient from elsewhere."""
    if sums.samples == 0:
        raise RuntimeError(
            f"{optimizer}.step() has no gradient at sampled weights: put "
            "`with optimizer.sampled_params():` around forward and backward, or pass a closure"
        )
    if sum(len(each.used) for each in sums) == sum(len(group["params"]) for group in groups):
        return
    used = sums.used()
    for group in groups:
        for name, p in members(group):
            if id(p) not in used and p.grad is not None:
                raise RuntimeError(
                    f"{name!r} has a gradient from outside sampled_params() only: take it inside the context"
                )


def refuse_not_finite(groups: list[Group], sums: Accumulator) -> None:
    """Raise, before anything moves, if a statistic is not finite; this waits for all of them."""
    flats = [flat for each in sums for flat in (each.mean_grad, each.second)]
    flats += [factor for each in sums.layers.values() for factor in (each.A, each.S)]
    norms = [norm.item() for norm in torch._foreach_norm([flat for flat in flats if flat.numel()], math.inf)]
    if not all(math.isfinite(norm) for norm in norms):
        factors = [(name, factor) for name, each in sums.layers.items() for factor in (each.A, each.S)]
        bad = [
            f"a Kronecker factor of {name!r}" for name, factor in factors if not torch.isfinite(factor).all()
        ]
        pairs = (pair for group in groups for pair in members(group))
        what = _bad_gradient(pairs) or (bad[0] if bad else sums.curvature)
        raise FloatingPointError(f"{what} is not finite; {UNTOUCHED}")


def _bad_gradient(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first of some parameters' gradients that is not finite, in words."""
    for name, p in named:
        if p.grad is not None and not torch.isfinite(p.grad).all():
            return f"the gradient of {name!r}"
    return None


def refuse_process_group() -> None:
    """Raise where several processes train together: each would learn a posterior of its own."""
    if distributed.is_available() and distributed.is_initialized():
        raise RuntimeError(
            "distributed training is not supported yet: train in one process, or destroy the process group"
        )
