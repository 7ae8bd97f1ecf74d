"""Tile sizes, stages and orders of the Hopper kernels, with what they were measured to give on an H200, bf16."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MULTIPROCESSORS = 132
KEYS = 128  # of a backward tile


def padded(head_dim: int) -> int:
    """Columns of a tile: 64, 128 or 256. Those past the head dim are zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def forward_keys(block_d: int, block_dv: int) -> int:
    """Keys of a step: what two stages of keys and values leave of 227 KiB."""
    return 128 if max(block_d, block_dv) <= 128 else 64


def way_of_out(warpgroups: int, block_d: int, block_dv: int, block_k: int, *, is_fp32: bool, is_rounded: bool) -> str:
    """How a tile of out leaves a program, and what it is merged with comes: through shared memory where there is room.

    From and to registers a hop of a ring costs 7 to 10 % more than a plain call of 8k tokens at d128, because both
    warpgroups wait at the end of a tile.
    """
    queries = 64 * warpgroups
    inputs = queries * block_d * 2 + 2 * block_k * (block_d + block_dv) * 2
    if inputs + queries * block_dv * (4 if is_fp32 else 2) <= 224 * 1024:
        return "own"
    return "queries" if is_rounded and block_d == block_dv else "direct"


def forward_warpgroups(block: int, shape: str, tokens: int) -> int:
    """Warpgroups of 64 queries: three for small heads, whose exponentials bound them, else two.

    Under a mask tiles of 192 queries hide more, which pays off late: causal d64 of 4k tokens 456 TFLOP/s with two and 403
    with three, of 16k 504 and 522; full 478 and 522, 482 and 583.
    """
    return 3 if block == 64 and (shape == "full" or (shape in ("causal", "blocks") and tokens >= 12288)) else 2


def takes_turns(warpgroups: int, shape: str) -> bool:
    """Whether two warpgroups start their products in turn, which keeps those of one under the exponentials of the other."""
    return warpgroups == 2 and shape == "full"


def forward_group(group: int, q_blocks: int, is_full: bool) -> int:
    """Query heads whose tiles are taken together, longest first; group: query heads that share a key head.

    Few, so that their keys stay in L2 and are read once: enough tiles for all multiprocessors. Where tiles
    differ in length, four times as many let the long ones start first. TFLOP/s at 4k tokens, d128, 4, 8, 16, 32, 64 heads:
    full 721, 718, 696, 666, 620; causal 642, 663, 672, 647, 596. Rows that see nothing count as short tiles.
    """
    tiles = MULTIPROCESSORS if is_full else 4 * MULTIPROCESSORS
    wanted = max(4, round(tiles / q_blocks))
    return -(-wanted // group) * group


class ForwardTiles(NamedTuple):
    """How a forward call is cut. Queries are taken 64 to a warpgroup; programs: how many tiles of them there are."""

    keys: int
    dim: int
    value_dim: int
    warpgroups: int
    group: int
    way: str
    takes_turns: bool
    programs: int


@lru_cache(maxsize=4096)
def forward_tiles(
    B: int, Sq: int, Hq: int, Hk: int, D: int, Dv: int, shape: str, is_into: bool, is_last: bool
) -> ForwardTiles:
    """Of q [B, Sq, Hq, D], k [B, ., Hk, D] and v [B, ., Hk, Dv]."""
    dim, value_dim = padded(D), padded(Dv)
    keys = forward_keys(dim, value_dim)
    warpgroups = forward_warpgroups(max(dim, value_dim), shape, Sq)
    q_blocks = -(-Sq // (64 * warpgroups))
    way = way_of_out(warpgroups, dim, value_dim, keys, is_fp32=is_into or not is_last, is_rounded=is_last)
    group = forward_group(Hq // Hk, q_blocks, shape == "full")
    takes = takes_turns(warpgroups, shape)
    return ForwardTiles(keys, dim, value_dim, warpgroups, group, way, takes, q_blocks * B * Hq)


def backward_group(tokens: int, row_bytes: int, is_even: bool) -> int:
    """Key heads whose tiles are taken together; row_bytes: q, dout and dq of the rows that share a key head.

    Up to 16k tokens it hardly matters from 2 to 16, but 4 are better than 8 where 8 are far more than L2 holds and there is
    no mask to balance. Programs of one head drift apart over long sequences, and then each head that is under way is read
    anew: 64k tokens, d128, 1, 2, 4, 8 heads: full 560, 548, 553, 439 and 64:8 537, 508, 459, 384; causal 580, 574, 582, 574
    and 64:8 538, 536, 530, 533. A hop of a causal ring is even too: known as such, forward with backward of two ranks, 128k
    tokens, 64:8, went from 0.93 to 0.99 of the efficiency of one GPU.
    """
    if tokens >= 32768:
        return 1 if is_even else 4
    return 4 if is_even and 8 * row_bytes > 140_000_000 else 8


def backward_rows(block: int) -> int:
    """Rows of a backward step. With 128 each operand is read from shared memory for twice as many products, but S and dP
    take twice the registers, which only small heads leave.
    """
    return 128 if block == 64 else 64


def queries_keys(block_d: int, block_dv: int) -> int:
    """Keys of a step of dq: 128 would take more registers than there are beside dq of 256 columns."""
    return 128 if max(block_d, block_dv) <= 128 else 64


def value_stages(block_d: int, block_dv: int) -> int:
    """Blocks of values that the kernel of dq holds: one where q, dout and two blocks of keys leave no room for two.

    Values are done with after dP, so they wait for less than keys, which dq needs as well.
    """
    return 1 if block_d == block_dv == 256 else 2
