"""Which positions of the sequence a rank holds.

Law 1, sorted shards: a rank holds its positions in strictly increasing order, and over all ranks each position is held
exactly once. Lengths may differ from rank to rank and may be zero; no layout asks for divisibility.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Layout(ABC):
    """One way to cut a sequence; a hashable value. Subclasses are frozen dataclasses."""

    @abstractmethod
    def positions(self, length: int, rank: int, ranks: int) -> Tensor:
        """Global positions of `rank`, int64 [S_local], strictly increasing, on the CPU.

        length: tokens of the whole sequence; 0 <= rank < ranks.
        """

    def shard_length(self, length: int, rank: int, ranks: int) -> int:
        """Tokens that `rank` holds of a sequence of `length`; equal on all ranks when ranks divides length."""
        return self.positions(length, rank, ranks).numel()


def _cut(length: int, piece: int, pieces: int) -> int:
    """Where the piece starts when a length is cut as evenly as whole numbers allow."""
    return piece * length // pieces


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th of P pieces. Simple; under a causal mask the last rank works almost twice the mean."""

    def positions(self, length: int, rank: int, ranks: int) -> Tensor:
        return torch.arange(_cut(length, rank, ranks), _cut(length, rank + 1, ranks))


@dataclass(frozen=True)
class Zigzag(Layout):
    """2 P pieces; rank r holds pieces r and 2 P - 1 - r, so that a causal mask gives every rank the same work.

    With 8 tokens on 2 ranks: 0 1 6 7 and 2 3 4 5. Where P divides the length every rank holds length / P tokens, even if
    2 P does not divide it: the rounding of piece r and that of its mirror cancel.
    """

    def positions(self, length: int, rank: int, ranks: int) -> Tensor:
        mirror = 2 * ranks - 1 - rank
        first = torch.arange(_cut(length, rank, 2 * ranks), _cut(length, rank + 1, 2 * ranks))
        second = torch.arange(_cut(length, mirror, 2 * ranks), _cut(length, mirror + 1, 2 * ranks))
        return torch.cat([first, second])


@dataclass(frozen=True)
class Striped(Layout):
    """Position p lives on rank p mod P. Balanced for causal masks and for packed documents longer than P tokens.

    Source: Brandon et al., arXiv:2311.09431.
    """

    def positions(self, length: int, rank: int, ranks: int) -> Tensor:
        return torch.arange(rank, max(rank, length), ranks)
