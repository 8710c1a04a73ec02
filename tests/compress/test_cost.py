"""Counts that follow from shapes, and times that grow."""

import torch
from torch import nn

from posterity.compress import measure, point_mass, prune, shrink
from posterity_lab import nets


def test_counts_follow_from_shapes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    with torch.no_grad():
        net[4].weight[:, 0] = 0.0
    found = measure(net, torch.randn(5, 3, 8, 8), batches=(1, 4), seconds=0.01)
    weights = 8 * 27 + 8 + 16 + 10 * 288 + 10
    assert (found.weights, found.nonzero) == (weights, weights - 10 - 8)  # BatchNorm's biases are zero
    assert found.bytes == 4 * (weights + 16) + 8
    assert found.multiply_adds == 36 * 8 * 27 + 10 * 288
    assert set(found.milliseconds) == {1, 4}
    assert net.training


def test_a_smaller_net_costs_less() -> None:
    torch.manual_seed(0)
    net, x = nets.build("mlp-1000-1000", (1, 28, 28), 10), torch.randn(1, 1, 28, 28)
    small = shrink(net, prune(point_mass(net), 0.9, groups="outputs", scope="layer", spare="5.weight"), x)
    before, after = (measure(each, x, batches=(128,), seconds=0.1) for each in (net, small.module))
    assert after.weights < 0.2 * before.weights
    assert after.multiply_adds < 0.2 * before.multiply_adds
    assert after.milliseconds[128] < before.milliseconds[128]
