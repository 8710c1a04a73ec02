"""Common parts of the matrix and the eigenbasis Gaussian: weights correlated along rows and columns.

The block is W̃ = [W | b], ``[O, I + 1]``; a convolution's weight is flattened to ``[O, C·R·S]``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, cast

import torch
from torch import Tensor

from posterity.arguments import TENSOR, Kind, is_dense, takes
from posterity.posterior.algebra import full_precision, solved
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.leaf import Leaf

Means: TypeAlias = Tensor | Sequence[Tensor]
MEANS = Kind(
    "dense tensors of real numbers",
    lambda mean: is_dense(mean) or (isinstance(mean, list | tuple) and all(map(is_dense, mean))),
)

# The covariance of a pruned block is written out up to this many weights: 128 MiB in float64.
_DENSE = 4096


class KroneckerGaussian(Leaf):
    """A Gaussian over a matrix of weights, with one factor among rows and one among columns.

    It is not trained by autograd but by a rule or a fit, and holds buffers only.

    Pruning takes the marginal: the remaining weights keep their means, stds and correlations, and the others
    are exactly zero. (Conditioning on zeros would move the means of the remaining ones.) That marginal has no
    Kronecker structure: draws are as fast as before, but density and KL write out the covariance of the kept
    weights, and are refused above 4096 of them.

    Args:
        mean: Means of the block's tensors, left to right, such as ``(weight, bias)`` or a weight alone; all
            have O as their first dimension, and share dtype and device.
        rows: Factor among outputs, ``[O, O]``.
        columns: Factor among inputs, ``[I + 1, I + 1]``, or ``[I, I]`` without a bias.
        keep: Mask of the weights that are not pruned, in the block's shape.

    Example:
        >>> from posterity import MatrixGaussian
        >>> isinstance(MatrixGaussian(torch.zeros(2, 3), torch.eye(2), torch.eye(3)), KroneckerGaussian)
        True
    """

    parts: ClassVar[tuple[str, ...]] = ("rows", "columns")  # the constructor's arguments after the mean
    rows: Tensor
    columns: Tensor

    @takes(mean=MEANS, rows=TENSOR, columns=TENSOR, keep=TENSOR)
    def __init__(self, mean: Means, rows: Tensor, columns: Tensor, *, keep: Tensor | None = None) -> None:
        tensors = (mean,) if isinstance(mean, Tensor) else tuple(mean)
        shapes = [each.shape for each in tensors]
        if not all(each.is_floating_point() for each in tensors):
            raise TypeError("means must be floating-point numbers: pass mean.float()")
        if not tensors or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                "the tensors of a matrix block need the same first dimension, not the shapes "
                f"{[tuple(shape) for shape in shapes]}"
            )
        height, width = shapes[0][0], sum(shape[1:].numel() for shape in shapes)
        super().__init__(torch.Size([height, width]), keep, shapes)
        self.register_buffer("loc", self.join([each.detach() for each in tensors]).clone())
        self._hold("rows", rows, (height, height))
        self._hold("columns", columns, (width, width))

    def _hold(self, name: str, given: Tensor, shape: tuple[int, int]) -> None:
        """Store a copy of a factor after checking it."""
        if given.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(given.shape)}")
        # Contiguous, as a file has it, so that products round alike after loading.
        own = given.detach().to(self.loc, copy=True, memory_format=torch.contiguous_format)
        self._check(name, own)
        self.register_buffer(name, own)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the kept weights; leading dimensions stay."""
        white = self.whitened(value - self.loc)
        square = white.square().sum(-1) + white.shape[-1] * math.log(2.0 * math.pi)
        return -0.5 * square - self.log_volume()

    @full_precision
    def whitened(self, shift: Tensor) -> Tensor:
        """The standard normals ``[..., n]`` behind n kept weights that far from the mean."""
        if self.thinned:
            return solved(self.cholesky(), shift[..., self.varying], -1)
        return self._whitened(shift).flatten(-2)

    def log_volume(self) -> Tensor:
        """Half the log-determinant of the kept weights' covariance."""
        return self.cholesky().diagonal().log().sum() if self.thinned else self._log_volume()

    def cholesky(self) -> Tensor:
        """Lower Cholesky factor of the kept weights' covariance, ``[n, n]``, row after row of the block."""
        row, column = self.varying.nonzero(as_tuple=True)
        if len(row) > _DENSE:
            raise ValueError(
                f"the density of a pruned {type(self).__name__} needs the covariance of its {len(row)} kept "
                f"weights, more than {_DENSE}: use that of .marginals(), which ignores correlations"
            )
        return cast(Tensor, torch.linalg.cholesky(self._covariance(row, column))).to(self.dtype)

    def marginals(self) -> DiagonalGaussian:
        """Independent weights with the same means and stds."""
        std = torch.where(self.varying, self.std(), 1.0)
        leaf = DiagonalGaussian(self.mean(), std, keep=self.keep)
        return leaf.hold(self.held)

    def correlation(self) -> Tensor:
        """KL from this to its ``marginals``: the total correlation."""
        return self.total(self.marginals().filled_std().log()) - self.log_volume()

    def divergence(self, p: Self) -> Tensor:
        """KL(self ‖ p): ½ (tr(Σp⁻¹ Σq) + ‖Lp⁻¹ (μq−μp)‖² − n) + log|Lp| − log|Lq|, of the kept weights."""
        if self.thinned:
            p = p.pruned(self.varying)
        # In double precision: trace and n are large, and nearly equal if q has barely moved.
        if self.thinned:
            trace = solved(p.cholesky().double(), self.cholesky().double(), 0).square().sum()
        else:
            trace = self._trace(p)
        excess = (trace - int(self.varying.sum())).to(self.dtype)
        shift = p.whitened(self.mean() - p.mean()).square().sum()
        return 0.5 * (excess + shift) + p.log_volume() - self.log_volume()

    def divergence_from(self, q: DiagonalGaussian) -> Tensor:
        """KL(q ‖ self) of independent weights: ½ (Σ σ²·Pᵢᵢ + ‖L⁻¹ Δμ‖² − n) + log|L| − Σ log σ."""
        p = self
        if not ((q.whole and p.whole) or torch.equal(q.varying, p.varying)):
            p = p.pruned(q.varying)
        std = q.filled_std()
        if p.thinned:
            trace = solved(p.cholesky().double(), std[p.varying].double().diag(), 0).square().sum()
        else:
            trace = (std.double().square() * p.precision_diagonal()).sum()
        excess = (trace - int(p.varying.sum())).to(std.dtype)
        shift = p.whitened(q.mean() - p.mean()).square().sum()
        return 0.5 * (excess + shift) + p.log_volume() - q.total(std.log())

    def pruned(self, keep: Tensor) -> Self:
        """The marginal of the weights in ``keep``; the others are zero."""
        keep = keep & self.kept
        mean = self.split(torch.where(keep, self.loc, 0.0))
        leaf = type(self)(mean, *(getattr(self, name) for name in self.parts), keep=keep)
        return leaf.hold(self.held)

    def config(self) -> dict[str, Any]:
        """Shapes of the tensors."""
        return {"shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf, bit for bit."""
        mean = [tensors["loc"].new_zeros(shape) for shape in config["shapes"]]
        leaf = cls(mean, *(tensors[name] for name in cls.parts), keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        return leaf

    @property
    def thinned(self) -> bool:
        """Whether weights are pruned, which breaks the Kronecker structure."""
        return not (self.whole or bool(self.varying.all()))

    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """The diagonal of the whole covariance's inverse, in the block's shape and double precision."""

    @abstractmethod
    def _check(self, name: str, factor: Tensor) -> None:
        """Raise unless a factor is what the family needs."""

    @abstractmethod
    def _whitened(self, shift: Tensor) -> Tensor:
        """The standard normals ``[..., O, I + 1]`` behind weights that far from the mean."""

    @abstractmethod
    def _log_volume(self) -> Tensor:
        """Half the log-determinant of the whole covariance."""

    @abstractmethod
    def _covariance(self, row: Tensor, column: Tensor) -> Tensor:
        """Covariance of the weights at the given places, in double precision."""

    @abstractmethod
    def _trace(self, p: Self) -> Tensor:
        """tr(Σp⁻¹ Σ) of whole blocks, in double precision."""
