"""Forward kernel: two or three warpgroups attend with 64 queries each, one warp brings queries, keys and values.

A program takes tiles of 128 or 192 queries of one head until none is left. The load warp looks up which keys a tile sees
and says so in shared memory; then all warpgroups visit the same key blocks, from the last to the first. In a warpgroup the
product Q K^T of one block runs together with P V of the block before, and the softmax of one hides under the other.

Source: Shah et al., arXiv:2407.08608.
"""

from ringflash.kernels.hopper.device import (
    LN_2,
    LOG2_E,
    Arriving,
    diagonal,
    downwards,
    exp2,
    late_blocks,
    meet,
    next_tile,
    own_or_arrived,
    place_of,
    signal,
)
from ringflash.kernels.hopper.forward_visit import (
    KEYS_FREE,
    OUT_FREE,
    QUERIES_FREE,
    ROWS,
    STAGES,
    TURN,
    VALUES_FREE,
    visit_keys,
)
from ringflash.kernels.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)

# What the load warp says of a tile: batch row x head, or -1 for no more; first query; first key; key blocks that hide
# something at their left end, those before the ones that hide something at their right end, and all; keys seen, and keys
# before the first that is.
FACTS = gl.constexpr(8)


@aggregate
class Shared:
    """Shared memory: tiles, facts, and the mbarriers that tell when each is full."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    facts: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    facts_full: gl.shared_memory_descriptor
    facts_free: gl.shared_memory_descriptor
    before_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, facts, q_full, k_full, v_full, facts_full, facts_free, before_full):
        self.q, self.k, self.v, self.out, self.facts = q, k, v, out, facts
        self.q_full, self.k_full, self.v_full = q_full, k_full, v_full
        self.facts_full, self.facts_free, self.before_full = facts_full, facts_free, before_full


@gluon.jit
def place(tile, q_blocks, heads, GROUP):
    """(batch row x head, block of queries) of a tile.

    GROUP heads at a time, so that their keys stay in L2; in a group the last block first, which under a causal mask is the
    longest, and neighbours in time are neighbouring heads.
    """
    group = tile // (GROUP * q_blocks)
    tile -= group * GROUP * q_blocks
    members = gl.minimum(GROUP, heads - group * GROUP)
    block = tile // members
    return group * GROUP + tile - block * members, q_blocks - 1 - block


@gluon.jit
def visited(
    lo_ptr, hi_ptr, row, Sq, Sk, TILE: gl.constexpr, BLOCK_K: gl.constexpr, SHAPE: gl.constexpr, ALIGN: gl.constexpr = 1
):
    """(first key, blocks that hide keys at the left, end of those that show all, all blocks, keys, those before
    the first that is seen) of TILE queries.

    As split_blocks of the Triton kernels: ends grow along the rows, so those of the first and the last row say it all.
    """
    last = gl.minimum(row + TILE, Sq) - 1
    unseen = 0
    if SHAPE == "full":
        begin = row * 0
        end = begin + Sk
        all_from = begin
        all_until = end
    elif SHAPE == "causal":
        begin = row * 0
        end = last + 1
        all_from = begin
        all_until = row + 1
    elif SHAPE == "blocks":
        begin = row * 0
        first, slope = diagonal(lo_ptr, row)
        beyond, slope_last = diagonal(lo_ptr, last)
        end = beyond + slope_last * (last % 64 + 1)
        all_from = begin
        all_until = first + slope
    else:
        seen_from = gl.load(lo_ptr + row)
        begin = seen_from // ALIGN * ALIGN
        unseen = seen_from - begin
        end = gl.load(hi_ptr + last)
        all_from = gl.load(lo_ptr + last)
        all_until = gl.load(hi_ptr + row)
    n_all = (gl.maximum(end - begin, 0) + BLOCK_K - 1) // BLOCK_K
    n_left = gl.minimum((gl.maximum(all_from - begin, 0) + BLOCK_K - 1) // BLOCK_K, n_all)
    n_full = gl.maximum(gl.maximum(all_until - begin, 0) // BLOCK_K, n_left)
    return begin, n_left, n_full, n_all, end - begin, unseen


@gluon.jit
def _publish(shared, turn, head, row, begin, n_left, n_full, n_all, keys, unseen, WAITS: gl.constexpr):
    """Say what the next tile is, once all warpgroups have read what the tile before was."""
    mbarrier.wait(shared.facts_free, (turn & 1) ^ 1)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout=L)
    shared.facts.index(0).store(zero + head)
    shared.facts.index(1).store(zero + row)
    shared.facts.index(2).store(zero + begin)
    shared.facts.index(3).store(zero + n_left)
    shared.facts.index(4).store(zero + n_full)
    shared.facts.index(5).store(zero + n_all)
    shared.facts.index(6).store(zero + keys)
    if WAITS:
        shared.facts.index(7).store(zero + unseen)
    mbarrier.arrive(shared.facts_full, count=1)


@gluon.jit
def _fact(shared, i: gl.constexpr):
    return gl.max(shared.facts.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _load_block(
    desc, own_desc, tiles, full, free: gl.constexpr, b, head, key, place, n,
    BYTES: gl.constexpr, WARPGROUPS: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Bring a block into the stage of step n, as soon as what was there has been used. place: see place_of."""
    stage = n % STAGES
    if n >= STAGES:
        meet(free + stage, WARPGROUPS * 128 + 32)
    mbarrier.expect(full.index(stage), BYTES)
    if WAITS:
        if place >= 0:
            tma_load(own_desc, [b, head, key, 0], full.index(stage), tiles.index(stage))
        else:
            tma_load(desc, [b, head, key, 0], full.index(stage), tiles.index(stage))
    else:
        tma_load(desc, [b, head, key, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def _key(begin, block, n_left, first_late, late_end, BLOCK_K: gl.constexpr):
    """The first key of a block, late ones last; of one before the first, that of the first."""
    return begin + downwards(gl.maximum(block, 0), n_left, first_late, late_end) * BLOCK_K


@gluon.jit
def _load_queries(desc, shared, b, head, row, turn, c: gl.constexpr, BYTES: gl.constexpr):
    if turn > 0:
        meet(QUERIES_FREE + c, 128 + 32)
    mbarrier.expect(shared.q_full.index(c), BYTES)
    tma_load(desc, [b, head, row, 0], shared.q_full.index(c), shared.q.index(c))


@gluon.jit
def _load_before(desc, shared, b, head, row, BLOCK_DV: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Bring what a tile is merged with, once the tile before has left the memory that it goes to."""
    for c in gl.static_range(WARPGROUPS):
        meet(OUT_FREE + 3 - WARPGROUPS + c, 128 + 32)
        mbarrier.expect(shared.before_full.index(c), ROWS * BLOCK_DV * 4)
        tma_load(desc, [b, head, row + c * ROWS, 0], shared.before_full.index(c), shared.out.index(c))


@gluon.jit
def _load(
    shared, q_desc, k_desc, v_desc, k_own_desc, v_own_desc, before_desc, lo_ptr, hi_ptr, counter_ptr, arriving,
    stride_bounds, B, Hq, Hk, Sq, Sk, GROUP,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr, SKIP: gl.constexpr,
    BRINGS_BEFORE: gl.constexpr, WAITS: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """The load warp. SKIP: tiles that see no key need no visit. BRINGS_BEFORE: what tiles are merged with comes by it.
    WAITS: for keys that are still arriving; of the blocks that show all, those that come late are visited last.
    """
    SIZE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    TILE: gl.constexpr = WARPGROUPS * ROWS
    Q_BYTES: gl.constexpr = ROWS * BLOCK_D * SIZE
    K_BYTES: gl.constexpr = BLOCK_K * BLOCK_D * SIZE
    V_BYTES: gl.constexpr = BLOCK_K * BLOCK_DV * SIZE
    ALIGN: gl.constexpr = BLOCK_K if WAITS else 1
    q_blocks = (Sq + TILE - 1) // TILE
    heads = B * Hq
    tiles = q_blocks * heads
    turn = 0
    n = 0
    seen = 0
    first_late = 0
    late_end = 0
    first_place = -1
    tile = gl.program_id(0)
    head, block = place(tile, q_blocks, heads, GROUP)
    row = block * TILE
    b = head // Hq
    begin, n_left, n_full, n_all, keys, unseen = visited(
        lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, row, Sq, Sk, TILE, BLOCK_K, SHAPE, ALIGN
    )
    if WAITS:
        first_late, late_end = late_blocks(arriving, begin, n_left, n_full, BLOCK_K)
        first_place = place_of(arriving, _key(begin, n_all - 1, n_left, first_late, late_end, BLOCK_K))
    while tile < tiles:
        this_b = b
        h = head - b * Hq
        hk = h // (Hq // Hk)
        this_row = row
        this_begin = begin
        # A tile that sees nothing visits one block all the same, where every key is hidden, to get its zeros.
        blocks = n_all
        this_left = n_left
        this_first_late = first_late
        this_late_end = late_end
        if not SKIP:
            blocks = gl.maximum(n_all, 1)
        if blocks > 0:
            _publish(shared, turn, head, row, begin, n_left, n_full, blocks, keys, unseen, WAITS)
            key = this_begin + (blocks - 1) * BLOCK_K
            if WAITS:
                key = _key(this_begin, blocks - 1, this_left, this_first_late, this_late_end, BLOCK_K)
            # In the order of use: Q of one warpgroup, K, Q of the others, V.
            _load_queries(q_desc, shared, this_b, h, this_row, turn, 0, Q_BYTES)
            if WAITS:
                key, seen = own_or_arrived(arriving, first_place, key, Sk, seen, BLOCK_K)
            _load_block(
                k_desc, k_own_desc, shared.k, shared.k_full, KEYS_FREE, this_b, hk, key, first_place, n,
                K_BYTES, WARPGROUPS, WAITS,
            )  # fmt: skip
            for c in gl.static_range(1, WARPGROUPS):
                _load_queries(q_desc, shared, this_b, h, this_row + c * ROWS, turn, c, Q_BYTES)
            _load_block(
                v_desc, v_own_desc, shared.v, shared.v_full, VALUES_FREE, this_b, hk, key, first_place, n,
                V_BYTES, WARPGROUPS, WAITS,
            )  # fmt: skip
            n += 1
            turn += 1
        # What comes next is looked up while this tile is computed.
        tile = gl.num_programs(0) + next_tile(counter_ptr, tiles)
        head, block = place(gl.minimum(tile, tiles - 1), q_blocks, heads, GROUP)
        row = block * TILE
        b = head // Hq
        begin, n_left, n_full, n_all, keys, unseen = visited(
            lo_ptr + b * stride_bounds, hi_ptr + b * stride_bounds, row, Sq, Sk, TILE, BLOCK_K, SHAPE, ALIGN
        )
        next_place = -1
        this_place = -1
        if WAITS:
            first_late, late_end = late_blocks(arriving, begin, n_left, n_full, BLOCK_K)
            first_place = place_of(arriving, _key(begin, n_all - 1, n_left, first_late, late_end, BLOCK_K))
            next_place = place_of(
                arriving, _key(this_begin, blocks - 2, this_left, this_first_late, this_late_end, BLOCK_K)
            )
        for i in range(1, blocks):
            key = this_begin + (blocks - 1 - i) * BLOCK_K
            if WAITS:
                key = _key(this_begin, blocks - 1 - i, this_left, this_first_late, this_late_end, BLOCK_K)
                this_place = next_place
                key, seen = own_or_arrived(arriving, this_place, key, Sk, seen, BLOCK_K)
            _load_block(
                k_desc, k_own_desc, shared.k, shared.k_full, KEYS_FREE, this_b, hk, key, this_place, n,
                K_BYTES, WARPGROUPS, WAITS,
            )  # fmt: skip
            if WAITS:
                next_place = place_of(
                    arriving, _key(this_begin, blocks - 2 - i, this_left, this_first_late, this_late_end, BLOCK_K)
                )
            _load_block(
                v_desc, v_own_desc, shared.v, shared.v_full, VALUES_FREE, this_b, hk, key, this_place, n,
                V_BYTES, WARPGROUPS, WAITS,
            )  # fmt: skip
            n += 1
            if BRINGS_BEFORE:
                if i == 1:
                    _load_before(before_desc, shared, this_b, h, this_row, BLOCK_DV, WARPGROUPS)
        if BRINGS_BEFORE:
            if blocks == 1:
                _load_before(before_desc, shared, this_b, h, this_row, BLOCK_DV, WARPGROUPS)
    _publish(shared, turn, -1, 0, 0, 0, 0, 0, 0, 0, WAITS)
    # Take what is signalled after the last use, so that no barrier is left half full.
    for i in gl.static_range(STAGES):
        if n > i:
            meet(KEYS_FREE + (n - 1 - i) % STAGES, WARPGROUPS * 128 + 32)
            meet(VALUES_FREE + (n - 1 - i) % STAGES, WARPGROUPS * 128 + 32)
    for c in gl.static_range(WARPGROUPS):
        if turn > 0:
            meet(QUERIES_FREE + c, 128 + 32)


@gluon.jit
def _finish(
    shared, out_desc, out_ptr, before_ptr, lse_ptr, acc, row_max, row_sum, head, b, h, row, Sq, Hq, VALUE_DIM, turn,
    c: gl.constexpr, BLOCK_DV: gl.constexpr, INTO: gl.constexpr, ROUNDED: gl.constexpr, WAY: gl.constexpr,
    LO: gl.constexpr,
):  # fmt: skip
    """Normalise, merge with what was there before, store out and lse. WAY: see forward_kernel."""
    L: gl.constexpr = gl.SliceLayout(1, LO)
    row_max = gl.convert_layout(row_max, L)
    row_sum = gl.convert_layout(row_sum, L)
    weight = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)
    lse = gl.where(row_sum > 0.0, row_max * LN_2 + gl.log(row_sum), float("-inf"))
    rows = row + gl.arange(0, ROWS, layout=L)
    inside = rows < Sq
    lse_ptrs = lse_ptr + head.to(gl.int64) * Sq + rows
    columns = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, LO))
    dim = VALUE_DIM // 8 * 8  # which tells the compiler that two columns may go at once
    offsets = ((b.to(gl.int64) * Sq + rows) * Hq + h)[:, None] * dim + columns[None, :]
    valid = inside[:, None] & (columns < VALUE_DIM)[None, :]
    if INTO:
        lse_before = gl.load(lse_ptrs, mask=inside, other=float("-inf"))
        peak = gl.maximum(lse_before, lse)
        peak = gl.where(peak == float("-inf"), 0.0, peak)
        share_before = exp2((lse_before - peak) * LOG2_E)
        share = exp2((lse - peak) * LOG2_E)
        total = share_before + share
        portion = gl.where(total > 0.0, 1.0 / total, 0.0)
        lse = gl.where(total > 0.0, peak + gl.log(total), float("-inf"))
        acc = acc * (weight * share * portion)[:, None]
        if WAY == "own":
            mbarrier.wait(shared.before_full.index(c), turn & 1)
            before = shared.out.index(c).reshape([ROWS, BLOCK_DV]).load(LO)
        else:
            before = gl.load(before_ptr + offsets, mask=valid, other=0.0)
        acc = acc + before * (share_before * portion)[:, None]
    else:
        acc = acc * weight[:, None]
        if WAY == "own":
            tma_store_wait(0)
    gl.store(lse_ptrs, lse, mask=inside)
    if WAY == "direct":
        gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=valid)
    else:
        if WAY == "queries":
            out = shared.q.index(c)
        elif INTO and ROUNDED:
            out = shared.out.index(c)._reinterpret(shared.v.dtype, [2, 1, 1, ROWS, BLOCK_DV], out_desc.layout).index(0)
        else:
            out = shared.out.index(c)
        out.reshape([ROWS, BLOCK_DV]).store(acc.to(out.dtype))
        fence_async_shared()
        tma_store(out_desc, [b, h, row, 0], out)
        if WAY == "queries":
            tma_store_wait(0)


@gluon.jit
def _attend(
    c: gl.constexpr, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
    VALUE_DIM, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr,
    INTO: gl.constexpr, ROUNDED: gl.constexpr, WAY: gl.constexpr, TAKE_TURNS: gl.constexpr,
    WAITS: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: rows c * ROWS ... of every tile that the load warp announces."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    L: gl.constexpr = gl.SliceLayout(1, LS)
    scale_log2 = scale * LOG2_E
    if TAKE_TURNS:
        if c == 1:
            signal(TURN, 256)
    turn = 0
    n = 0
    mbarrier.wait(shared.facts_full, 0)
    head = _fact(shared, 0)
    while head >= 0:
        row = _fact(shared, 1) + c * ROWS
        begin = _fact(shared, 2)
        n_left = _fact(shared, 3)
        n_full = _fact(shared, 4)
        block = _fact(shared, 5) - 1
        unseen_from = _fact(shared, 6) - block * BLOCK_K
        seen_from = 0
        if WAITS:
            seen_from = _fact(shared, 7)
        mbarrier.arrive(shared.facts_free, count=1)
        b = head // Hq
        rows = row + gl.arange(0, ROWS, layout=L)
        if SHAPE == "rows":
            lo = gl.load(lo_ptr + b * stride_bounds + rows, mask=rows < Sq, other=0) - begin
            hi = gl.load(hi_ptr + b * stride_bounds + rows, mask=rows < Sq, other=0) - begin
        elif SHAPE == "causal":
            lo = rows * 0
            hi = rows + 1
        elif SHAPE == "blocks":
            first, slope = diagonal(lo_ptr, gl.minimum(row, Sq - 1))
            lo = rows * 0
            hi = first + slope * (rows - row + 1)
        else:
            lo = rows * 0
            hi = lo + Sk
        q = shared.q.index(c).reshape([ROWS, BLOCK_D])
        mbarrier.wait(shared.q_full.index(c), turn & 1)
        acc = gl.full([ROWS, BLOCK_DV], 0.0, gl.float32, layout=LO)
        acc, row_max, row_sum, n = visit_keys(
            c, shared, q, acc, n, block, n_left, n_full, seen_from, unseen_from, lo, hi, scale_log2,
            BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO and WAY == "own", TAKE_TURNS, WAITS, WARPGROUPS, LS, LO,
        )  # fmt: skip
        if WAY != "queries":
            signal(QUERIES_FREE + c, 128 + 32)
        _finish(
            shared, out_desc, out_ptr, before_ptr, lse_ptr, acc, row_max, row_sum, head, b, head - b * Hq, row, Sq, Hq,
            VALUE_DIM, turn, c, BLOCK_DV, INTO, ROUNDED, WAY, LO,
        )  # fmt: skip
        if WAY == "queries":
            signal(QUERIES_FREE + c, 128 + 32)
        turn += 1
        mbarrier.wait(shared.facts_full, turn & 1)
        head = _fact(shared, 0)
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "cell_rows_log2", "late_from", "late_until", "stride_bounds", "B", "Hq", "Hk", "Sq", "Sk", "GROUP", "VALUE_DIM",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, k_own_desc, v_own_desc, out_desc, before_desc,
    out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, counter_ptr, flags_ptr, places_ptr,
    cell_rows_log2, late_from, late_until, stride_bounds, B, Hq, Hk, Sq, Sk, VALUE_DIM, GROUP, scale,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr, INTO: gl.constexpr,
    ROUNDED: gl.constexpr, WAY: gl.constexpr, TAKE_TURNS: gl.constexpr, WAITS: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """out [B, Sq, Hq, VALUE_DIM], and lse fp32, in memory [B, Hq, Sq]; if INTO, merged with before, fp32, and with lse.

    Descriptors are of [B, heads, tokens, dim]. lo, hi int32 [1 or B, Sq]; counter: one int32, 0; scale > 0.
    SHAPE: "full"; "causal" for a causal square; "blocks" with a number for every 64 rows in place of lo, see diagonal; or
        "rows", whose bounds are read.
    ROUNDED: out is stored in q's type; else in fp32.
    WAY of a tile of out: through memory of its "own", by which comes what it is merged with too; for want of it, rounded,
        through that of the "queries"; or "direct" from and to registers.
    TAKE_TURNS: one warpgroup's products start when the other's have.
    WAITS: keys are still arriving; flags int32, one for every 2**cell_rows_log2 of them, at most 30: not 0 when they
        are there. Those from late_from to late_until come last. places int32, one for every 128 keys: where they lie in what
        k_own_desc and v_own_desc describe, or -1.
    """
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    if WAY != "own":
        out_tiles = q_tiles
    elif INTO:
        out_tiles = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 1, 1, ROWS, BLOCK_DV], before_desc.layout)
    else:
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    arriving = Arriving(flags_ptr, places_ptr, cell_rows_log2, late_from, late_until)
    shared = Shared(
        q_tiles,
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_DV], v_desc.layout),
        out_tiles,
        gl.allocate_shared_memory(gl.int32, [FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], barrier),
    )
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(shared.q_full.index(i), count=1)
        mbarrier.init(shared.before_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(i), count=1)
        mbarrier.init(shared.v_full.index(i), count=1)
    mbarrier.init(shared.facts_full, count=1)
    mbarrier.init(shared.facts_free, count=WARPGROUPS)
    fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    0, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
                    VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO, ROUNDED, WAY, TAKE_TURNS, WAITS,
                    WARPGROUPS,
                )),
                (_attend, (
                    1, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
                    VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO, ROUNDED, WAY, TAKE_TURNS, WAITS,
                    WARPGROUPS,
                )),
                (_load, (
                    shared, q_desc, k_desc, v_desc, k_own_desc, v_own_desc, before_desc, lo_ptr, hi_ptr, counter_ptr,
                    arriving, stride_bounds, B, Hq, Hk, Sq, Sk, GROUP, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE,
                    INTO and not ROUNDED, INTO and WAY == "own", WAITS, WARPGROUPS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    0, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
                    VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO, ROUNDED, WAY, TAKE_TURNS, WAITS,
                    WARPGROUPS,
                )),
                (_attend, (
                    1, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
                    VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO, ROUNDED, WAY, TAKE_TURNS, WAITS,
                    WARPGROUPS,
                )),
                (_attend, (
                    2, shared, out_desc, out_ptr, before_ptr, lse_ptr, lo_ptr, hi_ptr, stride_bounds, Hq, Sq, Sk, scale,
                    VALUE_DIM, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE, INTO, ROUNDED, WAY, TAKE_TURNS, WAITS,
                    WARPGROUPS,
                )),
                (_load, (
                    shared, q_desc, k_desc, v_desc, k_own_desc, v_own_desc, before_desc, lo_ptr, hi_ptr, counter_ptr,
                    arriving, stride_bounds, B, Hq, Hk, Sq, Sk, GROUP, BLOCK_K, BLOCK_D, BLOCK_DV, SHAPE,
                    INTO and not ROUNDED, INTO and WAY == "own", WAITS, WARPGROUPS,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
