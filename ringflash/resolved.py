"""From the arguments of a call to its Work: what is checked, planned and chosen, once for each kind of call."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringflash.kernels.backend import OTHER_BACKENDS, Backend, Call, cannot_run, check_backend, choose
from ringflash.kernels.partial import accumulate_dtype
from ringflash.kernels.score import Score
from ringflash.kernels.table import KernelTable, MaskKind, length_class
from ringflash.parallel.function import Route, Work
from ringflash.parallel.inprocess import Alone
from ringflash.parallel.kept import kept
from ringflash.ring import Ring, check_plain
from ringflash.schedule.integers import integer
from ringflash.schedule.layout import Contiguous, cut
from ringflash.schedule.mask import Causal, Full, Mask, Union
from ringflash.schedule.plan import Plan, plan

# Of one ring: as many as plans are kept.
MOST_RESOLVED = 32
_MASK_HINT = "Boolean and additive mask tensors are not supported: say the rule, for example Causal() & Window(1023, 0)"
_ALONE = Alone()


def prepared(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, settings: tuple[Any, ...]) -> Work:
    """The work of a call that all ranks have agreed on.

    settings: mask, scale, score, length, query_length, backend, deterministic, route, return_lse, is_trained.
    """
    work, facts = resolved(q, k, v, ring, settings)
    before = kept()
    if ring is not None and (before is None or not before.is_again):
        ring.agree("attention", facts)
    return work


def resolved(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, settings: tuple[Any, ...]
) -> tuple[Work, dict[str, object]]:
    """All that follows from shapes and settings, found once for each kind of call; of scores with tensors, every time.

    Kept with the transport, so that it goes when the ring does.
    """
    calls = _ALONE.resolved if ring is None else ring.transport.resolved if isinstance(ring, Ring) else {}
    shapes = tuple((x.shape, x.dtype, x.device) for x in (q, k, v))
    has_sinks = isinstance(settings[2], Score) and settings[2].sinks is not None  # which scores are not compared by
    of_ring = None if ring is None else (ring.layout, ring.gradient_dtype) if isinstance(ring, Ring) else ring
    # 1 is no True, though equal.
    key = (shapes, of_ring, settings, tuple(map(type, settings)))
    try:
        found = None if has_sinks else calls.get(key)
    except TypeError:  # of something that cannot be hashed, for which there is a better message
        return _resolve(q, k, v, ring, *settings)
    if found is None:
        found = _resolve(q, k, v, ring, *settings)
        if not has_sinks:
            calls[key] = found
            if len(calls) > MOST_RESOLVED:
                calls.pop(next(iter(list(calls))), None)  # other threads may do the same
    return found


def _resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring | None,
    mask: Mask | Union | None,
    scale: float | None,
    score: Score | None,
    length: int | None,
    query_length: int | None,
    backend: str | KernelTable | None,
    deterministic: bool,
    route: Route | None,
    return_lse: bool,
    is_trained: bool,
) -> tuple[Work, dict[str, object]]:
    """The work, and what all ranks must say alike; of the tensors shapes, types and devices are looked at."""
    _check_shapes(q, k, v)
    check_settings("attention", ring, mask, scale, score, backend, deterministic, route)
    if not isinstance(return_lse, bool):
        raise TypeError(f"attention: return_lse is {type(return_lse).__name__}; must be True or False")
    mask = Full() if mask is None else mask
    score = one_score("attention", scale, score).resolve(q.shape[-1])
    score.check(q)
    plans = _plans(q, k, ring, mask, length, query_length)
    call = _call(q, k, v, plans, score, deterministic, return_lse, is_trained)
    forward = choose(call, backend).backend
    backward = choose(replace(call, direction="backward"), backend).backend if is_trained else forward
    for chosen, the_plan in product((forward, backward), plans):
        if (reason := chosen.refuses_mask(the_plan)) is not None:
            raise NotImplementedError(f"attention: {cannot_run(chosen.name, reason)}. {OTHER_BACKENDS}")
    chosen_route = _route(q, k, v, plans, backward, route, ring) if is_trained else "keys"
    wire, on_wire = (_ALONE, None) if ring is None else (ring.transport, ring.gradient_dtype)
    work = Work(plans, score, forward, backward, wire, deterministic, chosen_route, on_wire)
    facts = _facts(q, k, v, plans, f"{forward.name}, {backward.name}", score, is_trained)
    # How gradients come home depends on all of these.
    return work, {**facts, "route": chosen_route, "gradient_dtype": str(on_wire), "deterministic": deterministic}


def check_transforms(q: Tensor, k: Tensor, v: Tensor) -> None:
    """They would differentiate what a ring does in ways that it does not know."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "attention: called inside a torch.func transform (grad, vjp, jvp, vmap, ...); only backward() and "
            "torch.autograd.grad can differentiate it"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"attention: {name} carries a forward-mode tangent; only backward() and torch.autograd.grad can "
                "differentiate it"
            )


def one_score(caller: str, scale: object, score: object) -> Score:
    """What `scale` or `score` say, of which one may be given."""
    if scale is not None and score is not None:
        raise ValueError(f"{caller}: scale = {scale} and score = {score}; give one, Score(scale=...) holds both")
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"{caller}: score is {type(score).__name__}; must be a Score or None")
    return Score(scale=cast(Any, scale)) if score is None else score


def check_settings(
    caller: str,
    ring: object,
    mask: object,
    scale: object,
    score: object,
    backend: object,
    deterministic: object,
    route: object = None,
) -> None:
    """What can be said of the settings without tensors: TypeError for wrong types, ValueError for contradictions."""
    if mask is not None and not isinstance(mask, (Mask, Union)):
        raise TypeError(f"{caller}: mask is {type(mask).__name__}; must be a Mask such as Causal(). {_MASK_HINT}")
    if ring is not None and not isinstance(ring, Ring):
        raise TypeError(f"{caller}: ring is {type(ring).__name__}; must be a Ring or None")
    one_score(caller, scale, score)
    check_backend(backend)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"{caller}: deterministic is {type(deterministic).__name__}; must be True, False or None")
    if route not in (None, "keys", "queries"):
        raise ValueError(f"{caller}: route = {route!r}; must be None, 'keys' or 'queries'")


def _route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plans: tuple[Plan, ...],
    backward: Backend,
    route: Route | None,
    ring: Ring | None,
) -> Route:
    """The one named, or the one that moves fewer bytes around the whole ring, which all ranks know alike."""
    if not backward.reads_delta:
        if route == "queries":
            raise NotImplementedError(
                f"attention: route = 'queries', but the {backward.name} backend forms its gradients from out, which does "
                "not travel. Use route='keys' or another backend"
            )
        return "keys"
    if route is not None or plans[0].ranks == 1:
        return route or "keys"
    sums = accumulate_dtype(q.dtype)
    on_wire = sums if ring is None or ring.gradient_dtype is None else ring.gradient_dtype
    numbers, statistics, gradients = q.itemsize, sums.itemsize, on_wire.itemsize
    (Hq, D), (Hk, Dv) = q.shape[2:], v.shape[2:]
    keys = queries = 0
    for the_plan in plans:
        needs, turned = the_plan.needs, the_plan.turned.needs
        keys += Hk * (D + Dv) * (needs.moved * numbers + needs.returned * gradients)
        queries += Hq * (turned.moved * ((D + Dv) * numbers + 2 * statistics) + turned.returned * D * gradients)
    return "queries" if queries < keys else "keys"


def _plans(
    q: Tensor, k: Tensor, ring: Ring | None, mask: Mask | Union, length: int | None, query_length: int | None
) -> tuple[Plan, ...]:
    B, Sq, Sk = q.shape[0], q.shape[1], k.shape[1]
    parts = mask.parts if isinstance(mask, Union) else (mask,)
    for part in parts:
        if part.batch not in (None, B):
            raise ValueError(f"attention: mask {part} is made for {part.batch} batch rows, q has {B}")
    if ring is None:
        for name, given, held in (("length", length, Sk), ("query_length", query_length, Sq)):
            if given is not None and integer(f"attention: {name}", given) != held:
                raise ValueError(
                    f"attention: {name} = {given} without a ring, where the tensors have {held} tokens; leave {name} out"
                )
        return tuple(plan(part, Contiguous(), Sk, query_length=Sq) for part in parts)
    if length is None and ring.layout.length is None:
        for part in (part for part in parts if part.length is not None):
            expected = cut(ring.layout, part.length, ring.ranks).shard_lengths[ring.rank]
            if expected != Sk:
                raise ValueError(
                    f"attention: mask {part} is made for {part.length} tokens, of which rank {ring.rank} of {ring.ranks} "
                    f"holds {expected} under {ring.layout}; k has {Sk}. Make it for the whole sequence, and cut that with "
                    "Ring.shard"
                )
        length = next((part.length for part in parts if part.length is not None), None)
    N = ring.whole_length("attention", Sk, length)
    M = N if query_length is None and Sq == Sk else ring.whole_length("attention", Sq, query_length, "query_length")
    return tuple(plan(part, ring.layout, N, ring.rank, ring.ranks, M) for part in parts)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plans: tuple[Plan, ...],
    score: Score,
    deterministic: bool,
    return_lse: bool,
    is_trained: bool,
) -> Call:
    """What backends are asked; of the sequence only what all ranks know."""
    first = plans[0]
    mask: MaskKind = "other"
    if len(plans) == 1 and first.query_length == first.length:
        mask = "full" if first.mask == Full() else "causal" if first.mask == Causal() else "other"
    is_alone = first.ranks == 1 and len(plans) == 1 and score.sinks is None and not return_lse
    return Call(
        q.device, q.dtype, q.shape[2], k.shape[2], q.shape[3], v.shape[3], score.factor, score.terms, deterministic,
        needs_dlse=return_lse and is_trained, mask=mask, length_class=length_class(first.length), is_alone=is_alone,
    )  # fmt: skip


def _facts(
    q: Tensor, k: Tensor, v: Tensor, plans: tuple[Plan, ...], backend: str, score: Score, is_trained: bool
) -> dict[str, object]:
    """What must be alike on all ranks for their messages to fit and their results to be of one attention."""
    return {
        "length": plans[0].length,
        "query length": plans[0].query_length,
        "batch": q.shape[0],
        "query heads": q.shape[2],
        "key heads": k.shape[2],
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "dtype": str(q.dtype),
        "backend": backend,
        "score": score.fact,
        "mask": " | ".join(the_plan.mask.fingerprint for the_plan in plans),
        # A rank without a backward would leave the others waiting in theirs.
        "whether a gradient is needed": is_trained,
    }


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Whether they are tensors of this rank's own; how they fit is found with what follows from it, once."""
    check_plain("attention: q", q)
    check_plain("attention: k", k)
    check_plain("attention: v", v)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"attention: {name} has shape {tuple(x.shape)}; must have 4 axes [batch, tokens, heads, dim]"
            )
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(f"attention: {name} is {x.dtype}; must be float16, bfloat16, float32 or float64")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"attention: q is {q.dtype} and {name} is {x.dtype}; must be alike")
        if x.device != q.device:
            raise ValueError(f"attention: q is on {q.device} and {name} on {x.device}; must be on one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"attention: q has batch {q.shape[0]} and {name} has {x.shape[0]}; must be equal")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"attention: k has {k.shape[1]} tokens and {k.shape[2]} heads, "
            f"v has {v.shape[1]} and {v.shape[2]}; must be equal"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"attention: q has head dim {q.shape[3]} and k has {k.shape[3]}; must be equal")
    if 0 in (q.shape[0], q.shape[2], q.shape[3], k.shape[2], v.shape[3]):
        raise ValueError(f"attention: q has shape {tuple(q.shape)}, v {tuple(v.shape)}; only tokens may be 0")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: q has {q.shape[2]} heads and k has {k.shape[2]}; query heads must be a multiple of key heads"
        )
