"""The eigenbasis Gaussian: a layer's weight and bias together, independent along products of eigenvectors.

What a Kronecker-factored Laplace approximation ends in. With S = Q_S Λ_S Q_Sᵀ of gradients, A = Q_A Λ_A Q_Aᵀ
of inputs, the precision N · (A ⊗ S) + δ I of the block W̃ = [W | b], ``[O, I + 1]``, is

    (Q_A ⊗ Q_S) diag(N λ_A λ_S + δ) (Q_A ⊗ Q_S)ᵀ        of vec(W̃), columns stacked

which no product of two factors is, so a matrix Gaussian has it only approximately. Here it is exact:

    W̃ = M + Q_S (noise / √precision) Q_Aᵀ              precision_oi = N λ_S,o λ_A,i + δ, ``[O, I + 1]``

| papers | here |
|---|---|
| Q_S, Q_A | ``rows`` ``[O, O]``, ``columns`` ``[I + 1, I + 1]``: eigenvectors as columns |
| 1 / √(N λ_S λ_A + δ) | ``scale`` ``[O, I + 1]`` |

References: Ritter et al. 2018 (Kronecker Laplace), George et al. 2018 (a diagonal in the eigenbasis).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast, final

import torch
from torch import Tensor

from posterity.posterior.base import Leaf
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.matrix import MatrixGaussian, solved
from posterity.precision import full_precision

# Kept weights of a pruned block whose covariance is written out: 4096² numbers are 128 MiB in float64.
_DENSE = 4096


@final
class EigenGaussian(Leaf):
    """A matrix of weights with independent stds in a basis: ``mean + rows · (scale * noise) · columnsᵀ``.

    It is not trained by autograd: what ends in it is fitted, and it holds buffers alone. Pruning takes the
    marginal, as that of :class:`~posterity.MatrixGaussian` does, with the same limit of 4096 kept weights for
    densities and KL.

    Args:
        mean: Means of the block's tensors, left to right, such as ``(weight, bias)`` or a weight alone; all
            have O as their first dimension, and share dtype and device.
        rows: Orthonormal basis among outputs, vectors as columns, ``[O, O]``.
        columns: That among inputs, ``[I + 1, I + 1]``, or ``[I, I]`` without a bias.
        scale: Standard deviation along each product of basis vectors, ``[O, I + 1]``.
        keep: Mask of the weights that are not pruned, in the block's shape.

    Example:
        >>> from posterity import Factorised
        >>> leaf = EigenGaussian(
        ...     (torch.zeros(2, 3), torch.ones(2)), torch.eye(2), torch.eye(4), torch.full((2, 4), 0.1)
        ... )
        >>> q = Factorised({("fc.weight", "fc.bias"): leaf})
        >>> q.sample(5)["fc.weight"].shape, q.std()["fc.bias"]
        (torch.Size([5, 2, 3]), tensor([0.1000, 0.1000]))
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor

    def __init__(
        self,
        mean: Tensor | Sequence[Tensor],
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        *,
        keep: Tensor | None = None,
    ) -> None:
        tensors = (mean,) if isinstance(mean, Tensor) else tuple(mean)
        if not tensors or any(each.dim() == 0 or len(each) != len(tensors[0]) for each in tensors):
            raise ValueError(
                "the tensors of a matrix block need the same first dimension, not the shapes "
                f"{[tuple(each.shape) for each in tensors]}"
            )
        shapes = [each.shape for each in tensors]
        height, width = len(tensors[0]), sum(shape[1:].numel() for shape in shapes)
        super().__init__(torch.Size([height, width]), keep, shapes)
        self.register_buffer("loc", self.join([each.detach() for each in tensors]).clone())
        for name, basis, size in (("rows", rows, height), ("columns", columns, width)):
            # eigh() gives columns end to end; as a file has them, products round alike after loading.
            own = basis.detach().to(self.loc, copy=True, memory_format=torch.contiguous_format)
            self.register_buffer(name, _basis(name, own, size))
        if scale.shape != self.shape:
            raise ValueError(f"scale must have shape {tuple(self.shape)}, not {tuple(scale.shape)}")
        self.register_buffer(
            "scale", scale.detach().to(self.loc, copy=True, memory_format=torch.contiguous_format)
        )
        if not bool(torch.isfinite(self.scale).all() & (self.scale > 0).all()):
            raise ValueError("scale must be finite and greater than 0: it is the std along each eigenvector")

    @full_precision
    def std(self) -> Tensor:
        """Standard deviation of each weight, whatever the others are."""
        variance = self.rows.square() @ self.scale.square() @ self.columns.square().mT
        return self.masked(variance.sqrt())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the kept weights; leading dimensions stay."""
        white = self.whitened(value - self.loc)
        square = white.square().sum(-1) + white.shape[-1] * math.log(2.0 * math.pi)
        return -0.5 * square - self.log_volume()

    @full_precision
    def whitened(self, shift: Tensor) -> Tensor:
        """The standard normals ``[..., n]`` behind n kept weights that far from the mean."""
        if self.thinned:
            return solved(self.cholesky(), shift[..., self.kept], -1)
        return (self.rows.mT @ shift @ self.columns / self.scale).flatten(-2)

    def log_volume(self) -> Tensor:
        """Half the log-determinant of the kept weights' covariance."""
        roots = self.cholesky().diagonal() if self.thinned else self.scale
        return roots.log().sum()

    def cholesky(self) -> Tensor:
        """Lower Cholesky factor of the kept weights' covariance, ``[n, n]``, row after row of the block."""
        row, column = self.kept.nonzero(as_tuple=True)
        if len(row) > _DENSE:
            raise ValueError(
                f"the density of a pruned eigenbasis Gaussian needs the covariance of its {len(row)} kept "
                f"weights, more than {_DENSE}: use that of .marginals(), which ignores correlations"
            )
        rows, columns, variances = self.rows.double(), self.columns.double(), self.scale.double().square()
        covariance = rows.new_zeros(len(row), len(row))
        for vector, variance in zip(rows.mT, variances, strict=True):  # one eigenvector of rows at a time
            among = (columns * variance) @ columns.mT
            covariance += torch.outer(vector[row], vector[row]) * among[column[:, None], column]
        return cast(Tensor, torch.linalg.cholesky(covariance)).to(self.dtype)

    def marginals(self) -> DiagonalGaussian:
        """Independent weights with the same means and stds."""
        return DiagonalGaussian(self.mean(), self.std(), keep=self.keep)

    def product(self) -> MatrixGaussian:
        """The matrix Gaussian with the same means, eigenvectors and volume, and the nearest stds along them.

        Nearest is meant by squares of logarithms: a scale that is a product of two vectors is kept as it is.

        Example:
            >>> leaf = EigenGaussian(torch.zeros(2, 2), torch.eye(2), torch.eye(2), torch.full((2, 2), 0.1))
            >>> leaf.product().std()[0]
            tensor([0.1000, 0.1000])
        """
        logs = self.scale.double().log()
        stds = logs.mean(1).exp(), (logs.mean(0) - logs.mean()).exp()
        roots = []
        for basis, std in zip((self.rows, self.columns), stds, strict=True):
            upper = cast(Tensor, torch.linalg.qr((basis.double() * std).mT, mode="r").R)
            roots.append((upper * upper.diagonal().sign()[:, None]).mT)
        return MatrixGaussian(self.split(self.loc), *roots, keep=self.keep)

    def correlation(self) -> Tensor:
        """KL from this to its ``marginals``: what the weights know of each other."""
        return self.total(self.marginals().filled_std().log()) - self.log_volume()

    def pruned(self, keep: Tensor) -> Self:
        """The marginal of the weights in ``keep``; the others are zero."""
        keep = keep if self.keep is None else keep & self.keep
        mean = self.split(torch.where(keep, self.loc, 0.0))
        return type(self)(mean, self.rows, self.columns, self.scale, keep=keep)

    def config(self) -> dict[str, Any]:
        """Shapes of the tensors."""
        return {"shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Build the leaf again, bit for bit."""
        mean = [tensors["loc"].new_zeros(shape) for shape in config["shapes"]]
        parts = (tensors[name] for name in ("rows", "columns", "scale"))
        leaf = cls(mean, *parts, keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        return leaf

    @property
    def thinned(self) -> bool:
        """Whether weights are missing, and with them the eigenbasis."""
        return self.keep is not None and not bool(self.keep.all())

    @full_precision
    def _draw(self, noise: Tensor) -> Tensor:
        return self.loc + self.rows @ (self.scale * noise) @ self.columns.mT


def _basis(name: str, basis: Tensor, size: int) -> Tensor:
    if basis.shape != (size, size):
        raise ValueError(f"{name} must have shape {(size, size)}, not {tuple(basis.shape)}")
    wide = basis.double()
    excess = (wide.mT @ wide - torch.eye(size, dtype=wide.dtype, device=wide.device)).abs()
    # Far above what rounding to half precision does, far below what a basis that is none has.
    if not bool((excess < 0.05).all()):  # NaN is not, either
        raise ValueError(f"{name} must hold orthonormal vectors as columns: see torch.linalg.eigh")
    return basis
