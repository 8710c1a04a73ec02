"""The kernel Gaussian (CFG): a correlated Gaussian for every kernel of a convolution, kernels being
independent.

Kochurov et al.: "Bayesian Incremental Learning for Deep Neural Networks", 2018. The weight is [N, C, H, W]:

    q(w) = ∏_n ∏_c N(w_nc | μ_nc, L_nc L_ncᵀ),  L_nc lower triangular [HW, HW]

| paper | here |
|---|---|
| CFG for convolutions, FFG for the rest | :func:`cfg` |
| μ | ``loc`` ``[N, C, H, W]`` |
| diagonal of L | ``softplus(raw)``, ``raw`` ``[N, C, H, W]`` |
| L below the diagonal, over its row's diagonal | ``below`` ``[N, C, HW (HW − 1) / 2]``, row after row |

The paper gives no initial L: here it is diagonal, the same as a :class:`DiagonalGaussian`. Nor does it say
how L is parametrised. In units of its row's diagonal, a step of Adam is as large for ``below`` as for stds.
In units of weights it would exceed small stds, and L would be nearly singular after a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity.flat import Layout, concatenate, of_shapes
from posterity.posterior.algebra import divided, full_precision
from posterity.posterior.diagonal import DiagonalGaussian, inverse_softplus
from posterity.posterior.leaf import Leaf

# Rows of L that are summed by one product. One matrix for all rows would grow as P³; adding by index is not
# the same bit for bit at every run on a GPU.
_BAND = 32


def cfg(mean: Tensor, std: float) -> Leaf:
    """The family CFG: a :class:`KernelGaussian` for convolutions, a :class:`DiagonalGaussian` for the rest.

    A weight with three or more dimensions is treated as that of a convolution. If its kernels are single
    weights (1×1), it is diagonal, which is the same. Position embeddings ``[1, T, D]`` are not convolutions:
    give them another family by name.

    Example:
        >>> from posterity import variational
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        >>> q = variational(net, family=cfg).posterior
        >>> [type(leaf).__name__ for leaf in q.blocks.values()][:3]
        ['KernelGaussian', 'DiagonalGaussian', 'DiagonalGaussian']
    """
    correlated = mean.dim() > 2 and mean.shape[2:].numel() > 1
    return KernelGaussian(mean, std) if correlated else DiagonalGaussian(mean, std)


@final
class KernelGaussian(Leaf):
    """Correlated normals within a kernel with any number of positions: ``w = mean + L · noise``.

    Mean and L are parameters; given an ``nn.Parameter`` as mean it uses that same object, so a model and its
    posterior can share the means. For a fixed leaf use ``.frozen()`` of a posterior, or
    ``.requires_grad_(False)``.

    Pruning and holding take the marginal: the other weights keep their means, stds and correlations.

    Args:
        mean: Means, ``[outputs, inputs, *kernel]``, as convolutions have them, also grouped ones.
        factor: Lower Cholesky factor of every kernel's covariance, ``[outputs, inputs, P, P]`` with P
            positions in a kernel; or a number, the std of all weights, which are then independent.
        keep: Mask of the weights that are not pruned.

    Example:
        >>> q = KernelGaussian(torch.zeros(4, 3, 5, 5), 0.5)
        >>> q.draw(torch.ones(2, 4, 3, 5, 5)).shape, q.lower().shape
        (torch.Size([2, 4, 3, 5, 5]), torch.Size([4, 3, 25, 25]))
    """

    estimators = frozenset({"weight", "flipout"})
    raw: Tensor
    below: Tensor
    _row: Tensor
    _column: Tensor
    _of_row: Tensor

    def __init__(self, mean: Tensor, factor: Tensor | float, *, keep: Tensor | None = None) -> None:
        if not mean.is_floating_point():
            raise TypeError(f"means must be floating-point numbers, not {mean.dtype}: pass mean.float()")
        if mean.dim() < 3:
            raise ValueError(
                f"a KernelGaussian is for the weight of a convolution, [outputs, inputs, *kernel], not for "
                f"shape {tuple(mean.shape)}: use DiagonalGaussian, or cfg, which chooses"
            )
        super().__init__(mean.shape, keep)
        positions = mean.shape[2:].numel()
        lower = torch.as_tensor(factor, dtype=mean.dtype, device=mean.device).detach()
        if lower.dim() == 0:
            lower = lower * torch.eye(positions, dtype=mean.dtype, device=mean.device)
            lower = lower.expand(*mean.shape[:2], -1, -1)
        if lower.shape != (*mean.shape[:2], positions, positions):
            raise ValueError(
                f"factor must be a number or have shape {(*mean.shape[:2], positions, positions)}, not "
                f"{tuple(lower.shape)}"
            )
        diagonal = lower.diagonal(0, -2, -1)
        if not bool(torch.isfinite(lower).all() & (diagonal > 0).all()) or bool(lower.triu(1).any()):
            raise ValueError(
                "factor must be finite, lower triangular and above 0 on the diagonal: see "
                "torch.linalg.cholesky"
            )
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        # Row and column of each number of ``below``, and a matrix that sums these by rows of one band.
        row, column = torch.tril_indices(positions, positions, -1, device=mean.device)
        of_row = torch.eye(min(positions, _BAND), dtype=mean.dtype, device=mean.device)[row % _BAND]
        for name, value in (("_row", row), ("_column", column), ("_of_row", of_row)):
            self.register_buffer(name, value, persistent=False)
        self.raw = nn.Parameter(mean.detach().new_empty(mean.shape))
        self.below = nn.Parameter(mean.detach().new_empty(*mean.shape[:2], len(row)))
        self._write(lower if keep is None else _marginal(lower, self.varying.flatten(2)))

    @classmethod
    def end_to_end(cls, leaves: Sequence[Self], layout: Layout, masks: Mapping[str, Tensor | None]) -> Self:
        """All kernels of some leaves as those of one output each."""
        first = leaves[0]
        kernel = first.shape[2:]
        loc, raw = (
            concatenate(layout, parts).view(-1, 1, *kernel)
            for parts in zip(*((leaf.loc, leaf.raw) for leaf in leaves), strict=True)
        )
        taken = tuple(leaf.below.shape for leaf in leaves)
        below = concatenate(of_shapes(taken), [leaf.below for leaf in leaves])
        joined = cls.__new__(cls)
        Leaf.__init__(joined, loc.shape)
        joined.loc, joined.raw, joined.below = loc, raw, below.view(len(loc), 1, first.below.shape[-1])
        own = {name: None if mask is None else mask.view(loc.shape) for name, mask in masks.items()}
        joined._buffers.update(own, _row=first._row, _column=first._column, _of_row=first._of_row)
        return joined

    @property
    def kind(self) -> object:
        """Kernels of one shape."""
        return self.shape[2:]

    def lower(self) -> Tensor:
        """Lower Cholesky factor of every kernel's covariance, ``[outputs, inputs, P, P]``.

        Weights that do not vary have no covariances in it, and a positive number on the diagonal.
        """
        return self._strict() + torch.diag_embed(self.diagonal().flatten(2))

    def diagonal(self) -> Tensor:
        """The diagonal of L, in the block's shape: stds given the weights before them in their kernel."""
        return softplus(self.raw)

    def std(self) -> Tensor:
        """Marginal standard deviation of each weight."""
        return self.masked(self.filled_std())

    def filled_std(self) -> Tensor:
        """The std with a positive value for weights that do not vary."""
        return self.diagonal() * (1.0 + self._from_before()).sqrt()

    def correlation(self) -> Tensor:
        """KL to independent weights with the same means and stds: the total correlation."""
        return 0.5 * self.total(self._from_before().log1p())

    @full_precision
    def whitened(self, shift: Tensor) -> Tensor:
        """L⁻¹ of vectors in the block's shape; leading dimensions stay."""
        lead = shift.shape[: shift.dim() - len(self.shape)]
        vectors = self.masked(shift).reshape(-1, *self.shape[:2], self.shape[2:].numel())
        # All as columns of one matrix: leading dimensions would copy the triangle for each.
        white = divided(self.lower(), vectors.movedim(0, -1))
        return white.movedim(-1, 0).reshape(*lead, *self.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the weights that vary; leading dimensions stay."""
        white = self.whitened(value - self.loc)
        return self.total(-0.5 * white.square() - self.diagonal().log() - 0.5 * math.log(2.0 * math.pi))

    def pruned(self, keep: Tensor) -> Self:
        """The marginal of the weights in ``keep``; the others are zero."""
        keep = keep & self.kept
        leaf = type(self)(self.loc.detach() * keep, self.lower().detach(), keep=keep).hold(self.held)
        return leaf.requires_grad_(self.loc.requires_grad)

    def hold(self, held: Tensor | None) -> Self:
        """Fix the weights of a mask (if not None) at their means; see :meth:`Leaf.hold`."""
        lower = self.lower().detach()
        super().hold(held)
        marginal = _marginal(lower, self.varying.flatten(2))
        if marginal is not lower:
            self._write(marginal)
        return self

    def config(self) -> dict[str, Any]:
        """Nothing: the tensors are enough."""
        return {}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf, bit for bit, because L's own parameters are stored."""
        leaf = cls(tensors["loc"], 1.0, keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        if not bool(torch.isfinite(leaf.lower()).all()):
            raise ValueError("a saved factor of a covariance is not finite: the file is damaged")
        return leaf

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf from all tensors of ``state_dict`` and ``config``."""
        own = {key: value for key, value in tensors.items() if key != "held"}
        # L is already that of the marginal.
        return super(KernelGaussian, cls.restore(own, config)).hold(tensors.get("held"))

    def _unit(self) -> Tensor:
        """``below``, zero where a weight does not vary."""
        if self.whole:
            return self.below
        varying = self.varying.flatten(2)
        return torch.where(varying[..., self._row] & varying[..., self._column], self.below, 0.0)

    @full_precision
    def _from_before(self) -> Tensor:
        """The variance of each weight due to those before it, relative to its own."""
        return self._by_rows(self._unit().square()).reshape(self.shape)

    def _by_rows(self, values: Tensor) -> Tensor:
        """Sums over each row of L of values given for the entries of ``below``."""
        positions = self.shape[2:].numel()
        if positions <= _BAND:
            return values @ self._of_row
        first = range(0, positions, _BAND)
        numbers = [sum(range(row, min(row + _BAND, positions))) for row in first]
        bands = zip(torch.split(values, numbers, -1), torch.split(self._of_row, numbers), strict=True)
        return torch.cat([some @ of_row for some, of_row in bands], -1)[..., :positions]

    def _strict(self) -> Tensor:
        """L below the diagonal, zero elsewhere and where a weight does not vary."""
        positions = self.shape[2:].numel()
        flat = self.below.new_zeros(*self.shape[:2], positions * positions)
        unit = flat.index_copy(-1, self._row * positions + self._column, self._unit())
        return self.diagonal().flatten(2)[..., None] * unit.reshape(*self.shape[:2], positions, positions)

    @torch.no_grad()
    def _write(self, lower: Tensor) -> None:
        """Set the parameters from a factor."""
        diagonal = lower.diagonal(0, -2, -1)
        self.raw.copy_(inverse_softplus(diagonal).reshape(self.shape))
        self.below.copy_((lower / diagonal[..., None])[..., self._row, self._column])

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        if not self.below.numel():  # kernels of one weight, by the rounding of a diagonal Gaussian
            return torch.addcmul(self.loc, self.diagonal(), noise[""])
        mean, deviation = self._deviation(noise)
        return mean + deviation

    @full_precision
    def _deviation(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        eps = noise[""]
        if not self.below.numel():  # kernels of one weight
            return self.loc, self.diagonal() * eps
        # Over the entries of ``below``; a whole matrix would have more than twice as many.
        products = self._unit() * eps.flatten(3).index_select(-1, self._column)
        return self.loc, self.diagonal() * (eps + self._by_rows(products).reshape(eps.shape))


def _among(lower: Tensor, varying: Tensor) -> Tensor:
    """A matrix ``[..., P, P]``, zero outside the rows and columns that are both in a mask ``[..., P]``."""
    return torch.where(varying[..., :, None] & varying[..., None, :], lower, 0.0)


def _marginal(lower: Tensor, varying: Tensor) -> Tensor:
    """Cholesky factor of the marginal covariance of some weights; the others become independent of them.

    A factor in which they already are is returned unchanged, bit for bit.
    """
    diagonal = torch.diag_embed(lower.diagonal(0, -2, -1))
    if torch.equal(_among(lower, varying) + torch.where(varying[..., None], 0.0, diagonal), lower):
        return lower
    wide = lower.double()
    covariance = _among(wide @ wide.mT, varying) + torch.diag_embed((~varying).double())
    return cast(Tensor, torch.linalg.cholesky(covariance)).to(lower.dtype)
