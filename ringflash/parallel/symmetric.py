"""Symmetric memory: every rank writes what another one needs straight into memory of that rank.

The owner of a shard puts the rows that a rank sees into a slot there, from its own tensors, at the hop at which a ring would
bring them: no rank passes on for others, and what nobody sees does not move. Sums of gradients go back alike, and the owner
adds them up in the order of hops. On GPUs copy engines move everything and streams wait for each other (see `lanes`).

Between two ranks each message takes two signals: the receiver says that its slot is free, then the sender that it is filled.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from math import prod

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.landed import LandedPassage, Lanes
from ringflash.parallel.lanes import Lane, Reach
from ringflash.parallel.memory import FILLED, FREE, ROOM_FOR_SUMS, SLOTS, SUMS_FILLED, Workspace, aligned
from ringflash.parallel.passage import NeighbourTransport, OverNeighbours
from ringflash.parallel.steps import Steps
from ringflash.parallel.transport import NO_RETURN, Parcel, Passage, Returning, early_and_late, is_any, rounded
from ringflash.schedule.landing import Landing
from ringflash.schedule.needs import NOTHING, Needs

MOST_STEPS = 32  # kept: as many as there are plans


class SymmetricTransport(OverNeighbours):
    """Puts between all pairs of ranks; where their memory cannot be had, what `wire` does, with a warning that says why."""

    def __init__(self, wire: NeighbourTransport, reach: Reach) -> None:
        super().__init__(wire)
        self.reach = reach
        self._refusals: dict[torch.device, str | None] = {}
        self._workspaces: dict[torch.device, Workspace] = {}
        self._lanes: dict[tuple[torch.device, str], Lane] = {}
        self._last: dict[torch.device, Lane] = {}  # in which the last pass was
        self.is_under_way = False  # between the first and the last step of a pass; left so by an error
        self._steps: dict[
            Hashable, Steps
        ] = {}  # of what lands, in the memory that there is; the oldest is forgotten first
        self._captured: dict[int, Workspace | Steps] = {}  # what CUDA graphs have the addresses of

    def stream(self, shard: tuple[Tensor, ...], needs: Needs, returning: Returning = NO_RETURN) -> Passage:
        if not needs.hops or self.refuses(shard[0].device) is not None:
            return self.wire.stream(shard, needs, returning)
        return SymmetricPassage(self, shard, needs, returning)

    def refuses(self, device: torch.device) -> str | None:
        """Why the ranks cannot write each other's memory, the same on all of them; asked once, together."""
        if device not in self._refusals:
            reason = self._refusals[device] = self.reach.refuses(device)
            if reason is not None:
                warnings.warn(f"Ring: transport 'symmetric' sends as 'peer' does, because {reason}", stacklevel=2)
        return self._refusals[device]

    def lands(self, device: torch.device) -> bool:
        return self.refuses(device) is None

    def landed(self, shard: tuple[Tensor, ...], landing: Landing, returning: Returning = NO_RETURN) -> Passage:
        dense = tuple(x if x.dim() == 3 else x.contiguous() for x in shard)
        device = dense[0].device
        here = self.begin(device)
        key = (landing, returning.tensors, returning.heads, device, *((x.shape, x.dtype) for x in dense))
        steps = self._steps.get(key)
        if steps is None:
            steps = self._find_steps(key, landing, dense, returning)
        self._keep_for_graph(device, steps)
        out = self.lane(device, "shards"), self.lane(device, "more shards")
        return LandedPassage(self, steps, dense, Lanes(here, out, self.lane(device, "arrivals")))

    def _find_steps(self, key: Hashable, landing: Landing, shard: tuple[Tensor, ...], returning: Returning) -> Steps:
        device = shard[0].device
        memory = self.workspace(
            device,
            landing_bytes=Steps.landing_bytes(landing, shard),
            sums_bytes=Steps.sums_bytes(landing, shard, returning.tensors),
        )
        self._check_not_capturing(device)
        with torch.inference_mode(False):
            steps = self._steps[key] = Steps(landing, shard, memory, self.rank, returning.tensors, returning.heads)
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return steps

    def workspace(
        self, device: torch.device, *, slot_bytes: int = 0, sums_bytes: int = 0, landing_bytes: int = 0
    ) -> Workspace:
        """Memory with room for so much, kept from call to call; all ranks ask for the same, in the same order."""
        held = self._workspaces.get(device)
        if held is not None and held.has_room(slot_bytes, sums_bytes, landing_bytes):
            self._keep_for_graph(device, held)
            return held
        self._check_not_capturing(device)
        before = (0, 0, 0) if held is None else (held.slot_bytes, held.sums_bytes, held.landing_bytes)
        wanted = (slot_bytes, sums_bytes, landing_bytes)
        sizes = tuple(aligned(max(a, b)) for a, b in zip(wanted, before, strict=True))
        # Whatever still uses the old memory, here or elsewhere, is done before it goes: it came before in the caller's lane.
        self.reach.settle(device)
        self._workspaces.pop(device, None)
        self._steps.clear()
        del held
        # A first call may be one of inference, whose tensors no other call may write to.
        with torch.inference_mode(False):
            blocks = self.reach.memory(Workspace.total_bytes(self.ranks, *sizes), device)
            blocks[self.rank][: Workspace.flags_bytes(self.ranks)].zero_()
        self.reach.settle(device)
        self._workspaces[device] = Workspace(blocks, *sizes)
        return self._workspaces[device]

    def _check_not_capturing(self, device: torch.device) -> None:
        if is_capturing(device):
            raise RuntimeError(
                "Ring: a CUDA graph is being captured, and transport 'symmetric' has no memory for messages of this size "
                "yet; run the same call once before capturing"
            )

    def _keep_for_graph(self, device: torch.device, what: Workspace | Steps) -> None:
        """A graph that is being captured may be replayed as long as this transport lives."""
        if is_capturing(device):
            self._captured[id(what)] = what

    def lane(self, device: torch.device, name: str) -> Lane:
        """A lane of this transport's own."""
        if (device, name) not in self._lanes:
            self._lanes[device, name] = self.reach.new_lane(device)
        return self._lanes[device, name]

    def begin(self, device: torch.device) -> Lane:
        """Before a pass: the caller's lane, after the pass before, which may have been in another one."""
        if self.is_under_way:
            raise RuntimeError(
                "Ring: a call before this one ended in an error in the middle of its messages, which the ranks no longer "
                "agree on. Make a new Ring, on every rank"
            )
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
        returning: Returning,
    ) -> None:
        self._transport, self._rank, self._ranks, self._needs = transport, transport.rank, transport.ranks, needs
        self._early, self._late = early_and_late(needs.seen(self._rank, self._rank), returning.early)
        self._shard, self._source, self._rows = shard, transport.rank, self._early
        device, dtype = shard[0].device, shard[0].dtype
        on_wire = returning.dtype or accumulate_dtype(dtype)
        self._here, self._out = transport.begin(device), transport.lane(device, "shards")
        self._memory = transport.workspace(
            device,
            slot_bytes=needs.widest * _row_bytes(shard, dtype),
            sums_bytes=needs.widest * _row_bytes(shard[: returning.tensors], on_wire),
        )
        self._dense = tuple(x.contiguous() for x in shard)
        self._out.after(self._here)
        self._returns: Returns | None = None
        if returning.tensors:
            own = tuple(x.new_zeros(x.shape, dtype=accumulate_dtype(dtype)) for x in shard[: returning.tensors])
            lanes = self._here, transport.lane(device, "sums")
            self._returns = Returns(needs, own, self._memory, lanes, self._rank, on_wire)

    def __iter__(self) -> Iterator[tuple[int, slice, tuple[Tensor, ...]]]:
        rank, needs = self._rank, self._needs
        self._transport.is_under_way = True
        for hop in range(1, SLOTS + 1):
            self._say_slot_is_free(hop)
        if self._returns is not None:
            self._returns.say_there_is_room(1)
        for hop in range(needs.hops + 1):
            self._source = (rank - hop) % self._ranks
            # The next hop starts before anything is computed on this one.
            self._send(hop + 1)
            self._rows = needs.seen(rank, self._source) if hop else self._early
            if is_any(self._rows):
                if hop > 0:
                    self._here.take(self._memory.flag(FILLED, writer=self._source, reader=rank), self._source)
                yield self._source, self._rows, self._parts(hop, self._rows)
            if self._returns is not None and hop > 0:
                self._returns.pass_on(hop)
            if hop > 0:  # own rows took no slot
                self._say_slot_is_free(hop + SLOTS)
        if is_any(self._late):
            self._source, self._rows = rank, self._late
            yield rank, self._late, self._parts(0, self._late)
        # The caller may change its tensors, and give back their memory, when the pass is over.
        self._here.after(self._out)
        if self._returns is None:
            self._transport.is_under_way = False

    def _parts(self, hop: int, seen: slice) -> tuple[Tensor, ...]:
        if hop == 0:
            return tuple(x[:, seen] for x in self._shard)
        message = self._memory.slot(self._rank, hop, self._shard[0].dtype)
        return Parcel.of(seen, self._shard).views(message, seen)

    def _say_slot_is_free(self, hop: int) -> None:
        """Tell the owner of this hop's shard that it may send, which is when the hop before the last is done."""
        source = (self._rank - hop) % self._ranks
        if hop <= self._needs.hops and self._needs.seen(self._rank, source) != NOTHING:
            self._here.signal(self._memory.flag(FREE, writer=self._rank, reader=source))

    def _send(self, hop: int) -> None:
        """Bring the rank of this hop what it sees of the shard here."""
        viewer = (self._rank + hop) % self._ranks
        rows = self._needs.seen(viewer, self._rank)
        if hop > self._needs.hops or rows == NOTHING:
            return
        slot = self._memory.slot(viewer, hop, self._shard[0].dtype)
        self._out.take(self._memory.flag(FREE, writer=viewer, reader=self._rank), viewer)
        for there, x in zip(Parcel.of(rows, self._dense).views(slot, rows), self._dense, strict=True):
            self._out.put(there, x[:, rows])
        self._out.signal(self._memory.flag(FILLED, writer=self._rank, reader=viewer))

    def gradients(self) -> tuple[Tensor, ...]:
        assert self._returns is not None, "gradients() is for a returning passage"
        return self._returns.share(self._source, self._rows)

    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        assert self._returns is not None, "collect() is for a returning passage"
        home = self._returns.home()
        self._transport.is_under_way = False
        return rounded(home, dtype)


class Returns:
    """The gradients of a pass: those of own rows stay here, those of others' are put into their owner's memory."""

    def __init__(
        self,
        needs: Needs,
        own: tuple[Tensor, ...],
        memory: Workspace,
        lanes: tuple[Lane, Lane],
        rank: int,
        on_wire: torch.dtype,
    ) -> None:
        """lanes: in which gradients are computed, and in which they leave."""
        self._needs, self._own, self._memory, self._rank, self._on_wire = needs, own, memory, rank, on_wire
        self._here, self._out = lanes
        self._sum: Tensor | None = None  # of the shard that is here
        self._leaving: Tensor | None = None  # what is being put, which must live until it is

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
            self.say_there_is_room(hop)
        if self._sum is not None:
            self._send_home((self._rank - hop) % self._needs.ranks, self._sum)
            self._sum = None

    def say_there_is_room(self, hop: int) -> None:
        """Tell the rank of this hop that it may send its sums: those of the hop before are added."""
        viewer = self._viewer(hop)
        if self._rows_of(hop) != NOTHING:
            self._here.signal(self._memory.flag(ROOM_FOR_SUMS, writer=self._rank, reader=viewer))

    def _viewer(self, hop: int) -> int:
        return (self._rank + hop) % self._needs.ranks

    def _rows_of(self, hop: int) -> slice:
        """Own rows for which the rank of this hop has gradients."""
        return self._needs.seen(self._viewer(hop), self._rank) if 0 < hop <= self._needs.hops else NOTHING

    def _send_home(self, source: int, total: Tensor) -> None:
        leaving = total.to(self._on_wire)
        if self._leaving is not None:  # what left before is gone, and its memory may be used again
            self._here.after(self._out)
        self._leaving = leaving
        self._out.after(self._here)
        self._out.take(self._memory.flag(ROOM_FOR_SUMS, writer=source, reader=self._rank), source)
        self._out.put(self._memory.sums(source, self._on_wire)[: leaving.numel()], leaving)
        self._out.signal(self._memory.flag(SUMS_FILLED, writer=self._rank, reader=source))

    def _add(self, hop: int) -> None:
        rows, viewer = self._rows_of(hop), self._viewer(hop)
        if rows == NOTHING:
            return
        self._here.take(self._memory.flag(SUMS_FILLED, writer=viewer, reader=self._rank), viewer)
        message = self._memory.sums(self._rank, self._on_wire)
        Parcel.of(rows, self._own).add(message, rows, (own[:, rows] for own in self._own))

    def home(self) -> tuple[Tensor, ...]:
        """The sums of own rows over all ranks."""
        self._add(self._needs.hops)
        if self._leaving is not None:
            self._here.after(self._out)
            self._leaving = None
        return self._own


def _row_bytes(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> int:
    return sum(x.shape[0] * prod(x.shape[2:]) for x in tensors) * dtype.itemsize
