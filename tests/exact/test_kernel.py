"""The kernel Gaussian against torch.distributions, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from posterity import (
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    KernelGaussian,
    ScaleMixture,
    cfg,
    kl,
    prune,
    snr,
    variational,
)

F64 = torch.float64
SHAPES = [(2, 3, 4), (3, 2, 2, 3), (2, 1, 2, 1, 2)]  # one, two and three spatial dimensions
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def kernel(shape: tuple[int, ...], seed: int = 0) -> KernelGaussian:
    positions = torch.Size(shape[2:]).numel()
    factor = random(*shape[:2], positions, positions, seed=seed).tril(-1)
    diagonal = random(*shape[:2], positions, seed=seed + 1).abs() + 0.2
    return KernelGaussian(random(*shape, seed=seed + 2), factor + torch.diag_embed(diagonal))


def diagonal(shape: tuple[int, ...], seed: int = 5) -> DiagonalGaussian:
    return DiagonalGaussian(random(*shape, seed=seed), random(*shape, seed=seed + 1).abs() + 0.2)


def whole(leaf: KernelGaussian | DiagonalGaussian) -> MultivariateNormal:
    """All weights of a block with their whole covariance; only those that vary."""
    if isinstance(leaf, KernelGaussian):
        covariance = torch.block_diag(*(leaf.lower() @ leaf.lower().mT).flatten(0, 1))
    else:
        covariance = leaf.std().square().flatten().diag()
    chosen = leaf.varying.flatten()
    return MultivariateNormal(leaf.mean().flatten()[chosen], covariance[chosen][:, chosen])


@shapes
def test_density_and_draws_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    q = kernel(shape)
    value = random(4, *shape, seed=7)
    torch.testing.assert_close(q.log_prob(value), whole(q).log_prob(value.flatten(1)))
    eps = random(4, *shape, seed=8)
    expected = q.loc + torch.einsum("ocpq,nocq->nocp", q.lower(), eps.flatten(3)).reshape(eps.shape)
    torch.testing.assert_close(q.draw(eps), expected)
    torch.testing.assert_close(q.std().flatten(), whole(q).variance.sqrt())


@shapes
def test_kl_of_all_pairs_equals_torch_distributions(shape: tuple[int, ...]) -> None:
    leaves = [kernel(shape), kernel(shape, seed=10), diagonal(shape)]
    for q in leaves:
        for p in leaves:
            torch.testing.assert_close(kl(q, p), kl_divergence(whole(q), whole(p)))
        prior = whole(DiagonalGaussian(torch.full(shape, 0.3, dtype=F64), 2.0))
        torch.testing.assert_close(kl(q, IsotropicGaussian(2.0, mean=0.3)), kl_divergence(whole(q), prior))


@pytest.mark.parametrize("shape", [(2, 2, 32), (2, 2, 33), (1, 2, 8, 10)])
def test_draws_and_stds_of_large_kernels(shape: tuple[int, ...]) -> None:
    q, eps = kernel(shape), random(4, *shape, seed=8)
    moved = torch.einsum("ocpq,nocq->nocp", q.lower(), eps.flatten(3)).reshape(eps.shape)
    torch.testing.assert_close(q.draw(eps), q.loc + moved)
    torch.testing.assert_close(q.std().flatten(2), torch.linalg.vector_norm(q.lower(), dim=-1))


@pytest.mark.parametrize("size", [16, 24])
def test_indices_of_large_kernels_grow_as_their_factors(size: int) -> None:
    positions = size**2
    q = KernelGaussian(torch.zeros(1, 1, size, size), 0.1)
    assert sum(each.numel() for each in q.buffers()) <= 20 * positions**2


def test_kl_of_a_posterior_that_barely_moved_keeps_its_digits() -> None:
    start = KernelGaussian(torch.zeros(8, 4, 3, 3), 0.1)
    moved = start.copy()
    with torch.no_grad():
        moved.raw.add_(1e-4)
        moved.below.add_(1e-4)
    exact = kl_divergence(*(whole(leaf.copy().double()) for leaf in (moved, start)))
    assert 1e-6 < exact < 2e-5
    # Stds are rounded to 1e-7 where they have moved by 1e-4; sums of 288 terms of order 1 would be, to 1e-5.
    torch.testing.assert_close(kl(moved, start).double(), exact, rtol=5e-3, atol=0.0)
    assert kl(start, start.copy()) == 0.0


def test_kl_to_a_mixture_is_estimated() -> None:
    q, prior, n = kernel((2, 2, 2, 2)), ScaleMixture(0.5, 1.0, 0.1), 20_000
    draws = q.draw(random(n, 2, 2, 2, 2, seed=4))
    terms = q.log_prob(draws) - prior.log_density(draws).flatten(1).sum(1)
    assert abs(kl(q, prior, samples=n) - terms.mean()) < 5 * terms.std() * (2 / n) ** 0.5
    kl(q, prior).backward()
    assert all(bool(p.grad.any()) for p in q.parameters())


def test_a_single_position_is_the_diagonal_gaussian() -> None:
    mean, eps = random(3, 2, 1, 1).float(), random(4, 3, 2, 1, 1, seed=1).float()
    q, ffg = KernelGaussian(mean, 0.3), DiagonalGaussian(mean, 0.3, trainable=True)
    assert torch.equal(q.draw(eps), ffg.draw(eps))
    torch.testing.assert_close(q.log_prob(eps), ffg.log_prob(eps))
    for p in (IsotropicGaussian(0.5), ffg):
        torch.testing.assert_close(kl(q, p), kl(ffg, p))
    for values in (q, ffg):
        kl(values, IsotropicGaussian(0.5)).backward()
    torch.testing.assert_close(q.raw.grad, ffg.raw.grad)


def test_pruned_and_held_weights_leave_the_marginal_of_the_others() -> None:
    shape, g = (3, 2, 2, 3), torch.Generator().manual_seed(0)
    keep, held = torch.rand(shape, generator=g) > 0.4, torch.rand(shape, generator=g) > 0.8
    q, p = kernel(shape), kernel(shape, seed=10)
    before, mean, std = whole(q), q.mean(), q.std()
    small = q.pruned(keep)
    small.hold(held)
    chosen = (keep & ~held).flatten()
    part = MultivariateNormal(before.mean[chosen], before.covariance_matrix[chosen][:, chosen])
    torch.testing.assert_close(whole(small).covariance_matrix, part.covariance_matrix)
    torch.testing.assert_close(small.std(), torch.where(keep & ~held, std, 0.0))
    torch.testing.assert_close(small.mean(), torch.where(keep, mean, 0.0))
    value = random(4, *shape, seed=6)
    torch.testing.assert_close(small.log_prob(value), part.log_prob(value.flatten(1)[:, chosen]))
    # A prior that holds more counts by its marginal; so does a diagonal one.
    theirs = whole(p)
    theirs = MultivariateNormal(theirs.mean[chosen], theirs.covariance_matrix[chosen][:, chosen])
    torch.testing.assert_close(kl(small, p), kl_divergence(part, theirs))
    torch.testing.assert_close(
        kl(diagonal(shape).pruned(keep).hold(held), p),
        kl_divergence(whole(diagonal(shape).pruned(keep).hold(held)), theirs),
    )
    with pytest.raises(ValueError, match="prune q at the same places"):
        kl(p, small)
    # Draws, training and copies keep to the mask.
    opt = torch.optim.Adam(small.parameters(), lr=0.1)
    (small.draw(random(5, *shape, seed=9)).square().sum() + kl(small, p)).backward()
    opt.step()
    drawn = small.draw(random(5, *shape, seed=9))
    assert not drawn[:, ~keep].any()
    assert torch.equal(drawn[:, held & keep], mean[held & keep].expand(5, -1))
    again = small.copy()
    assert torch.equal(again.draw(random(5, *shape, seed=9)), drawn)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), small.parameters(), strict=True))


def test_the_family_is_for_convolutions_and_the_rest_is_diagonal() -> None:
    net = nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(24, 3), nn.LayerNorm(3)
    )
    model = variational(net, family=cfg, std_init=0.05, seed=0)
    kinds = {name: type(leaf) for name, leaf in model.posterior.blocks.items()}
    assert [name for name, kind in kinds.items() if kind is KernelGaussian] == ["0.weight"]
    assert {kind for name, kind in kinds.items() if name != "0.weight"} == {DiagonalGaussian}
    leaf = model.posterior.block("0.weight")
    assert leaf.loc is net[0].weight
    torch.testing.assert_close(leaf.std(), torch.full((4, 2, 3), 0.05))
    # At the start the same as a diagonal posterior, draws included.
    plain = variational(net, std_init=0.05, seed=0)
    x = torch.randn(5, 4, 8)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.kl(), plain.kl())


def test_pruning_goes_by_marginal_stds() -> None:
    q = Factorised({"w": kernel((3, 2, 2, 3))})
    torch.testing.assert_close(snr(q)["w"], (q.mean()["w"] / q.std()["w"]).abs())
    half = prune(q, 0.5)
    assert int(half.kept()["w"].sum()) == 18
    assert half.std()["w"][half.kept()["w"]].equal(half.std()["w"][half.kept()["w"]])
    assert all(p.requires_grad for p in half.parameters())
    assert not any(p.requires_grad for p in prune(q.frozen(), 0.5).parameters())


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not for shape \(3, 2\): use DiagonalGaussian, or cfg"):
        KernelGaussian(torch.zeros(3, 2), 0.1)
    with pytest.raises(ValueError, match=r"have shape \(3, 2, 4, 4\), not \(3, 2, 2, 2\)"):
        KernelGaussian(torch.zeros(3, 2, 4), torch.ones(3, 2, 2, 2))
    for bad in (0.0, -1.0, torch.nan, torch.ones(3, 2, 4, 4)):
        with pytest.raises(ValueError, match="lower triangular and above 0 on the diagonal"):
            KernelGaussian(torch.zeros(3, 2, 4), bad)
    with pytest.raises(TypeError, match=r"not torch.int64: pass mean.float\(\)"):
        KernelGaussian(torch.zeros(3, 2, 4, dtype=torch.int64), 0.1)


def test_factors_of_small_stds_stay_regular_under_adam() -> None:
    q = KernelGaussian(torch.zeros(8, 4, 3, 3), 0.003)
    opt = torch.optim.Adam([q.raw, q.below], lr=2e-3)
    copies = []
    for step in range(50):
        copies.append(q.copy())
        opt.zero_grad()
        noise, slope = (random(1, *q.shape, seed=2 * step + i).float() for i in range(2))
        (q.draw(noise) * slope).sum().backward()
        opt.step()
    # 25 steps change stds and correlations by 5 % at most: far less than a nat per weight.
    assert 0 < kl(q, copies[25]) < 0.05 * q.loc.numel()


def test_a_copy_is_equal_though_momentum_moved_what_is_held() -> None:
    q, shape = kernel((2, 2, 3)), (2, 2, 3)
    opt = torch.optim.Adam(q.parameters(), lr=0.1)
    q.draw(random(4, *shape)).square().sum().backward()
    opt.step()
    q.hold(torch.arange(12).reshape(shape) % 3 == 1)
    opt.step()
    noise = random(3, *shape, seed=1)
    assert q.lower()[..., 1, :].count_nonzero() == 4  # the diagonal alone
    assert torch.equal(q.copy().draw(noise), q.draw(noise))
