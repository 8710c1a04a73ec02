"""Means with as many bits as their stds ask for."""

import math

import pytest
import torch
from torch import nn

from posterity import DiagonalGaussian, Factorised
from posterity.compress import point_mass, prune, quantise, shrink


def posterior() -> Factorised:
    g = torch.Generator().manual_seed(0)
    std = torch.rand(40, 50, generator=g) * 0.1 + 0.01
    q = Factorised({"w": DiagonalGaussian(torch.randn(40, 50, generator=g), std)})
    return prune(q, 0.3)


@pytest.mark.parametrize("share", [0.1, 1.0, 3.0])
def test_rounding_costs_what_the_share_says(share: float) -> None:
    q = posterior()
    found = quantise(q, share)
    mean, std, keep = q.mean()["w"].double(), q.std()["w"].double(), q.kept()["w"]
    moved = (found.posterior.mean()["w"].double() - mean)[keep]
    step = found.steps["w"]
    assert float(moved.abs().max()) <= 0.5 * step * (1 + 1e-6)
    cost = (moved.square() / (2 * std[keep].square())).mean()
    # Of n weights, each error uniform and independent of its std.
    each = (step / std[keep]).square() / 24
    error = (each.square() * (9 / 5)).sum().sqrt() / int(keep.sum())
    assert abs(float(cost) - share**2 / 24) < 5 * float(error)
    torch.testing.assert_close(float(each.mean()), share**2 / 24)


def test_bits_name_every_rounded_weight_and_zero_stays_zero() -> None:
    q = posterior()
    found = quantise(q, 0.5)
    whole = (found.posterior.mean()["w"].double() / found.steps["w"])[q.kept()["w"]]
    assert torch.allclose(whole, whole.round(), atol=1e-3)
    assert (
        2 ** (found.bits["w"] - 1)
        < float(whole.round().max() - whole.round().min()) + 1
        <= 2 ** found.bits["w"]
    )
    assert bool((found.posterior.mean()["w"][~q.kept()["w"]] == 0).all())
    assert torch.equal(found.posterior.std()["w"], q.std()["w"])
    assert found.bytes == math.ceil(found.bits["w"] * 1400 / 8)
    again = quantise(prune(q, 1.0))
    assert (again.bits["w"], again.bytes) == (0, 0)


@pytest.mark.parametrize(("numbers", "bits"), [(1, 0), (2, 1), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_bits_count_all_numbers_of_a_range(numbers: int, bits: int) -> None:
    q = Factorised({"w": DiagonalGaussian(torch.arange(-1.0, numbers - 1.0), 1.0)})
    found = quantise(q)
    assert torch.equal(found.posterior.mean()["w"], q.mean()["w"])  # whole numbers, at a step of 1
    assert found.bits["w"] == bits


def test_biases_that_are_known_exactly_stay_as_they_are() -> None:
    """As those are that constants of removed units went into, of a posterior without biases."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 3))
    keep = torch.ones(6, 4, dtype=torch.bool)
    keep[2:] = False
    left = torch.ones(3, 6, dtype=torch.bool)
    left[0, 2:] = False  # no constant reaches the first output
    leaves = {
        name: DiagonalGaussian(net.get_parameter(name).detach(), 0.1).pruned(mask)
        for name, mask in {"0.weight": keep, "2.weight": left}.items()
    }
    small = shrink(net, Factorised(leaves), torch.randn(2, 4))
    std = small.posterior.std()["2.bias"]
    assert std[0] == 0
    assert std[1] > 0
    found = quantise(small.posterior)
    assert torch.equal(found.posterior.mean()["2.bias"], small.posterior.mean()["2.bias"])
    assert (found.bits["2.bias"], found.steps["2.bias"], found.whole("2.bias")) == (32, 0.0, None)
    assert found.bits["0.weight"] < 32
    assert found.whole("0.weight") is not None


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="share must be finite and greater than 0, not 0"):
        quantise(posterior(), 0)
    with pytest.raises(ValueError, match="'weight' has weights with std 0, for which there is no step"):
        quantise(point_mass(torch.nn.Linear(2, 2)))
