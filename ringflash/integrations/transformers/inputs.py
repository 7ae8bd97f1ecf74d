"""From a batch of whole sequences, as Hugging Face collators make it, to what this rank calls its model with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringflash.ring import Ring
from ringflash.schedule.documents import Documents, Padding
from ringflash.schedule.layout import cut
from ringflash.schedule.mask import Causal, Mask
from ringflash.training.batch import documents, shard_batch, shift_labels
from ringflash.training.loss import count_tokens

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def local_inputs(
    batch: Mapping[str, Any],
    ring: Ring,
    *,
    averaged_over: int,
    group: Any = None,
    dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """This rank's keyword arguments of a causal language model: model(**local_inputs(batch, ring, averaged_over=...)).

    batch: of WHOLE sequences, the same on every rank of the ring. input_ids [B, S] or inputs_embeds [B, S, hidden]; and
        where they are there labels [B, S], not shifted (or shift_labels, shifted); attention_mask [B, S], whose zeros
        become padding; position_ids [1 or B, S], which restart at 0 with every document; cu_seq_lens_q, borders of
        documents. Without position_ids tokens stand where they stand in the whole sequence.
    averaged_over: ranks over which gradients are averaged: all of DDP or FSDP, 1 where they are summed.
    group: the ranks that hold different tokens, as for `count_tokens`; None is the ring.
    dims: for each other name in the batch its sequence axis, or None where it has none.

    Returns input_ids or inputs_embeds, position_ids, ring, mask and length. With labels also shift_labels, this rank's part
    of what was shifted before it was cut; labels, which are all ignored; and num_items_in_batch, with which transformers'
    own loss is averaged_over * sum of this rank's token losses / valid tokens of the whole `group`. Its mean over the ranks
    that gradients are averaged over is the true loss. With accumulation pass num_items_in_batch anew, counted over the step.

    Errors: ValueError for what the batch lacks or says twice, for an undeclared name, and for a sequence so short that some
    rank gets no token: leave the ring out, and every rank has the whole.
    """
    inputs = cut_batch(batch, ring, dims)
    if "shift_labels" in inputs:
        tokens = count_tokens(inputs["shift_labels"], ring if group is None else group, averaged_over=averaged_over)
        inputs["num_items_in_batch"] = tokens.count / tokens.averaged_over
    return inputs


def cut_batch(batch: Mapping[str, Any], ring: Ring, dims: Mapping[str, int | None] | None = None) -> dict[str, Any]:
    """`local_inputs` without a denominator; sends nothing."""
    whole = dict(batch)
    tokens = whole.get("input_ids", whole.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ValueError(f"local_inputs: batch has {', '.join(whole)}; must have input_ids [B, S] or inputs_embeds")
    N = tokens.shape[1]
    if min(cut(ring.layout, N, ring.ranks).shard_lengths) == 0:
        raise ValueError(
            f"local_inputs: {N} tokens on {ring.ranks} ranks leave some rank without any, which models cannot take; must be "
            "at least one each. Call the model with the whole batch, without a ring, on every rank"
        )
    mask, positions = _said(whole, tokens)
    whole["position_ids"] = positions.to(tokens.device)
    if (labels := whole.pop("labels", None)) is not None and "shift_labels" not in whole:
        whole["shift_labels"] = shift_labels(labels)
    axes = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "shift_labels": 1, **(dims or {})}
    part = shard_batch(
        whole, ring, {name: axis for name, axis in axes.items() if name in {*whole, *(dims or {})}}, length=N
    )
    if "shift_labels" in part:
        # Models ask for labels before they look at shift_labels. One that never looks must not shift a part: it gets none.
        part["labels"] = torch.full_like(part["shift_labels"], -100)
    return {**part, "ring": ring, "mask": mask, "length": N}


def _said(whole: dict[str, Any], tokens: Tensor) -> tuple[Mask, Tensor]:
    """The mask and the positions [1 or B, S] of the whole; what said so is taken out of the batch."""
    B, N = tokens.shape[:2]
    padding, ids = whole.pop("attention_mask", None), whole.pop("position_ids", None)
    borders = [whole.pop(name) for name in CUMULATIVE if whole.get(name) is not None]
    for name in (*CUMULATIVE, *LONGEST):
        whole.pop(name, None)
    mask: Mask = Causal()
    positions = torch.arange(N)[None]
    if borders:
        if B != 1 or any(not torch.equal(borders[0].cpu(), other.cpu()) for other in borders):
            raise ValueError(
                f"local_inputs: cu_seq_lens_q and cu_seq_lens_k of a batch of {B}; must be alike, and of one row"
            )
        packing = documents(cu_seqlens=borders[0].flatten(), causal=True, length=N)
        positions = packing.position_ids[None]
        mask = packing.mask if packing.mask.padding else _documents_of(positions, N)
    if ids is not None:
        ids = ids if ids.dim() == 2 else ids[None]
        by_ids = _documents_of(ids.cpu(), N)
        if borders and by_ids != mask:
            raise ValueError("local_inputs: position_ids and cu_seq_lens_q tell of different documents; must agree")
        mask, positions = by_ids, ids
    if padding is not None:
        if tuple(padding.shape) != (B, N):
            raise ValueError(f"local_inputs: attention_mask has shape {tuple(padding.shape)}; must be {[B, N]}, [B, S]")
        real = Padding.from_mask(padding)
        if not bool((padding != 0).all()):
            mask = mask & real
    return mask, positions


def _documents_of(ids: Tensor, N: int) -> Mask:
    if ids.dim() != 2 or ids.shape[1] != N:
        raise ValueError(f"local_inputs: position_ids have shape {tuple(ids.shape)}; must be [1 or B, S] with S = {N}")
    if bool((ids == torch.arange(N)).all()):
        return Causal()
    return Documents.from_position_ids(ids[0] if ids.shape[0] == 1 else ids, causal=True)
