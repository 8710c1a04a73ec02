"""From a block's Kronecker factors to roots of their damped inverses, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from posterity.optim.matrices import Refused
from posterity.posterior.algebra import SINGULAR, inverse_cholesky, shares, solved

# Inverses are made in double precision, which few GPUs are fast in, where damping is less than this part of a
# factor's diagonal: single precision keeps two to four digits there, more than one batch's factors are worth.
_LEAST = 1e-3


def inverse_roots(
    factors: Mapping[int, tuple[Tensor, Tensor, float]],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Lower R, C with R Rᵀ = S_γ⁻¹ and C Cᵀ = A_γ⁻¹, given S̄, Ā and γ of blocks by number.

    A GPU is waited for once, before the work: what has enough damping has an inverse, and is not looked at.
    """
    if not factors:
        return {}
    matrices = [each for outputs, inputs, _ in factors.values() for each in (outputs, inputs)]
    device, diagonals = matrices[0].device, [each.diagonal() for each in matrices]
    means = torch.stack([each.mean().to(device) for each in diagonals]).view(-1, 2)
    low, high = (
        torch.stack([each.to(device) for each in ends])
        for ends in zip(*(each.aminmax() for each in diagonals), strict=True)
    )
    # Rounding may have made eigenvalues of a singular factor negative, though not by more of the trace.
    known = [
        [math.sqrt(damping), *(torch.finfo(each.dtype).eps * len(each) for each in pair)]
        for *pair, damping in factors.values()
    ]
    roots, *rounding = torch.tensor(known, dtype=means.dtype).to(device).unbind(1)
    shifts = torch.stack(shares(means[:, 0], means[:, 1], roots), 1)
    shifts = (shifts + torch.stack(rounding, 1) * (means + shifts)).flatten()
    plain = ((low >= 0) & (shifts >= _LEAST * high)).tolist()
    chosen = [each if fine else each.double() for each, fine in zip(matrices, plain, strict=True)]
    found, failed = inverse_cholesky(chosen, shifts)
    if not all(plain) and bool(failed.any()):
        raise Refused(SINGULAR, list(factors)[failed.tolist().index(True) // 2])
    found = [root.to(each) for root, each in zip(found, matrices, strict=True)]
    return dict(zip(factors, zip(found[::2], found[1::2], strict=True), strict=True))


def undamped(rows: Tensor, columns: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The S̄, Ā with S_γ = (rows rowsᵀ)⁻¹ and A_γ = (columns columnsᵀ)⁻¹, or the nearest that there are.

    tr A_γ / (I+1) = π (√(tr Ā/(I+1) · tr S̄/O) + √γ), and that of S_γ is the same over π instead of times π:
    the ratio of both is π², before damping as after it. Where damping alone exceeds S_γ or A_γ, nothing is
    left of them.
    """
    found = []
    for root in (rows.double(), columns.double()):
        inverse = solved(root, torch.eye(len(root), dtype=root.dtype, device=root.device), 0)
        found.append(torch.linalg.eigh(inverse.mT @ inverse))
    pi = (found[1][0].mean() / found[0][0].mean()).sqrt()
    shifts = math.sqrt(damping) / pi, math.sqrt(damping) * pi
    outputs, inputs = (
        (vectors * (values - shift).clamp(min=0.0)) @ vectors.mT
        for (values, vectors), shift in zip(found, shifts, strict=True)
    )
    return outputs, inputs
