"""Method names of the command line → objects that learn, step by step, and can be stopped and resumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import (
    BGD,
    IVON,
    VOGN,
    DiagonalGaussian,
    Factorised,
    IsotropicGaussian,
    Prediction,
    VariationalOptimizer,
    compile_step,
    elbo,
    names_of,
    predict,
    variational,
)
from posterity.distributed import World
from posterity.optim.pooling import meeting
from posterity.predict import Mode
from posterity.train.shares import Joined
from posterity_lab.config import Config


class Method(ABC):
    """A way of learning that holds a model; all that it changes is in the model and the optimiser."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Learn from a batch and return its loss; one that is not finite raises, and nothing has moved."""

    @abstractmethod
    def posterior(self) -> Factorised | None:
        """The posterior as it stands; None from a method that learns weights alone."""

    def state_dict(self) -> dict[str, Any]:
        """Model and optimiser: with this, a resumed run does what an uninterrupted one would."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def build(config: Config, model: nn.Module, num_data: int) -> Method:
    """The method that a config names, about to train ``model`` on ``num_data`` examples.

    Example:
        >>> method = build(Config(method="ivon"), nn.Linear(4, 2), num_data=8)
        >>> loss = method.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
        >>> sorted(method.posterior().blocks)
        ['bias', 'weight']
    """
    settings = config.settings
    match config.method:
        case "bgd":
            return _Rule(model, BGD(model, **_entries(config, BGD)))
        case "ivon":
            return _Rule(model, IVON(model, num_data=num_data, **_entries(config, IVON)))
        case "vogn":
            plain = names_of(model, nn.BatchNorm2d)
            return _Rule(model, VOGN(model, num_data=num_data, deterministic=plain, **_entries(config, VOGN)))
        case "bbb":
            return _Backprop(model, num_data, settings, config.seed)
        case "sgd":
            sgd = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"])
            return _Point(model, sgd)
        case "adam":
            return _Point(model, torch.optim.Adam(model.parameters(), lr=settings["lr"]))
    raise ValueError(f"there is no method {config.method!r}")


def _entries(config: Config, rule: type[VariationalOptimizer]) -> dict[str, Any]:
    """A config's settings under the names that a rule has for them."""
    entries: dict[str, Any] = dict(config.settings)
    widths = [key for key in rule.widths if entries.get(key) is not None]
    for key in widths[:-1]:  # only the most decisive counts
        del entries[key]
    entries |= {"mc_samples": entries.pop("samples"), "seed": config.seed}
    if "beta2" in entries:
        entries["betas"] = entries.pop("momentum"), entries.pop("beta2")
    return entries


def predictions(
    model: nn.Module,
    posterior: Factorised | None,
    x: Tensor,
    config: Config,
    *,
    mode: Mode = "average",
    progress: bool = False,
) -> Prediction:
    """Outputs of ``config.eval_samples`` sampled networks; without a posterior, of the model's own weights.

    Example:
        >>> predictions(nn.Linear(4, 2), None, torch.zeros(3, 4), Config(method="adam")).probs.shape
        torch.Size([3, 2])
    """
    if posterior is None:
        certain = {name: DiagonalGaussian(p, 0.0) for name, p in model.named_parameters()}
        return predict(model, Factorised(certain), x, mode="mean", keep_samples=True, progress=progress)
    samples, seed = config.eval_samples, config.seed
    return predict(
        model,
        posterior,
        x,
        samples=samples,
        mode=mode,
        seed=seed,
        keep_samples=True,
        progress=progress,
    )


@final
class _Rule(Method):
    """A closed-form rule, all weight samples in one pass."""

    def __init__(self, model: nn.Module, optimizer: VariationalOptimizer) -> None:
        self.model, self.optimizer, self._rule = model, optimizer, optimizer
        self._train_step = compile_step(model, _loss, optimizer)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._train_step(x, y)

    def posterior(self) -> Factorised:
        return self._rule.posterior()


@final
class _Backprop(Method):
    """Bayes by Backprop: Adam on the ELBO, through the draw of the weights."""

    def __init__(self, model: nn.Module, num_data: int, settings: dict[str, Any], seed: int) -> None:
        width = "std_scale" if settings["std_init"] is None else "std_init"
        self._net = variational(model, seed=seed, **{width: settings[width]})
        self.model = self._net
        self.optimizer = torch.optim.Adam(self._net.parameters(), lr=settings["lr"])
        self._prior = IsotropicGaussian(std=settings["prior_std"])
        self._num_data, self._factor = num_data, settings["kl_factor"]
        self._samples = int(settings["samples"])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self._net.outputs(x, samples=self._samples)
        nll = cross_entropy(logits.flatten(0, 1), y.repeat(self._samples))
        loss = elbo(nll, self._net.kl(self._prior), num_data=self._num_data, factor=self._factor)
        return _descend(self.optimizer, loss, len(y))

    def posterior(self) -> Factorised:
        return self._net.posterior.frozen()


@final
class _Point(Method):
    """Plain training of one set of weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return _descend(self.optimizer, _loss(self.model, x, y), len(y))

    def posterior(self) -> None:
        return None


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, examples: int) -> Tensor:
    """A step by the gradient of a loss, which is the mean of this process's part of a batch; that of all."""
    world, mean, total = World(None), loss.detach(), float(examples)
    if world.size > 1:
        counts = meeting(examples, [mean], (), mean.device)
        world.add_up(counts)
        total, weighted, _ = counts.tolist()
        mean = mean.new_tensor(weighted / total)
    if not bool(torch.isfinite(mean)):
        raise FloatingPointError(
            f"the loss is {mean.item():g}; the weights were not touched: look for bad values in the batch, "
            "or lower lr"
        )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if world.size > 1:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        joined = Joined([p.grad * (examples / total) for p in params])
        world.add_up(*joined.flats)
        for p, grad in zip(params, joined.parts(), strict=True):
            p.grad = grad
    optimizer.step()
    return mean
