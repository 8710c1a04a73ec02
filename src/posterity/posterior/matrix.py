"""The matrix Gaussian: a layer's weight and bias together, correlated along rows and along columns.

The posterior of K-FAC and Noisy K-FAC. W̃ = [W | b], ``[O, I + 1]``, is MN(M, U, V):

    cov(W̃_oi, W̃_pj) = U_op · V_ij        vec(W̃), columns stacked, has covariance V ⊗ U

| papers | here |
|---|---|
| U, V | ``rows @ rows.T`` ``[O, O]``, ``columns @ columns.T`` ``[I + 1, I + 1]`` |
| S = E[g gᵀ], A = E[a aᵀ], precision N·(A ⊗ S) | ``from_precision(mean, S, A, scale=N)`` |
| factored damping (A + π√γ I) ⊗ (S + √γ/π I) | :func:`damped` |

References: Martens and Grosse 2015 (K-FAC), Zhang et al. 2018 (Noisy K-FAC), Ritter et al. 2018 (Laplace).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self, final

import torch
from torch import Tensor

from posterity.arguments import NUMBER, TENSOR, takes
from posterity.posterior.algebra import (
    SINGULAR,
    damped,
    full_precision,
    inverse_cholesky,
    inverse_triangle,
    solved,
)
from posterity.posterior.kronecker import MEANS, KroneckerGaussian, Means


@final
class MatrixGaussian(KroneckerGaussian):
    """A matrix of weights with covariances among rows and among columns: ``mean + rows · noise · columnsᵀ``.

    Not trained by autograd; pruning takes the marginal. See :class:`KroneckerGaussian` for both.

    Args:
        mean: Means of the block's tensors, left to right, such as ``(weight, bias)`` or a weight alone; all
            have O as their first dimension, and share dtype and device.
        rows: Lower Cholesky factor of the row covariance U, ``[O, O]``.
        columns: That of the column covariance V, ``[I + 1, I + 1]``, or ``[I, I]`` without a bias.
        keep: Mask of the weights that are not pruned, in the block's shape.

    Example:
        >>> from posterity import Factorised
        >>> leaf = MatrixGaussian((torch.zeros(2, 3), torch.ones(2)), 0.1 * torch.eye(2), torch.eye(4))
        >>> q = Factorised({("fc.weight", "fc.bias"): leaf})
        >>> q.sample(5)["fc.weight"].shape, q.std()["fc.bias"]
        (torch.Size([5, 2, 3]), tensor([0.1000, 0.1000]))
    """

    @classmethod
    @takes(mean=MEANS, rows=TENSOR, columns=TENSOR, damping=NUMBER, scale=NUMBER, keep=TENSOR)
    def from_precision(
        cls,
        mean: Means,
        rows: Tensor,
        columns: Tensor,
        *,
        damping: float = 0.0,
        scale: float = 1.0,
        keep: Tensor | None = None,
    ) -> Self:
        """The block whose precision is ``scale · (columns + damping) ⊗ (rows + damping)``.

        Args:
            mean: As for the class.
            rows: Factor of the precision among outputs, K-FAC's S, ``[O, O]``.
            columns: Factor among inputs, K-FAC's A, ``[I + 1, I + 1]``.
            damping: Split between the factors by :func:`damped`. For a prior it is
                ``temperature · prior_precision / num_data``.
            scale: ``num_data / temperature`` for factors of the mean loss.
            keep: As for the class.

        Example:
            >>> q = MatrixGaussian.from_precision(torch.zeros(2, 3), torch.eye(2), torch.eye(3), scale=100.0)
            >>> q.std()[0]
            tensor([0.1000, 0.1000, 0.1000])
        """
        if not 0.0 < scale < math.inf:
            raise ValueError(f"scale must be finite and greater than 0, not {scale}")
        for name, factor in (("rows", rows), ("columns", columns)):
            if factor.dim() != 2 or factor.shape[0] != factor.shape[1]:
                raise ValueError(f"{name} must be a square matrix, not of shape {tuple(factor.shape)}")
        # In double precision: factors are often nearly singular, and this is done once.
        pair = damped(rows.detach().double(), columns.detach().double(), damping)
        (u, v), failed = inverse_cholesky(pair)
        if bool(failed.any()):
            raise ValueError(SINGULAR)
        return cls(mean, u / math.sqrt(scale), v, keep=keep)

    def std(self) -> Tensor:
        """Marginal standard deviation of each weight."""
        return self.masked(torch.outer(self.rows.norm(dim=1), self.columns.norm(dim=1)))

    def precision_diagonal(self) -> Tensor:
        """The diagonal of the whole covariance's inverse, in the block's shape and double precision."""
        return torch.outer(
            *(inverse_triangle(each.double()).square().sum(0) for each in (self.rows, self.columns))
        )

    def _check(self, name: str, factor: Tensor) -> None:
        finite = bool(torch.isfinite(factor).all())
        if not finite or not bool((factor.diagonal() > 0).all()) or bool(factor.triu(1).any()):
            raise ValueError(
                f"{name} must be finite, lower triangular and above 0 on the diagonal: see "
                "torch.linalg.cholesky"
            )

    def _whitened(self, shift: Tensor) -> Tensor:
        return solved(self.columns, solved(self.rows, shift, -2), -1)

    def _log_volume(self) -> Tensor:
        height, width = self.shape
        return width * self.rows.diagonal().log().sum() + height * self.columns.diagonal().log().sum()

    def _covariance(self, row: Tensor, column: Tensor) -> Tensor:
        u, v = (each.double() @ each.double().mT for each in (self.rows, self.columns))
        return u[row[:, None], row] * v[column[:, None], column]

    def _trace(self, p: Self) -> Tensor:
        # The trace of a Kronecker product is the product of the factors' traces.
        of_rows, of_columns = (
            solved(theirs.double(), ours.double(), 0).square().sum()
            for theirs, ours in ((p.rows, self.rows), (p.columns, self.columns))
        )
        return of_rows * of_columns

    @full_precision
    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        return self.loc + self.rows @ noise[""] @ self.columns.mT
