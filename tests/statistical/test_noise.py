"""Addressed noise is standard normal, and independent from address to address."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from posterity.flat import CHUNK
from posterity.noise import Domain, _mixed, address, normal


def assert_uncorrelated(x: Tensor, y: Tensor) -> None:
    """Products of numbers, and of their squares, average to what independent ones do."""
    x, y = x.double().flatten(), y.double().flatten()
    assert abs(float((x * y).mean())) < 5 / len(x) ** 0.5
    # A centred square has variance 2, the product of two such 4.
    assert abs(float(((x**2 - 1) * (y**2 - 1)).mean())) < 5 * 2 / len(x) ** 0.5


@pytest.mark.parametrize("domain", list(Domain))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_are_those_of_a_standard_normal(dtype: torch.dtype, domain: Domain) -> None:
    n = 3 * CHUNK + 1000
    z = normal(range(1), (n,), seed=1, step=2, block="w", dtype=dtype, domain=domain)[0].double()
    # Standard errors of mean, variance, third and fourth moment of a standard normal.
    for power, expected, error in ((1, 0, 1.0), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs(float((z**power).mean()) - expected) < 5 * error / n**0.5


@pytest.mark.parametrize("size", [1, 2, 5, 15, 16, 17, 100])
def test_blocks_of_few_numbers_are_standard_normal(size: int) -> None:
    # torch draws fewer than 16 numbers in another way than more.
    count = 20_000
    z = normal(range(count), (size,), seed=4, step=0, block="b")
    for column in z.double().T:
        assert abs(float(column.mean())) < 5 / count**0.5
        assert abs(float(column.var()) - 1) < 5 * (2 / count) ** 0.5
    if size > 1:
        assert_uncorrelated(z[:, 0], z[:, -1])


def test_neighbouring_addresses_are_uncorrelated() -> None:
    base: dict[str, Any] = {"seed": 0, "step": 0, "block": "a.weight", "domain": Domain.TRAIN}
    shape = (100_000,)
    draws = [
        normal(range(1), shape, **base),
        normal(range(1, 2), shape, **base),
        *(
            normal(range(1), shape, **{**base, **other})
            for other in (
                {"step": 1},
                {"seed": 1},
                {"seed": -1},
                {"block": "b.weight"},
                *({"domain": domain} for domain in Domain if domain is not Domain.TRAIN),
            )
        ),
    ]
    for one, other in itertools.combinations(draws, 2):
        assert_uncorrelated(one, other)


def test_chunks_of_a_block_are_uncorrelated() -> None:
    chunks = normal(range(1), (6 * CHUNK,), seed=2, step=3, block="w").view(6, CHUNK)
    for one, other in itertools.combinations(chunks, 2):
        assert_uncorrelated(one, other)


def test_neighbouring_numbers_are_uncorrelated_across_chunks_too() -> None:
    z = normal(range(1), (4 * CHUNK,), seed=2, step=3, block="w")[0]
    for lag in (1, 2, 16, CHUNK):
        assert_uncorrelated(z[:-lag], z[lag:])
    address = {"seed": 2, "step": 3, "block": "w", "whole": (CHUNK + 1,), "offset": (CHUNK - 1,)}
    borders = normal(range(3000), (2,), **address)
    assert_uncorrelated(borders[:, 0], borders[:, 1])


def test_addresses_do_not_collide_in_the_bits_that_cpu_generators_read() -> None:
    seen = {
        _mixed(address(seed, step, sample, block, domain=domain), chunk) & 0xFFFFFFFF
        for domain in (Domain.TRAIN, Domain.SAMPLE)
        for seed in (0, 1)
        for step in range(30)
        for sample in range(5)
        for block in ("fc1.weight", "fc1.bias", "fc2.weight")
        for chunk in range(3)
    }
    # 5,400 of 2^32: an expected 0.003 coincidences.
    assert len(seen) == 2 * 2 * 30 * 5 * 3 * 3
    assert address(-1, 0, 0, "w") != address(1, 0, 0, "w")


@pytest.mark.parametrize(("seed", "gain", "variance"), [(None, 1.0, 3.0), (0, 2.0, 8.0)])
def test_optimisers_share_noise_only_with_the_same_seed(
    seed: int | None, gain: float, variance: float
) -> None:
    """Of y = (a + b) x + N(0, 1), at x = 1, every example adds 1 to the precision of a, and 1 to that of b.

    At residual 0 the gradient of both is σ (eps_a + eps_b), so that BGD gains E[g · eps_a] / σ = 1; where
    both have the same eps, 2. What is averaged has the variance 3, or that of 2 eps², which is 8.
    """
    samples, std = 1000, 0.1
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for net in nets:
        nn.init.zeros_(net.weight)
    opts = [posterity.BGD(net, std_init=std, mc_samples=samples, batch_size=1, seed=seed) for net in nets]
    x = torch.ones(1, 1)
    for _ in range(samples):
        with opts[0].sampled_params(), opts[1].sampled_params():
            (0.5 * (nets[0](x) + nets[1](x)).square().mean()).backward()
    for opt in opts:
        opt.step()
        gained = float(opt.posterior().std()["weight"]) ** -2 - std**-2
        assert abs(gained - gain) < 5 * (variance / samples) ** 0.5
