"""Addressed noise: normal, independent across addresses, the same however it is asked for."""

import numpy as np
import pytest
import torch

from posterity.layout import Layout
from posterity.noise import Noise, address, normal


def test_it_is_standard_normal() -> None:
    n = 200_000
    z = normal(range(1), (n,), seed=1, step=2, block="w", dtype=torch.float64)[0]
    # Standard errors of mean, variance, third and fourth moment of a standard normal.
    for power, expected, error in ((1, 0, 1.0), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs(float((z**power).mean()) - expected) < 5 * error / n**0.5


def test_neighbouring_addresses_are_uncorrelated() -> None:
    n = 100_000
    base = {"seed": 0, "step": 0, "block": "a.weight"}
    a = normal(range(1), (n,), **base)[0]
    for other in (
        normal(range(1, 2), (n,), **base),
        normal(range(1), (n,), **{**base, "step": 1}),
        normal(range(1), (n,), **{**base, "seed": 1}),
        normal(range(1), (n,), **{**base, "block": "b.weight"}),
    ):
        assert abs(float((a * other[0]).mean())) < 5 / n**0.5


def test_addresses_do_not_collide_in_the_bits_that_cpu_generators_read() -> None:
    seen = {
        address(seed, step, sample, block) & 0xFFFFFFFF
        for seed in range(3)
        for step in range(40)
        for sample in range(10)
        for block in ("fc1.weight", "fc1.bias", "fc2.weight")
    }
    # 3,600 of 2^32: an expected 0.0015 coincidences.
    assert len(seen) == 3 * 40 * 10 * 3
    assert address(-1, 0, 0, "w") != address(1, 0, 0, "w")


def test_a_part_of_a_stack_equals_the_part_alone() -> None:
    for shape in ((), (3,), (5, 7), (40, 50)):
        whole = normal(range(6), shape, seed=3, step=9, block="x")
        assert torch.equal(whole[2:5], normal(range(2, 5), shape, seed=3, step=9, block="x"))
        assert torch.equal(whole, normal(range(6), shape, seed=3, step=9, block="x"))


def test_threads_draw_what_one_would() -> None:
    layout = Layout(["a", "b", "c"], [(300, 200), (1000,), (200, 100)])  # more than is worth threads
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(Noise(range(4), layout, seed=1, step=2).blocks)
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)


def test_addresses_take_numpys_numbers() -> None:
    assert address(*np.arange(3), "w") == address(0, 1, 2, "w")
    with pytest.raises(TypeError, match="interpreted as an integer"):
        address(0.5, 0, 0, "w")  # type: ignore[arg-type]
