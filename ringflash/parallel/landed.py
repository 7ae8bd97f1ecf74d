"""One visit instead of one a source: everything that a rank sees lands in one place, while a kernel is already at work.

The kernel is launched at once and waits, cell by cell, for what it comes to; see `Arrivals`. Owners put their rows into the
memory of each rank that sees them, in the order in which kernels go, and a lane here tells the kernel what is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.kernels.backend import Arrivals
from ringflash.parallel.transport import Parcel, Passage
from ringflash.schedule.landing import Landing, Piece

if TYPE_CHECKING:
    from ringflash.parallel.symmetric import SymmetricTransport


class LandedPassage(Passage):
    """All rows that this rank sees, own ones too, as one sequence."""

    def __init__(self, transport: SymmetricTransport, shard: tuple[Tensor, ...], landing: Landing) -> None:
        self._rank, self._ranks, self._landing = transport.rank, transport.ranks, landing
        self._shard = tuple(x.contiguous() for x in shard)
        device = shard[0].device
        size = Parcel.of(slice(0, landing.most_rows), shard).numel * shard[0].itemsize
        self._here = transport.begin(device)
        self._memory = transport.workspace(device, landing_bytes=size)
        self._puts, self._told = transport.lane(device, "shards"), transport.lane(device, "arrivals")
        rows, size = landing.rows(self._rank), landing.cell_rows(self._rank)
        self.arrivals = self._arrivals = Arrivals(torch.zeros(-(-rows // size), dtype=torch.int32, device=device), size)

    def __iter__(self) -> Iterator[tuple[int | None, slice, tuple[Tensor, ...]]]:
        for hop in range(1, self._ranks):
            source = (self._rank - hop) % self._ranks
            if any(piece.owner == source for piece in self._landing.pieces(self._rank)):
                self._here.signal(self._memory.landing_is_free(source, self._rank))
        # Everything is queued before the kernel that waits for it: streams may share what a GPU takes them from.
        self._puts.after(self._here)
        self._told.after(self._here)
        for piece in self._landing.pieces(self._rank):
            if piece.owner == self._rank:
                self._place(self._rank, piece)
        for hop in range(1, self._ranks):
            self._put((self._rank + hop) % self._ranks)
        self._tell()
        rows = slice(0, self._landing.rows(self._rank))
        yield None, rows, self._views(self._rank, rows)
        self._here.after(self._puts)
        self._here.after(self._told)

    def _views(self, viewer: int, rows: slice) -> tuple[Tensor, ...]:
        """`rows` of what lands on a rank."""
        whole = Parcel.of(slice(0, self._landing.rows(viewer)), self._shard)
        return whole.views(self._memory.landing(viewer, self._shard[0].dtype), rows)

    def _place(self, viewer: int, piece: Piece) -> None:
        lane = self._here if viewer == self._rank else self._puts
        there = self._views(viewer, slice(piece.place, piece.place + piece.count))
        for to, x in zip(there, self._shard, strict=True):
            lane.put(to, x[:, piece.row : piece.row + piece.count])

    def _put(self, viewer: int) -> None:
        mine = [piece for piece in self._landing.pieces(viewer) if piece.owner == self._rank]
        if mine:
            self._puts.take(self._memory.landing_is_free(self._rank, viewer), viewer)
        for i, piece in enumerate(mine):
            self._place(viewer, piece)
            self._puts.signal(self._memory.piece_is_there(viewer, self._rank, i))

    def _tell(self) -> None:
        """Queue what tells the kernel of each cell, once all of its pieces are there."""
        size = self._arrivals.rows
        # Own pieces are there already.
        pieces = sorted(self._landing.pieces(self._rank), key=lambda piece: piece.owner != self._rank)
        last = {piece.place // size: i for i, piece in enumerate(pieces)}
        taken = [0] * self._ranks
        for i, piece in enumerate(pieces):
            if piece.owner != self._rank:
                flag = self._memory.piece_is_there(self._rank, piece.owner, taken[piece.owner])
                self._told.take(flag, piece.owner)
                taken[piece.owner] += 1
            cell = piece.place // size
            if last[cell] == i:
                self._told.signal(self._arrivals.flags[cell])

    def gradients(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")

    def collect(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")
