"""The diagonal Gaussian: a mean and a standard deviation for every weight (mean field, FFG)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity.arguments import TENSOR, Kind, is_dense, is_number, takes
from posterity.flat import Layout, concatenate
from posterity.posterior.leaf import Leaf

_STD = Kind("a number, or a dense tensor of real numbers", lambda std: is_number(std) or is_dense(std))


def inverse_softplus(std: Tensor) -> Tensor:
    """The ρ with ``softplus(ρ) = std``, exact for small and large values alike."""
    return std + torch.log(-torch.expm1(-std))


@final
class DiagonalGaussian(Leaf):
    """Independent normals, one per weight: ``w = mean + std · noise``.

    A trainable one stores ρ with ``std = softplus(ρ)`` (Blundell et al. 2015) and makes mean and ρ
    parameters; given an ``nn.Parameter`` as mean it uses that same object, so a model and its posterior can
    share the means. If it is not trainable, mean and std are buffers.

    Args:
        mean: Means; they give the block its shape, dtype and device.
        std: Standard deviations: a number, or a tensor that broadcasts to the mean's shape.
        trainable: Whether gradients should reach mean and std.
        keep: Mask of the weights that are not pruned.

    Example:
        >>> q = DiagonalGaussian(torch.zeros(2, 3), 0.5)
        >>> q.draw(torch.ones(4, 2, 3)).shape
        torch.Size([4, 2, 3])
    """

    estimators = frozenset({"weight", "local", "flipout"})
    raw: Tensor
    _std: Tensor | None = None

    @takes(mean=TENSOR, std=_STD, keep=TENSOR)
    def __init__(
        self, mean: Tensor, std: Tensor | float, *, trainable: bool = False, keep: Tensor | None = None
    ) -> None:
        if not mean.is_floating_point():
            raise TypeError(f"means must be floating-point numbers, not {mean.dtype}: pass mean.float()")
        super().__init__(mean.shape, keep)
        self._trainable = trainable
        spread = torch.as_tensor(std, dtype=mean.dtype, device=mean.device).detach()
        try:
            spread = spread.expand(mean.shape)
        except RuntimeError:
            raise ValueError(
                f"std of shape {tuple(spread.shape)} does not broadcast to means of shape {tuple(mean.shape)}"
            ) from None
        alive = spread if self.keep is None else spread[self.keep]
        unfit = alive[~(torch.isfinite(alive) & (alive > 0 if trainable else alive >= 0))]
        if len(unfit):
            least = "greater than 0" if trainable else "0 or more"
            raise ValueError(f"std must be finite and {least}; the lowest is {float(unfit.min()):g}")
        if self.keep is not None:
            # Stored as 1 and masked on the way out: no ρ gives a std of 0, and its logarithm has no gradient.
            spread = torch.where(self.keep, spread, torch.ones_like(spread))
        if trainable:
            self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
            self.raw = nn.Parameter(inverse_softplus(spread))
        else:
            self.register_buffer("loc", mean.detach().clone())
            self.register_buffer("raw", spread.clone())

    @classmethod
    def made_of(
        cls,
        loc: Tensor,
        raw: Tensor,
        *,
        keep: Tensor | None,
        held: Tensor | None,
        std: Tensor | None = None,
        stores_raw: bool = True,
    ) -> Self:
        """A leaf with these same tensors as means, ρ and masks; means and ρ may be part of a graph.

        Args:
            loc: Means.
            raw: ρ, or stds.
            keep: Mask of the weights that are not pruned.
            held: Mask of the weights that are fixed at their means.
            std: Stds, if they were computed from ρ already.
            stores_raw: Whether ``raw`` is ρ rather than the std itself.
        """
        leaf = cls.__new__(cls)
        Leaf.__init__(leaf, loc.shape)
        leaf._trainable, leaf.loc, leaf.raw, leaf._std = stores_raw, loc, raw, std
        leaf._buffers.update(keep=keep, held=held)
        return leaf

    @classmethod
    def end_to_end(cls, leaves: Sequence[Self], layout: Layout, masks: Mapping[str, Tensor | None]) -> Self:
        """All weights of some leaves in a row."""
        parts = zip(*((leaf.loc, leaf.raw) for leaf in leaves), strict=True)
        loc, raw = (concatenate(layout, own) for own in parts)
        return cls.made_of(loc, raw, **masks, stores_raw=leaves[0].stores_raw)

    @property
    def kind(self) -> object:
        """All that are trained are of one."""
        return True if self._trainable else None

    @property
    def stores_raw(self) -> bool:
        """Whether it stores a trainable ρ rather than the std itself."""
        return self._trainable

    def std(self) -> Tensor:
        """Standard deviation of each weight."""
        return self.masked(self.filled_std())

    def filled_std(self) -> Tensor:
        """The std with a positive value for weights that do not vary, so logarithms and quotients stay
        finite."""
        if self._std is not None:
            return self._std
        return softplus(self.raw) if self._trainable else self.raw

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the weights that vary; leading dimensions stay."""
        std = self.filled_std()
        logs = -0.5 * ((value - self.loc) / std) ** 2 - torch.log(std) - 0.5 * math.log(2.0 * math.pi)
        if self._trainable:
            return self.total(logs)
        # For a weight with std 0: infinite at its mean, and zero elsewhere.
        hit, missed = value == self.loc, self.varying & (std == 0) & (value != self.loc)
        logs = torch.where(std > 0, logs, torch.where(hit, math.inf, 0.0))
        nowhere = self.total(missed.to(logs.dtype)) > 0
        return torch.where(nowhere, -math.inf, self.total(logs))

    def trainable(self) -> Self:
        """This leaf if it is trainable, else a trainable copy."""
        if self._trainable:
            return super().trainable()
        if not bool((self.filled_std() > 0).all()):
            raise ValueError(
                "it has weights of std 0, which no gradient widens: give them a std, or leave the block out"
            )
        leaf = type(self)(self.mean(), self.filled_std(), trainable=True, keep=self.keep)
        return leaf.hold(self.held)

    def pruned(self, keep: Tensor) -> Self:
        """The same distribution with the weights outside ``keep`` removed: mean and std zero."""
        keep = keep & self.kept
        mean, std = self.loc.detach() * keep, self.filled_std()
        leaf = type(self)(mean, std, trainable=self._trainable, keep=keep)
        return leaf.hold(self.held)

    def config(self) -> dict[str, Any]:
        """Whether mean and std are trainable."""
        return {"trainable": self._trainable}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf, bit for bit, because ρ itself is stored."""
        leaf = cls(tensors["loc"], 1.0, trainable=bool(config["trainable"]), keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        std = leaf.std()
        unfit = std[~((std >= 0) & torch.isfinite(std))]  # 0 is that of a point mass
        if len(unfit):
            raise ValueError(f"a saved std is {float(unfit.min()):g}: the file is damaged")
        return leaf

    def _independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.loc, self.filled_std()

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return torch.addcmul(self.loc, self.filled_std(), noise[""])
