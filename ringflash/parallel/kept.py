"""Results of attention that activation checkpointing keeps, so that its recomputation sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ringflash.schedule.traced import is_traced

Policy = Callable[..., CheckpointPolicy]


@dataclass
class Kept:
    """(out, lse, their versions) of the calls inside one checkpoint, in the order in which they are made.

    outer: of the checkpoint around this one, if that keeps too: what runs for the first time in here may run again there.
    next: of the next result to hand out while the checkpoint is recomputed; None while it runs for the first time.
    """

    outer: Kept | None = None
    results: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    next: int | None = None

    def keep(self, out: Tensor, lse: Tensor) -> None:
        self._note(out, lse)
        if self.outer is not None:
            self.outer.keep(out, lse)

    def _note(self, out: Tensor, lse: Tensor) -> None:
        self.results.append((out.detach(), lse.detach(), _version(out, lse)))

    def found(self, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the same call gave before, here or around; None if it has not been made yet."""
        if self.next is not None:
            return self._take(q)
        result = None if self.outer is None else self.outer.found(q)
        if result is not None:
            self._note(*result)
        return result

    def _take(self, q: Tensor) -> tuple[Tensor, Tensor]:
        assert self.next is not None, "results are taken while a checkpoint is recomputed"
        if self.next == len(self.results):
            raise RuntimeError(
                f"keep_attention: recomputation makes call {self.next + 1} of attention, the first run made {self.next}"
            )
        out, lse, version = self.results[self.next]
        self.next += 1
        if out.shape[:3] != q.shape[:3]:
            raise RuntimeError(
                f"keep_attention: in recomputation q has shape {tuple(q.shape)}, where the first run's attention gave "
                f"{tuple(out.shape)}; both must make the same calls in the same order"
            )
        if _version(out, lse) != version:
            raise RuntimeError(
                "keep_attention: a result of attention was changed in place inside the checkpoint; change a copy"
            )
        return out.detach(), lse.detach()

    @property
    def is_again(self) -> bool:
        """Whether calls get what they gave before, and send nothing."""
        return self.next is not None or (self.outer is not None and self.outer.is_again)


def _version(out: Tensor, lse: Tensor) -> int:
    """Grows when one of them is changed in place; inference tensors do not count, and are in no graph."""
    return 0 if out.is_inference() else out._version + lse._version


_KEPT: ContextVar[Kept | None] = ContextVar("ringflash_kept", default=None)


def kept() -> Kept | None:
    """Where results are kept or taken from; None outside of a checkpoint that keeps them."""
    return _KEPT.get()


class _Keeping(AbstractContextManager[None]):
    """One run of a checkpoint; may be entered again, as a second backward does."""

    def __init__(self, results: Kept, *, is_again: bool) -> None:
        self._results, self._is_again = results, is_again
        self._before: list[tuple[Token[Kept | None], int | None]] = []

    def __enter__(self) -> None:
        # A backward inside the first run recomputes, and the first run goes on after it.
        self._before.append((_KEPT.set(self._results), self._results.next))
        self._results.next = 0 if self._is_again else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._results.next = self._before.pop()
        _KEPT.reset(token)


def keep_attention(policy: Policy | None = None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of torch.utils.checkpoint: recompute everything but attention, whose out and lse are kept.

        checkpoint(layer, x, use_reentrant=False, context_fn=ringflash.training.keep_attention)

    policy: of selective checkpointing, for what else is kept; functools.partial(keep_attention, policy) is the context_fn.

    Recomputation then sends nothing and forms no score again, for `B S Hq (Dv e + 4)` bytes per call and rank, e the bytes
    of an element; a checkpoint around it that keeps too holds them as long as itself. Works in compiled code as well.
    RuntimeError is raised where the recomputed calls are others than the first, or where a result was changed in place in
    between.
    """
    if policy is not None or is_traced():
        return create_selective_checkpoint_contexts(partial(_with_attention, policy))
    results = Kept(outer=kept())
    return _Keeping(results, is_again=False), _Keeping(results, is_again=True)


def _with_attention(policy: Policy | None, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op == torch.ops.ringflash.attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE if policy is None else policy(ctx, op, *args, **kwargs)
