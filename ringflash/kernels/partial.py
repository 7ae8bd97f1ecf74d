"""Partial results of attention and their merge: online softmax across pieces.

Source: Milakov & Gimelshein, arXiv:1805.02867; Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows whose product with the output is formed at once in `delta`: bounds the fp32 temporaries of very long shards.
DELTA_ROWS = 4096


@dataclass(frozen=True)
class Partial:
    """Attention of some queries over some of their keys.

    out: [B, Sq, Hq, Dv], normalised over the keys seen so far.
    lse: [B, Sq, Hq], natural log of the sum of exp(score); -inf for a row that has seen no key, whose out is 0.
        Its memory is [B, Hq, Sq], see `row_statistic`.
    Both fp32, or fp64 for fp64 inputs.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_dim: int) -> Partial:
        """No key seen yet: the identity of `merge`, for queries q [B, Sq, Hq, D]."""
        partial = cls.unset(q, value_dim)
        partial.out.zero_()
        partial.lse.fill_(-torch.inf)
        return partial

    @classmethod
    def unset(cls, q: Tensor, value_dim: int, *, rounded: bool = False) -> Partial:
        """Memory for a partial that a kernel is about to write whole, in the layout that kernels rely on.

        rounded: out in q's type, for a result that nothing will be merged with.
        """
        B, Sq, Hq, _ = q.shape
        return cls(
            q.new_empty(B, Sq, Hq, value_dim, dtype=q.dtype if rounded else accumulate_dtype(q.dtype)),
            row_statistic(q, accumulate_dtype(q.dtype)),
        )

    def add(self, rows: slice, here: Partial) -> None:
        """Merge what `here` [B, len(rows), Hq, Dv] saw into these rows, in place."""
        before = Partial(self.out[:, rows], self.lse[:, rows])
        merged = merge(before, here)
        before.out.copy_(merged.out)
        before.lse.copy_(merged.lse)

    def add_sinks(self, sinks: Tensor) -> None:
        """Count one more key per head that has a score, sinks [Hq], and no value, in place."""
        sink = sinks.to(self.lse.dtype)
        peak = torch.maximum(self.lse, sink)
        pivot = torch.where(peak == -torch.inf, 0.0, peak)
        seen = torch.exp(self.lse - pivot)
        total = seen + torch.exp(sink - pivot)
        self.out.mul_(torch.where(total > 0, seen / total, 0.0)[..., None])
        self.lse.copy_(torch.where(total > 0, pivot + torch.log(total), -torch.inf))


def row_statistic(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Unset [B, Sq, Hq] whose memory is [B, Hq, Sq]: kernels load a block of rows of one head as one vector."""
    B, Sq, Hq = q.shape[:3]
    return q.new_empty(B, Hq, Sq, dtype=dtype).transpose(1, 2)


def heads_first(statistic: Tensor) -> Tensor:
    """The same [B, Sq, Hq], in memory of the order of `row_statistic`."""
    return statistic.transpose(1, 2).contiguous().transpose(1, 2)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of partial results, travelling gradients and sums: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge(a: Partial, b: Partial) -> Partial:
    """Combine attention over two disjoint sets of keys.

        lse = log(exp(a.lse) + exp(b.lse))
        out = exp(a.lse - lse) * a.out + exp(b.lse - lse) * b.out

    Associative, commutative, identity (0, -inf), finite for any gap of lse, differentiable.
    """
    peak = torch.maximum(a.lse, b.lse).detach()
    is_empty = peak == -torch.inf
    # Finite pivot and sum where neither side saw a key: -inf - (-inf) and log(0) are NaN in the gradient even behind a
    # where().
    pivot = torch.where(is_empty, 0.0, peak)
    weight_a, weight_b = torch.exp(a.lse - pivot), torch.exp(b.lse - pivot)
    total = torch.where(is_empty, 1.0, weight_a + weight_b)
    lse = torch.where(is_empty, -torch.inf, pivot + torch.log(total))
    out = (weight_a / total)[..., None] * a.out + (weight_b / total)[..., None] * b.out
    return Partial(out, lse)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, [B, Sq, Hq] laid out like lse: all that backward needs of the output.

    out, dout: [B, Sq, Hq, Dv] the merged output and its gradient; dlse: [B, Sq, Hq] gradient of lse, or None.
    """
    dtype = accumulate_dtype(out.dtype)
    total = row_statistic(out, dtype)
    for start in range(0, out.shape[1], DELTA_ROWS):
        rows = slice(start, start + DELTA_ROWS)
        total[:, rows] = torch.linalg.vecdot(out[:, rows].to(dtype), dout[:, rows].to(dtype))
    return total if dlse is None else total.sub_(dlse)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[Hq], in the type of lse: a sink's share of the softmax takes weight from all values, d out / d sink = -p out.

    lse, delta: [B, Sq, Hq], with the sinks counted in.
    """
    p = torch.exp(sinks.to(lse.dtype) - torch.where(lse == -torch.inf, torch.inf, lse))
    return -(p * delta).sum((0, 1))
