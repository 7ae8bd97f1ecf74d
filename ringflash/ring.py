"""Ring: the ranks that share a sequence, how it is cut among them, and the wire between them, as one value."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ringflash.parallel.gathered import GatheredTransport
from ringflash.parallel.inprocess import Alone
from ringflash.parallel.peer import PeerTransport
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.parallel.transport import Transport
from ringflash.schedule.integers import integer
from ringflash.schedule.layout import Layout, Zigzag, cut, shard_positions
from ringflash.schedule.traced import Traced, carried

# Calls remembered as compared, the oldest forgotten first: packed batches bring new masks for ever. Every rank makes the
# same calls in the same order, so all forget the same one.
AGREED = 1024
_REMEDY = {
    "length": ". Pass length= where the ranks hold different numbers of tokens",
    "query length": ". Pass query_length= where the ranks hold different numbers of queries",
    "batch": ". All ranks of a ring need the same batch",
    "mask": ". All ranks of a ring need the same batch",
}


@carried("rank", "ranks")
@dataclass(frozen=True, init=False)
class Ring(metaclass=Traced):
    """The ranks that hold one sequence together.

    group: a torch.distributed ProcessGroup, a DeviceMesh of one dimension, or None: the default group, or a ring of one
        where torch.distributed is not initialised. Ring creates no group; sub-groups of a larger job are fine, and
        `rank` counts inside the group.
    layout: how a sequence is cut; Zigzag balances causal attention.
    transport: "peer", send and receive between neighbours, hop by hop (the default); "symmetric", ranks of one host that
        put what is seen into each other's memory, on GPUs by copy engines, and short sequences under one launch of a
        kernel (see docs/decisions/0019 and 0021; where memory cannot be shared a warning says why, and "peer" serves);
        "gathered", everything at once between all pairs, which takes memory for all of them; or a Transport, in which
        case group stays None.
    gradient_dtype: torch.bfloat16 halves the bytes of gradients that travel in backward, and rounds their
        sums at every hop; None, the default, sends them in fp32 (fp64 for fp64). In bf16 the relative error of dk and dv (of
        dq, where queries travel) grows by 0.9e-3, 1.7e-3, 3.0e-3 and 4.8e-3 on 2, 4, 8 and 16 ranks, with "gathered" by
        at most 1.5e-3; rounding a result once to bf16 costs 1.6e-3. The same on every rank.
    check: True compares shapes, types, mask, score and layout among the ranks on the first call with each (one small
        exchange, on NCCL a wait for the device); a difference then raises the same error on every rank. What it cannot
        see are ranks that fall out of step later, each with a call that is already known: "always" compares every call,
        to find such a fault; False never does. The same on every rank.

    A copy of a Ring is the same Ring, for a copied model talks on the same wire; a process group cannot be pickled.

    Errors: TypeError for another kind of group; ValueError for a mesh of several dimensions, a group that this process
    is not in, an unknown transport; RuntimeError under torchrun before init_process_group.
    """

    transport: Transport
    layout: Layout
    check: bool | Literal["always"]
    gradient_dtype: torch.dtype | None

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        layout: Layout | None = None,
        transport: str | Transport | None = None,
        check: bool | Literal["always"] = True,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        layout = Zigzag() if layout is None else layout
        if not isinstance(layout, Layout):
            raise TypeError(f"Ring: layout is {layout!r}; must be a Layout such as Zigzag()")
        if not isinstance(check, bool) and check != "always":
            raise TypeError(f'Ring: check is {check!r}; must be True, False or "always"')
        if gradient_dtype not in (None, torch.bfloat16, torch.float32):
            # Sums in float16 overflow where those of bfloat16 inputs need not.
            raise ValueError(
                f"Ring: gradient_dtype = {gradient_dtype!r}; must be None, torch.bfloat16 or torch.float32"
            )
        object.__setattr__(self, "gradient_dtype", gradient_dtype)
        object.__setattr__(self, "transport", _wire(group, transport))
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "check", check)

    @property
    def rank(self) -> int:
        """This process's place in the ring."""
        return self.transport.rank

    @property
    def ranks(self) -> int:
        """Number of ranks in the ring."""
        return self.transport.ranks

    def __copy__(self) -> Ring:
        return self

    def __deepcopy__(self, memo: object) -> Ring:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("Ring: holds a process group, which cannot be pickled; save the model's state_dict instead")

    def with_layout(self, layout: Layout) -> Ring:
        """The same ranks and wire under another layout, for layouts that change with the batch, such as Balanced."""
        return Ring(layout=layout, transport=self.transport, check=self.check, gradient_dtype=self.gradient_dtype)

    def positions(self, length: int) -> Tensor:
        """Global positions of this rank's tokens of a sequence of `length`: int64 [S_local] on the CPU, increasing."""
        length = integer("positions: length", length)
        return self.layout.positions(length, self.rank, self.ranks)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a whole sequence, cut along `dim`; any type and any length.

        x: the same on every rank. Differentiable: the gradient of x is the whole one, as in one process, on every rank.
        """
        dim = _axis("shard", x, dim)
        part: Tensor = _Shard.apply(x, self, dim) if self.ranks > 1 else x
        return part

    def gather(self, x: Tensor, dim: int = 1, *, length: int | None = None) -> Tensor:
        """The whole sequence from every rank's part: the inverse of `shard`.

        length: tokens of the whole sequence; needed where the ranks do not divide it and the layout does not know it.
        Differentiable: each rank computes the same loss from the whole, and its part gets the gradient that it would
        have in one process, not ranks times that.
        """
        dim = _axis("gather", x, dim)
        N = self.whole_length("gather", x.shape[dim], length)
        if self.ranks == 1:
            return x
        others = (*x.shape[:dim], *x.shape[dim + 1 :])
        self.agree("gather", {"length": N, "shape without dim": others, "dim": dim, "dtype": str(x.dtype)})
        whole: Tensor = _Gather.apply(x, self, dim, N)
        return whole

    def whole_length(self, caller: str, local: int, length: int | None, name: str = "length") -> int:
        """Tokens of the whole sequence when this rank holds `local` of them; ValueError where they do not fit.

        length: what the caller was told, as its argument `name`.
        """
        known = self.layout.length
        if length is None:
            N = local * self.ranks if known is None else known
        else:
            N = integer(f"{caller}: {name}", length)
        if known not in (None, N):
            raise ValueError(f"{caller}: {name} = {N}, but the ring's {self.layout} is made for {known} tokens")
        expected = cut(self.layout, N, self.ranks).shard_lengths[self.rank]
        if expected != local:
            raise ValueError(
                f"{caller}: rank {self.rank} of {self.ranks} holds {local} tokens; {self.layout} gives it {expected} of "
                f"{name} = {N}. Pass the whole sequence's {name}, and cut it with Ring.shard"
            )
        return N

    def agree(self, caller: str, facts: dict[str, Any]) -> None:
        """Raise on every rank if `facts`, which decide what is sent, differ among the ranks. Once per set of facts.

        "call" is among them, for a rank may be in another function than its neighbour.
        """
        if not self.check or self.ranks == 1:
            return
        wire = type(self.transport).__name__
        facts = {"call": caller, **facts, "layout": self.layout.fingerprint, "transport": wire}
        key = tuple(facts.items())
        agreed = self.transport.agreed
        if key in agreed and self.check != "always":
            return
        everyone: list[Any] = self.transport.all_gather_object(facts)
        for name in facts:
            values = [other.get(name) for other in everyone]
            if any(value != values[0] for value in values):
                by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{caller}: {name} differs among the ranks of the ring; {by_rank}{_REMEDY.get(name, '')}"
                )
        agreed[key] = None
        if len(agreed) > AGREED:
            del agreed[next(iter(agreed))]


def ring_of_group(group: dist.ProcessGroup | None) -> Ring | None:
    """The ring of a group, for callers that name the group in every call; None before init_process_group.

    The same as long as the group lives, on every rank: what ranks have compared is kept with a ring, and one that forgot
    would compare again, alone.
    """
    if group is None and not dist.is_initialized() and not dist.is_torchelastic_launched():
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return Ring(group)  # or why there is none
    rings = _rings()
    if group not in rings:
        rings[group] = Ring(group)
    return rings[group]


@lru_cache(maxsize=1)
def _rings() -> weakref.WeakKeyDictionary[dist.ProcessGroup, Ring]:
    """By group, which a ring does not hold."""
    return weakref.WeakKeyDictionary()


def _wire(group: dist.ProcessGroup | DeviceMesh | None, transport: str | Transport | None) -> Transport:
    if isinstance(transport, Transport):
        if group is not None:
            raise ValueError("Ring: group and a Transport instance exclude each other; the transport knows its ranks")
        return transport
    if transport not in (None, "peer", "gathered", "symmetric"):
        raise ValueError(
            f"Ring: transport = {transport!r}; must be None, 'peer', 'gathered', 'symmetric' or a Transport"
        )
    if group is None:
        if not dist.is_initialized():
            if dist.is_torchelastic_launched():
                raise RuntimeError("Ring: launched by torchrun, but init_process_group was not called before Ring()")
            return Alone()
        group = dist.group.WORLD
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to processes that it leaves out
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"Ring: mesh has {group.ndim} dimensions {group.mesh_dim_names}; pass one, such as mesh['cp']"
            )
        group = outside if group.get_coordinate() is None else group.get_group()
    if group is outside:
        raise ValueError("Ring: this process is not in the group; make a Ring of it on its members only")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"Ring: group is {type(group).__name__}; must be a ProcessGroup, a 1-D DeviceMesh or None")
    wire = PeerTransport(group)
    if transport == "symmetric" and wire.ranks > 1:
        return SymmetricTransport(wire, wire.reach())
    return GatheredTransport(wire) if transport == "gathered" else wire


def check_plain(name: str, x: Any) -> None:
    """TypeError for what is no tensor, or one whose entries do not lie in strides."""
    # Nearly always, and a call of attention asks three times.
    if type(x) in (Tensor, Parameter) and x.layout == torch.strided and not x.is_nested and not x.is_quantized:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; must be a tensor")
    kinds = {
        "nested": x.is_nested,
        "a DTensor": hasattr(x, "device_mesh"),
        "quantized": x.is_quantized,
        str(x.layout): x.layout != torch.strided,
    }
    for kind in (kind for kind, is_so in kinds.items() if is_so):
        raise TypeError(f"{name} is {kind}; must be a plain tensor of this rank's own")


def _axis(caller: str, x: Tensor, dim: int) -> int:
    check_plain(f"{caller}: x", x)
    dim = integer(f"{caller}: dim", dim, least=-x.dim())
    if dim >= x.dim():
        raise ValueError(f"{caller}: dim = {dim}; x of shape {tuple(x.shape)} has no such axis")
    return dim % x.dim()


def _take(x: Tensor, ring: Ring, dim: int) -> Tensor:
    positions = shard_positions(ring.layout, x.shape[dim], ring.rank, ring.ranks)
    return _as_plain(x).index_select(dim, positions.to(x.device)).view(x.dtype)


def _collect(x: Tensor, ring: Ring, dim: int, length: int) -> Tensor:
    positions = [shard_positions(ring.layout, length, rank, ring.ranks) for rank in range(ring.ranks)]
    shapes = [(*x.shape[:dim], p.numel(), *x.shape[dim + 1 :]) for p in positions]
    shards = ring.transport.all_gather(_as_plain(x), shapes)
    whole = shards[0].new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])
    return whole.index_copy_(dim, torch.cat(positions).to(x.device), torch.cat(shards, dim)).view(x.dtype)


# Types that torch indexes on every device, by bytes per entry.
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_plain(x: Tensor) -> Tensor:
    """The same bytes as a type that can be indexed: float8 and wide unsigned integers cannot."""
    x = x.resolve_conj().resolve_neg()
    return x if x.is_complex() else x.view(_PLAIN[x.dtype.itemsize])


class _Shard(torch.autograd.Function):
    """Its gradient is the gathered one, and that of a gathered one is its shard: both can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, dim: int) -> Tensor:
        ctx.cut = (ring, dim, x.shape[dim])
        return _take(x, ring, dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(dx, *ctx.cut), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, dim: int, length: int) -> Tensor:
        ctx.cut = (ring, dim)
        return _collect(x, ring, dim, length)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        return _Shard.apply(dx, *ctx.cut), None, None, None
