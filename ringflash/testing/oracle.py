"""Dense attention in float64, straight from the definitions. Shares no code with what it judges."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.schedule.mask import Causal, Documents, Full, Intersection, Mask, Window


def visible(mask: Mask, queries: int, keys: int) -> Tensor:
    """Which key each query sees, bool [queries, keys], by the sentence that defines the mask.

    Query i stands at position i + keys - queries: the last query at the last key.
    """
    i = (torch.arange(queries) + keys - queries)[:, None]
    j = torch.arange(keys)[None, :]
    if isinstance(mask, Full):
        return torch.ones(queries, keys, dtype=torch.bool)
    if isinstance(mask, Causal):
        return j <= i
    if isinstance(mask, Window):
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if mask.left is not None:
            seen &= i - j <= mask.left
        if mask.right is not None:
            seen &= j - i <= mask.right
        return seen
    if isinstance(mask, Documents):
        owner = [document for document, n in enumerate(mask.lengths) for _ in range(n)] + [-1] * mask.padding
        document = torch.tensor(owner, dtype=torch.int64)
        seen = (document[:, None] == document[None, :]) & (document >= 0)[:, None]
        return seen & (j <= i) if mask.causal else seen
    if isinstance(mask, Intersection):
        return torch.stack([visible(part, queries, keys) for part in mask.masks]).all(0)
    raise TypeError(f"oracle: no definition of {type(mask).__name__}")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Sq, Hq]) in float64, differentiable; rows that see no key give (0, -inf)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(mask, q.shape[1], k.shape[1]).to(q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    has_key = seen.any(-1)[None, None]  # [1, 1, Sq]
    lse = torch.where(has_key, torch.logsumexp(torch.where(has_key[..., None], scores, 0.0), dim=-1), -torch.inf)
    weights = torch.where(has_key[..., None], torch.softmax(torch.where(has_key[..., None], scores, 0.0), dim=-1), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.transpose(1, 2)


def dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dout: Tensor, dlse: Tensor | None = None, scale: float | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64. dlse of rows without keys does not count: their lse is constant."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, mask, scale)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.double()).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
