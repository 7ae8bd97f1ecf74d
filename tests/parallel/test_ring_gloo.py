"""The ring over real processes: same cases and oracle as in one process, on sub-groups of the last workers.

The rings are sub-groups, so a rank in the ring is never the global rank.
"""

import pytest
import torch

import ringflash as rf
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close, relative_error
from ringflash.testing.sharded import draw
from tests.rings import (
    LAYOUTS,
    attend,
    counted_calls,
    dense,
    masks,
    messages_of,
    name_of,
    on_workers,
    sent_bytes,
    work_of,
)

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


def assert_equals_dense(workers, ranks, layout, problem, mask, **options):
    expected = dense(problem, mask=mask)
    for results in on_workers(workers, ranks, layout, attend, problem, {"mask": mask, **options}):
        assert_all_close(results, expected, problem.get("dtype", torch.float64))


@layouts
@pytest.mark.parametrize("name", ["full", "causal", "documents_window"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_in_layouts_equal_dense_attention(workers, ranks, name, layout):
    """29 tokens, which neither number of ranks divides."""
    assert_equals_dense(workers, ranks, layout, {"queries": 29, "heads": (4, 2)}, masks(29)[name])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("ranks", [4, 8])
def test_many_ranks_equal_dense_attention(workers, ranks, layout):
    """R19: 8 ranks and 2 key heads."""
    assert_equals_dense(workers, ranks, layout, {"queries": 32, "heads": (8, 2)}, rf.Causal())


@pytest.mark.parametrize("name", masks(24))
def test_every_mask_equals_dense_attention_in_float32(workers, name):
    problem = {"queries": 40, "heads": (4, 2), "batch": 2, "dtype": torch.float32}
    assert_equals_dense(workers, 4, rf.Zigzag(), problem, masks(40)[name])


@layouts
@pytest.mark.parametrize("name", ["full", "causal", "documents_window", "first_and_window"])
@pytest.mark.parametrize(("heads", "ranks"), [((4, 2), 3), ((3, 3), 4)])
def test_queries_that_travel_give_the_same_gradients(workers, heads, ranks, name, layout):
    problem = {"queries": 29, "heads": heads, "dim": 5, "value_dim": 3, "batch": 2}
    assert_equals_dense(workers, ranks, layout, problem, masks(29)[name], route="queries")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-6)], ids=["bf16", "fp32"])
def test_queries_that_travel_bring_their_row_statistics_unrounded(workers, dtype, limit):
    """lse and delta in fp32, bit for bit, in the message of q and dout."""
    problem = {"queries": 40, "heads": (4, 2), "batch": 2, "dtype": dtype}
    keys, queries = (
        on_workers(workers, 4, rf.Zigzag(), attend, problem, {"mask": rf.Causal(), "route": route})[0]
        for route in ("keys", "queries")
    )
    for name in ("dq", "dk", "dv"):
        assert relative_error(queries[name], keys[name]) < limit, name


@layouts
@pytest.mark.parametrize("length", [1, 3, 13])
def test_uneven_and_empty_shards_are_exact(workers, length, layout):
    assert_equals_dense(workers, 4, layout, {"queries": length}, rf.Causal())


def test_cross_attention_equals_dense_attention(workers):
    assert_equals_dense(workers, 3, rf.Striped(), {"queries": 7, "keys": 22, "heads": (4, 2)}, rf.Causal())


def test_numerical_derivatives_agree(workers):
    assert on_workers(workers, 2, rf.Zigzag(), derivatives_agree) == [True, True]


def derivatives_agree(ring):
    inputs = draw(queries=6, heads=(2, 1), dim=2)

    def whole_attention(q, k, v):
        out, lse = rf.attention(*map(ring.shard, (q, k, v)), ring=ring, mask=rf.Causal(), length=6, return_lse=True)
        return ring.gather(out), ring.gather(lse)

    return torch.autograd.gradcheck(whole_attention, [inputs[name].requires_grad_() for name in ("q", "k", "v")])


def repeated(ring, times):
    """Outputs and gradients of the same call again and again: how often they differ from the first."""
    problem, options = {"queries": 8 * ring.ranks, "heads": (4, 2), "dtype": torch.float32}, {"mask": rf.Causal()}
    first = attend(ring, problem, options)
    again = [attend(ring, problem, options) for _ in range(times - 1)]
    return first, sum(not torch.equal(results[name], first[name]) for results in again for name in first)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_small_messages_pair_up_in_every_ring_size_again_and_again(workers, ranks):
    """R49: K and V of a shard are 1 KiB; 20 iterations, forward and backward, the same bits each time."""
    problem = {"queries": 8 * ranks, "heads": (4, 2), "dtype": torch.float32}
    expected = dense(problem, mask=rf.Causal())
    for first, differing in on_workers(workers, ranks, rf.Zigzag(), repeated, 20):
        assert_all_close(first, expected, torch.float32)
        assert differing == 0


def attend_long_keys(ring, tokens):
    """One query per rank over `tokens` keys per rank, checked here: the results are too large to send to the test."""
    problem = {"queries": ring.ranks, "keys": tokens * ring.ranks, "heads": (1, 1), "dim": 256, "dtype": torch.float32}
    results = attend(ring, problem, {})
    if ring.rank == 0:
        assert_all_close(results, dense(problem), torch.float32)
    return tokens * 2 * 256 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mib"), [(2, 64), (3, 8)])
def test_large_messages_pair_up(workers, ranks, mib):
    """R49: K and V of a shard are far beyond a socket's buffer; their gradients as much again."""
    sent = on_workers(workers, ranks, rf.Contiguous(), attend_long_keys, mib * 512, timeout_s=120.0)
    assert sent == [mib * 2**20] * ranks


@layouts
@pytest.mark.parametrize("mask", [rf.Causal(), rf.Window(4, 0), rf.Documents([8, 9, 12], causal=True)], ids=name_of)
def test_each_process_sends_the_bytes_of_its_plan_and_not_one_more(workers, mask, layout):
    """K and V go in one message, key heads are not repeated, and the ring stops after the last hop needed."""
    problem = {"queries": 29, "heads": (6, 2), "dim": 4, "value_dim": 3, "dtype": torch.bfloat16}
    results = on_workers(workers, 4, layout, messages_of, problem, mask)
    sizes = {"batch": 1, "key_heads": 2, "head_dim": 4, "value_dim": 3, "itemsize": 2}
    for rank, (forward, backward) in enumerate(results):
        here = plan(mask, layout, 29, rank, 4)
        assert sent_bytes(forward) == here.forward_bytes(**sizes)
        assert sent_bytes(backward) == here.backward_bytes(**sizes)


def events_of_work(ring, mask, length):
    return work_of(ring, mask, length)[:2]


def test_the_next_hop_is_on_its_way_before_anything_is_computed_on_this_one(workers):
    """Ranks hold 2 and 3 tokens: 64 and 96 bytes of keys and values in bf16, twice that of their gradients in fp32."""
    forward, backward = on_workers(workers, 2, rf.Contiguous(), events_of_work, rf.Full(), 5)[1]
    assert forward == [("start", 96), ("forward", 1), ("wait", 64), ("forward", 0)]
    assert backward == [
        ("start", 96), ("backward", 1), ("wait", 64), ("backward", 0), ("start", 128), ("wait", 192),
    ]  # fmt: skip


def calls_of_the_wire(ring):
    """Every call into torch.distributed of one forward and backward, the first check of shapes aside."""
    tensors = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    rf.attention(*tensors, ring=ring).sum().backward()
    with counted_calls() as counts:
        rf.attention(*tensors, ring=ring).sum().backward()
    return counts


def test_nothing_but_sends_and_receives_happens_once_shapes_are_agreed(workers):
    """2 hops of keys forward; 2 of keys and 2 of gradients backward: no collective, no barrier, no repeated check."""
    assert on_workers(workers, 3, rf.Contiguous(), calls_of_the_wire) == [{"batch_isend_irecv": 6}] * 3
