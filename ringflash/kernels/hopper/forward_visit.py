"""What a warpgroup of the forward kernel does with the key blocks of a tile, from the last to the first."""

from ringflash.kernels.hopper.device import clear_rows, exp2, meet, signal
from ringflash.kernels.hopper.gluon import gl, gluon, mbarrier, tma_store_wait, warpgroup_mma, warpgroup_mma_wait

# Named barriers. Those of a stage or of a warpgroup come in pairs.
KEYS_FREE = gl.constexpr(6)
VALUES_FREE = gl.constexpr(8)
QUERIES_FREE = gl.constexpr(10)
TURN = gl.constexpr(12)
OUT_FREE = gl.constexpr(13)  # to 15; two warpgroups take turns at 12 and 13, so theirs start one later
STAGES = gl.constexpr(2)
ROWS = gl.constexpr(64)  # queries of a warpgroup


@gluon.jit
def _hide(s, lo, hi, BLOCK_K: gl.constexpr, LEFT: gl.constexpr, L: gl.constexpr):
    """-inf where a row does not see a key; lo and hi count from the block's first key."""
    column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    if LEFT:
        s = gl.where(column[None, :] >= lo[:, None], s, float("-inf"))
    return gl.where(column[None, :] < hi[:, None], s, float("-inf"))


@gluon.jit
def _step(
    shared, q, acc, row_max, row_sum, p, n, lo, hi, scale_log2,
    c: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, MASKED: gl.constexpr,
    LEFT: gl.constexpr, TAKE_TURNS: gl.constexpr, WARPGROUPS: gl.constexpr, LS: gl.constexpr, LO: gl.constexpr,
):  # fmt: skip
    """Scores of block n together with P V of the block before, whose p [ROWS, BLOCK_K] is given in fp32."""
    weights = gl.convert_layout(p.to(shared.v.dtype), gl.DotOperandLayout(0, LO, 2))
    if WARPGROUPS == 3:
        # Rounded here, and not where they are needed, which is after S has taken 64 registers: three warpgroups have 160.
        weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], shared.v.dtype, is_pure=False, pack=2)
    stage = n % STAGES
    before = (n - 1) % STAGES
    mbarrier.wait(shared.k_full.index(stage), (n // STAGES) & 1)
    if TAKE_TURNS:
        meet(TURN + c, 256)
    zero = gl.full([ROWS, BLOCK_K], 0.0, gl.float32, layout=LS)
    k_t = shared.k.index(stage).reshape([BLOCK_K, BLOCK_D]).permute((1, 0))
    s = warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(before), ((n - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, shared.v.index(before).reshape([BLOCK_K, BLOCK_DV]), acc, is_async=True)
    if TAKE_TURNS:
        signal(TURN + 1 - c, 256)
    s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
    signal(KEYS_FREE + stage, WARPGROUPS * 128 + 32)
    if MASKED:
        s = _hide(s, lo, hi, BLOCK_K, LEFT, LS)
    # Maxima are in log2 units and rounded once, so that what was formed before and what is formed now share their pivots.
    # The scale is positive, so it commutes with the maximum and costs nothing inside the fused multiply-add.
    new_max = gl.maximum(row_max, gl.max(s, axis=1) * scale_log2)
    pivot = new_max
    if MASKED:
        # Finite for rows that have seen nothing: -inf - (-inf) would be NaN.
        pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = exp2(s * scale_log2 - pivot[:, None])
    shrink = exp2(row_max - pivot)
    row_sum = row_sum * shrink + gl.sum(p, axis=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    signal(VALUES_FREE + before, WARPGROUPS * 128 + 32)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, LO))[:, None]
    return acc, new_max, row_sum, p


@gluon.jit
def visit_keys(
    c: gl.constexpr, shared, q, acc, n, block, n_left, n_full, seen_from, unseen_from, lo, hi, scale_log2,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SHAPE: gl.constexpr, FREES_OUT: gl.constexpr,
    TAKE_TURNS: gl.constexpr, WAITS: gl.constexpr, WARPGROUPS: gl.constexpr, LS: gl.constexpr, LO: gl.constexpr,
):  # fmt: skip
    """(acc, row_max, row_sum, n) after blocks `block` down to 0, scores of one with P V of the block before it."""
    LEFT: gl.constexpr = SHAPE == "rows"
    # The last block has no P V to run with.
    stage = n % STAGES
    mbarrier.wait(shared.k_full.index(stage), (n // STAGES) & 1)
    zero = gl.full([ROWS, BLOCK_K], 0.0, gl.float32, layout=LS)
    k_t = shared.k.index(stage).reshape([BLOCK_K, BLOCK_D]).permute((1, 0))
    s = warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    signal(KEYS_FREE + stage, WARPGROUPS * 128 + 32)
    if FREES_OUT:
        tma_store_wait(0)  # of the tile before
        signal(OUT_FREE + 3 - WARPGROUPS + c, 128 + 32)
    s = _hide(s * scale_log2, lo - block * BLOCK_K, hi - block * BLOCK_K, BLOCK_K, LEFT, LS)
    row_max = gl.max(s, axis=1)
    p = exp2(s - gl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    row_sum = gl.sum(p, axis=1)
    if SHAPE == "rows" or SHAPE == "blocks":
        if unseen_from < BLOCK_K:
            mbarrier.wait(shared.v_full.index(stage), (n // STAGES) & 1)
            # Both warpgroups write the same zeros, each before its own product.
            clear_rows(shared.v.index(stage).reshape([BLOCK_K, BLOCK_DV]), 0, unseen_from, BLOCK_K, BLOCK_DV)
    n += 1
    block -= 1

    while block >= n_full:
        acc, row_max, row_sum, p = _step(
            shared, q, acc, row_max, row_sum, p, n, lo - block * BLOCK_K, hi - block * BLOCK_K, scale_log2, c,
            BLOCK_K, BLOCK_D, BLOCK_DV, True, False, TAKE_TURNS, WARPGROUPS, LS, LO,
        )  # fmt: skip
        n += 1
        block -= 1
    while block >= n_left:
        acc, row_max, row_sum, p = _step(
            shared, q, acc, row_max, row_sum, p, n, lo, hi, scale_log2, c,
            BLOCK_K, BLOCK_D, BLOCK_DV, False, False, TAKE_TURNS, WARPGROUPS, LS, LO,
        )  # fmt: skip
        n += 1
        block -= 1
    if SHAPE == "rows":
        while block >= 0:
            acc, row_max, row_sum, p = _step(
                shared, q, acc, row_max, row_sum, p, n, lo - block * BLOCK_K, hi - block * BLOCK_K, scale_log2, c,
                BLOCK_K, BLOCK_D, BLOCK_DV, True, True, TAKE_TURNS, WARPGROUPS, LS, LO,
            )  # fmt: skip
            n += 1
            block -= 1

    weights = gl.convert_layout(p.to(shared.v.dtype), gl.DotOperandLayout(0, LO, 2))
    before = (n - 1) % STAGES
    mbarrier.wait(shared.v_full.index(before), ((n - 1) // STAGES) & 1)
    if WAITS and SHAPE == "rows":
        # What lands is visited in whole blocks, so the first one may hold keys that no row sees.
        if seen_from > 0:
            clear_rows(shared.v.index(before).reshape([BLOCK_K, BLOCK_DV]), seen_from, BLOCK_K, BLOCK_K, BLOCK_DV)
    acc = warpgroup_mma(weights, shared.v.index(before).reshape([BLOCK_K, BLOCK_DV]), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    signal(VALUES_FREE + before, WARPGROUPS * 128 + 32)
    return acc, row_max, row_sum, n
