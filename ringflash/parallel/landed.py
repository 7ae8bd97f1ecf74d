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
from ringflash.parallel.transport import Parcel, Passage
from ringflash.schedule.landing import Landing, Piece

if TYPE_CHECKING:
    from ringflash.parallel.symmetric import Workspace


class Copy(NamedTuple):
    """Bytes of one tensor of a shard: from its beginning + offset to an address."""

    tensor: int
    offset: int
    to: int
    size: int


@dataclass(frozen=True)
class Lanes:
    """here: where the kernel runs. puts: to other ranks. own: of own rows. told: what takes signals and tells the kernel."""

    here: Lane
    puts: Lane
    own: Lane
    told: Lane


class Steps:
    """All that a pass queues, for shards of these shapes in this memory: found once, for every layer and step."""

    def __init__(self, landing: Landing, shard: tuple[Tensor, ...], memory: Workspace, rank: int) -> None:
        self.memory, self._landing = memory, landing
        # Not the shard itself: steps are kept for longer.
        self._like = tuple(torch.empty_like(x, device="meta") for x in shard)
        ranks, size = len(memory.blocks), landing.cell_rows(rank)
        self.rows = slice(0, landing.rows(rank))
        cells = -(-self.rows.stop // size)
        self.arrivals = Arrivals(torch.empty(cells, dtype=torch.int32, device=shard[0].device), size)
        mine = landing.pieces(rank)
        self.tensors = self._views(rank, self.rows)
        # Who puts something here is told that there is room.
        self.free = [memory.landing_is_free(owner, rank) for owner in sorted({piece.owner for piece in mine} - {rank})]
        cell_flags = [self.arrivals.flags.data_ptr() + 4 * cell for cell in range(cells)]
        # Own pieces come first, so a cell of both is complete with the last one of another rank.
        order = sorted(mine, key=lambda piece: piece.owner != rank)
        last = {piece.place // size: piece for piece in order}
        self.own: list[tuple[list[Copy], int | None]] = []  # copies, and the flag of the cell that they complete
        self.taken: list[tuple[int, int, int | None]] = []  # flag of a piece, its sender, flag of the cell
        counts = [0] * ranks
        for piece in mine:
            cell = cell_flags[piece.place // size] if last[piece.place // size] is piece else None
            if piece.owner == rank:
                self.own.append((self._copies(rank, piece), cell))
            else:
                flag = memory.piece_is_there(rank, piece.owner, counts[piece.owner])
                self.taken.append((flag, piece.owner, cell))
                counts[piece.owner] += 1
        # By viewer, the nearest first: the flag that there is room, and pieces with the flags that they are there.
        self.puts: list[tuple[int, int, list[tuple[list[Copy], int]]]] = []
        for viewer in ((rank + hop) % ranks for hop in range(1, ranks)):
            sent = [piece for piece in landing.pieces(viewer) if piece.owner == rank]
            steps = [(self._copies(viewer, p), memory.piece_is_there(viewer, rank, i)) for i, p in enumerate(sent)]
            if steps:
                self.puts.append((memory.landing_is_free(rank, viewer), viewer, steps))

    def _views(self, viewer: int, rows: slice) -> tuple[Tensor, ...]:
        """`rows` of what lands on a rank."""
        whole = Parcel.of(slice(0, self._landing.rows(viewer)), self._like)
        return whole.views(self.memory.landing(viewer, self._like[0].dtype), rows)

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

    def __init__(self, steps: Steps, shard: tuple[Tensor, ...], lanes: Lanes) -> None:
        self._steps, self._shard, self._lanes = steps, shard, lanes
        self.arrivals = steps.arrivals

    def __iter__(self) -> Iterator[tuple[int | None, slice, tuple[Tensor, ...]]]:
        steps, lanes = self._steps, self._lanes
        steps.arrivals.flags.zero_()
        for flag in steps.free:
            lanes.here.signal(flag)
        for lane in (lanes.puts, lanes.own, lanes.told):
            lane.after(lanes.here)
        # All of it is queued before the kernel that waits for it: streams may share what a GPU takes them from.
        begins = [x.data_ptr() for x in self._shard]
        for copies, cell in steps.own:
            _copy(lanes.own, begins, copies)
            if cell is not None:
                lanes.own.signal(cell)
        for free, viewer, pieces in steps.puts:
            lanes.puts.take(free, viewer)
            for copies, there in pieces:
                _copy(lanes.puts, begins, copies)
                lanes.puts.signal(there)
        # A cell of rows of this rank and of others is complete when the others' are there, and own ones before them.
        lanes.told.after(lanes.own)
        for there, sender, cell in steps.taken:
            lanes.told.take(there, sender)
            if cell is not None:
                lanes.told.signal(cell)
        yield None, steps.rows, steps.tensors
        for lane in (lanes.puts, lanes.own, lanes.told):
            lanes.here.after(lane)

    def gradients(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")

    def collect(self) -> tuple[Tensor, ...]:
        raise AssertionError("what lands returns nothing")


def _copy(lane: Lane, begins: list[int], copies: list[Copy]) -> None:
    for copy in copies:
        lane.copy(copy.to, begins[copy.tensor] + copy.offset, copy.size)
