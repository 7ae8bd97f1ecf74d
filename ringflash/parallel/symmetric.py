"""Symmetric memory: every rank writes what another one needs straight into memory of that rank.

The owner of a shard puts the rows that a rank sees into a slot there, from its own tensors, at the hop at which a ring would
bring them: no rank passes on for others, and what nobody sees does not move. Sums of gradients go back alike, and the owner
adds them up in the order of hops. On GPUs copy engines move everything and streams wait for each other (see `lanes`).

Between two ranks each message takes two signals: the receiver says that its slot is free, then the sender that it is filled.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.landed import LandedPassage, Lanes, Steps
from ringflash.parallel.lanes import Lane, Reach
from ringflash.parallel.passage import NeighbourTransport
from ringflash.parallel.transport import Parcel, Passage, Transport, early_and_late, is_any
from ringflash.schedule.landing import CELLS, MOST_BLOCKS, Landing
from ringflash.schedule.needs import NOTHING, Needs

# What a flag says of a message from one rank to another; the last ones, of each piece of what lands.
FREE, FILLED, FREE_FOR_SUMS, SUMS_FILLED, LANDING_FREE, PIECE_THERE = range(6)
MOST_PIECES = CELLS + MOST_BLOCKS  # of one rank on another
MOST_STEPS = 32  # kept: as many as there are plans
SLOTS = 2  # one is computed with while the next is filled


@dataclass(frozen=True, eq=False)
class Workspace:
    """The same piece of memory of every rank, by rank: flags, slots for shards, and room for sums and for what lands."""

    blocks: list[Tensor]
    slot_bytes: int
    sums_bytes: int
    landing_bytes: int

    @staticmethod
    def flags_bytes(ranks: int) -> int:
        return _aligned(4 * (PIECE_THERE + MOST_PIECES) * ranks)

    @classmethod
    def total_bytes(cls, ranks: int, slot_bytes: int, sums_bytes: int, landing_bytes: int) -> int:
        return cls.flags_bytes(ranks) + SLOTS * slot_bytes + sums_bytes + landing_bytes

    def has_room(self, slot_bytes: int, sums_bytes: int, landing_bytes: int) -> bool:
        return self.slot_bytes >= slot_bytes and self.sums_bytes >= sums_bytes and self.landing_bytes >= landing_bytes

    def flag(self, holder: int, what: int, other: int) -> int:
        """The flag in memory of `holder` that `other` sets."""
        return self.begins[holder] + 4 * (what * len(self.blocks) + other)

    @cached_property
    def begins(self) -> list[int]:
        return [block.data_ptr() for block in self.blocks]

    def landing_is_free(self, holder: int, other: int) -> int:
        return self.flag(holder, LANDING_FREE, other)

    def piece_is_there(self, holder: int, other: int, piece: int) -> int:
        return self.flag(holder, PIECE_THERE + piece, other)

    def slot(self, holder: int, hop: int, dtype: torch.dtype) -> Tensor:
        """Where `holder` gets the shard of this hop, flat."""
        begin = self.flags_bytes(len(self.blocks)) + hop % SLOTS * self.slot_bytes
        return self.blocks[holder][begin : begin + self.slot_bytes].view(dtype)

    def sums(self, holder: int, dtype: torch.dtype) -> Tensor:
        """Where `holder` gets sums for its own shard, flat."""
        begin = self.flags_bytes(len(self.blocks)) + SLOTS * self.slot_bytes
        return self.blocks[holder][begin : begin + self.sums_bytes].view(dtype)

    def landing(self, holder: int, dtype: torch.dtype) -> Tensor:
        """Where `holder` gets all that it sees, flat."""
        begin = self.flags_bytes(len(self.blocks)) + SLOTS * self.slot_bytes + self.sums_bytes
        return self.blocks[holder][begin : begin + self.landing_bytes].view(dtype)


def _aligned(size: int) -> int:
    """Up to a multiple of 256 bytes, and of a 32nd: lengths that differ from batch to batch grow it a few times only."""
    step = max(256, 1 << max(0, size.bit_length() - 5))
    return -(-size // step) * step


class SymmetricTransport(Transport):
    """Puts between all pairs of ranks; where their memory cannot be had, what `wire` does, with a warning that says why."""

    def __init__(self, wire: NeighbourTransport, reach: Reach) -> None:
        super().__init__(wire.rank, wire.ranks)
        self.wire, self.reach = wire, reach
        self._refusals: dict[torch.device, str | None] = {}
        self._workspaces: dict[torch.device, Workspace] = {}
        self._lanes: dict[tuple[torch.device, str], Lane] = {}
        self._last: dict[torch.device, Lane] = {}  # in which the last pass was
        self._steps: dict[Hashable, Steps] = {}  # of what lands; the oldest is forgotten first

    def stream(
        self,
        shard: tuple[Tensor, ...],
        needs: Needs,
        *,
        returning: int = 0,
        gradient_dtype: torch.dtype | None = None,
        early: int | None = None,
    ) -> Passage:
        if needs.hops and self.refuses(shard[0].device) is not None:
            return self.wire.stream(shard, needs, returning=returning, gradient_dtype=gradient_dtype, early=early)
        return SymmetricPassage(self, shard, needs, returning, gradient_dtype, early)

    def refuses(self, device: torch.device) -> str | None:
        """Why the ranks cannot write each other's memory, the same on all of them; asked once, together."""
        if device not in self._refusals:
            reason = self._refusals[device] = self.reach.refuses(device)
            if reason is not None:
                warnings.warn(f"Ring: transport 'symmetric' sends as 'peer' does, because {reason}", stacklevel=2)
        return self._refusals[device]

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return self.wire.all_gather(x, shapes)

    def all_gather_object(self, value: object) -> list[object]:
        return self.wire.all_gather_object(value)

    def lands(self, device: torch.device) -> bool:
        return self.refuses(device) is None

    def landed(self, shard: tuple[Tensor, ...], landing: Landing) -> Passage:
        dense = tuple(x.contiguous() for x in shard)
        device, parcel = dense[0].device, Parcel.of(slice(0, landing.most_rows), dense)
        here = self.begin(device)
        memory = self.workspace(device, landing_bytes=parcel.numel * dense[0].itemsize)
        key = (landing, parcel.shapes, dense[0].dtype, device)
        if key not in self._steps:
            self._steps[key] = Steps(landing, dense, memory, self.rank)
            if len(self._steps) > MOST_STEPS:
                del self._steps[next(iter(self._steps))]
        lanes = Lanes(here, *(self.lane(device, name) for name in ("shards", "own", "arrivals")))
        return LandedPassage(self._steps[key], dense, lanes)

    def workspace(
        self, device: torch.device, *, slot_bytes: int = 0, sums_bytes: int = 0, landing_bytes: int = 0
    ) -> Workspace:
        """Memory with room for so much, kept from call to call; all ranks ask for the same, in the same order."""
        held = self._workspaces.get(device)
        if held is not None and held.has_room(slot_bytes, sums_bytes, landing_bytes):
            return held
        if is_capturing(device):
            raise RuntimeError(
                "Ring: a CUDA graph is being captured, and transport 'symmetric' has no memory for messages of this size "
                "yet; run the same call once before capturing"
            )
        before = (0, 0, 0) if held is None else (held.slot_bytes, held.sums_bytes, held.landing_bytes)
        wanted = (slot_bytes, sums_bytes, landing_bytes)
        sizes = tuple(_aligned(max(a, b)) for a, b in zip(wanted, before, strict=True))
        # Whatever still uses the old memory, here or elsewhere, is done before it goes: it came before in the caller's lane.
        self.reach.settle(device)
        self._workspaces.pop(device, None)
        self._steps.clear()
        del held
        blocks = self.reach.memory(Workspace.total_bytes(self.ranks, *sizes), device)
        blocks[self.rank][: Workspace.flags_bytes(self.ranks)].zero_()
        self.reach.settle(device)
        self._workspaces[device] = Workspace(blocks, *sizes)
        return self._workspaces[device]

    def lane(self, device: torch.device, name: str) -> Lane:
        """A lane of this transport's own."""
        if (device, name) not in self._lanes:
            self._lanes[device, name] = self.reach.new_lane(device)
        return self._lanes[device, name]

    def begin(self, device: torch.device) -> Lane:
        """The caller's lane, after the pass before, which may have been in another one."""
        lane = self.reach.here(device)
        # While a graph is captured, what is outside of it is ordered by whoever captures and replays.
        if device in self._last and not is_capturing(device):
            lane.after(self._last[device])
        self._last[device] = lane
        return lane


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class SymmetricPassage(Passage):
    """Own shard, then the shard of rank - 1, rank - 2, ... as a ring would bring them."""

    def __init__(
        self,
        transport: SymmetricTransport,
        shard: tuple[Tensor, ...],
        needs: Needs,
        returning: int,
        gradient_dtype: torch.dtype | None,
        early: int | None,
    ) -> None:
        self._rank, self._ranks, self._needs = transport.rank, transport.ranks, needs
        self._early, self._late = early_and_late(needs.seen(self._rank, self._rank), early)
        self._shard, self._source, self._rows = shard, transport.rank, self._early
        self._returns: Returns | None = None
        self._is_idle = needs.hops == 0  # nothing moves in the whole ring
        device, dtype = shard[0].device, shard[0].dtype
        on_wire = gradient_dtype or accumulate_dtype(dtype)
        if not self._is_idle:
            slot = needs.widest * _row_bytes(shard, dtype)
            sums = needs.widest * _row_bytes(shard[:returning], on_wire)
            self._here, self._puts = transport.begin(device), transport.lane(device, "shards")
            self._memory = transport.workspace(device, slot_bytes=slot, sums_bytes=sums)
            self._dense = tuple(x.contiguous() for x in shard)
            self._puts.after(self._here)
        if returning:
            own = tuple(x.new_zeros(x.shape, dtype=accumulate_dtype(dtype)) for x in shard[:returning])
            self._returns = Returns(needs, own, self._rank, self._ranks, on_wire)
            if not self._is_idle:
                self._returns.open(self._memory, self._here, transport.lane(device, "sums"))

    def __iter__(self) -> Iterator[tuple[int, slice, tuple[Tensor, ...]]]:
        rank, needs = self._rank, self._needs
        for hop in range(1, SLOTS + 1):
            self._offer(hop)
        for hop in range(needs.hops + 1):
            self._source = (rank - hop) % self._ranks
            # The next hop starts before anything is computed on this one.
            self._put(hop + 1)
            self._rows = needs.seen(rank, self._source) if hop else self._early
            if is_any(self._rows):
                if hop > 0:
                    self._here.take(self._memory.flag(rank, FILLED, self._source), self._source)
                yield self._source, self._rows, self._parts(hop, self._rows)
            if self._returns is not None:
                self._returns.pass_on(hop)
            if hop > 0:  # own rows took no slot
                self._offer(hop + SLOTS)
        if is_any(self._late):
            self._source, self._rows = rank, self._late
            yield rank, self._late, self._parts(0, self._late)
        if not self._is_idle:
            # The caller may change its tensors, and give back their memory, when the pass is over.
            self._here.after(self._puts)

    def _parts(self, hop: int, seen: slice) -> tuple[Tensor, ...]:
        if hop == 0:
            return tuple(x[:, seen] for x in self._shard)
        message = self._memory.slot(self._rank, hop, self._shard[0].dtype)
        return Parcel.of(seen, self._shard).views(message, seen)

    def _offer(self, hop: int) -> None:
        """Tell the owner of this hop's shard that its slot is free, which it is once the hop before the last is done."""
        source = (self._rank - hop) % self._ranks
        if hop <= self._needs.hops and self._needs.seen(self._rank, source) != NOTHING:
            self._here.signal(self._memory.flag(source, FREE, self._rank))

    def _put(self, hop: int) -> None:
        """Bring the rank of this hop what it sees of the shard here."""
        viewer = (self._rank + hop) % self._ranks
        rows = self._needs.seen(viewer, self._rank)
        if hop > self._needs.hops or rows == NOTHING:
            return
        slot = self._memory.slot(viewer, hop, self._shard[0].dtype)
        self._puts.take(self._memory.flag(self._rank, FREE, viewer), viewer)
        for there, x in zip(Parcel.of(rows, self._dense).views(slot, rows), self._dense, strict=True):
            self._puts.put(there, x[:, rows])
        self._puts.signal(self._memory.flag(viewer, FILLED, self._rank))

    def gradients(self) -> tuple[Tensor, ...]:
        assert self._returns is not None, "gradients() is for a returning passage"
        return self._returns.share(self._source, self._rows)

    def collect(self) -> tuple[Tensor, ...]:
        assert self._returns is not None, "collect() is for a returning passage"
        return self._returns.home()


class Returns:
    """The gradients of a pass: those of own rows stay here, those of others' are put into their owner's memory."""

    def __init__(self, needs: Needs, own: tuple[Tensor, ...], rank: int, ranks: int, on_wire: torch.dtype) -> None:
        self._needs, self._own, self._rank, self._ranks, self._on_wire = needs, own, rank, ranks, on_wire
        self._sum: Tensor | None = None  # of the shard that is here
        self._leaving: Tensor | None = None  # what is being put, which must live until it is
        self._is_open = False

    def open(self, memory: Workspace, here: Lane, puts: Lane) -> None:
        self._memory, self._here, self._puts, self._is_open = memory, here, puts, True
        self._offer(1)

    def share(self, source: int, rows: slice) -> tuple[Tensor, ...]:
        if source == self._rank:
            return tuple(x[:, rows] for x in self._own)
        parcel = Parcel.of(rows, self._own)
        if self._sum is None:
            self._sum = self._own[0].new_zeros(parcel.numel)
        return parcel.views(self._sum, rows)

    def pass_on(self, hop: int) -> None:
        """Add what came for the hop before, and send what was computed at this one on its way."""
        if hop > 1:
            self._add(hop - 1)
            self._offer(hop)
        if self._sum is not None:
            self._put((self._rank - hop) % self._ranks, self._sum)
            self._sum = None

    def _rows_of_hop(self, hop: int) -> slice:
        """Own rows for which the rank of this hop has gradients."""
        return self._needs.seen((self._rank + hop) % self._ranks, self._rank) if hop <= self._needs.hops else NOTHING

    def _offer(self, hop: int) -> None:
        """Tell the rank of this hop that there is room for its sums: those of the hop before are added."""
        viewer = (self._rank + hop) % self._ranks
        if self._rows_of_hop(hop) != NOTHING:
            self._here.signal(self._memory.flag(viewer, FREE_FOR_SUMS, self._rank))

    def _put(self, source: int, total: Tensor) -> None:
        leaving = total.to(self._on_wire)
        if self._leaving is not None:  # what left before is gone, and its memory may be used again
            self._here.after(self._puts)
        self._leaving = leaving
        self._puts.after(self._here)
        self._puts.take(self._memory.flag(self._rank, FREE_FOR_SUMS, source), source)
        self._puts.put(self._memory.sums(source, self._on_wire)[: leaving.numel()], leaving)
        self._puts.signal(self._memory.flag(source, SUMS_FILLED, self._rank))

    def _add(self, hop: int) -> None:
        rows = self._rows_of_hop(hop)
        if hop == 0 or rows == NOTHING:
            return
        viewer = (self._rank + hop) % self._ranks
        self._here.take(self._memory.flag(self._rank, SUMS_FILLED, viewer), viewer)
        message = self._memory.sums(self._rank, self._on_wire)
        Parcel.of(rows, self._own).add(message, rows, (own[:, rows] for own in self._own))

    def home(self) -> tuple[Tensor, ...]:
        """The sums of own rows over all ranks."""
        if self._is_open:
            self._add(self._needs.hops)
            if self._leaving is not None:
                self._here.after(self._puts)
                self._leaving = None
        return self._own


def _row_bytes(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> int:
    return sum(x.shape[0] * prod(x.shape[2:]) for x in tensors) * dtype.itemsize
