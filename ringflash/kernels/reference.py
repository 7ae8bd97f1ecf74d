"""Attention in plain torch, block by block, on any device: the definition of correct, and the kernel of CPUs.

Never holds a score matrix larger than one block of BLOCK x BLOCK pairs for all heads, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ringflash.kernels.backend import Backend, Call, Rows, summed
from ringflash.kernels.partial import Partial, accumulate_dtype
from ringflash.kernels.score import Score
from ringflash.schedule.tiles import Bounds

# Large enough that the matrix products dominate Python, small enough that 8 heads of scores take 8 MiB.
BLOCK = 512


@dataclass(frozen=True)
class Block:
    """Rows and keys of one block, and which of its pairs are hidden ([1 or B, 1, 1, rows, keys]; None: all are seen).

    rows_at, keys_at: their global positions, int32; meaningless where the score has no use for them.
    """

    rows: slice
    keys: slice
    hidden: Tensor | None
    rows_at: Tensor
    keys_at: Tensor

    def shown(self, ds: Tensor) -> Tensor:
        """0 where hidden: padding may hold anything, and 0 times NaN is NaN."""
        return ds if self.hidden is None else ds.masked_fill(self.hidden, 0.0)

    def of_rows(self, x: Tensor) -> Tensor:
        """x [B, Hk, group, rows, D] with 0 in rows that see no key of this block, for the same reason."""
        return x if self.hidden is None else x.masked_fill(self.hidden.all(-1, keepdim=True), 0.0)

    def of_keys(self, x: Tensor) -> Tensor:
        """x [B, Hk, 1, keys, D] with 0 in keys that no row of this block sees."""
        return x if self.hidden is None else x.masked_fill(self.hidden.all(-2)[..., None], 0.0)


class Reference(Backend):
    name = "reference"

    def refuses(self, call: Call) -> str | None:
        if not call.dtype.is_floating_point or call.dtype.itemsize < 2:
            return f"dtype {call.dtype} is not one of float16, bfloat16, float32, float64"
        if call.device.type == "meta":
            return "tensors on meta hold no values"
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
    ) -> Partial:
        partial = Partial.empty(q, v.shape[-1]) if into is None else into
        Hk = k.shape[2]
        for block in _blocks(bounds, q.device, score):
            s, _ = _scores(q[:, block.rows], k[:, block.keys], score, block)
            lse = torch.logsumexp(s, dim=-1)
            p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
            if score.dropout:
                p = p * score.keep(p, block.rows_at, block.keys_at)
            out = p @ block.of_keys(_by_head(v[:, block.keys], Hk))
            here = Partial(
                rearrange(out, "B Hk group Sq Dv -> B Sq (Hk group) Dv"),
                rearrange(lse, "B Hk group Sq -> B Sq (Hk group)"),
            )
            partial.add(block.rows, here)
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
    ) -> None:
        with summed(is_all, q, dq, dk, dv) as (dq, dk, dv):
            self._add_gradients(q, k, v, rows, bounds, score, dq, dk, dv)

    def _add_gradients(
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
    ) -> None:
        Hk = k.shape[2]
        for block in _blocks(bounds, q.device, score):
            q_b, dout_b = (block.of_rows(_by_head(x[:, block.rows], Hk)) for x in (q, rows.dout))
            k_b, v_b = (block.of_keys(_by_head(x[:, block.keys], Hk)) for x in (k, v))
            lse_b, delta_b = (
                rearrange(x[:, block.rows], "B Sq (Hk group) -> B Hk group Sq 1", Hk=Hk) for x in (rows.lse, rows.delta)
            )
            s, slope = _scores(q[:, block.rows], k[:, block.keys], score, block)
            # Rows without any key have lse = -inf and s = -inf everywhere; a finite pivot makes their p 0, not NaN.
            p = torch.exp(s - torch.where(lse_b == -torch.inf, 0.0, lse_b))
            dp, p_kept = dout_b @ v_b.mT, p
            if score.dropout:
                keep = score.keep(p, block.rows_at, block.keys_at)
                dp, p_kept = dp * keep, p * keep
            ds = p * (dp - delta_b) * score.factor
            ds = block.shown(ds if slope is None else ds * slope)
            dq[:, block.rows] += rearrange(ds @ k_b, "B Hk group Sq D -> B Sq (Hk group) D")
            dk[:, block.keys] += rearrange((ds.mT @ q_b).sum(2), "B Hk Sk D -> B Sk Hk D")
            dv[:, block.keys] += rearrange((p_kept.mT @ dout_b).sum(2), "B Hk Sk Dv -> B Sk Hk Dv")


def _by_head(x: Tensor, key_heads: int) -> Tensor:
    """[B, S, H, D] as [B, Hk, group, S, D] in the accumulate type; keys have a group of one."""
    return rearrange(x.to(accumulate_dtype(x.dtype)), "B S (Hk group) D -> B Hk group S D", Hk=key_heads)


def _scores(q: Tensor, k: Tensor, score: Score, block: Block) -> tuple[Tensor, Tensor | None]:
    """Scores [B, Hk, group, Sq, Sk] of one block, -inf where hidden, and their derivative by scale * q . k; None is 1."""
    Hk = k.shape[2]
    s = (_by_head(q, Hk) @ _by_head(k, Hk).mT) * score.factor
    s, slope = score.transform(s, block.rows_at, block.keys_at)
    return (s if block.hidden is None else s.masked_fill(block.hidden, -torch.inf)), slope


def _blocks(bounds: Bounds, device: torch.device, score: Score) -> Iterator[Block]:
    """The blocks with something to see. Bounds are monotone, so a block's first and last rows tell its range."""
    if bounds.is_empty:
        return
    lo_d, hi_d = bounds.to(device)
    # Positions are made on demand, and few scores ask for them.
    asked = score.terms & {"alibi", "dropout"}
    rows_at, keys_at = bounds.positions_to(device) if asked else (lo_d[0], lo_d[0])
    for start in range(0, bounds.rows, BLOCK):
        rows = slice(start, min(start + BLOCK, bounds.rows))
        lo, hi = bounds.lo[:, rows], bounds.hi[:, rows]
        first, past = int(lo[:, 0].min()), int(hi[:, -1].max())
        all_from, all_until = int(lo[:, -1].max()), int(hi[:, 0].min())
        for key in range(first, past, BLOCK):
            keys = slice(key, min(key + BLOCK, past))
            hidden = None
            if keys.start < all_from or keys.stop > all_until:
                column = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=device)
                seen = (lo_d[:, rows, None] <= column) & (column < hi_d[:, rows, None])
                hidden = ~seen[:, None, None]
            yield Block(rows, keys, hidden, rows_at[rows], keys_at[keys])


def backends() -> dict[str, Backend]:
    """What this module offers to `choose`."""
    return {"reference": Reference()}
