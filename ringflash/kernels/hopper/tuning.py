"""Tile sizes, stages and orders of the Hopper kernels, with what they were measured to give."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132
# Bytes that neighbours in time may touch and still find in L2 (50 MB, of which half is far away).
L2_BYTES = 32_000_000
QUERIES = 128  # of a forward tile
KEYS = 128  # of a backward tile


def padded(head_dim: int) -> int:
    """Columns of a tile: 64, 128 or 256. Those past the head dim are zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class Order:
    """heads that share a group, and query blocks that share a band; see _place of the kernels."""

    group: int
    band: int


def forward_keys(block_d: int, block_dv: int) -> int:
    """Keys of a step: what two stages of keys and values leave of 227 KiB."""
    return 128 if max(block_d, block_dv) <= 128 else 64


def takes_turns(block_d: int, shape: str) -> bool:
    """Whether the warpgroups start their products in turn, which keeps those of one under the exponentials of the other."""
    return shape == "full"


def forward_order(heads: int, group: int, q_blocks: int, key_bytes: int, is_full: bool) -> Order:
    """heads: batch rows x query heads; group: query heads of a key head; key_bytes: keys and values of one key head.

    Without a mask all tiles are as long, and L2 decides. With one the longest tiles should start first, over all heads
    while L2 can follow: a quarter of the rows at a time where it cannot.
    """
    fit = max(1, L2_BYTES // max(1, key_bytes)) * group
    if is_full:
        return Order(min(fit, heads), q_blocks)
    if key_bytes * (heads // group) <= 140_000_000:
        return Order(heads, q_blocks)
    return Order(min(fit, heads), -(-q_blocks // 4))


def backward_group(heads: int, k_blocks: int, row_bytes: int, is_full: bool) -> int:
    """Heads (batch rows x key heads) of a group; row_bytes: q, dout and dq of the rows of one of them.

    As many as fit L2, and, under a mask, enough that the longest tiles of a group do not end alone.
    """
    fit = min(heads, max(1, L2_BYTES // max(1, row_bytes)))
    if is_full:
        return fit
    wanted = min(heads, max(fit, -(-3 * MULTIPROCESSORS // k_blocks)))
    return -(-heads // max(1, round(heads / wanted)))


def backward_stages(block_d: int) -> tuple[int, int]:
    """(of q, of dout). Three each select the kernel that works one step ahead: 436 against 393 TFLOP/s at d64."""
    return (3, 3) if block_d == 64 else (2, 2)
