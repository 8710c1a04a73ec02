"""Standard normals by address, inside a kernel: a Philox counter and a key give four of them.

Philox4x32 (Salmon et al. 2011) with seven rounds, the fewest that pass BigCrush; normals by Box–Muller. The
angle is two random signs and a quarter turn, whose sine and cosine are short polynomials: libm's would cost
more than all the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS: tl.constexpr = tl.constexpr(7)


@triton.jit
def _pair(radius_bits, angle_bits):
    """Two independent normals from two words of random bits."""
    # −2 ln u, with u in (0, 1] of 24 bits or more.
    u = (radius_bits.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(
        tl.float32
    ) * 5.9604645e-8 + 2.9802322e-8
    radius = tl.sqrt(-2.0 * tl.log(u))
    bits = angle_bits.to(tl.uint32, bitcast=True)
    # A quarter turn: 23 bits for t in [−1, 1), the angle being (1 + t) · π/4.
    t = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) * 2.0 - 3.0
    t2 = t * t
    # sin and cos of t·π/4 as polynomials; the angle itself is 45° further on.
    s = t * (0.78539816 + t2 * (-0.080745512 + t2 * (0.0024903946 + t2 * -0.0000365762)))
    c = 1.0 + t2 * (-0.30842513 + t2 * (0.015854344 + t2 * (-0.00032599189 + t2 * 3.5908e-06)))
    scaled = radius * 0.70710678
    first = scaled * (c + s)
    second = scaled * (c - s)
    first = tl.where((bits & 0x800000) != 0, -first, first)
    second = tl.where((bits & 0x1000000) != 0, -second, second)
    return first, second


@triton.jit
def normals(seed, step, sample, block, index):
    """Four normals of each counter (index, sample, step, block); the key is the seed."""
    zero = tl.zeros_like(index)
    a, b, c, d = tl.philox(seed, index, zero + sample, zero + step, zero + block, n_rounds=ROUNDS)
    e0, e1 = _pair(a, b)
    e2, e3 = _pair(c, d)
    return e0, e1, e2, e3


@triton.jit
def eps(seed, step, sample, block, start, BLOCK: tl.constexpr):
    """The normals of a block's elements start … start + BLOCK; start is a multiple of 4."""
    e0, e1, e2, e3 = normals(seed, step, sample, block, start // 4 + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [BLOCK])


@triton.jit
def eps_tile(seed, step, sample, block, row, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The normals of a tile of a block ``[*, width]``; width, column and COLUMNS are multiples of 4."""
    rows = row + tl.arange(0, ROWS)
    quads = column // 4 + tl.arange(0, COLUMNS // 4)
    e0, e1, e2, e3 = normals(seed, step, sample, block, rows[:, None] * (width // 4) + quads[None, :])
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [ROWS, COLUMNS])
