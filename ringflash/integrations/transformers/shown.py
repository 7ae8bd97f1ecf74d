"""What a model's own mask shows: read off transformers' mask functions, as one interval of keys for each query.

transformers says masks as functions of (batch row, head, query, key) and offers no other way to ask what they mean. So they
are asked: its own boolean mask is made a block of rows at a time, and each row is read as an interval. That costs a few
bytes for each pair and forward, where attention costs 4 * head dim * heads * layers operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringflash.schedule.mask import Causal, Full, Mask, Window
from ringflash.schedule.traced import carried

# Looked at together: 64 MiB of one byte each.
PAIRS_AT_ONCE = 2**26

COUNTED = ("q_offset", "cache_position", "kv_offset")

Ends = tuple[Tensor, Tensor]  # (lo, hi) int64 [1 or B, Sq] on the CPU: keys lo <= key < hi, as local indices


@dataclass(eq=False)
class Shown:
    """The mask of one forward as its layers get it; read when the first of them asks, once for all.

    asked: what transformers passes to mask functions.
    kept: what layers found out with it, for the others of the same forward.
    """

    asked: dict[str, Any]
    kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def ends(self) -> Ends | None:
        """None where some query sees no single interval, or intervals move back."""
        return read(self._blocks(), self.asked["kv_length"])

    @property
    def ndim(self) -> int:
        """Asked where transformers prepares a mask a second time, which it does for tensors of 4 axes alone."""
        raise NotImplementedError(
            "attn_implementation='ring': masks are made ahead of the model, as for static caches; must be made in it. Leave "
            "cache_implementation out, or use attn_implementation='eager' to generate"
        )

    def _is_no_tensor(self, *_: Any) -> NoReturn:
        """Models whose attention is their own, such as Bloom, add the mask to their scores, or cut it."""
        raise NotImplementedError(
            "attn_implementation='ring': the model's attention is its own and asks no registry, so no other can serve it; "
            "use attn_implementation='eager'"
        )

    __add__ = __radd__ = __getitem__ = __mul__ = __rmul__ = _is_no_tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"attn_implementation='ring': the model asks its mask for {name!r}, and it is none of torch's: it is read by "
            "layers that attend through transformers' registry. Use attn_implementation='eager'"
        )

    @property
    def local_size(self) -> int | None:
        """Of a window or chunk, where the mask has one."""
        size: int | None = self.asked.get("local_size")
        return size

    @property
    def hides_tokens(self) -> bool:
        """Whether an attention_mask came with the batch that hides some of it."""
        padding = self.asked.get("attention_mask")
        return padding is not None and not bool(padding.all())

    def _blocks(self) -> Iterator[Tensor]:
        """transformers' own mask, true where a key is seen: bool [B, 1, rows, Sk], some rows at a time."""
        from transformers import AttentionMaskInterface

        shown = AttentionMaskInterface()["sdpa"]
        asked = {**self.asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        # Older releases name queries by their positions, newer ones by a number and an offset.
        at = asked.pop("cache_position", None)
        number, offset = (asked.pop("q_length", None), asked.pop("q_offset", 0)) if at is None else (at.shape[0], 0)
        rows = max(1, PAIRS_AT_ONCE // max(1, asked["batch_size"] * asked["kv_length"]))
        for first in range(0, number, rows):
            past = min(first + rows, number)
            which = {"q_length": past - first, "q_offset": offset + first}
            yield shown(**asked, **(which if at is None else {"cache_position": at[first:past]}))


def show(**asked: Any) -> Shown:
    """transformers' mask functions say what a mask is to show; ours keeps the question, for layers that know the ring."""
    # Static caches count in these tensors, and have counted on when the question is read.
    return Shown({name: x.clone() if name in COUNTED and isinstance(x, Tensor) else x for name, x in asked.items()})


def blocks_of(mask: Tensor, keys: int) -> Iterator[Tensor]:
    """A prepared mask [B, 1, Sq, >= keys], boolean or additive, as `read` takes it."""
    mask = mask[..., :keys]
    yield mask if mask.dtype == torch.bool else mask == 0


def is_plain(mask: Tensor, keys: int) -> bool:
    """Whether a mask of 4 axes only shows and hides: one for all heads, with nothing added to what is shown."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] < keys:
        return False
    if mask.dtype == torch.bool:
        return True
    hidden = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    return bool(((mask == 0) | (mask < hidden)).all())


def read(blocks: Iterator[Tensor], keys: int) -> Ends | None:
    """The interval of every query of a boolean mask, or None where there is none, or they move back."""
    los, counts, torn = [], [], []
    for block in blocks:
        seen = block[:, 0]  # [B, rows, Sk]
        count = seen.sum(-1)
        lo = seen.view(torch.uint8).argmax(-1)
        key = torch.arange(keys, device=seen.device)
        inside = (key >= lo[..., None]) & (key < (lo + count)[..., None])
        los.append(lo)
        counts.append(count)
        torn.append((inside != seen).any())
    lo, count = torch.cat(los, -1).cpu(), torch.cat(counts, -1).cpu()
    if bool(torch.stack(torn).any()):
        return None
    # A row that sees nothing is an empty interval where the row before ended.
    past = torch.where(count > 0, lo + count, 0)
    before = past.cummax(-1).values
    lo, hi = torch.where(count > 0, lo, before), torch.where(count > 0, past, before)
    if bool((lo.diff(dim=-1) < 0).any() or (hi.diff(dim=-1) < 0).any()):
        return None
    is_alike = bool((lo == lo[:1]).all() and (hi == hi[:1]).all())
    return (lo[:1], hi[:1]) if is_alike else (lo, hi)


def ends_of(mask: Mask, queries: int, keys: int) -> Ends:
    """What one of our masks shows, the last query standing at the last key."""
    lo, hi = mask.bounds(torch.arange(keys - queries, keys))
    return lo.clamp(0, keys), hi.clamp(0, keys)


def cut_at(ends: Ends, is_border: Tensor) -> Ends:
    """The same, where nobody sees across a token at which `is_border` [1 or B, S] is true."""
    S = is_border.shape[-1]
    index = torch.arange(S)
    start = torch.where(is_border, index, 0).cummax(-1).values
    following = torch.where(is_border, index, S).roll(-1, dims=-1)
    following[..., -1] = S
    stop = following.flip(-1).cummin(-1).values.flip(-1)
    lo = torch.maximum(ends[0], start)
    return lo, torch.maximum(torch.minimum(ends[1], stop), lo)


def as_mask(ends: Ends, keys: int) -> Mask:
    """By the name of the rule where it has one, so that plans and kernels know it again."""
    lo, hi = ends
    position = torch.arange(keys - lo.shape[-1], keys)
    left, right = int((position - lo).max().clamp_min(0)), int((hi - 1 - position).max().clamp_min(0))
    for rule in (Full(), Causal(), Window(left, right)):
        its_lo, its_hi = ends_of(rule, lo.shape[-1], keys)
        if bool((its_lo == lo).all() and (its_hi == hi).all()):
            return rule
    return Intervals(lo, hi, keys - lo.shape[-1])


@carried()
@dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """Intervals as they were read, of one forward.

    lo, hi: int64 [1 or B, Sq], keys lo <= key < hi of each query.
    first: the position of the first query.
    """

    lo: Tensor
    hi: Tensor
    first: int

    @property
    def batch(self) -> int | None:
        return self.lo.shape[0] if self.lo.shape[0] > 1 else None

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        row = positions - self.first
        return self.lo[:, row], self.hi[:, row]
