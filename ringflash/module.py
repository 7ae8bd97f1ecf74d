"""RingAttention: attention() as a module, for models that hold their attention as one."""

from __future__ import annotations

from torch import Tensor, nn

from ringflash.attention import attention, check_settings
from ringflash.kernels.backend import Score
from ringflash.ring import Ring
from ringflash.schedule.mask import Mask


class RingAttention(nn.Module):
    """attention() with its settings kept; it has no weights and no state.

    ring, mask, scale, score, backend, deterministic: as in `attention`, where shapes, types and errors stand.
    """

    def __init__(
        self,
        *,
        ring: Ring | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        score: Score | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        check_settings("RingAttention", ring, mask, scale, score, backend, deterministic)
        self.ring, self.mask, self.scale, self.score = ring, mask, scale, score
        self.backend, self.deterministic = backend, deterministic

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        length: int | None = None,
        return_lse: bool = False,
        query_length: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`mask` takes the place of the module's own, for batches whose documents change."""
        return attention(
            q,
            k,
            v,
            ring=self.ring,
            mask=self.mask if mask is None else mask,
            scale=self.scale,
            score=self.score,
            length=length,
            query_length=query_length,
            backend=self.backend,
            deterministic=self.deterministic,
            return_lse=return_lse,
        )

    def extra_repr(self) -> str:
        return f"ring={self.ring}, mask={self.mask}, scale={self.scale}, score={self.score}, backend={self.backend}"
