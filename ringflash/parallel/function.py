"""The one autograd.Function: forward and backward of attention over a stream of shards.

There is no case for any mask, layout or transport here: the plan says which pairs, the backend computes them, the
transport brings and takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.backend import Backend, Rows, Score
from ringflash.kernels.partial import Partial, accumulate_dtype, delta
from ringflash.parallel.transport import Shapes, Transport
from ringflash.schedule.plan import Plan


@dataclass(frozen=True)
class Work:
    """Everything of one call that is not a tensor."""

    plan: Plan
    score: Score
    backend: Backend
    transport: Transport
    deterministic: bool


def forward_pass(q: Tensor, k: Tensor, v: Tensor, work: Work) -> Partial:
    """Attention of the local queries over the whole sequence, in the accumulate type; see Partial for shapes."""
    passage = work.transport.stream((k, v), _shapes_of(k, v, work.plan), work.plan.hops)
    partial: Partial | None = None
    for source, (k_s, v_s) in passage:
        bounds = work.plan[source]
        if not bounds.is_empty:
            partial = work.backend.forward(q, k_s, v_s, bounds, work.score, into=partial)
    return partial or Partial.empty(q, v.shape[-1])


def backward_pass(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, work: Work
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local tensors in the accumulate type. Keys travel; dk and dv follow them and come home."""
    passage = work.transport.stream((k, v), _shapes_of(k, v, work.plan), work.plan.hops, returning=True)
    rows = Rows(out, dout, lse, delta(out, dout, dlse), has_dlse=dlse is not None)
    dq = q.new_zeros(q.shape, dtype=accumulate_dtype(q.dtype))
    for source, (k_s, v_s) in passage:
        bounds = work.plan[source]
        if not bounds.is_empty:
            dk_s, dv_s = passage.gradients()
            work.backend.backward(q, k_s, v_s, rows, bounds, work.score, dq, dk_s, dv_s, work.deterministic)
    dk, dv = passage.collect()
    return dq, dk, dv


def _shapes_of(k: Tensor, v: Tensor, plan: Plan) -> Any:
    def shapes_of(source: int) -> Shapes:
        Sk = plan.shard_length(source)
        return Shapes(((k.shape[0], Sk, *k.shape[2:]), (v.shape[0], Sk, *v.shape[2:])))

    return shapes_of


class RingAttentionFunction(torch.autograd.Function):
    """(q, k, v) -> (out in q's type, lse in the accumulate type), both differentiable, once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        partial = forward_pass(q, k, v, work)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse)
        ctx.work = work
        ctx.set_materialize_grads(False)
        return out, partial.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            # All three are always computed: which inputs are frozen may differ by rank, and gradients must still travel.
            dense_dout = torch.zeros_like(out) if dout is None else last_stride_one(dout)
            gradients = backward_pass(q, k, v, out, lse, dense_dout, dlse, ctx.work)
            rounded = [
                gradient.to(x.dtype) if needed else None
                for gradient, x, needed in zip(gradients, (q, k, v), ctx.needs_input_grad, strict=False)
            ]
        if torch.is_grad_enabled():  # create_graph=True
            rounded = [None if x is None else _DifferentiatedOnce.apply(x, q, k, v, dout, dlse) for x in rounded]
        return (*rounded, None)


class _DifferentiatedOnce(torch.autograd.Function):
    """A gradient that is an error to differentiate again.

    torch's once_differentiable raises only where the incoming gradient requires grad: under a plain sum of the outputs
    it would let a gradient penalty count for nothing, in silence.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            "attention: its gradients cannot be differentiated again; call it without create_graph"
        )


def last_stride_one(x: Tensor) -> Tensor:
    """Kernels and messages read rows of one token and head as they lie; a transposed head dim is copied once, here."""
    return x if x.stride(-1) == 1 else x.contiguous()
