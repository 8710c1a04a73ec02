"""Methods by name: what a config asks for is what is trained."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from posterity_lab import methods
from posterity_lab.config import Config


@pytest.mark.parametrize("samples", [1, 3])
def test_bayes_by_backprop_compares_every_network_with_the_batchs_own_labels(samples: int) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    # Networks that are all but the same have the loss of the one.
    config = Config(method="bbb", samples=samples, std_init=1e-6, kl_factor=0.0)
    method = methods.build(config, net, num_data=6)
    expected = cross_entropy(net(x), y)
    torch.testing.assert_close(method.step(x, y), expected, rtol=1e-4, atol=0.0)
