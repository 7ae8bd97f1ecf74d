"""Backward kernel, row-parallel: a program keeps 128 queries, visits the keys that they see, and forms their dq alone.

Two warpgroups own 64 queries each and never wait for one another; one warp brings keys and values. dq stays in registers
until all keys are done, so one program writes each element once: nothing is added up in the order in which programs end.
The price is S and dP formed twice, here and in the kernel that forms dk and dv. In a warpgroup dq of one block, S of the
next and its dP follow one another through the tensor cores, from the last block to the first.

Source: Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608.
"""

from ringflash.kernels.hopper.device import LOG2_E, clear_rows, exp2, meet, signal
from ringflash.kernels.hopper.forward import place, visited
from ringflash.kernels.hopper.forward_visit import KEYS_FREE, ROWS, STAGES, VALUES_FREE
from ringflash.kernels.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash.kernels.hopper.sums import add_sums

TILE = gl.constexpr(2 * 64)  # queries of a program


@gluon.constexpr_function
def sum_columns(block_d):
    """Columns of dq that are added at a time, in fp32, through the memory of q: its half, and no more than 64."""
    return min(64, block_d // 2)


@aggregate
class Shared:
    """Shared memory: tiles, and the mbarriers that tell when each is full."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, dout, k, v, q_full, dout_full, k_full, v_full):
        self.q, self.dout, self.k, self.v = q, dout, k, v
        self.q_full, self.dout_full, self.k_full, self.v_full = q_full, dout_full, k_full, v_full


@gluon.jit
def _load_block(
    desc, tiles, full, free: gl.constexpr, b, head, key, n, BYTES: gl.constexpr, STAGES_OF_TILE: gl.constexpr
):
    """Bring a block into the stage of step n, as soon as both warpgroups have used what was there."""
    stage = n % STAGES_OF_TILE
    if n >= STAGES_OF_TILE:
        meet(free + stage, 2 * 128 + 32)
    mbarrier.expect(full.index(stage), BYTES)
    tma_load(desc, [b, head, key, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def _load_rows(desc, tiles, full, b, h, row, BYTES: gl.constexpr):
    for c in gl.static_range(2):
        mbarrier.expect(full.index(c), BYTES)
        tma_load(desc, [b, h, row + c * ROWS, 0], full.index(c), tiles.index(c))


@gluon.jit
def _load(
    shared, q_desc, k_desc, v_desc, dout_desc, lo_ptr, hi_ptr, stride_bounds, B, Hq, Hk, Sq, Sk, GROUP,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, VALUE_STAGES: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """The load warp: q and dout once, then keys and values of every block. Queries that see nothing need none of it."""
    SIZE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    head, block = place(gl.program_id(0), (Sq + TILE - 1) // TILE, B * Hq, GROUP)
    row = block * TILE
    b = head // Hq
    h = head - b * Hq
    hk = h // (Hq // Hk)
    begin, n_left, n_full, n_all, keys, _ = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, row, Sq, Sk, TILE, BLOCK_K, SHAPE
    )
    if n_all > 0:
        _load_rows(q_desc, shared.q, shared.q_full, b, h, row, ROWS * BLOCK_D * SIZE)
    for n in range(n_all):
        key = begin + (n_all - 1 - n) * BLOCK_K
        # In the order of use, which is also the order in which stages become free.
        _load_block(
            k_desc, shared.k, shared.k_full, KEYS_FREE, b, hk, key, n, BLOCK_K * BLOCK_D * SIZE, STAGES
        )  # fmt: skip
        if n == 0:
            _load_rows(dout_desc, shared.dout, shared.dout_full, b, h, row, ROWS * BLOCK_DV * SIZE)
        _load_block(
            v_desc, shared.v, shared.v_full, VALUES_FREE, b, hk, key, n, BLOCK_K * BLOCK_DV * SIZE, VALUE_STAGES
        )  # fmt: skip
    # Take what is signalled after the last use, so that no barrier is left half full.
    for i in gl.static_range(STAGES):
        if n_all > i:
            meet(KEYS_FREE + (n_all - 1 - i) % STAGES, 2 * 128 + 32)
    for i in gl.static_range(VALUE_STAGES):
        if n_all > i:
            meet(VALUES_FREE + (n_all - 1 - i) % VALUE_STAGES, 2 * 128 + 32)


@gluon.jit
def _take_dp(dp, n, VALUE_STAGES: gl.constexpr):
    dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
    signal(VALUES_FREE + n % VALUE_STAGES, 2 * 128 + 32)
    return dp


@gluon.jit
def _score_gradient(
    s, dp_ahead, lse, delta, lo, hi, block, hides, n, scale,
    BLOCK_K: gl.constexpr, VALUE_STAGES: gl.constexpr, SHAPE: gl.constexpr, LS: gl.constexpr,
):  # fmt: skip
    """scale * P * (dP - delta) of a block whose S and dP are in flight; lse in log2 units, delta with the scale inside.

    Each branch waits for dP by itself, and begins in its own way, because the assembler moves nothing across. From one wait
    for both it had the exponentials follow the wait, and not run under the product, and freed the values after all else.
    """
    s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
    p = exp2(s * (scale * LOG2_E) - lse[:, None])
    if hides:
        # Both are chosen and not multiplied: what is hidden, in queries and keys alike, may be NaN.
        column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LS)) + block * BLOCK_K
        is_seen = column[None, :] < hi[:, None]
        if SHAPE == "rows":
            is_seen = is_seen & (column[None, :] >= lo[:, None])
        p = gl.where(is_seen, p, 0.0)
        dp = gl.where(is_seen, _take_dp(dp_ahead, n, VALUE_STAGES), 0.0)
    else:
        dp = _take_dp(dp_ahead, n, VALUE_STAGES)
    return p * (dp * scale - delta[:, None])


@gluon.jit
def _visit_keys(
    c: gl.constexpr, shared, n_left, n_full, n_all, unseen_from, lse, delta, lo, hi, scale,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, VALUE_STAGES: gl.constexpr, SHAPE: gl.constexpr,
    LS: gl.constexpr, LQ: gl.constexpr,
):  # fmt: skip
    """dq [ROWS, BLOCK_D] of warpgroup c, from blocks n_all - 1 down to 0; there is one at least."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LQ, 2)
    dtype: gl.constexpr = shared.q.dtype
    dq = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, layout=LQ)
    zero = gl.full([ROWS, BLOCK_K], 0.0, gl.float32, layout=LS)
    mbarrier.wait(shared.q_full.index(c), 0)
    mbarrier.wait(shared.k_full.index(0), 0)
    if SHAPE == "rows":
        if unseen_from < BLOCK_K:
            # Both warpgroups write the same zeros, each before its own product with dS, which is 0 there. Values of such
            # keys come to dP only, where they are hidden.
            clear_rows(shared.k.index(0).reshape([BLOCK_K, BLOCK_D]), 0, unseen_from, BLOCK_K, BLOCK_D)
            warpgroup_barrier()
    q = shared.q.index(c).reshape([ROWS, BLOCK_D])
    dout = shared.dout.index(c).reshape([ROWS, BLOCK_DV])
    k = shared.k.index(0).reshape([BLOCK_K, BLOCK_D])
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.dout_full.index(c), 0)
    mbarrier.wait(shared.v_full.index(0), 0)
    v = shared.v.index(0).reshape([BLOCK_K, BLOCK_DV])
    dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    block = n_all - 1
    hides = (block < n_left) | (block >= n_full)
    ds = _score_gradient(s, dp, lse, delta, lo, hi, block, hides, 0, scale, BLOCK_K, VALUE_STAGES, SHAPE, LS)
    for n in range(1, n_all):
        # Zero, but the compiler does not know: it would keep the descriptors of q and dout in registers, which are short.
        unknown = n >> 29
        q = shared.q.index(unknown + c).reshape([ROWS, BLOCK_D])
        dout = shared.dout.index(unknown + c).reshape([ROWS, BLOCK_DV])
        stage = n % STAGES
        before = (n - 1) % STAGES
        value_stage = n % VALUE_STAGES
        k = shared.k.index(before).reshape([BLOCK_K, BLOCK_D])
        dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), LEFT), k, dq, is_async=True)
        mbarrier.wait(shared.k_full.index(stage), (n // STAGES) & 1)
        k = shared.k.index(stage).reshape([BLOCK_K, BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Before dP is begun, which takes the registers that dS leaves; S keeps the tensor cores busy meanwhile.
        dq = warpgroup_mma_wait(num_outstanding=1, deps=[dq])
        signal(KEYS_FREE + before, 2 * 128 + 32)
        mbarrier.wait(shared.v_full.index(value_stage), (n // VALUE_STAGES) & 1)
        v = shared.v.index(value_stage).reshape([BLOCK_K, BLOCK_DV])
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        block -= 1
        hides = (block < n_left) | (block >= n_full)
        ds = _score_gradient(s, dp, lse, delta, lo, hi, block, hides, n, scale, BLOCK_K, VALUE_STAGES, SHAPE, LS)
    last = (n_all - 1) % STAGES
    k = shared.k.index(last).reshape([BLOCK_K, BLOCK_D])
    dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), LEFT), k, dq, is_async=True)
    dq = warpgroup_mma_wait(num_outstanding=0, deps=[dq])
    signal(KEYS_FREE + last, 2 * 128 + 32)
    return dq


@gluon.jit
def _differentiate(
    c: gl.constexpr, shared, dq_desc, lse_ptr, delta_ptr, lo_ptr, hi_ptr, stride_bounds,
    B, Hq, Sq, Sk, GROUP, scale, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    VALUE_STAGES: gl.constexpr, SHAPE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: queries c * ROWS ... of the program's tile."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    head, tile = place(gl.program_id(0), (Sq + TILE - 1) // TILE, B * Hq, GROUP)
    b = head // Hq
    h = head - b * Hq
    row = tile * TILE + c * ROWS
    lo_ptr += b * stride_bounds
    hi_ptr += b * stride_bounds
    begin, n_left, n_full, n_all, keys, _ = visited(lo_ptr, hi_ptr, tile * TILE, Sq, Sk, TILE, BLOCK_K, SHAPE)
    dq = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, layout=LQ)
    if n_all > 0:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LS))
        inside = rows < Sq
        statistics = head.to(gl.int64) * Sq + rows
        lse = gl.load(lse_ptr + statistics, mask=inside, other=float("-inf")) * LOG2_E
        # Rows that see nothing, and those past the last: probabilities of 0 rather than of inf - inf.
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
        delta = gl.load(delta_ptr + statistics, mask=inside, other=0.0) * scale
        if SHAPE == "rows":
            lo = gl.load(lo_ptr + rows, mask=inside, other=0) - begin
            hi = gl.load(hi_ptr + rows, mask=inside, other=0) - begin
        elif SHAPE == "causal":
            lo = rows * 0
            hi = rows + 1
        else:
            lo = rows * 0
            hi = lo + Sk
        # What comes with a row that sees nothing may be NaN.
        delta = gl.where(lo < hi, delta, 0.0)
        dq = _visit_keys(
            c, shared, n_left, n_full, n_all, keys - (n_all - 1) * BLOCK_K, lse, delta, lo, hi, scale,
            BLOCK_K, BLOCK_D, BLOCK_DV, VALUE_STAGES, SHAPE, LS, LQ,
        )  # fmt: skip
    # Through the memory of this warpgroup's queries: its own products alone have read it, and are done.
    dq_tile = shared.q.index(c)
    if STORE:
        dq_tile.reshape([ROWS, BLOCK_D]).store(dq.to(dq_tile.dtype))
        fence_async_shared()
        tma_store(dq_desc, [b, h, row, 0], dq_tile)
    else:
        if n_all > 0:
            add_sums(dq_desc, dq_tile, dq, b, h, row, 0, BLOCK_D, sum_columns(BLOCK_D))
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["stride_bounds", "B", "Hq", "Hk", "Sq", "Sk", "GROUP"])
def queries_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, lse_ptr, delta_ptr, lo_ptr, hi_ptr, stride_bounds,
    B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    VALUE_STAGES: gl.constexpr, SHAPE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Add to dq [B, Sq, Hq, ...] fp32 or, if STORE, write it in q's type.

    Descriptors are of [B, heads, tokens, dim]; lse, delta fp32, in memory [B, Hq, Sq]. lo, hi int32 [1 or B, Sq]: the keys
    that each query sees; read where SHAPE is "rows", else they follow from "full" or "causal". scale > 0.
    """
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_DV], dout_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [VALUE_STAGES, 1, 1, BLOCK_K, BLOCK_DV], v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], barrier),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.q_full.index(i), count=1)
        mbarrier.init(shared.dout_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(i), count=1)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(shared.v_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, shared, dq_desc, lse_ptr, delta_ptr, lo_ptr, hi_ptr, stride_bounds,
                B, Hq, Sq, Sk, GROUP, scale, BLOCK_K, BLOCK_D, BLOCK_DV, VALUE_STAGES, SHAPE, STORE,
            )),
            (_differentiate, (
                1, shared, dq_desc, lse_ptr, delta_ptr, lo_ptr, hi_ptr, stride_bounds,
                B, Hq, Sq, Sk, GROUP, scale, BLOCK_K, BLOCK_D, BLOCK_DV, VALUE_STAGES, SHAPE, STORE,
            )),
            (_load, (
                shared, q_desc, k_desc, v_desc, dout_desc, lo_ptr, hi_ptr, stride_bounds, B, Hq, Hk, Sq, Sk, GROUP,
                BLOCK_K, BLOCK_D, BLOCK_DV, VALUE_STAGES, SHAPE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
