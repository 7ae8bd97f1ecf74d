"""A pass around the ring of neighbours, whatever carries a message: `peer` and `inprocess` only differ in `exchange`.

Each hop sends to rank + 1 and receives from rank - 1, so a shard visits the ranks after its owner in order, carrying the
rows that somebody still to come sees. The sum of its gradients follows, and goes home from the last rank that sees any:
the order of additions is fixed by rank, not by arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.lanes import Reach
from ringflash.parallel.transport import (
    NO_RETURN,
    Parcel,
    Passage,
    Returning,
    Transport,
    early_and_late,
    is_any,
    rounded,
)
from ringflash.schedule.needs import NOTHING, Needs

# What is sent to, or received into from, a rank.
Message = tuple[Tensor, int]


class InFlight(ABC):
    """Messages on their way: owns what is sent and the buffers received into until `wait` has seen them through."""

    @abstractmethod
    def wait(self) -> None:
        """Afterwards the buffers hold what was received, and what was sent may be overwritten."""


class NeighbourTransport(Transport):
    """A transport made of one operation: exchange messages with other ranks."""

    @abstractmethod
    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        """Start sending and receiving flat tensors, none of them empty; at most one each way between two ranks."""

    @abstractmethod
    def reach(self) -> Reach:
        """The memory of these ranks, for transports that write it."""

    def stream(self, shard: tuple[Tensor, ...], needs: Needs, returning: Returning = NO_RETURN) -> Passage:
        return NeighbourPassage(self, shard, needs, returning)


class OverNeighbours(Transport):
    """A transport that has its own way with shards, and does all else as `wire` does."""

    def __init__(self, wire: NeighbourTransport) -> None:
        super().__init__(wire.rank, wire.ranks)
        self.wire = wire

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return self.wire.all_gather(x, shapes)

    def all_gather_object(self, value: object) -> list[object]:
        return self.wire.all_gather_object(value)


class NeighbourPassage(Passage):
    """Own shard, then the shard of rank - 1, rank - 2, ... while anybody in the ring needs one."""

    def __init__(
        self,
        wire: NeighbourTransport,
        shard: tuple[Tensor, ...],
        needs: Needs,
        returning: Returning,
    ) -> None:
        self._wire, self._shard, self._needs = wire, shard, needs
        self._early, self._late = early_and_late(needs.seen(wire.rank, wire.rank), returning.early)
        self._source, self._rows = wire.rank, self._early  # what is here now
        self._sums = Sums(wire, shard[: returning.tensors], needs, returning.dtype) if returning.tensors else None

    def __iter__(self) -> Iterator[tuple[int, slice, tuple[Tensor, ...]]]:
        rank, needs = self._wire.rank, self._needs
        held: Tensor | None = None
        coming: tuple[Tensor | None, InFlight] | None = None
        for hop in range(needs.hops + 1):
            if coming is not None:
                held, in_flight = coming
                in_flight.wait()
            self._source = (rank - hop) % self._wire.ranks
            self._rows = needs.seen(rank, self._source) if hop else self._early
            # The next hop starts before anything is computed on this one.
            coming = self._pass_on(hop, held) if hop < needs.hops else None
            if is_any(self._rows):
                yield self._source, self._rows, self._parts(hop, held, self._rows)
            if self._sums is not None:
                self._sums.pass_on(hop)
        if is_any(self._late):
            self._source, self._rows = rank, self._late
            yield rank, self._late, self._parts(0, None, self._late)

    def _parcel(self, source: int, hop: int) -> Parcel:
        return Parcel.of(self._needs.onward(source, hop), self._shard)

    def _parts(self, hop: int, held: Tensor | None, rows: slice) -> tuple[Tensor, ...]:
        """`rows` of the shard that is here at this hop."""
        if hop == 0:
            return tuple(x[:, rows] for x in self._shard)
        assert held is not None, "what is seen was sent"
        return self._parcel(self._source, hop).views(held, rows)

    def _pass_on(self, hop: int, held: Tensor | None) -> tuple[Tensor | None, InFlight]:
        """Start the next hop: the buffer received into, if anything comes, and the messages."""
        rank, ranks, like = self._wire.rank, self._wire.ranks, self._shard[0]
        sends, receives = [], []
        rows = self._needs.onward(self._source, hop + 1)
        if rows != NOTHING:
            sends.append((self._message(hop, held, rows), (rank + 1) % ranks))
        want = self._parcel((rank - hop - 1) % ranks, hop + 1)
        buffer = like.new_empty(want.numel) if want.numel else None
        if buffer is not None:
            receives.append((buffer, (rank - 1) % ranks))
        return buffer, self._wire.exchange(sends, receives)

    def _message(self, hop: int, held: Tensor | None, rows: slice) -> Tensor:
        """`rows` of the shard that is here, flat: as it came where all of it goes on."""
        if hop > 0 and held is not None and self._needs.onward(self._source, hop) == rows:
            return held
        return Parcel.of(rows, self._shard).filled(self._parts(hop, held, rows))

    def gradients(self) -> tuple[Tensor, ...]:
        assert self._sums is not None, "gradients() is for a returning passage"
        return self._sums.share(self._source, self._rows)

    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        assert self._sums is not None, "collect() is for a returning passage"
        return rounded(self._sums.home(), dtype)


class Sums:
    """The gradients of a pass: those of own rows stay at home, those of others' follow their shard and are sent home."""

    def __init__(
        self,
        wire: NeighbourTransport,
        shard: tuple[Tensor, ...],
        needs: Needs,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self._wire, self._shard, self._needs = wire, shard, needs
        dtype = accumulate_dtype(shard[0].dtype)
        self._on_wire = gradient_dtype or dtype
        self._own = tuple(x.new_zeros(x.shape, dtype=dtype) for x in shard)
        self._total: Tensor | None = None  # over the ranks so far, of the shard that is here
        self._flight: InFlight | None = None  # what the last hop sent and receives
        self._arriving: Tensor | None = None  # the sum of the ranks before, of the shard that comes next
        self._returning: Tensor | None = None  # the sum of all other ranks, of own rows

    def share(self, source: int, rows: slice) -> tuple[Tensor, ...]:
        hop = (self._wire.rank - source) % self._wire.ranks
        if hop == 0:
            return tuple(x[:, rows] for x in self._own)
        return self._gathered(source, hop).views(self._sum_here(source, hop), rows)

    def _gathered(self, source: int, hop: int) -> Parcel:
        return Parcel.of(self._needs.gathered(source, hop), self._shard)

    def _buffer(self, source: int, hop: int) -> Tensor:
        return self._own[0].new_empty(self._gathered(source, hop).numel, dtype=self._on_wire)

    def _sum_here(self, source: int, hop: int) -> Tensor:
        if self._total is None:
            self._total = self._own[0].new_zeros(self._gathered(source, hop).numel)
        return self._total

    def pass_on(self, hop: int) -> None:
        """Add what came from the ranks before, and send the sum on, or home from the last rank that adds to it."""
        rank, ranks, needs = self._wire.rank, self._wire.ranks, self._needs
        source, coming = (rank - hop) % ranks, (rank - hop - 1) % ranks
        self._land()
        sends, receives = [], []
        if needs.gathered(source, hop) != NOTHING:
            total = self._sum_here(source, hop)
            self._add_arrived(source, hop, total)
            sends.append((total.to(self._on_wire), source if hop == needs.last(source) else (rank + 1) % ranks))
        self._total, self._arriving = None, None
        # What the rank before sends on at this hop belongs to the shard that comes next.
        if needs.gathered(coming, hop) != NOTHING and hop < needs.last(coming):
            self._arriving = self._buffer(coming, hop)
            receives.append((self._arriving, (rank - 1) % ranks))
        if needs.gathered(rank, hop) != NOTHING and hop == needs.last(rank):
            self._returning = self._buffer(rank, hop)
            receives.append((self._returning, (rank + hop) % ranks))
        if sends or receives:
            self._flight = self._wire.exchange(sends, receives)

    def _land(self) -> None:
        """A hop later: what was sent has lived long enough, and what comes is needed now or may wait in its buffer."""
        if self._flight is not None:
            self._flight.wait()
            self._flight = None

    def _add_arrived(self, source: int, hop: int, total: Tensor) -> None:
        rows = self._needs.gathered(source, hop - 1)
        if rows == NOTHING:
            return
        assert self._arriving is not None, "what the rank before gathered was sent here"
        here = self._gathered(source, hop).views(total, rows)
        self._gathered(source, hop - 1).add(self._arriving, rows, here)

    def home(self) -> tuple[Tensor, ...]:
        """The sums of own rows over all ranks."""
        self._land()
        if self._returning is not None:
            rank = self._wire.rank
            rows = self._needs.gathered(rank, self._needs.last(rank))
            parcel = self._gathered(rank, self._needs.last(rank))
            parcel.add(self._returning, rows, (own[:, rows] for own in self._own))
        return self._own
