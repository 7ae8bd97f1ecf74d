"""Ring of send and receive on a torch.distributed process group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.parallel.passage import InFlight, Message, NeighbourTransport


class PeerInFlight(InFlight):
    def __init__(self, works: list[dist.Work], messages: list[Message]) -> None:
        self._works, self._messages = works, messages

    def wait(self) -> None:
        # On NCCL this makes the current stream wait, not the host.
        for work in self._works:
            work.wait()


class PeerTransport(NeighbourTransport):
    """Messages between the members of `group`. Ranks are those inside the group, which global ranks may differ from.

    Creates no process group: the group is the caller's, and is used on the caller's current stream order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        if self.rank < 0:
            raise ValueError(
                f"Ring: global rank {dist.get_rank()} is not in the group {dist.get_process_group_ranks(group)}"
            )

    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x, source in receives]
        return PeerInFlight(dist.batch_isend_irecv(ops) if ops else [], sends + receives)

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
