"""Shrinking a model by what its posterior is sure of."""

from __future__ import annotations

import torch
from torch import Tensor

from posterity.posterior import Factorised


def snr(posterior: Factorised) -> dict[str, Tensor]:
    """Signal-to-noise ratio |mean| / std of every weight; pruned weights have 0.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> snr(Factorised({"w": DiagonalGaussian(torch.tensor([1.0, -3.0]), 0.5)}))["w"]
        tensor([2., 6.])
    """
    ratios = {}
    for name, leaf in posterior.blocks.items():
        mean, std = leaf.mean().detach().abs(), leaf.std().detach()
        # A weight known exactly has infinite ratio, unless it is known to be zero.
        ratios[name] = torch.where(std > 0, mean / std, torch.where(mean > 0, torch.inf, 0.0).to(mean))
    return ratios


def prune(posterior: Factorised, fraction: float) -> Factorised:
    """A posterior in which the given fraction of all weights, those of lowest SNR, is exactly zero.

    Mean and std both become zero: a pruned weight that kept its std would ruin sampled predictions. It stays
    zero when sampled, saved, trained by gradient, or taken up by ``optimizer.load_posterior``.

    Args:
        posterior: What to prune; it is left as it is.
        fraction: Share of all its weights to remove, from 0 to 1.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"w": DiagonalGaussian(torch.tensor([1.0, -3.0, 0.1, 2.0]), 0.5)})
        >>> prune(q, 0.5).mean()["w"]
        tensor([ 0., -3.,  0.,  2.])
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction}")
    ratios = snr(posterior)
    device = next(iter(ratios.values())).device
    flat = torch.cat([ratio.flatten().to(device) for ratio in ratios.values()])
    keep = torch.ones(len(flat), dtype=torch.bool, device=device)
    keep[flat.argsort(stable=True)[: round(fraction * len(flat))]] = False
    parts = torch.split(keep, [ratio.numel() for ratio in ratios.values()])
    return Factorised(
        {
            name: leaf.pruned(part.view(leaf.shape).to(leaf.device))
            for (name, leaf), part in zip(posterior.blocks.items(), parts, strict=True)
        }
    )
