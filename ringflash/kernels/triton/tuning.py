"""Tile sizes of the Triton kernels: a table per kernel, and one function from the call to its entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Generation = Literal["hopper", "blackwell", "other"]


@dataclass(frozen=True)
class Tiles:
    """block_q query rows by block_k keys per step, on num_warps warps with num_stages loads in flight."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            # 16 is the smallest side of a tensor-core product; Triton wants powers of two.
            if size < 16 or size & (size - 1):
                raise ValueError(f"Tiles: {name} = {size}; must be a power of two >= 16")


def padded(head_dim: int) -> int:
    """Columns that a tile holds for head_dim: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def generation(capability: int) -> Generation:
    """capability: compute capability times ten. Consumer Blackwell, 120, has the tensor cores and memory of "other"."""
    return "hopper" if 90 <= capability < 100 else "blackwell" if 100 <= capability < 120 else "other"


# Each table: generation or dtype -> padded head dim, rounded up to a listed one -> tiles.
#
# Hopper was measured on one H200: TFLOP/s beside the entries are causal / full, bf16, two sequences of 8192 tokens
# (benchmarks/results/triton_tiles_h200_2026-11-30.md). The others were chosen without a device, by what compiles with few
# spills. "other" fits 99 KiB of shared memory, the least that any of them has. "blackwell" must leave room in 512 columns
# of tensor memory: dk, dv and dq at d256 would fill them, so its tiles are too small for that unit and use the older one.
Table = dict[str, dict[int, Tiles]]

FORWARD: Table = {
    # 128 rows on 8 warps: 331 / 422 at d128. 64 keys: 298 / 322 at d256.
    "hopper": {
        64: Tiles(64, 64, 4, 3),  # 330 / 411
        128: Tiles(64, 64, 4, 3),  # 395 / 425
        256: Tiles(128, 32, 8, 3),  # 359 / 385
    },
    "blackwell": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 8, 2)},
    "other": {128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 2)},
    # Six bf16 products per fp32 one keep all operands in pieces: small tiles, on every generation.
    "fp32": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
}

# The column-parallel kernel: a program keeps block_k keys and steps over block_q rows. On Hopper it leaves dq to the next.
KEY_GRADIENT: Table = {
    # TFLOP/s of both passes.
    "hopper": {
        64: Tiles(64, 64, 4, 3),  # 10 % ahead of 128 keys on 8 warps at 32k tokens, 12 % at 64 documents of 1k
        128: Tiles(32, 64, 4, 3),  # 313 / 341; 64 rows and 128 keys on 8 warps 293 / 342
        256: Tiles(64, 64, 8, 1),  # 194 / 193; 32 rows 148 / 134
    },
    "blackwell": {64: Tiles(64, 128, 8, 1), 128: Tiles(32, 128, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "other": {64: Tiles(32, 128, 8, 2), 128: Tiles(32, 64, 8, 2), 256: Tiles(16, 64, 8, 1)},
    "fp32": {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}

# The second of two passes: a program keeps block_q rows and steps over block_k keys.
QUERY_GRADIENT: Table = {
    "hopper": {
        64: Tiles(64, 64, 4, 3),  # 259 / 295; 128 rows on 8 warps 210 / 250
        128: Tiles(128, 64, 8, 3),  # 323 / 351; 64 rows on 4 warps 303 / 333
        256: Tiles(128, 32, 8, 2),  # 195 / 188; 64 keys 184 / 174
    },
    "blackwell": {128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "other": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 16, 8, 1)},
    "fp32": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
}


def tiles(table: Table, head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """The entry for a call; head_dim is the larger of q's and v's, at most 256."""
    entries = table["fp32" if dtype == torch.float32 else generation(capability)]
    return entries[min(dim for dim in entries if dim >= padded(head_dim))]


def two_passes_are_faster(dtype: torch.dtype, capability: int) -> bool:
    """Whether a second kernel for dq costs less than adding dq up by atomics in the first.

    Seven products instead of five, but no registers for dq and no traffic of atomics: on an H200, TFLOP/s causal / full,
    244 / 267 -> 259 / 295 at d64, 240 / 258 -> 323 / 351 at d128, 149 / 147 -> 198 / 189 at d256. In fp32, where a
    product weighs six times as much, 31 -> 21 at d64.
    """
    return generation(capability) == "hopper" and dtype != torch.float32
