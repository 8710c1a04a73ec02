"""Scales from a normalising flow: multiplicative normalising flows (MNF).

Louizos, Welling: "Multiplicative Normalizing Flows for Variational Bayesian Neural Networks", ICML 2017;
Kochurov et al.: "Bayesian Incremental Learning for Deep Neural Networks", 2018. Given scales z, weights are
independent, N(z · μ, σ²), and z = NF(z0). A step of the flow, with a fixed mask m:

    h = tanh(W (m ⊙ z) + b),  t = W_t h + b_t,  g = sigmoid(W_g h + b_g)
    z ← m ⊙ z + (1 − m) ⊙ (g ⊙ z + (1 − g) ⊙ t),  log|det| = Σ (1 − m) log g

| papers | here |
|---|---|
| q(z0) | independent normals, whose means ``Flow.centre`` and stds are learned |
| NF, NF_r | ``Flow.steps``, ``Auxiliary.steps`` |
| r(z given w), N(μ̃(w), σ̃²(w)) at NF_r(z), times its determinant | :class:`Auxiliary` |
| a = cᵀ w, averaged over the weights of a scale | ``a`` |
| μ̃ = b1 · a, log σ̃⁻² = b2 · a | ``mean + b1 · a``, ``precision + b2 · tanh(a)`` |
| z per kernel (Kochurov), per output map or input (Louizos) | ``mnf(conv=…, dense=…)`` |

Deviations: masks are drawn once and saved, a random half of the scales and then the other half. (Redrawn
ones, as in the authors' code, give no density that could be a prior.) z and t start around 1, so that E[w]
starts at μ. μ̃ and log σ̃⁻² have constants, so that r starts near q(z), and there is no tanh in ``a``. σ starts
at the std that all families get. Biases are not multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, softplus

from posterity.posterior.algebra import full_precision
from posterity.posterior.diagonal import DiagonalGaussian, inverse_softplus
from posterity.posterior.flows import Flows, auxiliary_logs, base_logs, gated, through
from posterity.posterior.leaf import Leaf
from posterity.posterior.scaled import Conv, Dense, ScaledGaussian, Scales, scale_shape

_GATE = 2.0  # the bias of g at the start: a step then changes little
_NARROW = 9  # up to 2⁹ scales are padded to the most that a layer of them has
_SMALL = 0.01  # std of the last layers' weights at the start


def mnf(
    mean: Tensor,
    std: float,
    *,
    conv: Conv = "output",
    dense: Dense = "input",
    steps: int = 2,
    hidden: int = 50,
    z_std: float = 0.1**0.5,
) -> Leaf:
    """The family MNF: weights with scales from a flow; biases and other vectors are diagonal.

    Args:
        mean: Means of the parameter.
        std: Standard deviations of its weights given the scales, at the start.
        conv: What has its own scale in a convolution, which is any weight with three or more dimensions: an
            output map (the weight's first dimension), an input map (its second), or a kernel (one pair of
            both). Flows grow with the number of scales.
        dense: What has its own scale in a matrix: an input or an output.
        steps: Number of steps of the flow, and of that of r.
        hidden: Units in each step; r has twice as many.
        z_std: Std of the scales at the start, about 1.

    Example:
        >>> from functools import partial
        >>> from posterity import variational
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        >>> q = variational(net, family=partial(mnf, conv="kernel")).posterior
        >>> [leaf.noise_shapes["z"] for leaf in q.blocks.values() if isinstance(leaf, ScaledGaussian)]
        [torch.Size([4, 1, 1, 1]), torch.Size([1, 16])]
    """
    if mean.dim() < 2:
        return DiagonalGaussian(mean, std)
    flow = Flow(scale_shape(mean, conv, dense), steps=steps, hidden=hidden, like=mean).start(z_std)
    return ScaledGaussian(mean, std, flow)


@final
class Step(nn.Module):
    """One step of a RealNVP flow with gates, on vectors ``[n, size]``; a mask chooses what stays.

    Example:
        >>> step = Step(2, hidden=5, like=torch.zeros(())).start(torch.tensor([True, False]))
        >>> z, log_det = step(torch.randn(3, 2))
        >>> step.inverse(z)[0].shape, log_det.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """

    mask: Tensor
    inner: Tensor
    inner_bias: Tensor
    shift: Tensor
    shift_bias: Tensor
    gate: Tensor
    gate_bias: Tensor

    def __init__(self, size: int, hidden: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(size, dtype=torch.bool, device=like.device))
        # All zero: what is loaded next must not advance torch's generator.
        for name, shape in (("inner", (hidden, size)), ("shift", (size, hidden)), ("gate", (size, hidden))):
            setattr(self, name, nn.Parameter(like.detach().new_zeros(shape)))
            setattr(self, f"{name}_bias", nn.Parameter(like.detach().new_zeros(shape[0])))

    @torch.no_grad()
    def start(self, mask: Tensor) -> Self:
        """Set a mask, and draw weights with which the step changes little, and almost nothing at z = 1."""
        self.mask.copy_(mask)
        bound = len(mask) ** -0.5
        for each in (self.inner, self.inner_bias):
            nn.init.uniform_(each, -bound, bound)
        for each in (self.shift, self.gate):
            nn.init.normal_(each, std=_SMALL)
        nn.init.constant_(self.shift_bias, 1.0)
        nn.init.constant_(self.gate_bias, _GATE)
        return self

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The next z and the log-determinant ``[n]``."""
        raw, shift = self._parts(z)
        z, log_gate = gated(z, raw.masked_fill(self.mask, math.inf), shift)
        return z, log_gate.sum(-1)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The z before, and the log-determinant ``[n]`` of the step from there."""
        raw, shift = self._parts(z)  # of what the mask keeps, which is as it was
        gate = torch.sigmoid(raw)
        before = (z - (1.0 - gate) * shift) / gate
        return torch.where(self.mask, z, before), logsigmoid(raw).masked_fill(self.mask, 0.0).sum(-1)

    def numbers(self) -> list[Tensor]:
        """All parameters."""
        return [self.inner, self.inner_bias, self.gate, self.gate_bias, self.shift, self.shift_bias]

    def _parts(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """What gates are made of, and shifts."""
        hidden = torch.tanh(linear(z.masked_fill(~self.mask, 0.0), self.inner, self.inner_bias))
        return linear(hidden, self.gate, self.gate_bias), linear(hidden, self.shift, self.shift_bias)


@final
class Auxiliary(nn.Module):
    """The density r(z | w) of the bound, for scales of some shape and weights that it broadcasts to.

    Example:
        >>> r = Auxiliary(torch.Size([4, 1]), steps=2, hidden=5, like=torch.zeros(())).start(0.3)
        >>> r.log_prob(torch.ones(3, 4, 1), torch.zeros(3, 4, 2)).shape
        torch.Size([3])
    """

    c: Tensor
    mean: Tensor
    b1: Tensor
    precision: Tensor
    b2: Tensor

    def __init__(self, shape: torch.Size, *, steps: int, hidden: int, like: Tensor) -> None:
        super().__init__()
        self.shape, self.hidden = shape, hidden
        self.steps = _steps(shape.numel(), steps, hidden, like)
        for name in ("c", "mean", "b1", "precision", "b2"):
            setattr(self, name, nn.Parameter(like.detach().new_zeros(shape.numel())))

    @torch.no_grad()
    def start(self, z_std: float) -> Self:
        """Begin near independent normals around 1."""
        _start(self.steps)
        for each in (self.c, self.b1, self.b2):
            nn.init.normal_(each, std=_SMALL)
        nn.init.constant_(self.mean, 1.0)
        nn.init.constant_(self.precision, -2.0 * math.log(z_std))
        return self

    def log_prob(self, z: Tensor, weights: Tensor) -> Tensor:
        """log r(z | w), ``[n]``."""
        z, log_det = through(self.steps, z.flatten(1))
        products = (weights * self.c.reshape(self.shape)).flatten(1)
        a = products.sum(1, keepdim=True) * (len(self.c) / products.shape[1])
        logs = auxiliary_logs(z, a, self.mean, self.b1, self.precision, self.b2)
        return logs.sum(-1) + log_det


@final
class Flow(Scales):
    """Scales z = NF(z0), z0 independent normals, with an auxiliary density r(z | w) for the bound.

    Its weights are not initialised: :meth:`start` draws them from torch's generator.

    Args:
        shape: Of z.
        steps: Of the flow, and of r's.
        hidden: Units of each step; r has twice as many.
        like: A tensor of the right dtype and device.

    Example:
        >>> flow = Flow(torch.Size([4, 1]), steps=2, hidden=5, like=torch.zeros(())).start()
        >>> z, log_q = flow.draw(torch.randn(3, 4, 1))
        >>> bool(torch.allclose(flow.log_prob(z), log_q, atol=1e-5))
        True
    """

    def __init__(self, shape: torch.Size, *, steps: int, hidden: int, like: Tensor) -> None:
        super().__init__(shape)
        if steps < 0 or hidden < 1:
            raise ValueError(f"steps must be 0 or more and hidden 1 or more, not {steps} and {hidden}")
        self.hidden = hidden
        self.centre = nn.Parameter(like.detach().new_zeros(shape.numel()))
        self.raw = nn.Parameter(like.detach().new_zeros(shape.numel()))  # std of z0 is softplus(raw)
        self.steps = _steps(shape.numel(), steps, hidden, like)
        self.auxiliary = Auxiliary(shape, steps=steps, hidden=2 * hidden, like=like)

    @property
    def kind(self) -> object:
        """Steps and hidden units, and sizes such that padding stays small, at most as large as the data."""
        return len(self.steps), self.hidden, max(_NARROW, (self.shape.numel() - 1).bit_length())

    @classmethod
    def end_to_end(cls, scales: Sequence[Self], shapes: Sequence[torch.Size]) -> Scales:
        """Flows side by side."""
        return Flows(scales, shapes)

    def numbers(self) -> list[Tensor]:
        """All parameters, in the order of :mod:`posterity.posterior.flows`."""
        r = self.auxiliary
        own = [self.centre, self.raw, r.c, r.mean, r.b1, r.precision, r.b2]
        steps = cast("list[Step]", [*self.steps, *r.steps])
        return own + [each for step in steps for each in step.numbers()]

    @torch.no_grad()
    def start(self, z_std: float = 0.1**0.5) -> Self:
        """Draw masks and weights, with scales around 1."""
        if not 0.0 < z_std < math.inf:
            raise ValueError(f"z_std must be finite and greater than 0, not {z_std}")
        nn.init.constant_(self.centre, 1.0)
        self.raw.copy_(inverse_softplus(torch.full_like(self.raw, z_std)))
        _start(self.steps)
        self.auxiliary.start(z_std)
        return self

    @full_precision
    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, *shape]`` from as many standard normals, and log q(z) ``[n]`` of each."""
        eps = noise.flatten(1)
        z, log_det = through(self.steps, torch.addcmul(self.centre, softplus(self.raw), eps))
        return z.reshape(noise.shape), self._base(eps) - log_det

    @full_precision
    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z), ``[n]``, by the inverse of the flow."""
        z, log_det = z.flatten(1), z.new_zeros(len(z))
        for step in reversed(list(self.steps)):
            z, change = cast(Step, step).inverse(z)
            log_det = log_det + change
        return self._base((z - self.centre) / softplus(self.raw)) - log_det

    @full_precision
    def log_auxiliary(self, z: Tensor, weights: Tensor) -> Tensor:
        """log r(z | w), ``[n]``."""
        return self.auxiliary.log_prob(z, weights)

    def config(self) -> dict[str, Any]:
        """Steps and hidden units."""
        return {"steps": len(self.steps), "hidden": self.hidden}

    def _base(self, eps: Tensor) -> Tensor:
        return base_logs(eps, softplus(self.raw)).sum(-1)


def _steps(size: int, steps: int, hidden: int, like: Tensor) -> nn.ModuleList:
    return nn.ModuleList([Step(size, hidden, like) for _ in range(steps)])


def _start(steps: nn.ModuleList) -> None:
    """Every two steps move all scales: a random half, then the other half."""
    for number, step in enumerate(cast("list[Step]", list(steps))):
        if number % 2 == 0:
            half = torch.randperm(len(step.mask)) < len(step.mask) // 2
        step.start(half if number % 2 == 0 else ~half)
