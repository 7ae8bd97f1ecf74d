"""The contract of a transport: stream shards past, take gradients back, and collect whole sequences.

A transport knows ranks and tensors; it knows nothing of attention. `rank` counts inside the ring's group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Shapes:
    """How a shard's tensors lie in one flat message. Shard lengths may differ, so sizes follow the source."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def views(self, message: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside `message`, which may be longer."""
        parts, start = [], 0
        for shape in self.shapes:
            parts.append(message[start : start + prod(shape)].view(shape))
            start += prod(shape)
        return tuple(parts)


# The shapes of a source's (k, v): all ranks know them by construction.
ShapesOf = Callable[[int], Shapes]


class Passage(ABC):
    """One pass of shards around the ring: iterate it; in backward add into `gradients` meanwhile, then `collect`."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (source, tensors), own shard first. Tensors stay valid until the next one is asked for."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor, ...]:
        """What travels with the shard just yielded: tensors of its shapes, in the accumulate type, to add into."""

    @abstractmethod
    def collect(self) -> tuple[Tensor, ...]:
        """After the iteration: the sum over ranks of the gradients of this rank's own shard."""


class Transport(ABC):
    """One wire between the ranks of a ring."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.agreed: dict[object, None] = {}  # calls whose shapes all ranks have compared; see Ring.agree

    @abstractmethod
    def stream(self, shard: tuple[Tensor, ...], shapes_of: ShapesOf, hops: int, *, returning: bool = False) -> Passage:
        """Send own shard around for `hops` hops and receive the others', the next always on its way during compute.

        shard: this rank's tensors, one dtype, of the shapes `shapes_of(rank)`.
        hops: the same on every rank.
        returning: gradients travel with the shards and come home, in their accumulate type.
        """

    @abstractmethod
    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's tensor; `shapes[rank]` is known on all ranks. Not differentiable."""

    @abstractmethod
    def all_gather_object(self, value: object) -> list[object]:
        """Every rank's small Python value; for set-up checks, never in the hot path."""
