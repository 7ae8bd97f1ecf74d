"""Sums of gradients as they come home: added and rounded in one pass over memory."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor


def write_sum(out: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Write first + second, or first alone, to `out`, rounded once to its type.

    All [B, S, H, D] with last stride 1, and else of any strides; first and second in the accumulate type.
    """
    kernels = _triton() if out.is_cuda else None
    if out.numel() == 0:
        return
    if kernels is not None:
        kernels.write_sum(out, first, second)
    elif second is None:
        out.copy_(first)
    else:
        torch.add(first, second, out=out)


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    """torch's own loops read what lies by heads at a third of the speed; without Triton they serve."""
    try:
        from ringflash.kernels.triton import sums
    except ImportError:
        return None
    return sums
