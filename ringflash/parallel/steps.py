"""What a pass that lands queues, step by step: found once for shards of a shape, for every layer and step of training.

All is in addresses, because a pass queues dozens of copies and signals, and a view of a tensor takes longer to make than a
copy to queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.kernels.backend import Arrivals, Departures
from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.lanes import Signals, SignalStep
from ringflash.parallel.memory import (
    LANES_OUT,
    PIECE_THERE,
    ROOM_FOR_SUMS,
    ROOM_TO_LAND,
    SUMS_FILLED,
    Workspace,
    aligned,
)
from ringflash.schedule.copies import moved
from ringflash.schedule.landing import Landing, Piece
from ringflash.schedule.needs import NOTHING


class Copy(NamedTuple):
    """`times` times `size` bytes, so many apart there and here: from a tensor's beginning + offset to an address."""

    tensor: int
    offset: int
    to: int
    size: int
    times: int
    to_step: int
    step: int


class Outgoing(NamedTuple):
    """What goes to one rank: by lane, pieces with the flag to set there; after the flag that it sets here has been taken."""

    room: Signals
    lanes: list[list[tuple[list[Copy], int]]]


class Place(NamedTuple):
    """How a tensor [B, S, ...] lies: `blocks` blocks of rows of `row_bytes`, one after another.

    Row statistics [B, S, H] lie by heads, a block for each, all else by batch rows.
    """

    blocks: int
    row_bytes: int
    is_by_heads: bool

    @classmethod
    def of(cls, x: Tensor) -> Place:
        if x.dim() == 3:
            assert x.transpose(1, 2).is_contiguous(), "row statistics lie as row_statistic() makes them"
            return cls(x.shape[0] * x.shape[2], x.itemsize, True)
        return cls(x.shape[0], prod(x.shape[2:]) * x.itemsize, False)

    def rows(self, rows: int) -> int:
        """Rows of a block in memory for so many: statistics are read in whole 16 bytes."""
        return -(-rows // 4) * 4 if self.is_by_heads else rows

    def bytes(self, rows: int) -> int:
        return aligned(self.blocks * self.rows(rows) * self.row_bytes)

    def view(self, memory: Tensor, like: Tensor, rows: int) -> Tensor:
        """[B, rows, ...] of memory that begins with it."""
        B, _, *rest = like.shape
        shape = (B, *rest, self.rows(rows)) if self.is_by_heads else (B, self.rows(rows), *rest)
        x = memory[: prod(shape) * like.itemsize].view(like.dtype).view(shape)
        return x.transpose(1, 2)[:, :rows] if self.is_by_heads else x


class Steps:
    """Of one rank: what goes out, what arrives and where, and what of its sums goes home, if any."""

    def __init__(
        self, landing: Landing, shard: tuple[Tensor, ...], memory: Workspace, rank: int, returning: int, heads: int
    ) -> None:
        """returning: sums of so many tensors go home, by so many heads of theirs at a time."""
        self._memory, self._landing, self._rank, self._ranks = memory, landing, rank, len(memory.blocks)
        # Not the shard itself: steps are kept for longer.
        self._like = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in shard)
        self._places = tuple(Place.of(x) for x in shard)
        self.rows = slice(0, landing.rows(rank))
        begins, block = self._begins(rank), memory.landing(rank)
        # Where nothing lands nothing is read, but a tensor for a kernel has a row.
        self.tensors = tuple(
            place.view(block[begin:], x, max(1, landing.landed(rank)))
            for begin, place, x in zip(begins, self._places, self._like, strict=True)
        )
        self.returning, self.heads = returning, heads
        self._arrive(shard[0].device, groups=self._groups(returning, heads))
        outgoing = (self._outgoing((rank + hop) % self._ranks) for hop in range(1, self._ranks))  # the nearest first
        self.outgoing = [one for one in outgoing if one.lanes[0]]
        self._go_home()

    def _go_home(self) -> None:
        """Of sums: to whom they go, and from whom they come."""
        memory, rank = self._memory, self._rank
        runs = self._landing.runs(rank)
        owners = [(rank - hop) % self._ranks for hop in range(1, self._ranks)]
        owners = [owner for owner in owners if self.returning and any(run.owner == owner for run in runs)]
        viewers = [(rank + hop) % self._ranks for hop in range(1, self._ranks)]
        viewers = [one for one in viewers if self.returning and self._landing.needs.seen(one, rank) != NOTHING]
        # By owner, then by group of heads; after all owners have room, and before they are told that all is there.
        self.homeward = [self._homeward(owner) for owner in owners]
        self.homeward_rooms = Signals(
            ("take", memory.flag(ROOM_FOR_SUMS, writer=owner, reader=rank), owner) for owner in owners
        )
        self.homeward_filled = Signals(
            ("signal", memory.flag(SUMS_FILLED, writer=rank, reader=owner), rank) for owner in owners
        )
        # Who returns sums for rows of this rank, and the flags that say that they are there.
        self.viewers = viewers
        self.returned = Signals(
            ("take", memory.flag(SUMS_FILLED, writer=viewer, reader=rank), viewer) for viewer in viewers
        )
        free = [memory.flag(ROOM_FOR_SUMS, writer=rank, reader=viewer) for viewer in viewers]
        self.rooms = Signals(("signal", flag, rank) for flag in [*self._rooms_to_land, *free])

    @staticmethod
    def landing_bytes(landing: Landing, shard: tuple[Tensor, ...]) -> int:
        """Of any rank."""
        return sum(Place.of(x).bytes(landing.most_landed) for x in shard)

    @staticmethod
    def sums_bytes(landing: Landing, shard: tuple[Tensor, ...], returning: int) -> int:
        """Of any rank: what all others return of its shard."""
        ranks, needs = landing.plan.ranks, landing.needs
        row_bytes = sum(_sum_bytes(x) for x in shard[:returning])
        lengths = ([_count(needs.seen(v, owner)) for v in range(ranks) if v != owner] for owner in range(ranks))
        return row_bytes * max(map(sum, lengths))

    def _groups(self, returning: int, heads: int) -> int:
        if not returning:
            return 0
        B, _, H, _ = self._like[0].shape
        return -(-B * H // heads)

    def _arrive(self, device: torch.device, groups: int) -> None:
        """All flags of this pass as one tensor, how it is before anything has come, and what changes it."""
        landing, rank, memory = self._landing, self._rank, self._memory
        mine, size = landing.pieces(rank), landing.cell_rows(rank)
        others = {
            piece.place // size: piece for piece in mine if piece.owner != rank
        }  # the last one to come in each cell
        # Own rows are there before the kernel is, and sums that nothing is added to are complete.
        here = [i not in others for i in range(-(-self.rows.stop // size))]
        departing = int(landing.departing.sum())
        before = torch.tensor(here + [departing == 0] * groups + [0] * groups, dtype=torch.int32)
        # A tile that sees nothing may look up what comes after the last block: rows past any shard's, which are zeros.
        places = torch.cat([landing.places(rank), torch.tensor([1 << 30], dtype=torch.int32)])
        self.flags_before, places, blocks = moved(device, before, places, landing.departing)
        self.flags = torch.empty_like(self.flags_before)
        arrived, self.done, counts = self.flags.split([len(here), groups, groups])
        self._arrived, self._at = arrived, (size, landing.late(rank), places)
        self.departures = Departures(self.done, counts, self.heads, blocks, departing) if groups else None
        # Who puts something here is told that there is room.
        owners = {piece.owner for piece in mine} - {rank}
        self._rooms_to_land = [memory.flag(ROOM_TO_LAND, writer=rank, reader=owner) for owner in owners]
        self.own = [copy for piece in landing.mixed for copy in self._copies(rank, piece)]
        arriving: list[SignalStep] = []
        numbers = [0] * self._ranks
        for piece in (piece for piece in mine if piece.owner != rank):
            cell, owner = piece.place // size, piece.owner
            arriving += [("take", flag, owner) for flag in self._flags(numbers[owner], owner, rank)]
            if others[cell] is piece:
                arriving.append(("signal", self.flags.data_ptr() + 4 * cell, rank))
            numbers[owner] += 1
        self.arriving = Signals(arriving)

    def arrivals(self, shard: tuple[Tensor, ...]) -> Arrivals:
        """What a kernel is told of what lands beside this shard."""
        return Arrivals(self._arrived, *self._at, shard)

    def _begins(self, viewer: int) -> list[int]:
        """Where each tensor that lands on a rank begins in its memory for that."""
        begins, rows = [0], self._landing.landed(viewer)
        for place in self._places[:-1]:
            begins.append(begins[-1] + place.bytes(rows))
        return begins

    def _outgoing(self, viewer: int) -> Outgoing:
        memory, rank = self._memory, self._rank
        lanes: list[list[tuple[list[Copy], int]]] = [[] for _ in range(LANES_OUT)]
        for i, piece in enumerate(piece for piece in self._landing.pieces(viewer) if piece.owner == rank):
            copies = self._copies(viewer, piece)
            for lane, flag in enumerate(self._flags(i, rank, viewer)):
                lanes[lane].append((copies[lane::LANES_OUT], flag))
        room = memory.flag(ROOM_TO_LAND, writer=viewer, reader=rank)
        return Outgoing(Signals([("take", room, viewer)]), lanes)

    def _flags(self, number: int, writer: int, reader: int) -> list[int]:
        """Of a piece of `writer`, one for each lane that brings tensors of it."""
        first = PIECE_THERE + LANES_OUT * number
        return [self._memory.flag(first + lane, writer=writer, reader=reader) for lane in range(LANES_OUT)]

    def _copies(self, viewer: int, piece: Piece) -> list[Copy]:
        block, begins, rows = (
            self._memory.landing(viewer).data_ptr(),
            self._begins(viewer),
            self._landing.landed(viewer),
        )
        there = self._landing.landed_place(viewer, piece.place)
        return [
            Copy(
                i, piece.row * place.row_bytes, block + begin + there * place.row_bytes,
                piece.count * place.row_bytes, place.blocks, place.rows(rows) * place.row_bytes,
                x.shape[1] * place.row_bytes,
            )
            for i, (begin, place, x) in enumerate(zip(begins, self._places, self._like, strict=True))
        ]  # fmt: skip

    def _homeward(self, owner: int) -> list[list[Copy]]:
        """Sums [B, H, rows, D] of what landed go as [B, H, rows that are seen, D], for some of B x H at a time."""
        rank = self._rank
        seen, runs = self._landing.needs.seen(rank, owner), self._landing.runs(rank)
        copies = []
        for group in range(self._groups(self.returning, self.heads)):
            first, found = group * self.heads, []
            for i, (to, x) in enumerate(zip(self._sums(owner, rank), self._like[: self.returning], strict=True)):
                size = x.shape[3] * accumulate_dtype(x.dtype).itemsize
                count = min(self.heads, x.shape[0] * x.shape[2] - first)
                to_step, step = _count(seen) * size, self.rows.stop * size
                for run in (run for run in runs if run.owner == owner):
                    there = to + first * to_step + (run.row - seen.start) * size
                    found.append(
                        Copy(i, first * step + run.place * size, there, run.count * size, count, to_step, step)
                    )
            copies.append(found)
        return copies

    def _sums(self, owner: int, viewer: int) -> list[int]:
        """Where the sums of a viewer go, by tensor: those of all viewers stand one after another, by rank."""
        needs, address = self._landing.needs, self._memory.sums(owner, torch.uint8).data_ptr()
        before = sum(_count(needs.seen(v, owner)) for v in range(viewer) if v != owner)
        rows, sizes = _count(needs.seen(viewer, owner)), [_sum_bytes(x) for x in self._like[: self.returning]]
        return [address + before * sum(sizes) + rows * sum(sizes[:i]) for i in range(len(sizes))]

    def parts(self, viewer: int, sums: tuple[Tensor, ...]) -> Iterator[list[tuple[slice, Tensor]]]:
        """By tensor, (rows, their sums [B, rows, H, D]) from a viewer, or from this rank's own `sums` of what landed."""
        landing, rank = self._landing, self._rank
        if viewer == rank:
            runs = [run for run in landing.runs(rank) if run.owner == rank]
            for total in sums:
                yield [(slice(r.row, r.row + r.count), total[:, r.place : r.place + r.count]) for r in runs]
            return
        seen, whole = landing.needs.seen(viewer, rank), self._memory.sums(rank, torch.uint8)
        for begin, x, total in zip(self._sums(rank, viewer), self._like, sums, strict=False):
            B, _, H, D = x.shape
            begin -= whole.data_ptr()
            message = whole[begin : begin + _count(seen) * _sum_bytes(x)].view(total.dtype).view(B, H, _count(seen), D)
            yield [(seen, message.transpose(1, 2))]


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _sum_bytes(x: Tensor) -> int:
    """Of the sums of one row of a tensor, in all batch rows."""
    return x.shape[0] * prod(x.shape[2:]) * accumulate_dtype(x.dtype).itemsize
