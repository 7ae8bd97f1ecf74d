"""From a packed batch of whole sequences to what each rank feeds its model: shift first, then shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shift_labels(tokens: Tensor, *, lengths: Sequence[int] | None = None, ignore_index: int = -100) -> Tensor:
    """Labels of next-token prediction, [B, S] for tokens [B, S] of WHOLE sequences; cut them with Ring.shard afterwards.

    The last token of every document (of the sequence, without lengths) gets ignore_index. Shifting a shard instead
    would lose or mix up the labels at its borders.

    lengths: tokens per document, summing to S.
    """
    S = tokens.shape[-1]
    ends = [S] if lengths is None else _ends(lengths, S)
    labels = torch.full_like(tokens, ignore_index)
    labels[..., :-1] = tokens[..., 1:]
    labels[..., [end - 1 for end in ends if end > 0]] = ignore_index
    return labels


def position_ids(lengths: Sequence[int]) -> Tensor:
    """Positions that restart at 0 with every document: int64 [S] of the whole packed sequence, for rotary embeddings."""
    return torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])


def _ends(lengths: Sequence[int], S: int) -> list[int]:
    ends = torch.tensor(list(lengths), dtype=torch.int64).cumsum(0).tolist()
    if (ends[-1] if ends else 0) != S:
        raise ValueError(f"shift_labels: lengths sum to {ends[-1] if ends else 0}, the sequence has {S} tokens")
    return ends
