"""Forward kernel: a program owns a block of queries of one head and visits the key blocks that they see."""

import triton
import triton.language as tl

from ringflash.kernels.triton.score import LOG2_E, is_kept, transform

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    ptr, offset, begin, end, stride, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr
):
    """Rows [offset, offset + ROWS) of a [*, DIM] matrix, zero past column DIM and, if MASKED, outside rows [begin, end).

    What lies there may be anything, and even a pair that is hidden must not meet a NaN.
    """
    # The first row's offset is 64-bit: a shard of a million tokens has more elements than 32 bits count.
    base = ptr + offset.to(tl.int64) * stride
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    ptrs = base + rows[:, None] * stride + cols[None, :]
    if MASKED:
        inside = (begin <= offset + rows) & (offset + rows < end)
        return tl.load(ptrs, mask=inside[:, None] & (cols < DIM)[None, :], other=0.0)
    if DIM == COLS:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(cols < DIM)[None, :], other=0.0)


@triton.jit
def split_blocks(lo_ptr, hi_ptr, first, last, BLOCK: tl.constexpr, ALIGN: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """What rows first..last of monotone bounds visit: (start, masked-left, full, all blocks, begin, end).

    They see columns of [begin, end) = [lo[first], hi[last]). Blocks of BLOCK columns count from `start`, the multiple of
    ALIGN at or before `begin`. Columns in [lo[last], hi[first]) are seen by every row, so the blocks inside need no
    mask; the two ragged ends do.

    IS_CAUSAL: the bounds are those of a causal square, [0, row + 1), and are not read.
    """
    if IS_CAUSAL:
        begin = first * 0
        end = last + 1
        all_from = first * 0
        all_until = first + 1
    else:
        begin = tl.load(lo_ptr + first)
        end = tl.load(hi_ptr + last)
        all_from = tl.load(lo_ptr + last)
        all_until = tl.load(hi_ptr + first)
    start = begin
    if ALIGN > 1:
        start = tl.multiple_of(begin // ALIGN * ALIGN, ALIGN)
    n_all = tl.where(end > begin, tl.cdiv(end - start, BLOCK), 0)
    n_left = tl.minimum(tl.cdiv(tl.maximum(all_from - start, 0), BLOCK), n_all)
    n_full = tl.maximum(tl.maximum(all_until - start, 0) // BLOCK, n_left)
    return start, n_left, n_full, n_all, begin, end


@triton.jit
def _visit_keys(
    acc, row_max, row_sum, q, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_begin, n_end,
    stride_ks, stride_vs, scale, softcap, slope, rows_at, keys_at_ptr, seed, threshold, head, batch_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks n_begin..n_end: acc [BLOCK_Q, BLOCK_DV], row_max (log2) and row_sum [BLOCK_Q]."""
    scale_log2 = scale * LOG2_E
    if MASKED:
        # Here and not in the kernel, so that they take no registers in the loop without a mask.
        if IS_CAUSAL:
            lo = offs_q * 0
            hi = offs_q + 1
        else:
            lo = tl.load(lo_ptr + offs_q, mask=offs_q < Sq, other=0)
            hi = tl.load(hi_ptr + offs_q, mask=offs_q < Sq, other=0)
    for n in range(n_begin, n_end):
        key = start + n * BLOCK_K
        offs_k = key + tl.arange(0, BLOCK_K)
        k = load_rows(k_ptr, key, begin, end, stride_ks, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED)  # [BLOCK_K, BLOCK_D]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        keys_at = offs_k
        if HAS_ALIBI or HAS_DROPOUT:
            keys_at = tl.load(keys_at_ptr + offs_k, mask=offs_k < end, other=0)
        if HAS_SOFTCAP or HAS_ALIBI:
            s, _ = transform(s, scale, softcap, slope, rows_at[:, None], keys_at[None, :], HAS_SOFTCAP, HAS_ALIBI)
            factor = 1.0
        else:
            factor = scale_log2
        if MASKED:
            seen = (lo[:, None] <= offs_k[None, :]) & (offs_k[None, :] < hi[:, None])
            s = tl.where(seen, s * factor, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # Pivot stays finite for rows without keys; -inf - (-inf) would be NaN.
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s - pivot[:, None])
        else:
            # factor >= 0, so it commutes with max, and scaling costs nothing inside the fused multiply-add.
            new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
            pivot = new_max
            p = tl.exp2(s * factor - pivot[:, None])
        shrink = tl.exp2(row_max - pivot)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        if HAS_DROPOUT:
            p = tl.where(is_kept(seed, threshold, rows_at[:, None], keys_at[None, :], head, batch_row), p, 0.0)
        acc = acc * shrink[:, None]
        v = load_rows(v_ptr, key, begin, end, stride_vs, VALUE_DIM, BLOCK_K, BLOCK_DV, MASKED)  # [BLOCK_K, BLOCK_DV]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["stride_bounds", "seed", "threshold"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, lo_ptr, hi_ptr, before_ptr, out_ptr, lse_ptr, slopes_ptr, rows_at_ptr, keys_at_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_bounds, Sq, Hq, group, scale, softcap, seed, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INTO: tl.constexpr, IS_LAST: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """out [B, Sq, Hq, VALUE_DIM], and lse fp32, in memory [B, Hq, Sq]; if INTO, merged with before, fp32, and with lse.

    out and before are one tensor unless IS_LAST, where out is rounded to a type of its own.
    lo, hi: [1 or B, Sq] int32; stride_bounds is 0 where batch rows share them. slopes: [Hq] fp32; rows_at [Sq] and
    keys_at [Sk]: global positions, int32; each read only by scores that need it.
    """
    # Last rows first: under causal masks they see most, and long programs started late would leave SMs idle.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    batch_row = tl.program_id(2)
    b = batch_row.to(tl.int64)
    row = block * BLOCK_Q
    q_ptr += b * stride_qb + h.to(tl.int64) * stride_qh
    k_ptr += b * stride_kb + (h // group).to(tl.int64) * stride_kh
    v_ptr += b * stride_vb + (h // group).to(tl.int64) * stride_vh
    lo_ptr += b * stride_bounds
    hi_ptr += b * stride_bounds

    start, n_left, n_full, n_all, begin, end = split_blocks(
        lo_ptr, hi_ptr, row, tl.minimum(row + BLOCK_Q, Sq) - 1, BLOCK_K, 1, IS_CAUSAL
    )
    if INTO and not IS_LAST:
        if n_all == 0:
            return
    offs_q = row + tl.arange(0, BLOCK_Q)
    in_rows = offs_q < Sq
    q = load_rows(q_ptr, row, 0, Sq, stride_qs, HEAD_DIM, BLOCK_Q, BLOCK_D, True)  # [BLOCK_Q, BLOCK_D]
    # A negative scale is moved into q, where a change of sign is exact, so that the loop may assume scale >= 0.
    q = (q * tl.where(scale < 0, -1.0, 1.0)).to(q_ptr.dtype.element_ty)
    scale = tl.abs(scale)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + h)
    rows_at = offs_q
    if HAS_ALIBI or HAS_DROPOUT:
        rows_at = tl.load(rows_at_ptr + offs_q, mask=in_rows, other=0)

    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    acc, row_max, row_sum = _visit_keys(
        acc, row_max, row_sum, q, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, 0, n_left,
        stride_ks, stride_vs, scale, softcap, slope, rows_at, keys_at_ptr, seed, threshold, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, True, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip
    acc, row_max, row_sum = _visit_keys(
        acc, row_max, row_sum, q, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_left, n_full,
        stride_ks, stride_vs, scale, softcap, slope, rows_at, keys_at_ptr, seed, threshold, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, False, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip
    acc, row_max, row_sum = _visit_keys(
        acc, row_max, row_sum, q, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_full, n_all,
        stride_ks, stride_vs, scale, softcap, slope, rows_at, keys_at_ptr, seed, threshold, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, True, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip

    is_seen = row_sum > 0
    if HAS_DROPOUT:
        acc = acc * keep_scale
    out = acc * tl.where(is_seen, 1.0 / row_sum, 0.0)[:, None]
    lse = tl.where(is_seen, row_max * LN_2 + tl.log(row_sum), float("-inf"))
    offs_d = tl.arange(0, BLOCK_DV)
    lse_ptrs = lse_ptr + (b * Hq + h) * Sq + offs_q
    out_offsets = ((b * Sq + offs_q) * Hq + h)[:, None] * VALUE_DIM + offs_d[None, :]
    in_out = in_rows[:, None] & (offs_d < VALUE_DIM)[None, :]
    if INTO:
        before = tl.load(lse_ptrs, mask=in_rows, other=float("-inf"))
        peak = tl.maximum(before, lse)
        pivot = tl.where(peak == float("-inf"), 0.0, peak)
        weight_before = tl.exp(before - pivot)
        weight = tl.exp(lse - pivot)
        total = weight_before + weight
        lse = tl.where(total > 0, pivot + tl.log(total), float("-inf"))
        share = tl.where(total > 0, 1.0 / total, 0.0)
        out_before = tl.load(before_ptr + out_offsets, mask=in_out, other=0.0)
        out = (weight_before * share)[:, None] * out_before + (weight * share)[:, None] * out
    tl.store(lse_ptrs, lse, mask=in_rows)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=in_out)
