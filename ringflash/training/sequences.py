"""Sums over each sequence when its tokens lie on several ranks: what preference losses compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.ring import Ring
from ringflash.schedule.documents import Documents
from ringflash.training.loss import sum_over_ranks


def sequence_sums(values: Tensor, documents: Documents, ring: Ring) -> Tensor:
    """Add up a value per token over each document, whichever ranks hold its tokens; the same sums on every rank.

        sums[b, d] = sum of values[b, t] over the tokens t of document d, on all ranks

    values: [B, S_local], floating point, cut by Ring.shard, such as log-probabilities; 0 where a token does not count
        (prompt tokens, or ignored labels of `linear_cross_entropy`).
    documents: the packed documents, as for attention, alike in all batch rows or not; Documents([S]) where each row is one
        sequence. Padding is left out.

    Returns [B, documents], as many as the row with most has, in fp32 (fp64 for fp64).
    Differentiable: each rank computes the SAME loss from the
    sums, and its values get the gradient that they would have in one process. Weight gradients of the ring's ranks are
    then summed; under DDP or FSDP2, which average, call backward on loss * ring.ranks.

    Errors: TypeError for values that are no floating point tensor, ValueError for a shape that does not fit; on every
    rank the same ValueError where documents differ among the ranks. One exchange of B * documents numbers.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"sequence_sums: values is {kind}; must be a floating point tensor")
    if not isinstance(documents, Documents):
        raise TypeError(f"sequence_sums: documents is {type(documents).__name__}; must be a Documents mask")
    if not isinstance(ring, Ring):
        raise TypeError(f"sequence_sums: ring is {type(ring).__name__}; must be a Ring")
    if values.dim() != 2:
        raise ValueError(f"sequence_sums: values has shape {tuple(values.shape)}; must be [B, S_local]")
    B, S_local = values.shape
    N = ring.whole_length("sequence_sums", S_local, documents.length, "documents.length")
    if documents.batch not in (None, B):
        raise ValueError(f"sequence_sums: documents has {documents.batch} batch rows, values has {B}")
    facts = {"documents": documents.fingerprint, "batch": B, "dtype": str(values.dtype)}
    ring.agree("sequence_sums", facts)

    document = documents.index(ring.positions(N)).to(values.device).expand(B, -1)
    local = values.new_zeros(B, documents.most + 1, dtype=accumulate_dtype(values.dtype))  # the last one is padding's
    local = local.scatter_add(1, document, values.to(local.dtype))
    sums: Tensor = _SumOverRanks.apply(local[:, :-1], ring)
    return sums


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ring. Every rank computes the same loss from it, so its gradient is each part's, unsummed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        return sum_over_ranks(x.clone(), (ring.transport,))

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
        return dsums, None
