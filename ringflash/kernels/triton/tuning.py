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


def forward_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """capability: compute capability times ten (80, 90, 100); head_dim: the larger of the two."""
    D = padded(head_dim)
    if dtype == torch.float32:
        # Three tf32 products per fp32 one keep all operands twice in registers: small tiles.
        return Tiles(64, 32, 4, 2) if D <= 128 else Tiles(32, 32, 4, 1)
    if capability >= 90:
        return {256: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 3)}.get(D, Tiles(128, 64, 4, 3))
    return {256: Tiles(64, 32, 4, 2), 128: Tiles(128, 32, 4, 3)}.get(D, Tiles(128, 64, 4, 3))


def key_gradient_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Tiles of the column-parallel kernel: a program keeps block_k keys and steps over block_q rows."""
    D = padded(head_dim)
    if dtype == torch.float32:
        return {256: Tiles(16, 16, 4, 1), 128: Tiles(16, 32, 4, 1)}.get(D, Tiles(32, 32, 4, 1))
    if capability >= 90:
        return {256: Tiles(32, 64, 8, 1), 128: Tiles(64, 128, 8, 2)}.get(D, Tiles(64, 128, 8, 2))
    return {256: Tiles(16, 64, 8, 1), 128: Tiles(32, 64, 4, 2)}.get(D, Tiles(32, 128, 4, 2))


def query_gradient_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Tiles of the second pass of the deterministic mode: a program keeps block_q rows and steps over block_k keys."""
    D = padded(head_dim)
    if dtype == torch.float32:
        return {256: Tiles(16, 16, 4, 1), 128: Tiles(32, 16, 4, 1)}.get(D, Tiles(32, 32, 4, 1))
    if capability >= 90:
        return {256: Tiles(64, 32, 8, 1), 128: Tiles(128, 64, 8, 2)}.get(D, Tiles(128, 64, 8, 2))
    return {256: Tiles(64, 16, 8, 1), 128: Tiles(64, 32, 4, 2)}.get(D, Tiles(128, 32, 4, 2))
