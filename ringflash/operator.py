"""attention() as one operator of torch: torch.ops.ringflash.attention, and its gradient another.

For compiled code, and for modes that watch operators. What the arguments mean is found when the operator runs, as it is
without; whoever traces it knows shapes, and nothing else. So a new ring, packed batch, length or seed compiles nothing anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype, row_statistic
from ringflash.kernels.score import Score
from ringflash.kernels.table import Cell, KernelTable
from ringflash.parallel.function import Route, attend, gradients, last_stride_one
from ringflash.parallel.inprocess import Alone
from ringflash.resolved import check_tensors, one_score, prepared, resolved
from ringflash.ring import Ring
from ringflash.schedule.mask import Full, Mask, Union
from ringflash.schedule.traced import CAN_TRACE, Traced, constant

# Operators have no optional arguments of these types: what stands for None.
NO_RING = Ring(transport=Alone())
NO_TABLE = KernelTable("none", {Cell("forward", 64, "full", 1024): {"reference": 1.0}}, {})


@constant()
@dataclass(frozen=True)
class Settings(metaclass=Traced):
    """Arguments of attention() that compiled code holds as constants."""

    backend: str | None
    deterministic: bool
    route: Route | None
    return_lse: bool
    is_trained: bool


def as_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring | None,
    mask: Mask | Union | None,
    scale: float | None,
    score: Score | None,
    length: int | None,
    query_length: int | None,
    backend: str | KernelTable | None,
    *switches: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as RingAttentionFunction gives them. switches: the last four of Settings."""
    if not CAN_TRACE:
        raise NotImplementedError(
            f"attention: torch {torch.__version__} has no operators that take a Ring and a Mask; call attention in a "
            "function under torch.compiler.disable"
        )
    mask, score = Full() if mask is None else mask, one_score("attention", scale, score)
    # A tracer's stand-in for a table is no KernelTable.
    table, name = (NO_TABLE, backend) if backend is None or isinstance(backend, str) else (backend, None)
    return _attention(
        q, k, v, score.sinks, NO_RING if ring is None else ring, mask, table, Settings(name, *switches), length,
        query_length, score.scale, score.softcap, None if score.alibi is None else list(score.alibi), score.dropout,
        score.seed,
    )  # fmt: skip


def _meaning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: Ring,
    mask: Mask,
    table: KernelTable,
    settings: Settings,
    length: int | None,
    query_length: int | None,
    scale: float | None,
    softcap: float | None,
    alibi: Sequence[float] | None,
    dropout: float,
    seed: int | None,
) -> tuple[Any, ...]:
    """The arguments of `prepared` and `resolved`."""
    check_tensors(q, k, v)
    score = Score(scale, softcap, None if alibi is None else tuple(alibi), sinks, dropout, seed)
    backend = settings.backend if table is NO_TABLE else table
    switches = (settings.deterministic, settings.route, settings.return_lse, settings.is_trained)
    said = (mask, None, score, length, query_length, backend, *switches)
    return q, k, v, None if ring is NO_RING else ring, said


@torch.library.custom_op("ringflash::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: Ring,
    mask: Mask,
    table: KernelTable,
    settings: Settings,
    length: int | None,
    query_length: int | None,
    scale: float | None,
    softcap: float | None,
    alibi: Sequence[float] | None,
    dropout: float,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    numbers = (length, query_length, scale, softcap, alibi, dropout, seed)
    work = prepared(*_meaning(q, k, v, sinks, ring, mask, table, settings, *numbers))
    q, k, v = (last_stride_one(x) for x in (q, k, v))
    out, lse = attend(q, k, v, sinks, work)
    return out.contiguous(), lse


@_attention.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), row_statistic(q, accumulate_dtype(q.dtype))


@torch.library.custom_op("ringflash::attention_backward", mutates_args=())
def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: Ring,
    mask: Mask,
    table: KernelTable,
    settings: Settings,
    length: int | None,
    query_length: int | None,
    scale: float | None,
    softcap: float | None,
    alibi: Sequence[float] | None,
    dropout: float,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = (length, query_length, scale, softcap, alibi, dropout, seed)
    # What forward has found, and its ranks agreed on.
    work, _ = resolved(*_meaning(q, k, v, sinks, ring, mask, table, settings, *numbers))
    q, k, v = (last_stride_one(x) for x in (q, k, v))
    found = gradients((q, k, v, sinks), out, lse, dout, dlse, work)
    inputs = (q, k, v, q.new_empty(0) if sinks is None else sinks)
    dq, dk, dv, dsinks = (x if dx is None else dx.to(x.dtype) for x, dx in zip(inputs, found, strict=True))
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


@_backward.register_fake
def _gradient_shapes(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *_: Any
) -> Any:
    return (*(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *ctx.settings = inputs
    ctx.save_for_backward(*output, q, k, v, sinks)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, dsinks = _backward(dout, dlse, *saved, *ctx.settings)
    return (dq, dk, dv, None if saved[-1] is None else dsinks, *(None for _ in ctx.settings))


_attention.register_autograd(_gradients, setup_context=_keep)
