"""Sparse layers: the numbers of dense ones, where they are faster."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posterity import Factorised
from posterity.compress import csr, export, measure, point_mass, prune, shrink, sparse_layers


def sparse_net(zeros: float = 0.95) -> tuple[nn.Module, Factorised]:
    """A net of which single weights are pruned."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 30, bias=False), nn.Tanh(), nn.Linear(30, 4)
    )
    small = shrink(
        net, prune(point_mass(net), zeros, scope="layer", spare=["*bias", "4.*"]), torch.randn(2, 40)
    )
    return small.module, small.posterior


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[object, float]:
    """What the products are found to take, in place of a clock."""
    found = {F.linear: 1.0, csr.product: 0.1}
    monkeypatch.setattr(csr, "_time", lambda function, *arguments: found[function])
    return found


@pytest.mark.parametrize("positions", [(), (5,), (2, 3)])
def test_outputs_are_those_of_the_dense_net(times: dict[object, float], positions: tuple[int, ...]) -> None:
    net, _ = sparse_net()
    x = torch.randn(3, *positions, 40)
    if positions:
        net = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 4, bias=False))
        with torch.no_grad():
            for p in net.parameters():
                p[torch.rand_like(p) < 0.8] = 0.0
    before = copy.deepcopy(net.state_dict())
    found = sparse_layers(net, x)
    assert len(found.weights) == 2
    assert {found.module.get_parameter(name).layout for name in found.weights} == {torch.sparse_csr}
    for inputs in (x, torch.randn(7, *positions, 40)):
        torch.testing.assert_close(found.module(inputs), net(inputs))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_only_what_is_faster_and_sparse_is_changed(times: dict[object, float]) -> None:
    net, _ = sparse_net()
    x = torch.randn(3, 40)
    assert sparse_layers(net, x).milliseconds == {"0.weight": (1.0, 0.1), "2.weight": (1.0, 0.1)}
    times[csr.product] = 0.95  # within noise
    found = sparse_layers(net, x)
    assert found.weights == ()
    assert not any(p.layout is torch.sparse_csr for p in found.module.parameters())
    torch.testing.assert_close(found.module(x), net(x))


def test_tied_weights_stay_dense(times: dict[object, float]) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    with torch.no_grad():
        net[0].weight[1:] = 0.0
    assert sparse_layers(net, torch.randn(3, 6)).milliseconds == {}


def test_costs_count_what_is_stored(times: dict[object, float]) -> None:
    net, x = nn.Linear(10, 20), torch.randn(3, 10)
    with torch.no_grad():
        net.weight[:, 1:] = 0.0
    found = measure(sparse_layers(net, x).module, x, batches=(1,), seconds=1e-3)
    assert (found.weights, found.nonzero, found.multiply_adds) == (220, 40, None)
    assert found.bytes == 4 * 20 + (4 + 8) * 20 + 8 * 21


def test_a_net_read_from_a_file_can_be_made_sparse(times: dict[object, float], tmp_path: Path) -> None:
    net, posterior = sparse_net()
    x = torch.randn(3, 40)
    export(tmp_path / "net.pt2", net, posterior, x)
    found = sparse_layers(torch.export.load(tmp_path / "net.pt2").module(), x)
    assert len(found.weights) == 2
    torch.testing.assert_close(found.module(x), net(x))
    torch.save(found.module, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    torch.testing.assert_close(again(x), net(x))


def test_a_large_sparse_layer_is_faster() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2000, 2000)
    with torch.no_grad():
        net.weight[torch.rand_like(net.weight) < 0.995] = 0.0
    found = sparse_layers(net, torch.randn(32, 2000))
    assert found.weights == ("weight",)
    dense, sparse = found.milliseconds["weight"]
    assert sparse < dense


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="the model does not take this example"):
        sparse_layers(nn.Linear(3, 2), torch.randn(2, 4))
    with pytest.raises(TypeError, match=r"sparse_layers\(\) takes a module for model, not 'net'"):
        sparse_layers("net", torch.randn(2, 4))  # type: ignore[arg-type]
