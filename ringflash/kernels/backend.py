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
from ringflash.kernels.table import KernelTable, MaskKind, committed, gpu_name, head_dim_class
from ringflash.schedule.plan import Plan
from ringflash.schedule.tiles import Bounds

# Where each backend lives. Modules are imported when they are asked, so that the core needs neither triton nor a GPU.
BACKENDS = {
    "hopper": "ringflash.kernels.hopper.launch",
    "triton": "ringflash.kernels.triton.launch",
    "cudnn": "ringflash.kernels.vendor",
    "flash": "ringflash.kernels.vendor",
    "fa4": "ringflash.kernels.vendor",
    "reference": "ringflash.kernels.reference",
}
# Who is asked first where nobody is named and no table has measured the call. On a CPU the reference is the kernel.
PREFERENCE = {"cuda": ("hopper", "triton", "reference"), "cpu": ("reference",)}


@dataclass(frozen=True)
class Call:
    """What a backend must know to say whether it can serve. Heads and dims are those of all inputs of one call.

    terms: of the score, beside its scale; see Score.terms.
    needs_dlse: lse is an output that a gradient may come back through.
    direction: forward and backward may be served by two backends.
    mask, length_class: where to look in a table of measured speeds. "other" is every mask but one full or causal square;
        length_class is that of the whole sequence, which all ranks know. See KernelTable.
    is_alone: what the backend returns is the result: one source, one mask, no sinks to merge, lse not asked for.
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
    mask: MaskKind = "other"
    length_class: int = 0
    is_alone: bool = False


@dataclass(frozen=True)
class Rows:
    """What backward knows of each query row, over the keys of all sources.

    out, dout: [B, Sq, Hq, Dv] the merged output and its gradient, in q's type.
    lse, delta: [B, Sq, Hq] laid out like Partial.lse; delta = rowsum(dout * out) - dlse, empty where nobody reads it.
    has_dlse: whether delta holds a gradient of lse, which kernels that form their own delta cannot know.
    """

    out: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    has_dlse: bool


@dataclass(frozen=True)
class Arrivals:
    """Rows (of keys, or of queries) that are still on their way when a kernel is launched, in cells of `rows` each.

    flags: int32 [cells]; one that is not 0 says that all rows of its cell are there.
    rows: 128 times a power of two.
    late: those from late[0] to late[1] come last.
    places: int32 [blocks of 128 rows]; the row of `shard` that begins a block, or -1 - that of what arrives.
    shard: this rank's own tensors. Those that are given hold what arrives only, fewer rows than the bounds have.
    """

    flags: Tensor
    rows: int
    late: tuple[int, int]
    places: Tensor
    shard: tuple[Tensor, ...]


@dataclass(frozen=True)
class Departures:
    """Sums that leave as soon as they are complete, for some heads at a time.

    flags: int32 [groups]; a kernel sets i to 1 when sums are complete for heads [i heads, (i + 1) heads) of what departs,
        counted over the batch. 0 beforehand, or 1 where nothing departs, so that no kernel will say so.
    counts: int32 [groups] for the kernel's own use, 0 beforehand.
    blocks: int32 [blocks of 128 keys]; 1 where some of these keys' gradients, or of the queries' that see them, depart.
    departing: how many of those blocks there are.
    """

    flags: Tensor
    counts: Tensor
    heads: int
    blocks: Tensor
    departing: int


@dataclass(frozen=True)
class Lands:
    """What of a backward call arrives, and departs, while its kernel is at work: all gradients come of one call.

    travels: "keys": all keys that these queries see; adds to dq, dk and dv, of which dk and dv depart. "queries": all
        queries that see these keys, with what is known of them; adds to dq, which departs, and writes dk and dv whole, in
        q's type.
    """

    travels: Literal["keys", "queries"]
    arrivals: Arrivals
    departures: Departures


class Backend(ABC):
    """Attention of local queries over one source's keys, on one device.

    Shapes: q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], last stride 1; Hq a multiple of Hk, query head h uses
    key head h // (Hq // Hk). Bounds are local: rows are queries, columns are keys.
    """

    name: str
    # Whether out and gradients come rounded to q's type even where more is to be added, so that a user must ask for it.
    rounds_partials = False
    # Whether backward reads Rows.delta; kernels that form it themselves do not.
    reads_delta = True

    # Whether forward takes `arrivals`.
    waits = False

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
        Backends that wait also take `arrivals`: Arrivals | None, for k and v that are still arriving.
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
        Backends for which lands_backward says so also take `lands`: Lands | None.
        """

    def lands_backward(self, head_dim: int, value_dim: int) -> bool:
        """Whether backward takes `lands` for heads of these dims."""
        return False

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, bounds: Bounds, score: Score, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in q's type, where these keys are all that the queries see, and the queries all that see the keys."""
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        self.backward(q, k, v, rows, bounds, score, dq, dk, dv, deterministic, is_all=True)
        return dq, dk, dv

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


def check_backend(backend: object) -> None:
    """ValueError for a name that no backend has."""
    is_known = backend is None or isinstance(backend, KernelTable) or (isinstance(backend, str) and backend in BACKENDS)
    if not is_known:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"attention: backend = {backend!r}; must be None, a KernelTable or one of {names}")


@lru_cache(maxsize=256)
def choose(call: Call, name: str | KernelTable | None = None) -> Choice:
    """The backend named, or the first that serves in the order of a table: the one given, or the device's own.

    Raises ValueError for an unknown name or another device's table, NotImplementedError with every reason if nobody can
    serve.
    """
    check_backend(name)
    refusals: list[tuple[str, str]] = []
    for candidate in (name,) if isinstance(name, str) else _order(call, name):
        backend, reason = _load(candidate)
        if backend is not None:
            unasked = None if isinstance(name, str) else _must_be_named(backend, call)
            reason = unasked or backend.refuses(call)
            if reason is None:
                _warn_of_reference(candidate, refusals)
                return Choice(backend, tuple(refusals))
        refusals.append((candidate, str(reason)))
    reasons = "attention: " + "; ".join(cannot_run(n, reason) for n, reason in refusals)
    raise NotImplementedError(f"{reasons}. {OTHER_BACKENDS}" if isinstance(name, str) else reasons)


def _order(call: Call, table: KernelTable | None) -> tuple[str, ...]:
    """Who is asked, in turn: those that were measured by speed, then the device's preference."""
    gpu, preference = gpu_name(call.device), PREFERENCE.get(call.device.type, ("reference",))
    if table is None:
        table = committed(gpu)
    elif table.gpu != gpu:
        raise ValueError(
            f"attention: backend is a KernelTable of {table.gpu!r}, the tensors are on {gpu!r}; measure one here with "
            "`python -m ringflash bench kernels --out FILE`"
        )
    if table is None:
        return preference
    # Of all its cells, so that a table is refused at its first call and not in the middle of a training.
    if unknown := [name for speeds in table.cells.values() for name in speeds if name not in BACKENDS]:
        raise ValueError(
            f"attention: backend is a KernelTable that ranks {unknown[0]!r}; it knows {', '.join(BACKENDS)}"
        )
    measured = table.order(call.direction, call.head_dim, call.mask, call.length_class)
    return tuple(dict.fromkeys((*measured, *preference)))


def _must_be_named(backend: Backend, call: Call) -> str | None:
    """Why a table alone does not make `choose` take this backend, which others keep; None where it does."""
    if not backend.rounds_partials:
        return None
    if not call.is_alone:
        return "it rounds what is yet to be merged, so it serves here only when named"
    if call.head_dim != head_dim_class(call.head_dim):
        return f"head_dim {call.head_dim} was not measured, so it serves here only when named"
    return None


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
