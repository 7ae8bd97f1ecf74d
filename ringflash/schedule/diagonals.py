"""Diagonals: what a causal mask shows of sorted shards of whole blocks, as one number for each block.

Where blocks of queries and of keys begin at the same multiples, a block of queries either meets its own positions among the
keys, and sees a triangle of that block and all before it, or it does not, and all its rows see the same keys. Kernels then
read no ends of rows, and hide nothing but triangles.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # what positions must begin at multiples of: the largest tile of any kernel that reads diagonals
STEP = 64  # tokens that have a number of their own: the smallest


def diagonals(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """(of the queries, of the keys), int32, one for every STEP of them; None where blocks are not whole.

    queries, keys: positions, int64, increasing, where a query sees keys up to its own position.
    Of queries [i STEP, ...): 2 n + d; row r of them sees the first n keys and, if d is 1, r + 1 more.
    Of keys: 2 n + d; the first n queries do not see key r of them, nor, if d is 1, do r more; the others do.
    """
    if not (_is_whole(queries) and _is_whole(keys)):
        return None
    return _numbers(queries, keys), _numbers(keys, queries)


def _is_whole(positions: Tensor) -> bool:
    if positions.shape[0] == 0 or positions.shape[0] % BLOCK:
        return False
    blocks = positions.view(-1, BLOCK)
    first, last = blocks[:, 0], blocks[:, -1]
    return bool((first % BLOCK == 0).all()) and bool((last - first == BLOCK - 1).all())


def _numbers(positions: Tensor, others: Tensor) -> Tensor:
    first = positions[::STEP].contiguous()
    below = torch.searchsorted(others.contiguous(), first)
    meets = others[below.clamp(max=others.shape[0] - 1)] == first
    return (2 * below + meets).int()
