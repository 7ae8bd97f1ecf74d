"""From a batch of whole sequences to what each rank feeds its model: shift first, then shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ringflash.ring import Ring
from ringflash.schedule.copies import on_cpu
from ringflash.schedule.documents import Documents
from ringflash.schedule.integers import integer, integers, is_by_row


def shift_labels(
    tokens: Tensor, *, lengths: Iterable[int] | Tensor | None = None, padding: int = 0, ignore_index: int = -100
) -> Tensor:
    """Labels of next-token prediction, [B, S] for tokens [B, S] of WHOLE sequences; cut them with Ring.shard afterwards.

    The last token of every document (of the sequence, without lengths) gets ignore_index. Shifting a shard instead
    would lose or mix up the labels at its borders.

    lengths: tokens per document, summing to S - padding.
    padding: tokens at the end that belong to no document; they get ignore_index.

    Errors: ValueError where lengths and padding are negative or do not sum to S.
    """
    _check_tokens("shift_labels", tokens)
    ignore_index = _index("shift_labels", ignore_index, tokens)
    S = tokens.shape[-1]
    padding = integer("shift_labels: padding", padding)
    if padding > S:
        raise ValueError(f"shift_labels: padding = {padding}; the sequence has {S} tokens")
    ends = [S - padding] if lengths is None else _ends(lengths, S, padding)
    labels = torch.full_like(tokens, ignore_index)
    labels[..., : max(S - padding - 1, 0)] = tokens[..., 1 : S - padding]
    labels[..., [end - 1 for end in ends if end > 0]] = ignore_index
    return labels


def _check_tokens(caller: str, tokens: object) -> None:
    """Labels are made of tokens and of ignore_index, which unsigned types cannot hold."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{caller}: tokens is {type(tokens).__name__}; must be a tensor")
    if tokens.dtype not in (torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{caller}: tokens is a {tokens.dtype} tensor; must be int16, int32 or int64, for ignore_index")
    if tokens.dim() == 0:
        raise TypeError(f"{caller}: tokens has no axis; must be [B, S]")


def _index(caller: str, ignore_index: object, tokens: Tensor) -> int:
    lowest = torch.iinfo(tokens.dtype).min
    index = integer(f"{caller}: ignore_index", ignore_index, least=lowest)
    if index > torch.iinfo(tokens.dtype).max:
        raise ValueError(f"{caller}: ignore_index = {index}; does not fit tokens of {tokens.dtype}")
    return index


@on_cpu
def position_ids(documents: Iterable[int] | Tensor) -> Tensor:
    """Positions for rotary embeddings that start at 0 with every document, int64, of WHOLE sequences; cut them like tokens.

    documents: tokens per packed document, for positions [S] of the whole packed sequence; or bool [B, S], True at real
        tokens, for positions [B, S] that count each sample's real tokens from 0, whichever side is padded. Padding gets 0.

    Errors: TypeError for a mask of another type, ValueError for a negative length or a mask of another shape.
    """
    if isinstance(documents, Tensor) and (documents.dtype == torch.bool or documents.dim() != 1):
        if documents.dtype != torch.bool:
            raise TypeError(
                f"position_ids: documents is a tensor of shape {tuple(documents.shape)} and {documents.dtype}; must be "
                "lengths, 1-D and integer, or a mask, bool [B, S] (such as attention_mask.bool())"
            )
        if documents.dim() != 2:
            raise ValueError(f"position_ids: documents is a mask of shape {tuple(documents.shape)}; must be [B, S]")
        return (documents.cumsum(1) - 1).masked_fill(~documents, 0)
    lengths = [integer("position_ids: a length", n) for n in integers("position_ids: documents", documents)]
    return torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])


@dataclass(frozen=True, eq=False)
class Packing:
    """What a training step needs of a packed sequence of S tokens; made by `documents`.

    mask: for attention and `sequence_sums`.
    position_ids: int64 [S] of the whole sequence, on the CPU, from 0 in every document and in the padding; [B, S] where
        batch rows are packed differently.
    """

    mask: Documents
    position_ids: Tensor

    def labels(self, tokens: Tensor, *, ignore_index: int = -100) -> Tensor:
        """`shift_labels` within the documents: [B, S] for tokens [B, S] of WHOLE sequences."""
        S = tokens.shape[-1]
        if self.mask.length != S or self.mask.batch not in (None, tokens.shape[0]):
            raise ValueError(f"labels: tokens has shape {tuple(tokens.shape)}, but the batch was packed as {self.mask}")
        document = self.mask.index(torch.arange(S)).to(tokens.device)  # [1 or B, S]
        goes_on = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] < self.mask.most)
        labels = torch.full_like(tokens, ignore_index)
        labels[..., :-1] = torch.where(goes_on, tokens[..., 1:], ignore_index)
        return labels


def documents(
    *,
    lengths: Iterable[Any] | Tensor | None = None,
    cu_seqlens: Iterable[int] | Tensor | None = None,
    position_ids: Iterable[Any] | Tensor | None = None,
    causal: bool,
    length: int | None = None,
) -> Packing:
    """Mask and positions of a packed sequence, from whichever of three descriptions a collator gives.

    lengths: tokens per document, one list for all batch rows or one per row.
    cu_seqlens: cumulative lengths [0, n0, n0 + n1, ...].
    position_ids: of the WHOLE sequence, restarting at 0 with every document: [S], or [B, S] as collators give them.
    causal: must be named, as for Documents.
    length: tokens of the whole sequence; those after the last document are padding. Without it there is none.

    Build it once per batch: tensors on a GPU are copied to the host here.

    Errors: ValueError unless exactly one description is given, and for one that contradicts itself or `length`.
    """
    given = {"lengths": lengths, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(f"documents: got {named or 'nothing'}; must be exactly one of {', '.join(given)}")
    whole = None if length is None else integer("documents: length", length)
    if position_ids is not None:
        mask = Documents.from_position_ids(_one_row(position_ids), causal=causal)
    elif cu_seqlens is not None:
        mask = Documents.from_cu_seqlens(cu_seqlens, causal=causal, length=whole)
    else:
        mask = _padded(lengths, whole, causal)
    if whole not in (None, mask.length):
        raise ValueError(f"documents: {named[0]} describe {mask.length} tokens, length = {whole}; must be equal")
    return Packing(mask, _positions(mask))


def shard_batch(
    batch: Mapping[str, Any], ring: Ring, dims: Mapping[str, int | None], *, length: int | None = None
) -> dict[str, Any]:
    """This rank's part of a batch of whole sequences, each tensor cut along the axis declared for it. Sends nothing.

    batch: the same on every rank.
    dims: for every name in the batch its sequence axis, or None for what has none and stays whole, such as images. Axes
        are never guessed from sizes: positions [3, B, S] with S = 3 would be cut in the wrong place.
    length: tokens of the whole sequence. None: what the declared axes say, which must agree.

    shard_batch(batch, ring, {"input_ids": 1, "position_ids": 2, "attention_mask": -1, "pixel_values": None})

    Errors: ValueError for a name in only one of batch and dims, an axis that a tensor lacks, and an axis whose size is
    not the sequence's length; TypeError for an axis of something that is no tensor.
    """
    if not isinstance(batch, Mapping) or not isinstance(dims, Mapping):
        raise TypeError(
            f"shard_batch: batch is {type(batch).__name__} and dims {type(dims).__name__}; both must be dicts by name"
        )
    if not isinstance(ring, Ring):
        raise TypeError(f"shard_batch: ring is {type(ring).__name__}; must be a Ring")
    undeclared, absent = sorted(set(batch) - set(dims)), sorted(set(dims) - set(batch))
    if undeclared:
        raise ValueError(
            f"shard_batch: dims does not say where {', '.join(undeclared)} is cut; must name each one's sequence axis, "
            "or None where it has none"
        )
    if absent:
        raise ValueError(f"shard_batch: dims names {', '.join(absent)}; the batch has only {', '.join(sorted(batch))}")
    sizes = {name: _size(name, batch[name], dim) for name, dim in dims.items() if dim is not None}
    N = next(iter(sizes.values()), 0) if length is None else integer("shard_batch: length", length)
    if any(size != N for size in sizes.values()):
        found = ", ".join(f"{name} has {size} along axis {dims[name]}" for name, size in sizes.items())
        raise ValueError(
            f"shard_batch: {found}; all must have the whole sequence's length{'' if length is None else f', {N}'}"
        )
    return {name: x if (dim := dims[name]) is None else ring.shard(x, dim) for name, x in batch.items()}


def _size(name: str, x: object, dim: object) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"shard_batch: {name} is {type(x).__name__}, dims gives it axis {dim}; must be a tensor, or None"
        )
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"shard_batch: dims[{name!r}] is {dim!r}; must be an integer or None")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"shard_batch: dims[{name!r}] = {dim}; {name} of shape {tuple(x.shape)} has no such axis")
    return x.shape[dim]


def _one_row(ids: Iterable[Any] | Tensor) -> Iterable[Any] | Tensor:
    """A batch of one row fits a batch of any."""
    return ids[0] if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[0] == 1 else ids


def _padded(lengths: Any, length: int | None, causal: bool) -> Documents:
    """Documents with padding up to `length` in every batch row."""
    is_nested = is_by_row(lengths)
    name = "documents: lengths"
    rows = [[integer(name, n) for n in integers(name, row)] for row in (lengths if is_nested else [lengths])]
    totals = [sum(row) for row in rows]
    whole = max(totals) if length is None else length
    if max(totals) > whole:
        raise ValueError(f"documents: lengths describe {max(totals)} tokens, length = {length}; must be at most that")
    padding = [whole - total for total in totals]
    return (
        Documents(rows, causal=causal, padding=padding)
        if is_nested
        else (Documents(rows[0], causal=causal, padding=padding[0]))
    )


@on_cpu
def _positions(mask: Documents) -> Tensor:
    position = torch.arange(mask.length)
    lo, _ = Documents(mask.lengths, causal=False, padding=mask.padding).bounds(position)
    ids = position - lo
    return ids if mask.batch is not None else ids[0]


def _ends(lengths: Iterable[int] | Tensor, S: int, padding: int) -> list[int]:
    counts = [integer("shift_labels: a length", n) for n in integers("shift_labels: lengths", lengths)]
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    if total + padding != S:
        padded = f" and padding is {padding}" if padding else ""
        raise ValueError(f"shift_labels: lengths sum to {total}{padded}, the sequence has {S} tokens")
    return ends
