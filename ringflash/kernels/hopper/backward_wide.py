"""Backward kernel for heads of more than 128: dk and dv of 64 keys a program, and the warpgroups share every product.

dk and dv of 64 keys by 256 columns fill half of the registers of two warpgroups, so each owns half of the columns. Of the
scores there are 64 x 64 a step: one warpgroup forms S and P, the other dP and dS, each at full width. Each keeps what it
has formed in registers, for its half of one product, and hands it over through shared memory for the other's half. dV and
dK of a step come before S and dP of the next, so that rows arrive meanwhile: there is room for no more than two stages.

dq is left to backward_queries.py. Added from here, 64 KB for every 64 KB that a step reads, it was bound by L2.
"""

from ringflash.kernels.hopper.backward import clear_ends, hide, place, visited, write_ends
from ringflash.kernels.hopper.device import LOG2_E, clear_rows, exp2, meet, signal
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

# Named barriers; pairs are those of a stage.
QUERIES_FREE = gl.constexpr(6)
DOUT_FREE = gl.constexpr(8)
P_WRITTEN = gl.constexpr(10)
DS_WRITTEN = gl.constexpr(11)
KEYS = gl.constexpr(64)  # of a program
ROWS = gl.constexpr(64)  # of a step
STAGES = gl.constexpr(2)
SUM_COLUMNS = gl.constexpr(64)  # of dk and dv that are added at a time


@aggregate
class Shared:
    """Shared memory: tiles, row statistics, the ends of each key, and the mbarriers that tell when a tile is full."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    count: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, dout, lse, delta, p, ds, ends, count, kv_full, q_full, dout_full):
        self.k, self.v, self.q, self.dout, self.lse, self.delta = k, v, q, dout, lse, delta
        self.p, self.ds, self.ends, self.count = p, ds, ends, count
        self.kv_full, self.q_full, self.dout_full = kv_full, q_full, dout_full


@gluon.jit
def _load(
    shared, q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, lo_ptr, hi_ptr, stride_bounds, B, Hq, Hk, Sq, Sk, GROUP,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """The load warp: keys and values once, then q, dout and the row statistics of every step."""
    SIZE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    head, key = place(gl.program_id(0), B * Hk, Sk, GROUP, KEYS)
    b = head // Hk
    hk = head - b * Hk
    mbarrier.expect(shared.kv_full.index(0), KEYS * BLOCK_D * SIZE)
    tma_load(k_desc, [b, hk, key, 0], shared.kv_full.index(0), shared.k)
    mbarrier.expect(shared.kv_full.index(1), KEYS * BLOCK_DV * SIZE)
    tma_load(v_desc, [b, hk, key, 0], shared.kv_full.index(1), shared.v)
    begin, n_left, n_full, n_all = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, key, Sq, Sk, KEYS, ROWS, SHAPE, "none"
    )
    group = Hq // Hk
    n = 0
    for g in range(group):
        h = hk * group + g
        for block in range(n_all):
            row = begin + block * ROWS
            stage = n % STAGES
            # dout first, whose memory is free first.
            if n >= STAGES:
                meet(DOUT_FREE + stage, 2 * 128 + 32)
            mbarrier.expect(shared.dout_full.index(stage), ROWS * BLOCK_DV * SIZE + ROWS * 4)
            tma_load(dout_desc, [b, h, row, 0], shared.dout_full.index(stage), shared.dout.index(stage))
            tma_load(delta_desc, [b * Hq + h, row], shared.dout_full.index(stage), shared.delta.index(stage))
            if n >= STAGES:
                meet(QUERIES_FREE + stage, 2 * 128 + 32)
            mbarrier.expect(shared.q_full.index(stage), ROWS * BLOCK_D * SIZE + ROWS * 4)
            tma_load(q_desc, [b, h, row, 0], shared.q_full.index(stage), shared.q.index(stage))
            tma_load(lse_desc, [b * Hq + h, row], shared.q_full.index(stage), shared.lse.index(stage))
            n += 1
    # Take what is signalled after the last use, so that no barrier is left half full.
    for i in gl.static_range(STAGES):
        if n > i:
            meet(DOUT_FREE + (n - 1 - i) % STAGES, 2 * 128 + 32)
            meet(QUERIES_FREE + (n - 1 - i) % STAGES, 2 * 128 + 32)


@gluon.jit
def _issue_scores(
    c: gl.constexpr, shared, n, stage, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, LS: gl.constexpr, is_there
):
    """S^T [KEYS, ROWS] of step n by warpgroup 0, dP^T by warpgroup 1; in flight when this returns."""
    zero = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=LS)
    if c == 0:
        if is_there:
            mbarrier.wait(shared.q_full.index(stage), (n // STAGES) & 1)
        q = shared.q.index(stage).reshape([ROWS, BLOCK_D])
        x = warpgroup_mma(shared.k.reshape([KEYS, BLOCK_D]), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        if is_there:
            mbarrier.wait(shared.dout_full.index(stage), (n // STAGES) & 1)
        dout = shared.dout.index(stage).reshape([ROWS, BLOCK_DV])
        x = warpgroup_mma(shared.v.reshape([KEYS, BLOCK_DV]), dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    return x


@gluon.jit
def _share_scores(c: gl.constexpr, shared, x, n, stage, row, hides, scale, SHAPE: gl.constexpr, LS: gl.constexpr):
    """From S the probabilities, from them and dP the gradients of the scores; rounded, for the other in shared memory."""
    buffer = n & 1
    dtype: gl.constexpr = shared.q.dtype
    if c == 0:
        lse = shared.lse.index(stage).reshape([ROWS]).load(gl.SliceLayout(0, LS)) * LOG2_E
        p = exp2(x * (scale * LOG2_E) - lse[None, :])
        if hides:
            p = hide(p, shared.ends, 0, shared.count, row, LS)
        own = p.to(dtype)
        shared.p.index(buffer).store(own)
        fence_async_shared()
        signal(P_WRITTEN, 256)
    else:
        delta = shared.delta.index(stage).reshape([ROWS]).load(gl.SliceLayout(0, LS)) * scale
        dp = x * scale - delta[None, :]
        meet(P_WRITTEN, 256)
        p = shared.p.index(buffer).load(LS).to(gl.float32)
        ds = p * dp
        if SHAPE == "rows":
            ds = gl.where(p == 0.0, 0.0, ds)  # rows that see nothing may hold anything, and 0 * NaN is NaN
        own = ds.to(dtype)
        shared.ds.index(buffer).store(own)
        fence_async_shared()
    return own


@gluon.jit
def _differentiate(
    c: gl.constexpr, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, stride_bounds,
    B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    SHAPE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: columns c * HALF ... of dk and dv."""
    HALF: gl.constexpr = BLOCK_D // 2
    HALF_V: gl.constexpr = BLOCK_DV // 2
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_V, 16])
    head, key = place(gl.program_id(0), B * Hk, Sk, GROUP, KEYS)
    b = head // Hk
    hk = head - b * Hk
    group = Hq // Hk
    lo_ptr += b * stride_bounds
    hi_ptr += b * stride_bounds
    begin, n_left, n_full, n_all = visited(lo_ptr, hi_ptr, key, Sq, Sk, KEYS, ROWS, SHAPE, "none")
    seen_from, seen_until = write_ends(shared.ends, c, lo_ptr, hi_ptr, key, Sq, Sk, SHAPE)
    dk = gl.full([KEYS, HALF], 0.0, gl.float32, layout=LK)
    dv = gl.full([KEYS, HALF_V], 0.0, gl.float32, layout=LV)
    steps = n_all * group
    if SHAPE == "rows":
        rows_from = gl.load(lo_ptr + key)
        rows_until = gl.load(hi_ptr + gl.minimum(key + KEYS, Sk) - 1)
    mbarrier.wait(shared.kv_full.index(0), 0)
    mbarrier.wait(shared.kv_full.index(1), 0)
    if SHAPE == "rows":
        if (seen_from > 0) | (seen_until < KEYS):
            if c == 0:
                clear_rows(shared.k.reshape([KEYS, BLOCK_D]), seen_from, seen_until, KEYS, BLOCK_D)
            else:
                clear_rows(shared.v.reshape([KEYS, BLOCK_DV]), seen_from, seen_until, KEYS, BLOCK_DV)
    warpgroup_barrier()  # what one warp has written all may read; the other warpgroup waits before it reads any of this
    own = gl.full([KEYS, ROWS], 0.0, shared.q.dtype, layout=LS)
    if steps > 0:
        x = _issue_scores(c, shared, 0, 0, BLOCK_D, BLOCK_DV, LS, True)
        x = warpgroup_mma_wait(num_outstanding=0, deps=[x])
        own = _share_scores(c, shared, x, 0, 0, begin, (0 < n_left) | (0 >= n_full), scale, SHAPE, LS)
        meet(DS_WRITTEN, 256)
    block = 0
    for n in range(steps):
        stage = n % STAGES
        next_stage = (n + 1) % STAGES
        mbarrier.wait(shared.dout_full.index(stage), (n // STAGES) & 1)
        mbarrier.wait(shared.q_full.index(stage), (n // STAGES) & 1)
        dout = shared.dout.index(stage).reshape([ROWS, BLOCK_DV]).slice(c * HALF_V, HALF_V, dim=1)
        q = shared.q.index(stage).reshape([ROWS, BLOCK_D]).slice(c * HALF, HALF, dim=1)
        if SHAPE == "rows":
            # S and dP of these rows are formed, in both warpgroups, and what they have of NaN is hidden.
            clear_ends(dout, block, begin, rows_from, rows_until, HALF_V, ROWS)
            clear_ends(q, block, begin, rows_from, rows_until, HALF, ROWS)
        if c == 0:
            dv = warpgroup_mma(gl.convert_layout(own, gl.DotOperandLayout(0, LV, 2)), dout, dv, is_async=True)
            dk = warpgroup_mma(shared.ds.index(n & 1), q, dk, is_async=True)
        else:
            dv = warpgroup_mma(shared.p.index(n & 1), dout, dv, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(own, gl.DotOperandLayout(0, LK, 2)), q, dk, is_async=True)
        # After the last step this works on what is left there, and nobody reads the result.
        x = _issue_scores(c, shared, n + 1, next_stage, BLOCK_D, BLOCK_DV, LS, n + 1 < steps)
        block += 1
        if block == n_all:
            block = 0
        dv = warpgroup_mma_wait(num_outstanding=2, deps=[dv])
        signal(DOUT_FREE + stage, 2 * 128 + 32)
        dk = warpgroup_mma_wait(num_outstanding=1, deps=[dk])
        signal(QUERIES_FREE + stage, 2 * 128 + 32)
        x = warpgroup_mma_wait(num_outstanding=0, deps=[x])
        if n + 1 < steps:
            hides = (block < n_left) | (block >= n_full)
            own = _share_scores(c, shared, x, n + 1, next_stage, begin + block * ROWS, hides, scale, SHAPE, LS)
        meet(DS_WRITTEN, 256)
    # All products are done in both warpgroups, so dk and dv leave through the memory of k and v.
    if steps == 0:
        meet(DS_WRITTEN, 256)
    if STORE:
        dtype: gl.constexpr = shared.q.dtype
        shared.k.reshape([KEYS, BLOCK_D]).slice(c * HALF, HALF, dim=1).store(dk.to(dtype))
        shared.v.reshape([KEYS, BLOCK_DV]).slice(c * HALF_V, HALF_V, dim=1).store(dv.to(dtype))
        fence_async_shared()
        meet(DS_WRITTEN, 256)
        if c == 0:
            tma_store(dk_desc, [b, hk, key, 0], shared.k)
        else:
            tma_store(dv_desc, [b, hk, key, 0], shared.v)
    else:
        memory = shared.k if c == 0 else shared.v
        add_sums(dk_desc, memory, dk, b, hk, key, c * HALF, HALF, SUM_COLUMNS)
        add_sums(dv_desc, memory, dv, b, hk, key, c * HALF_V, HALF_V, SUM_COLUMNS)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["stride_bounds", "B", "Hq", "Hk", "Sq", "Sk", "GROUP"])
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, lo_ptr, hi_ptr,
    stride_bounds, B, Hq, Hk, Sq, Sk, GROUP, scale,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """As backward_kernel without dq, for BLOCK_D and BLOCK_DV of 128 or 256."""
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    scores: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        gl.allocate_shared_memory(dtype, [1, 1, KEYS, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, KEYS, BLOCK_DV], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_DV], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], delta_desc.layout),
        gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], scores),
        gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], scores),
        gl.allocate_shared_memory(gl.int32, [4, KEYS], plain),
        gl.allocate_shared_memory(gl.int32, [ROWS], plain),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.q_full.index(i), count=1)
        mbarrier.init(shared.dout_full.index(i), count=1)
    shared.count.store(gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0])))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D, BLOCK_DV, SHAPE, STORE,
            )),
            (_differentiate, (
                1, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D, BLOCK_DV, SHAPE, STORE,
            )),
            (_load, (
                shared, q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, lo_ptr, hi_ptr, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, BLOCK_D, BLOCK_DV, SHAPE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
