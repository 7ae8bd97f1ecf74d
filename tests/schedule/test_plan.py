"""Laws of the schedule, for drawn layouts, masks, lengths and ranks, against plain definitions by positions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.schedule.plan import plan
from ringflash.schedule.tiles import Bounds
from ringflash.testing.oracle import visible

layouts = st.sampled_from([rf.Contiguous(), rf.Zigzag(), rf.Striped()])
reach = st.none() | st.integers(0, 12)


@st.composite
def simple_masks(draw, length):
    kind = draw(st.sampled_from(["full", "causal", "window", "documents"]))
    if kind == "full":
        return rf.Full()
    if kind == "causal":
        return rf.Causal()
    if kind == "window":
        return rf.Window(draw(reach), draw(reach))
    borders = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    lengths = [b - a for a, b in zip([0, *borders], [*borders, length], strict=True)]
    padding = lengths.pop() if draw(st.booleans()) else 0
    return rf.Documents(lengths, causal=draw(st.booleans()), padding=padding)


@st.composite
def problems(draw):
    length = draw(st.integers(0, 40))
    mask = draw(simple_masks(length))
    for _ in range(draw(st.integers(0, 2))):
        mask = mask & draw(simple_masks(length))
    return length, draw(st.integers(1, 9)), draw(layouts), mask


def pairs_of(bounds):
    """Every (row, column) of bounds as a dense bool matrix."""
    column = torch.arange(bounds.columns)
    return (bounds.lo[0][:, None] <= column) & (column < bounds.hi[0][:, None])


@settings(deadline=None, max_examples=300)
@given(problems())
def test_tiles_cover_every_visible_pair_exactly_once(problem):
    length, ranks, layout, mask = problem
    count = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        queries = layout.positions(length, rank, ranks)
        for source in range(ranks):
            keys = layout.positions(length, source, ranks)
            for tile in mine[source].tiles():
                rows, columns = tile.row_stop - tile.row_start, tile.key_stop - tile.key_start
                i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
                seen = torch.ones(rows, columns, dtype=torch.bool)
                if tile.low == "slanted":
                    seen &= j >= i
                if tile.high == "slanted":
                    seen &= j < columns - (rows - 1 - i)
                q, k = queries[tile.row_start : tile.row_stop], keys[tile.key_start : tile.key_stop]
                count[q[:, None], k[None, :]] += seen
    assert torch.equal(count, visible(mask, length, length).long())


@settings(deadline=None, max_examples=200)
@given(problems())
def test_bounds_cover_every_visible_pair_exactly_once_by_rows_and_by_columns(problem):
    length, ranks, layout, mask = problem
    expected = visible(mask, length, length)
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        queries = layout.positions(length, rank, ranks)
        for source in range(ranks):
            keys = layout.positions(length, source, ranks)
            part = expected[queries][:, keys]
            bounds = mine[source]
            assert torch.equal(pairs_of(bounds), part)
            assert torch.equal(pairs_of(bounds.transposed).T, part)
            assert bounds.pairs == bounds.transposed.pairs == int(part.sum())
            assert bounds.is_empty == (not part.any())
            for end in (bounds.lo, bounds.hi, bounds.transposed.lo, bounds.transposed.hi):
                assert end.dtype == torch.int32
                assert bool((end.diff(dim=1) >= 0).all()), "law 2: both ends never decrease"


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 60), st.integers(1, 9), layouts)
def test_shards_are_sorted_and_hold_each_position_once(length, ranks, layout):
    shards = [layout.positions(length, rank, ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert shard.dtype == torch.int64
        assert bool((shard.diff() > 0).all()), "law 1: strictly increasing"
        assert shard.numel() == layout.shard_length(length, rank, ranks)
    assert sorted(torch.cat(shards).tolist()) == list(range(length))
    if length % ranks == 0:
        assert {shard.numel() for shard in shards} == {length // ranks}


@settings(deadline=None, max_examples=200)
@given(problems())
def test_sources_hops_and_pairs_agree_with_the_dense_mask(problem):
    length, ranks, layout, mask = problem
    expected = visible(mask, length, length)
    hops = 0
    pairs = []
    for rank in range(ranks):
        queries = layout.positions(length, rank, ranks)
        needed = [s for s in range(ranks) if expected[queries][:, layout.positions(length, s, ranks)].any()]
        assert list(plan(mask, layout, length, rank, ranks).sources) == needed
        hops = max([hops, *((rank - source) % ranks for source in needed)])
        pairs.append(int(expected[queries].sum()))
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        assert mine.hops == hops
        assert mine.pairs == pairs[rank]
        assert mine.pairs_per_rank == tuple(pairs)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4), layouts, reach, reach)
def test_cross_attention_puts_the_last_query_at_the_last_key(queries, keys, ranks, layout, left, right):
    for mask in (rf.Causal(), rf.Window(left, right)):
        expected = visible(mask, queries, keys)
        for rank in range(ranks):
            mine = plan(mask, layout, keys, rank, ranks, query_length=queries)
            rows = layout.positions(queries, rank, ranks)
            for source in range(ranks):
                columns = layout.positions(keys, source, ranks)
                assert torch.equal(pairs_of(mine[source]), expected[rows][:, columns])


def test_zigzag_tiles_are_the_well_known_ones():
    """Rank 3 of 8: source 1 = all rows x first half, source 6 = second half x all keys, itself = one causal square."""
    mine = plan(rf.Causal(), rf.Zigzag(), 64, 3, 8)
    assert [(t.row_start, t.row_stop, t.key_start, t.key_stop, t.kind) for t in mine[1].tiles()] == [
        (0, 8, 0, 4, "full")
    ]
    assert [(t.row_start, t.row_stop, t.key_start, t.key_stop, t.kind) for t in mine[6].tiles()] == [
        (4, 8, 0, 8, "full")
    ]
    assert [(t.row_start, t.row_stop, t.key_start, t.key_stop, t.kind) for t in mine[3].tiles()] == [
        (0, 8, 0, 8, "causal")
    ]


def test_balance_of_zigzag_and_of_contiguous_under_a_causal_mask():
    assert plan(rf.Causal(), rf.Zigzag(), 16, 0, 4).pairs_per_rank == (34, 34, 34, 34)
    assert plan(rf.Causal(), rf.Contiguous(), 16, 0, 4).pairs_per_rank == (10, 26, 42, 58)


def test_a_window_on_contiguous_shards_stops_the_ring_early():
    assert plan(rf.Window(3, 0), rf.Contiguous(), 64, 0, 8).hops == 1
    assert plan(rf.Window(8, 0), rf.Contiguous(), 64, 0, 8).hops == 1
    assert plan(rf.Window(9, 0), rf.Contiguous(), 64, 0, 8).hops == 2
    assert plan(rf.Causal(), rf.Contiguous(), 64, 0, 8).hops == 7
    assert plan(rf.Documents([8] * 8, causal=True), rf.Contiguous(), 64, 0, 8).hops == 0


def test_bytes_follow_hops_and_dtype():
    """8 ranks of 8 tokens, 2 key heads of 16 + 16: a shard of bf16 K and V is 1 KiB, of fp32 gradients 2 KiB."""
    call = {"batch": 1, "key_heads": 2, "head_dim": 16, "value_dim": 16, "itemsize": 2}
    causal = plan(rf.Causal(), rf.Contiguous(), 64, 0, 8)
    assert causal.forward_bytes(**call) == 7 * 1024
    assert causal.backward_bytes(**call) == 7 * 1024 + 8 * 2048
    alone = plan(rf.Causal(), rf.Contiguous(), 64, 0, 1)
    assert alone.forward_bytes(**call) == alone.backward_bytes(**call) == 0


def test_equal_questions_share_one_plan_and_one_bounds():
    a = plan(rf.Documents([3, 5], causal=True), rf.Zigzag(), 8, 1, 2)
    b = plan(rf.Documents(torch.tensor([3, 5]), causal=True), rf.Zigzag(), 8, 1, 2)
    assert a is b
    assert a[0] is b[0]


@pytest.mark.parametrize(
    ("mask", "length", "message"),
    [
        (rf.Documents([3, 4], causal=True), 8, "made for 7 tokens, the sequence has 8; add a document or padding=1"),
        (rf.Documents([3, 6], causal=True), 8, "made for 9 tokens, the sequence has 8"),
        (rf.Window(2, 0) & rf.Documents([3], causal=True), 8, "made for 3 tokens"),
    ],
)
def test_a_mask_for_another_length_is_refused(mask, length, message):
    with pytest.raises(ValueError, match=message):
        plan(mask, rf.Zigzag(), length, 0, 2)


def test_tiles_of_bounds_that_differ_over_the_batch_are_refused():
    lo = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 batch rows"):
        Bounds(lo, lo + 2, 4).tiles()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("causal", rf.Zigzag(), 8), TypeError, "plan: mask is str; must be a Mask"),
        ((rf.Full(), 1, 8), TypeError, "plan: layout is int; must be a Layout"),
        ((rf.Full(), rf.Zigzag(), 8.0), TypeError, "plan: length is float; must be an integer"),
        ((rf.Full(), rf.Zigzag(), -1), ValueError, "plan: length = -1; must be >= 0"),
        ((rf.Full(), rf.Zigzag(), 8, 0, 0), ValueError, "plan: ranks = 0; must be >= 1"),
        ((rf.Full(), rf.Zigzag(), 8, 2, 2), ValueError, r"plan: rank = 2; must be in \[0, 2\)"),
        ((rf.Full(), rf.Zigzag(), 8, True, 2), TypeError, "plan: rank is bool; must be an integer"),
    ],
)
def test_what_is_no_plan_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        rf.plan(*arguments)


def test_equal_numbers_of_any_integer_type_share_a_plan_of_python_ints():
    torch_length, numpy_length = torch.tensor(8), np.int32(8)
    assert rf.plan(rf.Full(), rf.Zigzag(), torch_length) is rf.plan(rf.Full(), rf.Zigzag(), numpy_length)
    assert type(rf.plan(rf.Full(), rf.Zigzag(), numpy_length).length) is int
