"""Eigenvalues of the curvature summed over batches, and the posterior and evidence that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from posterity.arguments import described, is_number
from posterity.curvature import Curvature, Kronecker
from posterity.curvature.fisher import Likelihood
from posterity.posterior import DiagonalGaussian, EigenGaussian, Factorised, Leaf

Prior: TypeAlias = float | Literal["marginal", "marginal-by-block"]


@final
@dataclass(frozen=True)
class Spectrum:
    """A block's weights, and the eigenvalues of its curvature.

    Attributes:
        tensors: Names of its parameters.
        mean: Their values, in single precision at least.
        values: Eigenvalues of N F / τ in double precision, in the block's shape.
        basis: Eigenvectors among outputs and among inputs; without them, the basis is that of single weights.
        held: Mask of the weights without prior and std (the padding row of an embedding), if there are any.

    Example:
        >>> block = Spectrum(("w",), (torch.ones(2),), torch.tensor([3.0, 0.0]))
        >>> block.leaf(1.0).std()
        tensor([0.5000, 1.0000])
    """

    tensors: tuple[str, ...]
    mean: tuple[Tensor, ...]
    values: Tensor
    basis: tuple[Tensor, Tensor] | None = None
    held: Tensor | None = None

    @property
    def square(self) -> float:
        """‖θ*‖²."""
        means = self.mean if self.held is None else [self.mean[0][~self.held]]
        return sum(float(each.double().square().sum()) for each in means)

    def leaf(self, precision: float) -> Leaf:
        """q over the block, under a prior of that precision."""
        std = (self.values + precision).rsqrt()
        if self.basis is None:
            return DiagonalGaussian(self.mean[0], std).hold(self.held)
        return EigenGaussian(self.mean, *self.basis, std)

    def log_evidence(self, precision: float) -> float:
        """The block's part of the log evidence: ½ Σ_i [log δ − δ θ*_i² − log(λ_i + δ)]."""
        occam = torch.log1p(self.values / precision).sum()
        return -0.5 * (float(occam) + precision * self.square)


def best_precision(spectra: Sequence[Spectrum]) -> float:
    """The prior precision δ with the largest evidence, one for all given blocks.

    In s = log δ the evidence is concave, its slope ½ (Σ λ / (λ + δ) − δ ‖θ*‖²): Newton's steps, halving the
    bracket where they leave it.
    """
    size = sum(each.values.numel() for each in spectra)
    square, top = sum(each.square for each in spectra), max(float(each.values.max()) for each in spectra)
    if square == 0.0 or top == 0.0:
        where = repr("+".join(spectra[0].tensors)) if len(spectra) == 1 else "all blocks"
        raise ValueError(
            f"the {'weights' if square == 0.0 else 'eigenvalues'} of {where} are zero, so no prior "
            "precision maximises the evidence: give prior_precision as a number"
        )
    # The slope is at least ½ (½ − δ ‖θ*‖²) below the largest λ, and at most ½ (size − δ ‖θ*‖²) anywhere.
    low, high = math.log(min(top, 0.5 / square)), math.log(size / square)
    at = 0.5 * (low + high)
    for _ in range(200):
        precision = math.exp(at)
        shares = [each.values / (each.values + precision) for each in spectra]
        slope = sum(float(each.sum()) for each in shares) - precision * square
        bend = sum(float((each * (1.0 - each)).sum()) for each in shares) + precision * square
        low, high = (at, high) if slope > 0 else (low, at)
        newton = at + slope / bend
        after = newton if low < newton < high else 0.5 * (low + high)
        if abs(after - at) < 1e-12:
            break
        at = after
    return math.exp(at)


@final
@dataclass(frozen=True)
class Laplace:
    """The result of :func:`fit`: the posterior, and how well model and prior explain the data.

    Attributes:
        spectra: Weights and curvature by the block's name.
        prior_precision: That of every block.
        log_likelihood: log p(D | θ*), of all ``num_data`` examples.
        num_data: N.
        temperature: τ.
        noise_variance: Given or estimated, for regression.
        linearise: Whether the posterior is marked as a linearisation.

    Example:
        >>> from posterity.laplace import fit
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> found = fit(torch.nn.Linear(3, 1), (x, y), likelihood="regression", noise_variance=1.0)
        >>> found.with_prior("marginal").log_evidence >= found.log_evidence  # the best there is
        True
        >>> found.posterior().sample(5)["weight"].shape
        torch.Size([5, 1, 3])
    """

    spectra: Mapping[str, Spectrum]
    prior_precision: Mapping[str, float]
    log_likelihood: float
    num_data: int
    temperature: float
    noise_variance: float | None
    linearise: bool = True

    def __repr__(self) -> str:
        weights = sum(each.values.numel() for each in self.spectra.values())
        priors = sorted({*self.prior_precision.values()})
        ends = (
            " … ".join(f"{each:.4g}" for each in dict.fromkeys((priors[0], priors[-1]))) if priors else "none"
        )
        noise = "" if self.noise_variance is None else f", noise_variance={self.noise_variance:.4g}"
        return (
            f"Laplace(blocks={len(self.spectra)}, weights={weights}, prior_precision={ends}, "
            f"num_data={self.num_data}, temperature={self.temperature:.4g}{noise})"
        )

    def posterior(self) -> Factorised:
        """q: means at the trained weights, precision N F / τ + δ."""
        return Factorised(
            {each.tensors: each.leaf(self.prior_precision[name]) for name, each in self.spectra.items()},
            linearised=self.linearise,
        )

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood log p(D), approximately: higher is better, between models of the same data.

        It assumes that the weights maximise the product of likelihood and prior.
        """
        parts = [each.log_evidence(self.prior_precision[name]) for name, each in self.spectra.items()]
        return self.log_likelihood / self.temperature + sum(parts)

    def with_prior(self, prior_precision: Prior) -> Laplace:
        """The same weights and curvature under another prior, without another pass over the data."""
        check_prior(prior_precision)
        if prior_precision == "marginal-by-block":
            chosen = {name: best_precision([each]) for name, each in self.spectra.items()}
        elif prior_precision == "marginal":
            chosen = dict.fromkeys(self.spectra, best_precision([*self.spectra.values()]))
        else:
            chosen = dict.fromkeys(self.spectra, float(prior_precision))
        return replace(self, prior_precision=chosen)


def check_prior(prior_precision: Prior) -> None:
    """Raise unless it is one of the allowed names, or a number above 0."""
    if not isinstance(prior_precision, str) or prior_precision not in get_args(get_args(Prior)[1]):
        if isinstance(prior_precision, str):
            raise ValueError(
                "prior_precision must be a number, 'marginal', 'marginal-by-block', or, for fit(), "
                f"'validation', not {prior_precision!r}"
            )
        positive("prior_precision", prior_precision)


def positive(name: str, value: float) -> None:
    """Raise unless a number is finite and above 0."""
    if not (is_number(value) and 0.0 < value < math.inf):
        raise ValueError(f"{name} must be finite and greater than 0, not {described(value)}")


@final
class Sums:
    """Sums over batches, in double precision."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.examples = 0
        self.outputs = 0
        self.goodness: Tensor | float = 0.0  # Σ log p(y); for regression the sum of squared errors
        self.blocks: dict[str, Kronecker] = {}
        self.diagonal: dict[str, Tensor] = {}

    def add(self, out: Tensor, y: Tensor, found: Curvature) -> None:
        """Add a batch's outputs and targets, and its mean curvature."""
        count, self.outputs = out.shape
        self.examples += count
        if self.likelihood == "classification":
            self.goodness = self.goodness + log_probs(out, y, None).sum()
        else:
            self.goodness = self.goodness + (out.double() - y).square().sum()
        for key, block in found.kronecker.items():
            if block.rows is not None:
                raise ValueError(
                    f"{block.weight!r} is used in parts, not as one block: leave it out by names=, "
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
        padding: Mapping[Tensor, int],
    ) -> Laplace:
        """Means over examples, times N / τ, and the log-likelihood of N examples; the prior is not set
        yet."""
        count = num_data or self.examples
        share, goodness = count / self.examples, float(self.goodness)
        scale = count / temperature
        if self.likelihood == "regression":
            if noise_variance is None:
                noise_variance = goodness / (self.examples * self.outputs)
                if not 0.0 < noise_variance < math.inf:
                    raise ValueError(
                        f"the mean squared error is {noise_variance}, which cannot be a noise variance: give "
                        "noise_variance="
                    )
            # Gradients of ½ (f − y)² / σ² are those of ½ (f − y)², of which the Fisher matrix is, over σ².
            scale /= noise_variance**2 if empirical else noise_variance
            volume = self.examples * self.outputs * math.log(2.0 * math.pi * noise_variance)
            goodness = -0.5 * (goodness / noise_variance + volume)
        named = {"+".join(each.tensors): each for each in self._spectra(params, scale, padding)}
        return Laplace(named, {}, share * goodness, count, temperature, noise_variance)

    def _spectra(
        self, params: Mapping[str, Tensor], scale: float, padding: Mapping[Tensor, int]
    ) -> Iterator[Spectrum]:
        """Spectra in the order of the parameters; those that no batch used have zero curvature."""
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
                held = None
                if p in padding:
                    held = torch.zeros_like(p, dtype=torch.bool)
                    held[padding[p]] = True
                yield Spectrum((name,), (_wide(p),), squares * (scale / self.examples), held=held)


def _refuse_nan(name: str, *tensors: Tensor) -> None:
    if not all(bool(torch.isfinite(each).all()) for each in tensors):
        raise ValueError(f"{name!r} or its curvature is not finite: look for nan in the weights and the data")


def _wide(p: Tensor) -> Tensor:
    """A copy in single precision at least: samples around a mean in half precision would mostly equal it."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)


def log_probs(out: Tensor, y: Tensor, noise_variance: float | None) -> Tensor:
    """log p(y | out), ``[..., B]``, of outputs ``[..., B, C]``; for classes if there is no noise."""
    if noise_variance is None:
        return out.double().log_softmax(-1)[..., torch.arange(len(y), device=y.device), y.long()]
    terms = (out.double() - y).square() / noise_variance + math.log(2.0 * math.pi * noise_variance)
    return -0.5 * terms.sum(-1)
