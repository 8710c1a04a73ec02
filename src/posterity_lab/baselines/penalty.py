"""L2, EWC and SI: a quadratic penalty that pulls towards the weights at the last boundary.

    penalty = strength · Σ importance · (θ − anchor)²

They differ only in how they compute the importance of a weight at the end of a task:

| method | paper | importance | the paper's strength |
|---|---|---|---|
| L2 | Kirkpatrick et al. 2017, as a baseline | 1 | strength |
| online EWC | Kirkpatrick et al. 2017, Schwarz et al. 2018 | F ← γ F + the task's diagonal Fisher | λ / 2 |
| SI | Zenke et al. 2017 | Ω ← Ω + ω / (Δ² + ξ), ω = −Σ gradient · step along the path, Δ the net change | c |

The Fisher is a mean over examples. SI's gradient is that of the task's own loss, without the penalty. The
penalty's gradient is added explicitly, and reported losses do not include its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from posterity_lab.data import Split
from posterity_lab.streams import Mask, restricted

Tensors: TypeAlias = tuple[Tensor, ...]

# Per-example gradients in memory at once.
_CHUNK = 64


class Importance(ABC):
    """A rule for the importance of weights. Its work in a step must not wait for a GPU."""

    def before_step(self, params: Tensors, grads: Tensors) -> None:  # noqa: B027 (few rules need it)
        """Record the weights and the gradients of the task's own loss."""

    def after_step(self, params: Tensors, bad: Tensor) -> None:  # noqa: B027 (few rules need it)
        """Record the weights after the step; ``bad`` is 1 if the step was not taken."""

    @abstractmethod
    def renew(self, old: Tensors, params: Tensors, anchor: Tensors, data: Split) -> Tensors:
        """The importance at the end of a task that started at ``anchor`` and had ``data``."""

    def tensors(self) -> Tensors:
        """The values accumulated since the last boundary."""
        return ()


@final
class Penalty:
    """The quadratic penalty; its tensors keep their addresses, so that a CUDA graph can use them."""

    def __init__(self, params: Tensors, strength: float, rule: Importance) -> None:
        if not strength >= 0:
            raise ValueError(f"strength must be at least 0, not {strength:g}")
        self.params, self.strength, self.rule = params, strength, rule
        self.anchor = tuple(p.detach().clone() for p in params)
        self.importance = tuple(torch.zeros_like(p) for p in self.anchor)

    @torch.no_grad()
    def pulled(self, grads: Tensors) -> Tensors:
        """The gradients plus those of the penalty."""
        self.rule.before_step(self.params, grads)
        away = torch._foreach_sub(self.params, self.anchor)
        return torch._foreach_addcmul(grads, self.importance, away, value=2 * self.strength)

    @torch.no_grad()
    def renew(self, data: Split) -> None:
        """Make the current weights the new anchor."""
        new = self.rule.renew(self.importance, self.params, self.anchor, data)
        torch._foreach_copy_(self.importance, new)
        torch._foreach_copy_(self.anchor, self.params)

    def state_dict(self) -> dict[str, Any]:
        """Importance, anchor, and the rule's accumulated values."""
        return {"importance": self.importance, "anchor": self.anchor, "gathered": self.rule.tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for mine, key in (
            (self.importance, "importance"),
            (self.anchor, "anchor"),
            (self.rule.tensors(), "gathered"),
        ):
            for tensor, value in zip(mine, state[key], strict=True):
                tensor.copy_(value)


def equal() -> Importance:
    """L2: after the first task, every weight has the same importance."""
    return _Equal()


def by_fisher(
    model: nn.Module, decay: float, labels: Literal["model", "data"], examples: int, mask: Mask | None
) -> Importance:
    """Online EWC: the importance from earlier tasks times ``decay``, plus the diagonal Fisher."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must lie in 0 … 1, not {decay:g}")
    if examples < 1:
        raise ValueError(f"examples must be at least 1, not {examples}")
    _check_labels(labels)
    return _Fisher(decay, partial(fisher, model, labels=labels, examples=examples, mask=mask))


def by_path(params: Tensors, damping: float) -> Importance:
    """SI: by how much a weight lowered the loss along the path, over the square of its total change."""
    if not damping > 0:
        raise ValueError(f"damping must be greater than 0, not {damping:g}")
    return _Path(params, damping)


@final
class _Equal(Importance):
    def renew(self, old: Tensors, params: Tensors, anchor: Tensors, data: Split) -> Tensors:
        return tuple(torch.ones_like(p) for p in old)


@final
class _Fisher(Importance):
    def __init__(self, decay: float, measure: Callable[[Split], dict[str, Tensor]]) -> None:
        self._decay, self._measure = decay, measure

    def renew(self, old: Tensors, params: Tensors, anchor: Tensors, data: Split) -> Tensors:
        new = self._measure(data)
        return tuple(self._decay * before + now for before, now in zip(old, new.values(), strict=True))


@final
class _Path(Importance):
    def __init__(self, params: Tensors, damping: float) -> None:
        self._damping = damping
        self._path, self._start, self._grads = (tuple(torch.zeros_like(p) for p in params) for _ in range(3))

    def before_step(self, params: Tensors, grads: Tensors) -> None:
        torch._foreach_copy_(self._start, params)
        torch._foreach_copy_(self._grads, grads)

    @torch.no_grad()
    def after_step(self, params: Tensors, bad: Tensor) -> None:
        gain = torch._foreach_mul(self._grads, torch._foreach_sub(self._start, params))
        # A non-finite loss has non-finite gradients, which a factor of 0 would not remove.
        torch._foreach_add_(self._path, [torch.where(bad > 0, 0.0, each) for each in gain])

    def renew(self, old: Tensors, params: Tensors, anchor: Tensors, data: Split) -> Tensors:
        new = tuple(
            importance + path / ((p - begin).square() + self._damping)
            for importance, path, p, begin in zip(old, self._path, params, anchor, strict=True)
        )
        torch._foreach_zero_(self._path)
        return new

    def tensors(self) -> Tensors:
        return self._path


def fisher(
    model: nn.Module,
    data: Split,
    *,
    labels: Literal["model", "data"] = "model",
    examples: int | None = None,
    mask: Mask | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Diagonal Fisher: the mean over examples of the squared gradient of the log-likelihood, by parameter.

    Args:
        model: A classifier; it runs in evaluation mode.
        data: The data to use.
        labels: ``"model"`` draws a label from the model's own prediction for every input (the Fisher);
            ``"data"`` uses the given labels (the empirical Fisher).
        examples: Number of random examples; all if not given.
        mask: Which logits count.
        seed: Seed of the choice of examples and of drawn labels.

    Example:
        >>> data = Split(torch.eye(2), torch.tensor([0, 1]))
        >>> fisher(nn.Linear(2, 2), data, labels="data")["weight"].shape
        torch.Size([2, 2])
    """
    _check_labels(labels)
    generator = torch.Generator().manual_seed(seed)
    chosen = data.subset(torch.randperm(len(data), generator=generator)[:examples])
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in params.items()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
        return cross_entropy(restricted(functional_call(model, params, (x[None],)), allowed), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))
    # From all examples, not from a chunk, to include all labels of the task.
    allowed = None if mask is None else mask(chosen.y).expand(len(chosen), -1)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for start in range(0, len(chosen), _CHUNK):
            rows = slice(start, start + _CHUNK)
            x, y = chosen.x[rows], chosen.y[rows]
            with torch.no_grad():
                logits = model(x)
            kept = torch.ones_like(logits, dtype=torch.bool) if allowed is None else allowed[rows]
            if labels == "model":
                # The smallest of exponential waiting times whose rates are the probabilities.
                noise = torch.empty(logits.shape).exponential_(generator=generator).to(logits)
                y = (restricted(logits, kept).softmax(-1) / noise).argmax(-1)
            for name, each in gradients(params, x, y, kept).items():
                total[name] += each.square().sum(0)
    finally:
        for module in training:
            module.training = True
    return {name: each / len(chosen) for name, each in total.items()}


def _check_labels(labels: str) -> None:
    if labels not in ("model", "data"):
        raise ValueError(f"labels must be 'model' or 'data', not {labels!r}")
