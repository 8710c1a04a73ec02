"""K-FAC and Noisy K-FAC: natural gradients with Kronecker-factored curvature, at means or sampled weights.

Martens, Grosse: "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015;
Grosse, Martens: "A Kronecker-factored Approximate Fisher Matrix for Convolution Layers", ICML 2016; Zhang,
Sun, Duvenaud, Grosse: "Noisy Natural Gradient as Variational Inference", ICML 2018. A block is a layer's
weight and bias, [W | b], ``[O, I + 1]``. Let a be the layer's inputs (and a 1 for the bias) and g the
per-example gradients of its outputs, both at weights drawn from the posterior:

    A = E[Σ_t a aᵀ],  S = E[Σ_t g gᵀ] / T        over examples and weight samples, T positions in an image
    Ā ← β2 Ā + (1−β2) A,  S̄ ← β2 S̄ + (1−β2) S     every ``factors_every`` steps, starting at A and S
    A_γ = Ā + π√γ I,  S_γ = S̄ + √γ/π I,  π² = (tr Ā / (I+1)) / (tr S̄ / O)
    m ← β1 m + (G + δ̃ M)                          G the gradient of the mean loss
    M ← M − α S_γ⁻¹ m A_γ⁻¹
    W ~ MN(M, S_γ⁻¹, τ/N A_γ⁻¹)                   covariance among rows, among columns

A draw is M + sqrt(τ/N) R E Cᵀ with R Rᵀ = S_γ⁻¹, C Cᵀ = A_γ⁻¹ and E the noise of the weight and of the bias
side by side, each with its own name as its noise address.

| papers | here | |
|---|---|---|
| M | the model's parameters | |
| m | ``state[p]["momentum"]`` | of the weight and of the bias |
| Ā, S̄ | ``state[p]["inputs"]``, ``state[p]["outputs"]`` | p the weight |
| Cholesky factors of A_γ⁻¹, S_γ⁻¹ | ``state[p]["columns"]``, ``state[p]["rows"]`` | lower |
| α, β1 | ``lr · lr_unit``, ``betas[0]`` | m is a sum of gradients: the effective rate is α / (1 − β1) |
| 1 − β2, the weight of new factors | ``1 − betas[1]`` | |
| N, λ | ``num_data · augmentation``, ``temperature`` (τ) | |
| prior variance η | ``1 / prior_precision`` (δ) | |
| intrinsic damping λ/(Nη) | δ̃ = ``temperature · prior_precision / N`` | |
| extrinsic damping γ_ex | ``damping``; γ = δ̃ + γ_ex | |
| T_stats, T_inv | ``factors_every``, ``inverses_every`` | |

K-FAC is the limit without noise: it takes gradients and factors at M, and its Gaussian is fitted, but not
used in training. A parameter without factors (norms, embeddings, convolutions in groups) follows the rule of
VOGN, with per-example squared gradients from the same steps as the factors. A weight whose layer has not
reported factors yet also follows it, with the curvature ``hess_init``: the first step draws independent
weights.

**Which Fisher.** The factors are those of the loss's own gradients, the empirical Fisher, as in VOGN: they
cost no second backward pass, and vanish with the residuals as the model fits its data.

**Deviations.** Damping is part of the posterior's precision, as in VOGN, so that one inverse serves both; the
paper's Noisy K-FAC draws with γ = δ̃. The decay is δ̃ M; the paper has δ̃ W at the sampled weights, whose
mean is δ̃ M. Instead of a trust region from a quadratic model, a block's step, which falls with its updates,
is shortened until its root mean square is at most ``max_step`` stds without data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Unpack, final

import torch
from torch import Tensor

from posterity.curvature import Factors
from posterity.optim.apply import furthest, settled
from posterity.optim.entries import constructor
from posterity.optim.groups import Params, whole
from posterity.optim.matrices import Moving, Refused
from posterity.optim.state import Group, State
from posterity.optim.statistics import Statistics
from posterity.optim.step import due
from posterity.optim.vogn import GaussNewton, Settings, scales
from posterity.posterior import EigenGaussian, Leaf, MatrixGaussian
from posterity.posterior.algebra import SINGULAR, full_precision, inverse_cholesky, shares, solved
from posterity.torch_private import foreach_add_, foreach_mul, foreach_mul_, foreach_sub

# Inverses use double precision, which is slow on most GPUs, only if damping is less than this fraction of a
# factor's diagonal: at that limit single precision keeps two to four digits, more than one batch gives.
_LEAST = 1e-3


def inverse_roots(
    factors: Mapping[int, tuple[Tensor, Tensor, float]],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Lower R, C with R Rᵀ = S_γ⁻¹ and C Cᵀ = A_γ⁻¹, given S̄, Ā and γ of blocks by number.

    This waits for a GPU once, before the work: blocks with enough damping have an inverse, and are not
    checked.
    """
    if not factors:
        return {}
    matrices = [each for outputs, inputs, _ in factors.values() for each in (outputs, inputs)]
    device, diagonals = matrices[0].device, [each.diagonal() for each in matrices]
    means = torch.stack([each.mean().to(device) for each in diagonals]).view(-1, 2)
    low, high = (
        torch.stack([each.to(device) for each in ends])
        for ends in zip(*(each.aminmax() for each in diagonals), strict=True)
    )
    # Rounding may have made eigenvalues of a singular factor negative, though not by more of the trace.
    known = [
        [math.sqrt(damping), *(torch.finfo(each.dtype).eps * len(each) for each in pair)]
        for *pair, damping in factors.values()
    ]
    roots, *rounding = torch.tensor(known, dtype=means.dtype).to(device).unbind(1)
    shifts = torch.stack(shares(means[:, 0], means[:, 1], roots), 1)
    shifts = (shifts + torch.stack(rounding, 1) * (means + shifts)).flatten()
    plain = ((low >= 0) & (shifts >= _LEAST * high)).tolist()
    chosen = [each if fine else each.double() for each, fine in zip(matrices, plain, strict=True)]
    found, failed = inverse_cholesky(chosen, shifts)
    if not all(plain) and bool(failed.any()):
        raise Refused(SINGULAR, list(factors)[failed.tolist().index(True) // 2])
    found = [root.to(each) for root, each in zip(found, matrices, strict=True)]
    return dict(zip(factors, zip(found[::2], found[1::2], strict=True), strict=True))


def undamped(rows: Tensor, columns: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The S̄, Ā with S_γ = (rows rowsᵀ)⁻¹ and A_γ = (columns columnsᵀ)⁻¹, or the nearest possible ones.

    tr A_γ / (I+1) = π (√(tr Ā/(I+1) · tr S̄/O) + √γ), and that of S_γ is the same divided by π: their
    ratio is π², both before and after damping. Eigenvalues of S_γ or A_γ below the damping become 0.
    """
    found = []
    for root in (rows.double(), columns.double()):
        inverse = solved(root, torch.eye(len(root), dtype=root.dtype, device=root.device), 0)
        found.append(torch.linalg.eigh(inverse.mT @ inverse))
    pi = (found[1][0].mean() / found[0][0].mean()).sqrt()
    shifts = math.sqrt(damping) / pi, math.sqrt(damping) * pi
    outputs, inputs = (
        (vectors * (values - shift).clamp(min=0.0)) @ vectors.mT
        for (values, vectors), shift in zip(found, shifts, strict=True)
    )
    return outputs, inputs


class KroneckerNewton(GaussNewton):
    """The rule of K-FAC and Noisy K-FAC, which differ in where they take gradients."""

    collects = Factors
    matrices = ("inputs", "outputs", "rows", "columns")
    table = "NoisyKFAC"

    @constructor
    def __init__(
        self,
        params: Params,
        *,
        num_data: int,
        factors_every: int | None = None,
        inverses_every: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        every = {"factors_every": factors_every, "inverses_every": inverses_every}
        super().__init__(params, num_data=num_data, **settings, _more=every)

    def check(self, group: Group) -> None:
        """Refuse values for which the rule is undefined."""
        super().check(group)
        whole(group, "factors_every")
        if group["inverses_every"] is not None:
            whole(group, "inverses_every")

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """Factors whose inverses are a matrix Gaussian's; for a diagonal Gaussian, curvature as for VOGN."""
        leaf = leaf.product() if isinstance(leaf, EigenGaussian) else leaf
        if not isinstance(leaf, MatrixGaussian):
            return super().adopt(leaf, mean, std, group)
        _, _, shift = scales(group)
        rows = leaf.rows.to(mean) / _spread(group)
        columns = leaf.columns.to(mean)
        outputs, inputs = undamped(rows, columns, shift)
        state = {"inputs": inputs.to(mean), "outputs": outputs.to(mean), "rows": rows, "columns": columns}
        hess = torch.outer(state["outputs"].diagonal(), state["inputs"].diagonal())
        return {"momentum": torch.zeros_like(mean), "hess": hess, **state}

    @full_precision
    def perturb(self, state: State, noise: Tensor, group: Group) -> Tensor:
        """sqrt(τ/N) · R E Cᵀ."""
        rows, columns = (_spread(group) * state["rows"]).to(noise), state["columns"].to(noise)
        return torch.bmm(rows.expand(len(noise), -1, -1), noise @ columns.mT)

    def leaf(self, mean: Sequence[Tensor], state: State, keep: Tensor | None, group: Group) -> Leaf:
        """MN(M, S_γ⁻¹, τ/N A_γ⁻¹)."""
        if "rows" not in state:
            return super().leaf(mean, state, keep, group)
        return MatrixGaussian(mean, _spread(group) * state["rows"], state["columns"], keep=keep)

    def captures(self) -> bool:
        """Whether the next step collects no factors and computes no inverses, whose failure must raise."""
        return not (due(self.param_groups[0]) or any(map(_inverts, self.param_groups)))

    def updates(self, blocks: Sequence[Moving]) -> list[tuple[Tensor, State]]:
        """Update the averages of factors, their inverses where these are due, and step by both."""
        news = [self.averages(state, stats, group) for _, state, stats, group in blocks]
        stale = {
            i: (new["outputs"], new["inputs"], scales(group)[2])
            for i, (new, (*_, group)) in enumerate(zip(news, blocks, strict=True))
            if "rows" not in new or _inverts(group)
        }
        for i, (rows, columns) in inverse_roots(stale).items():
            news[i] |= {"rows": rows, "columns": columns}
        moved: list[Tensor] = []
        for _, alike in groupby(zip(blocks, news, strict=True), key=lambda pair: id(pair[0][3])):
            moved += self._steps(*zip(*alike, strict=True))
        return list(zip(moved, news, strict=True))

    @full_precision
    def _steps(self, blocks: Sequence[Moving], news: Sequence[State]) -> Sequence[Tensor]:
        """m ← β1 m + (G + δ̃ M), M ← M − α S_γ⁻¹ m A_γ⁻¹ for blocks of one group: the new M."""
        group = blocks[0][3]
        _, decay, _ = scales(group)
        rate = group["lr"] * group["lr_unit"]
        into, out = (rate, 1.0) if group["keep_velocity"] else (1.0, rate)
        means = [mean for mean, *_ in blocks]
        momenta = foreach_mul(means, _number(decay, means))
        foreach_add_(momenta, [stats.grad for *_, stats, _ in blocks])
        foreach_mul_(momenta, _number(into, means))
        foreach_add_(momenta, [state["momentum"] for _, state, *_ in blocks], alpha=group["betas"][0])
        natural = []
        for momentum, new, (*_, stats, _) in zip(momenta, news, blocks, strict=True):
            rows, columns = new["rows"], new["columns"]
            new["momentum"] = momentum
            step = rows @ (rows.mT @ momentum @ columns) @ columns.mT
            if group["max_step"] < math.inf:
                most = furthest(group, stats.step) * self.scale({}, group) * step.numel() ** 0.5
                step = settled(group, stats.step) * step
                length = out * torch.linalg.vector_norm(step)
                step = step * (most / length).clamp(max=1.0).nan_to_num(1.0)
            natural.append(step)
        foreach_mul_(natural, _number(out, means))
        return foreach_sub(means, natural)

    def averages(self, state: State, stats: Statistics, group: Group) -> State:
        """Ā ← β2 Ā + (1−β2) A and S̄ likewise, in a step with factors; otherwise the unchanged matrices."""
        new = {key: state[key].to(stats.grad) for key in self.matrices if key in state}
        if stats.factors is None:
            return new
        for key, factor in (("inputs", stats.factors.A), ("outputs", stats.factors.S)):
            factor = factor.to(stats.grad)
            new[key] = torch.lerp(new[key], factor, 1 - group["betas"][1]) if key in new else factor
        # Each weight's own curvature, for reports of its rate.
        new["hess"] = torch.outer(new["outputs"].diagonal(), new["inputs"].diagonal())
        return new

    def curvature(self, state: State, stats: Statistics, group: Group) -> State:
        """VOGN's curvature, of parameters without factors, in steps with squares."""
        return super().curvature(state, stats, group) if len(stats.squares) else {"hess": state["hess"]}


@final
class NoisyKFAC(KroneckerNewton):
    """Noisy K-FAC: a matrix Gaussian for every layer, learned from natural gradients at sampled weights.

    For every mini-batch: draw ``mc_samples`` weight matrices, average the gradient and the Kronecker factors
    of the layers' inputs and gradients, then step by the gradient times the inverse factors, which are also
    the posterior's covariance. Weights must be used by layers with per-example gradients, as for
    :class:`VOGN`. ``compile_step`` runs all samples at once; on a GPU, steps without factors are CUDA graphs.

    Settings are as for :class:`VOGN`, with other presets (``presets.toml``). ``"osawa2019"`` has those of
    "Practical Deep Learning with Bayesian Principles" for AlexNet on CIFAR-10. The paper also divides lr by
    ten after 30 and 50 of 81 epochs, sets ``prior_precision=0.5``, and raises the temperature from 0.01 to 1
    over 15,821 steps: ``posterity.warmup(15821, start=0.01)``.

    Args:
        params: A module, or what torch.optim takes.
        num_data: Training examples (N).
        factors_every: Steps from one collection of factors to the next: 50. Other steps cost as much as a
            gradient.
        inverses_every: The same for their inverses; by default, whenever factors are collected.
        settings: All other arguments of :class:`VOGN`. ``damping`` is split between the factors of a block,
            ``betas`` are (0.9, 0.8), the second applied once in ``factors_every`` steps, and ``max_step``
            bounds the root mean square of a block's step.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = NoisyKFAC(model, num_data=8, lr=0.01, mc_samples=3)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> for _ in range(3):
        ...     loss = opt.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> q = opt.posterior()
        >>> list(q.blocks), q.sample(5)["weight"].shape
        (['weight+bias'], torch.Size([5, 2, 4]))
    """


@final
class KFAC(KroneckerNewton):
    """K-FAC: Noisy K-FAC with gradients and factors at the means, for point estimates with a Gaussian around.

    As in a Kronecker-factored Laplace approximation, the final posterior's precision comes from factors at
    the means; training draws no weights.

    It takes the same arguments as :class:`NoisyKFAC`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = KFAC(model, num_data=8, lr=0.01, factors_every=10)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> with opt.sampled_params():
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> opt.state[model.weight]["inputs"].shape
        torch.Size([5, 5])
    """

    draws = False


def _spread(group: Group) -> Any:
    """sqrt(τ/N)."""
    return (group["temperature"] / scales(group)[0]) ** 0.5


def _inverts(group: Group) -> bool:
    """Whether the next step computes the inverses of a group's blocks."""
    return bool(group["steps"] % (group["inverses_every"] or group["factors_every"]) == 0)


def _number(value: Any, like: Sequence[Tensor]) -> Any:
    """A factor for some tensors: in a captured step, a single-precision tensor cast to their dtype."""
    return value.to(like[0]) if isinstance(value, Tensor) else value
