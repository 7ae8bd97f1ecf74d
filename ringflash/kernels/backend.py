"""The contract that every backend meets, Score, and the choice among backends."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from ringflash.kernels.partial import Partial, accumulate_dtype, delta
from ringflash.kernels.score import Score
from ringflash.schedule.plan import Plan
from ringflash.schedule.tiles import Bounds

# Where each backend lives. Modules are imported when they are asked, so that the core needs neither triton nor a GPU.
BACKENDS = {
    "hopper": "ringflash.kernels.hopper.launch",
    "triton": "ringflash.kernels.triton.launch",
    "cudnn": "ringflash.kernels.vendor",
    "flash": "ringflash.kernels.vendor",
    "reference": "ringflash.kernels.reference",
}
# Who is asked first where the user names nobody. On a CPU the reference is the kernel; torch's own flash kernels round
# every partial result to the input type, so inside a ring they are taken only when named.
PREFERENCE = {"cuda": ("hopper", "triton", "reference"), "cpu": ("reference",)}


@dataclass(frozen=True)
class Call:
    """What a backend must know to say whether it can serve. Heads and dims are those of all inputs of one call.

    terms: of the score, beside its scale; see Score.terms.
    needs_dlse: lse is an output that a gradient may come back through.
    direction: forward and backward may be served by two backends.
    """

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    scale: float
    terms: frozenset[str]
    deterministic: bool
    needs_dlse: bool = False
    direction: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True)
class Rows:
    """What backward knows of each query row, over the keys of all sources.

    out, dout: [B, Sq, Hq, Dv] the merged output and its gradient, in q's type.
    lse, delta: [B, Sq, Hq] laid out like Partial.lse; delta = rowsum(dout * out) - dlse.
    has_dlse: whether delta holds a gradient of lse, which kernels that form their own delta cannot know.
    """

    out: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    has_dlse: bool


class Backend(ABC):
    """Attention of local queries over one source's keys, on one device.

    Shapes: q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], last stride 1; Hq a multiple of Hk, query head h uses
    key head h // (Hq // Hk). Bounds are local: rows are queries, columns are keys.
    """

    name: str

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """None, or in one sentence why this backend cannot serve the call. Never raises."""

    def refuses_mask(self, plan: Plan) -> str | None:
        """None, or why some rank's part of this plan cannot be computed; the same answer on every rank."""
        return None

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        score: Score,
        into: Partial | None = None,
        is_last: bool = False,
    ) -> Partial:
        """Attention over these keys, merged into `into` (in place) if given. See Partial for shapes.

        Sinks are left out: they are merged once, when all keys are done.
        is_last: no keys follow, so out may come back rounded to q's type, which spares a pass over it.
        """

    @abstractmethod
    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        bounds: Bounds,
        score: Score,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        deterministic: bool,
        is_all: bool = False,
    ) -> None:
        """Add these keys' share of the gradients into dq, dk, dv, given by the caller in the accumulate type.

        deterministic: the same bits on every run.
        is_all: these keys are all that the queries see, and the queries all that see the keys. dq, dk and dv are then
            unset memory in q's type, to be written whole.
        """

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """See partial.delta."""
        return delta(out, dout, dlse)


@contextmanager
def summed(is_all: bool, q: Tensor, *gradients: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For backends that only add: sums to add into, from which unset `gradients` are written where `is_all`."""
    if not is_all:
        yield gradients
        return
    sums = tuple(x.new_zeros(x.shape, dtype=accumulate_dtype(q.dtype)) for x in gradients)
    yield sums
    for x, total in zip(gradients, sums, strict=True):
        x.copy_(total)


@dataclass(frozen=True)
class Choice:
    """The backend that serves, and why the ones asked before it do not: (name, reason) in the order they were asked."""

    backend: Backend
    refusals: tuple[tuple[str, str], ...]


def check_backend(name: object) -> None:
    """ValueError for a name that no backend has."""
    if name is not None and (not isinstance(name, str) or name not in BACKENDS):
        raise ValueError(f"attention: backend = {name!r}; must be None or one of {', '.join(map(repr, BACKENDS))}")


@lru_cache(maxsize=256)
def choose(call: Call, name: str | None = None) -> Choice:
    """The backend named, or the first of the device's preference that does not refuse.

    Raises ValueError for an unknown name, NotImplementedError with every reason if nobody can serve.
    """
    check_backend(name)
    refusals: list[tuple[str, str]] = []
    for candidate in PREFERENCE.get(call.device.type, ("reference",)) if name is None else (name,):
        backend, reason = _load(candidate)
        if backend is not None:
            reason = backend.refuses(call)
            if reason is None:
                _warn_of_reference(candidate, refusals)
                return Choice(backend, tuple(refusals))
        refusals.append((candidate, str(reason)))
    reasons = "attention: " + "; ".join(cannot_run(n, reason) for n, reason in refusals)
    raise NotImplementedError(reasons if name is None else f"{reasons}. {OTHER_BACKENDS}")


def _warn_of_reference(chosen: str, refusals: list[tuple[str, str]]) -> None:
    """Once per kind of call: right, but far slower than what was asked first."""
    if chosen == "reference" and refusals:
        reasons = "; ".join(cannot_run(name, reason) for name, reason in refusals)
        warnings.warn(f"attention: {reasons}. The reference serves it, in plain torch and slowly", stacklevel=4)


OTHER_BACKENDS = "Use backend='reference' or None"


def cannot_run(name: str, reason: str) -> str:
    """The sentence of every refusal."""
    return f"backend {name!r} cannot run this call: {reason}"


def _load(name: str) -> tuple[Backend | None, str | None]:
    """The backend, or why its module cannot be imported here."""
    try:
        module = import_module(BACKENDS[name])
    except ImportError as error:
        return None, f"{error}"
    return module.backends()[name], None
