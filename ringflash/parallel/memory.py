"""The memory that ranks share: one block of each, alike, in which others set flags and put rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringflash.schedule.landing import CELLS, MOST_BLOCKS

# What a flag says of a message from one rank to another; the last ones, of each piece of what lands.
FREE, FILLED, ROOM_FOR_SUMS, SUMS_FILLED, ROOM_TO_LAND, PIECE_THERE = range(6)
LANES_OUT = 2  # on which the tensors of a shard go to another rank
MOST_PIECES = LANES_OUT * (CELLS + MOST_BLOCKS)  # of one rank on another
SLOTS = 2  # one is computed with while the next is filled


@dataclass(frozen=True, eq=False)
class Workspace:
    """The same piece of memory of every rank, by rank: flags, slots for shards, and room for sums and for what lands."""

    blocks: list[Tensor]
    slot_bytes: int
    sums_bytes: int
    landing_bytes: int

    @staticmethod
    def flags_bytes(ranks: int) -> int:
        return aligned(4 * (PIECE_THERE + MOST_PIECES) * ranks)

    @classmethod
    def total_bytes(cls, ranks: int, slot_bytes: int, sums_bytes: int, landing_bytes: int) -> int:
        return cls.flags_bytes(ranks) + SLOTS * slot_bytes + sums_bytes + landing_bytes

    def has_room(self, slot_bytes: int, sums_bytes: int, landing_bytes: int) -> bool:
        return self.slot_bytes >= slot_bytes and self.sums_bytes >= sums_bytes and self.landing_bytes >= landing_bytes

    def flag(self, what: int, *, writer: int, reader: int) -> int:
        """The address of a flag, in memory of the rank that waits for it. Of a piece, what is PIECE_THERE + its number."""
        return self.begins[reader] + 4 * (what * len(self.blocks) + writer)

    @cached_property
    def begins(self) -> list[int]:
        return [block.data_ptr() for block in self.blocks]

    def slot(self, holder: int, hop: int, dtype: torch.dtype) -> Tensor:
        """Where `holder` gets the shard of this hop, flat."""
        begin = self.flags_bytes(len(self.blocks)) + hop % SLOTS * self.slot_bytes
        return self.blocks[holder][begin : begin + self.slot_bytes].view(dtype)

    def sums(self, holder: int, dtype: torch.dtype) -> Tensor:
        """Where `holder` gets sums for its own shard, flat."""
        begin = self.flags_bytes(len(self.blocks)) + SLOTS * self.slot_bytes
        return self.blocks[holder][begin : begin + self.sums_bytes].view(dtype)

    def landing(self, holder: int) -> Tensor:
        """Where `holder` gets all that it sees, in bytes."""
        begin = self.flags_bytes(len(self.blocks)) + SLOTS * self.slot_bytes + self.sums_bytes
        return self.blocks[holder][begin : begin + self.landing_bytes]


def aligned(size: int) -> int:
    """Up to a multiple of 256 bytes, and of a 32nd: lengths that differ from batch to batch grow it a few times only."""
    step = max(256, 1 << max(0, size.bit_length() - 5))
    return -(-size // step) * step
