"""attention(): check the arguments, plan, and call the one Function."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.kernels.score import Score
from ringflash.kernels.table import KernelTable
from ringflash.operator import as_operator
from ringflash.parallel.function import RingAttentionFunction, Route, last_stride_one
from ringflash.resolved import check_tensors, check_transforms, prepared
from ringflash.ring import Ring
from ringflash.schedule.integers import integer
from ringflash.schedule.mask import Mask, Union
from ringflash.schedule.traced import sees_operators_only


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring | None = None,
    mask: Mask | Union | None = None,
    scale: float | None = None,
    score: Score | None = None,
    length: int | None = None,
    query_length: int | None = None,
    backend: str | KernelTable | None = None,
    deterministic: bool | None = None,
    route: Route | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q k^T) v, of a sequence that lies on one device or is cut across a ring.

    q: [B, Sq, Hq, D]; k: [B, Sk, Hk, D]; v: [B, Sk, Hk, Dv]. fp16, bf16, fp32 or fp64, all alike, on one device. Hq is a
        multiple of Hk, and query head h uses key head h // (Hq // Hk). With a ring these are this rank's shards, as
        Ring.shard cuts them.
    ring: the ranks that share the sequence; None is this device alone.
    mask: which keys a query sees; None is Full(), which is not causal. Where q and k are of different lengths the last
        query stands at the last key.
    scale: factor of the scores, None is D**-0.5; or score: a Score with all that is done to the scores, not both.
    length: tokens of the whole sequence; None is that of the layout or mask where they know it, else ranks times the
        local length.
    query_length: tokens of the whole sequence of queries, where it is another one (cross attention); None is `length`
        where q and k hold equally many tokens here, else ranks times the local length.
    backend: "hopper", "triton", "cudnn", "flash", "fa4" or "reference" insists on that one. None takes the one that can
        serve the call and was measured to be the fastest on such a GPU, which may be one for forward and another for
        backward; a KernelTable does so by measurements of your own.
    deterministic: the same bits on every run, at some cost in backward; None follows
        torch.are_deterministic_algorithms_enabled().
    route: what travels in backward: "keys", K and V and the sums of their gradients, or "queries", q, the gradient of out
        and the sums of dq, while K and V stay at home. None takes what moves fewer bytes around the ring: queries where
        there are as many key heads. Forward moves K and V.

    Returns out [B, Sq, Hq, Dv] in q's type, and with return_lse also lse [B, Sq, Hq], the natural log of the sum of
    exp(scores), fp32 (fp64 for fp64 inputs), -inf for a row that sees no key, whose out is 0. Both are differentiable,
    once. Sums and travelling gradients are kept in lse's type and rounded once, at the end.

    On a ring every rank makes the same calls in the same order, and runs the backward of each or of none: a rank that
    leaves one out makes the others wait until the process group times out.

    Raises TypeError for wrong types and ValueError for wrong values before anything is sent, NotImplementedError where
    no backend, or not the one named, can serve the call.

    Source: Liu et al., arXiv:2310.01889 (ring); Dao, arXiv:2307.08691 (local kernels).
    """
    is_operator = sees_operators_only()
    if not is_operator:
        check_tensors(q, k, v)
        check_transforms(q, k, v)
    sinks = score.sinks if isinstance(score, Score) else None
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks) if x is not None)
    is_repeatable = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    # As numbers: what is kept by settings must not change with a tensor.
    N, M = (
        None if n is None else integer(f"attention: {name}", n)
        for name, n in (("length", length), ("query_length", query_length))
    )
    switches = (is_repeatable, route, return_lse, is_trained)
    if is_operator:
        out, lse = as_operator(q, k, v, ring, mask, scale, score, N, M, backend, *switches)
    else:
        work = prepared(q, k, v, ring, (mask, scale, score, N, M, backend, *switches))
        out, lse = RingAttentionFunction.apply(*(last_stride_one(x) for x in (q, k, v)), sinks, work)
    return (out, lse) if return_lse else out
