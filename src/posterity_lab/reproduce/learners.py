"""Names of methods → what learns. On a GPU no step of these waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import BGD, Density, Factorised, IsotropicGaussian, ScaleMixture, elbo, kl, run, variational
from posterity_lab import baselines
from posterity_lab.baselines.graph import Captured, Watch
from posterity_lab.continual import by_rule
from posterity_lab.methods import Method
from posterity_lab.reproduce.study import Values
from posterity_lab.streams import Mask

NAMES = {
    "bgd": "BGD",
    "bbb": "BBB",
    "bbb-mixture": "BBB, mixture prior",
    "sgd": "SGD",
    "adam": "Adam",
    "si": "SI",
    "ewc": "EWC",
    "vcl": "VCL",
}


def learner(
    method: str, config: Values, model: nn.Module, *, num_data: int, seed: int, mask: Mask | None = None
) -> Method:
    """The method of that name, about to train ``model``.

    Args:
        method: One of `NAMES`.
        config: Its hyper-parameters, among others.
        model: What to train, on its device.
        num_data: Training examples (of one task).
        seed: Of the weight noise.
        mask: Which logits count in training.

    Example:
        >>> method = learner("sgd", {"lr": 0.1, "momentum": 0.0}, nn.Linear(4, 2), num_data=8, seed=0)
        >>> method.posterior() is None
        True
    """

    def given(*keys: str) -> dict[str, Any]:
        return {key: config[key] for key in keys}

    match method:
        case "bgd":
            rule = BGD(model, seed=seed, **given("std_init", "lr", "mc_samples"))
            return by_rule(model, rule, mask)
        case "bbb":
            prior: Density = IsotropicGaussian(config["prior_std"])
            return _Backprop(model, prior, num_data, **given("lr", "std_init"))
        case "bbb-mixture":
            mixture = ScaleMixture(**given("weight", "std_wide", "std_narrow"))
            return _Backprop(model, mixture, num_data, **given("lr", "std_init"))
        case "sgd":
            return baselines.sgd(model, mask=mask, **given("lr", "momentum"))
        case "adam":
            return baselines.adam(model, mask=mask, **given("lr"))
        case "si":
            return baselines.si(model, mask=mask, **given("lr", "strength"))
        case "ewc":
            return baselines.ewc(model, mask=mask, **given("lr", "strength"))
        case "vcl":
            return baselines.vcl(
                model, num_data=num_data, mask=mask, seed=seed, **given("lr", "std_init", "kl_factor")
            )
    raise ValueError(f"there is no method {method!r}")


def set_lr(method: Method, lr: float) -> None:
    """Go on with another learning rate, which captured steps have fixed: they are captured anew."""
    state = method.state_dict()
    if any(group["lr"] != lr for group in state["optimizer"]["param_groups"]):
        for group in state["optimizer"]["param_groups"]:
            group["lr"] = lr
        method.load_state_dict(state)


@contextmanager
def arithmetic(device: str) -> Iterator[None]:
    """Matrix products in tf32 where the device has it, and torch's generators left as they were."""
    before = torch.get_float32_matmul_precision()
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.set_float32_matmul_precision("high" if device == "cuda" else before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@final
class Autocast(nn.Module):
    """A net that trains in bfloat16 where the device is a GPU; it is tested as it is.

    Example:
        >>> Autocast(nn.Linear(4, 2))(torch.zeros(3, 4)).dtype
        torch.float32
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The net's logits, in float32."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda and self.training):
            out: Tensor = self.net(x)
        return out.float()


@final
class _Backprop(Method):
    """Bayes by Backprop as a step that can be captured: its noise is torch's own, which a graph renews."""

    def __init__(
        self, model: nn.Module, prior: Density, num_data: int, *, lr: float, std_init: float
    ) -> None:
        self.model = self._net = variational(model, std_init=std_init)
        params = list(self._net.parameters())
        on_gpu = params[0].is_cuda
        self.optimizer = torch.optim.Adam(params, lr=lr, fused=True, capturable=on_gpu)
        self._prior, self._num_data = prior, num_data
        self._watch = Watch(params[0].device)
        self._run = Captured(self._net, self._learn, self._tensors)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._watch.refuse()
        return self._run(x, y)

    def posterior(self) -> Factorised:
        return self._net.posterior.frozen()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run.forget()  # the optimiser's state lies elsewhere

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        posterior = self._net.posterior
        weights = {
            name: leaf.draw(torch.randn((1, *leaf.shape), device=leaf.device, dtype=leaf.dtype))
            for name, leaf in posterior.blocks.items()
        }
        nll = cross_entropy(run(self._net.module, weights, x)[0], y)
        loss = elbo(nll, kl(posterior, self._prior, weights=weights), num_data=self._num_data)
        self.optimizer.found_inf = self._watch.see(loss)  # type: ignore[attr-defined]
        params = list(self._net.parameters())
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad
        self.optimizer.step()
        return loss.detach()

    def _tensors(self) -> list[Tensor]:
        """All that a step changes."""
        state = [value for own in self.optimizer.state.values() for value in own.values()]
        changed = [*self._net.parameters(), *self._net.buffers(), *state, self._watch.count]
        return [tensor for tensor in changed if isinstance(tensor, Tensor)]
