"""Tile sizes of the Triton kernels: one frozen value per kernel, and one function from the call to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


# Figures beside the tiles are TFLOP/s, causal / full, of bf16 with 16384 tokens in two sequences on one H200: see
# benchmarks/results/triton_tiles_h200_2026-11-30.md. Those for other devices were chosen without one: by what compiles
# with few spills and fits into 99 KiB of shared memory, the least that any of them has.


def is_datacentre_hopper_or_later(capability: int) -> bool:
    """Hopper and data-centre Blackwell: 227 KiB of shared memory. 120 is consumer Blackwell, which has 99 again."""
    return 90 <= capability < 120


def forward_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """capability: compute capability times ten (80, 90, 100); head_dim: the larger of the two."""
    D = padded(head_dim)
    if dtype == torch.float32:
        # Six bf16 products per fp32 one keep all operands in pieces: small tiles.
        return Tiles(64, 32, 4, 2) if D <= 128 else Tiles(32, 32, 4, 1)
    if is_datacentre_hopper_or_later(capability):
        # d256 359 / 385 (64 keys 298 / 322); d128 395 / 425 (128 rows on 8 warps 331 / 422); d64 330 / 411.
        return Tiles(128, 32, 8, 3) if D == 256 else Tiles(64, 64, 4, 3)
    return Tiles(64, 32, 8, 2) if D == 256 else Tiles(64, 64, 4, 2)


def key_gradient_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Tiles of the column-parallel kernel: a program keeps block_k keys and steps over block_q rows."""
    D = padded(head_dim)
    if dtype == torch.float32:
        return {256: Tiles(16, 16, 4, 1), 128: Tiles(16, 32, 4, 1)}.get(D, Tiles(32, 32, 4, 1))
    if is_datacentre_hopper_or_later(capability):
        # d256 149 / 147 (32 rows 139 / 115); d128 240 / 258 (64 keys 175 / 170); d64 245 / 269 (2 stages 250 / 242).
        return {256: Tiles(64, 64, 8, 1), 128: Tiles(64, 128, 8, 2)}.get(D, Tiles(64, 128, 8, 3))
    return {256: Tiles(16, 64, 8, 1), 128: Tiles(32, 64, 8, 2)}.get(D, Tiles(32, 128, 8, 2))


def query_gradient_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Tiles of the second of two passes: a program keeps block_q rows and steps over block_k keys."""
    D = padded(head_dim)
    if dtype == torch.float32:
        return {256: Tiles(16, 16, 4, 1), 128: Tiles(32, 16, 4, 1)}.get(D, Tiles(32, 32, 4, 1))
    if is_datacentre_hopper_or_later(capability):
        # Both passes, ms causal / full: d256 9.3 / 20 (64 keys 12 / 26); d128 4.7 / 9.3 (128 rows 8.3 / 15); d64 6.0 / 11.
        return Tiles(128, 32, 8, 2) if D == 256 else Tiles(64, 64, 4, 2)
    return {256: Tiles(64, 16, 8, 1), 128: Tiles(64, 32, 4, 2)}.get(D, Tiles(64, 64, 4, 2))


def two_passes_are_faster(head_dim: int, dtype: torch.dtype, capability: int) -> bool:
    """Whether a second kernel for dq costs less than adding dq up by atomics in the first.

    Seven products instead of five, but no registers for dq: on an H200 5.6 -> 4.7 ms at d128 causal, 10.1 -> 9.3 at d256,
    5.5 -> 6.0 at d64. In fp32 the products weigh six times as much.
    """
    return padded(head_dim) >= 128 and dtype != torch.float32 and is_datacentre_hopper_or_later(capability)
