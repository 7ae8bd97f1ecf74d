"""Backward kernel, column-parallel: a program keeps 128 keys and visits the rows that see them, 64 or 128 at a time.

Two warpgroups own 64 keys each. One warp brings q, dout and the row statistics; another adds finished tiles of dq into
global memory, in the shadow of the products. Everything is transposed, S^T = K Q^T [keys, rows], so that P^T and dS^T are
register operands of dV and dK. dq of a step needs dS of all 128 keys, which the warpgroups hand to one another through
shared memory: each forms half of its rows if there are 128, else half of its columns.

Source: Shah et al., arXiv:2407.08608; Dao, arXiv:2307.08691.
"""

from ringflash.kernels.hopper.device import (
    LOG2_E,
    Arriving,
    Departing,
    clear_rows,
    depart,
    diagonal,
    exp2,
    late_blocks,
    meet,
    own_or_arrived,
    place_of,
    signal,
    upwards,
)
from ringflash.kernels.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash.kernels.hopper.sums import add_sums, store_sums

# Named barriers; pairs are those of a stage or of a warpgroup.
STAGE_FREE = gl.constexpr(5)  # 5 to 7: q and dout of a step
DS_READY = gl.constexpr(8)  # 8 to 11, by warpgroup and parity of the step
DQ_FULL = gl.constexpr(12)
DQ_FREE = gl.constexpr(14)
KEYS = gl.constexpr(64)  # of a warpgroup
DQ_ROWS = gl.constexpr(64)  # of a tile of dq


@gluon.constexpr_function
def dq_columns(rows, block_d):
    """Columns of a warpgroup's tile of dq, which has 64 rows: all of half of the rows, or half of those of all."""
    return block_d if rows == 2 * DQ_ROWS.value else block_d // 2


@gluon.constexpr_function
def sum_columns(rows, block_d, with_dq):
    """Columns of dk and dv that are added at a time: what goes through the tile of dq or else, in fp32, of k."""
    return dq_columns(rows, block_d) if with_dq else block_d // 2


@aggregate
class Shared:
    """Shared memory: tiles, row statistics, the ends of each key, and the mbarriers that tell when a tile is full."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    count: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, dout, lse, delta, ds, dq, ends, count, kv_full, q_full, dout_full):
        self.k, self.v, self.q, self.dout, self.lse, self.delta = k, v, q, dout, lse, delta
        self.ds, self.dq, self.ends, self.count = ds, dq, ends, count
        self.kv_full, self.q_full, self.dout_full = kv_full, q_full, dout_full


@gluon.jit
def place(tile, heads, Sk, GROUP, KEYS_OF_TILE: gl.constexpr):
    """(batch row x key head, first key) of a tile: GROUP heads at a time, so that their rows stay in L2; in a group the
    first block first, which under a causal mask is the longest, and neighbours in time are neighbouring heads.
    """
    k_blocks = (Sk + KEYS_OF_TILE - 1) // KEYS_OF_TILE
    group = tile // (GROUP * k_blocks)
    tile -= group * GROUP * k_blocks
    members = gl.minimum(GROUP, heads - group * GROUP)
    block = tile // members
    return group * GROUP + tile - block * members, block * KEYS_OF_TILE


@gluon.jit
def visited(
    lo_ptr, hi_ptr, key, Sq, Sk, KEYS_OF_TILE: gl.constexpr, ROWS: gl.constexpr, SHAPE: gl.constexpr,
    LANDS: gl.constexpr,
):  # fmt: skip
    """(first row, blocks that hide rows at the left, end of the blocks that show all, all blocks) of a tile."""
    last = gl.minimum(key + KEYS_OF_TILE, Sk) - 1
    if SHAPE == "full":
        begin = key * 0
        end = begin + Sq
        all_from = begin
        all_until = end
    elif SHAPE == "causal":
        begin = key
        end = key * 0 + Sq
        all_from = last
        all_until = end
    elif SHAPE == "blocks":
        begin, slope = diagonal(lo_ptr, key)
        unseen, slope_last = diagonal(lo_ptr, last)
        end = key * 0 + Sq
        all_from = unseen + slope_last * (last % 64)
        all_until = end
    else:
        # The copy engine finds row statistics, 4 bytes each, at whole 16 bytes only. What lands does so block by block.
        ALIGN: gl.constexpr = ROWS if LANDS == "rows" else 4
        begin = gl.load(lo_ptr + key) // ALIGN * ALIGN
        end = gl.load(hi_ptr + last)
        all_from = gl.load(lo_ptr + last)
        all_until = gl.load(hi_ptr + key)
    n_all = (gl.maximum(end - begin, 0) + ROWS - 1) // ROWS
    n_left = gl.minimum((gl.maximum(all_from - begin, 0) + ROWS - 1) // ROWS, n_all)
    n_full = gl.maximum(gl.maximum(all_until - begin, 0) // ROWS, n_left)
    # Keys past the last one are zeros in shared memory, but their probabilities are not.
    if key + KEYS_OF_TILE > Sk:
        n_left = n_all
    return begin, n_left, n_full, n_all


@gluon.jit
def _load_keys(k_desc, v_desc, shared, b, hk, key):
    for c in gl.static_range(2):
        tma_load(k_desc, [b, hk, key + c * KEYS, 0], shared.kv_full.index(0), shared.k.index(c))
    for c in gl.static_range(2):
        tma_load(v_desc, [b, hk, key + c * KEYS, 0], shared.kv_full.index(1), shared.v.index(c))


@gluon.jit
def _load_rows(q_desc, lse_desc, dout_desc, delta_desc, shared, stage, b, h, Hq, row):
    tma_load(q_desc, [b, h, row, 0], shared.q_full.index(stage), shared.q.index(stage))
    tma_load(lse_desc, [b * Hq + h, row], shared.q_full.index(stage), shared.lse.index(stage))
    tma_load(dout_desc, [b, h, row, 0], shared.dout_full.index(stage), shared.dout.index(stage))
    tma_load(delta_desc, [b * Hq + h, row], shared.dout_full.index(stage), shared.delta.index(stage))


@gluon.jit
def _load(
    shared, q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, q_own_desc, k_own_desc, v_own_desc, dout_own_desc,
    lse_own_desc, delta_own_desc, lo_ptr, hi_ptr, arriving, stride_bounds,
    B, Hq, Hk, Sq, Sk, GROUP,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SHAPE: gl.constexpr,
    LANDS: gl.constexpr,
):  # fmt: skip
    """The load warp: keys and values once, then q, dout and the row statistics of every step."""
    SIZE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    head, key = place(gl.program_id(0), B * Hk, Sk, GROUP, 2 * KEYS)
    b = head // Hk
    hk = head - b * Hk
    seen = 0
    own_place = -1
    there = key
    if LANDS == "keys":
        own_place = place_of(arriving, key)
        there, seen = own_or_arrived(arriving, own_place, key, Sk, seen, 2 * KEYS)
    mbarrier.expect(shared.kv_full.index(0), 2 * KEYS * BLOCK_D * SIZE)
    mbarrier.expect(shared.kv_full.index(1), 2 * KEYS * BLOCK_DV * SIZE)
    if own_place >= 0:
        _load_keys(k_own_desc, v_own_desc, shared, b, hk, there)
    else:
        _load_keys(k_desc, v_desc, shared, b, hk, there)
    own_place = -1
    begin, n_left, n_full, n_all = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, key, Sq, Sk, 2 * KEYS, ROWS, SHAPE, LANDS
    )
    first_late = n_left
    late_end = n_left
    if LANDS == "rows":
        first_late, late_end = late_blocks(arriving, begin, n_left, n_full, ROWS)
    group = Hq // Hk
    n = 0
    for g in range(group):
        h = hk * group + g
        for block in range(n_all):
            row = begin + block * ROWS
            if LANDS == "rows":
                row = begin + upwards(block, n_full, first_late, late_end) * ROWS
                own_place = place_of(arriving, row)
                row, seen = own_or_arrived(arriving, own_place, row, Sq, seen, ROWS)
            stage = n % STAGES
            if n >= STAGES:
                meet(STAGE_FREE + stage, 2 * 128 + 32)
            mbarrier.expect(shared.q_full.index(stage), ROWS * BLOCK_D * SIZE + ROWS * 4)
            mbarrier.expect(shared.dout_full.index(stage), ROWS * BLOCK_DV * SIZE + ROWS * 4)
            if own_place >= 0:
                _load_rows(q_own_desc, lse_own_desc, dout_own_desc, delta_own_desc, shared, stage, b, h, Hq, row)
            else:
                _load_rows(q_desc, lse_desc, dout_desc, delta_desc, shared, stage, b, h, Hq, row)
            n += 1
    # Take what is signalled after the last use, so that no barrier is left half full.
    for i in gl.static_range(STAGES):
        if n > i:
            meet(STAGE_FREE + (n - 1 - i) % STAGES, 2 * 128 + 32)


@gluon.jit
def _add_dq(
    shared, dq_desc, lo_ptr, hi_ptr, arriving, departing, stride_bounds,
    B, Hq, Hk, Sq, Sk, GROUP,
    BLOCK_D: gl.constexpr, ROWS: gl.constexpr, SHAPE: gl.constexpr, WITH_DQ: gl.constexpr, LANDS: gl.constexpr,
):  # fmt: skip
    """The warp that adds finished tiles of dq, one from each warpgroup a step, into global memory."""
    head, key = place(gl.program_id(0), B * Hk, Sk, GROUP, 2 * KEYS)
    b = head // Hk
    begin, n_left, n_full, n_all = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, key, Sq, Sk, 2 * KEYS, ROWS, SHAPE, LANDS
    )
    first_late = n_left
    late_end = n_left
    if LANDS == "rows":
        first_late, late_end = late_blocks(arriving, begin, n_left, n_full, ROWS)
    group = Hq // Hk
    if not WITH_DQ:
        n_all = 0
    for g in range(group):
        h = (head - b * Hk) * group + g
        for block in range(n_all):
            row = begin + block * ROWS
            if LANDS == "rows":
                row = begin + upwards(block, n_full, first_late, late_end) * ROWS
            for c in gl.static_range(2):
                meet(DQ_FULL + c, 128 + 32)
                if ROWS == 2 * DQ_ROWS:
                    tma_add(dq_desc, [b, h, row + c * DQ_ROWS, 0], shared.dq.index(c))
                else:
                    tma_add(dq_desc, [b, h, row, c * (BLOCK_D // 2)], shared.dq.index(c))
            tma_store_wait(1)
            signal(DQ_FREE, 128 + 32)
            tma_store_wait(0)
            signal(DQ_FREE + 1, 128 + 32)
    if LANDS == "rows":
        depart(departing, head, B * Hk, key // (2 * KEYS), GROUP, 1)


@gluon.jit
def hide(p, ends, c: gl.constexpr, count, row, L: gl.constexpr):
    """0 where a key is not seen; the ends and the counting numbers come from shared memory, which saves registers."""
    lo = ends.index(2 * c).load(gl.SliceLayout(1, L)) - row
    hi = ends.index(2 * c + 1).load(gl.SliceLayout(1, L)) - row
    column = count.load(gl.SliceLayout(0, L))
    p = gl.where(column[None, :] >= lo[:, None], p, 0.0)
    return gl.where(column[None, :] < hi[:, None], p, 0.0)


@gluon.jit
def _hide_step(p, shared, c: gl.constexpr, row, ROWS: gl.constexpr):
    """hide, 64 rows at a time: the counting numbers of 128 would take 32 registers."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if ROWS == 64:
        p = hide(p, shared.ends, c, shared.count, row, L)
    else:
        LP: gl.constexpr = p.type.layout
        first, second = gl.split(p.reshape([KEYS, 2, 64]).permute((0, 2, 1)))
        first = hide(gl.convert_layout(first, L, assert_trivial=True), shared.ends, c, shared.count, row, L)
        second = hide(gl.convert_layout(second, L, assert_trivial=True), shared.ends, c, shared.count, row + 64, L)
        p = gl.convert_layout(gl.join(first, second).permute((0, 2, 1)).reshape([KEYS, ROWS]), LP, assert_trivial=True)
    return p


@gluon.jit
def score_gradient(p, dp, delta, scale):
    """scale * p * (dp - delta), of delta times scale: with the scale inside, dq and dk need none."""
    return p * (dp * scale - delta[None, :])


@gluon.jit
def _hand_over_dq(shared, dq, c: gl.constexpr, n, COLUMNS: gl.constexpr):
    if n > 0:
        meet(DQ_FREE + c, 128 + 32)
    store_sums(shared.dq.index(c), dq, COLUMNS)
    fence_async_shared()
    signal(DQ_FULL + c, 128 + 32)


@gluon.jit
def write_ends(ends, c: gl.constexpr, lo_ptr, hi_ptr, key, Sq, Sk, SHAPE: gl.constexpr):
    """Write the rows that see each key of this warpgroup, none for keys past the last; (first key seen, end of those)."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    keys = key + gl.arange(0, KEYS, layout=L)
    inside = keys < Sk
    if SHAPE == "rows":
        lo = gl.load(lo_ptr + keys, mask=inside, other=0)
        hi = gl.load(hi_ptr + keys, mask=inside, other=0)
    elif SHAPE == "causal":
        lo = keys
        hi = gl.where(inside, Sq, 0)
    elif SHAPE == "blocks":
        first, slope = diagonal(lo_ptr, key)
        lo = first + slope * (keys - key)
        hi = gl.where(inside, Sq, 0)
    else:
        lo = keys * 0
        hi = gl.where(inside, Sq, 0)
    ends.index(2 * c).store(lo)
    ends.index(2 * c + 1).store(hi)
    if SHAPE == "rows":
        place = gl.arange(0, KEYS, layout=L)
        seen_from = gl.min(gl.where(lo < hi, place, KEYS), axis=0)
        seen_until = gl.max(gl.where(lo < hi, place, -1), axis=0) + 1
    else:
        seen_from = key * 0
        seen_until = seen_from + KEYS
    return seen_from, seen_until


@gluon.jit
def clear_ends(tile, block, begin, seen_from, seen_until, COLUMNS: gl.constexpr, ROWS: gl.constexpr):
    """Zeros in rows before the first and after the last that sees a key of the tile; who shares a tile writes the same."""
    first = seen_from - begin - block * ROWS
    until = seen_until - begin - block * ROWS
    if (first > 0) | (until < ROWS):
        clear_rows(tile, first, until, ROWS, COLUMNS)


@gluon.jit
def _statistic(tiles, stage, factor, ROWS: gl.constexpr, L: gl.constexpr):
    return tiles.index(stage).reshape([ROWS]).load(gl.SliceLayout(0, L)) * factor


@gluon.jit
def _form_dq(c: gl.constexpr, shared, zero, parity, first, BLOCK_D: gl.constexpr, ROWS: gl.constexpr):
    """The product of dS and all keys of the program for this warpgroup's tile; in flight when this returns."""
    if ROWS == 2 * DQ_ROWS:
        ds_first = shared.ds.index(parity * 2).slice(c * DQ_ROWS, DQ_ROWS, dim=0)
        ds_second = shared.ds.index(parity * 2 + 1).slice(c * DQ_ROWS, DQ_ROWS, dim=0)
        k_first = shared.k.index(first).reshape([KEYS, BLOCK_D])
        k_second = shared.k.index(first + 1).reshape([KEYS, BLOCK_D])
    else:
        HALF: gl.constexpr = BLOCK_D // 2
        ds_first = shared.ds.index(parity * 2)
        ds_second = shared.ds.index(parity * 2 + 1)
        k_first = shared.k.index(first).reshape([KEYS, BLOCK_D]).slice(c * HALF, HALF, dim=1)
        k_second = shared.k.index(first + 1).reshape([KEYS, BLOCK_D]).slice(c * HALF, HALF, dim=1)
    dq = warpgroup_mma(ds_first, k_first, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds_second, k_second, dq, is_async=True)


@gluon.jit
def _visit_rows(
    c: gl.constexpr, shared, begin, n_left, n_full, n_all, group, seen_from, seen_until, scale,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """(dk [KEYS, BLOCK_D], dv [KEYS, BLOCK_DV]) of warpgroup c.

    In a step dP runs beside the exponentials, dV beside dS, and S of the next step behind dQ, beside the way of dQ into
    memory. dQ, which alone needs dS of the other warpgroup, comes last, so that the two need not be in step.
    """
    COLUMNS: gl.constexpr = dq_columns(ROWS, BLOCK_D)
    # With 128 rows S and dP take half of the registers: row statistics are then read where they are used, and dV begins when
    # P has been used up.
    IS_TIGHT: gl.constexpr = ROWS == 2 * DQ_ROWS
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    LQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dtype: gl.constexpr = shared.q.dtype
    scale_log2 = scale * LOG2_E
    dk = gl.full([KEYS, BLOCK_D], 0.0, gl.float32, layout=LK)
    dv = gl.full([KEYS, BLOCK_DV], 0.0, gl.float32, layout=LV)
    zero = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=LS)
    zero_dq = gl.full([DQ_ROWS, COLUMNS], 0.0, gl.float32, layout=LQ)
    steps = n_all * group
    # Keys that nobody sees have no rows to wait for; what is formed of the memory as it is goes nowhere.
    q = shared.q.index(0).reshape([ROWS, BLOCK_D])
    if steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        if SHAPE == "rows":
            clear_ends(q, 0, begin, seen_from, seen_until, BLOCK_D, ROWS)
    k = shared.k.index(c).reshape([KEYS, BLOCK_D])
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = _statistic(shared.lse, 0, LOG2_E, ROWS, LS)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    block = 0
    for n in range(steps):
        # Zero, but the compiler does not know: it would keep the descriptors of k and v in registers, which are short.
        unknown = n >> 29
        stage = n % STAGES
        parity = n & 1
        q = shared.q.index(stage).reshape([ROWS, BLOCK_D])
        dout = shared.dout.index(stage).reshape([ROWS, BLOCK_DV])
        v = shared.v.index(unknown + c).reshape([KEYS, BLOCK_DV])
        mbarrier.wait(shared.dout_full.index(stage), (n // STAGES) & 1)
        if SHAPE == "rows":
            clear_ends(dout, block, begin, seen_from, seen_until, BLOCK_DV, ROWS)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        if IS_TIGHT:
            lse = _statistic(shared.lse, stage, LOG2_E, ROWS, LS)
        p = exp2(s * scale_log2 - lse[None, :])
        if (block < n_left) | (block >= n_full):
            p = _hide_step(p, shared, c, begin + block * ROWS, ROWS)
        p_t = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, LV, 2))
        if IS_TIGHT:
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
            delta = _statistic(shared.delta, stage, scale, ROWS, LS)
        else:
            dv = warpgroup_mma(p_t, dout, dv, is_async=True)
            delta = _statistic(shared.delta, stage, scale, ROWS, LS)
            dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
        if SHAPE == "rows":
            # Rows that see nothing may hold anything, and 0 * NaN is NaN.
            delta = gl.where(gl.abs(delta) < float("inf"), delta, 0.0)
        ds = score_gradient(p, dp, delta, scale).to(dtype)
        if WITH_DQ:
            # The other warpgroup has read what lies here: it said so with its share of the step before, which was after
            # its dq of the step before that. With one barrier for both parities a second signal could come before the
            # first is taken.
            shared.ds.index(parity * 2 + c).permute((1, 0)).store(ds)
            fence_async_shared()
            signal(DS_READY + 2 * c + parity, 256)
        if IS_TIGHT:
            dv = warpgroup_mma(p_t, dout, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, LK, 2)), q, dk, is_async=True)
        if WITH_DQ:
            meet(DS_READY + 2 * (1 - c) + parity, 256)
            dq = _form_dq(c, shared, zero_dq, parity, unknown, BLOCK_D, ROWS)
        block += 1
        if block == n_all:
            block = 0
        # After the last step this works on what is left there, and nobody reads the result.
        next_stage = (n + 1) % STAGES
        next_q = shared.q.index(next_stage).reshape([ROWS, BLOCK_D])
        if n + 1 < steps:
            mbarrier.wait(shared.q_full.index(next_stage), ((n + 1) // STAGES) & 1)
            if SHAPE == "rows":
                clear_ends(next_q, block, begin, seen_from, seen_until, BLOCK_D, ROWS)
        dv, dk = warpgroup_mma_wait(num_outstanding=2 if WITH_DQ else 0, deps=[dv, dk])
        signal(STAGE_FREE + stage, 2 * 128 + 32)
        k = shared.k.index(unknown + c).reshape([KEYS, BLOCK_D])
        s = warpgroup_mma(k, next_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        if WITH_DQ:
            dq = warpgroup_mma_wait(num_outstanding=1, deps=[dq])
            _hand_over_dq(shared, dq, c, n, COLUMNS)
        if not IS_TIGHT:
            lse = _statistic(shared.lse, next_stage, LOG2_E, ROWS, LS)
        s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    return dk, dv


@gluon.jit
def _differentiate(
    c: gl.constexpr, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, departing, stride_bounds,
    B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr, SHAPE: gl.constexpr, STORE: gl.constexpr,
    LANDS: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: keys c * KEYS ... of the program's tile."""
    head, tile_key = place(gl.program_id(0), B * Hk, Sk, GROUP, 2 * KEYS)
    b = head // Hk
    hk = head - b * Hk
    key = tile_key + c * KEYS
    begin, n_left, n_full, n_all = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, tile_key, Sq, Sk, 2 * KEYS, ROWS, SHAPE, LANDS
    )
    seen_from, seen_until = write_ends(
        shared.ends, c, lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, key, Sq, Sk, SHAPE
    )
    mbarrier.wait(shared.kv_full.index(0), 0)
    mbarrier.wait(shared.kv_full.index(1), 0)
    if SHAPE == "rows":
        if (seen_from > 0) | (seen_until < KEYS):
            clear_rows(shared.k.index(c).reshape([KEYS, BLOCK_D]), seen_from, seen_until, KEYS, BLOCK_D)
            clear_rows(shared.v.index(c).reshape([KEYS, BLOCK_DV]), seen_from, seen_until, KEYS, BLOCK_DV)
    warpgroup_barrier()  # what one warp has written all may read; the other warpgroup waits before it reads any of this
    rows_from = begin
    rows_until = begin
    if SHAPE == "rows":
        rows_from = gl.load(lo_ptr + b * stride_bounds + tile_key)
        rows_until = gl.load(hi_ptr + b * stride_bounds + gl.minimum(tile_key + 2 * KEYS, Sk) - 1)
    dk, dv = _visit_rows(
        c, shared, begin, n_left, n_full, n_all, Hq // Hk, rows_from, rows_until, scale,
        BLOCK_D, BLOCK_DV, ROWS, STAGES, WITH_DQ, SHAPE,
    )  # fmt: skip
    if WITH_DQ and n_all > 0:
        meet(DQ_FREE + c, 128 + 32)  # the last tile of dq has left shared memory
    # dk and dv leave through memory that only this warpgroup has used, and no longer does.
    if STORE:
        dtype: gl.constexpr = shared.q.dtype
        if WITH_DQ:
            TILES: gl.constexpr = DQ_ROWS * dq_columns(ROWS, BLOCK_D) * 4 // (KEYS * BLOCK_D * 2)
            dk_tile = shared.dq.index(c)._reinterpret(dtype, [TILES, 1, 1, KEYS, BLOCK_D], dk_desc.layout).index(0)
        else:
            dk_tile = shared.k.index(c)
        dk_tile.reshape([KEYS, BLOCK_D]).store(dk.to(dtype))
        dv_tile = shared.v.index(c)
        dv_tile.reshape([KEYS, BLOCK_DV]).store(dv.to(dtype))
        fence_async_shared()
        tma_store(dk_desc, [b, hk, key, 0], dk_tile)
        tma_store(dv_desc, [b, hk, key, 0], dv_tile)
    else:
        PIECE: gl.constexpr = sum_columns(ROWS, BLOCK_D, WITH_DQ)
        memory = shared.dq.index(c) if WITH_DQ else shared.k.index(c)
        add_sums(dk_desc, memory, dk, b, hk, key, 0, BLOCK_D, PIECE)
        add_sums(dv_desc, memory, dv, b, hk, key, 0, BLOCK_DV, PIECE)
    tma_store_wait(0)
    if LANDS == "keys":
        depart(departing, head, B * Hk, tile_key // (2 * KEYS), GROUP, 8)


@gluon.jit(
    do_not_specialize=[
        "total", "cell_rows_log2", "late_from", "late_until", "stride_bounds", "B", "Hq", "Hk", "Sq", "Sk", "GROUP",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc,
    q_own_desc, k_own_desc, v_own_desc, dout_own_desc, lse_own_desc, delta_own_desc, dq_desc, dk_desc, dv_desc,
    lo_ptr, hi_ptr, flags_ptr, places_ptr, cell_rows_log2, late_from, late_until, done_ptr, counts_ptr, blocks_ptr, total,
    stride_bounds, B, Hq, Hk, Sq, Sk, GROUP, scale,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
    SHAPE: gl.constexpr, STORE: gl.constexpr, LANDS: gl.constexpr,
):  # fmt: skip
    """Add to dq [B, Sq, Hq, ...] fp32; add to dk, dv [B, Sk, Hk, ...] fp32 or, if STORE, write them in q's type.

    Without WITH_DQ another kernel forms dq, and the warpgroups need nothing of one another.

    Descriptors are of [B, heads, tokens, dim], those of lse and delta of [B x Hq, Sq]. lo, hi int32 [1 or B, Sk]: the rows
    that see each key; read where SHAPE is "rows", else they follow from "full" or "causal", or from a number for every 64
    keys in place of lo where it is "blocks", see diagonal. scale > 0.

    LANDS: "rows" or "keys" (or "none") are still arriving, but for those that the own descriptors describe, see Arriving;
        and what is added to, dq of "rows", dk and dv of "keys", departs for GROUP heads at a time, see Departing.
    """
    arriving = Arriving(flags_ptr, places_ptr, cell_rows_log2, late_from, late_until)
    departing = Departing(done_ptr, counts_ptr, blocks_ptr, total)
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, BLOCK_D], k_desc.layout)
    if WITH_DQ:
        ds_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, DQ_ROWS, dq_columns(ROWS, BLOCK_D)], dq_desc.layout)
    else:
        ds_tiles = k_tiles
        dq_tiles = k_tiles
    shared = Shared(
        k_tiles,
        gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, BLOCK_DV], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_DV], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], delta_desc.layout),
        ds_tiles,
        dq_tiles,
        gl.allocate_shared_memory(gl.int32, [4, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.q_full.index(i), count=1)
        mbarrier.init(shared.dout_full.index(i), count=1)
    shared.count.store(gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0])))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, departing, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D, BLOCK_DV, ROWS, STAGES, WITH_DQ, SHAPE,
                STORE, LANDS,
            )),
            (_differentiate, (
                1, shared, dk_desc, dv_desc, lo_ptr, hi_ptr, departing, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, scale, BLOCK_D, BLOCK_DV, ROWS, STAGES, WITH_DQ, SHAPE,
                STORE, LANDS,
            )),
            (_load, (
                shared, q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, q_own_desc, k_own_desc, v_own_desc,
                dout_own_desc, lse_own_desc, delta_own_desc, lo_ptr, hi_ptr, arriving, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, BLOCK_D, BLOCK_DV, ROWS, STAGES, SHAPE, LANDS,
            )),
            (_add_dq, (
                shared, dq_desc, lo_ptr, hi_ptr, arriving, departing, stride_bounds,
                B, Hq, Hk, Sq, Sk, GROUP, BLOCK_D, ROWS, SHAPE, WITH_DQ, LANDS,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
