"""Kernels that others keep: cuDNN and flash attention through torch, and FlashAttention-4, for masks that lower to tiles.

They return out in the input type, so inside a ring every partial result is rounded once before the fp32 merge; they form
rowsum(dout * out) themselves, so they cannot carry a gradient of lse. Unnamed, `choose` takes them only where nothing is
merged and a table says that they are the fastest.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from ringflash.kernels.backend import Backend, Call, Rows, summed
from ringflash.kernels.partial import Partial, accumulate_dtype
from ringflash.kernels.score import Score
from ringflash.schedule.plan import Plan
from ringflash.schedule.tiles import Bounds, Tile

# More calls than this per source cost more in launches than the library's kernels cost in time.
MAX_TILES = 64
# Their entry for backward is private to the package, so its form is known of these versions only.
FLASH_ATTENTION_4 = ("4.0.0b36",)


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

    rounds_partials = True
    reads_delta = False
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
        """(out, lse [B, Hq, Sq]) of q [B, Hq, Sq, D] and k, v [B, Hk, Sk, D]."""

    @abstractmethod
    def attend_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the shapes of q, k, v, given the merged out and lse."""

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
        if into is None and is_last and (whole := _whole(bounds)) is not None:
            return Partial(*self._attend(q, k, v, whole, score))
        partial = Partial.empty(q, v.shape[-1]) if into is None else into
        for piece in _pieces(bounds):
            out, lse = self._attend(q, k, v, piece, score)
            partial.add(piece.rows, Partial(out.to(partial.out.dtype), lse))
        return partial

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, score: Score) -> tuple[Tensor, Tensor]:
        """out [B, rows, Hq, D] in q's type, lse [B, rows, Hq] laid out like Partial.lse, of one piece."""
        q, k, v = (_heads_first(x) for x in (q[:, piece.rows], k[:, piece.keys], v[:, piece.keys]))
        out, lse = self.attend(q, k, v, piece.is_causal, score.factor)
        lse = lse.to(accumulate_dtype(q.dtype)).contiguous()
        return rearrange(out, "B H S D -> B S H D"), rearrange(lse, "B H S -> B S H")

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
            for piece in _pieces(bounds):
                dq_p, dk_p, dv_p = self._gradients(q, k, v, rows, piece, score)
                dq[:, piece.rows] += dq_p
                dk[:, piece.keys] += dk_p
                dv[:, piece.keys] += dv_p

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, bounds: Bounds, score: Score, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the vendor's kernel returns them where it is called once, without a pass to add or to round."""
        whole = _whole(bounds)
        if whole is None:
            return super().gradients(q, k, v, rows, bounds, score, deterministic)
        return self._gradients(q, k, v, rows, whole, score)

    def _gradients(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, piece: Piece, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of one piece, [B, S, H, D] in q's type."""
        assert not rows.has_dlse, "refuses() comes first"
        q, k, v = (_heads_first(x) for x in (q[:, piece.rows], k[:, piece.keys], v[:, piece.keys]))
        dout, out = (_heads_first(x[:, piece.rows]) for x in (rows.dout, rows.out))
        lse = rearrange(rows.lse[:, piece.rows], "B S H -> B H S").contiguous()
        shares = self.attend_backward(q, k, v, dout, out, lse, piece.is_causal, score.factor)
        dq, dk, dv = (rearrange(x, "B H S D -> B S H D") for x in shares)
        return dq, dk, dv


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


def _whole(bounds: Bounds) -> Piece | None:
    """The one piece that all rows and keys are, where they are."""
    found = list(_pieces(bounds))
    is_whole = len(found) == 1 and (found[0].rows, found[0].keys) == (slice(0, bounds.rows), slice(0, bounds.columns))
    return found[0] if is_whole else None


def _heads_first(x: Tensor) -> Tensor:
    """[B, H, S, D] of [B, S, H, D], in memory that copy engines can read: whole 16 bytes apart, no axis of stride 0."""
    quantum = 16 // x.element_size()
    is_aligned = x.data_ptr() % 16 == 0 and all(
        stride > 0 and stride % quantum == 0
        for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)
        if size > 1
    )
    if not is_aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    return rearrange(x, "B S H D -> B H S D")


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """With as many heads as q, for kernels that know no groups."""
    return repeat(x, "B Hk S D -> B (Hk group) S D", group=heads // x.shape[1])


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x with the strides that torch gives the output of queries q.

    torch looks up cuDNN's plans by the strides of q, k and v alone, and those of out and dout are part of a plan.
    """
    like = torch.empty_like(q)
    return x if x.stride() == like.stride() else like.copy_(x)


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
        out, dout = (_laid_out_like(q, x) for x in (out, dout))
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
            k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
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
            Hk = k.shape[1]
            k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
            dq, *shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
            )
            dk, dv = (reduce(x, "B (Hk group) S D -> B Hk S D", "sum", Hk=Hk) for x in shares)
            return dq, dk, dv
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal,
            no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashAttention4(Vendor):
    """FlashAttention-4 where the package flash-attn-4 is installed; it compiles each kind of call on first use."""

    name = "fa4"

    def refuses(self, call: Call) -> str | None:
        if (reason := super().refuses(call)) is not None:
            return reason
        return _lacks_flash_attention_4() or self.refuses_device(call.device)

    def refuses_device(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return f"device {device} is not a GPU that is here"
        if torch.cuda.get_device_capability(device)[0] < 9:
            return f"{torch.cuda.get_device_name(device)} is older than Hopper"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        inputs = (rearrange(x, "B H S D -> B S H D") for x in (q, k, v))
        with _on(q), torch.no_grad():
            out, lse = _flash_attention_4().flash_attn_func(
                *inputs, softmax_scale=scale, causal=is_causal, return_lse=True
            )
        return rearrange(out, "B S H D -> B H S D"), lse

    def attend_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, dout = (rearrange(x, "B H S D -> B S H D") for x in (q, k, v, out, dout))
        with _on(q):
            shares = _flash_attention_4()._flash_attn_bwd(
                q, k, v, out, dout, lse, softmax_scale=scale, causal=is_causal
            )
        dq, dk, dv = (rearrange(x, "B S H D -> B H S D") for x in shares)
        return dq, dk, dv


def _flash_attention_4() -> Any:
    from flash_attn.cute import interface

    return interface


@lru_cache(maxsize=1)
def _lacks_flash_attention_4() -> str | None:
    """Why it cannot be called here. What it needs (CUTLASS, a CUDA driver) may be missing or of another version."""
    try:
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if version not in FLASH_ATTENTION_4:
        return f"flash-attn-4 {version} is not one of {', '.join(FLASH_ATTENTION_4)}, whose entry for backward is known"
    try:
        _flash_attention_4()
    except (ImportError, AttributeError, OSError) as error:
        return f"flash-attn-4 cannot be imported: {error}"
    return None


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """It launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def backends() -> dict[str, Backend]:
    """What this module offers to `choose`."""
    return {"cudnn": CuDNN(), "flash": Flash(), "fa4": FlashAttention4()}
