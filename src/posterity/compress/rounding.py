"""Rounding of means to as few bits as their stds allow.

A posterior says how precisely each weight is known; further digits carry no information (Louizos, Ullrich,
Welling: "Bayesian Compression for Deep Learning", NeurIPS 2017). Rounding to multiples of a step Δ moves a
weight by up to Δ/2, uniformly, which costs Δ²/24σ² nats under its posterior. Each tensor has one step:
Δ = c · s with s⁻² the mean of σ⁻² over its weights, so that a weight costs c²/24 nats on average.

Deviation: their bits come from the variance of a whole layer; ours come from the stds, and count the actual
rounded values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from posterity.arguments import NUMBER, instance, takes
from posterity.posterior import DiagonalGaussian, Factorised


@final
@dataclass(frozen=True)
class Quantised:
    """A posterior with rounded means.

    Attributes:
        posterior: Every mean is a multiple of its tensor's step, up to rounding in half precision; stds and
            pruned weights are unchanged.
        steps: Steps by tensor; 0 if there is nothing to round.
        bits: By tensor, the bits of an integer that can hold any of its weights.
    """

    posterior: Factorised
    steps: dict[str, float]
    bits: dict[str, int]

    def whole(self, name: str) -> Tensor | None:
        """A tensor's means in steps, as int8 or int16; None if these types are too small."""
        step = self.steps[name]
        mean = self.posterior.mean()[name].detach().double()
        if not step:  # all its weights are pruned, or it is not rounded
            return None if bool(mean.any()) else mean.to(torch.int8)
        numbers = (mean / step).round()
        furthest = float(numbers.abs().max()) if numbers.numel() else 0.0
        for dtype in (torch.int8, torch.int16):
            if furthest <= torch.iinfo(dtype).max:
                return numbers.to(dtype)
        return None

    @property
    def bytes(self) -> int:
        """Bytes of all weights that are not pruned, at these bits; their positions are not counted."""
        kept = self.posterior.kept()
        return math.ceil(sum(bits * int(kept[name].sum()) for name, bits in self.bits.items()) / 8)


@takes(posterior=instance("a Factorised posterior", Factorised), share=NUMBER)
def quantise(posterior: Factorised, share: float = 1.0) -> Quantised:
    """Round the means of a posterior to multiples of a share of its stds.

    Args:
        posterior: A posterior with stds above 0; its correlations are dropped. Vectors with a std of 0, such
            as biases without noise, are not changed.
        share: The step in stds, c: each weight costs c²/24 nats on average.

    Example:
        >>> q = Factorised({"w": DiagonalGaussian(torch.tensor([0.93, -0.41, 0.12]), 0.1)})
        >>> found = quantise(q)
        >>> found.posterior.mean()["w"], found.bits, found.whole("w")
        (tensor([ 0.9000, -0.4000,  0.1000]), {'w': 4}, tensor([ 9, -4,  1], dtype=torch.int8))
    """
    if not 0.0 < share < math.inf:
        raise ValueError(f"share must be finite and greater than 0, not {share}")
    means, stds, kept = posterior.mean(), posterior.std(), posterior.kept()
    leaves, steps, bits = {}, {}, {}
    for name, mean in means.items():
        at, std = mean.detach(), stds[name].detach()
        alive = std[kept[name]].double()
        if bool((alive <= 0).any()) and at.dim() < 2:
            steps[name], bits[name] = 0.0, 8 * at.element_size()
            leaves[name] = DiagonalGaussian(at, std, keep=kept[name])
            continue
        if bool((alive <= 0).any()):
            raise ValueError(
                f"{name!r} has weights with std 0, for which there is no step: quantise a learned posterior, "
                "not a point mass"
            )
        step = share * float(alive.square().reciprocal().mean().rsqrt()) if len(alive) else 0.0
        in_files = float(at.new_tensor(step))  # in the precision of the weights
        steps[name] = step = in_files or step
        whole = (at.double() / step).round() if step else torch.zeros_like(at, dtype=torch.float64)
        bits[name] = _bits(whole[kept[name]])
        leaves[name] = DiagonalGaussian((whole * step).to(at), std, keep=kept[name])
    return Quantised(Factorised(leaves), steps, bits)


def _bits(whole: Tensor) -> int:
    """The bits for the range of some integers."""
    if not len(whole):
        return 0
    return math.ceil(math.log2(float(whole.max() - whole.min()) + 1.0))
