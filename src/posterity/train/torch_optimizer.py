"""Steps of a torch optimiser, also in a CUDA graph, and only if a flag on the device allows them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from posterity.caller import warn
from posterity.optim import VariationalOptimizer
from posterity.train.learner import settings

# Group entries that a captured graph does not read.
_UNREAD = ("params", "lr", "initial_lr")


@final
class TorchOptimizer:
    """A torch optimiser with the operations that a training step needs.

    Args:
        optimizer: The optimiser of all parameters of a model that require gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(
            optimizer, VariationalOptimizer | torch.optim.LBFGS
        ):
            raise TypeError(
                "a posterior that is trained by gradient needs a torch optimiser such as Adam, not "
                f"{type(optimizer).__name__}; rules take the plain module"
            )
        self.optimizer, self.name = optimizer, type(optimizer).__name__
        self._quiet = False

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups."""
        return self.optimizer.param_groups

    def parameters(self) -> list[Tensor]:
        """The parameters that it holds."""
        return [p for group in self.groups for p in group["params"]]

    def tensors(self) -> list[Tensor]:
        """Parameters and state."""
        return [*(p.detach() for p in self.parameters()), *self.state()]

    def state(self) -> list[Tensor]:
        """The tensors of its state."""
        states = self.optimizer.state.values()
        return [each for state in states for each in state.values() if isinstance(each, Tensor)]

    def refuse_unfit(self, own: Mapping[str, Tensor]) -> None:
        """Raise unless it holds all parameters of a model that require gradients, and no others."""
        held = set(self.parameters())
        for path, p in own.items():
            if p.requires_grad and p not in held:
                raise ValueError(
                    f"{self.name} does not hold {path!r}: build it from the parameters() of the model that "
                    "variational() returned, or freeze that parameter"
                )
        if foreign := held - set(own.values()):
            shape = list(next(iter(foreign)).shape)
            raise ValueError(
                f"{self.name} holds a parameter of shape {shape} that the model does not have: build it from "
                "the model's own parameters()"
            )

    def clip(self, max_norm: float) -> None:
        """Clip the norm of all gradients."""
        clip_grad_norm_(self.parameters(), max_norm)

    @torch.no_grad()
    def step(self, ok: Tensor | None) -> None:
        """Take a step, if the flag on the device is true or there is none."""
        optimizer = self.optimizer
        if ok is None:
            with warnings.catch_warnings() if self._quiet else nullcontext():
                if self._quiet:  # expected for steps before a capture or between two
                    warnings.filterwarnings("ignore", message="This instance was constructed with capturable")
                optimizer.step()
        elif all(group.get("fused") for group in self.groups):
            # Fused kernels treat this like a GradScaler's bad step, and leave state and parameters unchanged.
            optimizer.grad_scale, optimizer.found_inf = None, (~ok).float()  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        else:
            before = [(tensor, tensor.clone()) for tensor in self.tensors()]
            optimizer.step()
            for tensor, then in before:
                torch.where(ok, tensor, then, out=tensor)

    # Captured steps.

    def make_capturable(self) -> None:
        """Make its steps capturable, or warn that they are not captured."""
        for group in self.groups:
            if group.get("capturable") is False:
                group["capturable"] = self._quiet = True
                for p in group["params"]:
                    state = self.optimizer.state.get(p, {})
                    if "step" in state:
                        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(p.device)
        if not self.captures():
            warn(
                f"steps of {self.name} are not captured as CUDA graphs: build it with capturable=True or "
                "fused=True if it has one of them"
            )

    def captures(self) -> bool:
        """Whether it reads its settings on the device."""
        return all(group.get("capturable") or group.get("fused") for group in self.groups)

    def settings(self) -> tuple[object, ...]:
        """The settings that a graph of its steps has fixed."""
        return settings(self.groups, _UNREAD)
