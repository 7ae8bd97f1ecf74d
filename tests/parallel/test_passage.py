"""What goes over the wire, how much of it, and when: counted on an in-process ring."""

import time

import pytest
import torch

import ringflash as rf
from ringflash.schedule.plan import plan
from ringflash.testing.sharded import draw
from tests.rings import LAYOUTS, in_process, masks, messages_of, name_of, sent_bytes, throttle, work_of

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


def test_the_next_hop_is_on_its_way_before_anything_is_computed_on_this_one():
    """5 tokens per rank, 2 key heads, 4 + 4 dims: a message of K and V in bf16 has 160 bytes."""
    forward, _, _ = in_process(4, rf.Contiguous(), work_of, rf.Full(), 20)[1]
    assert forward == [
        ("start", 160), ("forward", 1), ("wait", 160),
        ("start", 160), ("forward", 0), ("wait", 160),
        ("start", 160), ("forward", 3), ("wait", 160),
        ("forward", 2),
    ]  # fmt: skip


def test_gradients_follow_their_keys_one_hop_behind_and_come_home():
    """The sum of dK and dV, in fp32, is waited for only after this rank's share is computed; own rows' stay at home."""
    _, backward, _ = in_process(3, rf.Contiguous(), work_of, rf.Full(), 15)[1]
    keys, gradients = 160, 320
    assert backward == [
        ("start", keys), ("backward", 1), ("wait", keys),
        ("start", keys), ("backward", 0), ("start", gradients), ("wait", keys),
        ("backward", 2), ("wait", gradients), ("start", gradients), ("wait", gradients),
    ]  # fmt: skip


def test_gradients_go_home_from_the_last_rank_that_has_any():
    """A window of one shard: each rank has gradients of the rank before it, and sends them straight back."""
    events = in_process(4, rf.Contiguous(), work_of, rf.Window(5, 0), 20)
    keys, gradients = 160, 320
    assert [forward for forward, _, _ in events][1] == [("start", keys), ("forward", 1), ("wait", keys), ("forward", 0)]
    backwards = [backward for _, backward, _ in events]
    assert backwards[0] == [("start", keys), ("backward", 0), ("wait", gradients)]
    assert backwards[3] == [("backward", 3), ("wait", keys), ("backward", 2), ("start", gradients)]


def test_a_shard_goes_no_further_than_the_last_rank_that_sees_it():
    events = [forward for forward, _, _ in in_process(4, rf.Contiguous(), work_of, rf.Causal(), 20)]
    computed = [[source for what, source in forward if what == "forward"] for forward in events]
    assert computed == [[0], [1, 0], [2, 1, 0], [3, 2, 1, 0]]
    assert [len([e for e in forward if e[0] == "start"]) for forward in events] == [1, 2, 3, 0]


def test_partial_results_and_travelling_gradients_stay_float32_for_bfloat16():
    """R04: rounded once, at the end."""
    *_, kept = in_process(3, rf.Contiguous(), work_of, rf.Full(), 15)[2]
    partials, backwards = kept[:3], kept[3:]
    assert partials[0] is None and len(backwards) == 3
    assert all(p.out.dtype == p.lse.dtype == torch.float32 for p in partials[1:])
    for given in backwards:
        added_into = [x for x in given if isinstance(x, torch.Tensor) and x.shape == (1, 5, 2, 4)]
        assert [x.dtype for x in added_into[-3:]] == [torch.float32] * 3


@layouts
@pytest.mark.parametrize("name", masks(24))
@pytest.mark.parametrize("length", [24, 29])
def test_each_rank_sends_the_bytes_of_its_plan_and_not_one_more(length, name, layout):
    """Native key heads (2 of 6), K and V in one message, uneven shards, and no hop after the last one needed."""
    problem = {"queries": length, "heads": (6, 2), "dim": 4, "value_dim": 3, "dtype": torch.float32}
    mask = masks(length)[name]
    parts = mask.parts if isinstance(mask, rf.Union) else (mask,)
    for rank, (forward, backward) in enumerate(in_process(4, layout, messages_of, problem, mask)):
        plans = [plan(part, layout, length, rank, 4) for part in parts]
        sizes = {"batch": 1, "key_heads": 2, "head_dim": 4, "value_dim": 3, "itemsize": 4}
        assert sent_bytes(forward) == sum(here.forward_bytes(**sizes) for here in plans)
        assert sent_bytes(backward) == sum(here.backward_bytes(**sizes) for here in plans)


@layouts
@pytest.mark.parametrize("name", masks(24))
@pytest.mark.parametrize("length", [24, 29])
def test_travelling_queries_send_the_bytes_of_the_plan_and_not_one_more(length, name, layout):
    """q, dout, lse and delta in one message, of the rows that see keys of somebody to come, and dq of them back."""
    problem = {"queries": length, "heads": (6, 2), "dim": 4, "value_dim": 3, "dtype": torch.float32}
    mask = masks(length)[name]
    parts = mask.parts if isinstance(mask, rf.Union) else (mask,)
    keys = {"batch": 1, "key_heads": 2, "head_dim": 4, "value_dim": 3, "itemsize": 4}
    queries = {"batch": 1, "query_heads": 6, "head_dim": 4, "value_dim": 3, "itemsize": 4}
    for rank, (forward, backward) in enumerate(in_process(4, layout, messages_of, problem, mask, "queries")):
        plans = [plan(part, layout, length, rank, 4) for part in parts]
        assert sent_bytes(forward) == sum(here.forward_bytes(**keys) for here in plans)
        assert sent_bytes(backward) == sum(here.queries_bytes(**queries) for here in plans)


def test_gradients_of_queries_follow_them_one_hop_behind_and_come_home():
    """5 queries per rank, 2 heads: q and dout 160 bytes in bf16, lse and delta 80; dq in fp32 160. Of a row of one rank
    every rank has keys, so it visits all, computing on the keys that are at home.
    """
    _, backward, kept = in_process(3, rf.Contiguous(), work_of, rf.Full(), 15, "queries")[1]
    queries, gradients = 160 + 80, 160
    assert backward == [
        ("start", queries), ("backward", 1), ("wait", queries),
        ("start", queries), ("backward", 1), ("start", gradients), ("wait", queries),
        ("backward", 1), ("wait", gradients), ("start", gradients), ("wait", gradients),
    ]  # fmt: skip
    rows = [given[0] for given in kept[3:]]
    assert len(rows) == 3 and all(x.lse.dtype == x.delta.dtype == torch.float32 for x in rows)
    assert all(x.transpose(1, 2).is_contiguous() for given in rows for x in (given.lse, given.delta))


@pytest.mark.parametrize(
    ("heads", "cheaper"), [((4, 4), "queries"), ((8, 1), "keys")], ids=["as_many_key_heads", "grouped"]
)
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(9, 0)], ids=name_of)
def test_the_route_that_nobody_named_is_the_one_with_fewer_bytes(heads, cheaper, mask):
    problem = {"queries": 32, "heads": heads, "dim": 64, "dtype": torch.bfloat16}

    def bytes_of(route):
        events = in_process(4, rf.Zigzag(), messages_of, problem, mask, route)
        return sum(sent_bytes(backward) for _, backward in events)

    sent = {route: bytes_of(route) for route in ("keys", "queries")}
    assert min(sent, key=sent.get) == cheaper
    assert bytes_of(None) == sent[cheaper]


def seconds_of_backward(ring, heads, route):
    """On a link of 1 MB/s, which computes faster than it carries."""
    problem = {"queries": 256, "heads": heads, "dim": 64, "dtype": torch.float32}
    x = draw(**problem)
    q, k, v = (ring.shard(x[name]).requires_grad_() for name in ("q", "k", "v"))
    out = rf.attention(q, k, v, ring=ring, route=route)
    throttle(ring.transport, 1e6)
    began = time.monotonic()
    out.sum().backward()
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "faster"), [((8, 8), "queries"), ((8, 1), "keys")], ids=["as_many_key_heads", "grouped"]
)
def test_the_route_with_fewer_bytes_is_faster_where_the_link_is_the_bound(heads, faster):
    seconds = {
        route: max(in_process(2, rf.Zigzag(), seconds_of_backward, heads, route)) for route in ("keys", "queries")
    }
    slower = "keys" if faster == "queries" else "queries"
    assert seconds[faster] < 0.88 * seconds[slower], seconds


@pytest.mark.parametrize(("left", "hops"), [(0, 0), (1, 1), (8, 1), (9, 2), (56, 7)])
def test_a_window_stops_the_ring_after_the_last_source_it_reaches(left, hops):
    """And of the shards on the way only the rows inside the window move."""
    problem = {"queries": 64, "heads": (1, 1), "dim": 4, "dtype": torch.float32}
    events = in_process(8, rf.Contiguous(), messages_of, problem, rf.Window(left, 0))
    row = (4 + 4) * 4
    for rank, (forward, _) in enumerate(events):
        # At hop h the shard of rank - h + 1 moves on, h - 1 shards less of the window left; nobody is behind rank 7.
        sent = [row * min(8, left - 8 * (hop - 1)) for hop in range(1, hops + 1) if rank - hop + 1 >= 0 and rank < 7]
        assert [size for what, size in forward if what == "start"] == sent


def test_documents_that_end_at_shard_borders_send_nothing():
    mask = rf.Documents([8] * 8, causal=False)
    for forward, backward in in_process(8, rf.Contiguous(), messages_of, {"queries": 64}, mask):
        assert forward == backward == []


def test_inputs_are_not_written_to():
    def changed(ring):
        q, k, v = (torch.randn(1, 6, 2, 4).requires_grad_() for _ in range(3))
        before = [x.detach().clone() for x in (q, k, v)]
        rf.attention(q, k, v, ring=ring).sum().backward()
        return [not torch.equal(x, old) for x, old in zip((q, k, v), before, strict=True)]

    assert in_process(3, rf.Zigzag(), changed) == [[False] * 3] * 3
