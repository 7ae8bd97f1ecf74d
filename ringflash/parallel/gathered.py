"""Everything at once: each rank sends every other the rows that it sees, in one exchange; gradients go straight home.

For short shards, whose hops take longer to start than to carry. A pass holds what it sees of all shards, and in backward
their sums, so its memory grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.passage import NeighbourTransport, OverNeighbours
from ringflash.parallel.transport import NO_RETURN, Parcel, Passage, Returning, rounded
from ringflash.schedule.needs import NOTHING, Needs


class GatheredTransport(OverNeighbours):
    """Direct exchange between all pairs of ranks, over a wire that can carry messages between any two."""

    def stream(self, shard: tuple[Tensor, ...], needs: Needs, returning: Returning = NO_RETURN) -> Passage:
        # Gradients go home when all are there, so there is nothing to keep own rows for.
        return GatheredPassage(self.wire, shard, needs, returning)


class GatheredPassage(Passage):
    """Own shard, then what came of the shards of rank - 1, rank - 2, ..., in the order of a ring."""

    def __init__(
        self,
        wire: NeighbourTransport,
        shard: tuple[Tensor, ...],
        needs: Needs,
        returning: Returning,
    ) -> None:
        self._wire, self._shard, self._needs = wire, shard, needs
        self._source = wire.rank
        dtype = accumulate_dtype(shard[0].dtype)
        self._on_wire = returning.dtype or dtype
        self._own = tuple(x.new_zeros(x.shape, dtype=dtype) for x in shard[: returning.tensors])
        self._sums: dict[int, Tensor] = {}  # of others' rows that are seen here, flat

    def __iter__(self) -> Iterator[tuple[int, slice, tuple[Tensor, ...]]]:
        rank, needs = self._wire.rank, self._needs
        sends = [(self._message(needs.seen(peer, rank)), peer) for peer in self._viewers()]
        buffers = {source: self._shard[0].new_empty(self._parcel(source).numel) for source in self._sources()}
        receives = [(buffer, source) for source, buffer in buffers.items()]
        in_flight = self._wire.exchange(sends, receives) if sends or receives else None
        if (own := needs.seen(rank, rank)) != NOTHING:
            yield rank, own, tuple(x[:, own] for x in self._shard)
        if in_flight is not None:
            in_flight.wait()
        for source, buffer in buffers.items():
            self._source = source
            seen = needs.seen(rank, source)
            yield source, seen, self._parcel(source).views(buffer, seen)

    def _others(self) -> list[int]:
        return [(self._wire.rank - hop) % self._wire.ranks for hop in range(1, self._wire.ranks)]

    def _sources(self) -> list[int]:
        """Others of whose shards something is seen here."""
        return [peer for peer in self._others() if self._needs.seen(self._wire.rank, peer) != NOTHING]

    def _viewers(self) -> list[int]:
        """Others who see something of the shard here."""
        return [peer for peer in self._others() if self._needs.seen(peer, self._wire.rank) != NOTHING]

    def _parcel(self, source: int) -> Parcel:
        return Parcel.of(self._needs.seen(self._wire.rank, source), self._shard)

    def _message(self, rows: slice) -> Tensor:
        return Parcel.of(rows, self._shard).filled(x[:, rows] for x in self._shard)

    def _gradients_of(self, viewer: int, source: int) -> Parcel:
        return Parcel.of(self._needs.seen(viewer, source), self._own)

    def gradients(self) -> tuple[Tensor, ...]:
        assert self._own, "gradients() is for a returning passage"
        rank, source = self._wire.rank, self._source
        rows = self._needs.seen(rank, source)
        if source == rank:
            return tuple(x[:, rows] for x in self._own)
        parcel = self._gradients_of(rank, source)
        if source not in self._sums:
            self._sums[source] = self._own[0].new_zeros(parcel.numel)
        return parcel.views(self._sums[source], rows)

    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        assert self._own, "collect() is for a returning passage"
        rank = self._wire.rank
        # The next rank first: sums are formed in the order in which a ring forms them.
        viewers = self._viewers()[::-1]
        arriving = {
            viewer: self._own[0].new_empty(self._gradients_of(viewer, rank).numel, dtype=self._on_wire)
            for viewer in viewers
        }
        sends = [(self._sums[source].to(self._on_wire), source) for source in self._sources()]
        receives = [(buffer, viewer) for viewer, buffer in arriving.items()]
        if sends or receives:
            self._wire.exchange(sends, receives).wait()
        if arriving:
            totals = tuple(x.new_zeros(x.shape) for x in self._own)
            for viewer, buffer in arriving.items():
                rows = self._needs.seen(viewer, rank)
                self._gradients_of(viewer, rank).add(buffer, rows, (total[:, rows] for total in totals))
            for own, total in zip(self._own, totals, strict=True):
                own += total
        return rounded(self._own, dtype)
