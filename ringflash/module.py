"""RingAttention: attention() as a module, for models that hold their attention as one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ringflash.attention import attention
from ringflash.kernels.score import Score
from ringflash.kernels.table import KernelTable
from ringflash.parallel.function import Route
from ringflash.resolved import check_settings
from ringflash.ring import Ring
from ringflash.schedule.mask import Mask, Union


class RingAttention(nn.Module):
    """attention() with its settings kept; it has no weights and no state.

    ring, mask, scale, score, backend, deterministic, route: as in `attention`, where shapes, types and errors stand. In
        eval() the score's dropout is left out, as that of any module.
    """

    def __init__(
        self,
        *,
        ring: Ring | None = None,
        mask: Mask | Union | None = None,
        scale: float | None = None,
        score: Score | None = None,
        backend: str | KernelTable | None = None,
        deterministic: bool | None = None,
        route: Route | None = None,
    ) -> None:
        super().__init__()
        check_settings("RingAttention", ring, mask, scale, score, backend, deterministic, route)
        self.ring, self.mask, self.scale, self.score = ring, mask, scale, score
        self.backend, self.deterministic, self.route = backend, deterministic, route

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Union | None = None,
        length: int | None = None,
        return_lse: bool = False,
        query_length: int | None = None,
        seed: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`mask` takes the place of the module's own, for batches whose documents change; `seed` that of its score, for
        dropout that changes with every layer and step.
        """
        return attention(
            q,
            k,
            v,
            ring=self.ring,
            mask=self.mask if mask is None else mask,
            scale=self.scale,
            score=self._score(seed),
            length=length,
            query_length=query_length,
            backend=self.backend,
            deterministic=self.deterministic,
            route=self.route,
            return_lse=return_lse,
        )

    def _score(self, seed: int | None) -> Score | None:
        has_dropout = self.score is not None and self.score.dropout > 0
        if seed is not None and not has_dropout:
            raise ValueError(f"RingAttention: seed = {seed}, but its score has no dropout; leave seed out")
        if self.score is None or not has_dropout:
            return self.score
        if not self.training:
            return replace(self.score, dropout=0.0, seed=None)
        return self.score if seed is None else replace(self.score, seed=seed)

    def extra_repr(self) -> str:
        return f"ring={self.ring}, mask={self.mask}, scale={self.scale}, score={self.score}, backend={self.backend}"
