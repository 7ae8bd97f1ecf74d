"""Numbers of blocks say the same as ends of rows and of columns."""

import pytest
import torch

import ringflash as rf
from ringflash.schedule.diagonals import BLOCK, STEP, diagonals
from ringflash.schedule.plan import plan
from ringflash.schedule.tiles import Bounds

LAYOUTS = [rf.Contiguous(), rf.Zigzag()]


def all_bounds(here):
    """Of a rank: by source, both ways, in parts, and of what lands."""
    for source in here.sources:
        yield here[source]
        half = here[source].columns // 2 // BLOCK * BLOCK
        yield here[source].part(columns=slice(half, here[source].columns))
    for source in range(here.ranks):
        if here.turned.queries(source).stop:
            yield here.turned[source]
    yield from (here.landing.bounds, here.landing_upwards.bounds, here.turned.landing.bounds)


def ends_of(numbers, size):
    """n and n + r or n + r + 1: (of the triangles' first columns, their slopes) by row."""
    n, d = (numbers >> 1).repeat_interleave(STEP), (numbers & 1).repeat_interleave(STEP)
    return n, d, torch.arange(size) % STEP


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_they_say_what_rows_and_columns_say(ranks, layout):
    for rank in range(ranks):
        for bounds in all_bounds(plan(rf.Causal(), layout, 2 * ranks * 2 * BLOCK, rank, ranks)):
            if bounds.rows == 0 or bounds.columns == 0:
                continue
            assert bounds.has_diagonals
            of_rows, of_columns = bounds.diagonals_to(torch.device("cpu"))
            n, d, r = ends_of(of_rows, bounds.rows)
            seen = torch.arange(bounds.columns) < (n + d * (r + 1))[:, None]
            n, d, r = ends_of(of_columns, bounds.columns)
            assert torch.equal(seen, torch.arange(bounds.rows)[:, None] >= n + d * r)
            column = torch.arange(bounds.columns)
            assert torch.equal(seen, (bounds.lo[0][:, None] <= column) & (column < bounds.hi[0][:, None]))


@pytest.mark.parametrize("length", [2 * BLOCK + 1, 2 * BLOCK * 2 - STEP])
def test_blocks_that_are_not_whole_have_none(length):
    assert not plan(rf.Causal(), rf.Zigzag(), length, 0, 2).landing.bounds.has_diagonals
    positions = torch.arange(BLOCK)
    assert diagonals(positions, positions + 1) is None
    assert diagonals(positions, positions[:0]) is None


@pytest.mark.parametrize("mask", [rf.Full(), rf.Window(5, 0), rf.Documents([512, 512], causal=True)], ids=repr)
def test_other_masks_have_none(mask):
    assert not any(bounds.has_diagonals for bounds in all_bounds(plan(mask, rf.Zigzag(), 8 * BLOCK, 0, 2)))


@pytest.mark.parametrize(
    ("queries", "keys", "is_even"),
    [
        ([2, 3], [0, 1], True),
        ([0, 3], [1, 2], True),  # the first sees nothing
        ([1, 3], [0, 2], False),  # one sees half of what the other sees
        ([0, 1], [0, 1], False),
        ([2, 3], [0, 3], False),
    ],
)
def test_evenness_is_that_of_what_blocks_see(queries, keys, is_even):
    rows, columns = (
        torch.cat([torch.arange(i * BLOCK, (i + 1) * BLOCK) for i in blocks]) for blocks in (queries, keys)
    )
    hi = torch.searchsorted(columns, rows, right=True).int()[None]
    ends = (torch.zeros_like(hi), hi)
    bounds = Bounds(2 * BLOCK, 2 * BLOCK, lambda device: ends, lambda: (rows, columns), is_causal=True)
    assert bounds.is_even == is_even
    assert (bounds.shape == "full") == bounds.is_full
