"""An optimiser of torch, as a step by gradient moves it: in a CUDA graph, too, and as a flag lets it."""

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

# Entries of a group that a graph does not read.
_UNREAD = ("params", "lr", "initial_lr")


@final
class TorchOptimizer:
    """What a step needs of an optimiser.

    Args:
        optimizer: Of all parameters of a model that want gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(
            optimizer, VariationalOptimizer | torch.optim.LBFGS
        ):
            raise TypeError(
                "a posterior that is trained by gradient needs an optimiser of torch such as Adam, not "
                f"{type(optimizer).__name__}; rules take the plain module"
            )
        self.optimizer, self.name = optimizer, type(optimizer).__name__
        self._quiet = False

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups."""
        return self.optimizer.param_groups

    def parameters(self) -> list[Tensor]:
        """Those that it holds."""
        return [p for group in self.groups for p in group["params"]]

    def tensors(self) -> list[Tensor]:
        """Parameters and state."""
        return [*(p.detach() for p in self.parameters()), *self.state()]

    def state(self) -> list[Tensor]:
        """What it has made of their gradients."""
        states = self.optimizer.state.values()
        return [each for state in states for each in state.values() if isinstance(each, Tensor)]

    def refuse_unfit(self, own: Mapping[str, Tensor]) -> None:
        """Raise unless it holds all parameters of a model that want gradients, and no others."""
        held = set(self.parameters())
        for path, p in own.items():
            if p.requires_grad and p not in held:
                raise ValueError(
                    f"{self.name} does not hold {path!r}: build it from the parameters() of what "
                    "variational() gave, or freeze that parameter"
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
        """A step, if a flag on the device lets it; without one it is taken."""
        optimizer = self.optimizer
        if ok is None:
            with warnings.catch_warnings() if self._quiet else nullcontext():
                if self._quiet:  # said once, of steps that come before a capture or between two
                    warnings.filterwarnings("ignore", message="This instance was constructed with capturable")
                optimizer.step()
        elif all(group.get("fused") for group in self.groups):
            # What tells fused kernels of a GradScaler's bad step; they leave state and parameters alone then.
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
        """Let its steps be captured, or say why they cannot be."""
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
                "fused=True if it has either"
            )

    def captures(self) -> bool:
        """Whether it reads its numbers on the device."""
        return all(group.get("capturable") or group.get("fused") for group in self.groups)

    def settings(self) -> tuple[object, ...]:
        """What a graph of its steps has fixed."""
        return settings(self.groups, _UNREAD)
