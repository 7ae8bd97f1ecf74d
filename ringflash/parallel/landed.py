"""One visit instead of one a source: everything that a rank sees lands in one place, while a kernel is already at work.

The kernel is launched at once and waits, cell by cell, for what it comes to; see `Arrivals`. Owners put their rows into the
memory of each rank that sees them, in the order in which kernels go, and a lane here tells the kernel what is complete.
Gradients of what landed go home while the kernel is at work on other heads; see `Departures`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.kernels.sums import write_sum
from ringflash.parallel.lanes import Lane
from ringflash.parallel.steps import Copy, Steps
from ringflash.parallel.transport import Passage

if TYPE_CHECKING:
    from ringflash.parallel.symmetric import SymmetricTransport


@dataclass(frozen=True)
class Lanes:
    """here: where the kernel runs; out: to other ranks, two, for each rests between copies; arriving: takes flags and sets
    those of cells.
    """

    here: Lane
    out: tuple[Lane, Lane]
    arriving: Lane

    @property
    def others(self) -> tuple[Lane, ...]:
        return (*self.out, self.arriving)


class LandedPassage(Passage):
    """All rows that this rank sees, own ones too, as one sequence."""

    def __init__(self, transport: SymmetricTransport, steps: Steps, shard: tuple[Tensor, ...], lanes: Lanes) -> None:
        self._transport, self._steps, self._shard, self._lanes = transport, steps, shard, lanes
        self.arrivals, self.departures = steps.arrivals(shard), steps.departures
        self._sums: tuple[Tensor, ...] = ()

    def __iter__(self) -> Iterator[tuple[int | None, slice, tuple[Tensor, ...]]]:
        steps, lanes = self._steps, self._lanes
        self._transport.is_under_way = True
        steps.flags.copy_(steps.flags_before)
        lanes.here.pass_on(steps.rooms)
        for lane in lanes.others:
            lane.after(lanes.here)
        # All of it is queued before the kernel that waits for it: streams may share what a GPU takes them from.
        begins = [x.data_ptr() for x in self._shard]
        first, second = lanes.out
        for room, pieces in steps.outgoing:
            first.pass_on(room)
            second.after(first)
            for copies_and_flags in zip(*pieces, strict=True):
                for lane, (copies, flag) in zip(lanes.out, copies_and_flags, strict=True):
                    _copy(lane, begins, copies)
                    lane.signal(flag)
        lanes.arriving.pass_on(steps.arriving)
        # Before the kernel, not beside it: copies within one GPU are made by multiprocessors, and it takes all of them.
        _copy(lanes.here, begins, steps.own)
        self._sums = tuple(_sums_of(x, steps.rows.stop) for x in self._shard[: steps.returning])
        yield None, steps.rows, steps.tensors
        # And this is queued after the kernel, which it waits for.
        self._go_home()
        for lane in lanes.others:
            lanes.here.after(lane)
        if not steps.returning:
            self._transport.is_under_way = False

    def _go_home(self) -> None:
        steps, (first, second) = self._steps, self._lanes.out
        if not steps.homeward:
            return
        begins = [x.data_ptr() for x in self._sums]
        first.pass_on(steps.homeward_rooms)
        second.after(first)
        for group in range(steps.done.shape[0]):
            for i, lane in enumerate((first, second)):
                lane.wait(steps.done.data_ptr() + 4 * group)
                for copies in steps.homeward:
                    _copy(lane, begins, copies[group][i::2])
        first.after(second)
        first.pass_on(steps.homeward_filled)

    def gradients(self) -> tuple[Tensor, ...]:
        return self._sums

    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        steps, transport = self._steps, self._transport
        self._lanes.here.pass_on(steps.returned)
        transport.is_under_way = False
        # Own ones first, then by distance: the same order on every run.
        viewers = [transport.rank, *steps.viewers]
        parts = [list(steps.parts(viewer, self._sums)) for viewer in viewers]
        return tuple(
            _added(x, total.dtype if dtype is None else dtype, [part for one in parts for part in one[i]])
            for i, (x, total) in enumerate(zip(self._shard, self._sums, strict=False))
        )


def _copy(lane: Lane, begins: list[int], copies: list[Copy]) -> None:
    for copy in copies:
        lane.copy_rows(copy.to, begins[copy.tensor] + copy.offset, copy.size, copy.times, copy.to_step, copy.step)


def _sums_of(x: Tensor, rows: int) -> Tensor:
    """Zeros [B, rows, H, D] in the accumulate type, in memory [B, H, rows, D]: the sums of some heads lie together."""
    B, _, H, D = x.shape
    return x.new_zeros(B, H, rows, D, dtype=accumulate_dtype(x.dtype)).transpose(1, 2)


def _added(like: Tensor, dtype: torch.dtype, parts: list[tuple[slice, Tensor]]) -> Tensor:
    """The sum of parts (rows, values of these rows), in `dtype`, rounded once; what is added to may be changed."""
    total = like.new_empty(like.shape, dtype=dtype)
    ends = sorted({0, like.shape[1]} | {end for rows, _ in parts for end in (rows.start, rows.stop)})
    for begin, stop in pairwise(ends):
        values = [
            x[:, begin - rows.start : stop - rows.start]
            for rows, x in parts
            if rows.start <= begin and stop <= rows.stop
        ]
        here = total[:, begin:stop]
        if not values:
            here.zero_()
            continue
        first, *others = values
        for x in others[:-1]:
            first += x
        write_sum(here, first, *others[-1:])
    return total
