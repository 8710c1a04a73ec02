"""Damping of Kronecker factors, Cholesky roots of their inverses, and products in their precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
# Matrices of one size, up to this limit, are decomposed in a batch, because a single one does not fill a GPU;
# larger ones are solved for this many columns at a time.
_TOGETHER = 1024

SINGULAR = "a factor of the precision is not positive definite: raise damping"


def damped(rows: Tensor, columns: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Factored Tikhonov damping: ``rows + √damping / π · I`` and ``columns + √damping · π · I``.

    π² is the mean eigenvalue of ``columns`` over that of ``rows`` (Martens and Grosse 2015, section 6.3), so
    that both are damped in proportion to their size; π is 1 if one of them is zero.

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
    """The shifts of :func:`damped`, from mean eigenvalues and the root of the damping; for any shape."""
    ratio = columns / rows
    pi = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0).sqrt()
    return root / pi, root * pi


def inverse_cholesky(matrices: Sequence[Tensor], shifts: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """For each, the lower L with ``L Lᵀ = (matrix + shift · I)⁻¹``, and whether it is not positive definite.

    With J the reversal of the order, J P J = C Cᵀ gives P = R Rᵀ for the upper R = J C J, and L = R⁻ᵀ: the
    inverse is never formed. Small matrices of one size go in one batch, and nothing waits for the GPU.

    Args:
        matrices: Symmetric matrices of any sizes.
        shifts: One number for each matrix.
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
    """Inverses of lower triangles ``[..., n, n]``, solved in blocks of columns.

    This saves half the work for large triangles, which are zero above a block.
    """
    size, inverse = lower.shape[-1], torch.zeros_like(lower)
    for start in range(0, size, _TOGETHER):
        some = slice(start, start + _TOGETHER)
        rest = lower[..., start:, start:]
        eye = torch.eye(size - start, len(range(size)[some]), dtype=lower.dtype, device=lower.device)
        inverse[..., start:, some] = torch.linalg.solve_triangular(rest, eye, upper=False)
    return inverse


def solved(lower: Tensor, value: Tensor, dim: int) -> Tensor:
    """``lower⁻¹`` times the vectors along one dimension."""
    front = value.movedim(dim, 0)
    # As columns of one matrix: leading dimensions would copy the triangle for each of them.
    columns = front.reshape(len(front), front.shape[1:].numel())
    return divided(lower, columns).reshape(front.shape).movedim(0, dim)


def divided(lower: Tensor, columns: Tensor) -> Tensor:
    """``lower⁻¹ columns`` of matrices ``[..., n, n]`` and ``[..., n, k]``."""
    wide = torch.promote_types(columns.dtype, torch.float32)  # torch cannot solve in half precision
    white = cast(Tensor, torch.linalg.solve_triangular(lower.to(wide), columns.to(wide), upper=False))
    return white.to(columns.dtype)


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator that turns autocast off: it is meant for a model's layers, not for a posterior.

    Example:
        >>> product = full_precision(torch.mm)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch.mm(torch.eye(2), torch.eye(2)).dtype, product(torch.eye(2), torch.eye(2)).dtype
        (torch.bfloat16, torch.float32)
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as off:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
