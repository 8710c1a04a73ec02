"""Counts that follow from shapes, and times that grow."""

import pytest
import torch
from torch import Tensor, nn

from posterity.compress import measure, point_mass, prune, shrink, sparse_layers
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


@pytest.mark.parametrize(("size", "want"), [(1, [0]), (2, [0, 1]), (7, [0, 1, 2, 0, 1, 2, 0])])
def test_different_examples_are_timed(size: int, want: list[float]) -> None:
    """Branches of repeated ones would be foreseen."""
    seen = set()

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(tuple(x[:, 0].tolist()))
            return x

    measure(Recorder(), torch.arange(3.0)[:, None], batches=(size,), seconds=1e-3)
    assert seen == {(0,), tuple(want)}  # one example is counted, these are timed


def test_inputs_that_are_no_batch_are_not_repeated() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            assert scale.shape == (4,)
            return x * scale

    assert set(measure(Scaled(), (torch.randn(3, 4), torch.ones(4)), (1, 5), 1e-3).milliseconds) == {1, 5}


def test_bad_calls_are_refused() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"batches must be sizes of at least 1, not \(1, 0\)"):
        measure(net, torch.randn(2, 3), batches=(1, 0))
    with pytest.raises(ValueError, match="batches must be sizes of at least 1, not 4"):
        measure(net, torch.randn(2, 3), batches=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the example has a batch of 0: pass at least one input"):
        measure(net, torch.randn(0, 3))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_never_end_are_refused(seconds: float) -> None:
    for timed in (measure, sparse_layers):
        with pytest.raises(ValueError, match=f"seconds must be finite and greater than 0, not {seconds}"):
            timed(nn.Linear(3, 2), torch.randn(2, 3), seconds=seconds)
