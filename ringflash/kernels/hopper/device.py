"""What the kernels say to the hardware beside products and copies: named barriers, the tile counter, exp2."""

from ringflash.kernels.hopper.gluon import aggregate, fence_async_shared, gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _barrier(kind, threads):
    return f"bar.{kind} $1, {threads};\n mov.u32 $0, 0;"


@gluon.jit
def meet(barrier, threads: gl.constexpr):
    """Wait until `threads` threads have met or signalled at a named barrier.

    Triton itself uses barriers 0 to 1 + partitions; kernels number theirs from 6.
    """
    gl.inline_asm_elementwise(_barrier("sync", threads), "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal(barrier, threads: gl.constexpr):
    """Count the calling threads at a named barrier without waiting: unlike an mbarrier, no sync of the warpgroup first."""
    gl.inline_asm_elementwise(_barrier("arrive", threads), "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


# Lane 0 adds, the warp gets the value. The launch's last fetch puts the counter back to 0, so that it needs no clearing
# between launches and a CUDA graph can replay it.
_FETCH = gl.constexpr("""{
 .reg .pred p, q; .reg .u32 l, v, e;
 mov.u32 l, %laneid;
 mov.u32 v, 0;
 setp.eq.u32 p, l, 0;
 sub.u32 e, $2, 1;
 @p atom.relaxed.gpu.global.add.u32 v, [$1], 1;
 setp.eq.and.u32 q, v, e, p;
 @q st.relaxed.gpu.global.u32 [$1], 0;
 shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff;
}""")


@gluon.jit
def next_tile(counter_ptr, tiles):
    """A number that no other caller gets, counting from 0. One warp calls, `tiles` times in a launch."""
    return gl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [counter_ptr.to(gl.int64), tiles], gl.int32, is_pure=False, pack=1
    )


# What a flag says is there was written by others, and is read by the copy engine of this multiprocessor: hence the acquire
# of the whole system, and the fence between the two ways to memory. A rank that does not come for ten minutes is lost, and
# the kernel ends with an error instead of never. Lane 0 decides, for the barriers that follow want the warp together.
_AWAIT = gl.constexpr("""{
 .reg .pred p, q; .reg .u32 v; .reg .u64 t0, t1;
 mov.u64 t0, %globaltimer;
WAIT:
 ld.acquire.sys.global.u32 v, [$1];
 shfl.sync.idx.b32 v, v, 0, 31, 0xffffffff;
 setp.ne.u32 p, v, 0;
 @p bra DONE;
 mov.u64 t1, %globaltimer;
 sub.u64 t1, t1, t0;
 setp.gt.u64 q, t1, 600000000000;
 @q trap;
 nanosleep.u32 100;
 bra WAIT;
DONE:
 bar.warp.sync 0xffffffff;
 fence.proxy.async.global;
 mov.u32 $0, v;
}""")


@gluon.jit
def await_cell(flags_ptr, cell, seen):
    """Wait until a flag is not 0, unless that has been seen; bit i of `seen` is for flag i. One warp calls."""
    if ((seen >> cell) & 1) == 0:
        gl.inline_asm_elementwise(_AWAIT, "=r,l", [(flags_ptr + cell).to(gl.int64)], gl.int32, is_pure=False, pack=1)
        seen = seen | (1 << cell)
    return seen


@aggregate
class Arriving:
    """Rows that are still arriving, as Arrivals says: int32 flags, by cells of 2**cell_rows_log2 rows, at most 30; int32
    places, by 128 rows; and which rows come last.
    """

    flags: gl.tensor
    places: gl.tensor
    cell_rows_log2: gl.tensor
    late_from: gl.tensor
    late_until: gl.tensor

    @gluon.constexpr_function
    def __init__(self, flags, places, cell_rows_log2, late_from, late_until):
        self.flags, self.places, self.cell_rows_log2 = flags, places, cell_rows_log2
        self.late_from, self.late_until = late_from, late_until


@gluon.jit
def place_of(arriving, row):
    """To be looked up a while before own_or_arrived asks: memory answers in half the time of a step."""
    return gl.load(arriving.places + (row >> 7))


@gluon.jit
def own_or_arrived(arriving, place, row, rows, seen, ROWS: gl.constexpr):
    """(where the block [row, row + ROWS) lies in the own shard, or in what has arrived if place < 0; seen).

    place: of this row. rows: all that are seen; a block lies in two cells at most. seen: see await_cell.
    """
    there = gl.where(place >= 0, place, -1 - place) + (row & 127)
    if place < 0:
        last = (rows - 1) >> arriving.cell_rows_log2
        if seen != (2 << last) - 1:
            seen = await_cell(arriving.flags, gl.minimum(row >> arriving.cell_rows_log2, last), seen)
            seen = await_cell(arriving.flags, gl.minimum((row + ROWS - 1) >> arriving.cell_rows_log2, last), seen)
    return there, seen


@gluon.jit
def late_blocks(arriving, begin, n_left, n_full, ROWS: gl.constexpr):
    """(first, end) of those blocks of [n_left, n_full) that hold rows that come last."""
    first = gl.minimum(gl.maximum(gl.maximum(arriving.late_from - begin, 0) // ROWS, n_left), n_full)
    end = gl.minimum(gl.maximum((gl.maximum(arriving.late_until - begin, 0) + ROWS - 1) // ROWS, first), n_full)
    return first, end


@gluon.jit
def upwards(block, n_full, first, end):
    """The block to visit in place of this one, in a walk from the first to the last: late ones after those up to n_full.

    Of these all is seen, so nobody but who loads them need know.
    """
    early_end = n_full - (end - first)
    other = gl.where(block < early_end, block + (end - first), block - early_end + first)
    return gl.where((block >= first) & (block < n_full), other, block)


@gluon.jit
def downwards(block, n_left, first, end):
    """The same in a walk from the last to the first: late ones after those down to n_left."""
    late_end = n_left + (end - first)
    other = gl.where(block >= late_end, block - (end - first), block - n_left + first)
    return gl.where((block >= n_left) & (block < end), other, block)


# What the copy engine was told to write is there when its queue is empty, for who waits for that. Then the warp counts, and
# who counts last says so to the whole system: it has seen what all the others saw.
_DEPART = gl.constexpr("""{
 .reg .pred p, q; .reg .u32 l, v, e;
 cp.async.bulk.wait_group 0;
 bar.warp.sync 0xffffffff;
 mov.u32 l, %laneid;
 setp.eq.u32 p, l, 0;
 mov.u32 v, 0;
 sub.u32 e, $3, 1;
 @p fence.proxy.async.global;
 @p atom.acq_rel.gpu.global.add.u32 v, [$1], 1;
 setp.eq.and.u32 q, v, e, p;
 @q fence.acq_rel.sys;
 @q st.release.sys.global.u32 [$2], 1;
 mov.u32 $0, v;
}""")


@aggregate
class Departing:
    """Sums that leave when they are complete, as Departures says: int32 done and counts, by groups of heads; int32 blocks,
    by 128 keys, and how many of them are 1.
    """

    done: gl.tensor
    counts: gl.tensor
    blocks: gl.tensor
    total: gl.tensor

    @gluon.constexpr_function
    def __init__(self, done, counts, blocks, total):
        self.done, self.counts, self.blocks, self.total = done, counts, blocks, total


@gluon.jit
def depart(departing, head, heads, block, GROUP, WARPS: gl.constexpr):
    """One warp, of WARPS, has added all that is of a block of 128 keys and a head; the last one of GROUP heads says so."""
    if gl.load(departing.blocks + block) > 0:
        group = head // GROUP
        total = WARPS * departing.total * gl.minimum(GROUP, heads - group * GROUP)
        count = (departing.counts + group).to(gl.int64)
        done = (departing.done + group).to(gl.int64)
        gl.inline_asm_elementwise(_DEPART, "=r,l,l,r", [count, done, total], gl.int32, is_pure=False, pack=1)


@gluon.jit
def diagonal(numbers_ptr, i):
    """(n, d) of the block of 64 that i is in, see schedule.diagonals."""
    number = gl.load(numbers_ptr + i // 64)
    return number >> 1, number & 1


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def clear_rows(tile, seen_from, seen_until, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros in a 16-bit tile [ROWS, COLUMNS] outside of rows [seen_from, seen_until): no pair of the tile that is seen
    has a part in these, but they may hold NaN, and 0 * NaN would.
    """
    AT_ONCE: gl.constexpr = 16
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    for i in gl.static_range(ROWS // AT_ONCE):
        if (i * AT_ONCE < seen_from) | ((i + 1) * AT_ONCE > seen_until):
            rows = tile.slice(i * AT_ONCE, AT_ONCE, dim=0)
            row = i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, L))
            x = rows.load(L)
            rows.store(gl.where(((row >= seen_from) & (row < seen_until))[:, None], x, gl.full_like(x, 0.0)))
    fence_async_shared()
