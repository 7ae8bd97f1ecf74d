"""Bounds and Tile: one source's visible pairs, seen by rows, by columns, or as rectangles.

The exact form is `Bounds`: for each local query the half-open interval of local keys that it sees. Its transpose is a
`Bounds` again, which is all that a column-parallel backward needs. `Tile` is the lowering for kernels that others keep,
which know rectangles with straight or slanted edges only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

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


@dataclass(frozen=True, eq=False)
class Bounds:
    """For each row the half-open interval of columns it sees: lo <= column < hi.

    lo, hi: int32 [1 or B, rows] on the CPU, both non-decreasing along the rows, 0 <= lo <= hi <= columns.
    Compared by identity: bounds come from the plan cache.
    """

    lo: Tensor
    hi: Tensor
    columns: int

    @property
    def rows(self) -> int:
        return self.lo.shape[1]

    @cached_property
    def pairs(self) -> int:
        """Visible (row, column) pairs, of one batch row each where the bounds differ over the batch."""
        return int((self.hi.long() - self.lo.long()).sum())

    @property
    def is_empty(self) -> bool:
        return self.pairs == 0

    @cached_property
    def is_full(self) -> bool:
        return self.pairs == self.lo.numel() * self.columns

    @cached_property
    def transposed(self) -> Bounds:
        """The same pairs by columns: the rows that see a column are an interval as well.

        Row i sees column j when lo[i] <= j < hi[i]. Both ends are sorted along i, so the first such row comes after all
        with hi <= j, and the last one before the first with lo > j.
        """
        column = torch.arange(self.columns, dtype=torch.int32).expand(self.lo.shape[0], -1).contiguous()
        lo = torch.searchsorted(self.hi, column, right=True, out_int32=True)
        hi = torch.searchsorted(self.lo, column, right=True, out_int32=True)
        return Bounds(lo, torch.maximum(lo, hi), self.rows)

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[Tensor, Tensor, torch.cuda.Stream, torch.cuda.Event]]:
        return {}

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(lo, hi) on a device. Copied on the first call only: every layer and step of the same plan shares the copy."""
        if device.type != "cuda":
            return self.lo.to(device), self.hi.to(device)
        current = torch.cuda.current_stream(device)
        if device not in self._on_device:
            # Pinned and non-blocking: a pageable copy would make the host wait for the device.
            lo, hi = (t.pin_memory().to(device, non_blocking=True) for t in (self.lo, self.hi))
            self._on_device[device] = (lo, hi, current, current.record_event())
        lo, hi, copied_on, is_copied = self._on_device[device]
        # A graph is captured after a warm-up, when the copy is long there; waiting inside the capture is not allowed.
        if current != copied_on and not torch.cuda.is_current_stream_capturing():
            current.wait_event(is_copied)
        return lo, hi

    def tiles(self) -> list[Tile]:
        """The visible pairs as tiles, each pair in exactly one. Only for bounds that all batch rows share.

        Rows are split where an end changes its slope; between two splits each end is constant or climbs by one.
        """
        return self._tiles

    @cached_property
    def _tiles(self) -> list[Tile]:
        """Cached, because walking the rows in Python is slow and every layer asks, forward and backward."""
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
                high: Edge = "slanted" if hi[stop - 1] > hi[start] else "straight"
                tiles.append(Tile(start, stop, lo[start], hi[stop - 1], low, high))
            start = stop
        return tiles


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
