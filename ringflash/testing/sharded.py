"""The same question to every ring: shard, attend, go backward, gather. In one process, on gloo and on NCCL alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringflash.attention import attention
from ringflash.ring import Ring


def draw(
    *,
    batch: int = 1,
    queries: int,
    keys: int | None = None,
    heads: tuple[int, int] = (2, 2),
    dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Random q, k, v, dout, dlse of WHOLE sequences, the same on every rank that names the same seed."""
    keys = queries if keys is None else keys
    value_dim = dim if value_dim is None else value_dim
    Hq, Hk = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (batch, queries, Hq, dim),
        "k": (batch, keys, Hk, dim),
        "v": (batch, keys, Hk, value_dim),
        "dout": (batch, queries, Hq, value_dim),
        "dlse": (batch, queries, Hq),
    }
    numbers = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: x.to(dtype).to(device) for name, x in numbers.items()}


def attend_sharded(
    ring: Ring | None, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of whole sequences, computed by the ring from its shards and gathered on every rank."""

    def cut(x: Tensor) -> Tensor:
        return x if ring is None else ring.shard(x)

    local = [cut(x.detach()).detach().clone().requires_grad_() for x in (q, k, v)]
    if ring is not None:
        options = {"length": k.shape[1], "query_length": q.shape[1]} | options
    result = attention(*local, ring=ring, return_lse=True, **options)
    assert isinstance(result, tuple)
    out, lse = result
    outputs, grads = [out], [cut(dout).to(out.dtype)]
    if dlse is not None:
        outputs.append(lse)
        grads.append(cut(dlse).to(lse.dtype))
    dq, dk, dv = torch.autograd.grad(outputs, local, grads)
    results = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    if ring is None:
        return results
    lengths = {"dk": k.shape[1], "dv": k.shape[1]}
    return {name: ring.gather(x, length=lengths.get(name, q.shape[1])) for name, x in results.items()}
