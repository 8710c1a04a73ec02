"""Pruning of weights by a posterior.

Every way of pruning is a score per weight and a limit: ``snr`` for a posterior (Zeno et al. 2018, section
3.4; Blundell et al. 2015), ``magnitude`` for the weights of a plain net, which ``point_mass`` turns into a
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from posterity.arguments import FILTER, FUNCTION, MODULE, NUMBER, TEXT, described, instance, is_dense, takes
from posterity.names import NameFilter, select
from posterity.posterior import DiagonalGaussian, Factorised

Score: TypeAlias = Callable[[Factorised], Mapping[str, Tensor]]
Scope: TypeAlias = Literal["global", "layer"]
Groups: TypeAlias = Literal["outputs", "inputs"]
_POSTERIOR = instance("a Factorised posterior", Factorised)


@takes(posterior=_POSTERIOR)
def snr(posterior: Factorised) -> dict[str, Tensor]:
    """Signal-to-noise ratio |mean| / std of every weight; pruned weights have 0.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> snr(Factorised({"w": DiagonalGaussian(torch.tensor([1.0, -3.0]), 0.5)}))["w"]
        tensor([2., 6.])
    """
    ratios, stds = {}, posterior.std()
    for name, mean in magnitude(posterior).items():
        std = stds[name].detach()
        # A weight with std 0 has an infinite ratio, unless its mean is 0 too.
        ratios[name] = torch.where(std > 0, mean / std, torch.where(mean > 0, torch.inf, 0.0).to(mean))
    return ratios


@takes(posterior=_POSTERIOR)
def magnitude(posterior: Factorised) -> dict[str, Tensor]:
    """|mean| of every weight: the usual score if uncertainties are unknown.

    Example:
        >>> magnitude(point_mass(nn.Linear(3, 2)))["weight"].shape
        torch.Size([2, 3])
    """
    return {name: mean.detach().abs() for name, mean in posterior.mean().items()}


@takes(model=MODULE)
def point_mass(model: nn.Module) -> Factorised:
    """The weights of a plain net (trained by SGD, Adam, …) as a posterior with std 0.

    The net then works wherever a posterior does: ``prune``, ``predict``, saving.

    Example:
        >>> small = prune(point_mass(nn.Linear(10, 10)), 0.5)
        >>> int((small.mean()["weight"] == 0).sum() + (small.mean()["bias"] == 0).sum())
        55
    """
    return Factorised({name: DiagonalGaussian(p.detach(), 0.0) for name, p in model.named_parameters()})


@takes(posterior=_POSTERIOR)
def sparsity(posterior: Factorised) -> dict[str, float]:
    """Share of pruned weights, by tensor.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"w": DiagonalGaussian(torch.tensor([1.0, -3.0, 0.1, 2.0]), 0.5)})
        >>> sparsity(prune(q, threshold=3.0))
        {'w': 0.5}
    """
    return {name: 1.0 - float(kept.double().mean()) for name, kept in posterior.kept().items()}


@takes(
    posterior=_POSTERIOR,
    fraction=NUMBER,
    threshold=NUMBER,
    log_alpha=NUMBER,
    scope=TEXT,
    score=FUNCTION,
    spare=FILTER,
)
def prune(
    posterior: Factorised,
    fraction: float | None = None,
    *,
    threshold: float | None = None,
    log_alpha: float | None = None,
    scope: Scope = "global",
    score: Score = snr,
    groups: Groups | None = None,
    spare: NameFilter = (),
) -> Factorised:
    """A posterior in which the weights with the lowest scores, by default the lowest SNR, are exactly zero.

    Mean and std both become zero: a pruned weight that kept its std would ruin sampled predictions. It stays
    zero when sampled, saved, trained by gradient, or loaded by ``optimizer.load_posterior``.

    Among weights with equal scores the smallest are removed first, so that a net without stds, whose ratios
    are all infinite, is pruned by magnitude.

    Args:
        posterior: The posterior to prune; it is not changed.
        fraction: Share of the weights to remove, from 0 to 1, including those already pruned.
        threshold: Instead of a fraction: remove every weight whose score is below this.
        log_alpha: Instead of either: remove every weight with log α = log(σ²/μ²) of at least this, an SNR of
            at most exp(−log α / 2): 0.223 for 3.0, the usual limit for nets trained with
            :class:`~posterity.LogUniform`.
        scope: Whether the fraction applies to all weights together (``"global"``) or to each layer, weight
            and bias together (``"layer"``). A threshold or log α is the same for all layers.
        score: The importance of a weight: ``snr``, ``magnitude``, or any function of the posterior that
            gives one number per weight.
        groups: Remove whole rows of matrices and kernels, ``"outputs"``, or whole columns, ``"inputs"``, by
            the root mean square of their weights' scores; :func:`~posterity.compress.shrink` then makes the
            net smaller. Tensors with one axis, such as biases, are spared. By default, families whose groups
            share a scale (:func:`~posterity.gnj`, :func:`~posterity.ghs`) are pruned by these groups, each by
            its best weight: one weight of many may need the scale.
        spare: Filter of names that are neither pruned nor counted, such as ``"*bias"``.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"w": DiagonalGaussian(torch.tensor([1.0, -3.0, 0.1, 2.0]), 0.5)})
        >>> prune(q, 0.5).mean()["w"]
        tensor([ 0., -3.,  0.,  2.])
        >>> prune(q, threshold=1.0).mean()["w"]
        tensor([ 1., -3.,  0.,  2.])
        >>> prune(q, log_alpha=3.0).mean()["w"]  # an SNR of 0.2 is removed, one of 2 stays
        tensor([ 1., -3.,  0.,  2.])
    """
    _refuse_cut(fraction, threshold, log_alpha, score)
    if scope not in ("global", "layer"):
        raise ValueError(f"scope must be 'global' or 'layer', not {scope!r}")
    if groups not in (None, "outputs", "inputs"):
        raise ValueError(f"groups must be 'outputs' or 'inputs', not {groups!r}")
    sizes = magnitude(posterior)
    spared = select(sizes, spare)
    spared |= {name for name, size in sizes.items() if groups is not None and size.dim() < 2}
    names = [name for name in sizes if name not in spared]
    if not names:
        raise ValueError("spare= spares every tensor, so there is nothing to prune: let it match fewer names")
    scores = _scores(posterior, score)
    shapes = _group_shapes(posterior, groups)
    combine = _best if groups is None else _root_mean_square
    ranks = {name: _Ranks.of(scores[name], sizes[name], shapes[name], combine) for name in names}
    keep = {name: torch.ones_like(scores[name], dtype=torch.bool) for name in spared}
    if threshold is not None:
        keep |= {name: ranks[name].of_weights(ranks[name].score >= float(threshold)) for name in names}
    if log_alpha is not None:
        least = math.exp(min(-0.5 * log_alpha, 80.0))  # within the range of single precision
        keep |= {name: ranks[name].of_weights(ranks[name].score > least) for name in names}
    if fraction is not None:
        for members in _together(names, scope):
            keep |= _strongest({name: ranks[name] for name in members}, fraction)
    masks = posterior.join({name: keep[name].to(size.device) for name, size in sizes.items()})
    return posterior.rebuilt({name: leaf.pruned(masks[name]) for name, leaf in posterior.blocks.items()})


def _refuse_cut(
    fraction: float | None, threshold: float | None, log_alpha: float | None, score: Score
) -> None:
    """Raise unless there is exactly one limit, and it is a number."""
    if sum(each is not None for each in (fraction, threshold, log_alpha)) != 1:
        raise ValueError(
            "prune() takes one of these: a fraction of the weights, a threshold of their score, a log_alpha"
        )
    if fraction is not None and not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction}")
    if threshold is not None and math.isnan(threshold):
        raise ValueError("threshold must be a number, not nan")
    if log_alpha is not None and math.isnan(log_alpha):
        raise ValueError("log_alpha must be a number, not nan")
    if log_alpha is not None and score is not snr:
        raise ValueError("log_alpha is a limit of the SNR: leave score= out, or pass a threshold of it")


def _scores(posterior: Factorised, score: Score) -> dict[str, Tensor]:
    """The score of every weight, which must exist; pruned weights rank below all others."""
    given, scores = score(posterior), {}
    if not isinstance(given, Mapping):
        raise TypeError(f"score= must give scores by name, not {described(given)}")
    for name, kept in posterior.kept().items():
        if name not in given or not is_dense(given[name]) or given[name].shape != kept.shape:
            raise ValueError(f"score= must give one number for each weight of {name!r}, {tuple(kept.shape)}")
        if bool(given[name].isnan().any()):
            raise ValueError(f"the score of a weight of {name!r} is nan: look for nan in the posterior")
        scores[name] = given[name].where(kept.to(given[name].device), -torch.inf)
    return scores


def _together(names: list[str], scope: Scope) -> list[list[str]]:
    """Groups of tensors, of each of which a fraction is removed."""
    if scope == "global":
        return [names]
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def _group_shapes(posterior: Factorised, groups: Groups | None) -> dict[str, torch.Size]:
    """By tensor, a shape that broadcasts to its own: weights that share an entry are removed together."""
    shapes = posterior.shapes()
    if groups is not None:
        axis = 0 if groups == "outputs" else 1
        return {
            name: torch.Size([size if i == axis else 1 for i, size in enumerate(shape)])
            for name, shape in shapes.items()
        }
    blocks = {posterior.tensors[block]: leaf for block, leaf in posterior.blocks.items()}
    return shapes | {names[0]: leaf.group_shape for names, leaf in blocks.items() if not leaf.joined}


@dataclass(frozen=True)
class _Ranks:
    """Scores and sizes of a tensor's weights or groups, which determine the order of removal."""

    score: Tensor  # [G]
    size: Tensor
    weights: int  # of each group
    groups: torch.Size  # a shape of G entries, which broadcasts to the tensor's
    shape: torch.Size

    @classmethod
    def of(
        cls, score: Tensor, size: Tensor, groups: torch.Size, combine: Callable[[Tensor, list[int]], Tensor]
    ) -> _Ranks:
        axes = [i for i, (many, all_of) in enumerate(zip(groups, score.shape, strict=True)) if many < all_of]
        score_of, size_of = (combine(each, axes) if axes else each for each in (score, size))
        weights = score.numel() // max(groups.numel(), 1)
        return cls(score_of.flatten(), size_of.flatten(), weights, groups, score.shape)

    def of_weights(self, keep: Tensor) -> Tensor:
        """A mask of the tensor, from a mask of its groups."""
        return keep.view(self.groups).expand(self.shape)


def _best(scores: Tensor, axes: list[int]) -> Tensor:
    return scores.amax(axes)


def _root_mean_square(scores: Tensor, axes: list[int]) -> Tensor:
    # Already pruned weights add nothing to their group's score.
    return scores.clamp_min(0.0).square().mean(axes).sqrt()


def _strongest(ranks: Mapping[str, _Ranks], fraction: float) -> dict[str, Tensor]:
    """Masks without the given fraction, lowest score first and, where scores are equal, smallest first."""
    device = next(iter(ranks.values())).score.device
    score = torch.cat([each.score.to(device) for each in ranks.values()])
    size = torch.cat([each.size.to(device) for each in ranks.values()])
    weights = torch.cat(
        [torch.full(each.score.shape, each.weights, device=device) for each in ranks.values()]
    )
    order = size.argsort(stable=True)
    order = order[score[order].argsort(stable=True)]
    removed = weights[order].cumsum(0) <= round(fraction * int(weights.sum()))
    keep = torch.ones(len(score), dtype=torch.bool, device=device)
    keep[order[removed]] = False
    parts = torch.split(keep, [len(each.score) for each in ranks.values()])
    return {name: each.of_weights(part) for (name, each), part in zip(ranks.items(), parts, strict=True)}
