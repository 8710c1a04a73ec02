"""Standard normals by address, inside a kernel: a Philox counter and a key give four of them.

The four belong to the same position in the four quarters of a tile, not to neighbours, so the thread that
handles this position in every quarter already has them. Tiles have a fixed size, so that a value depends only
on its position in the block.

Philox4x32 (Salmon et al. 2011) with seven rounds, the fewest that pass BigCrush; normals by Box–Muller. The
angle is two random signs and a quarter turn, whose sine and cosine are short polynomials: libm's would cost
more than all the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

ROUNDS: tl.constexpr = tl.constexpr(7)


# The interpreter has no fast functions.
_FAST: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    return libdevice.fast_log2f(x) if _FAST else tl.log2(x)


@triton.jit
def _pair(radius_bits, angle_bits):
    """Two independent normals from two words of random bits."""
    # sqrt(−2 ln u), with u in (0, 1) of 24 bits.
    u = (radius_bits.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(
        tl.float32
    ) * 5.9604645e-8 + 2.9802322e-8
    radius = tl.sqrt(-0.69314718 * _log2(u))
    bits = angle_bits.to(tl.uint32, bitcast=True)
    # A quarter turn: 23 bits for t in [−1, 1), the angle being (1 + t) · π/4.
    t = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) * 2.0 - 3.0
    t2 = t * t
    # sin and cos of t · π/4 as polynomials; the angle itself is 45° further on, hence the sum and difference.
    sine = t * (0.78539816 + t2 * (-0.080745512 + t2 * (0.0024903946 + t2 * -0.0000365762)))
    cosine = 1.0 + t2 * (-0.30842513 + t2 * (0.015854344 + t2 * (-0.00032599189 + t2 * 3.5908e-06)))
    return _signed(radius * (cosine + sine), bits << 8), _signed(radius * (cosine - sine), bits << 7)


@triton.jit
def _signed(x, bits):
    """The number with the sign given by the highest bit."""
    return (x.to(tl.uint32, bitcast=True) ^ (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def normals(key, step, sample, block, index):
    """Four normals of each counter (index, sample, step, block)."""
    zero = tl.zeros_like(index)
    a, b, c, d = tl.philox(key, index, zero + sample, zero + step, zero + block, n_rounds=ROUNDS)
    e0, e1 = _pair(a, b)
    e2, e3 = _pair(c, d)
    return e0, e1, e2, e3
