"""One visit instead of one a source: everything that a rank sees lands in one place, while a kernel is already at work.

The kernel is launched at once and waits, cell by cell, for what it comes to; see `Arrivals`. Owners put their rows into the
memory of each rank that sees them, in the order in which kernels go, and a lane here tells the kernel what is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringflash.kernels.backend import Arrivals
from ringflash.parallel.lanes import Lane
from ringflash.parallel.memory import PIECE_THERE, ROOM_TO_LAND, Workspace
from ringflash.parallel.transport import Parcel, Passage
from ringflash.schedule.landing import Landing, Piece

if TYPE_CHECKING:
    from ringflash.parallel.symmetric import SymmetricTransport


class Copy(NamedTuple):
    """Bytes of one tensor of a shard: from its beginning + offset to an address."""

    tensor: int
    offset: int
    to: int
    size: int


class Own(NamedTuple):
    """Copies of a piece of own rows, and the flag of the cell that it completes."""

    copies: list[Copy]
    cell_flag: int | None


class Arriving(NamedTuple):
    """The flag of a piece of another rank, and the flag of the cell that it completes."""

    flag: int
    sender: int
    cell_flag: int | None


class Outgoing(NamedTuple):
    """Pieces for one rank, each with the flag to set there, after the flag that it sets here has been taken."""

    room: int
    viewer: int
    pieces: list[tuple[list[Copy], int]]


@dataclass(frozen=True)
class Lanes:
    """here: where the kernel runs; out: to other ranks; own: of own rows; arriving: takes flags and sets those of cells."""

    here: Lane
    out: Lane
    own: Lane
    arriving: Lane


class Steps:
    """All that a pass queues, for shards of these shapes in this memory: found once, for every layer and step."""

    def __init__(self, landing: Landing, shard: tuple[Tensor, ...], memory: Workspace, rank: int) -> None:
        self._memory, self._landing, self._rank = memory, landing, rank
        # Not the shard itself: steps are kept for longer.
        self._like = tuple(torch.empty_like(x, device="meta") for x in shard)
        self.rows = slice(0, landing.rows(rank))
        self.tensors = self._views(rank, self.rows)
        size = landing.cell_rows(rank)
        self.arrivals = Arrivals(
            torch.empty(-(-self.rows.stop // size), dtype=torch.int32, device=shard[0].device), size
        )
        mine = landing.pieces(rank)
        # Who puts something here is told that there is room.
        self.rooms = [
            memory.flag(ROOM_TO_LAND, writer=rank, reader=owner) for owner in {piece.owner for piece in mine} - {rank}
        ]
        # Own pieces come first, so a cell of both is complete with the last one of another rank.
        completes = {piece.place // size: piece for piece in sorted(mine, key=lambda piece: piece.owner != rank)}
        self.own: list[Own] = []
        self.arriving: list[Arriving] = []
        counts = [0] * len(memory.blocks)
        for piece in mine:
            cell = piece.place // size
            cell_flag = self.arrivals.flags.data_ptr() + 4 * cell if completes[cell] is piece else None
            if piece.owner == rank:
                self.own.append(Own(self._copies(rank, piece), cell_flag))
            else:
                flag = memory.flag(PIECE_THERE + counts[piece.owner], writer=piece.owner, reader=rank)
                self.arriving.append(Arriving(flag, piece.owner, cell_flag))
                counts[piece.owner] += 1
        ranks = len(memory.blocks)
        outgoing = (self._outgoing((rank + hop) % ranks) for hop in range(1, ranks))  # the nearest first
        self.outgoing = [one for one in outgoing if one.pieces]

    def _outgoing(self, viewer: int) -> Outgoing:
        memory, rank = self._memory, self._rank
        pieces = [piece for piece in self._landing.pieces(viewer) if piece.owner == rank]
        steps = [
            (self._copies(viewer, piece), memory.flag(PIECE_THERE + i, writer=rank, reader=viewer))
            for i, piece in enumerate(pieces)
        ]
        return Outgoing(memory.flag(ROOM_TO_LAND, writer=viewer, reader=rank), viewer, steps)

    def _views(self, viewer: int, rows: slice) -> tuple[Tensor, ...]:
        """`rows` of what lands on a rank."""
        whole = Parcel.of(slice(0, self._landing.rows(viewer)), self._like)
        return whole.views(self._memory.landing(viewer, self._like[0].dtype), rows)

    def _copies(self, viewer: int, piece: Piece) -> list[Copy]:
        there = self._views(viewer, slice(piece.place, piece.place + piece.count))
        copies = []
        for i, to in enumerate(there):
            row_bytes = to.stride(1) * to.itemsize
            for b in range(to.shape[0]):
                offset = (b * self._like[i].shape[1] + piece.row) * row_bytes
                copies.append(Copy(i, offset, to[b].data_ptr(), piece.count * row_bytes))
        return copies


class LandedPassage(Passage):
    """All rows that this rank sees, own ones too, as one sequence."""

    def __init__(self, transport: SymmetricTransport, steps: Steps, shard: tuple[Tensor, ...], lanes: Lanes) -> None:
        self._transport, self._steps, self._shard, self._lanes = transport, steps, shard, lanes
        self.arrivals = steps.arrivals

    def __iter__(self) -> Iterator[tuple[int | None, slice, tuple[Tensor, ...]]]:
        steps, lanes = self._steps, self._lanes
        self._transport.is_under_way = True
        steps.arrivals.flags.zero_()
        for room in steps.rooms:
            lanes.here.signal(room)
        for lane in (lanes.out, lanes.own, lanes.arriving):
            lane.after(lanes.here)
        # All of it is queued before the kernel that waits for it: streams may share what a GPU takes them from.
        begins = [x.data_ptr() for x in self._shard]
        for copies, cell_flag in steps.own:
            _copy(lanes.own, begins, copies)
            if cell_flag is not None:
                lanes.own.signal(cell_flag)
        for room, viewer, pieces in steps.outgoing:
            lanes.out.take(room, viewer)
            for copies, flag in pieces:
                _copy(lanes.out, begins, copies)
                lanes.out.signal(flag)
        # A cell of rows of this rank and of others is complete when the others' are there, and own ones before them.
        lanes.arriving.after(lanes.own)
        for flag, sender, cell_flag in steps.arriving:
            lanes.arriving.take(flag, sender)
            if cell_flag is not None:
                lanes.arriving.signal(cell_flag)
        yield None, steps.rows, steps.tensors
        for lane in (lanes.out, lanes.own, lanes.arriving):
            lanes.here.after(lane)
        self._transport.is_under_way = False

    def gradients(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")

    def collect(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")


def _copy(lane: Lane, begins: list[int], copies: list[Copy]) -> None:
    for copy in copies:
        lane.copy(copy.to, begins[copy.tensor] + copy.offset, copy.size)
