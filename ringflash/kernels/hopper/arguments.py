"""Tensors described to the copy engine; Triton's checks are made once for each form, for they take longer than all else."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringflash.kernels.hopper.gluon import TensorDescriptor, gl

MOST_FORMS = 4096  # of tensors, whose lengths may differ from batch to batch


def described(x: Tensor, rows: int, columns: int, *, is_written: bool = False) -> Any:
    """A descriptor of x [B, tokens, heads, dim], seen as [B, heads, tokens, dim], for tiles of rows x columns of one head.

    What lies past the tensor's edges is read as zeros and not written. The copy engine takes any strides of whole 16
    bytes; a tensor that has others is copied, unless it is written to.
    """
    form = _form(x.shape, x.stride(), x.dtype, rows, columns)
    if form is None or x.data_ptr() % 16:
        assert not is_written, "callers give results memory that is contiguous"
        x = x.contiguous() if not x.is_contiguous() else x.clone()
        form = _form(x.shape, x.stride(), x.dtype, rows, columns)
    return _of_form(form, x)


def described_rows(x: Tensor, rows: int) -> Any:
    """A descriptor of row statistics [B, S, H], in memory [B, H, S], seen as [B x H, S]; for tiles of `rows`."""
    B, S, H = x.shape
    heads_first, pitch = x.transpose(1, 2), x.stride(2)
    if pitch % 4 or x.data_ptr() % 16:  # the copy engine wants rows of whole 16 bytes
        heads_first, pitch = F.pad(dense_heads_first(x), (0, -S % 4)), S + -S % 4
    assert B == 1 or heads_first.stride(0) == H * pitch, "heads of one batch row follow those of another"
    return _of_form(_form_of_rows(B * H, S, pitch, rows), heads_first)


def dense_heads_first(x: Tensor) -> Tensor:
    """Row statistics [B, S, H] as they lie in memory, [B, H, S]."""
    heads_first = x.transpose(1, 2)
    assert heads_first.is_contiguous(), "row statistics lie as row_statistic() makes them"
    return heads_first


@lru_cache(maxsize=MOST_FORMS)
def _form(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int
) -> dict[str, Any] | None:
    """All of a descriptor but its tensor; None for strides that the copy engine does not take."""
    B, S, H, D = shape
    quantum = 16 // dtype.itemsize
    if any(n > 1 and (step % quantum or step <= 0) for step, n in zip(strides[:3], shape[:3], strict=True)):
        return None
    # The stride of an axis of one is never used, and may be anything.
    b, s, h = (step if n > 1 else D for step, n in zip(strides[:3], shape[:3], strict=True))
    return _facts([B, H, S, D], [b, h, s, 1], [1, 1, rows, columns], dtype)


@lru_cache(maxsize=MOST_FORMS)
def _form_of_rows(heads: int, tokens: int, pitch: int, rows: int) -> dict[str, Any]:
    return _facts([heads, tokens], [pitch, 1], [1, rows], torch.float32)


def _facts(shape: list[int], strides: list[int], block: list[int], dtype: torch.dtype) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout(128 if len(block) == 4 else 0, dtype.itemsize * 8, rank=len(block))
    checked = TensorDescriptor(torch.zeros(0, dtype=dtype, device="cpu"), shape, strides, block, layout)
    return {**vars(checked), "kind": (dtype, tuple(block))}


def _of_form(form: dict[str, Any] | None, x: Tensor) -> Any:
    assert form is not None, "a contiguous tensor has strides of whole 16 bytes: head dims are multiples of 8"
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(form, base=x)
    return descriptor
