"""The eigenbasis Gaussian: a layer's weight and bias together, independent along products of eigenvectors.

The posterior of a Kronecker-factored Laplace approximation. With S = Q_S Λ_S Q_Sᵀ of gradients, A = Q_A Λ_A
Q_Aᵀ of inputs, the precision N · (A ⊗ S) + δ I of the block W̃ = [W | b], ``[O, I + 1]``, is

    (Q_A ⊗ Q_S) diag(N λ_A λ_S + δ) (Q_A ⊗ Q_S)ᵀ        of vec(W̃), columns stacked

which is not a product of two factors, so a matrix Gaussian only approximates it. Here it is exact:

    W̃ = M + Q_S (noise / √precision) Q_Aᵀ              precision_oi = N λ_S,o λ_A,i + δ, ``[O, I + 1]``

| papers | here |
|---|---|
| Q_S, Q_A | ``rows`` ``[O, O]``, ``columns`` ``[I + 1, I + 1]``: eigenvectors as columns |
| 1 / √(N λ_S λ_A + δ) | ``scale`` ``[O, I + 1]`` |

References: Ritter et al. 2018 (Kronecker Laplace), George et al. 2018 (a diagonal in the eigenbasis).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, cast, final

import torch
from torch import Tensor

from posterity.arguments import TENSOR, takes
from posterity.posterior.algebra import full_precision
from posterity.posterior.kronecker import MEANS, KroneckerGaussian, Means
from posterity.posterior.matrix import MatrixGaussian


@final
class EigenGaussian(KroneckerGaussian):
    """A matrix of weights with independent stds in a basis: ``mean + rows · (scale * noise) · columnsᵀ``.

    Not trained by autograd; pruning takes the marginal. See :class:`KroneckerGaussian` for both.

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

    parts = ("rows", "columns", "scale")
    scale: Tensor

    @takes(mean=MEANS, rows=TENSOR, columns=TENSOR, scale=TENSOR, keep=TENSOR)
    def __init__(
        self, mean: Means, rows: Tensor, columns: Tensor, scale: Tensor, *, keep: Tensor | None = None
    ) -> None:
        super().__init__(mean, rows, columns, keep=keep)
        height, width = self.shape
        self._hold("scale", scale, (height, width))

    @full_precision
    def std(self) -> Tensor:
        """Marginal standard deviation of each weight."""
        variance = self.rows.square() @ self.scale.square() @ self.columns.square().mT
        return self.masked(variance.sqrt())

    def product(self) -> MatrixGaussian:
        """The matrix Gaussian with the same means, eigenvectors and volume, and the nearest stds along them.

        Nearest is in squared differences of logarithms: a scale that is a product of two vectors stays the
        same.

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
        leaf = MatrixGaussian(self.split(self.loc), *roots, keep=self.keep)
        return leaf.hold(self.held)

    @full_precision
    def precision_diagonal(self) -> Tensor:
        """The diagonal of the whole covariance's inverse, in the block's shape and double precision."""
        rows, columns = self.rows.double().square(), self.columns.double().square()
        return rows @ self.scale.double().square().reciprocal() @ columns.mT

    def _check(self, name: str, factor: Tensor) -> None:
        if name == "scale":
            if not bool(torch.isfinite(factor).all() & (factor > 0).all()):
                raise ValueError(
                    "scale must be finite and greater than 0: it is the std along each eigenvector"
                )
            return
        wide = factor.double()
        excess = (wide.mT @ wide - torch.eye(len(wide), dtype=wide.dtype, device=wide.device)).abs()
        # Far above the error of rounding to half precision, far below that of an invalid basis.
        if not bool((excess < 0.05).all()):  # NaN is not, either
            raise ValueError(f"{name} must hold orthonormal vectors as columns: see torch.linalg.eigh")

    def _whitened(self, shift: Tensor) -> Tensor:
        return self.rows.mT @ shift @ self.columns / self.scale

    def _log_volume(self) -> Tensor:
        return self.scale.log().sum()

    def _covariance(self, row: Tensor, column: Tensor) -> Tensor:
        rows, columns, variances = self.rows.double(), self.columns.double(), self.scale.double().square()
        covariance = rows.new_zeros(len(row), len(row))
        for vector, variance in zip(rows.mT, variances, strict=True):  # one eigenvector of rows at a time
            among = (columns * variance) @ columns.mT
            covariance += torch.outer(vector[row], vector[row]) * among[column[:, None], column]
        return covariance

    def _trace(self, p: Self) -> Tensor:
        # Σ over both grids of (Rᵀp Rq)² (Cᵀp Cq)² scale_q² / scale_p².
        turn_rows, turn_columns = (
            (theirs.double().mT @ ours.double()).square()
            for theirs, ours in ((p.rows, self.rows), (p.columns, self.columns))
        )
        seen = turn_rows @ self.scale.double().square() @ turn_columns.mT
        return (seen / p.scale.double().square()).sum()

    @full_precision
    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return self.loc + self.rows @ (self.scale * noise[""]) @ self.columns.mT
