"""Uninitialised memory that shows: under `poisoned()` torch.empty and its kin are filled with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()  # torch makes leaves too
def _fill(x: Tensor) -> Tensor:
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(torch.iinfo(x.dtype).max) if x.dtype not in (torch.bool,) and not x.is_complex() else x


def _poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned_make(*args: Any, **kwargs: Any) -> Tensor:
        return _fill(make(*args, **kwargs))

    return poisoned_make


@contextmanager
def poisoned() -> Iterator[None]:
    """Whoever reads memory before writing it gets NaN (or the largest integer) instead of lucky zeros."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    torch.empty, torch.empty_like = _poisoning(empty), _poisoning(empty_like)
    Tensor.new_empty = _poisoning(new_empty)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = empty, empty_like, new_empty  # type: ignore[method-assign]
