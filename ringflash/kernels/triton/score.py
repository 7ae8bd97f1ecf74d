"""What the kernels do to scores beside scaling them; the torch side of the same is kernels/score.py."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def bend(x):
    """tanh, by an exponential: 1 far to the right, where that is infinite, and -1 far to the left, where it is 0."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2_E * x))


@triton.jit
def transform(
    s, scale, softcap, slope, rows_at, keys_at, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """(scores in log2 units, tanh of the soft cap), from products s of any shape; rows_at and keys_at broadcast to it."""
    s = s * scale
    bent = s
    if HAS_SOFTCAP:
        bent = bend(s / softcap)
        s = softcap * bent
    if HAS_ALIBI:
        s = s - slope * tl.abs(rows_at - keys_at).to(tl.float32)
    return s * LOG2_E, bent


@triton.jit
def is_kept(seed, threshold, rows_at, keys_at, head, row):
    """Which pairs dropout keeps: a function of the seed, the batch row, the head and the two positions alone."""
    bits, _, _, _ = tl.philox(seed, rows_at, keys_at, head + tl.zeros_like(keys_at), row + tl.zeros_like(keys_at))
    return bits >= threshold.to(tl.uint32)
