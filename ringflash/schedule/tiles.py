"""Bounds and Tile: one source's visible pairs, seen by rows, by columns, or as rectangles.

The exact form is `Bounds`: for each local query the half-open interval of local keys that it sees. Its transpose is a
`Bounds` again, which is all that a column-parallel backward needs. `Tile` is the lowering for kernels that others keep,
which know rectangles with straight or slanted edges only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ringflash.schedule.copies import Copies, moved
from ringflash.schedule.diagonals import diagonals

CPU = torch.device("cpu")
Edge = Literal["straight", "slanted"]


@dataclass(frozen=True)
class Tile:
    """Rows [row_start, row_stop) by keys [key_start, key_stop), less the corners that slanted edges cut off.

    A slanted low edge moves right by one key per row and reaches row 0 of the tile at key_start; a slanted high edge
    moves alike and reaches the last row at key_stop. So with n rows and m keys, counted inside the tile, row i sees

        (i if low is slanted else 0) <= key < (m - (n - 1 - i) if high is slanted else m)

    which is a full, causal, anti-causal or banded call, aligned to the bottom right.
    """

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    low: Edge
    high: Edge

    @property
    def kind(self) -> Literal["full", "causal", "anticausal", "band"]:
        if self.low == "straight":
            return "full" if self.high == "straight" else "causal"
        return "anticausal" if self.high == "straight" else "band"


Ends = tuple[Tensor, Tensor]
Shape = Literal["full", "causal", "rows"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """For each row the half-open interval of columns it sees: lo <= column < hi.

    ends: makes (lo, hi) on a device, int32 [1 or B, rows], both non-decreasing along the rows, 0 <= lo <= hi <= columns.
    positions: makes the global positions (int64 [rows], int64 [columns]) on the CPU, for scores that depend on them.
    column_ends: makes the ends of `transposed`; None where they are to be found from `ends`.
    shape: what is known of the ends beforehand: "full", every row sees every column; "causal", a causal square, row i sees
        columns [0, i + 1); or "rows", to be read row by row. Where positions say that it is the first, "rows" becomes it.
    is_causal: whether rows see the columns up to their own position and no others, so that `diagonals` may say which.
    Compared by identity: bounds come from the plan cache.
    """

    rows: int
    columns: int
    ends: Callable[[torch.device], Ends]
    positions: Callable[[], Ends]
    column_ends: Callable[[torch.device], Ends] | None = None
    shape: Shape = "rows"
    is_causal: bool = False
    _copies: Copies = field(default_factory=Copies)
    _parts: dict[tuple[int, int, int, int], Bounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_causal and self.shape == "rows" and self.rows and self.columns:
            rows, columns = self.positions()
            if int(rows[0]) >= int(columns[-1]):
                object.__setattr__(self, "shape", "full")

    @classmethod
    def of(cls, lo: Tensor, hi: Tensor, columns: int) -> Bounds:
        """From (lo, hi) on the CPU, of rows and columns that are positions themselves."""
        rows = lo.shape[1]
        positions = torch.arange(rows), torch.arange(columns)
        return cls(rows, columns, lambda device: _pair(moved(device, lo, hi)), lambda: positions)

    @cached_property
    def lo(self) -> Tensor:
        return self.to(CPU)[0]

    @cached_property
    def hi(self) -> Tensor:
        return self.to(CPU)[1]

    @cached_property
    def pairs(self) -> int:
        """Visible (row, column) pairs, of one batch row each where the bounds differ over the batch."""
        return int((self.hi.long() - self.lo.long()).sum())

    @property
    def is_empty(self) -> bool:
        return self.columns == 0 or self.pairs == 0

    @cached_property
    def is_full(self) -> bool:
        return self.pairs == self.lo.numel() * self.columns

    @cached_property
    def transposed(self) -> Bounds:
        """The same pairs by columns: the rows that see a column are an interval as well."""
        return Bounds(self.columns, self.rows, self.columns_to, lambda: self.positions()[::-1])

    def to(self, device: torch.device) -> Ends:
        """(lo, hi) on a device. Made on the first call only: every layer and step of the same plan shares them."""
        return self._copies.get("rows", device, lambda: self.ends(device))

    def columns_to(self, device: torch.device) -> Ends:
        """(lo, hi) of `transposed` on a device, formed there: a search for every key is slow on a host."""
        if self.column_ends is not None:
            return self.column_ends(device)
        return self._copies.get("columns", device, lambda: transpose(*self.to(device), self.columns))

    def part(self, *, rows: slice | None = None, columns: slice | None = None) -> Bounds:
        """Those rows and columns of it, counted from their own beginning; itself for all of them. Kept with it."""
        rows, columns = rows or slice(0, self.rows), columns or slice(0, self.columns)
        key = (rows.start, rows.stop, columns.start, columns.stop)
        if key == (0, self.rows, 0, self.columns):
            return self
        if key not in self._parts:
            self._parts[key] = Bounds(
                rows=rows.stop - rows.start,
                columns=columns.stop - columns.start,
                ends=lambda device: self._ends_of(rows, columns, device),
                positions=lambda: (self.positions()[0][rows], self.positions()[1][columns]),
                shape="full" if self.shape == "full" else "rows",
                is_causal=self.is_causal,
            )
        return self._parts[key]

    def _ends_of(self, rows: slice, columns: slice, device: torch.device) -> Ends:
        count = columns.stop - columns.start
        lo, hi = ((end[:, rows] - columns.start).clamp_(0, count) for end in self.to(device))
        return tightened(lo, hi)

    @cached_property
    def has_diagonals(self) -> bool:
        return self._diagonals is not None

    @cached_property
    def _diagonals(self) -> Ends | None:
        return diagonals(*self.positions()) if self.is_causal else None

    @cached_property
    def is_even(self) -> bool:
        """Whether all rows that see anything are known to see the same columns, so that tiles are of one length."""
        if self.shape != "rows" or self._diagonals is None:
            return self.shape == "full"
        numbers, _ = self._diagonals
        seen = numbers[numbers > 0]
        return bool((seen % 2 == 0).all() and (seen == seen[:1]).all())

    def diagonals_to(self, device: torch.device) -> Ends:
        """See schedule.diagonals: (of the rows, of the columns) on a device."""
        assert self._diagonals is not None, "asked for where has_diagonals"
        tables = self._diagonals
        return self._copies.get("diagonals", device, lambda: _pair(moved(device, *tables)))

    def positions_to(self, device: torch.device) -> Ends:
        """The global positions on a device, int32."""
        return self._copies.get("positions", device, lambda: _pair(moved(device, *self._positions32())))

    def _positions32(self) -> Ends:
        rows, columns = self.positions()
        return rows.int(), columns.int()

    def tiles(self) -> list[Tile]:
        """The visible pairs as tiles, each pair in exactly one. Only for bounds that all batch rows share.

        Rows are split where an end changes its slope; between two splits each end is constant or climbs by one.
        """
        return self._tiles

    @cached_property
    def _tiles(self) -> list[Tile]:
        """Cached, because walking the rows in Python is slow and every layer asks, forward and backward."""
        if self.shape != "rows" and self.rows and self.columns:
            high: Edge = "slanted" if self.shape == "causal" and self.rows > 1 else "straight"
            return [Tile(0, self.rows, 0, self.columns, "straight", high)]
        if self.lo.shape[0] != 1:
            raise ValueError(
                f"Bounds.tiles: bounds of {self.lo.shape[0]} batch rows; tiles exist for shared bounds only"
            )
        lo, hi = self.lo[0].tolist(), self.hi[0].tolist()
        tiles: list[Tile] = []
        start = 0
        while start < self.rows:
            stop = _run_end(lo, hi, start)
            if hi[start] > lo[start] or hi[stop - 1] > lo[stop - 1]:
                low: Edge = "slanted" if lo[stop - 1] > lo[start] else "straight"
                high = "slanted" if hi[stop - 1] > hi[start] else "straight"
                tiles.append(Tile(start, stop, lo[start], hi[stop - 1], low, high))
            start = stop
        return tiles


def _pair(tensors: tuple[Tensor, ...]) -> Ends:
    lo, hi = tensors
    return lo, hi


def _run_end(lo: list[int], hi: list[int], start: int) -> int:
    """First row after `start` where an end leaves the slope, 0 or 1, that it has there, or visibility starts or ends."""
    if start + 1 >= len(lo):
        return start + 1
    slopes = (lo[start + 1] - lo[start], hi[start + 1] - hi[start])
    if max(slopes) > 1 or (hi[start] > lo[start]) != (hi[start + 1] > lo[start + 1]):
        return start + 1
    stop = start + 2
    while (
        stop < len(lo)
        and (lo[stop] - lo[stop - 1], hi[stop] - hi[stop - 1]) == slopes
        and (hi[stop] > lo[stop]) == (hi[start] > lo[start])
    ):
        stop += 1
    return stop


def tightened(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The same pairs, with the empty intervals of rows that see nothing moved to where their neighbours end.

    A block of rows visits from its first lo to its last hi. Were an empty row's ends left where the mask put them, far past
    what anybody sees, the block would touch columns that hold nothing, or NaN.
    """
    is_empty = lo >= hi
    before = torch.where(is_empty, -1, hi).cummax(-1).values
    # Of rows that come before all others: where the first of those begins.
    after = torch.where(is_empty, torch.iinfo(torch.int32).max, lo).flip(-1).cummin(-1).values.flip(-1)
    place = torch.where(before >= 0, before, after.where(after < torch.iinfo(torch.int32).max, 0)).to(lo.dtype)
    return torch.where(is_empty, place, lo), torch.where(is_empty, place, hi)


def transpose(lo: Tensor, hi: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows that see each column, int32 [1 or B, columns] where lo and hi are, tightened.

    Row i sees column j when lo[i] <= j < hi[i]. Both ends are sorted along i, so the first such row comes after all with
    hi <= j, and the last one before the first with lo > j.
    """
    column = torch.arange(columns, dtype=torch.int32, device=lo.device).expand(lo.shape[0], -1).contiguous()
    first = torch.searchsorted(hi, column, right=True, out_int32=True)
    past = torch.searchsorted(lo, column, right=True, out_int32=True)
    return tightened(first, torch.maximum(first, past))
