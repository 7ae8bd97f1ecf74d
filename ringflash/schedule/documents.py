"""Masks made from a batch: packed documents and padding, alike in all batch rows or different in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ringflash.schedule.copies import on_cpu
from ringflash.schedule.integers import NO_END, check_holds_values, integer, integers, is_by_row
from ringflash.schedule.mask import Mask, closed, integer_or_rows, per_row
from ringflash.schedule.traced import carried

Lengths = tuple[int, ...] | tuple[tuple[int, ...], ...]


@carried()
@dataclass(frozen=True, init=False)
class Documents(Mask):
    """Packed documents: a query sees keys of its own document only, and with causal=True none after itself.

    lengths: tokens per document: a list, tuple or integer tensor of one axis, the same packing in every batch row; or a
        list of such, one per batch row. Zero-length documents are allowed. A tensor on a GPU is copied to the host here,
        once, and never again: build the mask once per batch.
    causal: must be named, for packed data exist in both kinds.
    padding: tokens after the last document that belong to none, a number or one per batch row; they see nothing and
        nobody sees them.
    """

    lengths: Lengths
    causal: bool
    padding: int | tuple[int, ...]

    def __init__(
        self, lengths: Iterable[Any] | Tensor, *, causal: bool, padding: int | Sequence[int] | Tensor = 0
    ) -> None:
        object.__setattr__(self, "lengths", _lengths(lengths))
        if not isinstance(causal, bool):
            raise TypeError(f"Documents: causal is {type(causal).__name__}; must be True or False")
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "padding", integer_or_rows("Documents: padding", padding))
        if isinstance(self.padding, tuple) and len(self.padding) != self.batch:
            raise ValueError(
                f"Documents: padding for {len(self.padding)} batch rows, lengths for {self.batch or 'all alike'}"
            )
        totals = sorted(set(self._totals))
        if len(totals) > 1:
            raise ValueError(
                f"Documents: lengths and padding of the batch rows sum to {totals}; must be equal, pad them"
            )

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Iterable[int] | Tensor, *, causal: bool, length: int | None = None
    ) -> Documents:
        """From cumulative lengths [0, n0, n0 + n1, ...]; tokens up to `length` after the last border are padding."""
        borders = integers("Documents: cu_seqlens", cu_seqlens)
        if not borders or borders[0] != 0:
            raise ValueError(f"Documents: cu_seqlens = {borders[:8]}; must start with 0")
        lengths = [b - a for a, b in pairwise(borders)]
        if min(lengths, default=0) < 0:
            raise ValueError(f"Documents: cu_seqlens = {borders[:8]}...; must not decrease")
        length = None if length is None else integer("Documents: length", length)
        if length is not None and length < borders[-1]:
            raise ValueError(f"Documents: cu_seqlens end at {borders[-1]}, past length = {length}")
        return cls(lengths, causal=causal, padding=0 if length is None else length - borders[-1])

    @classmethod
    @on_cpu
    def from_position_ids(cls, position_ids: Iterable[Any] | Tensor, *, causal: bool) -> Documents:
        """From positions of the WHOLE sequence, [S] or [B, S], that restart at 0 with each document and count up by 1."""
        ids = _token_ids("position_ids", position_ids)
        rows = ids if ids.dim() == 2 else ids[None]
        if rows.shape[1] and bool((rows[:, 0] != 0).any()):
            raise ValueError(
                f"Documents: position_ids start with {rows[:, 0].tolist()}; the first document must start at 0"
            )
        wrong = (rows[:, 1:] != 0) & (rows[:, 1:] != rows[:, :-1] + 1)
        if bool(wrong.any()):
            row, i = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"Documents: position_ids[{i + 1}] = {int(rows[row, i + 1])} after {int(rows[row, i])}; "
                "ids count up by 1 or restart at 0"
            )
        return cls(_like(ids, [_gaps(row == 0) for row in rows]), causal=causal)

    @classmethod
    @on_cpu
    def from_document_ids(
        cls, document_ids: Iterable[Any] | Tensor, *, causal: bool, padding_id: int | None = None
    ) -> Documents:
        """From the document of each token of the WHOLE sequence, [S] or [B, S]; tokens of a document stand together.

        padding_id: the id of tokens that belong to none, which stand at the end; None where there are none.
        """
        ids = _token_ids("document_ids", document_ids)
        if padding_id is not None:
            padding_id = integer("Documents: padding_id", padding_id, least=-NO_END)
        lengths, padding = [], []
        for row in ids if ids.dim() == 2 else ids[None]:
            starts = torch.ones_like(row, dtype=torch.bool)
            starts[1:] = row[1:] != row[:-1]
            names, sizes = row[starts].tolist(), _gaps(starts)
            tail = sizes.pop() if names and padding_id is not None and names[-1] == padding_id else 0
            names = names[: len(sizes)]
            if len(set(names)) < len(names) or padding_id in names:
                twice = next(name for name in names if names.count(name) > 1 or name == padding_id)
                raise ValueError(
                    f"Documents: document_ids hold {twice} in several places; the tokens of a document must stand together "
                    "and padding at the end"
                )
            lengths.append(sizes)
            padding.append(tail)
        return cls(_like(ids, lengths), causal=causal, padding=_like(ids, padding))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once: every layer of a model looks its plan up."""
        return hash((self.lengths, self.causal, self.padding))

    @property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        """Lengths per batch row, one row where all share them."""
        nested = bool(self.lengths) and isinstance(self.lengths[0], tuple)
        return cast("tuple[tuple[int, ...], ...]", self.lengths if nested else (self.lengths,))

    @property
    def _totals(self) -> list[int]:
        padding = self.padding if isinstance(self.padding, tuple) else (self.padding,) * len(self._rows)
        return [sum(row) + pad for row, pad in zip(self._rows, padding, strict=True)]

    @property
    def length(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return self._totals[0]

    @property
    def batch(self) -> int | None:
        return len(self.lengths) if self.lengths and isinstance(self.lengths[0], tuple) else None

    @property
    def is_for_self_attention(self) -> bool:
        return True

    def rows(self) -> tuple[Tensor, Tensor]:
        past = self._borders[2][:, -1]
        return torch.zeros_like(past), past

    @cached_property
    def _borders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ends [rows, documents] to search in, and [rows, documents + 1] where each document starts and stops.

        Rows with fewer documents are filled up with empty ones; the last column is padding, empty as well.
        """
        rows = self._rows
        lengths = torch.zeros(len(rows), self.most, dtype=torch.int64)
        for row, numbers in zip(lengths, rows, strict=True):
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        ends = lengths.cumsum(1)
        starts = torch.nn.functional.pad(ends, (1, 0))
        return ends, starts, torch.cat([ends, starts[:, -1:]], 1)

    @property
    def most(self) -> int:
        """Documents of the batch row that has most."""
        return max(map(len, self._rows))

    @on_cpu
    def index(self, positions: Tensor) -> Tensor:
        """The document of each position, int64 [1 or B, S] for int64 positions [S]; padding is one past the last: `most`."""
        ends = self._borders[0]
        return torch.searchsorted(ends, positions.expand(ends.shape[0], -1).contiguous(), right=True)

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        _, starts, stops = self._borders
        document = self.index(positions)
        lo, hi = starts.gather(1, document), stops.gather(1, document)
        if self.causal:
            hi = torch.minimum(hi, positions + 1)
        return closed(lo, hi)


@carried()
@dataclass(frozen=True, init=False)
class Padding(Mask):
    """Batch rows that hold fewer tokens than the tensor: only positions [start, stop) of each are real.

    Padded queries see nothing (out 0, lse -inf, no gradient), and nobody sees padded keys.

    start, stop: positions, a number or one per batch row.
    length: tokens of the padded sequence.
    keys_only: the keys are padded but not the queries, as in cross attention to padded inputs.
    """

    start: int | tuple[int, ...]
    stop: int | tuple[int, ...]
    padded_length: int
    keys_only: bool

    def __init__(
        self,
        start: int | Sequence[int] | Tensor,
        stop: int | Sequence[int] | Tensor,
        *,
        length: int,
        keys_only: bool = False,
    ) -> None:
        object.__setattr__(self, "start", integer_or_rows("Padding: start", start))
        object.__setattr__(self, "stop", integer_or_rows("Padding: stop", stop))
        object.__setattr__(self, "padded_length", integer("Padding: length", length))
        if not isinstance(keys_only, bool):
            raise TypeError(f"Padding: keys_only is {type(keys_only).__name__}; must be True or False")
        object.__setattr__(self, "keys_only", keys_only)
        rows = {len(x) for x in (self.start, self.stop) if isinstance(x, tuple)}
        if len(rows) > 1:
            raise ValueError(f"Padding: start and stop are for {sorted(rows)} batch rows; must be equal")
        first, past = per_row(self.start), per_row(self.stop)
        if bool(((first > past) | (past > length)).any()):
            raise ValueError(
                f"Padding: start = {self.start}, stop = {self.stop}; must be 0 <= start <= stop <= length = {length}"
            )

    @classmethod
    def right(cls, lengths: int | Sequence[int] | Tensor, *, length: int, keys_only: bool = False) -> Padding:
        """Real tokens first: `lengths` of them, a number or one per batch row."""
        return cls(0, lengths, length=length, keys_only=keys_only)

    @classmethod
    def left(cls, lengths: int | Sequence[int] | Tensor, *, length: int, keys_only: bool = False) -> Padding:
        """Real tokens last: `lengths` of them, a number or one per batch row."""
        length = integer("Padding: length", length)
        real = integer_or_rows("Padding: lengths", lengths)
        if bool((per_row(real) > length).any()):
            raise ValueError(f"Padding: lengths = {real}; must be <= length = {length}")
        start = tuple(length - n for n in real) if isinstance(real, tuple) else length - real
        return cls(start, length, length=length, keys_only=keys_only)

    @classmethod
    @on_cpu
    def from_mask(cls, is_real: Tensor, *, keys_only: bool = False) -> Padding:
        """From an attention_mask of the WHOLE batch: [B, S], bool or integers, true or 1 for real tokens.

        The real tokens of a row stand together; anything else is refused. A tensor on a GPU is copied to the host, once.
        """
        if not isinstance(is_real, Tensor):
            raise TypeError(f"Padding: the mask is {type(is_real).__name__}; must be a tensor [B, S]")
        check_holds_values("Padding: the mask", is_real)
        if is_real.dim() != 2 or is_real.is_floating_point() or is_real.is_complex():
            raise ValueError(
                f"Padding: a mask of shape {tuple(is_real.shape)} and {is_real.dtype}; must be [B, S], bool or integer"
            )
        real = is_real.cpu()
        if real.dtype != torch.bool and bool(((real != 0) & (real != 1)).any()):
            raise ValueError("Padding: the mask holds other numbers than 0 and 1; for packed documents use Documents")
        real = real.bool()
        S = real.shape[1]
        count = real.sum(1)
        start = torch.where(count > 0, real.int().argmax(1), 0) if S else count
        position = torch.arange(S)
        if not torch.equal(real, (position >= start[:, None]) & (position < (start + count)[:, None])):
            raise ValueError("Padding: the mask has holes; real tokens of a row must stand together")
        return cls(start.tolist(), (start + count).tolist(), length=S, keys_only=keys_only)

    @property
    def length(self) -> int:
        return self.padded_length

    @property
    def batch(self) -> int | None:
        return next((len(x) for x in (self.start, self.stop) if isinstance(x, tuple)), None)

    @property
    def is_for_self_attention(self) -> bool:
        return not self.keys_only

    def rows(self) -> tuple[Tensor, Tensor]:
        return super().rows() if self.keys_only else (per_row(self.start)[:, 0], per_row(self.stop)[:, 0])

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        start, stop = per_row(self.start), per_row(self.stop)
        rows = max(start.shape[0], stop.shape[0])
        lo, hi = (x.expand(rows, positions.shape[0]) for x in (start, stop))
        if self.keys_only:
            return lo, hi
        # Rows before the first token end at `start`, rows after the last one begin at `stop`.
        return torch.where(positions >= stop, stop, lo), torch.where(positions < start, start, hi)


def _lengths(lengths: Iterable[Any] | Tensor) -> Lengths:
    """A tuple of lengths, or one such tuple per batch row."""
    name = "Documents: lengths"
    if not is_by_row(lengths):
        return tuple(integer(f"{name}[{i}]", n) for i, n in enumerate(integers(name, cast(Any, lengths))))
    return tuple(
        tuple(integer(f"{name}[{row}][{i}]", n) for i, n in enumerate(integers(f"{name}[{row}]", numbers)))
        for row, numbers in enumerate(cast(Any, lengths))
    )


def _token_ids(name: str, ids: Iterable[Any] | Tensor) -> Tensor:
    """int64 [S] or [B, S] on the CPU."""
    x = ids if isinstance(ids, Tensor) else _tensor_of(f"Documents: {name}", ids)
    check_holds_values(f"Documents: {name}", x)
    if x.dim() not in (1, 2) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"Documents: {name}: shape {tuple(x.shape)} and {x.dtype}; must be [S] or [B, S] and integer")
    return x.to("cpu", torch.int64)


def _tensor_of(name: str, ids: Iterable[Any]) -> Tensor:
    """From a list or array of ids, or one per batch row."""
    if is_by_row(ids):
        rows = [integers(f"{name}[{row}]", row_ids) for row, row_ids in enumerate(ids)]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"{name}: batch rows of {sorted({len(row) for row in rows})} tokens; must be equal")
        return torch.tensor(rows, dtype=torch.int64)
    return torch.tensor(integers(name, ids), dtype=torch.int64)


def _gaps(starts: Tensor) -> list[int]:
    """Lengths of the pieces that begin where `starts` [S] is true; the first begins at 0."""
    borders = [*starts.nonzero()[:, 0].tolist(), starts.shape[0]]
    return [b - a for a, b in pairwise(borders)]


def _like(ids: Tensor, rows: list[Any]) -> Any:
    """One entry per batch row where ids have such, else the only one."""
    return rows if ids.dim() == 2 else rows[0]
