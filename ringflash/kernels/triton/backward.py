"""Backward kernels. Both recompute p = exp(s - lse) from the row's final lse; delta is rowsum(dout * out) - dlse.

`key_gradient_kernel` is column-parallel: a program owns a block of keys, dk and dv stay in its registers, and dq is
added up across programs by atomics. `query_gradient_kernel` owns rows instead; the two together, the first without dq,
need no atomics: the deterministic mode, and where products are cheaper than atomics the faster one as well.

Both begin at a whole block: statistics of rows are then loaded wide. On an H200 the two passes take 28.5 ms instead of 32.3
at d64 and 26.4 instead of 28.4 at d128 (32k tokens, causal); forward, which loads none, is 2 % faster without.
"""

import triton
import triton.language as tl

from ringflash.kernels.triton.forward import load_rows, split_blocks
from ringflash.kernels.triton.score import LOG2_E, is_kept, transform


@triton.jit
def _score_gradient(
    left, right, left_v, right_v, lse_log2, delta, scale, softcap, slope, rows_at, keys_at, seed, threshold, keep_scale,
    head, batch_row, visible, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """(p as it met v, ds) fp32, without the scale that dq and dk still need, in either orientation.

    From (k, q, v, dout) and statistics and rows_at [1, BLOCK_Q] both are [BLOCK_K, BLOCK_Q]; from (q, k, dout, v) and
    statistics and rows_at [BLOCK_Q, 1] they are [BLOCK_Q, BLOCK_K]; keys_at is the other axis. Each kernel takes the one
    that the product after it reads from registers. visible has their shape, and is read only if MASKED.
    """
    s = tl.dot(left, right.T, input_precision=PRECISION)
    bent = s
    if HAS_SOFTCAP or HAS_ALIBI:
        s, bent = transform(s, scale, softcap, slope, rows_at, keys_at, HAS_SOFTCAP, HAS_ALIBI)
        p = tl.exp2(s - lse_log2)
    else:
        p = tl.exp2(s * (scale * LOG2_E) - lse_log2)
    if MASKED:
        # After the exponential: rows that see nothing have lse = -inf and give inf here, never NaN.
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(left_v, right_v.T, input_precision=PRECISION)
    p_kept = p
    if HAS_DROPOUT:
        kept = is_kept(seed, threshold, rows_at, keys_at, head, batch_row)
        p_kept = tl.where(kept, p * keep_scale, 0.0)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if HAS_SOFTCAP:
        ds = ds * (1.0 - bent * bent)
    return p_kept, ds


@triton.jit
def split_square(first, last, Sq, BLOCK: tl.constexpr):
    """As split_blocks, for keys first..last of a causal square, whose rows are [key, Sq)."""
    start = tl.multiple_of(first // BLOCK * BLOCK, BLOCK)
    n_all = tl.cdiv(Sq - start, BLOCK)
    n_left = tl.minimum(tl.cdiv(last - start, BLOCK), n_all)
    n_full = tl.maximum((Sq - start) // BLOCK, n_left)
    return start, n_left, n_full, n_all, first, Sq


@triton.jit
def _visit_rows(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, lo_ptr, hi_ptr, offs_k, Sk, start, begin, end, n_begin, n_end,
    stride_qs, stride_dos, Hq, scale, softcap, slope, rows_at_ptr, keys_at, seed, threshold, keep_scale, head, batch_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, ADD_DQ: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add the share of row blocks n_begin..n_end to dk [BLOCK_K, BLOCK_D] and dv [BLOCK_K, BLOCK_DV]."""
    if MASKED:
        # Here and not in the kernel, so that they take no registers in the loop without a mask.
        if IS_CAUSAL:
            lo = offs_k
            hi = offs_k * 0 + end
        else:
            lo = tl.load(lo_ptr + offs_k, mask=offs_k < Sk, other=0)
            hi = tl.load(hi_ptr + offs_k, mask=offs_k < Sk, other=0)
    for n in range(n_begin, n_end):
        row = start + n * BLOCK_Q
        offs_q = row + tl.arange(0, BLOCK_Q)
        in_rows = (begin <= offs_q) & (offs_q < end)
        q = load_rows(q_ptr, row, begin, end, stride_qs, HEAD_DIM, BLOCK_Q, BLOCK_D, MASKED)  # [BLOCK_Q, BLOCK_D]
        dout = load_rows(
            dout_ptr, row, begin, end, stride_dos, VALUE_DIM, BLOCK_Q, BLOCK_DV, MASKED
        )  # [BLOCK_Q, BLOCK_DV]
        if MASKED:
            lse_log2 = tl.load(lse_ptr + offs_q, mask=in_rows, other=0.0) * LOG2_E
            delta = tl.load(delta_ptr + offs_q, mask=in_rows, other=0.0)
        else:
            lse_log2 = tl.load(lse_ptr + offs_q) * LOG2_E
            delta = tl.load(delta_ptr + offs_q)
        visible = True
        if MASKED:
            visible = (lo[:, None] <= offs_q[None, :]) & (offs_q[None, :] < hi[:, None])
        rows_at = offs_q
        if HAS_ALIBI or HAS_DROPOUT:
            rows_at = tl.load(rows_at_ptr + offs_q, mask=in_rows, other=0)
        p, ds = _score_gradient(
            k, q, v, dout, lse_log2[None, :], delta[None, :], scale, softcap, slope, rows_at[None, :], keys_at[:, None],
            seed, threshold, keep_scale, head, batch_row, visible, MASKED, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        )  # fmt: skip
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if ADD_DQ:
            dq = tl.dot(ds.T, k, input_precision=PRECISION) * scale  # [BLOCK_Q, BLOCK_D]
            offs_d = tl.arange(0, BLOCK_D)
            dq_base = dq_ptr + row.to(tl.int64) * (Hq * HEAD_DIM)
            dq_ptrs = dq_base + tl.arange(0, BLOCK_Q)[:, None] * (Hq * HEAD_DIM) + offs_d[None, :]
            tl.atomic_add(dq_ptrs, dq, mask=in_rows[:, None] & (offs_d < HEAD_DIM)[None, :], sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["stride_bounds", "seed", "threshold"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, dq_ptr, dk_ptr, dv_ptr,
    slopes_ptr, rows_at_ptr, keys_at_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dkb, stride_dvb, stride_bounds, Sq, Sk, Hq, Hk,
    scale, softcap, seed, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ADD_DQ: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add to dk [B, Sk, Hk, HEAD_DIM], dv [B, Sk, Hk, VALUE_DIM] and, if ADD_DQ, dq [B, Sq, Hq, HEAD_DIM]; fp32.

    STORE: dk and dv are written instead, in the type that they have.

    lse, delta: fp32, in memory [B, Hq, Sq]. lo, hi: [1 or B, Sk], the rows that see each key. Rows of dq, dk and dv
    are dense but may be part of a longer shard, so their batch strides are given. slopes, rows_at, keys_at: as in forward.
    """
    # First keys first: under causal masks most rows see them.
    key = tl.program_id(0) * BLOCK_K
    hk = tl.program_id(1)
    batch_row = tl.program_id(2)
    b = batch_row.to(tl.int64)
    group = Hq // Hk
    lo_ptr += b * stride_bounds
    hi_ptr += b * stride_bounds
    last = tl.minimum(key + BLOCK_K, Sk) - 1
    if IS_CAUSAL:
        start, n_left, n_full, n_all, begin, end = split_square(key, last, Sq, BLOCK_Q)
    else:
        start, n_left, n_full, n_all, begin, end = split_blocks(lo_ptr, hi_ptr, key, last, BLOCK_Q, BLOCK_Q, False)
    if not STORE:
        if n_all == 0:
            return
    offs_k = key + tl.arange(0, BLOCK_K)
    in_keys = offs_k < Sk
    k_base = k_ptr + b * stride_kb + hk.to(tl.int64) * stride_kh
    v_base = v_ptr + b * stride_vb + hk.to(tl.int64) * stride_vh
    k = load_rows(k_base, key, 0, Sk, stride_ks, HEAD_DIM, BLOCK_K, BLOCK_D, True)  # [BLOCK_K, BLOCK_D]
    v = load_rows(v_base, key, 0, Sk, stride_vs, VALUE_DIM, BLOCK_K, BLOCK_DV, True)  # [BLOCK_K, BLOCK_DV]
    if not IS_CAUSAL:
        # What no row sees may hold NaN, as padding does.
        is_seen = tl.load(lo_ptr + offs_k, mask=offs_k < Sk, other=0) < tl.load(
            hi_ptr + offs_k, mask=offs_k < Sk, other=0
        )
        k = tl.where(is_seen[:, None], k, 0.0)
        v = tl.where(is_seen[:, None], v, 0.0)
    keys_at = offs_k
    if HAS_ALIBI or HAS_DROPOUT:
        keys_at = tl.load(keys_at_ptr + offs_k, mask=in_keys, other=0)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    # The heads of a group share these keys: their sum is formed here, so dk and dv need no atomics.
    for member in range(0, group):
        h = hk * group + member
        q_base = q_ptr + b * stride_qb + h.to(tl.int64) * stride_qh
        dout_base = dout_ptr + b * stride_dob + h.to(tl.int64) * stride_doh
        lse_base = lse_ptr + (b * Hq + h) * Sq
        delta_base = delta_ptr + (b * Hq + h) * Sq
        dq_base = dq_ptr + b * stride_dqb + h.to(tl.int64) * HEAD_DIM
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(slopes_ptr + h)
        dk, dv = _visit_rows(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, dq_base, lo_ptr, hi_ptr, offs_k, Sk, start,
            begin, end, 0, n_left,
            stride_qs, stride_dos, Hq, scale, softcap, slope, rows_at_ptr, keys_at, seed, threshold, keep_scale, h,
            batch_row,
            HEAD_DIM, VALUE_DIM, BLOCK_Q, BLOCK_D, BLOCK_DV, True, ADD_DQ, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
            IS_CAUSAL,
        )  # fmt: skip
        dk, dv = _visit_rows(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, dq_base, lo_ptr, hi_ptr, offs_k, Sk, start,
            begin, end, n_left, n_full,
            stride_qs, stride_dos, Hq, scale, softcap, slope, rows_at_ptr, keys_at, seed, threshold, keep_scale, h,
            batch_row,
            HEAD_DIM, VALUE_DIM, BLOCK_Q, BLOCK_D, BLOCK_DV, False, ADD_DQ, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
            IS_CAUSAL,
        )  # fmt: skip
        dk, dv = _visit_rows(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, dq_base, lo_ptr, hi_ptr, offs_k, Sk, start,
            begin, end, n_full, n_all,
            stride_qs, stride_dos, Hq, scale, softcap, slope, rows_at_ptr, keys_at, seed, threshold, keep_scale, h,
            batch_row,
            HEAD_DIM, VALUE_DIM, BLOCK_Q, BLOCK_D, BLOCK_DV, True, ADD_DQ, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
            IS_CAUSAL,
        )  # fmt: skip

    token = offs_k * Hk + hk
    _add_rows(dk_ptr + b * stride_dkb, token, dk * scale, in_keys, HEAD_DIM, BLOCK_D, STORE)
    _add_rows(dv_ptr + b * stride_dvb, token, dv, in_keys, VALUE_DIM, BLOCK_DV, STORE)


@triton.jit
def _add_rows(ptr, row, x, in_rows, DIM: tl.constexpr, COLS: tl.constexpr, STORE: tl.constexpr):
    """Add x [ROWS, COLS] to the caller's [*, DIM] rows, which no other program touches, or store it in their type."""
    cols = tl.arange(0, COLS)
    ptrs = ptr + row.to(tl.int64)[:, None] * DIM + cols[None, :]
    inside = in_rows[:, None] & (cols < DIM)[None, :]
    if not STORE:
        x += tl.load(ptrs, mask=inside, other=0.0)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _visit_keys_backward(
    dq, q, dout, lse_log2, delta, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_begin, n_end,
    stride_ks, stride_vs, scale,
    softcap, slope, rows_at, keys_at_ptr, seed, threshold, keep_scale, head, batch_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add the share of key blocks n_begin..n_end to dq [BLOCK_Q, BLOCK_D]."""
    if MASKED:
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
        v = load_rows(v_ptr, key, begin, end, stride_vs, VALUE_DIM, BLOCK_K, BLOCK_DV, MASKED)  # [BLOCK_K, BLOCK_DV]
        visible = True
        if MASKED:
            visible = (lo[:, None] <= offs_k[None, :]) & (offs_k[None, :] < hi[:, None])
        keys_at = offs_k
        if HAS_ALIBI or HAS_DROPOUT:
            keys_at = tl.load(keys_at_ptr + offs_k, mask=offs_k < end, other=0)
        _, ds = _score_gradient(
            q, k, dout, v, lse_log2[:, None], delta[:, None], scale, softcap, slope, rows_at[:, None], keys_at[None, :],
            seed, threshold, keep_scale, head, batch_row, visible, MASKED, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["stride_bounds", "seed", "threshold"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, dq_ptr, slopes_ptr, rows_at_ptr, keys_at_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_bounds, Sq, Hq, group,
    scale, softcap, seed, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add to dq [B, Sq, Hq, HEAD_DIM] fp32, row-parallel, or, if STORE, write it in the type that it has.

    lo, hi: [1 or B, Sq], the keys that each row sees.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    batch_row = tl.program_id(2)
    b = batch_row.to(tl.int64)
    row = block * BLOCK_Q
    lo_ptr += b * stride_bounds
    hi_ptr += b * stride_bounds
    start, n_left, n_full, n_all, begin, end = split_blocks(
        lo_ptr, hi_ptr, row, tl.minimum(row + BLOCK_Q, Sq) - 1, BLOCK_K, BLOCK_K, IS_CAUSAL
    )
    if not STORE:
        if n_all == 0:
            return
    q_ptr += b * stride_qb + h.to(tl.int64) * stride_qh
    dout_ptr += b * stride_dob + h.to(tl.int64) * stride_doh
    k_ptr += b * stride_kb + (h // group).to(tl.int64) * stride_kh
    v_ptr += b * stride_vb + (h // group).to(tl.int64) * stride_vh
    offs_q = row + tl.arange(0, BLOCK_Q)
    in_rows = offs_q < Sq
    token = offs_q.to(tl.int64) * Hq + h
    lse_log2 = tl.load(lse_ptr + (b * Hq + h) * Sq + offs_q, mask=in_rows, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + (b * Hq + h) * Sq + offs_q, mask=in_rows, other=0.0)
    q = load_rows(q_ptr, row, 0, Sq, stride_qs, HEAD_DIM, BLOCK_Q, BLOCK_D, True)  # [BLOCK_Q, BLOCK_D]
    dout = load_rows(dout_ptr, row, 0, Sq, stride_dos, VALUE_DIM, BLOCK_Q, BLOCK_DV, True)  # [BLOCK_Q, BLOCK_DV]
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + h)
    rows_at = offs_q
    if HAS_ALIBI or HAS_DROPOUT:
        rows_at = tl.load(rows_at_ptr + offs_q, mask=in_rows, other=0)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    dq = _visit_keys_backward(
        dq, q, dout, lse_log2, delta, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, 0, n_left,
        stride_ks, stride_vs, scale,
        softcap, slope, rows_at, keys_at_ptr, seed, threshold, keep_scale, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, True, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip
    dq = _visit_keys_backward(
        dq, q, dout, lse_log2, delta, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_left, n_full,
        stride_ks, stride_vs, scale,
        softcap, slope, rows_at, keys_at_ptr, seed, threshold, keep_scale, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, False, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip
    dq = _visit_keys_backward(
        dq, q, dout, lse_log2, delta, k_ptr, v_ptr, lo_ptr, hi_ptr, offs_q, Sq, start, begin, end, n_full, n_all,
        stride_ks, stride_vs, scale,
        softcap, slope, rows_at, keys_at_ptr, seed, threshold, keep_scale, h, batch_row,
        HEAD_DIM, VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, True, PRECISION, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
        IS_CAUSAL,
    )  # fmt: skip
    _add_rows(dq_ptr + b * stride_dqb, token, dq * scale, in_rows, HEAD_DIM, BLOCK_D, STORE)


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, Sq, Hq,
    VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout), fp32, in memory [B, Hq, Sq]."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_Q
    out_ptr += b * stride_ob + h.to(tl.int64) * stride_oh
    dout_ptr += b * stride_dob + h.to(tl.int64) * stride_doh
    out = load_rows(out_ptr, row, 0, Sq, stride_os, VALUE_DIM, BLOCK_Q, BLOCK_DV, True)  # [BLOCK_Q, BLOCK_DV]
    dout = load_rows(dout_ptr, row, 0, Sq, stride_dos, VALUE_DIM, BLOCK_Q, BLOCK_DV, True)
    offs_q = row + tl.arange(0, BLOCK_Q)
    total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + (b * Hq + h) * Sq + offs_q, total, mask=offs_q < Sq)
