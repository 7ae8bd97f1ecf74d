"""Results of attention that activation checkpointing keeps, so that its recomputation sends nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType

from torch import Tensor


@dataclass
class Kept:
    """(out, lse, their versions) of the calls inside one checkpoint, in the order in which they are made."""

    results: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    # Of the next result to hand out while the checkpoint is recomputed; None while it runs for the first time.
    next: int | None = None

    def keep(self, out: Tensor, lse: Tensor) -> None:
        self.results.append((out.detach(), lse.detach(), out._version + lse._version))

    def take(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What the same call gave the first time."""
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
        if out._version + lse._version != version:
            raise RuntimeError(
                "keep_attention: a result of attention was changed in place inside the checkpoint; change a copy"
            )
        return out.detach(), lse.detach()


_KEPT: ContextVar[Kept | None] = ContextVar("ringflash_kept", default=None)


def kept() -> Kept | None:
    """Where results are kept or taken from; None outside of a checkpoint that keeps them."""
    return _KEPT.get()


class _Keeping(AbstractContextManager[None]):
    """One run of a checkpoint; may be entered again, as a second backward does."""

    def __init__(self, results: Kept, *, is_again: bool) -> None:
        self._results, self._is_again = results, is_again
        self._tokens: list[Token[Kept | None]] = []

    def __enter__(self) -> None:
        self._results.next = 0 if self._is_again else None
        self._tokens.append(_KEPT.set(self._results))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _KEPT.reset(self._tokens.pop())


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint: recompute everything but attention, whose out and lse are kept.

        checkpoint(layer, x, use_reentrant=False, context_fn=ringflash.training.keep_attention)

    Recomputation then sends nothing and forms no score again, for `B S Hq (Dv e + 4)` bytes per call and rank, e the bytes
    of an element. It raises RuntimeError where the recomputed calls are others than the first, or where a result was
    changed in place in between.
    """
    results = Kept()
    return _Keeping(results, is_again=False), _Keeping(results, is_again=True)
