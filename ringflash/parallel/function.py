"""The one autograd.Function: forward and backward of attention over a stream of shards.

There is no case for any mask, layout or transport here: the plan says which pairs, the backend computes them, the
transport brings and takes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ringflash.kernels.backend import Backend, Lands, Rows
from ringflash.kernels.partial import Partial, accumulate_dtype, heads_first, sinks_gradient
from ringflash.kernels.score import Score
from ringflash.parallel.kept import kept
from ringflash.parallel.transport import Passage, Returning, Transport
from ringflash.schedule.landing import Landing
from ringflash.schedule.plan import Plan

Route = Literal["keys", "queries"]


@dataclass(frozen=True)
class Work:
    """Everything of one call that is not a tensor.

    plans: one for a mask of intervals, one per part for a union; no two show the same pair.
    route: what travels in backward. "keys": K and V visit the queries, and their gradients follow. "queries": queries and
        the gradient of out visit the keys, and dq follows, while K, V and their gradients stay at home.
    gradient_dtype: what travelling sums of gradients are rounded to on the wire; None does not round them.
    """

    plans: tuple[Plan, ...]
    score: Score
    forward: Backend
    backward: Backend
    transport: Transport
    deterministic: bool
    route: Route = "keys"
    gradient_dtype: torch.dtype | None = None


def forward_pass(q: Tensor, k: Tensor, v: Tensor, work: Work) -> Partial:
    """Attention of the local queries over the whole sequence, in the accumulate type; see Partial for shapes."""
    partial: Partial | None = None
    # Sinks are merged after the last keys, and need what is there unrounded.
    final = work.plans[-1] if work.score.sinks is None else None
    for plan in work.plans:
        passage = keys_come(k, v, plan, work)
        arriving = {} if passage.arrivals is None else {"arrivals": passage.arrivals}
        for source, rows, (k_s, v_s) in passage:
            is_last, bounds = plan is final and source in (plan.last, None), plan.part(source, rows)
            partial = work.forward.forward(q, k_s, v_s, bounds, work.score, into=partial, is_last=is_last, **arriving)
    return partial or Partial.empty(q, v.shape[-1])


def keys_come(k: Tensor, v: Tensor, plan: Plan, work: Work) -> Passage:
    """In one piece where the transport, the backend and the plan allow it, which a launch of one kernel is enough for."""
    if work.forward.waits and _lands((k, v), plan.landing, work):
        return work.transport.landed((k, v), plan.landing)
    return work.transport.stream((k, v), plan.needs)


def landing_of(passage: Passage, travels: Route) -> dict[str, Any]:
    """What backward of a backend that waits is told besides."""
    if passage.arrivals is None or passage.departures is None:
        return {}
    return {"lands": Lands(travels, passage.arrivals, passage.departures)}


def _lands(shard: tuple[Tensor, ...], landing: Landing, work: Work) -> bool:
    row_bytes = sum(x.itemsize * x.shape[0] * prod(x.shape[2:]) for x in shard)
    return landing.needs.hops > 0 and work.transport.lands(shard[0].device) and landing.fits(row_bytes)


def _lands_backward(shard: tuple[Tensor, ...], landing: Landing, q: Tensor, v: Tensor, work: Work) -> bool:
    """What lands is taken whole, so of one plan, in any order, and its gradients go home as they are."""
    is_plain = len(work.plans) == 1 and not work.deterministic
    is_exact = work.gradient_dtype in (None, accumulate_dtype(q.dtype))
    return (
        is_plain and is_exact and work.backward.lands_backward(q.shape[3], v.shape[3]) and _lands(shard, landing, work)
    )


def backward_pass(q: Tensor, k: Tensor, v: Tensor, rows: Rows, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local tensors, unrounded where anything travels."""
    if len(work.plans) == 1 and work.plans[0].is_local:
        # Nothing to add up, so gradients are written once, rounded, without a pass to clear or to round them.
        (plan,) = work.plans
        return work.backward.gradients(q, k, v, rows, plan[plan.rank], work.score, work.deterministic)
    return (keys_travel if work.route == "keys" else queries_travel)(q, k, v, rows, work)


def keys_travel(q: Tensor, k: Tensor, v: Tensor, rows: Rows, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """K and V visit the ranks that see them; dk and dv follow and come home."""
    dq = q.new_zeros(q.shape, dtype=accumulate_dtype(q.dtype))
    sums: tuple[Tensor, ...] | None = None
    for plan in work.plans:
        returning = Returning(2, work.gradient_dtype, whole_tiles(plan.early), KEY_HEADS_TOGETHER)
        if _lands_backward((k, v), plan.landing_upwards, q, v, work):
            passage = work.transport.landed((k, v), plan.landing_upwards, returning)
        else:
            passage = work.transport.stream((k, v), plan.needs, returning)
        for source, keys, (k_s, v_s) in passage:
            dk_s, dv_s = passage.gradients()
            bounds = plan.part(source, keys)
            work.backward.backward(
                q, k_s, v_s, rows, bounds, work.score, dq, dk_s, dv_s, work.deterministic, **landing_of(passage, "keys")
            )
        home = passage.collect(_dtype_of_sums(k, work))
        sums = home if sums is None else tuple(a.add_(b) for a, b in zip(sums, home, strict=True))
    assert sums is not None, "a call has at least one plan"
    dk, dv = sums
    return dq, dk, dv


def queries_travel(q: Tensor, k: Tensor, v: Tensor, rows: Rows, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """q, dout and the row statistics visit the ranks whose keys they see; dq follows and comes home."""
    if _lands_backward((q, rows.dout, rows.lse, rows.delta), work.plans[0].turned.landing, q, v, work):
        return _queries_land(q, k, v, rows, work)
    dk, dv = (x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) for x in (k, v))
    dq: Tensor | None = None
    statistics = packed(rows.lse, rows.delta, q.dtype)
    for plan in work.plans:
        shard, needs = (q, rows.dout, statistics), plan.turned.needs
        passage = work.transport.stream(shard, needs, Returning(1, work.gradient_dtype, whole_tiles(plan.turned.early)))
        for source, queries, (q_s, dout_s, statistics_s) in passage:
            assert source is not None, "queries come shard by shard"
            (dq_s,) = passage.gradients()
            lse_s, delta_s = unpacked(statistics_s, rows.lse.dtype)
            here = plan.turned.keys(source)
            # No out: a backend that reads it cannot take this route.
            rows_s = Rows(dout_s, dout_s, lse_s, delta_s, rows.has_dlse)
            work.backward.backward(
                q_s, k[:, here], v[:, here], rows_s, plan.turned.part(source, queries), work.score,
                dq_s, dk[:, here], dv[:, here], work.deterministic,
            )  # fmt: skip
        (home,) = passage.collect(_dtype_of_sums(q, work))
        dq = home if dq is None else dq.add_(home)
    assert dq is not None, "a call has at least one plan"
    return dq, dk, dv


def _queries_land(q: Tensor, k: Tensor, v: Tensor, rows: Rows, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """In one piece: every key is visited once, so dk and dv are written once, rounded."""
    (plan,) = work.plans
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    shard, landing = (q, rows.dout, rows.lse, rows.delta), plan.turned.landing
    together = QUERY_HEADS_TOGETHER * q.shape[2] // k.shape[2]
    passage = work.transport.landed(shard, landing, Returning(1, heads=together))
    for _, _, (q_l, dout_l, lse_l, delta_l) in passage:
        (dq_l,) = passage.gradients()
        rows_l = Rows(dout_l, dout_l, lse_l, delta_l, rows.has_dlse)
        work.backward.backward(
            q_l,
            k,
            v,
            rows_l,
            landing.bounds,
            work.score,
            dq_l,
            dk,
            dv,
            work.deterministic,
            **landing_of(passage, "queries"),
        )
    (dq,) = passage.collect(q.dtype)
    return dq, dk, dv


def _dtype_of_sums(x: Tensor, work: Work) -> torch.dtype | None:
    """Sums of several plans are still to be added to each other."""
    return x.dtype if len(work.plans) == 1 else None


# Key heads that kernels take together, whose gradients, or those of the query heads that share them, leave together. The way
# home of the last ones is not hidden, but many balance better. Efficiency of forward with backward on two H200s, 2, 4 and 8:
# queries travel, 16:16, 8k 0.76, 0.79, 0.80, 16k 0.90, 0.91, 0.91; keys travel, 64:8, 8k 0.98, 0.97, 0.82.
KEY_HEADS_TOGETHER = 2
QUERY_HEADS_TOGETHER = 4
TILE = 128  # rows or keys of the largest tiles of any backend


def whole_tiles(rows: int) -> int | None:
    """As many rows in whole tiles: none is cut in two. None where there is not one."""
    return rows // TILE * TILE or None


def packed(lse: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """lse and delta [B, S, H] side by side, bit for bit as numbers of q's type [B, S, H, n], in whose message they go."""
    return torch.stack((lse, delta), dim=-1).view(dtype)


def unpacked(statistics: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What was packed, each laid out as kernels read row statistics."""
    # In memory of its own, which begins where a number of that type may.
    lse, delta = statistics.clone(memory_format=torch.contiguous_format).view(dtype).unbind(-1)
    return heads_first(lse), heads_first(delta)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Work) -> tuple[Tensor, Tensor]:
    """(out in q's type, lse in the accumulate type); what a checkpoint around it has kept, where it runs again."""
    results = kept()
    before = None if results is None else results.found(q)
    if before is not None:
        return before
    with _as_given(q):
        partial = forward_pass(q, k, v, work)
        if sinks is not None:
            partial.add_sinks(sinks)
    out, lse = partial.out.to(q.dtype), partial.lse
    if results is not None:
        results.keep(out, lse)
    return out, lse


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    work: Work,
) -> list[Tensor | None]:
    """Of q, k, v and sinks, those that are no None, unrounded where anything travels.

    All are computed: which inputs are frozen may differ by rank, and gradients must still travel.
    """
    q, k, v, sinks = inputs
    with torch.no_grad(), _as_given(q):
        dense_dout = torch.zeros_like(out) if dout is None else last_stride_one(dout)
        is_read = work.backward.reads_delta or sinks is not None
        delta = work.backward.delta(out, dense_dout, dlse) if is_read else lse.new_empty(0)
        rows = Rows(out, dense_dout, lse, delta, has_dlse=dlse is not None)
        found: list[Tensor | None] = [*backward_pass(q, k, v, rows, work)]
        return [*found, None if sinks is None else sinks_gradient(sinks, lse, delta)]


class RingAttentionFunction(torch.autograd.Function):
    """(q, k, v, sinks or None) -> (out in q's type, lse in the accumulate type), both differentiable, once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Work) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, sinks, work)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.work = work
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        found = gradients(tuple(inputs), out, lse, dout, dlse, ctx.work)
        with torch.no_grad():
            rounded = [
                gradient.to(x.dtype) if needed and gradient is not None else None
                for gradient, x, needed in zip(found, inputs, ctx.needs_input_grad, strict=False)
            ]
        if torch.is_grad_enabled():  # create_graph=True
            rounded = [
                None if x is None else DifferentiatedOnce.apply(x, "attention", *inputs, dout, dlse) for x in rounded
            ]
        return (*rounded, None)


def _as_given(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Types are what the caller chose: autocast would round the fp32 products inside."""
    if not torch.is_autocast_enabled(q.device.type):
        return contextlib.nullcontext()
    return torch.autocast(q.device.type, enabled=False)


class DifferentiatedOnce(torch.autograd.Function):
    """A gradient of `caller` that is an error to differentiate again.

    torch's once_differentiable raises only where the incoming gradient requires grad: under a plain sum of the outputs
    it would let a gradient penalty count for nothing, in silence.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, caller: str, *depends_on: Tensor | None) -> Tensor:
        ctx.caller = caller
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            f"{ctx.caller}: its gradients cannot be differentiated again; call it without create_graph"
        )


def last_stride_one(x: Tensor) -> Tensor:
    """Kernels and messages read rows of one token and head as they lie; a transposed head dim is copied once, here."""
    return x if x.stride(-1) == 1 else x.contiguous()
