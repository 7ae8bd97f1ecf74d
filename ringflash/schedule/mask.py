"""Which keys a query sees.

Law 2, monotone intervals: the query at position p sees the keys lo(p) <= key < hi(p), and both ends never decrease with
p. The law is closed under `&`: the intersection of two intervals is [max of lows, min of highs), still monotone.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ringflash.schedule.integers import NO_END, integer, integers
from ringflash.schedule.traced import Traced, carried, constant

# What compiled code may make and compose: rules that are told by a few numbers, and do not change with the batch.
_rule = constant("__and__", "__or__")


@carried()
class Mask(metaclass=Traced):
    """A visibility rule; a hashable value built from host integers, so that planning never waits for a device."""

    is_constant: ClassVar[bool]  # whether compiled code takes it as one, see traced.py

    @abstractmethod
    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(lo, hi) of the half-open key interval of each query, int64 [1 or B, Sq], for int64 positions [Sq]."""

    def rows(self) -> tuple[Tensor, Tensor]:
        """(first, past) int64 [1 or B]: no query outside [first, past) sees anything. May be wider than need be."""
        return torch.tensor([-NO_END]), torch.tensor([NO_END])

    @property
    def length(self) -> int | None:
        """Tokens of the only sequence that this mask fits, or None if it fits any."""
        return None

    @property
    def batch(self) -> int | None:
        """Batch rows, where the rule differs among them; None where one rule serves all."""
        return None

    @property
    def is_for_self_attention(self) -> bool:
        """Whether the rule speaks of queries and keys as the same tokens."""
        return False

    def check(self, positions: Tensor) -> None:
        """ValueError where the rule cannot be said as one interval per query, for ALL queries of a sequence, int64 [Sq]."""

    def __str__(self) -> str:
        """As it was made, cut short where it is long: for messages."""
        return _shortened(repr(self))

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is equal for equal masks, in every process, and differs for different ones."""
        return fingerprint(self)

    def __and__(self, other: Mask) -> Mask:
        """Keys that both masks show."""
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self, other)

    def __or__(self, other: Mask | Union) -> Union:
        """Keys that either mask shows. Where both show keys, `self` must begin first."""
        return _union((self,)) | other


def fingerprint(value: object) -> str:
    """The text of a value, cut short, and a hash of all of it."""
    whole = repr(value)
    return f"{_shortened(whole)} [{hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()}]"


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def closed(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Give rows without keys the form lo == hi; both ends stay monotone because max of monotone is monotone."""
    return lo, torch.maximum(lo, hi)


@_rule
@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        lo = torch.zeros_like(positions)[None]
        return lo, torch.full_like(lo, NO_END)


@_rule
@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and those before it."""

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positions)[None], positions[None] + 1


@_rule
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
        return closed(lo, hi)


@carried()
@dataclass(frozen=True)
class Prefix(Mask):
    """Prefix-LM: the first `tokens` see each other in both directions, every later token sees all before it and itself.

    tokens: >= 0, or one number per batch row.
    """

    tokens: int | tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", integer_or_rows("Prefix: tokens", self.tokens))

    @property
    def batch(self) -> int | None:
        return len(self.tokens) if isinstance(self.tokens, tuple) else None

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        hi = torch.maximum(positions + 1, per_row(self.tokens))
        return torch.zeros_like(hi), hi


@_rule
@dataclass(frozen=True)
class Chunked(Mask):
    """The sequence falls into chunks of `size` tokens, and a query sees its own chunk; with `& Causal()` its past only."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("Chunked: size", self.size, least=1))

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        start = positions.div(self.size, rounding_mode="floor")[None] * self.size
        return start.clamp_min(0), (start + self.size).clamp_min(0)


@_rule
@dataclass(frozen=True)
class FirstKeys(Mask):
    """Every query sees the first `tokens` keys, wherever it stands itself: attention sinks that are tokens.

    tokens: >= 0. `FirstKeys(4) & Causal() | Window(1023, 0)` is a window that never loses the first four.
    """

    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", integer("FirstKeys: tokens", self.tokens))

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        lo = torch.zeros_like(positions)[None]
        return lo, torch.full_like(lo, self.tokens)


@_rule
@dataclass(frozen=True)
class Intersection(Mask):
    """Keys that every mask of `masks` shows; made by `&`, which also flattens and drops what adds nothing."""

    masks: tuple[Mask, ...]

    @property
    def length(self) -> int | None:
        return next((m.length for m in self.masks if m.length is not None), None)

    @property
    def batch(self) -> int | None:
        return next((m.batch for m in self.masks if m.batch is not None), None)

    @property
    def is_for_self_attention(self) -> bool:
        return any(m.is_for_self_attention for m in self.masks)

    def check(self, positions: Tensor) -> None:
        for mask in self.masks:
            mask.check(positions)

    def rows(self) -> tuple[Tensor, Tensor]:
        firsts, pasts = zip(*(m.rows() for m in self.masks), strict=True)
        return reduce(torch.maximum, firsts), reduce(torch.minimum, pasts)

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        los, his = zip(*(m.bounds(positions) for m in self.masks), strict=True)
        return closed(reduce(torch.maximum, los), reduce(torch.minimum, his))


@_rule
@dataclass(frozen=True)
class Past(Mask):
    """Keys of `second` from the end of `first` on: what `second` adds to `first` where it begins no earlier."""

    first: Mask
    second: Mask

    @property
    def length(self) -> int | None:
        return self.first.length if self.second.length is None else self.second.length

    @property
    def batch(self) -> int | None:
        return self.first.batch if self.second.batch is None else self.second.batch

    @property
    def is_for_self_attention(self) -> bool:
        return self.first.is_for_self_attention or self.second.is_for_self_attention

    def rows(self) -> tuple[Tensor, Tensor]:
        return self.second.rows()

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first_lo, first_hi = self.first.bounds(positions)
        lo, hi = self.second.bounds(positions)
        return closed(torch.where(first_lo < first_hi, torch.maximum(lo, first_hi), lo), hi)

    def check(self, positions: Tensor) -> None:
        self.first.check(positions)
        self.second.check(positions)
        (first_lo, first_hi), (lo, hi) = self.first.bounds(positions), self.second.bounds(positions)
        if bool(((first_lo < first_hi) & (lo < hi) & (first_lo > lo)).any()):
            raise ValueError(
                f"mask |: {self.first} begins after {self.second} for some queries; put the mask that begins first first"
            )
        if any(bool((end.diff(dim=-1) < 0).any()) for end in self.bounds(positions)):
            raise ValueError(
                f"mask |: what {self.second} adds to {self.first} moves back from one query to the next; the first mask "
                "must not stop showing keys that the second still shows"
            )


@_rule
@dataclass(frozen=True)
class Union(metaclass=Traced):
    """Keys that any of several masks shows; made by `|`. Not one interval a query: attention() passes once per part.

    parts: masks that never show the same pair. Of `a | b`, a comes first and, wherever both show keys, begins no later.
    """

    parts: tuple[Mask, ...]

    def __and__(self, other: Mask | Union) -> Union:
        if not isinstance(other, (Mask, Union)):
            return NotImplemented
        others = other.parts if isinstance(other, Union) else (other,)
        return _union(tuple(mine & theirs for mine in self.parts for theirs in others))

    __rand__ = __and__

    def __or__(self, other: Mask | Union) -> Union:
        if not isinstance(other, (Mask, Union)):
            return NotImplemented
        others = other.parts if isinstance(other, Union) else (other,)
        _fit("|", (*self.parts, *others))
        past = (reduce(lambda rest, part: _past(part, rest), self.parts, part) for part in others)
        return _union((*self.parts, *past))


# The same three, where a part holds what changes with the batch, such as the lengths of documents: inputs of compiled code,
# not constants.
@carried()
@dataclass(frozen=True)
class IntersectionOfBatch(Intersection):
    pass


@carried()
@dataclass(frozen=True)
class PastOfBatch(Past):
    pass


@carried()
@dataclass(frozen=True)
class UnionOfBatch(Union):
    pass


def _are_constant(masks: tuple[Mask, ...]) -> bool:
    return all(mask.is_constant for mask in masks)


def _past(first: Mask, second: Mask) -> Past:
    return Past(first, second) if _are_constant((first, second)) else PastOfBatch(first, second)


def _union(parts: tuple[Mask, ...]) -> Union:
    return Union(parts) if _are_constant(parts) else UnionOfBatch(parts)


def intersect(a: Mask, b: Mask) -> Mask:
    """`a & b` in one canonical form, so that equal rules are equal keys of the plan cache."""
    parts: list[Mask] = []
    for mask in (a, b):
        for part in mask.masks if isinstance(mask, Intersection) else (mask,):
            if part != Full() and part not in parts:
                parts.append(part)
    _fit("&", parts)
    if len(parts) <= 1:
        return parts[0] if parts else Full()
    masks = tuple(sorted(parts, key=repr))
    return Intersection(masks) if _are_constant(masks) else IntersectionOfBatch(masks)


def _fit(operator: str, masks: Sequence[Mask]) -> None:
    """ValueError for masks that are made for different sequences."""
    for what in ("length", "batch"):
        sizes = {getattr(mask, what) for mask in masks} - {None}
        if len(sizes) > 1:
            kind = "sequence lengths" if what == "length" else "numbers of batch rows"
            raise ValueError(f"mask {operator}: the two sides are made for different {kind} {sorted(sizes)}")


def integer_or_rows(name: str, value: object) -> int | tuple[int, ...]:
    """One number for all batch rows, or a tuple with one for each."""
    if len(getattr(value, "shape", ())) == 1 or (isinstance(value, Sequence) and not isinstance(value, str)):
        numbers = tuple(integer(name, number) for number in integers(name, cast(Any, value)))
        if not numbers:
            raise ValueError(f"{name} is empty; must be a number, or one per batch row")
        return numbers
    return integer(name, value)


def per_row(numbers: int | tuple[int, ...]) -> Tensor:
    """int64 [1 or B, 1], to meet positions [Sq]."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(-1, 1)
