"""Kernels that others keep: cuDNN and flash attention through torch, for masks that lower to tiles they can express.

They return out in the input type, so inside a ring every partial result is rounded once before the fp32 merge; they form
rowsum(dout * out) themselves, so they cannot carry a gradient of lse. `choose` takes them only when named.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from einops import rearrange, reduce
from torch import Tensor

from ringflash.kernels.backend import Backend, Call, Rows, summed
from ringflash.kernels.partial import Partial
from ringflash.kernels.score import Score
from ringflash.schedule.plan import Plan
from ringflash.schedule.tiles import Bounds, Tile

# More calls than this per source cost more in launches than the library's kernels cost in time.
MAX_TILES = 64


@dataclass(frozen=True)
class Piece:
    """One call of a vendor kernel: a rectangle, or a causal square."""

    rows: slice
    keys: slice
    is_causal: bool


def pieces(tile: Tile) -> list[Piece]:
    """Cut a full or causal tile into rectangles and squares: top-left and bottom-right causal agree only on squares."""
    rows = slice(tile.row_start, tile.row_stop)
    square = tile.key_stop - (tile.row_stop - tile.row_start)
    if tile.kind == "full":
        return [Piece(rows, slice(tile.key_start, tile.key_stop), is_causal=False)]
    triangle = Piece(rows, slice(square, tile.key_stop), is_causal=True)
    return [triangle] if square == tile.key_start else [Piece(rows, slice(tile.key_start, square), False), triangle]


class Vendor(Backend):
    """What the vendor backends share: lowering to pieces, merging, adding up."""

    device_type = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim = 256

    def refuses(self, call: Call) -> str | None:
        if call.device.type != self.device_type:
            return f"device {call.device} is not {self.device_type}"
        if call.dtype not in self.dtypes:
            return f"dtype {call.dtype} is not one of {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        if call.head_dim % 8 or call.head_dim > self.max_head_dim:
            return f"head_dim {call.head_dim} is not a multiple of 8 up to {self.max_head_dim}"
        if call.deterministic:
            return "its backward is not deterministic"
        return self.refuses_score(call)

    def refuses_score(self, call: Call) -> str | None:
        """What no vendor kernel can do, on any device."""
        if call.head_dim != call.value_dim:
            return f"value_dim {call.value_dim} differs from head_dim {call.head_dim}"
        if unknown := sorted(call.terms - {"sinks"}):
            return f"it has no {unknown[0]}"
        if call.scale <= 0:
            return f"scale {call.scale} is not positive"  # they hide pairs by -inf before they multiply
        if call.needs_dlse:
            return "it cannot differentiate lse, which return_lse=True asks for"
        return None

    def refuses_mask(self, plan: Plan) -> str | None:
        return _refuses_mask(plan)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse [B, H, Sq]) of [B, H, S, D] tensors."""

    @abstractmethod
    def attend_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of [B, H, S, D] tensors, given the merged out and lse."""

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
        for piece in _pieces(bounds):
            inputs = (_heads_first(x) for x in (q[:, piece.rows], k[:, piece.keys], v[:, piece.keys]))
            out, lse = self.attend(*_repeat_heads(*inputs), piece.is_causal, score.factor)
            sums = partial.out.dtype
            here = Partial(out.transpose(1, 2).to(sums), lse.transpose(1, 2).to(sums))
            partial.add(piece.rows, here)
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
        assert not rows.has_dlse, "refuses() comes first"
        Hk = k.shape[2]
        with summed(is_all, q, dq, dk, dv) as (dq, dk, dv):
            for piece in _pieces(bounds):
                inputs = (_heads_first(x) for x in (q[:, piece.rows], k[:, piece.keys], v[:, piece.keys]))
                dout, out = (_heads_first(x[:, piece.rows]) for x in (rows.dout, rows.out))
                lse = rows.lse[:, piece.rows].transpose(1, 2).contiguous()
                dq_p, dk_p, dv_p = self.attend_backward(
                    *_repeat_heads(*inputs), dout, out, lse, piece.is_causal, score.factor
                )
                dq[:, piece.rows] += dq_p.transpose(1, 2)
                for total, share in ((dk, dk_p), (dv, dv_p)):
                    total[:, piece.keys] += reduce(share.to(total.dtype), "B (Hk group) S D -> B S Hk D", "sum", Hk=Hk)


@lru_cache(maxsize=64)
def _refuses_mask(plan: Plan) -> str | None:
    """Of any rank, because a rank that stopped alone would leave the others waiting."""
    for peer in plan.peers:
        for source in peer.sources:
            bounds = peer[source]
            if bounds.lo.shape[0] != 1:
                return "the mask differs over the batch"
            tiles = bounds.tiles()
            slanted = next((tile.kind for tile in tiles if tile.low == "slanted"), None)
            if slanted is not None:
                return f"the mask has {slanted} tiles"
            if len(tiles) > MAX_TILES:
                return f"the mask falls into {len(tiles)} tiles, more than {MAX_TILES}"
    return None


def _pieces(bounds: Bounds) -> Iterator[Piece]:
    for tile in bounds.tiles():
        assert tile.low == "straight", "refuses_mask() comes first"
        yield from pieces(tile)


def _heads_first(x: Tensor) -> Tensor:
    return rearrange(x, "B S H D -> B H S D")


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V with as many heads as q. Their own backward does not sum over a group; on the wire nothing is repeated."""
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


class CuDNN(Vendor):
    name = "cudnn"

    def refuses(self, call: Call) -> str | None:
        if call.device.type == "cuda" and not torch.backends.cudnn.is_available():
            return "torch has no cuDNN here"
        return super().refuses(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])

    def attend_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(1, dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None], no_dropout, no_dropout, None, None, None, q.shape[2], k.shape[2], 0.0,
            is_causal, scale=scale,
        )  # fmt: skip


class Flash(Vendor):
    """FlashAttention-2 inside torch on GPUs, and torch's fused kernel on CPUs."""

    name = "flash"

    def refuses(self, call: Call) -> str | None:
        if call.device.type == "cpu":
            if call.dtype not in (torch.float32, torch.float64):
                return f"dtype {call.dtype} is not one of float32, float64 on a CPU"
            return self.refuses_score(call)
        return super().refuses(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
            return out, lse
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            is_causal,
            False,
            scale=scale,
        )
        return out.transpose(1, 2), lse

    def attend_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
            )
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal,
            no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def backends() -> dict[str, Backend]:
    """What this module offers to `choose`."""
    return {"cudnn": CuDNN(), "flash": Flash()}
