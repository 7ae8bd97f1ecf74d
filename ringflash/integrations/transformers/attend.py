"""The attention function that transformers' layers call: from their arguments to ours, or a refusal that names the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention import attention
from ringflash.integrations.transformers.rules import Layer, own_rule, said_rule
from ringflash.integrations.transformers.shown import Shown
from ringflash.kernels.score import Score
from ringflash.ring import Ring
from ringflash.schedule.mask import Mask, Union

# What some models hand to their attention and ours has no place for.
UNKNOWN = ("position_bias", "head_mask", "indices", "block_indices", "sinks")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Shown | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    ring: Ring | None = None,
    mask: Mask | Union | None = None,
    length: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; `ring`, `mask` and `length` are what model(...) was called with.

    query: [B, Hq, Sq, D]; key, value: [B, Hk, Sk, D]. Returns out [B, Sq, Hq, D].
    """
    layer = Layer(module, query.shape[2], key.shape[2], sliding_window, is_causal)
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{layer}: passes {name}, which attention over a ring does not know. {layer.remedy}"
            )
    if others.get("output_attentions"):
        raise NotImplementedError(
            f"{layer}: output_attentions = True, but probabilities are never held. {layer.remedy}"
        )
    if dropout:
        raise NotImplementedError(
            f"{layer}: attention_dropout = {dropout} in training; must be 0. Set config.attention_dropout = 0.0"
        )
    borders = others.get("cu_seq_lens_q")
    rule: Mask | Union
    if ring is None and mask is None:
        rule = own_rule(layer, attention_mask, position_ids, borders)
    else:
        rule = said_rule(layer, attention_mask, position_ids, borders, ring, mask, length)
    q, k, v = (x.transpose(1, 2) for x in _as_autocast(query, key, value))
    out = attention(
        q,
        k,
        v,
        ring=ring,
        mask=rule,
        score=Score(scale=scaling, softcap=softcap, sinks=s_aux),
        length=None if ring is None else length,
    )
    assert isinstance(out, Tensor)
    return out, None


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own attention under autocast: rotary embeddings leave q and k in fp32 beside a v of 16 bits."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
