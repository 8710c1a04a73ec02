"""The matrix Gaussian against its definition, and blocks of several tensors, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import posterity
from posterity import (
    ByName,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    MatrixGaussian,
    ScaleMixture,
    kl,
    prune,
    snr,
)
from posterity.compress import sparsity
from posterity.posterior.algebra import damped, inverse_cholesky, inverse_triangle

F64 = torch.float64
BLOCK = ("conv.weight", "conv.bias")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def spd(size: int, seed: int = 0) -> Tensor:
    root = random(size, size + 3, seed=seed)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=F64)


def leaf(seed: int = 0, keep: Tensor | None = None) -> MatrixGaussian:
    """A convolution of two channels with three filters of 1x2, and its bias: a block [3, 5]."""
    rows, columns = (torch.linalg.cholesky(spd(size, seed + size)) for size in (3, 5))
    mean = (random(3, 2, 1, 2, seed=seed), random(3, seed=seed + 1))
    return MatrixGaussian(mean, rows, columns, keep=keep)


def posterior(seed: int = 0) -> Factorised:
    return Factorised({BLOCK: leaf(seed), "scale": DiagonalGaussian(random(4, seed=seed), 0.3 + 0.1 * seed)})


def stacked(q: MatrixGaussian) -> MultivariateNormal:
    """vec(W̃), columns stacked, with covariance V ⊗ U."""
    u, v = q.rows @ q.rows.T, q.columns @ q.columns.T
    return MultivariateNormal(q.mean().T.flatten(), torch.kron(v, u))


def test_the_density_is_that_of_the_stacked_columns() -> None:
    q = leaf()
    value = random(7, 3, 5, seed=9)
    torch.testing.assert_close(q.log_prob(value), stacked(q).log_prob(value.mT.flatten(1)))
    torch.testing.assert_close(q.std().T.flatten(), stacked(q).stddev)
    torch.testing.assert_close(kl(q, leaf(1)), kl_divergence(stacked(q), stacked(leaf(1))))
    noise = random(2, 3, 5, seed=3)
    torch.testing.assert_close(q.draw(noise)[1], q.mean() + q.rows @ noise[1] @ q.columns.T)
    torch.testing.assert_close(q.whitened(q.draw(noise) - q.mean()), noise.flatten(1))


def test_draws_have_the_covariance_of_the_stacked_columns() -> None:
    q, n = leaf(), 50_000
    draws = Factorised({BLOCK: q}).sample(n, seed=0)
    value = q.join([draws[name] for name in BLOCK]).mT.flatten(1)
    expected = stacked(q).covariance_matrix
    variance = expected.diagonal()
    # Var of a sample covariance: (s_ii s_jj + s_ij²) / n.
    error = ((variance[:, None] * variance + expected.square()) / n).sqrt()
    assert ((value.T.cov() - expected).abs() < 5 * error).all()


def test_precision_factors_give_the_inverse_of_their_product() -> None:
    s, a = spd(3), spd(5, seed=1)
    q = MatrixGaussian.from_precision(leaf().split(leaf().mean()), s, a, scale=40.0)
    precision = 40.0 * torch.kron(a, s)
    torch.testing.assert_close(stacked(q).covariance_matrix @ precision, torch.eye(15, dtype=F64))
    undamped = damped(s, a, 0.0)
    assert torch.equal(undamped[0], s)
    assert torch.equal(undamped[1], a)
    pi = (a.trace() / 5).sqrt() / (s.trace() / 3).sqrt()
    by_hand = [s + 0.3 / pi * torch.eye(3, dtype=F64), a + 0.3 * pi * torch.eye(5, dtype=F64)]
    for got, expected in zip(damped(s, a, 0.09), by_hand, strict=True):
        torch.testing.assert_close(got, expected)
    q = MatrixGaussian.from_precision(random(3, 5), s, a, damping=0.09, scale=2.0)
    expected = torch.linalg.inv(2.0 * torch.kron(by_hand[1], by_hand[0]))
    torch.testing.assert_close(stacked(q).covariance_matrix, expected)
    nothing = torch.zeros(3, 3, dtype=F64), torch.zeros(5, 5, dtype=F64)
    assert MatrixGaussian.from_precision(random(3, 5), *nothing, damping=4.0).std()[
        0, 0
    ].item() == pytest.approx(0.5)


def test_linear_regression_is_exact() -> None:
    x, precision, prior = random(30, 4), 2.0, 0.7
    a = torch.cat([x, torch.ones(30, 1, dtype=F64)], 1)
    inputs = a.T @ a + prior / precision * torch.eye(5, dtype=F64)
    q = MatrixGaussian.from_precision(random(2, 5), precision * torch.eye(2, dtype=F64), inputs)
    exact = torch.linalg.inv(torch.block_diag(*[precision * a.T @ a + prior * torch.eye(5, dtype=F64)] * 2))
    torch.testing.assert_close(torch.kron(q.rows @ q.rows.T, q.columns @ q.columns.T), exact)


def test_what_goes_in_and_out_is_by_tensor() -> None:
    q = posterior()
    assert list(q.blocks) == ["conv.weight+conv.bias", "scale"]
    assert q.tensors == {"conv.weight+conv.bias": BLOCK, "scale": ("scale",)}
    assert q.block(BLOCK) is q.block("conv.weight+conv.bias") is q.blocks["conv.weight+conv.bias"]
    for values in (q.mean(), q.std(), q.kept(), q.sample(6, seed=0)):
        assert list(values) == [*BLOCK, "scale"]
    assert q.sample(6)["conv.weight"].shape == (6, 3, 2, 1, 2)
    assert torch.equal(q.mean()["conv.weight"], random(3, 2, 1, 2))
    assert torch.equal(q.mean()["conv.bias"], q.block(BLOCK).mean()[:, -1])
    draws = q.sample(6, seed=1)
    again = q.split(q.join(draws))
    assert all(torch.equal(again[name], draws[name]) for name in draws)
    expected = q.block(BLOCK).log_prob(q.join(draws)["conv.weight+conv.bias"])
    torch.testing.assert_close(q.log_prob(draws), expected + q.block("scale").log_prob(draws["scale"]))
    with pytest.raises(KeyError, match=r"'conv.weight' is only part of a block: ask for 'conv.weight\+conv"):
        q.block("conv.weight")


def test_a_model_predicts_with_it() -> None:
    net = nn.Module()
    net.conv, net.scale = nn.Conv2d(2, 3, (1, 2)), nn.Parameter(torch.ones(4))
    assert posterior().check(net) is not None
    net.conv = nn.Conv2d(2, 3, (2, 2))
    with pytest.raises(ValueError, match=r"'conv.weight' has shape \(3, 2, 1, 2\) in the posterior and"):
        posterior().check(net)
    conv = nn.Conv2d(2, 3, (1, 2)).double()
    q = Factorised({("weight", "bias"): leaf()})
    p = posterity.predict(conv, q, random(6, 2, 4, 4), samples=5, seed=2)
    draws = q.sample(5, seed=2)
    alone = nn.functional.conv2d(random(6, 2, 4, 4), draws["weight"][3], draws["bias"][3])
    torch.testing.assert_close(p.samples[3], alone)


def test_priors_may_be_by_tensor() -> None:
    q = posterior()
    by_name = ByName({"*.bias": IsotropicGaussian(2.0, mean=0.1), "*": IsotropicGaussian(0.5)})
    means = {name: torch.full_like(mean, 0.1 * (name == "conv.bias")) for name, mean in q.mean().items()}
    stds = {"conv.weight": 0.5, "conv.bias": 2.0, "scale": 0.5}
    by_tensor = Factorised({name: DiagonalGaussian(means[name], stds[name]) for name in stds})
    prior = leaf().join([means[name] for name in BLOCK])
    wide = torch.tensor([0.5, 0.5, 0.5, 0.5, 2.0], dtype=F64).expand(3, 5)
    expected = kl_divergence(
        stacked(q.block(BLOCK)), MultivariateNormal(prior.T.flatten(), wide.T.flatten().square().diag())
    ) + kl(q.block("scale"), IsotropicGaussian(0.5))
    torch.testing.assert_close(kl(q, by_name), expected)
    torch.testing.assert_close(kl(q, by_tensor), expected)
    smaller = prune(by_tensor, 0.5, score=lambda _: snr(q))
    with pytest.raises(ValueError, match="prune q at the same places"):
        kl(q, smaller)
    alike = prune(q, 0.5)
    torch.testing.assert_close(kl(alike, smaller), kl(alike, by_name))


def test_a_convolution_without_a_bias_is_a_block_of_one_tensor() -> None:
    mean = random(3, 2, 1, 2)
    q = Factorised({"weight": MatrixGaussian(mean, leaf().rows, leaf().columns[:4, :4])})
    assert q.sample(2)["weight"].shape == (2, 3, 2, 1, 2)
    assert torch.equal(q.mean()["weight"], mean)
    spread = random(3, 2, 1, 2, seed=4).abs() + 0.1
    p = Factorised({"weight": DiagonalGaussian(torch.zeros_like(mean), spread)})
    diagonal = MultivariateNormal(
        torch.zeros(12, dtype=F64), spread.reshape(3, 4).T.flatten().square().diag()
    )
    torch.testing.assert_close(kl(q, p), kl_divergence(stacked(q.block("weight")), diagonal))
    torch.testing.assert_close(kl(q, q.frozen()), torch.zeros((), dtype=F64), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 2, 1, 2\) in q and \(3, 4\) in the p"):
        kl(q, Factorised({"weight": DiagonalGaussian(mean.reshape(3, 4), 1.0)}))


def test_diagnostics_are_by_tensor() -> None:
    health = posterity.diagnostics.check(posterior(1), posterior())
    assert list(health) == ["conv.weight", "conv.bias", "scale"]
    assert health["conv.bias"].std_moved


def test_other_priors_are_estimated() -> None:
    q, n = Factorised({BLOCK: leaf()}), 20_000
    mixture, wide = ScaleMixture(0.5, 1.0, 0.1), IsotropicGaussian(2.0)
    draws = q.sample(n, seed=0)
    for prior, bias in ((ByName({"*.bias": wide, "*": mixture}), wide), (mixture, mixture)):
        densities = {"conv.weight": mixture, "conv.bias": bias}
        log_p = sum(densities[name].log_density(draws[name]).flatten(1).sum(1) for name in BLOCK)
        terms = q.log_prob(draws) - log_p
        torch.testing.assert_close(kl(q, prior, weights=draws), terms.mean())
        assert abs(kl(q, prior, samples=n) - terms.mean()) < 5 * terms.std() * (2 / n) ** 0.5


def test_a_diagonal_one_beside_it_is_estimated() -> None:
    p, n = leaf(), 20_000
    q = DiagonalGaussian(random(3, 5, seed=8), 0.4)
    exact = kl_divergence(
        MultivariateNormal(q.mean().T.flatten(), 0.16 * torch.eye(15, dtype=F64)), stacked(p)
    )
    draws = q.draw(random(n, 3, 5, seed=4))
    spread = (q.log_prob(draws) - p.log_prob(draws)).std()
    assert abs(kl(q, p, samples=n) - exact) < 5 * spread / n**0.5


def test_blocks_that_do_not_meet_are_refused() -> None:
    q = posterior()
    apart = Factorised({name: DiagonalGaussian(mean, 1.0) for name, mean in q.mean().items()})
    weight = MatrixGaussian(q.mean()["conv.weight"], leaf().rows, torch.eye(4, dtype=F64))
    mixed = Factorised({"conv.weight": weight, "conv.bias": apart.block("conv.bias")})
    with pytest.raises(TypeError, match="MatrixGaussian and DiagonalGaussian of the tensors of one block"):
        kl(Factorised({BLOCK: leaf()}), mixed)
    with pytest.raises(ValueError, match=r"'conv.weight\+conv.bias' that this optimiser does not have"):
        posterity.BGD(nn.Conv2d(2, 3, (1, 2))).load_posterior(q)


def test_pruning_takes_the_marginal() -> None:
    keep = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    q = leaf(keep=keep)
    assert leaf().pruned(keep).mean().equal(q.mean())
    whole = stacked(leaf())
    chosen = keep.T.flatten()
    part = MultivariateNormal(whole.mean[chosen], whole.covariance_matrix[chosen][:, chosen])
    value = random(4, 3, 5, seed=2)
    torch.testing.assert_close(q.log_prob(value), part.log_prob(value.mT.flatten(1)[:, chosen]))
    unit = MultivariateNormal(torch.zeros_like(part.mean), torch.eye(len(part.mean), dtype=F64))
    torch.testing.assert_close(kl(q, IsotropicGaussian(1.0)), kl_divergence(part, unit))
    # A prior that holds more than q counts by its marginal, too.
    torch.testing.assert_close(kl(q, leaf()), torch.zeros((), dtype=F64), atol=1e-12, rtol=0)
    fewer = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert torch.equal(q.pruned(fewer).kept, keep & fewer)
    nothing = leaf(keep=torch.zeros(3, 5, dtype=torch.bool))
    assert kl(nothing, IsotropicGaussian(1.0)) == kl(nothing, leaf()) == nothing.log_prob(value)[0] == 0.0


def test_too_many_kept_weights_of_a_pruned_block_are_refused() -> None:
    mean = torch.ones(65, 64)
    keep = torch.ones(65, 64, dtype=torch.bool)
    keep[0, 0] = False
    q = MatrixGaussian(mean, torch.eye(65), torch.eye(64), keep=keep)
    assert q.draw(torch.zeros(1, 65, 64))[0].equal(mean * keep)
    with pytest.raises(ValueError, match=r"covariance of its 4159 kept weights, more than 4096: use that of"):
        kl(q, IsotropicGaussian(1.0))
    torch.testing.assert_close(kl(q.marginals(), IsotropicGaussian(1.0)), torch.tensor(4159 / 2))
    whole = MatrixGaussian(
        mean, torch.eye(65), torch.eye(64), keep=torch.ones_like(keep)
    )  # nothing is missing
    torch.testing.assert_close(kl(whole, IsotropicGaussian(1.0)), torch.tensor(4160 / 2))


def test_weights_are_pruned_by_tensor() -> None:
    q = posterior()
    assert {name: value.shape for name, value in snr(q).items()} == {n: m.shape for n, m in q.mean().items()}
    torch.testing.assert_close(snr(q)["conv.bias"], q.mean()["conv.bias"].abs() / q.std()["conv.bias"])
    spared = prune(q, 0.5, spare="*.bias")
    assert sparsity(spared)["conv.bias"] == 0.0
    assert sum(int((~kept).sum()) for kept in spared.kept().values()) == 8  # half of 16
    assert list(spared.blocks) == list(q.blocks)
    limit = prune(q, threshold=1.0)
    assert all(torch.equal(limit.kept()[name], ratio >= 1.0) for name, ratio in snr(q).items())
    layer = prune(q, 0.4, scope="layer").block(BLOCK)
    assert int((~layer.kept).sum()) == 6  # of 15, weight and bias together
    again = prune(prune(q, 0.2), 0.5)
    assert all(torch.equal(kept, prune(q, 0.5).kept()[name]) for name, kept in again.kept().items())


def test_files_from_before_blocks_of_several_tensors_can_be_read(tmp_path: Path) -> None:
    header = {"version": 1, "blocks": {"w": {"family": "DiagonalGaussian", "trainable": False}}}
    tensors = {"w|loc": torch.ones(2), "w|raw": torch.full((2,), 0.5)}
    save_file(tensors, tmp_path / "old", {"posterity.Factorised": json.dumps(header)})
    q = Factorised.load(tmp_path / "old")
    assert q.tensors == {"w": ("w",)}
    assert q.std()["w"].tolist() == [0.5, 0.5]


def test_a_file_keeps_every_bit_of_a_pruned_block(tmp_path: Path) -> None:
    q = prune(posterior(), 0.3)
    q.save(tmp_path / "q")
    for other in (Factorised.load(tmp_path / "q"), q.frozen()):
        assert other.tensors == q.tensors
        ours, theirs = q.state_dict(), other.state_dict()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert not {t.data_ptr() for t in ours.values()} & {t.data_ptr() for t in theirs.values()}
        assert other.block(BLOCK).shapes == q.block(BLOCK).shapes


def test_a_leaf_shares_nothing_with_what_it_was_given() -> None:
    given = random(3, 4), torch.eye(3, dtype=F64), torch.eye(4, dtype=F64)
    q = MatrixGaussian(*given)
    before = {key: value.clone() for key, value in q.state_dict().items()}
    for each in given:
        each.mul_(2.0)
    assert all(torch.equal(value, before[key]) for key, value in q.state_dict().items())


def test_bad_blocks_are_refused() -> None:
    eye = torch.eye(3)
    with pytest.raises(ValueError, match=r"same first dimension, not the shapes \[\(3, 2\), \(2,\)\]"):
        MatrixGaussian((torch.zeros(3, 2), torch.zeros(2)), eye, eye)
    with pytest.raises(ValueError, match="same first dimension"):
        MatrixGaussian(torch.zeros(()), eye, eye)
    with pytest.raises(TypeError, match="means must be floating-point numbers"):
        MatrixGaussian(torch.zeros(3, 3, dtype=torch.int64), eye, eye)
    with pytest.raises(ValueError, match=r"columns must have shape \(2, 2\), not \(3, 3\)"):
        MatrixGaussian(torch.zeros(3, 2), eye, eye)
    for wrong in (eye + 1, -eye, eye * torch.nan, torch.zeros(3, 3)):
        with pytest.raises(ValueError, match="rows must be finite, lower triangular and above 0"):
            MatrixGaussian(torch.zeros(3, 3), wrong, eye)
    with pytest.raises(ValueError, match="not positive definite: raise damping"):
        MatrixGaussian.from_precision(torch.zeros(3, 3), eye, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="damping must be finite and 0 or more, not -1"):
        MatrixGaussian.from_precision(torch.zeros(3, 3), eye, eye, damping=-1.0)
    with pytest.raises(ValueError, match="scale must be finite and greater than 0, not 0"):
        MatrixGaussian.from_precision(torch.zeros(3, 3), eye, eye, scale=0.0)
    with pytest.raises(ValueError, match="names 1 tensors, and its leaf holds 2"):
        Factorised({"conv.weight": leaf()})
    with pytest.raises(ValueError, match=r"a tensor of 'conv.bias' is in the posterior twice"):
        Factorised({BLOCK: leaf(), "conv.bias": DiagonalGaussian(torch.zeros(3), 1.0)})
    with pytest.raises(ValueError, match="twice"):
        Factorised({("a", "a"): leaf()})


def test_large_triangles_are_inverted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    lower = torch.randn(2, 11, 11, generator=generator).double().tril() + 4 * torch.eye(11).double()
    for together in (3, 11, 12):
        monkeypatch.setattr("posterity.posterior.algebra._TOGETHER", together)
        found = inverse_triangle(lower)
        torch.testing.assert_close(found, torch.linalg.inv(lower))
        assert not found.triu(1).any()


def test_inverse_roots_of_mixed_sizes_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posterity.posterior.algebra._TOGETHER", 5)
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(n, n, generator=generator).double() for n in (3, 7, 3, 1, 7)]
    matrices = [half @ half.T for half in halves]
    matrices[2] -= 100 * torch.eye(3).double()
    shifts = torch.linspace(0.1, 0.5, 5).double()
    roots, failed = inverse_cholesky(matrices, shifts)
    assert failed.tolist() == [False, False, True, False, False]
    for matrix, shift, root, wrong in zip(matrices, shifts, roots, failed, strict=True):
        if not wrong:
            exact = torch.linalg.inv(matrix + shift * torch.eye(len(matrix)).double())
            torch.testing.assert_close(root @ root.mT, exact)
            assert not root.triu(1).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_density_in_half_precision(dtype: torch.dtype) -> None:
    mean, value = torch.zeros(2, 3), torch.ones(2, 3)
    wide, half = (MatrixGaussian(mean.to(d), torch.eye(2), torch.eye(3)) for d in (mean.dtype, dtype))
    torch.testing.assert_close(
        half.log_prob(value.to(dtype)).float(), wide.log_prob(value), rtol=0.01, atol=0
    )
