"""Score: all that happens between q . k and the softmax, and which probabilities are dropped after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ringflash.kernels.philox import philox
from ringflash.schedule.integers import integer


@dataclass(frozen=True)
class Score:
    """What is done to q . k before the softmax, in this order, and to the probabilities after it.

        s = scale * q . k
        s = softcap * tanh(s / softcap)
        s = s - alibi[head] * |query position - key position|
        p = exp(s) / (sum of exp(s) over the visible keys + exp(sinks[head]))
        p = keep * p / (1 - dropout)

    scale: factor of the scores; None is 1 / sqrt(head dim), 0.0 is a value and gives the plain average.
    softcap: bound of the scores, > 0; None leaves them as they are.
    alibi: one slope per query head, a list, tuple or tensor; no gradient. Positions are those in the whole sequence.
    sinks: logits of one key per query head that has no value, [Hq], < inf, on the device of q; differentiable.
        Each rank gets the gradient of its own queries: sum it over the ring like that of any weight.
    dropout: probability that a pair is dropped, in [0, 1); needs a seed.
    seed: in [0, 2**62). Whether a pair is kept depends on (seed, batch row, head, query position, key position) alone, so
        it is the same for every number of ranks and when activations are recomputed. No generator is read or advanced:
        give every layer and step another seed, the same on all ranks.

    Source: Press et al., arXiv:2108.12409 (ALiBi); Xiao et al., arXiv:2309.17453 (sinks); Salmon et al., SC 2011 (the
    counter-based numbers behind dropout).
    """

    scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    dropout: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _finite(name, getattr(self, name), "a float or None"))
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"Score: softcap = {self.softcap}; must be > 0, or None for none")
        if self.alibi is not None:
            object.__setattr__(self, "alibi", _slopes(self.alibi))
        if self.sinks is not None:
            _check_sinks(self.sinks)
        object.__setattr__(self, "dropout", _finite("dropout", self.dropout, "a float"))
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Score: dropout = {self.dropout}; must be in [0, 1)")
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("Score: seed", self.seed))
        if (self.seed is None) if self.dropout > 0 else (self.seed is not None):
            raise ValueError(
                f"Score: dropout = {self.dropout} and seed = {self.seed}; dropout needs a seed, and a seed is for dropout"
            )

    def resolve(self, head_dim: int) -> Score:
        """The same score with every default filled in."""
        return self if self.scale is not None else replace(self, scale=head_dim**-0.5)

    @property
    def factor(self) -> float:
        """The scale of a resolved score."""
        assert self.scale is not None, "Score.resolve() comes first"
        return self.scale

    @property
    def terms(self) -> frozenset[str]:
        """Names of what is there beside the scale."""
        there = {"softcap": self.softcap, "alibi": self.alibi, "sinks": self.sinks, "dropout": self.dropout or None}
        return frozenset(name for name, value in there.items() if value is not None)

    @property
    def fact(self) -> str:
        """What must be alike on all ranks. The seed may change every call; it decides no message and no sum."""
        sinks = None if self.sinks is None else f"{self.sinks.shape[0]} heads"
        return f"scale={self.scale}, softcap={self.softcap}, alibi={self.alibi}, sinks={sinks}, dropout={self.dropout}"

    def check(self, q: Tensor) -> None:
        """ValueError where a term does not fit q [B, Sq, Hq, D]."""
        Hq = q.shape[2]
        if self.alibi is not None and len(self.alibi) != Hq:
            raise ValueError(
                f"attention: score.alibi has {len(self.alibi)} slopes; q has {Hq} heads, one slope for each"
            )
        if self.sinks is not None:
            if self.sinks.shape[0] != Hq:
                raise ValueError(f"attention: score.sinks has {self.sinks.shape[0]} entries; q has {Hq} heads")
            if self.sinks.device != q.device:
                raise ValueError(
                    f"attention: score.sinks is on {self.sinks.device} and q on {q.device}; must be on one"
                )

    def transform(self, s: Tensor, rows_at: Tensor, columns_at: Tensor) -> tuple[Tensor, Tensor | None]:
        """(scores, their derivative by scale * q . k or None for 1), of s = scale * q . k [B, Hk, group, rows, columns].

        rows_at, columns_at: global positions.
        """
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(s / self.softcap)
            s, slope = self.softcap * bent, 1 - bent * bent
        if self.alibi is not None:
            distance = (rows_at[:, None] - columns_at[None, :]).abs().to(s.dtype)
            s = s - torch.tensor(self.alibi, dtype=s.dtype, device=s.device).view(*s.shape[1:3], 1, 1) * distance
        return s, slope

    def keep(self, like: Tensor, rows_at: Tensor, columns_at: Tensor) -> Tensor:
        """0 for dropped pairs, 1 / (1 - dropout) for the others, of the shape [B, Hk, group, rows, columns] of `like`."""
        B, Hk, group = like.shape[:3]
        row, head = torch.arange(B, device=like.device), torch.arange(Hk * group, device=like.device)
        bits = philox(
            cast(int, self.seed),
            rows_at[:, None].long(),
            columns_at.long(),
            head.view(Hk, group, 1, 1),
            row.view(-1, 1, 1, 1, 1),
        )
        return (bits >= self.threshold).to(like.dtype) / (1 - self.dropout)

    @property
    def threshold(self) -> int:
        """A pair is dropped where its 32 random bits are below this."""
        return round(self.dropout * 2**32)


def _finite(name: str, value: object, accepted: str) -> float:
    # numpy's floats are welcome, and no subclass of float
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Score: {name} is {type(value).__name__}; must be {accepted}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"Score: {name} is too large; must be finite") from None
    if not abs(number) < float("inf"):
        raise ValueError(f"Score: {name} = {number}; must be finite")
    return number


def _slopes(alibi: object) -> tuple[float, ...]:
    if isinstance(alibi, Tensor):
        if alibi.requires_grad:
            raise NotImplementedError("Score: alibi requires a gradient; slopes are constants, detach() them")
        if alibi.dim() != 1:
            raise ValueError(f"Score: alibi has shape {tuple(alibi.shape)}; must be one slope per query head, [Hq]")
        alibi = alibi.tolist()
    elif len(getattr(alibi, "shape", ())) == 1:
        alibi = cast(Any, alibi).tolist()  # numpy
    if not isinstance(alibi, Sequence) or isinstance(alibi, str):
        raise TypeError(
            f"Score: alibi is {type(alibi).__name__}; must be a list, tuple or tensor of slopes, one per head"
        )
    if not alibi:
        raise ValueError("Score: alibi is empty; must be a list, tuple or tensor of slopes, one per head")
    return tuple(_finite(f"alibi[{i}]", cast(Any, slope), "a float") for i, slope in enumerate(alibi))


def _check_sinks(sinks: object) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"Score: sinks is {type(sinks).__name__}; must be a tensor [Hq]")
    if sinks.dim() != 1 or sinks.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"Score: sinks has shape {tuple(sinks.shape)} and {sinks.dtype}; must be [Hq], of 16, 32 or 64 bits"
        )
    # Where a look costs nothing: on a GPU it would wait, and code that is compiled has no numbers.
    is_known = sinks.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_known and not bool((sinks.detach() < math.inf).all()):
        raise ValueError("Score: sinks holds inf or NaN; must be numbers < inf (-inf is no sink)")
