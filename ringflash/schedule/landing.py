"""Landing: all that comes to a rank as one sequence, so that one call of a kernel is enough for all of it.

Keys that its queries see or, where queries travel, queries that see its keys. Shards are put together again in the order of
positions, in which a query sees one interval of keys as it does in the whole sequence. Under a full mask any order will do,
and own rows stand where a kernel begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ringflash.schedule.copies import moved, on_cpu
from ringflash.schedule.cut import Cut
from ringflash.schedule.layout import cut, shard_positions
from ringflash.schedule.mask import Causal, Full
from ringflash.schedule.needs import Needs
from ringflash.schedule.tiles import Bounds, tightened

if TYPE_CHECKING:
    from ringflash.schedule.plan import Plan

MOST_BLOCKS = 64  # of a layout: with more, pieces get too small to be worth a copy each
CELLS = 8  # what is told of more often comes slower: a copy and a signal take microseconds each
BLOCK_ROWS = 128  # of the largest block of any kernel that waits for one; a cell is a multiple of that
MOST_BYTES = 512 << 20  # of what lands; more is as fast source by source, in memory that does not grow with ranks


@dataclass(frozen=True)
class Run:
    """Rows [row, row + count) of the shard of `owner`, at neighbouring positions from `position` on."""

    owner: int
    row: int
    position: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + count) of the shard of `owner`, which land as [place, place + count)."""

    owner: int
    row: int
    place: int
    count: int


@dataclass(frozen=True)
class Landing:
    """What lands where on every rank; the same on all of them. Get it from `Plan.landing` or `Turned.landing`.

    walk: in which order a kernel takes what lands, from the last row "down" or from the first one "up".
    """

    plan: Plan
    travels: Literal["keys", "queries"] = "keys"
    walk: Literal["down", "up"] = "down"

    @property
    def needs(self) -> Needs:
        return self.plan.needs if self.travels == "keys" else self.plan.turned.needs

    @property
    def length(self) -> int:
        """Of the sequence that travels."""
        return self.plan.length if self.travels == "keys" else self.plan.query_length

    @property
    def _cut(self) -> Cut:
        return cut(self.plan.layout, self.length, self.plan.ranks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all of it once: every pass looks up what it queues."""
        return hash((self.plan, self.travels, self.walk))

    @cached_property
    def is_possible(self) -> bool:
        """Whether shards are of few blocks of neighbouring positions."""
        return not self._cut.is_striped and self._cut.start.shape[0] <= MOST_BLOCKS

    def fits(self, row_bytes: int) -> bool:
        """Whether all ranks have room; row_bytes: of what travels of one token in all batch rows."""
        return self.is_possible and self.most_landed * row_bytes <= MOST_BYTES

    @cached_property
    def most_landed(self) -> int:
        return max(self.landed(viewer) for viewer in range(self.plan.ranks))

    def rows(self, viewer: int) -> int:
        """How many a rank sees, own ones included, wherever they are."""
        return max((run.place + run.count for run in self._runs[viewer]), default=0)

    def cell_rows(self, viewer: int) -> int:
        """Rows whose arrival is told together: cells of so many, from the first on. BLOCK_ROWS times a power of two."""
        blocks = max(1, -(-self.rows(viewer) // (CELLS * BLOCK_ROWS)))
        return BLOCK_ROWS << (blocks - 1).bit_length()

    def runs(self, viewer: int) -> list[Piece]:
        """What lands on a rank, by place, in pieces as long as shards and places allow."""
        return self._runs[viewer]

    def late(self, viewer: int) -> tuple[int, int]:
        """Places [from, until) between own rows, which a kernel visits last: it can begin with own ones on both sides."""
        own = [run for run in self.runs(viewer) if run.owner == viewer]
        gaps = [(a.place + a.count, b.place) for a, b in pairwise(own)]
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))

    def pieces(self, viewer: int) -> list[Piece]:
        """What lands on a rank, cut at the ends of cells, in the order in which a kernel goes."""
        return self._pieces[viewer]

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        return [self._cut_at_cells(viewer) for viewer in range(self.plan.ranks)]

    def _cut_at_cells(self, viewer: int) -> list[Piece]:
        size, (late_from, late_until) = self.cell_rows(viewer), self.late(viewer)
        found = []
        for run in self._runs[viewer]:
            place, end = run.place, run.place + run.count
            while place < end:
                until = min((place // size + 1) * size, end)
                found.append(Piece(run.owner, run.row + place - run.place, place, until - place))
                place = until
        forwards = 1 if self.walk == "up" else -1
        return sorted(found, key=lambda piece: (late_from <= piece.place < late_until, forwards * piece.place))

    @cached_property
    @on_cpu
    def _runs(self) -> list[list[Piece]]:
        """Per rank, by place, not yet cut at cells."""
        shards, needs = self._cut, self.needs
        held = shards.held[:, :-1].T.tolist()
        blocks = list(zip(shards.start.tolist(), shards.count.tolist(), shards.owner.tolist(), held, strict=True))
        everyone = []
        for viewer in range(self.plan.ranks):
            runs: list[Run] = []
            for start, count, owner, held_by in blocks:
                seen, first = needs.seen(viewer, owner), held_by[owner]
                row, stop = max(first, seen.start), min(first + count, seen.stop)
                if row < stop:
                    runs.append(Run(owner, row, start + row - first, stop - row))
            everyone.append(self._placed(runs, viewer))
        return everyone

    def _placed(self, runs: list[Run], viewer: int) -> list[Piece]:
        """Where runs, given by position, land: one after another, without a hole."""
        if self.plan.mask == Full():
            forwards = 1 if self.walk == "up" else -1
            runs = sorted(runs, key=lambda run: (forwards * ((viewer - run.owner) % self.plan.ranks), run.position))
        place, placed = 0, []
        for run in runs:
            placed.append(Piece(run.owner, run.row, place, run.count))
            place += run.count
        return placed

    def places(self, viewer: int) -> Tensor:
        """By block of BLOCK_ROWS of what a rank sees, int32: the row of its own shard that begins it, or -1 - that of what
        lands.

        Blocks of own rows need not land: a kernel may read them where they are. Others' and mixed blocks land, and those
        whose row statistics begin where the copy engine cannot: at no multiple of four.
        """
        return self._places[viewer]

    @cached_property
    @on_cpu
    def _places(self) -> list[Tensor]:
        return [self._placed_blocks(viewer) for viewer in range(self.plan.ranks)]

    def _placed_blocks(self, viewer: int) -> Tensor:
        rows = self.rows(viewer)
        places = torch.full((-(-rows // BLOCK_ROWS),), -1, dtype=torch.int32)
        for run in (run for run in self.runs(viewer) if run.owner == viewer):
            shift, end = run.row - run.place, run.place + run.count
            first, stop = -(-run.place // BLOCK_ROWS), end // BLOCK_ROWS
            if end == rows and run.row + run.count == self._cut.shard_lengths[viewer]:
                stop = places.shape[0]  # past the end there is nothing, here as there
            # Keys have no row statistics.
            if first < stop and (shift % 4 == 0 or self.travels == "keys"):
                places[first:stop] = torch.arange(first, stop) * BLOCK_ROWS + shift
        lands = places < 0
        places[lands] = -1 - BLOCK_ROWS * torch.arange(int(lands.sum()), dtype=torch.int32)
        return places

    def landed(self, viewer: int) -> int:
        """Rows that land on a rank: of all blocks but its own, of which only the last one is not whole."""
        places = self.places(viewer)
        blocks = int((places < 0).sum())
        missing = -self.rows(viewer) % BLOCK_ROWS if blocks and places[-1] < 0 else 0
        return blocks * BLOCK_ROWS - missing

    def landed_place(self, viewer: int, place: int) -> int:
        """Where among those a row lands."""
        return -1 - int(self.places(viewer)[place // BLOCK_ROWS]) + place % BLOCK_ROWS

    @property
    def mixed(self) -> list[Piece]:
        """Own rows that land all the same, because their blocks are not places in the own shard."""
        rank = self.plan.rank
        found: list[Piece] = []
        is_own = (self.places(rank) >= 0).tolist()
        for run in (run for run in self.runs(rank) if run.owner == rank):
            place, end = run.place, run.place + run.count
            while place < end:
                until = min((place // BLOCK_ROWS + 1) * BLOCK_ROWS, end)
                if not is_own[place // BLOCK_ROWS]:
                    if found and found[-1].place + found[-1].count == place and found[-1].place >= run.place:
                        place = found.pop().place
                    found.append(Piece(rank, run.row + place - run.place, place, until - place))
                place = until
        return found

    @cached_property
    @on_cpu
    def departing(self) -> Tensor:
        """By block of BLOCK_ROWS keys, int32: 1 where a gradient that is formed with these keys belongs to another rank.

        Of keys that travel, a gradient of theirs; else one of the queries that see them.
        """
        rank = self.plan.rank
        others = [slice(run.place, run.place + run.count) for run in self.runs(rank) if run.owner != rank]
        if self.travels == "keys":
            blocks = torch.zeros(-(-self.rows(rank) // BLOCK_ROWS), dtype=torch.int32)
            for rows in others:
                blocks[rows.start // BLOCK_ROWS : -(-rows.stop // BLOCK_ROWS)] = 1
            return blocks
        before = torch.zeros(self.rows(rank) + 1, dtype=torch.int32)  # how many rows of others come before each
        for rows in others:
            before[rows.start + 1 : rows.stop + 1] = 1
        before = before.cumsum(0)
        lo, hi = (x.long() for x in self.bounds.columns_to(torch.device("cpu")))
        ends = torch.arange(BLOCK_ROWS, lo.shape[1] + BLOCK_ROWS, BLOCK_ROWS).clamp(max=lo.shape[1]) - 1
        return (before[hi[:, ends]] > before[lo[:, ::BLOCK_ROWS]]).any(0).int()

    @cached_property
    def bounds(self) -> Bounds:
        """Of the plan's rank: its queries against the keys that land, or the queries that land against its keys."""
        plan = self.plan
        here, lands = plan.positions.shape[0], self.rows(plan.rank)
        if self.travels == "queries":
            here = cut(plan.layout, plan.length, plan.ranks).shard_lengths[plan.rank]
        rows, columns = (here, lands) if self.travels == "keys" else (lands, here)
        return Bounds(
            rows=rows,
            columns=columns,
            ends=self._ends if self.travels == "keys" else self._ends_of_queries,
            positions=self._positions,
            shape="full" if plan.mask == Full() else "rows",
            is_causal=plan.mask == Causal(),
        )

    @on_cpu
    def _ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        columns = self.rows(self.plan.rank)
        lo, hi = self.plan.ends
        if self.plan.mask == Full() or columns == 0:
            lo, hi = torch.zeros_like(lo), torch.full_like(hi, columns)
        else:
            lo, hi = self._below(lo), self._below(hi)
        return tightened(*moved(device, lo, hi))

    @on_cpu
    def _ends_of_queries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return tightened(*self.plan.ends_here(self._positions()[0], device))

    def _below(self, x: Tensor) -> Tensor:
        """How many of the keys that land stand below each position."""
        runs = self._runs[self.plan.rank]
        first = torch.tensor([int(self._positions_of(run)[0]) for run in runs], dtype=torch.int32)
        place, count = (torch.tensor([getattr(run, name) for run in runs]).int() for name in ("place", "count"))
        run = torch.searchsorted(first, x.contiguous(), right=True).sub_(1)
        inside = torch.minimum(x - first[run.clamp_min(0)], count[run.clamp_min(0)])
        return torch.where(run < 0, 0, place[run.clamp_min(0)] + inside)

    def _positions_of(self, run: Piece) -> Tensor:
        return shard_positions(self.plan.layout, self.length, run.owner, self.plan.ranks)[run.row : run.row + run.count]

    @on_cpu
    def _positions(self) -> tuple[Tensor, Tensor]:
        """Of rows and columns, int64."""
        plan, runs = self.plan, self._runs[self.plan.rank]
        land = torch.cat([self._positions_of(run) for run in runs]) if runs else torch.zeros(0, dtype=torch.int64)
        if self.travels == "keys":
            return plan.positions, land
        here = shard_positions(plan.layout, plan.length, plan.rank, plan.ranks)
        return land + plan.length - plan.query_length, here
