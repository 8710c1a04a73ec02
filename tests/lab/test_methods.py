"""Methods by name: what a config asks for is what is trained."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from posterity import DiagonalGaussian, Factorised, IsotropicGaussian, kl
from posterity_lab import methods
from posterity_lab.config import Config


@pytest.mark.parametrize("samples", [1, 3])
def test_bayes_by_backprop_uses_the_labels_of_the_batch_for_every_network(samples: int) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    # Networks that are all but the same have the loss of the one.
    config = Config(method="bbb", samples=samples, std_init=1e-6, kl_factor=0.0)
    method = methods.build(config, net, num_data=6)
    expected = cross_entropy(net(x), y)
    torch.testing.assert_close(method.step(x, y), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", ["bgd", "ivon", "vogn", "bbb"])
def test_what_a_method_draws_follows_from_the_configs_seed(name: str) -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    losses = []
    for seed in (7, 7, 8):
        torch.manual_seed(0)
        method = methods.build(Config(method=name, seed=seed, std_init=0.3), nn.Linear(4, 3), num_data=6)
        losses.append(float(method.step(x, y)))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_kl_factor_of_bayes_by_backprop_follows_the_config() -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    torch.manual_seed(0)
    weights = nn.Linear(4, 3).state_dict()
    losses = []
    for factor in (0.0, 0.5, 1.0):
        net = nn.Linear(4, 3)
        net.load_state_dict(weights)
        config = Config(method="bbb", std_init=0.1, prior_std=0.3, kl_factor=factor)
        losses.append(methods.build(config, net, num_data=6).step(x, y))
    q = Factorised({key: DiagonalGaussian(value, 0.1) for key, value in weights.items()})
    divergence = kl(q, IsotropicGaussian(0.3))
    torch.testing.assert_close(losses[1] - losses[0], 0.5 * divergence / 6, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(losses[2] - losses[0], divergence / 6, rtol=1e-4, atol=0.0)
