"""scaled_dot_product_attention(): attention() by the name, shapes and arguments of torch's function."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from ringflash.attention import attention
from ringflash.kernels.score import Score
from ringflash.kernels.table import KernelTable
from ringflash.ring import Ring, check_plain
from ringflash.schedule.mask import Causal, Mask, Union


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    ring: Ring | None = None,
    mask: Mask | Union | None = None,
    seed: int | None = None,
    length: int | None = None,
    query_length: int | None = None,
    backend: str | KernelTable | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, exact over a sequence that may be cut across a ring.

    query: [..., Hq, Sq, D]; key: [..., Hk, Sk, D]; value: [..., Hk, Sk, Dv]; the leading axes alike, none or more.
    attn_mask: must be None: masks are rules here. mask: such a rule, for example Causal() & Window(1023, 0).
    is_causal: as in torch, for as many queries as keys. torch lets the first query see the first key where they differ;
        mask=Causal() lets the last query see the last key.
    dropout_p: as in torch, with a seed in [0, 2**62), the same on all ranks and another one for every layer and step.
    enable_gqa: as in torch, needed where Hq is a multiple of Hk.
    ring, length, query_length, backend: as in `attention`.

    Returns [..., Hq, Sq, Dv] in query's type, which autocast does not change. A row that sees no key is 0, where torch gives
    NaN.
    Errors: those of `attention`; NotImplementedError for an attn_mask; ValueError for arguments that contradict each other.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_plain(f"scaled_dot_product_attention: {name}", x)
        if x.dim() < 3 or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"scaled_dot_product_attention: {name} has shape {tuple(x.shape)}, query {tuple(query.shape)}; must be "
                "[..., heads, tokens, dim] with leading axes alike"
            )
    _check(query, key, attn_mask, dropout_p, is_causal, enable_gqa, mask, seed)
    rows = prod(query.shape[:-3])
    heads = (x.reshape(rows, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value))
    score = Score(scale=scale, dropout=dropout_p, seed=seed)
    out: Any = attention(
        *heads, ring=ring, mask=Causal() if is_causal else mask, score=score, length=length, query_length=query_length,
        backend=backend,
    )  # fmt: skip
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _check(
    query: Tensor,
    key: Tensor,
    attn_mask: object,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    mask: object,
    seed: int | None,
) -> None:
    """What torch's arguments say together."""
    name = "scaled_dot_product_attention"
    for argument, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {type(value).__name__}; must be True or False")
    if attn_mask is not None:
        raise NotImplementedError(
            f"{name}: attn_mask is {type(attn_mask).__name__}; must be None. Say the rule as mask=, for example "
            "Causal() & Window(1023, 0), Documents(...) or Padding.from_mask(...)"
        )
    if is_causal and mask is not None:
        raise ValueError(f"{name}: is_causal = True and mask = {mask}; give one, `mask & Causal()` is both")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{name}: is_causal = True with {query.shape[-2]} queries and {key.shape[-2]} keys; must be as many. torch lets "
            "the first query see the first key; mask=Causal() lets the last query see the last key"
        )
    if (seed is not None) != (dropout_p > 0):
        raise ValueError(
            f"{name}: dropout_p = {dropout_p} and seed = {seed}; dropout needs a seed, and a seed is for it"
        )
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(
            f"{name}: query has {query.shape[-3]} heads and key has {key.shape[-3]}; must be equal, or enable_gqa=True"
        )
