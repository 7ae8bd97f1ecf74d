"""Tiles of fp32 that the copy engine adds into global memory, and how they get from registers to where it takes them."""

from ringflash.kernels.hopper.gluon import fence_async_shared, gl, gluon, tma_add, tma_store_wait

ROWS = gl.constexpr(64)  # of a tile, a warpgroup's


@gluon.constexpr_function
def _layout(columns):
    """Where the copy engine expects a tile [ROWS, columns], for numbers whose column is xored with 16 in odd rows.

    It expects blocks of 32 columns, rows of 128 bytes, and the chunks of 16 bytes in a row xored with the row. Registers
    hold 8 columns of a row in four lanes, so that a store by row and column meets two rows in each bank; odd rows that
    are 16 columns ahead of the even ones do not. That is worth 6 % of a backward pass.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout(bases + ([[0, 32]] if columns == 64 else []), alignment=1024)


@gluon.jit
def store_sums(tile, x, COLUMNS: gl.constexpr):
    """x [ROWS, COLUMNS], 32 or 64 columns, into the tile that the copy engine adds from."""
    L: gl.constexpr = x.type.layout
    left, right = gl.split(x.reshape([ROWS, COLUMNS // 32, 2, 16]).permute((0, 1, 3, 2)))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout)))
    is_odd = (row % 2 == 1)[:, None, None]
    x = gl.join(gl.where(is_odd, right, left), gl.where(is_odd, left, right))
    x = gl.convert_layout(x.permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS]), L, assert_trivial=True)
    tile._reinterpret(gl.float32, [ROWS, COLUMNS], _layout(COLUMNS)).store(x)


@gluon.constexpr_function
def _tiles_in(memory, columns):
    """How many tiles [ROWS, columns] of fp32 there are in shared memory of 16-bit numbers or fp32."""
    numbers = 1
    for size in memory.shape:
        numbers *= size
    return numbers * memory.dtype.primitive_bitwidth // (32 * ROWS.value * columns)


@gluon.jit
def _halves(x, COLUMNS: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    left, right = gl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def _add_piece(desc, tile, x, b, head, row, column, PIECE: gl.constexpr):
    tma_store_wait(0)  # what was there before has left
    store_sums(tile, x, PIECE)
    fence_async_shared()
    tma_add(desc, [b, head, row, column], tile)


@gluon.jit
def add_sums(desc, memory, x, b, head, row, column, COLUMNS: gl.constexpr, PIECE: gl.constexpr):
    """Add x [ROWS, COLUMNS] at (b, head, row, column) of the tensor that desc describes, PIECE columns at a time, a half
    or a quarter of them or all, through this memory, which is the warpgroup's own. The caller waits for the last.

    Nobody else may add to these elements if the sums are to repeat.
    """
    tile = memory._reinterpret(gl.float32, [_tiles_in(memory, PIECE), 1, 1, ROWS, PIECE], desc.layout).index(0)
    if COLUMNS == PIECE:
        _add_piece(desc, tile, x, b, head, row, column, PIECE)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = _halves(x, COLUMNS)
        if HALF == PIECE:
            _add_piece(desc, tile, left, b, head, row, column, PIECE)
            _add_piece(desc, tile, right, b, head, row, column + HALF, PIECE)
        else:
            for i in gl.static_range(2):
                first, second = _halves(left if i == 0 else right, HALF)
                _add_piece(desc, tile, first, b, head, row, column + i * HALF, PIECE)
                _add_piece(desc, tile, second, b, head, row, column + i * HALF + PIECE, PIECE)
