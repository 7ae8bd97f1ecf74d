"""The Hopper backend: check what it can serve, find tiles and bounds for a call, launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.backend import Arrivals, Backend, Call, Lands, Rows
from ringflash.kernels.hopper import backward, backward_queries, backward_wide, forward
from ringflash.kernels.hopper.arguments import dense_heads_first, described, described_rows
from ringflash.kernels.hopper.backward import dq_columns, sum_columns
from ringflash.kernels.hopper.backward_queries import sum_columns as queries_columns
from ringflash.kernels.hopper.backward_wide import SUM_COLUMNS
from ringflash.kernels.hopper.gluon import VERSION, VERSIONS
from ringflash.kernels.hopper.tuning import (
    KEYS,
    backward_group,
    backward_rows,
    forward_group,
    forward_tiles,
    padded,
    queries_keys,
    value_stages,
)
from ringflash.kernels.partial import Partial
from ringflash.kernels.score import Score
from ringflash.kernels.triton.launch import Triton, batch_stride
from ringflash.kernels.triton.launcher import launcher
from ringflash.schedule.copies import stream_handle
from ringflash.schedule.tiles import Bounds

ROWS = 64  # of a tile that one warpgroup holds

forward_kernel = launcher(forward.forward_kernel)
backward_kernel = launcher(backward.backward_kernel)
wide_backward_kernel = launcher(backward_wide.wide_backward_kernel)
queries_backward_kernel = launcher(backward_queries.queries_backward_kernel)


class Hopper(Backend):
    name = "hopper"
    waits = True

    def refuses(self, call: Call) -> str | None:
        if call.device.type != "cuda" or not torch.cuda.is_available():
            return f"device {call.device} is not a GPU that is here"
        if torch.cuda.get_device_capability(call.device)[0] != 9:
            return f"{torch.cuda.get_device_name(call.device)} is not a Hopper GPU"
        if VERSION not in VERSIONS:
            return (
                f"triton {VERSION} is not one of {', '.join(VERSIONS)}, which its kernels were compiled and tested with"
            )
        if call.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {call.dtype} is not one of float16, bfloat16"
        for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
            if dim > 256 or dim % 8:
                return f"{name} {dim} is not a multiple of 8 up to 256"
        if call.scale <= 0:
            return f"scale {call.scale} is not positive"
        if terms := call.terms - {"sinks"}:
            return f"its kernels know no {', '.join(sorted(terms))}"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        score: Score,
        into: Partial | None = None,
        is_last: bool = False,
        arrivals: Arrivals | None = None,
    ) -> Partial:
        B, Sq, Hq, D = q.shape
        Sk, (Hk, Dv) = bounds.columns, v.shape[2:]
        if bounds.columns == 0 or q.numel() == 0:
            return Partial.empty(q, Dv) if into is None else into
        partial = Partial.unset(q, Dv, rounded=is_last) if into is None else into
        before = partial.out
        if is_last and into is not None:
            partial = Partial(q.new_empty(B, Sq, Hq, Dv), partial.lse)
        shape, lo, hi = _ends(bounds, 0, q.device)
        tiles = forward_tiles(B, Sq, Hq, Hk, D, Dv, shape, into is not None, is_last)
        keys, values = described(k, tiles.keys, tiles.dim), described(v, tiles.keys, tiles.value_dim)
        with torch.cuda.device(q.device):
            forward_kernel[(min(tiles.programs, _multiprocessors(q.device)),)](
                described(q, ROWS, tiles.dim), keys, values,
                *((keys, values) if arrivals is None else _described_own(arrivals, (keys, values))),
                values if tiles.way == "direct" else described(partial.out, ROWS, tiles.value_dim, is_written=True),
                described(before, ROWS, tiles.value_dim) if into is not None and tiles.way == "own" else values,
                partial.out, before, partial.lse, lo, hi, _counter(q.device),
                *_arriving(arrivals, lo), batch_stride(lo) if shape == "rows" else 0,
                B, Hq, Hk, Sq, Sk, Dv, tiles.group, score.factor,
                BLOCK_K=tiles.keys, BLOCK_D=tiles.dim, BLOCK_DV=tiles.value_dim, SHAPE=shape, INTO=into is not None,
                ROUNDED=is_last, WAY=tiles.way, TAKE_TURNS=tiles.takes_turns, WAITS=arrivals is not None,
                WARPGROUPS=tiles.warpgroups, num_warps=4, maxnreg=168 if tiles.warpgroups == 2 else 128,
            )  # fmt: skip
        return partial

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        bounds: Bounds,
        score: Score,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        deterministic: bool,
        is_all: bool = False,
        lands: Lands | None = None,
    ) -> None:
        is_empty = bounds.columns == 0 or bounds.rows == 0 or q.shape[0] == 0
        if lands is not None:
            if is_empty:  # nothing will be added, or there is nothing to add to
                lands.departures.flags.fill_(1)
                if lands.travels == "queries":
                    dk.zero_(), dv.zero_()
            else:
                _key_gradients(q, k, v, rows, bounds, score, dq, dk, dv, lands.travels == "queries", lands)
            return
        if is_empty:
            return
        is_wide = max(q.shape[3], v.shape[3]) > 128
        if is_wide or deterministic:
            _key_gradients(q, k, v, rows, bounds, score, None, dk, dv, is_all)
            _query_gradient(q, k, v, rows, bounds, score, dq, is_all)
            return
        # What is added up must start at zero, in fp32.
        total = q.new_zeros(q.shape, dtype=torch.float32) if is_all else dq
        _key_gradients(q, k, v, rows, bounds, score, total, dk, dv, is_all)
        if total is not dq:
            dq.copy_(total)

    def lands_backward(self, head_dim: int, value_dim: int) -> bool:
        return max(head_dim, value_dim) <= 128

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        return Triton().delta(out, dout, dlse)


def _ends(bounds: Bounds, axis: int, device: torch.device) -> tuple[str, Tensor, Tensor]:
    """(shape, lo, hi) as kernels take them, of the rows or, axis 1, of the columns."""
    if bounds.shape == "rows" and bounds.has_diagonals:
        numbers = bounds.diagonals_to(device)[axis]
        return "blocks", numbers, numbers
    return (bounds.shape, *(bounds.columns_to(device) if axis else bounds.to(device)))


def _described_own(arrivals: Arrivals, landed: tuple[Any, ...]) -> list[Any]:
    """Descriptors of the own shard for the tiles of those of what lands; the same ones where it is empty, and never read."""
    if arrivals.shard[0].shape[1] == 0:
        return list(landed)
    return [
        described(x, *there.block_shape[2:]) if x.dim() == 4 else described_rows(x, there.block_shape[1])
        for x, there in zip(arrivals.shard, landed, strict=True)
    ]


def _arriving(arrivals: Arrivals | None, unused: Tensor) -> tuple[Any, ...]:
    """Flags, places, log2 of the rows of a cell, and which rows come last, for a kernel; without arrivals it reads none."""
    if arrivals is None:
        return unused, unused, 0, 0, 0
    return arrivals.flags, arrivals.places, arrivals.rows.bit_length() - 1, *arrivals.late


def _key_gradients(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, bounds: Bounds, score: Score, dq: Tensor | None, dk: Tensor, dv: Tensor,
    is_all: bool, lands: Lands | None = None,
) -> None:  # fmt: skip
    """Launch the column-parallel kernel: dk and dv, and dq [B, Sq, Hq, D] fp32 to add to where it is given, D up to 128.

    is_all: dk and dv are written, in q's type, instead of added to.
    """
    B, _, Hq, D = q.shape
    Hk, Dv = v.shape[2:]
    Sq, Sk = bounds.rows, bounds.columns  # of what lands q, k and v hold a part only
    is_wide = max(D, Dv) > 128
    assert dq is None or not is_wide, "the kernel for wide heads forms dk and dv only"
    block_d, block_dv = (max(128 if is_wide else 64, padded(dim)) for dim in (D, Dv))
    k_blocks = -(-Sk // (ROWS if is_wide else KEYS))
    group = backward_group(Sq, Sq * (D + Dv) * 4 * (Hq // Hk), bounds.is_even)
    shape, lo, hi = (bounds.shape, *bounds.columns_to(q.device)) if is_wide else _ends(bounds, 1, q.device)
    keys, values = described(k, ROWS, block_d), described(v, ROWS, block_dv)
    step = backward_rows(max(block_d, block_dv))
    inputs = (
        described(q, step, block_d), keys, values, described(rows.dout, step, block_dv),
        described_rows(rows.lse, step), described_rows(rows.delta, step),
    )  # fmt: skip
    own = inputs
    if lands is not None and lands.travels == "keys":
        own = (inputs[0], *_described_own(lands.arrivals, (keys, values)), *inputs[3:])
    elif lands is not None:
        own_q, *rest = _described_own(lands.arrivals, (inputs[0], *inputs[3:]))
        own = (own_q, keys, values, *rest)
    if is_all:
        results = described(dk, ROWS, block_d, is_written=True), described(dv, ROWS, block_dv, is_written=True)
    else:
        at_once = SUM_COLUMNS.value if is_wide else sum_columns(step, block_d, dq is not None)
        results = described(dk, ROWS, at_once, is_written=True), described(dv, ROWS, at_once, is_written=True)
    if lands is not None:
        group = lands.departures.heads // (Hq // Hk if lands.travels == "queries" else 1)
    numbers = (batch_stride(lo) if shape == "rows" else 0, B, Hq, Hk, Sq, Sk, group, score.factor)
    constants = {
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "SHAPE": shape, "STORE": is_all, "num_warps": 4, "maxnreg": 168,
    }  # fmt: skip
    with torch.cuda.device(q.device):
        if is_wide:
            wide_backward_kernel[(k_blocks * B * Hk,)](*inputs, *results, lo, hi, *numbers, **constants)
        else:
            sums = keys if dq is None else described(dq, ROWS, dq_columns(step, block_d), is_written=True)
            flags, places, *cells = _arriving(None if lands is None else lands.arrivals, lo)
            away = (lo, lo, lo, 0)
            if lands is not None:
                departures = lands.departures
                away = (departures.flags, departures.counts, departures.blocks, departures.departing)
            what = "none" if lands is None else "keys" if lands.travels == "keys" else "rows"
            backward_kernel[(k_blocks * B * Hk,)](
                *inputs, *own, sums, *results, lo, hi, flags, places, *cells, *away, *numbers,
                ROWS=step, STAGES=2, WITH_DQ=dq is not None, LANDS=what, **constants,
            )  # fmt: skip


def _query_gradient(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, bounds: Bounds, score: Score, dq: Tensor, is_all: bool
) -> None:
    """Launch the row-parallel kernel, which adds to dq or, where is_all, writes it."""
    B, Sq, Hq, D = q.shape
    Sk, Hk, Dv = v.shape[1:]
    block_d, block_dv = padded(D), padded(Dv)
    block_k = queries_keys(block_d, block_dv)
    q_blocks = -(-Sq // (2 * ROWS))
    group = forward_group(Hq // Hk, q_blocks, bounds.shape == "full")
    lo, hi = bounds.to(q.device)
    with torch.cuda.device(q.device):
        queries_backward_kernel[(q_blocks * B * Hq,)](
            described(q, ROWS, block_d), described(k, block_k, block_d), described(v, block_k, block_dv),
            described(rows.dout, ROWS, block_dv),
            described(dq, ROWS, block_d if is_all else queries_columns(block_d), is_written=True),
            dense_heads_first(rows.lse), dense_heads_first(rows.delta), lo, hi, batch_stride(lo),
            B, Hq, Hk, Sq, Sk, group, score.factor,
            BLOCK_K=block_k, BLOCK_D=block_d, BLOCK_DV=block_dv, VALUE_STAGES=value_stages(block_d, block_dv),
            SHAPE=bounds.shape, STORE=is_all, num_warps=4, maxnreg=168,
        )  # fmt: skip


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _counter(device: torch.device) -> Tensor:
    """The tile counter: zero between launches, because each puts it back.

    One per stream, whose launches follow one another. While a CUDA graph is captured, one of the graph's own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of(device, stream_handle(device))


@lru_cache(maxsize=64)
def _counter_of(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def backends() -> dict[str, Backend]:
    """What this module offers to `choose`."""
    return {"hopper": Hopper()}
