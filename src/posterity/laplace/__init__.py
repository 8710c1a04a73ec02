"""Laplace approximation: a Gaussian around trained weights, as wide as the curvature of the loss allows.

MacKay: "A Practical Bayesian Framework for Backpropagation Networks", 1992 (the evidence); Ritter, Botev,
Barber: "A Scalable Laplace Approximation for Neural Networks", ICLR 2018 (Kronecker factors); Immer, Korzepa,
Bauer: "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021.

At weights θ* that a loss and a prior N(0, 1/δ) were trained to, with F the mean Fisher matrix of N examples,

    q(θ) = N(θ*, P⁻¹),    P = N F / τ + δ I
    log evidence = log p(D | θ*) / τ + ½ Σ_i [log δ − δ θ*_i² − log(λ_i + δ)],    λ_i eigenvalues of N F / τ

F is taken block by block. A diagonal has its eigenvalues on it. Those of a layer's A ⊗ S are the products of
the factors' own, so that the prior is added without error, where Ritter et al. add its root to each factor.

| papers | here |
|---|---|
| N, δ, T or τ | ``num_data``, ``prior_precision``, ``temperature`` |
| σ² of a Gaussian likelihood | ``noise_variance``: it divides F, an empirical one twice |
| γ, the number of well-determined parameters | Σ λ_i / (λ_i + δ); δ ‖θ*‖² = γ where the evidence is largest |
| f(x, θ*) + J(x) (θ − θ*), and its mean and variance | ``predict``, :func:`moments` |
"""

from posterity.laplace.closed import Moments, moments
from posterity.laplace.evidence import Laplace, Spectrum
from posterity.laplace.fitting import fit

__all__ = ["Laplace", "Moments", "Spectrum", "fit", "moments"]
