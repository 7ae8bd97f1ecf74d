"""Plan: what one rank computes with each source's keys, what moves, and what it costs.

Everything here follows from values that all ranks share (mask, layout, length, ranks), so any rank can compute any
rank's plan and ranks agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ringflash.schedule.integers import integer
from ringflash.schedule.layout import Layout
from ringflash.schedule.mask import Mask
from ringflash.schedule.tiles import Bounds


@dataclass(frozen=True)
class Plan:
    """The work of `rank`: `plan[source]` are the Bounds of its queries against the keys of `source`.

    length: tokens of the whole key sequence; query_length: of the query sequence, the same but for cross attention,
    where the last query stands at the position of the last key. Get plans from `plan()`, which caches them.
    """

    mask: Mask
    layout: Layout
    length: int
    rank: int
    ranks: int
    query_length: int

    def __getitem__(self, source: int) -> Bounds:
        if not 0 <= source < self.ranks:
            raise IndexError(f"Plan: source = {source}; must be in [0, {self.ranks})")
        if source not in self._bounds:
            keys = shard_positions(self.layout, self.length, source, self.ranks)
            lo, hi = (torch.searchsorted(keys, end.contiguous(), out_int32=True) for end in self._global_bounds)
            self._bounds[source] = Bounds(lo, hi, keys.numel())
        return self._bounds[source]

    @cached_property
    def _bounds(self) -> dict[int, Bounds]:
        """Kept with the plan, so that they and their copies on devices go when the last call that needs them is done."""
        return {}

    @cached_property
    def positions(self) -> Tensor:
        """Where this rank's queries stand among the keys, int64 [Sq]; negative for queries before the first key."""
        shift = self.length - self.query_length
        return shard_positions(self.layout, self.query_length, self.rank, self.ranks) + shift

    def shard_length(self, source: int) -> int:
        """Keys that `source` holds."""
        return shard_positions(self.layout, self.length, source, self.ranks).numel()

    @cached_property
    def _global_bounds(self) -> tuple[Tensor, Tensor]:
        """Ends of each query's interval in global positions, inside [0, length]."""
        lo, hi = self.mask.bounds(self.positions)
        return lo.clamp(0, self.length), hi.clamp(0, self.length)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks that own at least one key visible from here."""
        return tuple(source for source in range(self.ranks) if self._sees(source))

    def _sees(self, source: int) -> bool:
        keys = shard_positions(self.layout, self.length, source, self.ranks)
        for lo, hi in zip(*self._global_bounds, strict=True):
            first, past = torch.searchsorted(keys, lo), torch.searchsorted(keys, hi)
            if bool((first < past).any()):
                return True
        return False

    @cached_property
    def hops(self) -> int:
        """Hops after which nobody in the ring needs a shard any more; at most ranks - 1, the same on every rank.

        After hop h a rank holds the shard of (rank - h) mod ranks.
        """
        return max(((peer.rank - source) % self.ranks for peer in self.peers for source in peer.sources), default=0)

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of this rank, the measure of its work (per batch row and head)."""
        lo, hi = self._global_bounds
        return int((hi - lo).sum())

    @cached_property
    def pairs_per_rank(self) -> tuple[int, ...]:
        """`pairs` of every rank; max / mean is the balance of the layout for this mask."""
        return tuple(peer.pairs for peer in self.peers)

    @property
    def peers(self) -> list[Plan]:
        """The plan of every rank, by rank; not cached."""
        return [replace(self, rank=rank) for rank in range(self.ranks)]

    def forward_bytes(self, *, batch: int, key_heads: int, head_dim: int, value_dim: int, itemsize: int) -> int:
        """Bytes that this rank sends in one forward pass: K and V of the shard it holds, once per hop."""
        tokens = sum(self._held(hop) for hop in range(self.hops))
        return batch * tokens * key_heads * (head_dim + value_dim) * itemsize

    def backward_bytes(
        self, *, batch: int, key_heads: int, head_dim: int, value_dim: int, itemsize: int, gradient_itemsize: int = 4
    ) -> int:
        """Bytes that this rank sends in one backward pass: K and V as in forward, dK and dV with them and home."""
        keys = self.forward_bytes(
            batch=batch, key_heads=key_heads, head_dim=head_dim, value_dim=value_dim, itemsize=itemsize
        )
        tokens = sum(self._held(hop) for hop in range(self.hops + 1)) if self.hops else 0
        return keys + batch * tokens * key_heads * (head_dim + value_dim) * gradient_itemsize

    def _held(self, hop: int) -> int:
        return self.shard_length((self.rank - hop) % self.ranks)


@lru_cache(maxsize=256)
def shard_positions(layout: Layout, length: int, rank: int, ranks: int) -> Tensor:
    """`layout.positions`, cached: not to be written to."""
    return layout.positions(length, rank, ranks)


def plan(
    mask: Mask, layout: Layout, length: int, rank: int = 0, ranks: int = 1, query_length: int | None = None
) -> Plan:
    """The cached plan of `rank` for a sequence of `length` tokens on `ranks` ranks.

    query_length: tokens of the query sequence where it is not the key sequence (cross attention).
    Raises TypeError for wrong types, ValueError for wrong values and if the mask is made for another length.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"plan: mask is {type(mask).__name__}; must be a Mask such as Causal()")
    if not isinstance(layout, Layout):
        raise TypeError(f"plan: layout is {type(layout).__name__}; must be a Layout such as Zigzag()")
    length = integer("plan: length", length)
    query_length = length if query_length is None else integer("plan: query_length", query_length)
    ranks = integer("plan: ranks", ranks, least=1)
    rank = integer("plan: rank", rank)
    if rank >= ranks:
        raise ValueError(f"plan: rank = {rank}; must be in [0, {ranks})")
    if mask.length is not None and mask.length != length:
        missing = length - mask.length
        remedy = f"; add a document or padding={missing}" if missing > 0 else ""
        raise ValueError(f"mask {mask} is made for {mask.length} tokens, the sequence has {length}{remedy}")
    if mask.length is not None and query_length != length:
        raise ValueError(
            f"mask {mask}: {query_length} queries over {length} keys; this mask is for self-attention only"
        )
    return _plan(mask, layout, length, rank, ranks, query_length)


# Enough for the mask kinds of one model times a few batches in flight; a million tokens of bounds are 16 MB each.
@lru_cache(maxsize=32)
def _plan(mask: Mask, layout: Layout, length: int, rank: int, ranks: int, query_length: int) -> Plan:
    return Plan(mask, layout, length, rank, ranks, query_length)
