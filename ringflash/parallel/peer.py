"""Ring of send and receive on a torch.distributed process group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.parallel.lanes import Reach
from ringflash.parallel.passage import InFlight, Message, NeighbourTransport
from ringflash.parallel.reach import GroupReach


class PeerInFlight(InFlight):
    def __init__(self, rank: int, works: list[dist.Work], sends: list[Message], receives: list[Message]) -> None:
        self._rank, self._works, self._sends, self._receives = rank, works, sends, receives

    def wait(self) -> None:
        since = time.monotonic()
        try:
            # On NCCL this makes the current stream wait, not the host.
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            sources, takers = (sorted({peer for _, peer in messages}) for messages in (self._receives, self._sends))
            raise RuntimeError(
                f"Ring: rank {self._rank} waited {time.monotonic() - since:.0f} s for messages from ranks {sources} and to "
                f"ranks {takers}. One of them is gone, or computes for longer between two hops than the process group's "
                "timeout: balance the layout, or give the group a longer timeout"
            ) from error


class PeerTransport(NeighbourTransport):
    """Messages between the members of `group`. Ranks are those inside the group, which global ranks may differ from.

    Creates no process group: the group is the caller's, and is used on the caller's current stream order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        # torch holds it until destroy_process_group. Who holds it for longer has its threads run into the end of the
        # process, where one that drops a tensor aborts it: one exit of five, after a gather on gloo.
        self._group = weakref.ref(group)
        if self.rank < 0:
            raise ValueError(
                f"Ring: global rank {dist.get_rank()} is not in the group {dist.get_process_group_ranks(group)}"
            )

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("Ring: its process group was destroyed; make a new Ring, of a group that is there")
        return group

    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x, source in receives]
        return PeerInFlight(self.rank, dist.batch_isend_irecv(ops) if ops else [], sends, receives)

    def reach(self) -> Reach:
        return GroupReach(lambda: self.group)

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        # As bytes, because not every backend takes every type; padded to the longest, because it wants equal lengths.
        longest = max(prod(shape) for shape in shapes) * x.itemsize
        mine = x.new_zeros(longest, dtype=torch.uint8)
        mine[: x.numel() * x.itemsize] = x.contiguous().flatten().view(torch.uint8)
        everyone = [torch.empty_like(mine) for _ in shapes]
        if longest:
            dist.all_gather(everyone, mine, group=self.group)
        return [
            message[: prod(shape) * x.itemsize].view(x.dtype).view(shape)
            for message, shape in zip(everyone, shapes, strict=True)
        ]

    def all_gather_object(self, value: object) -> list[object]:
        everyone: list[object] = [None] * self.ranks
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone
