"""The processes of a run: who we are, which device is ours, and how to talk about numbers that live on the host."""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Result = TypeVar("Result")

# Long enough for rank 0 to train the whole run again alone, while the others wait at a collective.
PATIENCE = timedelta(days=2)


@dataclass(frozen=True)
class Processes:
    """One process per device. mesh: all of them, in one dimension; None when there is one and torchrun was not used.

    The ring cuts the sequence over the mesh and FSDP cuts the weights over the same mesh: sequence parallelism is data
    parallelism to FSDP, every rank has its own tokens and needs all the weights.
    """

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh | None = None
    host_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather_floats(self, *values: float) -> list[list[float]]:
        """Every rank's values, in rank order, on every rank: [ranks][len(values)].

        Over gloo, also beside NCCL: a collective on host numbers should neither need nor wait for a GPU.
        """
        if self.host_group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine, group=self.host_group)
        return [values.tolist() for values in everyone]

    def from_first(self, value: Result) -> Result:
        """Rank 0's value on every rank. Waits as long as PATIENCE for it: NCCL would give up after ten minutes."""
        if self.host_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group, device=torch.device("cpu"))
        return box[0]

    def first_alone(self, work: Callable[["Processes"], Result]) -> Result:
        """Rank 0 does `work` with all cores of its machine, the others wait; every rank gets the result."""
        result: Any = None
        if self.is_first:
            threads = torch.get_num_threads()
            share_cores(1)
            result = work(Processes(rank=0, ranks=1, device=self.device))
            torch.set_num_threads(threads)
        return self.from_first(result)


def start(device_name: str | None) -> Processes:
    """Join the process group that torchrun describes in the environment; without torchrun, be the only process.

    device_name: "cuda", "cpu", or None for a GPU if there is one.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    gpus = torch.cuda.device_count()
    device_name = device_name or ("cuda" if gpus else "cpu")
    if device_name == "cuda":
        if local_ranks > gpus:
            raise ValueError(
                f"--device cuda: {local_ranks} processes but {gpus} GPUs on this machine; "
                "start torchrun with fewer --nproc-per-node, or pass --device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    share_cores(local_ranks)

    if "RANK" not in os.environ:
        return Processes(rank=0, ranks=1, device=device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(
        rank=rank,
        ranks=ranks,
        device=device,
        mesh=init_device_mesh(device.type, (ranks,), mesh_dim_names=("ring",)),
        host_group=dist.new_group(backend="gloo", timeout=PATIENCE),
    )


def stop() -> None:
    """Leave the process group, if there is one; NCCL complains about processes that just vanish."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share_cores(processes: int) -> None:
    """Divide this machine's cores among its processes: more threads than cores would take turns, and wait."""
    # sched_getaffinity respects taskset and containers, but exists on Linux only.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // processes))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the GPU's allocator, or of the whole process (Python, torch and the text included)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
