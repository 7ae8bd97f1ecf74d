"""Which positions of the sequence a rank holds.

Law 1, sorted shards: a rank holds its positions in strictly increasing order, and over all ranks each position is held
exactly once. Lengths may differ from rank to rank and may be zero; no layout asks for divisibility.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ringflash.schedule.copies import on_cpu
from ringflash.schedule.cut import Cut
from ringflash.schedule.documents import Documents
from ringflash.schedule.integers import integer
from ringflash.schedule.mask import Mask, Union, fingerprint


class Layout(ABC):
    """One way to cut a sequence; a hashable value. Subclasses are frozen dataclasses."""

    @abstractmethod
    def cut(self, length: int, ranks: int) -> Cut:
        """A sequence of `length` tokens cut among `ranks`."""

    @property
    def length(self) -> int | None:
        """Tokens of the only sequence that this layout fits, or None if it fits any."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is equal for equal layouts, in every process, and differs for different ones."""
        return fingerprint(self)

    def positions(self, length: int, rank: int, ranks: int) -> Tensor:
        """Global positions of `rank`, int64 [S_local], strictly increasing, on the CPU."""
        return cut(self, integer("length", length), _ranks(rank, ranks)).positions(rank)

    def shard_length(self, length: int, rank: int, ranks: int) -> int:
        """Tokens that `rank` holds of a sequence of `length`; equal on all ranks where these layouts can make it so."""
        return cut(self, integer("length", length), _ranks(rank, ranks)).shard_lengths[rank]


def _ranks(rank: int, ranks: int) -> int:
    ranks = integer("ranks", ranks, least=1)
    if integer("rank", rank) >= ranks:
        raise ValueError(f"rank = {rank}; must be in [0, {ranks})")
    return ranks


LONGEST = 2**31  # positions are int32 in kernels


@lru_cache(maxsize=256)
def shard_positions(layout: Layout, length: int, rank: int, ranks: int) -> Tensor:
    """`layout.positions`, cached: not to be written to."""
    return layout.positions(length, rank, ranks)


@lru_cache(maxsize=32)
@on_cpu
def cut(layout: Layout, length: int, ranks: int) -> Cut:
    """`layout.cut`, cached."""
    if length >= LONGEST:
        raise ValueError(f"a sequence of {length} tokens; must be < 2**31")
    if layout.length not in (None, length):
        raise ValueError(f"layout {layout} is made for {layout.length} tokens, the sequence has {length}")
    return layout.cut(length, ranks)


def border(length: Any, piece: Any, pieces: int) -> Any:
    """Where the piece starts when a length is cut as evenly as whole numbers allow; numbers or tensors of them."""
    return piece * length // pieces


def starts_by_document(lengths: tuple[int, ...], pieces: int) -> Tensor:
    """Where each of so many pieces of every document starts, int64 [documents, pieces]."""
    of_each = torch.tensor(lengths, dtype=torch.int64)[:, None]
    starts: Tensor = of_each.cumsum(0) - of_each + border(of_each, torch.arange(pieces), pieces)
    return starts


def mirrored(ranks: int) -> Tensor:
    """The rank of each of 2 P pieces, int64: r holds pieces r and 2 P - 1 - r."""
    piece = torch.arange(2 * ranks)
    return torch.minimum(piece, piece.flip(0))


def blocks(start: Tensor, owner: Tensor, length: int, ranks: int) -> Cut:
    """A Cut of blocks in order, of which some may be empty."""
    is_filled = torch.diff(start, append=start.new_full((1,), length)) > 0
    return Cut(start[is_filled].int(), owner[is_filled], length, ranks)


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th of P pieces. Simple; under a causal mask the last rank works almost twice the mean."""

    def cut(self, length: int, ranks: int) -> Cut:
        piece = torch.arange(ranks)
        return blocks(border(length, piece, ranks), piece, length, ranks)


@dataclass(frozen=True)
class Zigzag(Layout):
    """2 P pieces; rank r holds pieces r and 2 P - 1 - r, so that a causal mask gives every rank the same work.

    With 8 tokens on 2 ranks: 0 1 6 7 and 2 3 4 5. Where P divides the length every rank holds length / P tokens, even if
    2 P does not divide it: the rounding of piece r and that of its mirror cancel.
    """

    def cut(self, length: int, ranks: int) -> Cut:
        return blocks(border(length, torch.arange(2 * ranks), 2 * ranks), mirrored(ranks), length, ranks)


@dataclass(frozen=True)
class Striped(Layout):
    """Position p lives on rank p mod P. Balanced for causal masks and for packed documents longer than P tokens.

    Source: Brandon et al., arXiv:2311.09431.
    """

    def cut(self, length: int, ranks: int) -> Cut:
        first = torch.arange(min(ranks, length))
        return Cut(first.int(), first, length, ranks, is_striped=True)


@dataclass(frozen=True, init=False)
class DocumentZigzag(Layout):
    """Every document cut like `Zigzag` cuts a sequence, so that causal documents give every rank the same work.

    documents: the mask, or lengths of the documents; padding after them is cut alike. Shards are of nearly equal length:
        what does not divide goes to other ranks for each document. Best for few long documents; many short ones are cut
        more finely than is good for kernels and for planning, where `Balanced` is the layout.
    """

    lengths: tuple[int, ...]

    def __init__(self, documents: Documents | Iterable[int] | Tensor) -> None:
        mask = documents if isinstance(documents, Documents) else Documents(documents, causal=True)
        if mask.batch is not None:
            raise ValueError(f"DocumentZigzag: {mask} differs over the batch; one layout serves all rows")
        padding = (mask.padding,) if mask.padding else ()
        object.__setattr__(self, "lengths", (*mask.lengths, *padding))

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def cut(self, length: int, ranks: int) -> Cut:
        # Rounding favours the ranks of the last pieces: each document deals its pieces from another rank on.
        dealt = (mirrored(ranks) + torch.arange(len(self.lengths))[:, None]) % ranks
        return blocks(starts_by_document(self.lengths, 2 * ranks).flatten(), dealt.flatten(), length, ranks)


# Blocks of one rank: with 32 the last one moves its load by 3 % of the mean, and choosing it well leaves far less.
BLOCKS_PER_RANK = 32
# Kernels work on 64 rows at once or more; finer blocks would be mostly edges.
SMALLEST_BLOCK = 64
# Cut finer, down to this, until no rank has more than this of the mean.
FINEST_BLOCK, WELL_BALANCED = 16, 1.01
# Rows whose work is looked at: enough to know a block of 1/2048 of the sequence to a few per cent.
SAMPLES = 65536


@dataclass(frozen=True)
class Balanced(Layout):
    """Blocks dealt to the ranks so that each holds as many tokens and, within 2 %, as many visible pairs under `mask`.

    For packed documents, windows and mixtures, where no fixed pattern is fair. Long sequences are needed for the 2 %:
    blocks of less than 64 tokens are made only where few rows do all the work. `Plan.pairs_per_rank` tells what came out.

    mask: what the sequence will be attended with; a union too.
    """

    mask: Mask | Union

    def __post_init__(self) -> None:
        if not isinstance(self.mask, (Mask, Union)):
            raise TypeError(f"Balanced: mask is {type(self.mask).__name__}; must be a Mask such as Causal()")

    def __str__(self) -> str:
        return f"Balanced({self.mask})"

    @property
    def length(self) -> int | None:
        return next((mask.length for mask in _masks(self.mask) if mask.length is not None), None)

    def cut(self, length: int, ranks: int) -> Cut:
        per_rank = max(4, min(BLOCKS_PER_RANK, length // (ranks * SMALLEST_BLOCK)))
        while True:
            starts = border(length, torch.arange(per_rank * ranks + 1), per_rank * ranks)
            work = _work(self.mask, length, starts)
            owner, spread = _dealt(work, ranks)
            # Where few rows do all the work, blocks of them are few as well: cut finer.
            per_rank *= 4
            if spread <= WELL_BALANCED or length // (per_rank * ranks) < FINEST_BLOCK:
                return blocks(starts[:-1], owner, length, ranks)


def _dealt(work: Tensor, ranks: int) -> tuple[Tensor, float]:
    """The rank of each block, int64 [blocks]: as many for each, and as equal a sum of `work` as can be had.

    And the largest sum by the mean.
    """
    owner = torch.empty(work.shape[0], dtype=torch.int64)
    load = torch.zeros(ranks, dtype=work.dtype)
    for chosen in work.argsort(descending=True, stable=True).view(-1, ranks):
        # Every rank gets one block a round: the largest of the round goes to the rank with least so far.
        receiver = load.argsort(stable=True)
        owner[chosen] = receiver
        load[receiver] += work[chosen]
    return owner, float(load.max() / load.mean().clamp_min(1e-9))


def _masks(mask: Mask | Union) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, Union) else (mask,)


def _work(mask: Mask | Union, length: int, starts: Tensor) -> Tensor:
    """Visible pairs of each block of rows, float64 [blocks], from evenly spaced rows where there are very many."""
    if length == 0:
        return torch.zeros(starts.shape[0] - 1, dtype=torch.float64)
    step = max(1, length // SAMPLES)
    rows = torch.arange(step // 2, length, step)
    bounds = [part.bounds(rows) for part in _masks(mask)]
    pairs = sum((hi.clamp(0, length) - lo.clamp(0, length)).sum(0).double() for lo, hi in bounds)
    assert isinstance(pairs, Tensor), "a union has parts"
    sums = torch.nn.functional.pad(pairs.cumsum(0), (1, 0))
    index = torch.searchsorted(rows, starts)
    return (sums[index[1:]] - sums[index[:-1]]) * step
