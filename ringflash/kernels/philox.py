"""Philox-4x32-10 in torch: random bits as a function of a counter and a key, the same ones that Triton's own gives.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLY_0, MULTIPLY_2 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """The first of the four words, int64 in [0, 2**32), for counters (c0, c1, c2, c3), int64, broadcast together.

    seed: in [0, 2**64), the key. Negative counters count from 2**32 down, as unsigned words do.
    """
    c0, c1, c2, c3 = (c & WORD for c in (c0, c1, c2, c3))
    key_0, key_1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        # A product of words may pass 2**63 and wrap, but its bits are right, and the mask drops the sign.
        product_0, product_2 = c0 * MULTIPLY_0, c2 * MULTIPLY_2
        c0 = (product_2 >> 32 & WORD) ^ c1 ^ key_0
        c2 = (product_0 >> 32 & WORD) ^ c3 ^ key_1
        c1, c3 = product_2 & WORD, product_0 & WORD
        key_0, key_1 = key_0 + WEYL_0 & WORD, key_1 + WEYL_1 & WORD
    return c0
