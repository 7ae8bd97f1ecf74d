"""What people write by hand: a zigzag ring of NCCL send and receive around torch's flash kernel, a launch a hop.

Only here to be measured against. A source before this rank is seen by all queries, with its first half; one after it, by the
second half of the queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


class PlainRing:
    """Attention of shards [B, S, H, D] of all ranks of the default group, cut as Zigzag does."""

    def __init__(self, is_causal: bool) -> None:
        self.is_causal = is_causal

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Function.apply(q, k, v, self.is_causal)
        return out


def _part(rank: int, source: int, tokens: int, is_causal: bool) -> tuple[slice, slice]:
    """Queries and keys that meet."""
    whole, half = slice(0, tokens), tokens // 2
    if not is_causal or source == rank:
        return whole, whole
    return (whole, slice(0, half)) if source < rank else (slice(half, tokens), whole)


def _exchange(tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in received]
    return received, dist.batch_isend_irecv(ops)


def _heads_first(x: Tensor, group: int = 1) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(group, 1)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), q.shape[2] // k.shape[2]
        out, lse = torch.zeros_like(q, dtype=torch.float32).transpose(1, 2), None
        held = [k.contiguous(), v.contiguous()]
        for hop in range(ranks):
            coming = _exchange(held) if hop < ranks - 1 else None
            source = (rank - hop) % ranks
            rows, keys = _part(rank, source, q.shape[1], is_causal)
            parts = q[:, rows].transpose(1, 2), *(_heads_first(x[:, keys], group) for x in held)
            out_s, lse_s, *_ = flash(*parts, 0.0, is_causal and source == rank)
            if lse is None:
                out, lse = out_s.float(), lse_s
            else:
                total = torch.logaddexp(lse[:, :, rows], lse_s)
                before = (lse[:, :, rows] - total).exp()[..., None]
                out[:, :, rows] = out[:, :, rows] * before + out_s * (lse_s - total).exp()[..., None]
                lse[:, :, rows] = total
            if coming is not None:
                held, works = coming
                for work in works:
                    work.wait()
        rounded = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, rounded, lse)
        ctx.is_causal = is_causal
        return rounded.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), q.shape[2] // k.shape[2]
        dq = torch.zeros_like(q, dtype=torch.float32)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        held, no_seed = [k.contiguous(), v.contiguous()], torch.zeros(2, dtype=torch.uint64, device=q.device)
        for hop in range(ranks):
            coming = _exchange(held) if hop < ranks - 1 else None
            source = (rank - hop) % ranks
            rows, keys = _part(rank, source, q.shape[1], ctx.is_causal)
            n, m = rows.stop - rows.start, keys.stop - keys.start
            parts = q[:, rows].transpose(1, 2), *(_heads_first(x[:, keys], group) for x in held)
            dq_s, dk_s, dv_s = flash_backward(
                dout[:, rows].transpose(1, 2), *parts, out[:, :, rows], lse[:, :, rows].contiguous(), None, None, n, m,
                0.0, ctx.is_causal and source == rank, no_seed, no_seed[:1],
            )  # fmt: skip
            dq[:, rows] += dq_s.transpose(1, 2)
            for total, part in zip(sums, (dk_s, dv_s), strict=True):
                grouped = part.transpose(1, 2).unflatten(2, (-1, group)).float().sum(3)
                total[:, keys] += grouped
            if coming is not None:
                held, works = coming
                for work in works:
                    work.wait()
            # Sums follow their keys, and after the last hop go home.
            sums, works = _exchange(sums)
            for work in works:
                work.wait()
        return dq.to(q.dtype), *(x.to(k.dtype) for x in sums), None
