"""Plan: what one rank computes with each source's keys, what moves, and what it costs.

Everything here follows from values that all ranks share (mask, layout, length, ranks), so any rank can compute any
rank's plan and ranks agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ringflash.schedule.copies import Copies, moved, on_cpu
from ringflash.schedule.integers import integer
from ringflash.schedule.landing import Landing
from ringflash.schedule.layout import LONGEST, Layout, cut, shard_positions
from ringflash.schedule.mask import Causal, Full, Intersection, Mask, Past
from ringflash.schedule.needs import NOTHING, Needs, needs
from ringflash.schedule.tiles import Bounds, Shape, tightened, transpose
from ringflash.schedule.turned import Turned


@dataclass(frozen=True)
class Plan:
    """The work of `rank`: `plan[source]` are the Bounds of its queries against the keys that it sees of `source`.

    length: tokens of the whole key sequence; query_length: of the query sequence, the same but for cross attention,
    where the last query stands at the position of the last key. Get plans from `plan()`, which caches them.
    """

    mask: Mask
    layout: Layout
    length: int
    rank: int
    ranks: int
    query_length: int

    @cached_property
    def needs(self) -> Needs:
        """Which rows of which shard every rank sees, hence what travels; the same on every rank."""
        return needs(self.mask, self.layout, self.length, self.ranks, self.query_length)

    def keys(self, source: int) -> slice:
        """Rows of the shard of `source` that are seen from here: the columns of its Bounds."""
        source = integer("Plan: source", source)
        if source >= self.ranks:
            raise IndexError(f"Plan: source = {source}; must be in [0, {self.ranks})")
        return self.needs.seen(self.rank, source)

    def __getitem__(self, source: int) -> Bounds:
        seen = self.keys(source)
        if source not in self._bounds:
            self._bounds[source] = Bounds(
                rows=cut(self.layout, self.query_length, self.ranks).shard_lengths[self.rank],
                columns=seen.stop - seen.start,
                ends=lambda device: self._local_bounds(device).get(source) or self._nothing(device),
                shape=self._shape(source),
                column_ends=None if seen == NOTHING else lambda device: self._local_columns(device)[source],
                positions=lambda: (self.positions, shard_positions(self.layout, self.length, source, self.ranks)[seen]),
                is_causal=self.mask == Causal(),
            )
        return self._bounds[source]

    def part(self, source: int | None, rows: slice) -> Bounds:
        """`plan[source]` of some rows of its shard, all of them seen from here; without a source, of all that lands."""
        if source is None:
            return self.landing.bounds.part(columns=rows)
        return self[source].part(columns=_inside(rows, self.keys(source)))

    @property
    def early(self) -> int:
        """Of the own keys that are seen, so many, the first ones, have about half of the work on all of them."""
        own = self[self.rank]
        # Under a causal mask key j of n is seen by n - j queries.
        return int(own.columns * (1 - 0.5**0.5 if own.shape == "causal" else 0.5))

    def _shape(self, source: int) -> Shape:
        if self.mask == Full():
            return "full"
        # Shards are sorted, so under a causal mask own queries see own keys up to themselves.
        is_square = self.mask == Causal() and source == self.rank and self.query_length == self.length
        return "causal" if is_square else "rows"

    @cached_property
    def _bounds(self) -> dict[int, Bounds]:
        """Kept with the plan, so that they and their copies on devices go when the last call that needs them is done."""
        return {}

    def _local_bounds(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        """(lo, hi) by source, of all that are seen at once, formed where they are used: a GPU needs a few launches for
        what takes a host milliseconds.
        """
        return self._copies.get("bounds", device, lambda: self._form_bounds(device))

    @on_cpu
    def _form_bounds(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        keys = cut(self.layout, self.length, self.ranks).to(device)
        sources = torch.tensor(self.sources, dtype=torch.int32)
        first, past = (x[self.rank, list(self.sources)] for x in (self.needs.first, self.needs.past))
        lo, hi, sources, first, columns = moved(device, *self._global_bounds, sources, first, past - first)
        first, columns = first[:, None, None], columns[:, None, None]
        lo, hi = (torch.minimum((keys.below(x, sources) - first).clamp_min_(0), columns) for x in (lo, hi))
        lo, hi = tightened(lo, hi)
        return {source: (lo[i], hi[i]) for i, source in enumerate(self.sources)}

    def _local_columns(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        """The same by columns, all sources in one search."""
        return self._copies.get("columns", device, lambda: self._form_columns(device))

    def _form_columns(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        bounds = self._local_bounds(device)
        lo, hi = (torch.stack([ends[i] for ends in bounds.values()]).flatten(0, 1) for i in (0, 1))  # [sources * B, Sq]
        counts = {source: self.keys(source).stop - self.keys(source).start for source in bounds}
        first, past = (x.unflatten(0, (len(bounds), -1)) for x in transpose(lo, hi, max(counts.values())))
        return {source: (first[i, :, :n], past[i, :, :n]) for i, (source, n) in enumerate(counts.items())}

    def _nothing(self, device: torch.device) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(1, self.positions.shape[0], dtype=torch.int32, device=device)
        return zeros, zeros

    @cached_property
    def _copies(self) -> Copies:
        return Copies()

    @cached_property
    def positions(self) -> Tensor:
        """Where this rank's queries stand among the keys, int64 [Sq]; negative for queries before the first key."""
        shift = self.length - self.query_length
        return shard_positions(self.layout, self.query_length, self.rank, self.ranks) + shift

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Ends of each query's interval in global positions, inside [0, length], int32 [1 or B, Sq], on the CPU."""
        return self._global_bounds

    @cached_property
    @on_cpu
    def _global_bounds(self) -> tuple[Tensor, Tensor]:
        """Ends of each query's interval in global positions, inside [0, length], int32 [1 or B, Sq]."""
        lo, hi = self.mask.bounds(self.positions)
        if any(bool((end.diff(dim=-1) < 0).any()) for end in (lo, hi)):
            raise ValueError(f"mask {self.mask}: its bounds decrease from one query to the next, which no mask's may")
        return lo.clamp(0, self.length).int(), hi.clamp(0, self.length).int()

    def ends_here(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ends of the queries at these positions, on any rank, as rows of this rank's keys: int32 [1 or B, queries]."""
        lo, hi = (x.clamp(0, self.length).int() for x in self.mask.bounds(positions))
        keys, here = cut(self.layout, self.length, self.ranks).to(device), torch.full((1,), self.rank, device=device)
        lo, hi = (keys.below(x, here)[0] for x in moved(device, lo, hi))
        return lo, hi

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks that own at least one key visible from here."""
        return tuple(source for source in range(self.ranks) if self.keys(source) != NOTHING)

    @cached_property
    def turned(self) -> Turned:
        """The same pairs seen from the keys that this rank holds, for a backward in which queries travel."""
        return Turned(self)

    @cached_property
    def landing(self) -> Landing:
        """All keys that are seen from here as one sequence, and how it is put together."""
        return Landing(self)

    @cached_property
    def landing_upwards(self) -> Landing:
        """The same for a kernel that takes keys from the first one on, as backward does."""
        return Landing(self, walk="up")

    @property
    def last(self) -> int | None:
        """The source that a ring brings last of those that are seen from here."""
        return max(self.sources, key=lambda source: (self.rank - source) % self.ranks, default=None)

    @property
    def is_local(self) -> bool:
        """Whether nothing travels in the whole ring, not even past this rank, and this rank sees all of its own keys."""
        own = slice(0, cut(self.layout, self.length, self.ranks).shard_lengths[self.rank])
        return self.hops == 0 and own != NOTHING and self.keys(self.rank) == own

    @property
    def hops(self) -> int:
        """Hops after which nobody in the ring needs a shard any more; at most ranks - 1, the same on every rank.

        After hop h a rank holds what is still needed of the shard of (rank - h) mod ranks.
        """
        return self.needs.hops

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of this rank, the measure of its work per head, over all batch rows that differ."""
        lo, hi = self._global_bounds
        return int((hi - lo).sum(dtype=torch.int64))

    @cached_property
    def pairs_per_rank(self) -> tuple[int, ...]:
        """`pairs` of every rank; max / mean is the balance of the layout for this mask."""
        return tuple(peer.pairs for peer in self.peers)

    @property
    def peers(self) -> list[Plan]:
        """The plan of every rank, by rank; not cached."""
        return [replace(self, rank=rank) for rank in range(self.ranks)]

    def queries_bytes(
        self,
        *,
        batch: int,
        query_heads: int,
        head_dim: int,
        value_dim: int,
        itemsize: int,
        statistic_itemsize: int = 4,
        gradient_itemsize: int = 4,
    ) -> int:
        """Bytes that this rank sends in one backward pass in which queries travel: q, the gradient of out, lse and delta
        of the rows that see keys of somebody after it, and dq of others' rows.
        """
        needs = self.turned.needs
        travelling = _bytes_of_row(batch, query_heads, head_dim, value_dim, itemsize)
        statistics = batch * query_heads * 2 * statistic_itemsize
        gradients = _bytes_of_row(batch, query_heads, head_dim, 0, gradient_itemsize)
        return needs.sent(self.rank) * (travelling + statistics) + needs.sent_back(self.rank) * gradients

    def forward_bytes(self, *, batch: int, key_heads: int, head_dim: int, value_dim: int, itemsize: int) -> int:
        """Bytes that this rank sends in one forward pass: of K and V, the rows that somebody after it sees."""
        return self.needs.sent(self.rank) * _bytes_of_row(batch, key_heads, head_dim, value_dim, itemsize)

    def backward_bytes(
        self, *, batch: int, key_heads: int, head_dim: int, value_dim: int, itemsize: int, gradient_itemsize: int = 4
    ) -> int:
        """Bytes that this rank sends in one backward pass: K and V as in forward, and the gradients of others' rows."""
        keys = self.forward_bytes(
            batch=batch, key_heads=key_heads, head_dim=head_dim, value_dim=value_dim, itemsize=itemsize
        )
        row = _bytes_of_row(batch, key_heads, head_dim, value_dim, gradient_itemsize)
        return keys + self.needs.sent_back(self.rank) * row


def _inside(rows: slice, seen: slice) -> slice:
    return slice(rows.start - seen.start, rows.stop - seen.start)


def _bytes_of_row(batch: int, key_heads: int, head_dim: int, value_dim: int, itemsize: int) -> int:
    """K and V, or q and its like, of one token in all batch rows."""
    numbers = {
        "batch": batch,
        "heads": key_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "itemsize": itemsize,
    }
    b, h, d, dv, size = (integer(f"Plan: {name}", number) for name, number in numbers.items())
    return b * h * (d + dv) * size


def plan(
    mask: Mask, layout: Layout, length: int, rank: int = 0, ranks: int = 1, query_length: int | None = None
) -> Plan:
    """The cached plan of `rank` for a sequence of `length` tokens on `ranks` ranks.

    query_length: tokens of the query sequence where it is not the key sequence (cross attention).
    Raises TypeError for wrong types, ValueError for wrong values and if the mask is made for another length.
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"plan: mask is {type(mask).__name__}; must be a Mask such as Causal(), a Union is planned part by part"
        )
    if not isinstance(layout, Layout):
        raise TypeError(f"plan: layout is {type(layout).__name__}; must be a Layout such as Zigzag()")
    length = integer("plan: length", length)
    query_length = length if query_length is None else integer("plan: query_length", query_length)
    if max(length, query_length) >= LONGEST:
        raise ValueError(f"plan: length = {max(length, query_length)}; must be < 2**31 tokens")
    ranks = integer("plan: ranks", ranks, least=1)
    rank = integer("plan: rank", rank)
    if rank >= ranks:
        raise ValueError(f"plan: rank = {rank}; must be in [0, {ranks})")
    if mask.length is not None and mask.length != length:
        missing = length - mask.length
        remedy = f"; add a document or padding={missing}" if missing > 0 else ""
        raise ValueError(f"mask {mask} is made for {mask.length} tokens, the sequence has {length}{remedy}")
    for tokens in (length, query_length):
        if layout.length not in (None, tokens):
            raise ValueError(f"layout {layout} is made for {layout.length} tokens, the sequence has {tokens}")
    if mask.is_for_self_attention and query_length != length:
        raise ValueError(
            f"mask {mask}: {query_length} queries over {length} keys; this mask is for self-attention only"
        )
    return _plan(mask, layout, length, rank, ranks, query_length)


# Enough for the mask kinds of one model times a few batches in flight; a million tokens of bounds are 16 MB each.
@lru_cache(maxsize=32)
@on_cpu
def _plan(mask: Mask, layout: Layout, length: int, rank: int, ranks: int, query_length: int) -> Plan:
    # Of all queries, so that every rank raises the same error, before anything is sent.
    if isinstance(mask, (Past, Intersection)):
        mask.check(torch.arange(query_length) + length - query_length)
    return Plan(mask, layout, length, rank, ranks, query_length)
