"""The contract of a transport: stream shards past, take gradients back, and collect whole sequences.

A transport knows ranks, tensors and which rows of whose shard go where; it knows nothing of attention. `rank` counts
inside the ring's group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.backend import Arrivals, Departures
from ringflash.schedule.landing import Landing
from ringflash.schedule.needs import Needs


@dataclass(frozen=True)
class Parcel:
    """Rows [start, stop) of the tensors of a shard, one after another in one flat message.

    shapes: of those parts; rows are axis 1.
    """

    start: int
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: slice, tensors: tuple[Tensor, ...]) -> Parcel:
        """`rows` of tensors like these, whatever number of rows these have."""
        return cls(rows.start, tuple((x.shape[0], rows.stop - rows.start, *x.shape[2:]) for x in tensors))

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def views(self, message: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """`rows` of each tensor inside `message`, which may be longer."""
        parts, begin = [], 0
        for shape in self.shapes:
            whole = message[begin : begin + prod(shape)].view(shape)
            parts.append(whole[:, rows.start - self.start : rows.stop - self.start])
            begin += prod(shape)
        return tuple(parts)

    def filled(self, parts: Iterable[Tensor]) -> Tensor:
        """A message of these parts, of one tensor after another."""
        parts = tuple(parts)
        message = parts[0].new_empty(self.numel)
        rows = slice(self.start, self.start + self.shapes[0][1])
        for view, part in zip(self.views(message, rows), parts, strict=True):
            view.copy_(part)
        return message

    def add(self, message: Tensor, rows: slice, totals: Iterable[Tensor]) -> None:
        """Add `rows` of each tensor inside `message` to `totals`, which are of those rows."""
        for total, part in zip(totals, self.views(message, rows), strict=True):
            total += part


def is_any(rows: slice) -> bool:
    return bool(rows.stop > rows.start)


def early_and_late(own: slice, early: int | None) -> tuple[slice, slice]:
    """Own rows that are visited first, and last."""
    cut = own.stop if early is None else min(own.start + early, own.stop)
    return slice(own.start, cut), slice(cut, own.stop)


def rounded(sums: tuple[Tensor, ...], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return sums if dtype is None else tuple(x.to(dtype) for x in sums)


class Passage(ABC):
    """One pass of shards around the ring: iterate it; in backward add into `gradients` meanwhile, then `collect`."""

    arrivals: Arrivals | None = None  # of tensors that are yielded before they are there
    departures: Departures | None = None  # of gradients that leave before the pass is over

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int | None, slice, tuple[Tensor, ...]]]:
        """Yield (source, rows of its shard, those rows of each tensor): all that this rank sees, own rows first, or first
        and last; where everything lands together, once, without a source. Tensors stay valid until the next are asked for.
        """

    @abstractmethod
    def gradients(self) -> tuple[Tensor, ...]:
        """The sums for what was just yielded of the tensors that return some: in the accumulate type, to add into."""

    @abstractmethod
    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """After the iteration: the sum over ranks of the gradients of this rank's own shard, rounded to dtype if given."""


@dataclass(frozen=True)
class Returning:
    """What comes home in a pass.

    tensors: of so many of a shard, the first ones, gradients of what was seen, in their accumulate type.
    dtype: what those are rounded to on the wire; None is the accumulate type, which rounds nothing.
    early: of the own rows that are seen, so many come first, to compute on while others' are on their way; the rest comes
        last, while gradients go home. None is all of them first.
    heads: where all is in one piece, gradients of so many heads go home together.
    """

    tensors: int = 0
    dtype: torch.dtype | None = None
    early: int | None = None
    heads: int = 1


NO_RETURN = Returning()


class Transport(ABC):
    """One wire between the ranks of a ring."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.resolved: dict[object, Any] = {}  # what calls of a kind need, see attention()
        self.agreed: dict[object, None] = {}  # calls whose shapes all ranks have compared; see Ring.agree

    @abstractmethod
    def stream(self, shard: tuple[Tensor, ...], needs: Needs, returning: Returning = NO_RETURN) -> Passage:
        """Bring to every rank what it sees of the others' shards, the next always on its way during compute.

        shard: this rank's tensors, of one dtype, rows on axis 1.
        needs: the same on every rank.
        returning: what comes home of the gradients of what was seen.
        """

    def lands(self, device: torch.device) -> bool:
        """Whether `landed` serves tensors there; the same on every rank."""
        return False

    def landed(self, shard: tuple[Tensor, ...], landing: Landing, returning: Returning = NO_RETURN) -> Passage:
        """Bring all that this rank sees in one piece, to a backend that waits for it. Gradients are not rounded on the wire.

        shard: tensors [B, rows, ...] of any types; those [B, rows, H] lie as row statistics do.
        """
        raise NotImplementedError(f"{type(self).__name__} brings shards one by one")

    @abstractmethod
    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's tensor; `shapes[rank]` is known on all ranks. Not differentiable."""

    @abstractmethod
    def all_gather_object(self, value: object) -> list[object]:
        """Every rank's small Python value; for set-up checks, never in the hot path."""
