"""A pass around the ring of neighbours, whatever carries a message: `peer` and `inprocess` only differ in `exchange`.

Each hop sends to rank + 1 and receives from rank - 1, so a shard visits the ranks after its owner in order, and so does
the sum of its gradients: the order of additions is fixed by rank, not by arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.transport import Passage, Shapes, ShapesOf, Transport


class InFlight(ABC):
    """A message on its way: owns what is sent and the buffer received into until `wait` hands the latter over."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The received message; what was sent may be overwritten from now on."""


class NeighbourTransport(Transport):
    """A transport made of one operation: exchange a message with two other ranks."""

    @abstractmethod
    def exchange(self, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Start sending `send` to rank `to` and receiving into `receive` from rank `source`; both flat, maybe empty."""

    def stream(self, shard: tuple[Tensor, ...], shapes_of: ShapesOf, hops: int, *, returning: bool = False) -> Passage:
        return NeighbourPassage(self, shard, shapes_of, hops, returning)


class NeighbourPassage(Passage):
    """Own shard, then the shard of rank - 1, rank - 2, ..., `hops` of them."""

    def __init__(
        self, wire: NeighbourTransport, shard: tuple[Tensor, ...], shapes_of: ShapesOf, hops: int, returning: bool
    ) -> None:
        self._wire, self._shard, self._returning, self._hops = wire, shard, returning, hops
        self._shapes = [shapes_of(self._source(hop)) for hop in range(hops + 1)]
        self._hop = 0
        self._share: Tensor | None = None  # own share of the gradients of the shard now yielded
        self._sum: InFlight | None = None  # the sum of the ranks before this one for that shard
        self._home: Tensor | None = None

    def _source(self, hop: int) -> int:
        return (self._wire.rank - hop) % self._wire.ranks

    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        held, spare = self._message_buffers()
        for hop in range(self._hops + 1):
            self._hop = hop
            coming = self._pass_on(held, spare)
            yield self._source(hop), self._shard if hop == 0 else self._shapes[hop].views(held)
            if self._returning:
                self._pass_on_gradients()
            if coming is not None:
                coming.wait()
                held, spare = spare, held

    def _message_buffers(self) -> tuple[Tensor, Tensor]:
        """Own shard as one message, and a spare. They take turns: a hop receives over what the last one sent.

        Both hold the longest shard, for lengths may differ. Without hops nothing is copied.
        """
        first = self._shard[0]
        if self._hops == 0:
            return first, first
        longest = max(shapes.numel for shapes in self._shapes)
        held, spare = first.new_empty(longest), first.new_empty(longest)
        for view, tensor in zip(self._shapes[0].views(held), self._shard, strict=True):
            view.copy_(tensor)
        return held, spare

    def _pass_on(self, held: Tensor, spare: Tensor) -> InFlight | None:
        """Start the next hop before anything is computed on this one."""
        if self._hop == self._hops:
            return None
        have, want = self._shapes[self._hop], self._shapes[self._hop + 1]
        return self._exchange(held, have, 1, spare, want)

    def _exchange(self, send: Tensor, have: Shapes, distance: int, receive: Tensor, want: Shapes) -> InFlight:
        rank, ranks = self._wire.rank, self._wire.ranks
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        return self._wire.exchange(send[: have.numel], to, receive[: want.numel], source)

    def _pass_on_gradients(self) -> None:
        """Add own share to the sum that followed the shard here, and send it on; after the last hop, home."""
        self.gradients()
        total, self._share = self._share, None
        assert total is not None
        if self._sum is not None:
            total += self._sum.wait()
        if self._hops == 0:
            self._home = total
            return
        last = self._hop == self._hops
        # The sum arriving now belongs to the next hop's shard; at the end it is that of own keys.
        want = self._shapes[0 if last else self._hop + 1]
        distance = -self._hops if last else 1
        self._sum = self._exchange(total, self._shapes[self._hop], distance, total.new_empty(want.numel), want)
        if last:
            self._home = self._sum.wait()

    def gradients(self) -> tuple[Tensor, ...]:
        shapes = self._shapes[self._hop]
        if self._share is None:
            like = self._shard[0]
            self._share = like.new_zeros(shapes.numel, dtype=accumulate_dtype(like.dtype))
        return shapes.views(self._share)

    def collect(self) -> tuple[Tensor, ...]:
        assert self._home is not None, "collect() comes after the iteration, of a returning passage"
        return self._shapes[0].views(self._home)
