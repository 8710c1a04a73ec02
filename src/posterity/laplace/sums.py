"""Curvature and likelihood, added up over batches, and the eigenvalues of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from posterity.curvature import Curvature, Kronecker
from posterity.curvature.fisher import Likelihood
from posterity.laplace.evidence import Laplace, Spectrum


@final
class Sums:
    """What is added up over batches, in double precision."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.examples = 0
        self.outputs = 0
        self.goodness: Tensor | float = 0.0  # Σ log p(y), or of regression the sum of squared errors
        self.blocks: dict[str, Kronecker] = {}
        self.diagonal: dict[str, Tensor] = {}

    def add(self, out: Tensor, y: Tensor, found: Curvature) -> None:
        """A batch's outputs and targets, and its mean curvature."""
        count, self.outputs = out.shape
        self.examples += count
        if self.likelihood == "classification":
            self.goodness = self.goodness + log_probs(out, y, None).sum()
        else:
            self.goodness = self.goodness + (out.double() - y).square().sum()
        for key, block in found.kronecker.items():
            if block.rows is not None:
                raise ValueError(
                    f"{block.weight!r} is used in parts, which are no whole block: leave it out by names=, "
                    "or pass structure='diagonal'"
                )
            a, s, seen = block.examples * block.A.double(), count * block.S.double(), block.examples
            if before := self.blocks.get(key):
                a, s, seen = a + before.A, s + before.S, seen + before.examples
            self.blocks[key] = replace(block, A=a, S=s, examples=seen)
        for name, squares in found.diagonal.items():
            self.diagonal[name] = self.diagonal.get(name, 0.0) + count * squares.double()

    def result(
        self,
        params: Mapping[str, Tensor],
        empirical: bool,
        noise_variance: float | None,
        temperature: float,
        num_data: int | None,
    ) -> Laplace:
        """Means over examples, times N / τ, and the log-likelihood of N examples; the prior is still open."""
        count = num_data or self.examples
        share, goodness = count / self.examples, float(self.goodness)
        scale = count / temperature
        if self.likelihood == "regression":
            if noise_variance is None:
                noise_variance = goodness / (self.examples * self.outputs)
                if not 0.0 < noise_variance < math.inf:
                    raise ValueError(
                        f"the mean squared error is {noise_variance}, which is no variance of noise: give "
                        "noise_variance="
                    )
            # Gradients of ½ (f − y)² / σ² are those of ½ (f − y)², of which the Fisher matrix is, over σ².
            scale /= noise_variance**2 if empirical else noise_variance
            volume = self.examples * self.outputs * math.log(2.0 * math.pi * noise_variance)
            goodness = -0.5 * (goodness / noise_variance + volume)
        named = {"+".join(each.tensors): each for each in self._spectra(params, scale)}
        return Laplace(named, {}, share * goodness, count, temperature, noise_variance)

    def _spectra(self, params: Mapping[str, Tensor], scale: float) -> Iterator[Spectrum]:
        """In the order of the parameters; those that no batch used have no curvature."""
        blocks = {block.weight: block for block in self.blocks.values()}
        biases = {block.bias for block in blocks.values()}
        for name, p in params.items():
            if name in blocks:
                block = blocks[name]
                names = (name,) if block.bias is None else (name, block.bias)
                _refuse_nan(name, p, block.A, block.S)
                if some := self.diagonal.keys() & {*names}:
                    raise ValueError(
                        f"{min(some)!r} has Kronecker factors in some batches only: leave it out by names=, "
                        "or pass structure='diagonal'"
                    )
                s, rows = torch.linalg.eigh(block.S / self.examples)
                a, columns = torch.linalg.eigh(block.A / block.examples)
                # Rounding can put the smallest below zero.
                values = scale * torch.outer(s.clamp_min(0.0), a.clamp_min(0.0))
                yield Spectrum(names, tuple(_wide(params[each]) for each in names), values, (rows, columns))
            elif name not in biases:
                squares = self.diagonal.get(name, torch.zeros_like(p, dtype=torch.float64))
                _refuse_nan(name, p, squares)
                yield Spectrum((name,), (_wide(p),), squares * (scale / self.examples))


def _refuse_nan(name: str, *tensors: Tensor) -> None:
    if not all(bool(torch.isfinite(each).all()) for each in tensors):
        raise ValueError(f"{name!r} or its curvature is not finite: look for nan in the weights and the data")


def _wide(p: Tensor) -> Tensor:
    """A copy in single precision at least: samples around a mean in half precision would mostly equal it."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)


def log_probs(out: Tensor, y: Tensor, noise_variance: float | None) -> Tensor:
    """log p(y | out), ``[..., B]``, of outputs ``[..., B, C]``; of classes if there is no noise."""
    if noise_variance is None:
        return out.double().log_softmax(-1)[..., torch.arange(len(y), device=y.device), y.long()]
    terms = (out.double() - y).square() / noise_variance + math.log(2.0 * math.pi * noise_variance)
    return -0.5 * terms.sum(-1)
