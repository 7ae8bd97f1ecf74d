"""The Triton backend: check what it can serve, derive flags from arguments, launch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ringflash.kernels.backend import Backend, Call, Rows
from ringflash.kernels.partial import Partial, row_statistic
from ringflash.kernels.score import Score
from ringflash.kernels.triton import backward, forward
from ringflash.kernels.triton.launcher import launcher
from ringflash.kernels.triton.tuning import (
    FORWARD,
    KEY_GRADIENT,
    QUERY_GRADIENT,
    Tiles,
    padded,
    tiles,
    two_passes_are_faster,
)
from ringflash.schedule.tiles import Bounds

forward_kernel = launcher(forward.forward_kernel)
delta_kernel = launcher(backward.delta_kernel)
key_gradient_kernel = launcher(backward.key_gradient_kernel)
query_gradient_kernel = launcher(backward.query_gradient_kernel)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What tiles are for where there is no device to ask: under the interpreter, which runs on the CPU.
INTERPRETED_CAPABILITY = 80
# Rows of one head whose delta a program forms: memory-bound, so only large enough for wide loads.
DELTA_ROWS = 64


class Triton(Backend):
    name = "triton"

    def refuses(self, call: Call) -> str | None:
        is_interpreted = isinstance(forward_kernel, InterpretedFunction)
        if call.device.type != "cuda" and not is_interpreted:
            return f"device {call.device} is not a GPU (and Triton's interpreter is off)"
        if is_interpreted and call.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 as if it were integers"
        if call.dtype not in DTYPES:
            return f"dtype {call.dtype} is not one of float16, bfloat16, float32"
        for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
            if dim > 256:
                return f"{name} {dim} is more than 256"
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
        B, Sq, Hq, D = q.shape
        Hk, Dv = v.shape[2:]
        if bounds.columns == 0:
            return Partial.empty(q, Dv) if into is None else into
        partial = Partial.unset(q, Dv, rounded=is_last) if into is None else into
        assert _is_laid_out(partial.lse), "row statistics lie as row_statistic() makes them"
        before = partial.out
        if is_last and into is not None:
            partial = Partial(q.new_empty(B, Sq, Hq, Dv), partial.lse)
        block = tiles(FORWARD, max(D, Dv), q.dtype, _capability(q))
        lo, hi = bounds.to(q.device)
        terms = Terms.of(score, bounds, q.device)
        with _on(q):
            forward_kernel[(triton.cdiv(Sq, block.block_q), Hq, B)](
                q, k, v, lo, hi, before, partial.out, partial.lse, *terms.tensors, *_strides(q, k, v), batch_stride(lo),
                Sq, Hq, Hq // Hk, *terms.numbers, INTO=into is not None, IS_LAST=is_last,
                IS_CAUSAL=bounds.shape == "causal",
                **_constants(q, v, block), **terms.flags,
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
    ) -> None:
        B, Sq, Hq, D = q.shape
        Sk, Hk, Dv = v.shape[1:]
        if bounds.columns == 0:
            return
        dim, capability = max(D, Dv), _capability(q)
        block = tiles(KEY_GRADIENT, dim, q.dtype, capability)
        lo, hi = bounds.columns_to(q.device)
        terms = Terms.of(score, bounds, q.device)
        two_passes = deterministic or two_passes_are_faster(q.dtype, capability)
        # What atomics add up must start at zero, in fp32.
        total = q.new_zeros(q.shape, dtype=torch.float32) if is_all and not two_passes else dq
        strides = _strides(q, k, v, rows.dout)
        assert _is_laid_out(rows.lse) and _is_laid_out(rows.delta), "row statistics lie as row_statistic() makes them"
        with _on(q):
            key_gradient_kernel[(triton.cdiv(Sk, block.block_k), Hk, B)](
                q, k, v, rows.dout, rows.lse, rows.delta, lo, hi, total, dk, dv, *terms.tensors, *strides,
                total.stride(0), dk.stride(0), dv.stride(0), batch_stride(lo), Sq, Sk, Hq, Hk, *terms.numbers,
                ADD_DQ=not two_passes, STORE=is_all, IS_CAUSAL=bounds.shape == "causal",
                **_constants(q, v, block), **terms.flags,
            )  # fmt: skip
            if two_passes:
                block = tiles(QUERY_GRADIENT, dim, q.dtype, capability)
                lo, hi = bounds.to(q.device)
                query_gradient_kernel[(triton.cdiv(Sq, block.block_q), Hq, B)](
                    q, k, v, rows.dout, rows.lse, rows.delta, lo, hi, dq, *terms.tensors, *strides, dq.stride(0),
                    batch_stride(lo), Sq, Hq, Hq // Hk, *terms.numbers, STORE=is_all, IS_CAUSAL=bounds.shape == "causal",
                    **_constants(q, v, block), **terms.flags,
                )  # fmt: skip
        if total is not dq:
            dq.copy_(total)

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        B, Sq, Hq, Dv = out.shape
        total = row_statistic(out, torch.float32)
        if out.numel():
            with _on(out):
                delta_kernel[(triton.cdiv(Sq, DELTA_ROWS), Hq, B)](
                    out, dout, total, *_strides(out, dout), Sq, Hq,
                    VALUE_DIM=Dv, BLOCK_Q=DELTA_ROWS, BLOCK_DV=padded(Dv), num_warps=4,
                )  # fmt: skip
        return total if dlse is None else total.sub_(dlse)


@dataclass(frozen=True)
class Terms:
    """What a score asks of the kernels.

    tensors: slopes, rows_at, keys_at, None where not asked for. numbers: scale, softcap, seed, threshold, keep_scale.
    """

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None]
    numbers: tuple[float, float, int, int, float]
    flags: dict[str, bool]

    @classmethod
    def of(cls, score: Score, bounds: Bounds, device: torch.device) -> Terms:
        slopes = None if score.alibi is None else _slopes(score.alibi, device)
        positions = bounds.positions_to(device) if score.terms & {"alibi", "dropout"} else (None, None)
        return cls(
            (slopes, *positions),
            (score.factor, score.softcap or 0.0, score.seed or 0, score.threshold, 1 / (1 - score.dropout)),
            {
                "HAS_SOFTCAP": score.softcap is not None,
                "HAS_ALIBI": score.alibi is not None,
                "HAS_DROPOUT": score.dropout > 0,
            },
        )


@lru_cache(maxsize=64)
def _slopes(alibi: tuple[float, ...], device: torch.device) -> Tensor:
    """One copy per device, made before any stream but the current one knows it: the host waits for it, once."""
    return torch.tensor(alibi, dtype=torch.float32, device=device)


def _constants(q: Tensor, v: Tensor, block: Tiles) -> dict[str, Any]:
    D, Dv = q.shape[-1], v.shape[-1]
    return {
        "HEAD_DIM": D,
        "VALUE_DIM": Dv,
        "BLOCK_Q": block.block_q,
        "BLOCK_K": block.block_k,
        "BLOCK_D": padded(D),
        "BLOCK_DV": padded(Dv),
        "PRECISION": _precision(q),
        "num_warps": block.num_warps,
        "num_stages": block.num_stages,
    }


def _precision(q: Tensor) -> str:
    """How fp32 products are formed; other types ignore it.

    Plain tf32 keeps 10 bits of the inputs. Six products of bf16 thirds keep all 24, on the tensor cores still.
    """
    if q.device.type != "cuda":
        return "ieee"  # the interpreter's products are exact, and it knows fewer names
    return "bf16x6" if q.dtype == torch.float32 else "tf32"


def _strides(*tensors: Tensor) -> list[int]:
    """Batch, token and head strides of each; the last stride is one by the contract."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _is_laid_out(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


def batch_stride(lo: Tensor) -> int:
    """Of bounds: 0 where all batch rows share them."""
    return lo.stride(0) if lo.shape[0] > 1 else 0


def _capability(x: Tensor) -> int:
    if x.device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def backends() -> dict[str, Backend]:
    """What this module offers to `choose`."""
    return {"triton": Triton()}
