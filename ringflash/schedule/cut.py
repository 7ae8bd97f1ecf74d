"""Cut: one sequence cut among the ranks, and where any position falls on any of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ringflash.schedule.copies import Copies, moved, on_cpu


@dataclass(frozen=True, eq=False)
class Cut:
    """A sequence of `length` tokens as blocks; block i begins at start[i] and is held by rank owner[i].

    start: int32 [R], increasing, from 0. A block ends where the next one starts.
    owner: int64 [R].
    is_striped: instead, block i is start[i], start[i] + ranks, start[i] + 2 ranks, ...
    Blocks are few where tokens are many: what is asked of a cut costs by the block or by the question, not by the token.
    """

    start: Tensor
    owner: Tensor
    length: int
    ranks: int
    is_striped: bool = False
    _held: Tensor | None = None
    _copies: Copies = field(default_factory=Copies)

    @property
    def step(self) -> int:
        """From one token of a block to the next."""
        return self.ranks if self.is_striped else 1

    @cached_property
    def count(self) -> Tensor:
        """Tokens of each block, int32 [R]."""
        if self.is_striped:
            return (self.length - self.start + self.ranks - 1).div(self.ranks, rounding_mode="floor")
        return torch.diff(self.start, append=self.start.new_full((1,), self.length))

    @cached_property
    def last(self) -> Tensor:
        """Last token of each block."""
        return self.start + (self.count - 1) * self.step

    @cached_property
    def held(self) -> Tensor:
        """Tokens that each rank holds in the blocks before each one, int32 [P, R + 1]; the last column is its shard."""
        if self._held is not None:
            return self._held
        counts = one_hot(self.owner, self.ranks).T.int() * self.count
        return pad(counts.cumsum(1, dtype=torch.int32), (1, 0))

    @cached_property
    def shard_lengths(self) -> list[int]:
        return self.held[:, -1].tolist()

    @on_cpu
    def positions(self, rank: int) -> Tensor:
        """Global positions that `rank` holds, int64, increasing."""
        mine = self.owner == rank
        start, count = self.start[mine].long(), self.count[mine].long()
        first = (start - (count.cumsum(0) - count) * self.step).repeat_interleave(count)
        return first + torch.arange(first.shape[0]) * self.step

    def below(self, x: Tensor, ranks: Tensor) -> Tensor:
        """How many tokens of each of `ranks` stand below each position of x: their local indices of x.

        x: int32 [...] in [0, length]; ranks: int64 [K]. Returns int32 [K, ...], where x is.
        """
        if not self.start.shape[0]:
            return x.new_zeros(ranks.shape[0], *x.shape)
        each = ranks.view(-1, *[1] * x.dim())
        if self.is_striped:
            return (x - each.int() + self.ranks - 1).div(self.ranks, rounding_mode="floor").clamp_min_(0)
        block = torch.searchsorted(self.start, x, right=True, out_int32=True) - 1
        counts = self.held[ranks][:, block]
        inside = x - self.start[block]
        return counts.add_(torch.where(self.owner[block] == each, inside, 0))

    def to(self, device: torch.device) -> Cut:
        """The same cut on a device: every batch that is cut alike shares it."""
        return self._copies.get("cut", device, lambda: self._moved(device))

    def _moved(self, device: torch.device) -> Cut:
        start, owner, held = moved(device, self.start, self.owner.int(), self.held)
        return replace(self, start=start, owner=owner, _held=held, _copies=Copies())
