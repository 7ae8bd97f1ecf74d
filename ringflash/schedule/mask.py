"""Which keys a query sees.

Law 2, monotone intervals: the query at position p sees the keys lo(p) <= key < hi(p), and both ends never decrease with
p. The law is closed under `&`: the intersection of two intervals is [max of lows, min of highs), still monotone.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ringflash.schedule.integers import NO_END, integer, integers


class Mask(ABC):
    """A visibility rule; a hashable value built from host integers, so that planning never waits for a device."""

    @abstractmethod
    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(lo, hi) of the half-open key interval of each query, int64 [1, Sq], for int64 positions [Sq]."""

    @property
    def length(self) -> int | None:
        """Tokens of the only sequence that this mask fits, or None if it fits any."""
        return None

    def __str__(self) -> str:
        """As it was made, cut short where it is long: for messages."""
        return _shortened(repr(self))

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is equal for equal masks, in every process, and differs for different ones."""
        whole = repr(self)
        return f"{_shortened(whole)} [{hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()}]"

    def __and__(self, other: Mask) -> Mask:
        """Keys that both masks show."""
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self, other)


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def _closed(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Give rows without keys the form lo == hi; both ends stay monotone because max of monotone is monotone."""
    return lo, torch.maximum(lo, hi)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        lo = torch.zeros_like(positions)[None]
        return lo, torch.full_like(lo, NO_END)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and those before it."""

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positions)[None], positions[None] + 1


@dataclass(frozen=True)
class Window(Mask):
    """The query at p sees p - left to p + right, both ends included; None is unbounded. Window(1023, 0) is causal.

    left, right: tokens >= 0, or None.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None:
                object.__setattr__(self, name, integer(f"Window: {name}", value))

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        p = positions[None]
        lo = torch.zeros_like(p) if self.left is None else (p - self.left).clamp_min(0)
        hi = torch.full_like(p, NO_END) if self.right is None else p + self.right + 1
        return _closed(lo, hi)


@dataclass(frozen=True, init=False)
class Documents(Mask):
    """Packed documents: a query sees keys of its own document only, and with causal=True none after itself.

    lengths: tokens per document, any list, tuple or integer tensor of one axis; zero-length documents are allowed. A
    tensor on a GPU is copied to the host here, once, and never again: build the mask once per batch.
    causal: must be named, for packed data exist in both kinds.
    padding: tokens after the last document that belong to none; they see nothing and nobody sees them.
    """

    lengths: tuple[int, ...]
    causal: bool
    padding: int

    def __init__(self, lengths: Iterable[int] | Tensor, *, causal: bool, padding: int = 0) -> None:
        object.__setattr__(self, "lengths", tuple(integers("Documents: lengths", lengths)))
        if not isinstance(causal, bool):
            raise TypeError(f"Documents: causal is {type(causal).__name__}; must be True or False")
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "padding", integer("Documents: padding", padding))
        for i, n in enumerate(self.lengths):
            if n < 0:
                raise ValueError(f"Documents: lengths[{i}] = {n}; lengths must be >= 0")

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
    def from_position_ids(cls, position_ids: Iterable[int] | Tensor, *, causal: bool) -> Documents:
        """From positions of the whole sequence that restart at 0 with each document; each must count up by one."""
        ids = integers("Documents: position_ids", position_ids)
        starts = [i for i, p in enumerate(ids) if p == 0]
        if ids and (not starts or starts[0] != 0):
            raise ValueError(f"Documents: position_ids start with {ids[0]}; the first document must start at 0")
        for i, p in enumerate(ids):
            if p != 0 and p != ids[i - 1] + 1:
                raise ValueError(
                    f"Documents: position_ids[{i}] = {p} after {ids[i - 1]}; ids count up by 1 or restart at 0"
                )
        return cls([b - a for a, b in pairwise([*starts, len(ids)])], causal=causal)

    @property
    def length(self) -> int:
        return sum(self.lengths) + self.padding

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        ends = torch.tensor(self.lengths, dtype=torch.int64).cumsum(0)
        total = int(ends[-1]) if self.lengths else 0
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        document = torch.searchsorted(ends, positions, right=True)  # padding falls one past the last document
        lo = starts[document]
        hi = torch.cat([ends, torch.tensor([total])])[document]
        if self.causal:
            hi = torch.minimum(hi, positions + 1)
        return _closed(lo[None], hi[None])


@dataclass(frozen=True)
class Intersection(Mask):
    """Keys that every mask of `masks` shows; made by `&`, which also flattens and drops what adds nothing."""

    masks: tuple[Mask, ...]

    @property
    def length(self) -> int | None:
        return next((m.length for m in self.masks if m.length is not None), None)

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        los, his = zip(*(m.bounds(positions) for m in self.masks), strict=True)
        lo, hi = los[0], his[0]
        for other_lo, other_hi in zip(los[1:], his[1:], strict=True):
            lo, hi = torch.maximum(lo, other_lo), torch.minimum(hi, other_hi)
        return _closed(lo, hi)


def intersect(a: Mask, b: Mask) -> Mask:
    """`a & b` in one canonical form, so that equal rules are equal keys of the plan cache."""
    parts: list[Mask] = []
    for mask in (a, b):
        for part in mask.masks if isinstance(mask, Intersection) else (mask,):
            if part != Full() and part not in parts:
                parts.append(part)
    lengths = {part.length for part in parts} - {None}
    if len(lengths) > 1:
        raise ValueError(
            f"mask &: the two sides are made for different sequence lengths {sorted(map(int, cast(Any, lengths)))}"
        )
    if len(parts) <= 1:
        return parts[0] if parts else Full()
    return Intersection(tuple(parts))
