"""L0 regularisation: groups of weights with gates that can be exactly zero, learned by their expected number.

Louizos, Welling, Kingma: "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018. A gate is a
hard concrete variable: s = sigmoid((log u − log(1 − u) + log a) / β) for a uniform u, stretched to (γ, ζ) and
clipped to [0, 1]. The loss adds λ / N for every weight, times the probability that its gate is open,
sigmoid(log a − β log(−γ / ζ)). A group has all weights of an input unit of a linear layer, or of an output
channel of a convolution.

Deviation: gates are drawn for each example; the authors draw them once for a batch.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import Factorised
from posterity.compress import point_mass
from posterity_lab.baselines.graph import Descent
from posterity_lab.baselines.sparse import Sparsifying, adam_of, without_zeros

_BETA, _GAMMA, _ZETA = 2.0 / 3.0, -0.1, 1.1


@final
class Gated(nn.Module):
    """A linear layer or a convolution whose groups of weights have gates.

    Args:
        layer: The layer.
        open_at: A gate's initial σ(log a).

    Example:
        >>> Gated(nn.Linear(4, 3), 0.5)(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, open_at: float) -> None:
        super().__init__()
        self.layer, self.axis = layer, 1 if isinstance(layer, nn.Linear) else 0
        start = math.log(open_at) - math.log1p(-open_at)
        groups = layer.weight.shape[self.axis]
        self.log_a = nn.Parameter(start + 0.01 * torch.randn(groups))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs with gates drawn for each example; in evaluation with gates without noise."""
        if self.axis == 1:
            found: Tensor = self.layer(x * self._gates(len(x)))
            return found
        out: Tensor = self.layer(x)
        bias = self.layer.bias
        assert bias is not None
        around = bias.view(-1, 1, 1)  # a bias has no gate
        return (out - around) * self._gates(len(x))[..., None, None] + around

    def expected(self) -> Tensor:
        """The expected number of weights with open gates."""
        each = self.layer.weight.numel() // len(self.log_a)
        return each * torch.sigmoid(self.log_a - _BETA * math.log(-_GAMMA / _ZETA)).sum()

    def weight(self) -> Tensor:
        """The layer's weights times their gates."""
        around = [1] * self.layer.weight.dim()
        around[self.axis] = -1
        return self.layer.weight * _cut(torch.sigmoid(self.log_a)).view(around)

    def _gates(self, examples: int) -> Tensor:
        if not self.training:
            return _cut(torch.sigmoid(self.log_a)).expand(examples, -1)
        u = torch.rand(examples, len(self.log_a), device=self.log_a.device).clamp(1e-6, 1 - 1e-6)
        return _cut(torch.sigmoid((u.log() - (1.0 - u).log() + self.log_a) / _BETA))


def _cut(s: Tensor) -> Tensor:
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0.0, 1.0)


def l0(
    model: nn.Sequential,
    *,
    strength: float,
    num_data: int,
    lr: float,
    open_inputs: float = 0.8,
    open_at: float = 0.5,
) -> _Gates:
    """Adam on the loss plus λ / N for every weight, times the probability that its gate is open.

    Args:
        model: A sequence of layers; linear layers and convolutions get gates.
        strength: λ, for every layer.
        num_data: Training examples.
        lr: Learning rate.
        open_inputs: Initial σ(log a) of a linear first layer.
        open_at: The same for all other layers.

    Example:
        >>> method = l0(nn.Sequential(nn.Linear(4, 2)), strength=0.1, num_data=8, lr=1e-3)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> method.pruned()[1].kept()["0.weight"].shape
        torch.Size([2, 4])
    """
    if strength < 0:
        raise ValueError(f"strength must be at least 0, not {strength:g}")
    layers, first = list[nn.Module](), True
    for module in model:
        if isinstance(module, nn.Linear | nn.Conv2d):
            started = open_inputs if first and isinstance(module, nn.Linear) else open_at
            layers.append(Gated(module, started))
            first = False
        else:
            layers.append(module)
    net = nn.Sequential(*layers).to(next(model.parameters()).device)
    return _Gates(model, net, adam_of(net, lr), strength / num_data)


@final
class _Gates(Sparsifying):
    def __init__(
        self, plain: nn.Sequential, net: nn.Sequential, optimizer: torch.optim.Optimizer, price: float
    ) -> None:
        self.model, self.optimizer, self._plain, self._price = net, optimizer, plain, price
        self._layers = list(net)
        self._gated = [module for module in net if isinstance(module, Gated)]
        self._descend = Descent(net, optimizer, self._loss)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._descend(x, y)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        used = torch.stack([each.expected() for each in self._gated]).sum()
        return cross_entropy(self.model(x), y) + self._price * used

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._descend.forget()

    def posterior(self) -> None:
        return None

    def whole(self) -> tuple[nn.Module, Factorised]:
        net = self._deployed()
        return net, point_mass(net)

    def pruned(self) -> tuple[nn.Module, Factorised]:
        net = self._deployed()
        return net, without_zeros(net)

    @torch.no_grad()
    def _deployed(self) -> nn.Module:
        """A plain net whose weights include the gates."""
        net = deepcopy(self._plain)
        for number, layer in enumerate(self._layers):
            if isinstance(layer, Gated):
                net.get_parameter(f"{number}.weight").copy_(layer.weight())
        return net
