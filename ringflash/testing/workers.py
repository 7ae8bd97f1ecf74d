"""Persistent worker processes with a gloo (or NCCL) group, for tests: a hang is a failure that names the ranks.

with Workers(4) as workers:
results = workers.run(function, *arguments)      # function(*arguments) in every worker, results by rank
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ringflash.testing.poison import poisoned

# Shorter than a test's patience, so that gloo's own message about a lost peer is seen first.
GROUP_TIMEOUT_S = 25.0


class WorkerError(AssertionError):
    """A worker raised, died or hung; the text says which and shows its traceback."""


@dataclass
class _Worker:
    process: Any
    pipe: Connection


class Workers:
    """`size` processes in one process group on this machine, started once and used for many calls.

    backend: "gloo", or "nccl" with a GPU per worker.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        if self._workers:
            return
        # A rendezvous file, no port: nothing to collide with another test run. Forked from a server that has imported
        # torch, workers start in a moment; CUDA wants fresh processes.
        store = Path(tempfile.mkdtemp(prefix="ringflash-workers-")) / "store"
        context: Any = multiprocessing.get_context("spawn" if self.backend == "nccl" else "forkserver")
        if self.backend != "nccl":
            context.set_forkserver_preload(["torch", "torch.distributed", "ringflash.testing.sharded"])
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.size, self.backend, str(store)), daemon=True
            )
            process.start()
            there.close()
            self._workers.append(_Worker(process, here))

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0, ranks: int | None = None
    ) -> list[Any]:
        """Call a module-level function in the first `ranks` workers (None: all); raise WorkerError if any fails or hangs.

        After a failure the processes are replaced, because a group with a lost member is of no use.
        """
        self.start()
        active = self._workers[:ranks]
        for worker in active:
            worker.pipe.send((function, arguments))
        results, failures = _collect(active, timeout_s)
        if failures:
            self.stop()
            raise WorkerError("\n\n".join(failures.values()))
        return [results[rank] for rank in range(len(active))]

    def stop(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(0.5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []


def _collect(active: list[_Worker], timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and failures by rank, once every rank has one or the other."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while missing := {rank: w.pipe for rank, w in enumerate(active) if rank not in results and rank not in failures}:
        patience = deadline - time.monotonic()
        # Once one has failed, the others only get the time that their group needs to notice.
        ready = wait(list(missing.values()), timeout=max(min(patience, 5.0) if failures else patience, 0.0))
        if not ready:
            reason = "after another rank failed" if failures else f"in {timeout_s:.0f} s: hangs"
            failures |= {rank: f"rank {rank}: no answer {reason}" for rank in missing}
        for rank in (rank for rank, pipe in missing.items() if pipe in ready):
            is_result, value = _receive(active[rank])
            if is_result:
                results[rank] = value
            else:
                failures[rank] = f"rank {rank}: {value}"
    return results, failures


def _receive(worker: _Worker) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join(1.0)  # the pipe closes a moment before the exit code is known
        return False, f"died with exit code {worker.process.exitcode}"
    return answer


def _serve(pipe: Connection, rank: int, size: int, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the test run is over
            return
        try:
            with poisoned():
                result = function(*arguments)
            pipe.send((True, result))
        except BaseException:  # reported to the test, whatever it is
            pipe.send((False, traceback.format_exc()))
