"""Every rank in one process, a thread each: for tests, teaching and debugging; and the ring of one.

    def step(member):
        ring = Ring(transport=member)
        ...
    results = run(4, step)

On CPU tensors everything works, backward included. On CUDA tensors use one rank per process: the autograd engine has one
worker thread per device, which a waiting rank would block for the others.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringflash.parallel.lanes import HostLane, Lane, Reach
from ringflash.parallel.passage import InFlight, Message, NeighbourTransport

T = TypeVar("T")
# A rank that waits longer than this for another one in the same process has lost it.
PATIENCE_S = 60.0


class Alone(NeighbourTransport):
    """The ring of one rank: nothing is ever exchanged."""

    def __init__(self) -> None:
        super().__init__(rank=0, ranks=1)

    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        raise AssertionError("a ring of one rank has no neighbour")

    def reach(self) -> Reach:
        raise AssertionError("a ring of one rank has no neighbour")

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [x]

    def all_gather_object(self, value: object) -> list[object]:
        return [value]


class Mailboxes:
    """One queue per (sender, receiver), shared by the members of an in-process group."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()
        self.failed = threading.Event()

    def _box(self, sender: int, receiver: int) -> queue.Queue[Any]:
        with self._lock:
            return self._boxes[sender, receiver]

    def put(self, sender: int, receiver: int, message: object) -> None:
        self._box(sender, receiver).put(message)

    def take(self, sender: int, receiver: int) -> Any:
        for _ in range(int(PATIENCE_S * 10)):
            try:
                return self._box(sender, receiver).get(timeout=0.1)
            except queue.Empty:
                if self.failed.is_set():
                    raise RuntimeError(f"in-process rank {receiver}: stopped, because another rank failed") from None
        raise RuntimeError(f"in-process rank {receiver}: no message from rank {sender} within {PATIENCE_S:.0f} s")


class MailInFlight(InFlight):
    def __init__(self, mail: Mailboxes, rank: int, receives: list[Message]) -> None:
        self._mail, self._rank, self._receives = mail, rank, receives

    def wait(self) -> None:
        for buffer, source in self._receives:
            buffer.copy_(self._mail.take(source, self._rank))
        self._receives = []


class Member(NeighbourTransport):
    """One rank of an in-process group; `run` makes them."""

    def __init__(self, mail: Mailboxes, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._mail = mail

    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        for message, to in sends:
            self._mail.put(self.rank, to, message.clone())
        return MailInFlight(self._mail, self.rank, receives)

    def reach(self) -> Reach:
        return MemberReach(self, self._mail.failed)

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return self._everyone(x.clone())

    def all_gather_object(self, value: object) -> list[object]:
        return self._everyone(value)

    def _everyone(self, value: Any) -> list[Any]:
        for rank in range(self.ranks):
            self._mail.put(self.rank, rank, value)
        return [self._mail.take(rank, self.rank) for rank in range(self.ranks)]


class MemberReach(Reach):
    """One process, one memory. On a GPU the ranks are streams of it, for tests of what happens in their order."""

    def __init__(self, member: Member, failed: threading.Event) -> None:
        self._member, self._failed = member, failed

    def refuses(self, device: torch.device) -> str | None:
        return None

    def memory(self, size: int, device: torch.device) -> list[Tensor]:
        return self.everyone(torch.empty(size, dtype=torch.uint8, device=device))

    def everyone(self, value: object) -> list[Any]:
        return self._member.all_gather_object(value)

    def host_lane(self) -> Lane:
        return HostLane(self._member.rank, PATIENCE_S, self._failed.is_set)


def run(ranks: int, function: Callable[[Member], T]) -> list[T]:
    """Call `function(member)` for every rank at once, a thread each; results by rank.

    The first error of any rank is raised, and the others are told to stop.
    """
    mail = Mailboxes()
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(Member(mail, rank, ranks))
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)
            mail.failed.set()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
