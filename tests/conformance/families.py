"""Families of leaves that are trained by gradient, and what estimators each has: a row per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from posterity import DiagonalGaussian, GroupHorseshoe, GroupNormalJeffreys, Leaf, cfg, ghs, gnj, mnf

SPREAD = 0.3  # std of the scales


class Trained(Leaf):
    """A leaf with means and log-stds that is rebuilt from its tensors."""

    def __init__(self, mean: Tensor, std: float, keep: Tensor | None = None) -> None:
        super().__init__(mean.shape, keep)
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        self.log_std = nn.Parameter(torch.full_like(mean.detach(), std).log())

    def pruned(self, keep: Tensor) -> Self:
        keep = keep & self.kept
        leaf = type(self)(self.loc.detach() * keep, 1.0, keep)
        leaf.log_std.data.copy_(self.log_std)
        return leaf.hold(self.held)

    def config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        leaf = cls(tensors["loc"], 1.0, tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        return leaf


class Scaled(Trained):
    """``z · loc + std · noise`` with one scale z ~ N(1, SPREAD²) per row: independent normals given z."""

    estimators = frozenset({"weight", "local", "flipout"})

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        return {"": self.shape, "z": self.shape[:1]}

    def _independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        z = 1.0 + SPREAD * noise["z"]
        return z.reshape(*z.shape, *[1] * (len(self.shape) - 1)) * self.loc, self.log_std.exp()

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        mean, std = self._independent(noise)
        return mean + std * noise[""]

    def std(self) -> Tensor:
        return self.masked(((SPREAD * self.loc).square() + (2 * self.log_std).exp()).sqrt())


class Kernels(Trained):
    """Each kernel of a convolution correlated, ``loc + std · L noise``, and independent of all others."""

    estimators = frozenset({"weight", "flipout"})

    def _factor(self) -> Tensor:
        taps = self.shape[2:].numel()
        return torch.ones(taps, taps).tril().to(self.loc)

    def _deviation(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        drawn = noise[""].flatten(3) @ self._factor().mT
        return self.loc, self.log_std.exp() * drawn.view_as(noise[""])

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return sum(self._deviation(noise))

    def std(self) -> Tensor:
        wide = self._factor().square().sum(1).sqrt()
        return self.masked(self.log_std.exp() * wide.view(self.shape[2:]))


# By name: the families of a net's parameters, of which the first that matches counts.
FAMILIES: dict[str, Any] = {
    "DiagonalGaussian": DiagonalGaussian,
    "Scaled": Scaled,
    "Kernels": {"conv.weight": Kernels, "*": DiagonalGaussian},
    "KernelGaussian": cfg,
    "ScaledGaussian": mnf,
    "NormalScales": gnj,
    "LogNormalScales": ghs,
}
# Of those that cannot have N(0, 1).
PRIORS = {"NormalScales": GroupNormalJeffreys(), "LogNormalScales": GroupHorseshoe()}
