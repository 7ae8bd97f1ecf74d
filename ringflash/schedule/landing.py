"""Landing: all keys that a rank sees as one sequence, so that one call of a kernel attends to all of them.

Shards are put together again in the order of positions, in which a query sees one interval of keys as it does in the whole
sequence. Under a full mask any order will do, and own keys stand last, where a kernel that goes from the last key to the
first begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.schedule.copies import moved, on_cpu
from ringflash.schedule.layout import cut, shard_positions
from ringflash.schedule.mask import Full
from ringflash.schedule.tiles import Bounds, tightened

if TYPE_CHECKING:
    from ringflash.schedule.plan import Plan

MOST_BLOCKS = 64  # of a layout: with more, pieces get too small to be worth a copy each
CELLS = 16
CELL_ROWS = 128  # a cell is a multiple of that, the largest block of keys of any kernel that waits for one
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
    """What lands where on every rank; the same on all of them. Get it from `Plan.landing`."""

    plan: Plan

    @property
    def is_possible(self) -> bool:
        """Whether shards are of few blocks of neighbouring positions."""
        keys = cut(self.plan.layout, self.plan.length, self.plan.ranks)
        return not keys.is_striped and keys.start.shape[0] <= MOST_BLOCKS

    def fits(self, row_bytes: int) -> bool:
        """Whether all ranks have room; row_bytes: of K and V of one token in all batch rows."""
        return self.is_possible and self.most_rows * row_bytes <= MOST_BYTES

    @cached_property
    def most_rows(self) -> int:
        return max(self.rows(viewer) for viewer in range(self.plan.ranks))

    def rows(self, viewer: int) -> int:
        """How many land on a rank, own ones included."""
        return max((run.place + run.count for run in self._uncut[viewer]), default=0)

    def cell_rows(self, viewer: int) -> int:
        """Rows whose arrival is told together: cells of so many, from the first on. CELL_ROWS times a power of two."""
        blocks = max(1, -(-self.rows(viewer) // (CELLS * CELL_ROWS)))
        return CELL_ROWS << (blocks - 1).bit_length()

    def pieces(self, viewer: int) -> list[Piece]:
        """What lands on a rank, cut at the ends of cells, the last place first: in the order in which a kernel goes."""
        return self._pieces[viewer]

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        return [self._cut_at_cells(viewer) for viewer in range(self.plan.ranks)]

    def _cut_at_cells(self, viewer: int) -> list[Piece]:
        size = self.cell_rows(viewer)
        found = []
        for run in self._uncut[viewer]:
            place, end = run.place, run.place + run.count
            while place < end:
                until = min((place // size + 1) * size, end)
                found.append(Piece(run.owner, run.row + place - run.place, place, until - place))
                place = until
        return sorted(found, key=lambda piece: -piece.place)

    @cached_property
    @on_cpu
    def _uncut(self) -> list[list[Piece]]:
        """Per rank, by place, not yet cut at cells."""
        plan = self.plan
        keys = cut(plan.layout, plan.length, plan.ranks)
        blocks = list(
            zip(
                keys.start.tolist(), keys.count.tolist(), keys.owner.tolist(), keys.held[:, :-1].T.tolist(), strict=True
            )
        )
        everyone = []
        for viewer in range(plan.ranks):
            runs: list[Run] = []
            for start, count, owner, held in blocks:
                seen, first = plan.needs.seen(viewer, owner), held[owner]
                row, stop = max(first, seen.start), min(first + count, seen.stop)
                if row < stop:
                    runs.append(Run(owner, row, start + row - first, stop - row))
            everyone.append(self._placed(runs, viewer))
        return everyone

    def _placed(self, runs: list[Run], viewer: int) -> list[Piece]:
        """Where runs, given by position, land: one after another, without a hole."""
        if self.plan.mask == Full():
            runs = sorted(runs, key=lambda run: (-((viewer - run.owner) % self.plan.ranks), run.position))
        place, placed = 0, []
        for run in runs:
            placed.append(Piece(run.owner, run.row, place, run.count))
            place += run.count
        return placed

    @cached_property
    def bounds(self) -> Bounds:
        """Of the plan's rank: its queries against what lands."""
        plan = self.plan
        return Bounds(
            rows=plan.positions.shape[0],
            columns=self.rows(plan.rank),
            ends=self._ends,
            positions=lambda: (plan.positions, self._positions()),
            shape="full" if plan.mask == Full() else "rows",
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

    def _below(self, x: Tensor) -> Tensor:
        """How many of the keys that land stand below each position."""
        runs = self._uncut[self.plan.rank]
        first = torch.tensor([int(self._positions_of(run)[0]) for run in runs], dtype=torch.int32)
        place, count = (torch.tensor([getattr(run, name) for run in runs]).int() for name in ("place", "count"))
        run = torch.searchsorted(first, x.contiguous(), right=True).sub_(1)
        inside = torch.minimum(x - first[run.clamp_min(0)], count[run.clamp_min(0)])
        return torch.where(run < 0, 0, place[run.clamp_min(0)] + inside)

    def _positions_of(self, run: Piece) -> Tensor:
        plan = self.plan
        return shard_positions(plan.layout, plan.length, run.owner, plan.ranks)[run.row : run.row + run.count]

    @on_cpu
    def _positions(self) -> Tensor:
        """Of what lands, int64."""
        runs = self._uncut[self.plan.rank]
        return torch.cat([self._positions_of(run) for run in runs]) if runs else torch.zeros(0, dtype=torch.int64)
