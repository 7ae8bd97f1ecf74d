"""Laws of the schedule, for drawn layouts, masks, lengths and ranks, against plain definitions by positions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.schedule.plan import plan
from ringflash.schedule.tiles import Bounds, tightened
from ringflash.testing.oracle import visible
from tests.drawn import layouts, masks, reach


@st.composite
def problems(draw, batch=None):
    """(length, ranks, layout, mask)"""
    length = draw(st.integers(0, 40))
    mask = draw(masks(length, batch))
    return length, draw(st.integers(1, 9)), draw(layouts(length, mask)), mask


def pairs_of(bounds):
    """Every (row, column) of bounds as a dense bool matrix per batch row."""
    column = torch.arange(bounds.columns)
    return (bounds.lo[..., None] <= column) & (column < bounds.hi[..., None])


@settings(deadline=None, max_examples=300)
@given(problems())
def test_tiles_cover_every_visible_pair_exactly_once(problem):
    length, ranks, layout, mask = problem
    count = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        queries = layout.positions(length, rank, ranks)
        for source in range(ranks):
            keys = layout.positions(length, source, ranks)[mine.keys(source)]
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
    assert torch.equal(count, visible(mask, length, length)[0].long())


@settings(deadline=None, max_examples=300)
@given(problems() | problems(batch=3))
def test_bounds_cover_every_visible_pair_exactly_once_by_rows_and_by_columns(problem):
    length, ranks, layout, mask = problem
    expected = visible(mask, length, length)
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        queries = layout.positions(length, rank, ranks)
        for source in range(ranks):
            keys, bounds = layout.positions(length, source, ranks), mine[source]
            seen = torch.zeros(expected.shape[0], queries.numel(), keys.numel(), dtype=torch.bool)
            seen[:, :, mine.keys(source)] = pairs_of(bounds)
            assert torch.equal(seen, expected[:, queries][:, :, keys])
            assert torch.equal(pairs_of(bounds.transposed).mT, pairs_of(bounds))
            assert bounds.pairs == bounds.transposed.pairs == int(pairs_of(bounds).sum())
            assert bounds.is_empty == (not seen.any())
            assert bounds.shape != "full" or bounds.is_full
            assert not bounds.is_even or len(set((bounds.hi - bounds.lo).flatten().tolist()) - {0}) <= 1
            assert torch.equal(bounds.positions()[0], queries)
            assert torch.equal(bounds.positions()[1], keys[mine.keys(source)])
            for end in (bounds.lo, bounds.hi, bounds.transposed.lo, bounds.transposed.hi):
                assert end.dtype == torch.int32
                assert bool((end.diff(dim=1) >= 0).all()), "law 2: both ends never decrease"


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(0, 60), st.integers(1, 9))
def test_shards_are_sorted_and_hold_each_position_once(data, length, ranks):
    layout = data.draw(layouts(length))
    shards = [layout.positions(length, rank, ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert shard.dtype == torch.int64
        assert bool((shard.diff() > 0).all()), "law 1: strictly increasing"
        assert shard.numel() == layout.shard_length(length, rank, ranks)
    assert sorted(torch.cat(shards).tolist()) == list(range(length))
    if length % ranks == 0 and isinstance(layout, (rf.Contiguous, rf.Zigzag, rf.Striped)):
        assert {shard.numel() for shard in shards} == {length // ranks}


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(0, 60), st.integers(1, 9))
def test_a_cut_knows_the_local_index_of_every_position(data, length, ranks):
    cut = data.draw(layouts(length)).cut(length, ranks)
    x = torch.arange(length + 1, dtype=torch.int32)
    asked = torch.tensor(data.draw(st.lists(st.integers(0, ranks - 1))), dtype=torch.int64)
    expected = [torch.searchsorted(cut.positions(rank), x.long()) for rank in asked.tolist()]
    assert torch.equal(cut.below(x, asked), torch.stack(expected).int() if expected else x.new_zeros(0, length + 1))
    assert cut.shard_lengths == [cut.positions(rank).numel() for rank in range(ranks)]


def hull(seen):
    """The slice from the first to the last column that any row sees."""
    columns = seen.flatten(0, -2).any(0).nonzero()[:, 0].tolist()
    return slice(columns[0], columns[-1] + 1) if columns else slice(0, 0)


@settings(deadline=None, max_examples=300)
@given(problems() | problems(batch=3))
def test_sources_keys_hops_and_pairs_agree_with_the_dense_mask(problem):
    length, ranks, layout, mask = problem
    expected = visible(mask, length, length)
    reached, pairs = [0], []
    for rank in range(ranks):
        queries = layout.positions(length, rank, ranks)
        needed = [hull(expected[:, queries][:, :, layout.positions(length, s, ranks)]) for s in range(ranks)]
        mine = plan(mask, layout, length, rank, ranks)
        said = [mine.keys(source) for source in range(ranks)]
        # Stripes may step over a short interval, and rows that see nothing may leave holes between others.
        if isinstance(layout, rf.Striped) or not expected.any(-1).all():
            assert all(a.start <= b.start and b.stop <= a.stop for a, b in zip(said, needed, strict=True) if b.stop)
        else:
            assert said == needed
        assert mine.sources == tuple(source for source in range(ranks) if said[source].stop)
        reached += [(rank - source) % ranks for source in mine.sources]
        pairs.append(int(expected[:, queries].sum()))
    for rank in range(ranks):
        mine = plan(mask, layout, length, rank, ranks)
        assert mine.hops == max(reached)
        assert mine.pairs == pairs[rank]
        assert mine.pairs_per_rank == tuple(pairs)


@settings(deadline=None, max_examples=300)
@given(problems() | problems(batch=3))
def test_a_turned_plan_says_the_same_pairs_of_the_keys_at_home(problem):
    length, ranks, layout, mask = problem
    expected = visible(mask, length, length)
    for rank in range(ranks):
        turned, keys = plan(mask, layout, length, rank, ranks).turned, layout.positions(length, rank, ranks)
        for source in range(ranks):
            queries, bounds = layout.positions(length, source, ranks), turned[source]
            rows, columns = turned.queries(source), turned.keys(source)
            seen = torch.zeros(expected.shape[0], queries.numel(), keys.numel(), dtype=torch.bool)
            seen[:, rows, columns] = pairs_of(bounds)
            assert torch.equal(seen, expected[:, queries][:, :, keys])
            assert torch.equal(bounds.positions()[0], queries[rows])
            assert torch.equal(bounds.positions()[1], keys[columns])
            needed = hull(expected[:, queries][:, :, keys].mT)
            if not isinstance(layout, rf.Striped) and expected.any(-1).all() and expected.any(-2).all():
                assert rows == needed, "no row travels that sees nothing"


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(0, 20), st.integers(0, 20), st.integers(1, 4), reach, reach)
def test_a_turned_plan_of_cross_attention(data, queries, keys, ranks, left, right):
    layout = data.draw(st.sampled_from([rf.Contiguous(), rf.Zigzag(), rf.Striped(), rf.Balanced(rf.Causal())]))
    padded = rf.Padding.right([keys, keys // 2], length=keys, keys_only=True)
    for mask in (rf.Causal(), rf.Window(left, right), rf.Prefix(3), rf.Chunked(4), rf.FirstKeys(2), padded):
        expected = visible(mask, queries, keys)
        for rank in range(ranks):
            turned = plan(mask, layout, keys, rank, ranks, query_length=queries).turned
            here = layout.positions(keys, rank, ranks)
            for source in range(ranks):
                there = layout.positions(queries, source, ranks)
                seen = torch.zeros(expected.shape[0], there.numel(), here.numel(), dtype=torch.bool)
                seen[:, turned.queries(source), turned.keys(source)] = pairs_of(turned[source])
                assert torch.equal(seen, expected[:, there][:, :, here])


def joined(slices):
    filled = [part for part in slices if part.stop > part.start]
    return slice(min(p.start for p in filled), max(p.stop for p in filled)) if filled else slice(0, 0)


@settings(deadline=None, max_examples=200)
@given(problems() | problems(batch=3))
def test_what_travels_is_what_ranks_to_come_see_and_what_returns_is_what_ranks_before_saw(problem):
    length, ranks, layout, mask = problem
    needs = plan(mask, layout, length, 0, ranks).needs
    for source in range(ranks):
        seen = [needs.seen((source + hop) % ranks, source) for hop in range(ranks)]
        last = max([hop for hop in range(1, ranks) if seen[hop].stop], default=0)
        assert needs.last(source) == last
        for hop in range(1, ranks):
            assert needs.onward(source, hop) == joined(seen[hop:])
            assert needs.gathered(source, hop) == (joined(seen[1 : hop + 1]) if hop <= last else slice(0, 0))


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(0, 20), st.integers(0, 20), st.integers(1, 4), reach, reach)
def test_cross_attention_puts_the_last_query_at_the_last_key(data, queries, keys, ranks, left, right):
    layout = data.draw(st.sampled_from([rf.Contiguous(), rf.Zigzag(), rf.Striped(), rf.Balanced(rf.Causal())]))
    padded = rf.Padding.right([keys, keys // 2], length=keys, keys_only=True)
    for mask in (rf.Causal(), rf.Window(left, right), rf.Prefix(3), rf.Chunked(4), rf.FirstKeys(2), padded):
        expected = visible(mask, queries, keys)
        for rank in range(ranks):
            mine = plan(mask, layout, keys, rank, ranks, query_length=queries)
            rows = layout.positions(queries, rank, ranks)
            for source in range(ranks):
                columns = layout.positions(keys, source, ranks)[mine.keys(source)]
                seen = pairs_of(mine[source]).expand(expected.shape[0], -1, -1)
                assert torch.equal(seen, expected[:, rows][:, :, columns])
                assert torch.equal(pairs_of(mine[source].transposed).mT, pairs_of(mine[source]))


def test_zigzag_tiles_are_the_well_known_ones():
    """Rank 3 of 8: source 1 = all rows x first half, source 6 = second half x all keys, itself = one causal square."""
    mine = plan(rf.Causal(), rf.Zigzag(), 64, 3, 8)
    assert [mine.keys(source) for source in (1, 6, 3)] == [slice(0, 4), slice(0, 8), slice(0, 8)]
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
    """R75."""
    assert plan(rf.Causal(), rf.Zigzag(), 16, 0, 4).pairs_per_rank == (34, 34, 34, 34)
    assert plan(rf.Causal(), rf.Contiguous(), 16, 0, 4).pairs_per_rank == (10, 26, 42, 58)


def test_a_window_on_contiguous_shards_stops_the_ring_early():
    assert plan(rf.Window(3, 0), rf.Contiguous(), 64, 0, 8).hops == 1
    assert plan(rf.Window(8, 0), rf.Contiguous(), 64, 0, 8).hops == 1
    assert plan(rf.Window(9, 0), rf.Contiguous(), 64, 0, 8).hops == 2
    assert plan(rf.Causal(), rf.Contiguous(), 64, 0, 8).hops == 7
    assert plan(rf.Documents([8] * 8, causal=True), rf.Contiguous(), 64, 0, 8).hops == 0


def test_bytes_are_those_of_the_rows_that_somebody_sees():
    """8 ranks of 8 tokens, 2 key heads of 16 + 16: a row of bf16 K and V is 128 bytes, of fp32 gradients 256."""
    call = {"batch": 1, "key_heads": 2, "head_dim": 16, "value_dim": 16, "itemsize": 2}
    full = plan(rf.Full(), rf.Contiguous(), 64, 0, 8)
    assert full.forward_bytes(**call) == 7 * 8 * 128
    assert full.backward_bytes(**call) == 7 * 8 * 128 + 7 * 8 * 256
    # Under a causal mask nobody after rank 7 sees its keys, and rank 0 sees nobody else's.
    causal = [plan(rf.Causal(), rf.Contiguous(), 64, rank, 8) for rank in range(8)]
    assert [mine.forward_bytes(**call) for mine in causal] == [(rank + 1) * 8 * 128 for rank in range(7)] + [0]
    window = [plan(rf.Window(3, 0), rf.Contiguous(), 64, rank, 8) for rank in range(8)]
    assert [mine.forward_bytes(**call) for mine in window] == [3 * 128] * 7 + [0]
    assert [mine.backward_bytes(**call) - mine.forward_bytes(**call) for mine in window] == [0] + [3 * 256] * 7
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
        Bounds.of(lo, lo + 2, 4).tiles()


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


@pytest.mark.parametrize("layout", [rf.Contiguous(), rf.Zigzag(), rf.Striped(), rf.Balanced(rf.Causal())], ids=str)
def test_plans_do_not_depend_on_the_default_device(layout):
    """They are cached for the whole process: made on another device once, they would be wrong for everybody."""
    documents = rf.Documents([5, 9, 3], causal=True, padding=2)
    mask = documents & rf.Window(4, 0) & rf.Padding.right([19, 8], length=19)
    with torch.device("meta"):
        mine = plan(mask, layout, 19, 1, 3)
        assert mine.hops >= 0 and mine.pairs > 0
        bounds = mine[1]
        assert bounds.lo.device.type == bounds.transposed.hi.device.type == bounds.positions()[0].device.type == "cpu"
        assert layout.positions(23, 0, 3).device.type == "cpu"
        assert rf.Documents.from_position_ids([0, 1, 0], causal=True) == rf.Documents([2, 1], causal=True)


def test_a_mask_that_breaks_the_second_law_is_refused():
    class Backwards(rf.Mask):
        def bounds(self, positions):
            return (10 - positions)[None], torch.full_like(positions, 10)[None]

    with pytest.raises(ValueError, match="its bounds decrease from one query to the next"):
        _ = plan(Backwards(), rf.Contiguous(), 8)[0].lo


BATCHES = {
    "one long, many short": rf.Documents([49152] + [1024] * 16, causal=True),
    "short": rf.Documents([1024] * 64, causal=True),
    "both directions": rf.Documents([30000, 20000, 5000, 10536], causal=False),
    "window": rf.Window(1023, 0),
    "documents and window": rf.Documents([30000, 20000, 5000, 10536], causal=True) & rf.Window(4095, 0),
    "first and window": (rf.FirstKeys(4) & rf.Causal() | rf.Window(4095, 0)).parts[1],
    "padded rows": rf.Padding.right([65536, 20000], length=65536) & rf.Causal(),
    "causal": rf.Causal(),
    "little real": rf.Padding.left([2000], length=65536) & rf.Causal(),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_a_balanced_layout_gives_every_rank_the_same_work(name, ranks):
    """R76: 64k tokens; no rank more than 2 % above the mean, and no more tokens than a block's rounding."""
    layout = rf.Balanced(BATCHES[name])
    pairs = plan(BATCHES[name], layout, 65536, 0, ranks).pairs_per_rank
    # 2,000 real tokens on 32 ranks are 4 of the smallest blocks for each.
    assert max(pairs) / (sum(pairs) / ranks) <= (1.1 if (name, ranks) == ("little real", 32) else 1.02)
    assert {layout.shard_length(65536, rank, ranks) for rank in range(ranks)} == {65536 // ranks}


def test_a_document_zigzag_balances_causal_documents():
    """R76: where zigzag of the whole sequence does not."""
    mask = BATCHES["one long, many short"]
    assert len(set(plan(mask, rf.DocumentZigzag(mask), 65536, 0, 4).pairs_per_rank)) == 1
    zigzag = plan(mask, rf.Zigzag(), 65536, 0, 4).pairs_per_rank
    assert max(zigzag) / (sum(zigzag) / 4) > 1.15


def test_a_balanced_layout_knows_unions():
    union = rf.FirstKeys(64) & rf.Causal() | rf.Window(1023, 0)
    layout = rf.Balanced(union)
    work = [sum(plan(part, layout, 65536, rank, 8).pairs for part in union.parts) for rank in range(8)]
    assert max(work) / (sum(work) / 8) <= 1.02
    with pytest.raises(
        TypeError, match="mask is Union; must be a Mask such as Causal.., a Union is planned part by part"
    ):
        plan(union, layout, 65536)


@pytest.mark.parametrize("layout", [rf.DocumentZigzag([3, 4]), rf.Balanced(rf.Documents([3, 4], causal=True))], ids=str)
def test_a_layout_for_another_length_is_refused_wherever_it_cuts(layout):
    ring = rf.Ring(layout=layout)
    for call in (
        lambda: layout.positions(10, 0, 2),
        lambda: layout.shard_length(2, 1, 2),
        lambda: ring.positions(5),
        lambda: plan(rf.Causal(), layout, 10, 0, 2),
    ):
        with pytest.raises(ValueError, match="is made for 7 tokens, the sequence has"):
            call()


@pytest.mark.parametrize("arguments", [(8, 5, 2), (8, -1, 2), (-8, 0, 2), (8, 0, 0)], ids=str)
def test_places_that_do_not_exist_are_refused(arguments):
    for layout in (rf.Zigzag(), rf.Striped()):
        for ask in (layout.positions, layout.shard_length):
            with pytest.raises(ValueError, match="must be"):
                ask(*arguments)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=9))
def test_tightened_ends_show_the_same_pairs_and_stay_between_their_neighbours(ends):
    """Rows that see nothing may have their ends anywhere that keeps both sorted; tightened, they add nothing to a block."""
    lo, hi = (torch.tensor(sorted(x), dtype=torch.int32)[None] for x in zip(*ends, strict=True))
    hi = torch.maximum(lo, hi)
    tight_lo, tight_hi = tightened(lo, hi)
    is_seen = lo < hi
    assert torch.equal(tight_lo[is_seen], lo[is_seen]) and torch.equal(tight_hi[is_seen], hi[is_seen])
    assert bool((tight_lo[~is_seen] == tight_hi[~is_seen]).all())
    assert bool((tight_lo.diff() >= 0).all()) and bool((tight_hi.diff() >= 0).all())
    if bool(is_seen.any()):
        assert int(tight_lo.min()) == int(lo[is_seen].min()) and int(tight_hi.max()) == int(hi[is_seen].max())


@pytest.mark.parametrize(
    "layout", [rf.Contiguous(), rf.Zigzag(), rf.Balanced(rf.Causal())], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("tokens", [5, 128])
def test_a_hop_that_hides_nothing_is_known_to_be_full(layout, tokens):
    """Whether or not shards are of whole blocks, and wherever they are looked at from."""
    ranks = 4
    for rank in range(ranks):
        mine = plan(rf.Causal(), layout, 2 * ranks * tokens, rank, ranks)
        for source in range(ranks):
            for bounds in (mine[source], mine.turned[source]):
                if bounds.rows and bounds.columns and source != rank:
                    assert (bounds.shape == "full") == bounds.is_full
                    assert bounds.shape != "full" or bounds.part(columns=slice(0, 3)).shape == "full"
            if not isinstance(layout, rf.Balanced) and source in mine.sources:
                assert mine[source].shape == ("causal" if source == rank else "full" if source < rank else "rows")


def test_rows_of_a_hop_see_all_or_nothing_where_a_zigzag_meets_later_ranks():
    here = plan(rf.Causal(), rf.Zigzag(), 8 * 128, 1, 4)
    assert [here[source].is_even for source in range(4)] == [True, False, True, True]
    assert not here.landing.bounds.is_even
    assert not plan(rf.Causal(), rf.Striped(), 8 * 128, 1, 4)[2].is_even
