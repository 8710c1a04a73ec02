"""Methods that leave most weights at zero, and their pruned nets.

* `variational_dropout`: a posterior with a prior that turns weights (Molchanov et al. 2017) or whole groups
  (Louizos et al. 2017) into noise; pruned by log α after training;
* `magnitudes`: Adam, with more and more of the smallest weights held at zero (Zhu, Gupta 2017);
* `posterity_lab.baselines.gates`: gates that can be zero, learned by their number (Louizos et al. 2018).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import (
    Density,
    DiagonalGaussian,
    Factorised,
    compile_step,
    names_of,
    prune,
    variational,
    warmup,
)
from posterity.compress import magnitude, point_mass
from posterity.objective import Factor
from posterity.posterior.diagonal import inverse_softplus
from posterity.variational import Family
from posterity_lab.baselines.graph import Descent
from posterity_lab.methods import Method

# A weight with log α of 3 or more has |μ| / σ of 0.22 or less.
LOG_ALPHA = 3.0
_SPARED = "*bias"


class Sparsifying(Method):
    """A method whose net can be pruned at any time, without training it again."""

    @abstractmethod
    def whole(self) -> tuple[nn.Module, Factorised]:
        """A plain net, and the posterior of its weights."""

    @abstractmethod
    def pruned(self) -> tuple[nn.Module, Factorised]:
        """The same with the unneeded weights at zero, and pruned in the posterior."""


def variational_dropout(
    model: nn.Module,
    *,
    prior: Density,
    num_data: int,
    lr: float,
    std_init: float,
    factor: Factor = 1.0,
    family: Family = DiagonalGaussian,
    max_stds: Mapping[str, float] | None = None,
    seed: int = 0,
) -> _Variational:
    """Adam on the ELBO with local reparametrisation; biases and BatchNorm have no posterior.

    Args:
        model: What to train.
        prior: The prior, such as ``posterity.LogUniform()``.
        num_data: Training examples.
        lr: Learning rate.
        std_init: Std of every weight at the start.
        factor: Factor of the KL: a number, or a function of the step.
        family: Family of the posterior.
        max_stds: By name of a tensor, the upper limit of its stds after every step; for groups, of the stds
            given their scales. Without it the KL may widen needed weights until they are noise.
        seed: Seed of the noise.

    Example:
        >>> import posterity
        >>> how = {"num_data": 8, "lr": 1e-3, "std_init": 0.01}
        >>> method = variational_dropout(nn.Linear(4, 2), prior=posterity.LogUniform(), **how)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> sorted(method.pruned()[1].mean())
        ['weight']
    """
    norms = names_of(model, nn.BatchNorm1d, nn.BatchNorm2d)
    net = variational(
        model,
        family=family,
        prior=prior,
        std_init=std_init,
        deterministic=[_SPARED, *norms],
        seed=seed,
        estimator="local",
    )
    return _Variational(net, adam_of(net, lr), num_data, factor, max_stds or {})


@final
class _Variational(Sparsifying):
    def __init__(
        self,
        net: Any,
        optimizer: torch.optim.Optimizer,
        num_data: int,
        factor: Factor,
        max_stds: Mapping[str, float],
    ) -> None:
        self.model = self._net = net
        self.optimizer = optimizer
        self._highest = {
            name: float(inverse_softplus(torch.tensor(std, dtype=torch.double)))
            for name, std in max_stds.items()
        }
        self._train_step = compile_step(net, _loss, optimizer, num_data=num_data, factor=factor)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._train_step(x, y)
        with torch.no_grad():
            for name, highest in self._highest.items():
                self._net.posterior.block(name).raw.clamp_(max=highest)
        return loss

    def posterior(self) -> Factorised:
        frozen: Factorised = self._net.posterior.frozen()
        return frozen

    def whole(self) -> tuple[nn.Module, Factorised]:
        return self._net.module, self.posterior()

    def pruned(self) -> tuple[nn.Module, Factorised]:
        return self._net.module, prune(self.posterior(), log_alpha=LOG_ALPHA)


def _loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(net(x), y)


def magnitudes(
    model: nn.Module, *, lr: float, keep: float, steps: int, begin: float = 0.25, end: float = 0.75
) -> _Magnitudes:
    """Adam, with the smallest weights of the whole net at zero: more and more, then always the same ones.

    After a share t of the way from ``begin`` to ``end``, 1 − (1 − t)³ of the final number of weights is at
    zero. Pruned weights do not learn; they are chosen again a hundred times on the way.

    Args:
        model: What to train.
        lr: Learning rate.
        keep: Share of the weights that stay, biases and BatchNorm not counted.
        steps: Steps of the whole training.
        begin: Share of the steps before the first weight is pruned.
        end: Share after which no further weight is pruned.

    Example:
        >>> method = magnitudes(nn.Linear(4, 2), lr=0.1, keep=0.5, steps=4)
        >>> for _ in range(4):
        ...     loss = method.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        >>> int((method.model.weight == 0).sum())
        4
    """
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"keep must be greater than 0 and at most 1, not {keep:g}")
    marks = (max(1, round(share * steps)) for share in (begin, end, (end - begin) / 100))
    return _Magnitudes(model, adam_of(model, lr), keep, *marks)


@final
class _Magnitudes(Sparsifying):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        keep: float,
        begin: int,
        end: int,
        every: int,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._params = {name: p for name, p in model.named_parameters() if p.dim() > 1}
        self._masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self._params.items()}
        self._keep, self._begin, self._end, self._every = keep, begin, end, every
        self._steps = 0
        self._descend = Descent(model, optimizer, lambda x, y: cross_entropy(model(x), y), self._apply)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._descend(x, y)
        self._steps += 1
        if self._begin <= self._steps <= self._end and (
            self._steps == self._end or (self._steps - self._begin) % self._every == 0
        ):
            self._choose()
            self._apply()
        return loss

    @torch.no_grad()
    def _choose(self) -> None:
        """Masks of the largest weights, as many as should remain at this step."""
        way = self._end - self._begin
        gone = (self._steps - self._begin) / way if way else 1.0
        share = (1.0 - self._keep) * (1.0 - (1.0 - gone) ** 3)
        sizes = torch.cat([p.abs().flatten() for p in self._params.values()])
        count = round(share * len(sizes))
        if count:
            masks = torch.ones_like(sizes, dtype=torch.bool)
            masks[sizes.topk(count, largest=False).indices] = False
            parts = torch.split(masks, [p.numel() for p in self._params.values()])
            for (name, p), part in zip(self._params.items(), parts, strict=True):
                self._masks[name].copy_(part.view_as(p))  # in place, where captured steps read it

    @torch.no_grad()
    def _apply(self) -> None:
        for name, p in self._params.items():
            p.mul_(self._masks[name])

    def posterior(self) -> None:
        return None

    def whole(self) -> tuple[nn.Module, Factorised]:
        return self.model, point_mass(self.model)

    def pruned(self) -> tuple[nn.Module, Factorised]:
        return self.model, without_zeros(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps, "masks": self._masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
        for name, mask in state["masks"].items():
            self._masks[name].copy_(mask)
        self._descend.forget()


def without_zeros(model: nn.Module) -> Factorised:
    """The weights of a plain net, with zeros pruned; biases and BatchNorm are spared.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> _ = net.weight.data[0].zero_()
        >>> without_zeros(net).kept()["weight"].tolist()
        [[False, False, False], [True, True, True]]
    """
    flat = [name for name, p in model.named_parameters() if p.dim() < 2]
    return prune(point_mass(model), threshold=torch.finfo(torch.float32).tiny, score=magnitude, spare=flat)


def kl_factor(factor: float, steps: int, delay: float, rise: float) -> Factor:
    """0 for a share ``delay`` of the steps, then a straight line to ``factor`` over a further share ``rise``.

    Example:
        >>> [kl_factor(1.0, 200, 0.025, 0.075)(step) for step in (4, 5, 20, 199)]
        [0.0, 0.0, 1.0, 1.0]
    """
    return warmup(round(rise * steps), delay=round(delay * steps), end=factor) if rise else factor


def adam_of(model: nn.Module, lr: float) -> torch.optim.Adam:
    """Adam on all trainable parameters of a model."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(params, lr=lr, fused=True, capturable=params[0].is_cuda)
