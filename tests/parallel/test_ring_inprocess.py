"""Every rank in one process: the ring equals dense attention of the whole sequence, outputs and gradients."""

import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.parallel.inprocess import run
from ringflash.testing.compare import assert_all_close, assert_close, relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import LAYOUTS, attend_in_process, dense, in_process, masks, name_of

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
NAMES = ["out", "lse", "dq", "dk", "dv"]


def assert_equals_dense(ranks, layout, problem, mask, **options):
    expected = dense(problem, mask=mask, scale=options.get("scale"))
    for results in attend_in_process(ranks, layout, problem, {"mask": mask, **options}):
        assert_all_close(results, expected, problem.get("dtype", torch.float64))


@layouts
@pytest.mark.parametrize("name", masks(24))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_mask_in_every_layout_equals_dense_attention(ranks, name, layout):
    """29 tokens: no number of ranks divides them but 1. R28: also without causality in the balanced layouts."""
    assert_equals_dense(ranks, layout, {"queries": 29, "heads": (4, 2), "value_dim": 5}, masks(29)[name])


@layouts
@pytest.mark.parametrize("name", ["full", "causal", "window", "documents_padded"])
def test_eight_ranks_equal_dense_attention(name, layout):
    assert_equals_dense(8, layout, {"queries": 32, "batch": 2}, masks(32)[name])


@layouts
@pytest.mark.parametrize("name", masks(24))
@pytest.mark.parametrize("ranks", [2, 4])
def test_float32_equals_dense_attention(ranks, name, layout):
    problem = {"queries": 40, "heads": (4, 2), "dim": 16, "dtype": torch.float32}
    assert_equals_dense(ranks, layout, problem, masks(40)[name])


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [(4, (8, 2)), (8, (8, 2)), (4, (4, 1)), (4, (5, 5)), (2, (6, 3)), (2, (28, 7)), (3, (1, 1))],
    ids=name_of,
)
def test_any_number_of_key_heads_works_with_any_number_of_ranks(ranks, heads):
    """R19, R20: key heads are neither split over ranks nor repeated."""
    assert_equals_dense(ranks, rf.Zigzag(), {"queries": 19, "heads": heads}, rf.Causal())


@layouts
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_length_that_ranks_do_not_divide_or_reach_is_exact(ranks, length, layout):
    """R14. Some shards are shorter, some empty."""
    assert_equals_dense(ranks, layout, {"queries": length}, rf.Causal())
    assert_equals_dense(ranks, layout, {"queries": length}, rf.Full())


@st.composite
def rings(draw_one):
    length = draw_one(st.integers(12, 48))
    mask = draw_one(st.sampled_from(sorted(masks(length))))
    key_heads = draw_one(st.integers(1, 3))
    heads = (key_heads * draw_one(st.integers(1, 3)), key_heads)
    problem = {
        "queries": length,
        "heads": heads,
        "batch": draw_one(st.integers(1, 2)),
        "dim": draw_one(st.integers(1, 9)),
    }
    return draw_one(st.integers(1, 6)), draw_one(st.sampled_from(LAYOUTS)), problem, masks(length)[mask]


@settings(deadline=None, max_examples=25)
@given(rings())
def test_any_ring_equals_dense_attention(ring):
    assert_equals_dense(*ring)


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (6, 4), (1, 129), (129, 1), (13, 40), (40, 13)])
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(6, 3)], ids=name_of)
def test_cross_attention_on_one_device_equals_dense_attention(mask, queries, keys):
    problem = {"queries": queries, "keys": keys, "heads": (4, 2)}
    assert_all_close(attend_sharded(None, **draw(**problem), mask=mask), dense(problem, mask=mask), torch.float64)


@layouts
@pytest.mark.parametrize(
    ("queries", "keys"), [(4, 8), (12, 4), (4, 128), (8, 40), (13, 29), (29, 13), (3, 10), (10, 3)]
)
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(6, 3)], ids=name_of)
def test_cross_attention_in_a_ring_equals_dense_attention(mask, queries, keys, layout):
    """R26: the last query stands at the last key, and rows before the first key see nothing."""
    assert_equals_dense(4, layout, {"queries": queries, "keys": keys, "heads": (4, 2)}, mask)


@layouts
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_each_hop_uses_its_own_keys_when_ranks_differ_in_scale(ranks, layout, dtype, allowed):
    """R37: K and V of the ranks are x1, x10, x100; a neighbour's keys in backward would be off by orders of magnitude."""
    problem = {"queries": 24, "heads": (2, 2), "dim": 8, "dtype": dtype}
    inputs = draw(**problem)
    for rank in range(ranks):
        positions = layout.positions(24, rank, ranks)
        inputs["k"][:, positions] *= 10.0 ** (rank % 3) / 10
        inputs["v"][:, positions] *= 10.0 ** (rank % 3)
    expected = dense_gradients(**inputs, mask=rf.Causal())
    for results in in_process(ranks, layout, partial(attend_sharded, **inputs, mask=rf.Causal())):
        for name in NAMES:
            assert relative_error(results[name], expected[name]) < allowed, name


def whole_attention(ring, q, k, v):
    """Shard, attend, gather: a function of whole sequences, like attention on one device."""
    out, lse = rf.attention(*map(ring.shard, (q, k, v)), ring=ring, mask=rf.Window(3, 0), length=6, return_lse=True)
    return ring.gather(out, length=6), ring.gather(lse, length=6)


@pytest.mark.parametrize(("ranks", "layout"), list(zip([3, 2, 4], LAYOUTS, strict=True)), ids=name_of)
def test_numerical_derivatives_agree(ranks, layout):
    """R37: gradcheck in float64 with 6 tokens, through shard and gather; all ranks perturb in step."""

    def check(ring):
        inputs = draw(queries=6, heads=(2, 1), dim=2)
        tensors = [inputs[name].requires_grad_() for name in ("q", "k", "v")]
        return torch.autograd.gradcheck(partial(whole_attention, ring), tensors)

    assert in_process(ranks, layout, check) == [True] * ranks


@layouts
def test_the_gradient_of_lse_reaches_queries_and_keys(layout):
    """Alone, without any gradient of out."""
    inputs = draw(queries=24, heads=(4, 2)) | {"dout": torch.zeros(1, 24, 4, 8, dtype=torch.float64)}
    expected = dense_gradients(**inputs, mask=rf.Causal())
    assert expected["dq"].abs().max() > 0.1
    for results in in_process(3, layout, partial(attend_sharded, **inputs, mask=rf.Causal())):
        assert_all_close(results, expected, torch.float64)
        assert_close(results["dv"], torch.zeros_like(expected["dv"]), torch.float64)


def sleeping(seconds, function):
    def slow(*arguments, **options):
        time.sleep(seconds)
        return function(*arguments, **options)

    return slow


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_sums_run_in_the_order_of_ranks_not_of_arrival(layout):
    """R12: the same bits whoever is late."""
    problem = {"queries": 64, "heads": (4, 2), "dtype": torch.float32}

    def late(delays, member):
        member.exchange = sleeping(delays[member.rank], member.exchange)
        return attend_sharded(rf.Ring(layout=layout, transport=member), **draw(**problem), mask=rf.Causal())

    expected = run(4, partial(late, [0, 0, 0, 0]))
    for delays in ([0.02, 0, 0, 0], [0, 0, 0.02, 0.01], [0.01, 0.03, 0, 0.02]):
        for mine, first in zip(run(4, partial(late, delays)), expected, strict=True):
            for name in NAMES:
                assert torch.equal(mine[name], first[name]), (name, delays)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_give_outputs_and_gradients_of_their_type_and_lse_in_float32(dtype):
    (results, *_) = attend_in_process(3, rf.Zigzag(), {"queries": 24, "dtype": dtype}, {"mask": rf.Causal()})
    assert {name: x.dtype for name, x in results.items()} == {
        "out": dtype,
        "lse": torch.float32,
        "dq": dtype,
        "dk": dtype,
        "dv": dtype,
    }


def test_batch_rows_are_independent():
    """R21: permuting the batch permutes the result, to the bit."""
    order = [2, 0, 1]
    inputs = draw(queries=16, batch=3)
    permuted = {name: x[order] for name, x in inputs.items()}
    here = in_process(2, rf.Zigzag(), partial(attend_sharded, **inputs, mask=rf.Causal()))
    there = in_process(2, rf.Zigzag(), partial(attend_sharded, **permuted, mask=rf.Causal()))
    for name in NAMES:
        assert torch.equal(here[0][name][order], there[0][name])
    assert_all_close(here[0], dense({"queries": 16, "batch": 3}, mask=rf.Causal()), torch.float64)
