"""Needs: which rows of each rank are needed by which other rank. All that moves follows from this table.

Every rank computes the whole table from values that all share, so senders and receivers agree without talking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ringflash.schedule.copies import on_cpu
from ringflash.schedule.cut import Cut
from ringflash.schedule.integers import NO_END
from ringflash.schedule.layout import Layout, cut
from ringflash.schedule.mask import Mask

NOTHING = slice(0, 0)


@dataclass(frozen=True, eq=False)
class Needs:
    """first, past: int32 [P, P]; rank r sees rows [first[r, s], past[r, s]) of the shard of source s; 0, 0 for none.

    Where keys travel they are key rows that queries see; where queries travel, query rows that see keys.

    In a ring, the shard of source s reaches rank s + h at hop h. On its way it carries the rows that this rank or a later
    one sees; on the way back its gradients carry the rows that any rank so far has seen.
    """

    first: Tensor
    past: Tensor

    @property
    def ranks(self) -> int:
        return self.first.shape[0]

    def seen(self, rank: int, source: int) -> slice:
        """Rows of `source` that `rank` sees."""
        return self._seen[rank][source]

    def onward(self, source: int, hop: int) -> slice:
        """Rows of `source` that travel to rank source + hop, for it and for those after it."""
        return self._onward[source][hop] if hop < self.ranks else NOTHING

    def gathered(self, source: int, hop: int) -> slice:
        """Rows of `source` of which ranks source + 1 to source + hop have gradients; nothing after the last that has any."""
        return self._gathered[source][hop] if 0 < hop <= self.last(source) else NOTHING

    def last(self, source: int) -> int:
        """Hop of the last rank that sees anything of `source`, from which its gradients go home; 0 if only itself."""
        return self._last[source]

    @cached_property
    def hops(self) -> int:
        """Hops after which nobody needs a shard any more: at most P - 1."""
        return max(self._last)

    def sent(self, rank: int) -> int:
        """Rows that `rank` sends in one pass."""
        return _count(self.onward((rank - hop) % self.ranks, hop + 1) for hop in range(self.hops))

    def sent_back(self, rank: int) -> int:
        """Rows of gradients that `rank` sends in one pass."""
        return _count(self.gathered((rank - hop) % self.ranks, hop) for hop in range(1, self.hops + 1))

    @cached_property
    @on_cpu
    def widest(self) -> int:
        """The most rows that any rank sees of another one."""
        others = ~torch.eye(self.ranks, dtype=torch.bool)
        return int(((self.past - self.first) * others).amax())

    @cached_property
    def moved(self) -> int:
        """Rows that all ranks together send in one pass."""
        return sum(self.sent(rank) for rank in range(self.ranks))

    @cached_property
    def returned(self) -> int:
        """Rows of gradients that all ranks together send in one pass."""
        return sum(self.sent_back(rank) for rank in range(self.ranks))

    @cached_property
    def _seen(self) -> list[list[slice]]:
        return _slices(self.first, self.past)

    @cached_property
    @on_cpu
    def _by_hop(self) -> tuple[Tensor, Tensor]:
        """first and past by [source, hop], past any row where nothing is seen, so that min and max find the hull."""
        P = self.ranks
        source = torch.arange(P)[:, None]
        rank = (source + torch.arange(P)) % P
        first, past = self.first[rank, source], self.past[rank, source]
        return torch.where(past > first, first, FAR), torch.where(past > first, past, 0)

    @cached_property
    @on_cpu
    def _onward(self) -> list[list[slice]]:
        first, past = (x.flip(1) for x in self._by_hop)
        return _hulls(first.cummin(1).values.flip(1), past.cummax(1).values.flip(1))

    @cached_property
    @on_cpu
    def _gathered(self) -> list[list[slice]]:
        first, past = (x.clone() for x in self._by_hop)
        first[:, 0], past[:, 0] = FAR, 0  # the owner's share stays at home
        return _hulls(first.cummin(1).values, past.cummax(1).values)

    @cached_property
    @on_cpu
    def _last(self) -> list[int]:
        _, past = self._by_hop
        return [int(x) for x in ((past > 0) * torch.arange(self.ranks)).amax(1)]


FAR = 2**31 - 1  # past every row


def _count(rows: Iterable[slice]) -> int:
    return sum(part.stop - part.start for part in rows)


def _slices(first: Tensor, past: Tensor) -> list[list[slice]]:
    rows = zip(first.tolist(), past.tolist(), strict=True)
    return [[slice(a, b) for a, b in zip(*row, strict=True)] for row in rows]


def _hulls(first: Tensor, past: Tensor) -> list[list[slice]]:
    is_empty = past <= first
    return _slices(first.masked_fill(is_empty, 0), past.masked_fill(is_empty, 0))


# A table is P x P; two masks a layer, two routes and a few batches in flight.
@lru_cache(maxsize=32)
@on_cpu
def needs(mask: Mask, layout: Layout, length: int, ranks: int, query_length: int) -> Needs:
    """Exact where the queries of a block see keys without a hole between them, else the hull: nothing is ever missing.

    Only the ends of blocks are looked at, so the cost does not grow with the length.
    """
    queries, keys = cut(layout, query_length, ranks), cut(layout, length, ranks)
    lo, hi = _seen_by_blocks(mask, queries, length - query_length)  # [B, R]
    return _table(queries, keys, *(x.clamp(0, length) for x in (lo, hi)))


@lru_cache(maxsize=32)
@on_cpu
def query_needs(mask: Mask, layout: Layout, length: int, ranks: int, query_length: int) -> Needs:
    """Which query rows of each rank see keys of which other rank; the hull of them where there are holes.

    Found at the ends of the blocks of keys, by bisection among the queries.
    """
    queries, keys = cut(layout, query_length, ranks), cut(layout, length, ranks)
    shift = length - query_length
    # Ends grow along the queries, so those that see a key between two are the ones whose hi is past the first of them, as
    # far as the ones whose lo is not past the last.
    lo = _first_query(mask, keys.start.long(), 1, query_length, shift)
    hi = _first_query(mask, keys.last.long(), 0, query_length, shift)
    # Rows without keys at either end, such as padding, have ends too, which may lie inside a block.
    first_row, past_row = ((x.clamp(-NO_END // 4, NO_END // 4)[:, None] - shift).clamp_min(0) for x in mask.rows())
    lo, hi = torch.maximum(lo, first_row), torch.minimum(hi, past_row)
    is_empty = (keys.count == 0).expand_as(lo)
    return _table(keys, queries, lo.masked_fill(is_empty, 0), torch.maximum(lo, hi).masked_fill(is_empty, 0))


def _first_query(mask: Mask, key: Tensor, end: int, query_length: int, shift: int) -> Tensor:
    """The first query whose end (0: lo, 1: hi) is past each of `key` [R], int64 [1 or B, R]; query_length if none is."""
    low = torch.zeros(mask.batch or 1, key.shape[0], dtype=torch.int64)
    high = torch.full_like(low, query_length)
    for _ in range(query_length.bit_length()):
        middle = (low + high).div(2, rounding_mode="floor")
        is_past = _at(mask, middle + shift, end) > key
        is_open = low < high
        low, high = torch.where(is_open & ~is_past, middle + 1, low), torch.where(is_open & is_past, middle, high)
    return low


def _table(viewers: Cut, sources: Cut, lo: Tensor, hi: Tensor) -> Needs:
    """Of blocks of `viewers` that see global positions [lo, hi) of `sources`, both [B, R]."""
    ranks = sources.ranks
    everyone = torch.arange(ranks)
    first, past = (sources.below(x.int(), everyone) for x in (lo, hi))  # [P, B, R]
    is_empty = past <= first
    # By rank of the viewers: blocks of one rank next to each other, then one reduction for all.
    first, past = first.masked_fill(is_empty, FAR).amin(1), past.masked_fill(is_empty, 0).amax(1)  # [P, R]
    index = viewers.owner.expand(ranks, -1)
    first = first.new_full((ranks, ranks), FAR).scatter_reduce_(1, index, first, "amin").T
    past = past.new_zeros(ranks, ranks).scatter_reduce_(1, index, past, "amax").T
    return Needs(first.masked_fill(past == 0, 0), past)


def _seen_by_blocks(mask: Mask, queries: Cut, shift: int) -> tuple[Tensor, Tensor]:
    """Ends of what the queries of each block see together, global, int64 [B, R]; equal where they see nothing."""
    start, last, step = queries.start.long() + shift, queries.last.long() + shift, queries.step
    first_row, past_row = (x.clamp(-NO_END // 4, NO_END // 4)[:, None] for x in mask.rows())
    # Rows without keys at either end of a block would widen what it sees: begin and end at rows that may have some.
    begin = start + _steps(first_row - start, step)
    end = last - _steps(last - past_row + 1, step)
    lo, hi = _at(mask, begin, 0), _at(mask, end, 1)
    return lo, torch.where((begin <= end).expand_as(lo), torch.maximum(lo, hi), lo)


def _steps(distance: Tensor, step: int) -> Tensor:
    """The smallest multiple of `step` that is >= distance, and >= 0."""
    steps: Tensor = (distance + step - 1).div(step, rounding_mode="floor").clamp_min(0)
    return steps * step


def _at(mask: Mask, positions: Tensor, end: int) -> Tensor:
    """One end of the bounds at positions [B, R] that may differ by batch row, [B, R]."""
    if positions.shape[0] == 1:
        return mask.bounds(positions[0])[end]
    bounds = mask.bounds(positions.flatten())[end].unflatten(1, positions.shape)  # [1 or B, B, R]
    row = torch.arange(positions.shape[0])
    own: Tensor = bounds[row.clamp_max(bounds.shape[0] - 1), row]
    return own
