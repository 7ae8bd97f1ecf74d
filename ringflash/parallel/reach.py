"""Memory of the members of a process group: CUDA's symmetric memory on GPUs, files in shared memory on CPUs."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.parallel.lanes import HostLane, Lane, Reach


class GroupReach(Reach):
    """Ranks are those inside the group. All members are on one host, and their GPUs reach each other."""

    def __init__(self, group: Callable[[], dist.ProcessGroup]) -> None:
        """group: gives it; held by nobody here, see PeerTransport."""
        self._group, self._rank, self._ranks = group, dist.get_rank(group()), dist.get_world_size(group())

    def refuses(self, device: torch.device) -> str | None:
        facts = self.everyone((socket.gethostname(), _boot(), device.index, _refusal(device)))
        refusals = [refusal for *_, refusal in facts if refusal is not None]
        if refusals:
            return str(refusals[0])
        if len({(host, boot) for host, boot, *_ in facts}) > 1:
            return "its ranks are on several hosts"
        if device.type != "cuda":
            return None
        devices = [index for _, _, index, _ in facts]
        others = set(devices) - {device.index}
        mine = (
            "two of its ranks share a GPU"
            if len(set(devices)) < len(devices)
            else "its GPUs do not reach each other's memory"
            if not all(torch.cuda.can_device_access_peer(device, other) for other in others)
            else None
        )
        reasons = [reason for reason in self.everyone(mine) if reason is not None]
        return reasons[0] if reasons else None

    def memory(self, size: int, device: torch.device) -> list[Tensor]:
        return self._symmetric(size, device) if device.type == "cuda" else self._files(size)

    def _symmetric(self, size: int, device: torch.device) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory

        mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(mine, self._group())
        return [
            mine if rank == self._rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._ranks)
        ]

    def _files(self, size: int) -> list[Tensor]:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(prefix="ringflash-", dir=folder) as file:
            try:
                # Reserved now: where there is no room, touching it would end the process.
                (os.posix_fallocate if hasattr(os, "posix_fallocate") else _lengthen)(file.fileno(), 0, size)
                lack = None
            except OSError as error:
                lack = f"rank {self._rank} has no room for {size} bytes in {folder or tempfile.gettempdir()}: {error}"
            names = self.everyone((file.name, lack))
            if lacks := [lack for _, lack in names if lack is not None]:
                raise RuntimeError(f"Ring: transport 'symmetric' shares memory among ranks, and {lacks[0]}")
            names = [name for name, _ in names]
            blocks = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
            # Memory stays when its name goes, but others must have found it by then.
            self.everyone(None)
        return blocks

    def host_lane(self) -> Lane:
        timeout = self._group()._get_backend(torch.device("cpu")).options._timeout
        return HostLane(self._rank, timeout.total_seconds(), lambda: False)

    def everyone(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value, group=self._group())
        return values


def _lengthen(file: int, offset: int, size: int) -> None:
    os.ftruncate(file, offset + size)


def _boot() -> str:
    """Tells hosts of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _refusal(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"it knows no memory of {device.type} devices"
    try:
        import torch.distributed._symmetric_memory
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    return None
