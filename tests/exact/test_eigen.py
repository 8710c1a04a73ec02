"""The eigenbasis Gaussian against its definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from posterity import EigenGaussian, Factorised, IsotropicGaussian, MatrixGaussian, kl

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def basis(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.eigh(random(size, size, seed=seed) + random(size, size, seed=seed).T).eigenvectors


def leaf(seed: int = 0, keep: Tensor | None = None) -> EigenGaussian:
    """A convolution of two channels with three filters of 1x2, and its bias: a block [3, 5]."""
    mean = (random(3, 2, 1, 2, seed=seed), random(3, seed=seed + 1))
    scale = 0.1 + random(3, 5, seed=seed + 2).abs()
    return EigenGaussian(mean, basis(3, seed + 3), basis(5, seed + 4), scale, keep=keep)


def stacked(q: EigenGaussian) -> MultivariateNormal:
    """vec(W̃), columns stacked, whose precision is (Q_A ⊗ Q_S) diag(1 / scale²) (Q_A ⊗ Q_S)ᵀ."""
    vectors = torch.kron(q.columns, q.rows)
    precision = vectors @ q.scale.T.flatten().square().reciprocal().diag() @ vectors.T
    return MultivariateNormal(q.mean().T.flatten(), precision_matrix=precision)


def test_it_is_that_of_the_stacked_columns() -> None:
    q = leaf()
    value, noise = random(7, 3, 5, seed=9), random(2, 3, 5, seed=3)
    torch.testing.assert_close(q.log_prob(value), stacked(q).log_prob(value.mT.flatten(1)))
    torch.testing.assert_close(q.std().T.flatten(), stacked(q).stddev)
    torch.testing.assert_close(kl(q, leaf(1)), kl_divergence(stacked(q), stacked(leaf(1))))
    torch.testing.assert_close(q.whitened(q.draw(noise) - q.mean()), noise.flatten(1))
    prior = MultivariateNormal(torch.full((15,), 0.2, dtype=F64), 0.49 * torch.eye(15, dtype=F64))
    torch.testing.assert_close(kl(q, IsotropicGaussian(0.7, 0.2)), kl_divergence(stacked(q), prior))


def test_a_matrix_gaussian_is_the_case_of_a_product() -> None:
    u, v = random(3, seed=1).abs() + 0.1, random(5, seed=2).abs() + 0.1
    rows, columns = basis(3), basis(5)
    mean = random(3, 5)
    q = EigenGaussian(mean, rows, columns, torch.outer(u, v))
    p = MatrixGaussian(
        mean, *(torch.linalg.cholesky(b * s.square() @ b.T) for b, s in ((rows, u), (columns, v)))
    )
    value = random(4, 3, 5, seed=4)
    torch.testing.assert_close(q.log_prob(value), p.log_prob(value))
    torch.testing.assert_close(q.std(), p.std())
    torch.testing.assert_close(q.correlation(), p.correlation())
    assert kl(q, p).item() == pytest.approx(0.0, abs=1e-9)  # estimated, at draws on which both agree


def test_pruning_takes_the_marginal() -> None:
    keep = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    q, whole, chosen = leaf(keep=keep), stacked(leaf()), keep.T.flatten()
    part = MultivariateNormal(whole.mean[chosen], whole.covariance_matrix[chosen][:, chosen])
    value = random(4, 3, 5, seed=2)
    torch.testing.assert_close(q.log_prob(value), part.log_prob(value.mT.flatten(1)[:, chosen]))
    unit = MultivariateNormal(torch.zeros_like(part.mean), torch.eye(len(part.mean), dtype=F64))
    torch.testing.assert_close(kl(q, IsotropicGaussian(1.0)), kl_divergence(part, unit))
    torch.testing.assert_close(kl(q, leaf()), torch.zeros((), dtype=F64), atol=1e-12, rtol=0)
    nothing = leaf(keep=torch.zeros(3, 5, dtype=torch.bool))
    assert kl(nothing, IsotropicGaussian(1.0)) == kl(nothing, leaf()) == nothing.log_prob(value)[0] == 0.0
    many = EigenGaussian(torch.ones(65, 64), torch.eye(65), torch.eye(64), torch.ones(65, 64))
    thinner = torch.ones(65, 64, dtype=torch.bool)
    thinner[0, 0] = False
    with pytest.raises(ValueError, match=r"covariance of its 4159 kept weights, more than 4096: use that of"):
        kl(many.pruned(thinner), IsotropicGaussian(1.0))


def test_a_leaf_shares_nothing_with_what_it_was_given() -> None:
    given = random(3, 4), basis(3), basis(4), random(3, 4).abs()
    q = EigenGaussian(*given)
    before = {key: value.clone() for key, value in q.state_dict().items()}
    for each in given:
        each.mul_(2.0)
    assert all(torch.equal(value, before[key]) for key, value in q.state_dict().items())
    copy = Factorised({"w": q}).frozen().block("w")
    assert all(torch.equal(value, before[key]) for key, value in copy.state_dict().items())


def test_bad_blocks_are_refused() -> None:
    mean, rows, columns, scale = random(3, 4), basis(3), basis(4), torch.ones(3, 4, dtype=F64)
    with pytest.raises(ValueError, match=r"same first dimension, not the shapes \[\(3, 4\), \(2,\)\]"):
        EigenGaussian((mean, torch.zeros(2)), rows, columns, scale)
    with pytest.raises(ValueError, match=r"rows must have shape \(3, 3\), not \(4, 4\)"):
        EigenGaussian(mean, columns, columns, scale)
    with pytest.raises(ValueError, match=r"scale must have shape \(3, 4\), not \(4, 3\)"):
        EigenGaussian(mean, rows, columns, scale.T)
    for wrong in (2.0 * columns, columns.tril(), columns * torch.nan):
        with pytest.raises(ValueError, match="columns must hold orthonormal vectors as columns"):
            EigenGaussian(mean, rows, wrong, scale)
    for value in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="scale must be finite and greater than 0"):
            EigenGaussian(mean, rows, columns, scale * value)
