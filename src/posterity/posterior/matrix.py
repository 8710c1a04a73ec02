"""The matrix Gaussian: a layer's weight and bias together, correlated along rows and along columns.

What K-FAC, Noisy K-FAC and a Kronecker-factored Laplace approximation end in. The block is W̃ = [W | b],
``[O, I + 1]``, a convolution's weight being flattened to ``[O, C·R·S]``, and W̃ ~ MN(M, U, V):

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
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast, final

import torch
from torch import Tensor

from posterity.posterior.base import Leaf
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.precision import full_precision

# Matrices up to this size are decomposed together with others of theirs, a GPU having too little to do with
# one; of larger ones, so many columns are solved for at once.
_TOGETHER = 1024
# Kept weights of a pruned block whose covariance is written out: 4096² numbers are 128 MiB in float64.
_DENSE = 4096

SINGULAR = "a factor of the precision is not positive definite: raise damping"


def damped(rows: Tensor, columns: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Factored Tikhonov damping: ``rows + √damping / π · I`` and ``columns + √damping · π · I``.

    π² is the mean eigenvalue of ``columns`` over that of ``rows`` (Martens and Grosse 2015, section 6.3), so
    that both are damped in proportion to their size; 1 where one of them is zero.

    Example:
        >>> rows, columns = damped(torch.eye(2), 4 * torch.eye(3), damping=1.0)
        >>> rows[0, 0], columns[0, 0]
        (tensor(1.5000), tensor(6.))
    """
    if not 0.0 <= damping < math.inf:
        raise ValueError(f"damping must be finite and 0 or more, not {damping}")
    rows, columns = rows.clone(), columns.clone()
    shifts = shares(rows.diagonal().mean(), columns.diagonal().mean(), math.sqrt(damping))
    for factor, shift in zip((rows, columns), shifts, strict=True):
        factor.diagonal().add_(shift)
    return rows, columns


def shares(rows: Tensor, columns: Tensor, root: float | Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`damped` adds, given mean eigenvalues and the damping's root; of any number of pairs."""
    ratio = columns / rows
    pi = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0).sqrt()
    return root / pi, root * pi


def inverse_cholesky(matrices: Sequence[Tensor], shifts: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """The lower L with ``L Lᵀ = (matrix + shift · I)⁻¹`` of each, and which are not positive definite.

    With J the reversal of an order, J P J = C Cᵀ gives P = R Rᵀ for the upper R = J C J, and L = R⁻ᵀ: the
    inverse is never made. Small matrices of one size are worked on together, and no GPU is waited for.

    Args:
        matrices: Symmetric ones, of any sizes.
        shifts: One number for each.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, each in enumerate(matrices):
        alone = i if len(each) > _TOGETHER else None
        alike.setdefault((len(each), each.dtype, each.device, alone), []).append(i)
    roots: dict[int, Tensor] = {}
    failures: dict[int, Tensor] = {}
    for places in alike.values():
        backwards = torch.stack([matrices[i] for i in places]).flip(1, 2)
        if shifts is not None:
            added = torch.stack([shifts[i] for i in places]).to(backwards)
            backwards.diagonal(0, 1, 2).add_(added[:, None])
        lower, failed = torch.linalg.cholesky_ex(backwards)
        roots |= zip(places, inverse_triangle(lower.flip(1, 2).mT), strict=True)
        failures |= zip(places, failed.to(matrices[0].device), strict=True)
    every = range(len(matrices))
    return [roots[i] for i in every], torch.stack([failures[i] for i in every]) > 0


def inverse_triangle(lower: Tensor) -> Tensor:
    """The inverses of lower triangles ``[..., n, n]``, some columns after others: above them, all is zero.

    Of large ones that saves half the work.
    """
    size, inverse = lower.shape[-1], torch.zeros_like(lower)
    for start in range(0, size, _TOGETHER):
        some = slice(start, start + _TOGETHER)
        rest = lower[..., start:, start:]
        eye = torch.eye(size - start, len(range(size)[some]), dtype=lower.dtype, device=lower.device)
        inverse[..., start:, some] = torch.linalg.solve_triangular(rest, eye, upper=False)
    return inverse


@final
class MatrixGaussian(Leaf):
    """A matrix of weights with covariances among rows and among columns: ``mean + rows · noise · columnsᵀ``.

    It is not trained by autograd: what ends in it is learned by rule or fitted, and it holds buffers alone.

    Pruning takes the marginal: the kept weights keep their means, stds and correlations among each other, and
    the others are zero with certainty. (Conditioning on their being zero would move the means of the kept
    ones.) That marginal has no Kronecker structure, so its density and KL, unlike its draws, write out the
    covariance of the kept weights and are refused where these are more than 4096.

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

    rows: Tensor
    columns: Tensor

    def __init__(
        self,
        mean: Tensor | Sequence[Tensor],
        rows: Tensor,
        columns: Tensor,
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
        width = sum(shape[1:].numel() for shape in shapes)
        super().__init__(torch.Size([len(tensors[0]), width]), keep, shapes)
        self.register_buffer("loc", self.join([each.detach() for each in tensors]).clone())
        for name, factor, size in (("rows", rows, len(tensors[0])), ("columns", columns, width)):
            self.register_buffer(name, _factor(name, factor.detach().to(self.loc, copy=True), size))

    @classmethod
    def from_precision(
        cls,
        mean: Tensor | Sequence[Tensor],
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
        # In double precision: factors are often nearly singular, and this is done once.
        pair = damped(rows.detach().double(), columns.detach().double(), damping)
        (u, v), failed = inverse_cholesky(pair)
        if bool(failed.any()):
            raise ValueError(SINGULAR)
        return cls(mean, u / math.sqrt(scale), v, keep=keep)

    def std(self) -> Tensor:
        """Standard deviation of each weight, whatever the others are."""
        return self.masked(torch.outer(self.rows.norm(dim=1), self.columns.norm(dim=1)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the kept weights; leading dimensions stay."""
        white = self.whitened(value - self.loc)
        square = white.square().sum(-1) + white.shape[-1] * math.log(2.0 * math.pi)
        return -0.5 * square - self.log_volume()

    def factors(self) -> tuple[Tensor, ...]:
        """Lower triangles whose Kronecker product is a root of the kept weights' covariance."""
        if not self._thinned:
            return self.rows, self.columns
        row, column = self.kept.nonzero(as_tuple=True)
        if len(row) > _DENSE:
            raise ValueError(
                f"the density of a pruned matrix Gaussian needs the covariance of its {len(row)} kept "
                f"weights, more than {_DENSE}: use that of .marginals(), which ignores correlations"
            )
        u, v = (each.double() @ each.double().mT for each in (self.rows, self.columns))
        covariance = u[row[:, None], row] * v[column[:, None], column]
        return (torch.linalg.cholesky(covariance).to(self.dtype),)

    def whitened(self, shift: Tensor) -> Tensor:
        """The standard normals ``[..., n]`` behind n kept weights that far from the mean."""
        if self._thinned:
            return solved(self.factors()[0], shift[..., self.kept], -1)
        return solved(self.columns, solved(self.rows, shift, -2), -1).flatten(-2)

    def log_volume(self) -> Tensor:
        """Half the log-determinant of the kept weights' covariance."""
        factors = self.factors()
        size = math.prod(map(len, factors))
        logs = [size // max(1, len(each)) * each.diagonal().log().sum() for each in factors]
        return torch.stack(logs).sum()

    def marginals(self) -> DiagonalGaussian:
        """Independent weights with the same means and stds."""
        return DiagonalGaussian(self.mean(), self.std(), keep=self.keep)

    def correlation(self) -> Tensor:
        """KL from this to its ``marginals``: what the weights know of each other."""
        return self.total(self.marginals().filled_std().log()) - self.log_volume()

    def pruned(self, keep: Tensor) -> Self:
        """The marginal of the weights in ``keep``; the others are zero."""
        keep = keep if self.keep is None else keep & self.keep
        return type(self)(self.split(torch.where(keep, self.loc, 0.0)), self.rows, self.columns, keep=keep)

    def config(self) -> dict[str, Any]:
        """Shapes of the tensors."""
        return {"shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Build the leaf again, bit for bit."""
        mean = [tensors["loc"].new_zeros(shape) for shape in config["shapes"]]
        leaf = cls(mean, tensors["rows"], tensors["columns"], keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        return leaf

    @property
    def _thinned(self) -> bool:
        """Whether weights are missing, and with them the Kronecker structure."""
        return self.keep is not None and not bool(self.keep.all())

    @full_precision
    def _draw(self, noise: Tensor) -> Tensor:
        return self.loc + self.rows @ noise @ self.columns.mT


def _factor(name: str, factor: Tensor, size: int) -> Tensor:
    if factor.shape != (size, size):
        raise ValueError(f"{name} must have shape {(size, size)}, not {tuple(factor.shape)}")
    finite = bool(torch.isfinite(factor).all())
    if not finite or not bool((factor.diagonal() > 0).all()) or bool(factor.triu(1).any()):
        raise ValueError(
            f"{name} must be finite, lower triangular and above 0 on the diagonal: see torch.linalg.cholesky"
        )
    return factor


def solved(lower: Tensor, value: Tensor, dim: int) -> Tensor:
    """``lower⁻¹`` times the vectors along one dimension."""
    front = value.movedim(dim, 0)
    # All as columns of one matrix: leading dimensions would copy the triangle for each.
    columns = front.reshape(len(front), front.shape[1:].numel())
    white = cast(Tensor, torch.linalg.solve_triangular(lower, columns, upper=False))
    return white.reshape(front.shape).movedim(0, dim)
