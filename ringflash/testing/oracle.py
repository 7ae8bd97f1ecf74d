"""Dense attention in float64, straight from the definitions. Shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.score import Score
from ringflash.schedule.documents import Documents, Padding
from ringflash.schedule.mask import Causal, Chunked, FirstKeys, Full, Intersection, Mask, Past, Prefix, Union, Window


def visible(mask: Mask | Union, queries: int, keys: int) -> Tensor:
    """Which key each query sees, bool [1 or B, queries, keys], by the sentence that defines the mask.

    Query i stands at position i + keys - queries: the last query at the last key.
    """
    i = (torch.arange(queries) + keys - queries)[:, None]
    j = torch.arange(keys)[None, :]
    if isinstance(mask, Full):
        return torch.ones(1, queries, keys, dtype=torch.bool)
    if isinstance(mask, Causal):
        return (j <= i)[None]
    if isinstance(mask, Window):
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if mask.left is not None:
            seen &= i - j <= mask.left
        if mask.right is not None:
            seen &= j - i <= mask.right
        return seen[None]
    if isinstance(mask, Prefix):
        return torch.stack([(j <= i) | (j < n) for n in _each(mask.tokens)])
    if isinstance(mask, Chunked):
        return (torch.floor(i / mask.size) == torch.floor(j / mask.size))[None]
    if isinstance(mask, FirstKeys):
        return (j < mask.tokens).expand(1, queries, keys)
    if isinstance(mask, Documents):
        nested = mask.lengths if mask.batch else [mask.lengths]
        return torch.stack(
            [
                _documents(row, pad, mask.causal, i, j)
                for row, pad in zip(nested, _each(mask.padding, len(nested)), strict=True)
            ]
        )
    if isinstance(mask, Padding):
        rows = mask.batch or 1
        bounds = zip(_each(mask.start, rows), _each(mask.stop, rows), strict=True)
        return torch.stack(
            [((j >= a) & (j < b)) & (torch.tensor(mask.keys_only) | ((i >= a) & (i < b))) for a, b in bounds]
        )
    if isinstance(mask, Intersection):
        return reduce(torch.logical_and, (visible(part, queries, keys) for part in mask.masks))
    if isinstance(mask, Union):
        return reduce(torch.logical_or, (visible(part, queries, keys) for part in mask.parts))
    if isinstance(mask, Past):
        return visible(mask.second, queries, keys) & ~visible(mask.first, queries, keys)
    raise TypeError(f"oracle: no definition of {type(mask).__name__}")


def _each(numbers: int | Sequence[int], rows: int = 1) -> Sequence[int]:
    return [numbers] * rows if isinstance(numbers, int) else numbers


def _documents(lengths: Any, padding: int, is_causal: bool, i: Tensor, j: Tensor) -> Tensor:
    owner = [document for document, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    document = torch.tensor(owner, dtype=torch.int64)
    seen = (document[:, None] == document[None, :]) & (document >= 0)[:, None]
    return seen & (j <= i) if is_causal else seen


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Union, score: Score | None = None, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Sq, Hq]) in float64, differentiable; rows that see no key give (0, -inf).

    kept: which pairs dropout keeps, bool [B, Hq, Sq, Sk].
    """
    q, k, v = q.double(), k.double(), v.double()
    score = Score() if score is None else score
    Sq, Sk, Hq = q.shape[1], k.shape[1], q.shape[2]
    group = Hq // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if score.scale is None else score.scale)
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    if score.alibi is not None:
        i = torch.arange(Sq, device=q.device)[:, None] + Sk - Sq
        distance = (i - torch.arange(Sk, device=q.device)).abs()
        scores = scores - torch.tensor(score.alibi, dtype=torch.float64, device=q.device)[:, None, None] * distance
    seen = visible(mask, Sq, Sk).to(q.device)[:, None]  # [1 or B, 1, Sq, Sk]
    scores = scores.masked_fill(~seen, -torch.inf)
    if score.sinks is not None:
        # A key of its own, which everybody sees and whose value is 0.
        sink = score.sinks.double()[None, :, None, None].expand(q.shape[0], Hq, Sq, 1)
        scores = torch.cat([scores, sink], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, *v.shape[2:])], 1)
    has_key = (scores > -torch.inf).any(-1)  # [B, Hq, Sq]
    # A softmax over nothing is 0 / 0: such rows get a harmless score, and their results are put in afterwards.
    safe = torch.where(has_key[..., None], scores, 0.0)
    weights = torch.softmax(safe, -1) * has_key[..., None]
    if kept is not None:
        drop = torch.cat([kept, torch.ones_like(kept[..., :1])], -1) if score.sinks is not None else kept
        weights = weights * drop / (1 - score.dropout)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    lse = torch.where(has_key, torch.logsumexp(safe, -1), -torch.inf)
    return out, lse.transpose(1, 2)


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Union,
    dout: Tensor,
    dlse: Tensor | None = None,
    scale: float | None = None,
    score: Score | None = None,
    kept: Tensor | None = None,
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, and dsinks where the score has sinks, in float64.

    dlse of rows without keys does not count: their lse is constant.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    inputs = [q, k, v]
    score = Score(scale=scale) if score is None else score
    if score.sinks is not None:
        inputs.append(score.sinks.detach().double().requires_grad_())
        score = replace(score, sinks=inputs[-1])
    out, lse = dense_attention(q, k, v, mask, score, kept)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.double()).sum()
    gradients = torch.autograd.grad(loss, inputs)
    names = ("dq", "dk", "dv", "dsinks")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=False))}
