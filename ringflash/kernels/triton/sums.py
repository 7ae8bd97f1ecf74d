"""The sum of two tensors of gradients, rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.triton.launcher import launcher
from ringflash.kernels.triton.tuning import padded

ROWS = 32  # of a program, of one head


@triton.jit
def sum_kernel(
    out_ptr, first_ptr, second_ptr,
    out_b, out_s, out_h, first_b, first_s, first_h, second_b, second_s, second_h, S, H,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SECOND: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(S, ROWS)
    rows = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) // row_blocks
    h = head % H
    b = (head // H).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < S)[:, None] & (columns < DIM)[None, :]
    rows = rows.to(tl.int64)[:, None]
    columns = columns[None, :]
    x = tl.load(first_ptr + b * first_b + h * first_h + rows * first_s + columns, mask=inside)
    if HAS_SECOND:
        x += tl.load(second_ptr + b * second_b + h * second_h + rows * second_s + columns, mask=inside)
    tl.store(out_ptr + b * out_b + h * out_h + rows * out_s + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


_launched = launcher(sum_kernel)


def write_sum(out: Tensor, first: Tensor, second: Tensor | None) -> None:
    """See ringflash.kernels.sums.write_sum."""
    B, S, H, D = out.shape
    other = first if second is None else second
    strides = (stride for x in (out, first, other) for stride in x.stride()[:3])
    with torch.cuda.device(out.device):
        _launched[(triton.cdiv(S, ROWS) * B * H,)](
            out, first, other, *strides, S, H,
            DIM=D, ROWS=ROWS, BLOCK_D=padded(D), HAS_SECOND=second is not None, num_warps=4,
        )  # fmt: skip
