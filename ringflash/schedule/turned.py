"""Turned: a plan seen from the keys, for a backward in which queries travel and keys stay at home."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.schedule.copies import on_cpu
from ringflash.schedule.landing import Landing
from ringflash.schedule.layout import cut, shard_positions
from ringflash.schedule.mask import Causal, Full
from ringflash.schedule.needs import Needs, query_needs
from ringflash.schedule.tiles import Bounds, Shape, tightened

if TYPE_CHECKING:
    from ringflash.schedule.plan import Plan


@dataclass(frozen=True, eq=False)
class Turned:
    """The work of the plan's rank on its own keys: `turned[source]` are the Bounds of the queries of `source` that see any
    of them, against the keys of this rank that `source` sees.

    Which pairs these are, over all sources, is what `plan[...]` of all ranks says about this rank's keys.
    """

    plan: Plan
    _bounds: dict[int, Bounds] = field(default_factory=dict)

    @cached_property
    def needs(self) -> Needs:
        """Which query rows of which shard every rank's keys are seen by, hence what travels; the same on every rank."""
        plan = self.plan
        return query_needs(plan.mask, plan.layout, plan.length, plan.ranks, plan.query_length)

    def queries(self, source: int) -> slice:
        """Rows of the queries of `source` that see keys of this rank: the rows of its Bounds."""
        return self.needs.seen(self.plan.rank, source)

    def keys(self, source: int) -> slice:
        """Rows of this rank's keys that `source` sees: the columns of its Bounds."""
        return self.plan.needs.seen(source, self.plan.rank)

    def __getitem__(self, source: int) -> Bounds:
        if source not in self._bounds:
            rows, columns = self.queries(source), self.keys(source)
            self._bounds[source] = Bounds(
                rows=rows.stop - rows.start,
                columns=columns.stop - columns.start,
                ends=lambda device: self._form(source, device),
                positions=lambda: (self._positions(source), self._keys_here()[columns]),
                shape=self._shape(source, rows, columns),
                is_causal=self.plan.mask == Causal(),
            )
        return self._bounds[source]

    def part(self, source: int, rows: slice) -> Bounds:
        """`turned[source]` of some rows of its queries, all of which come here."""
        begin = self.queries(source).start
        return self[source].part(rows=slice(rows.start - begin, rows.stop - begin))

    @cached_property
    def landing(self) -> Landing:
        """All queries that see keys of this rank as one sequence, and how it is put together."""
        return Landing(self.plan, "queries", walk="up")

    @property
    def early(self) -> int:
        """Of the own queries that see own keys, so many, the first ones, have about half of the work of all of them."""
        own = self[self.plan.rank]
        # Under a causal mask query i sees i + 1 keys.
        return int(own.rows * (0.5**0.5 if own.shape == "causal" else 0.5))

    def _shape(self, source: int, rows: slice, columns: slice) -> Shape:
        plan = self.plan
        if plan.mask == Full():
            return "full"
        tokens = cut(plan.layout, plan.length, plan.ranks).shard_lengths[plan.rank]
        is_square = source == plan.rank and plan.query_length == plan.length and rows == columns == slice(0, tokens)
        return "causal" if plan.mask == Causal() and is_square else "rows"

    def _positions(self, source: int) -> Tensor:
        """Where the queries of `source` that come here stand among the keys, int64."""
        plan = self.plan
        everywhere = shard_positions(plan.layout, plan.query_length, source, plan.ranks)
        return everywhere[self.queries(source)] + plan.length - plan.query_length

    def _keys_here(self) -> Tensor:
        return shard_positions(self.plan.layout, self.plan.length, self.plan.rank, self.plan.ranks)

    @on_cpu
    def _form(self, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
        columns = self.keys(source)
        lo, hi = self.plan.ends_here(self._positions(source), device)
        count = columns.stop - columns.start
        return tightened(*(x.sub_(columns.start).clamp_(0, count) for x in (lo, hi)))
