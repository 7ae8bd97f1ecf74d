"""The functions of ring-flash-attention, by their names and signatures, over ringflash.attention.

    from ringflash.compat.ring_flash_attn import zigzag_ring_flash_attn_func

Shapes are theirs, of this rank's shard: q, k, v [B, S, H, D], kv [B, S, 2, Hk, D], qkv [B, S, 3, H, D]; those named varlen
take the tokens of packed documents without a batch axis, [T, H, D], and cu_seqlens. They return out [B, S, H, Dv] or
[T, H, Dv], with return_attn_probs (out, lse, None), lse [B, H, S] or [H, T], natural log, fp32.

What differs: results are exact for every mask, with sums in fp32; `window_size` holds over the whole sequence;
`causal=False` is served in every layout; and what is not served is an error. alibi_slopes are served as one number a head.

cu_seqlens on a GPU make the host wait in every call: give them on the CPU, or leave the names behind for
ringflash.attention, where a mask is made once per batch.

Errors as of ringflash.attention, and ValueError for arguments that contradict each other.

Source of the interface: github.com/zhuzilin/ring-flash-attention, 0.1.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Signature, signature
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ringflash.attention import attention
from ringflash.kernels.score import Score
from ringflash.ring import ring_of_group
from ringflash.schedule.cut import Cut
from ringflash.schedule.documents import Documents
from ringflash.schedule.integers import integer, integers
from ringflash.schedule.layout import Contiguous, Layout, Striped, Zigzag, blocks, mirrored, starts_by_document
from ringflash.schedule.mask import Causal, Full, Mask, Window

Result = Any  # out, or (out, lse, None)


@dataclass(frozen=True)
class PerDocument(Layout):
    """Every document cut among the ranks for itself, into P pieces, or into 2 P like Zigzag.

    As scripts for ring-flash-attention lay out packed documents. DocumentZigzag, which deals each document from another rank
    on, is for those that leave it to Ring.shard.
    """

    lengths: tuple[int, ...]
    is_zigzag: bool

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def cut(self, length: int, ranks: int) -> Cut:
        owner = mirrored(ranks) if self.is_zigzag else torch.arange(ranks)
        starts = starts_by_document(self.lengths, owner.shape[0])
        return blocks(starts.flatten(), owner.repeat(len(self.lengths)), length, ranks)


@dataclass(frozen=True)
class _Options:
    """The arguments that all functions share, in the order in which they take them."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]  # -1 and None are unbounded
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    group: Any

    def __post_init__(self) -> None:
        for name in ("causal", "deterministic", "return_attn_probs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {type(getattr(self, name)).__name__}; must be True or False")

    def rule(self) -> Mask:
        left, right = (None if side is None or side < 0 else side for side in self.window_size)
        rule = Full() if left is right is None else Window(left, right)
        return rule & Causal() if self.causal else rule

    def score(self) -> Score:
        slopes = self.alibi_slopes
        if isinstance(slopes, Tensor) and slopes.dim() != 1:
            raise NotImplementedError(
                f"alibi_slopes has shape {tuple(slopes.shape)}; must be [Hq], one slope for each head of every batch row"
            )
        return Score(scale=self.softmax_scale, alibi=cast(Any, slopes))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, mask: Mask) -> Result:
        if self.dropout_p != 0:
            raise NotImplementedError(
                f"dropout_p = {self.dropout_p}; must be 0. Dropout here needs a seed, alike on all ranks: "
                "ringflash.attention(..., score=ringflash.Score(dropout=..., seed=...))"
            )
        ring = ring_of_group(self.group)
        results: Any = attention(
            q, k, v, ring=None if ring is None else ring.with_layout(layout), mask=mask, score=self.score(),
            deterministic=self.deterministic or None, return_lse=self.return_attn_probs,
        )  # fmt: skip
        return (results[0], results[1].transpose(1, 2), None) if self.return_attn_probs else results

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, lengths: tuple[int, ...]) -> Result:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; must have 3 axes [tokens, heads, dim]")
        mask = Documents(lengths, causal=self.causal) & self.rule()
        results = self.attend(q[None], k[None], v[None], layout, mask)
        return (results[0][0], results[1][0], None) if self.return_attn_probs else results[0]


def _batched(name: str, layout: Layout, what: str) -> tuple[Callable[..., Result], ...]:
    """The function of this layout, and its forms for packed K and V, and for packed Q, K and V."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Result:
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        )
        if layout == Zigzag() and q.shape[1] % 2:
            raise ValueError(f"q has {q.shape[1]} local tokens; must be even, two pieces of the sequence")
        return options.attend(q, k, v, layout, options.rule())

    return _forms(func, name, what, tokens_axis=1)


def _packed(name: str, is_zigzag: bool, what: str) -> tuple[Callable[..., Result], ...]:
    """The same three for packed documents, each of which is cut among the ranks."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Result:
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        )
        lengths = _local_lengths(cu_seqlens, max_seqlen, q.shape[0])
        if is_zigzag and (odd := [n for n in lengths if n % 2]):
            raise ValueError(f"cu_seqlens has documents of {odd[:8]} local tokens; must be even, two pieces of each")
        ring = ring_of_group(group)
        whole = tuple(n * (1 if ring is None else ring.ranks) for n in lengths)
        return options.attend_packed(q, k, v, PerDocument(whole, is_zigzag), whole)

    return _forms(func, name, what, tokens_axis=0)


def _forms(func: Any, name: str, what: str, tokens_axis: int) -> tuple[Callable[..., Result], ...]:
    """`func` of q, k, v, ..., that of q, kv, ..., and that of qkv, ..., under their names."""

    def kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Result:
        return func(q, *_unpacked("kv", kv, tokens_axis + 1, 2), *arguments, **options)

    def qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Result:
        return func(*_unpacked("qkv", qkv, tokens_axis + 1, 3), *arguments, **options)

    _, _, _, *others = signature(func).parameters.values()
    forms: tuple[Any, ...] = (func, kvpacked_func, qkvpacked_func)
    for form in forms:
        taken = [p for p in signature(form).parameters.values() if p.name in ("q", "k", "v", "kv", "qkv")]
        form.__signature__ = Signature([*taken, *others])
        form.__name__ = form.__qualname__ = f"{name}_{'func' if form is func else form.__name__}"
        form.__doc__ = what
    return forms


@dataclass(frozen=True)
class LocalKeys:
    """What llama3_flash_attn_prepare_cu_seqlens gives in place of a slice: the documents of the whole sequence."""

    lengths: tuple[int, ...]
    causal: bool
    given: tuple[Tensor, Tensor, int, int]  # what was given with it


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, Any]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) for the llama3 functions, once per batch.

    cu_seqlens: of the WHOLE sequence, [documents + 1] from 0, which is cut into world_size equal pieces.
    cu_seqlens_q, cu_seqlens_k: of the documents that rank's piece touches, as there: the queries of the piece, and the keys
        that they see. local_k_slice is no slice here, but what the functions need of the other ranks' documents; pass it on.
    """
    borders = _borders(cu_seqlens)
    total = borders[-1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}; must be in [0, {world_size})")
    if total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which world_size = {world_size} does not divide; pad the sequence"
        )
    first, past = rank * (total // world_size), (rank + 1) * (total // world_size)
    touched = [(a, b) for a, b in pairwise(borders) if a < past and b > first]
    queries, keys = [0], [0]
    for a, b in touched:
        queries.append(queries[-1] + min(b, past) - max(a, first))
        keys.append(keys[-1] + (min(b, past) if causal else b) - a)
    as_given: dict[str, Any] = {"dtype": cu_seqlens.dtype, "device": cu_seqlens.device}
    most_queries, most_keys = (max((b - a for a, b in pairwise(local)), default=0) for local in (queries, keys))
    whole = tuple(b - a for a, b in pairwise(borders))
    given = torch.tensor(queries, **as_given), torch.tensor(keys, **as_given), most_queries, most_keys
    return (*given, LocalKeys(whole, causal, given))


def _by_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    if not isinstance(local_k_slice, LocalKeys):
        raise TypeError(
            f"local_k_slice is {type(local_k_slice).__name__}; must come from "
            "ringflash.compat.ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens"
        )
    if causal != local_k_slice.causal:
        raise ValueError(f"causal = {causal}, but cu_seqlens were prepared for causal = {local_k_slice.causal}")
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not all(a is b or _is_equal(a, b) for a, b in zip(given, local_k_slice.given, strict=True)):
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k, max_seqlen_q = {max_seqlen_q} and max_seqlen_k = {max_seqlen_k} are not those "
            "that local_k_slice was prepared with; pass on all five of one call of llama3_flash_attn_prepare_cu_seqlens"
        )
    stride = integer("heads_k_stride", heads_k_stride, least=1)
    if k.dim() == 3 and k.shape[1] % stride:
        raise ValueError(f"heads_k_stride = {stride}; must divide the {k.shape[1]} key heads")
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return options.attend_packed(q, k, v, Contiguous(), local_k_slice.lengths)


def _is_equal(a: Any, b: Any) -> bool:
    """Of tensors also on different devices; only where they are not the very same ones, for this may wait for a GPU."""
    return torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def substitute_hf_flash_attn(*args: Any, **options: Any) -> NoReturn:
    """Not served: it changes functions of transformers for the whole process."""
    raise NotImplementedError(
        "substitute_hf_flash_attn changes transformers for all models of a process. Use "
        "ringflash.integrations.transformers.register() and attn_implementation='ring'"
    )


def update_ring_flash_attn_params(*args: Any, **options: Any) -> NoReturn:
    """Not served: documents and ring are arguments of the model's call."""
    raise NotImplementedError(
        "update_ring_flash_attn_params keeps documents and group as state of the process. Pass ring= and mask= to the "
        "model's call, see ringflash.integrations.transformers"
    )


def _unpacked(name: str, x: Tensor, axis: int, parts: int) -> tuple[Tensor, ...]:
    if x.dim() != axis + 3 or x.shape[axis] != parts:
        before = "batch, tokens" if axis == 2 else "tokens"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; must be [{before}, {parts}, heads, dim]")
    return x.unbind(axis)


def _local_lengths(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> tuple[int, ...]:
    """Of each document on this rank."""
    lengths = tuple(b - a for a, b in pairwise(_borders(cu_seqlens)))
    if sum(lengths) != tokens:
        raise ValueError(f"cu_seqlens ends at {sum(lengths)}; must end at the {tokens} tokens that this rank holds")
    if max(lengths, default=0) > integer("max_seqlen", max_seqlen):
        raise ValueError(f"max_seqlen = {max_seqlen}; the longest document has {max(lengths)} tokens on this rank")
    return lengths


def _borders(cu_seqlens: Tensor) -> list[int]:
    """Read again in every call: nobody tells of writes by other ranks, which collectives make."""
    borders = integers("cu_seqlens", cu_seqlens)
    if borders[:1] != [0] or any(b < a for a, b in pairwise(borders)):
        raise ValueError(f"cu_seqlens = {borders[:8]}; must start with 0 and not decrease")
    return borders


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _batched(
    "ring_flash_attn", Contiguous(), "Rank r holds the r-th of P pieces of the sequence. See the module for shapes."
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _batched(
    "zigzag_ring_flash_attn", Zigzag(), "Rank r holds pieces r and 2 P - 1 - r of 2 P. See the module for shapes."
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _batched(
    "stripe_flash_attn", Striped(), "Rank r holds positions r, r + P, r + 2 P, ... See the module for shapes."
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _packed(
    "ring_flash_attn_varlen",
    False,
    "Rank r holds the r-th of P pieces of every document; cu_seqlens are those of the shard.",
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _packed(
    "zigzag_ring_flash_attn_varlen",
    True,
    "Rank r holds pieces r and 2 P - 1 - r of 2 P of every document; cu_seqlens are those of the shard.",
)
(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _forms(
    _by_pieces,
    "llama3_flash_attn_varlen",
    """Rank r holds the r-th of P pieces of the packed whole; the arguments come from llama3_flash_attn_prepare_cu_seqlens.

    heads_k_stride: a divisor of the key heads, as there. It bounds the memory of an all-gather that is not made here.
    """,
    tokens_axis=0,
)
