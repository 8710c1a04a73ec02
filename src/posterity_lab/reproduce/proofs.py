"""Theorem 1 and Corollary 1 of the BGD paper, checked with exact expectations."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from posterity_lab import theory
from posterity_lab.nets import initialise
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit


def check(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Check the theory numerically.

    Args:
        unit: The unit, with numbers of steps and of pairs of draws.
        device: Not used: everything is small, in float64.
        cache: Not used.
        show: Called at the end.

    Example:
        >>> unit = Unit("theory", "exact", "bgd", 0, {"steps": 20, "pairs": 100}, "")
        >>> check(unit, "cpu", Path(), lambda done, total, what: None).metrics["convex_falls"]
        True
    """
    steps, pairs = unit.config["steps"], unit.config["pairs"]
    generator = torch.Generator().manual_seed(unit.seed)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    hess = root @ root.T / 8 + 0.3 * torch.eye(8, dtype=torch.float64)
    strong = float(torch.linalg.eigvalsh(hess)[0])
    start = torch.randn(8, generator=generator, dtype=torch.float64), torch.full((8,), 0.3).double()
    convex = theory.trajectory(theory.quadratic(hess), *start, steps=steps)
    moments = theory.quadratic(hess)
    # Theorem 1 with the corrected bound: E[g·eps] is at least m·σ.
    bounds = [
        float((moments(mean, std)[1] / (strong * std)).min())
        for mean, std in zip(convex.mean, convex.std, strict=True)
    ]
    concave = theory.trajectory(
        theory.quadratic(-0.05 * torch.eye(8).double()), 0 * start[0], start[1], steps=steps
    )
    net = initialise(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), unit.seed)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    seen = theory.curvature(net, x, lambda out: cross_entropy(out, y), std=0.01, pairs=pairs, seed=unit.seed)
    off = (seen.estimate - seen.hessian).abs()
    metrics = {
        "smallest_bound_ratio": min(bounds),
        "convex_falls": bool((convex.std.diff(dim=0) < 0).all()),
        "concave_grows": bool((concave.std.diff(dim=0) > 0).all()),
        "curvature_within_3_errors": float((off < 3 * seen.error).double().mean()),
        "curvature_correlation": float(torch.corrcoef(torch.stack([seen.estimate, seen.hessian]))[0, 1]),
    }
    show(1, 1, "theory")
    return Outcome(metrics, steps)


def cells(quick: bool) -> list[Cell]:
    """One cell: nothing is learned, so nothing is tuned."""
    return [Cell("exact", "bgd", {"steps": 60, "pairs": 200 if quick else 2000})]


_METRICS = (
    "smallest_bound_ratio",
    "convex_falls",
    "concave_grows",
    "curvature_within_3_errors",
    "curvature_correlation",
)
THEORY = Study("bgd-theory", cells, check, _METRICS, seeds=(0,), tested=False)
