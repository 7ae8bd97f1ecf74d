"""Section B of the cases: lengths around block edges, heads, batches, the smallest problems."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import ringflash as rf
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.testing.oracle import dense_gradients, visible
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import LAYOUTS, attend_in_process, dense, in_process, name_of

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
both_masks = pytest.mark.parametrize("mask", [rf.Full(), rf.Causal()], ids=name_of)
SMALL = [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 192, 255, 257]


def by_torch(inputs, mask):
    """Out and gradients of torch's own attention in the inputs' type, for as many queries as keys."""
    q, k, v = (inputs[name].transpose(1, 2).detach().requires_grad_() for name in ("q", "k", "v"))
    seen = visible(mask, q.shape[2], k.shape[2])[0]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), inputs["dout"].transpose(1, 2))
    return dict(zip(["out", "dq", "dk", "dv"], (x.detach().transpose(1, 2) for x in (out, *gradients)), strict=True))


def assert_as_exact_as_torch(results, expected, torchs):
    """Twice the error of torch at most; by norm, with fp32's rounding for what torch happens to hit."""
    for name, theirs in torchs.items():
        size = float(expected[name].norm()) + 1.0
        ours, theirs = (float((x.double() - expected[name]).norm()) for x in (results[name], theirs))
        assert ours <= 2 * theirs + 1e-5 * size, f"{name}: error {ours:.3g}, torch has {theirs:.3g}"


@both_masks
@pytest.mark.parametrize("local", SMALL)
def test_R16_local_lengths_around_block_edges_are_exact(local, mask):
    problem = {"queries": 2 * local, "heads": (2, 1), "dim": 8, "dtype": torch.float32}
    for results in attend_in_process(2, rf.Contiguous(), problem, {"mask": mask}):
        assert_all_close(results, dense(problem, mask=mask), torch.float32)


@both_masks
@pytest.mark.parametrize("local", SMALL)
def test_R16_local_lengths_around_block_edges_are_as_exact_as_torch_in_bfloat16(local, mask):
    inputs = draw(queries=2 * local, heads=(2, 1), dim=16, dtype=torch.bfloat16) | {"dlse": None}
    expected, torchs = dense_gradients(**inputs, mask=mask), by_torch(inputs, mask)
    for results in in_process(2, rf.Zigzag(), partial(attend_sharded, **inputs, mask=mask)):
        assert_as_exact_as_torch(results, expected, torchs)


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (511, 511, rf.Causal()),
        (512, 512, rf.Causal()),
        (513, 513, rf.Full()),
        (1000, 1000, rf.Causal()),
        (1, 129, rf.Causal()),
        (129, 1, rf.Full()),
        (65, 4095, rf.Full()),
        (65, 4096, rf.Causal()),
        (65, 4097, rf.Causal()),
        (4095, 65, rf.Causal()),
        (4096, 65, rf.Full()),
        (4097, 65, rf.Causal()),
    ],
    ids=name_of,
)
def test_R16_long_and_unequal_lengths_are_exact_on_one_device(queries, keys, mask):
    """511 to 513: the reference's own block has 512 rows and keys."""
    problem = {"queries": queries, "keys": keys, "heads": (1, 1), "dim": 8, "dtype": torch.float32}
    assert_all_close(attend_sharded(None, **draw(**problem), mask=mask), dense(problem, mask=mask), torch.float32)


@pytest.mark.slow
def test_R16_4097_queries_and_keys_are_exact_on_one_device():
    problem = {"queries": 4097, "heads": (1, 1), "dim": 8, "dtype": torch.float32}
    results = attend_sharded(None, **draw(**problem), mask=rf.Causal())
    assert_all_close(results, dense(problem, mask=rf.Causal()), torch.float32)


@pytest.mark.parametrize("length", [1, 63, 100, 513])
@pytest.mark.parametrize("ranks", [1, 2])
def test_R16_memory_past_the_end_of_a_shard_has_no_effect(ranks, length):
    """NaN before and after q, k, v in memory: not a bit changes, forward and backward."""
    inputs = draw(queries=length, heads=(2, 1), dtype=torch.float32)

    def step(is_framed, ring):
        local = []
        for name in ("q", "k", "v"):
            x = ring.shard(inputs[name])
            memory = torch.full((1, x.shape[1] + 9, *x.shape[2:]), torch.nan)
            memory[:, 4:-5] = x
            local.append((memory[:, 4:-5] if is_framed else x).detach().requires_grad_())
        out, lse = rf.attention(*local, ring=ring, mask=rf.Causal(), length=length, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, local, ring.shard(inputs["dout"]))]

    plain, framed = (in_process(ranks, rf.Zigzag(), partial(step, is_framed)) for is_framed in (False, True))
    for mine, expected in zip(framed, plain, strict=True):
        assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(mine, expected, strict=True))


@layouts
@pytest.mark.parametrize("heads", [(6, 3), (28, 7)], ids=name_of)
def test_R20_groups_of_query_heads_share_their_key_head(heads, layout):
    """v of key head h is h, so every output of query head i is i // (Hq / Hk); dk and dv are sums over the group."""
    Hq, Hk = heads
    inputs = draw(queries=10, heads=heads)
    inputs["v"] = torch.arange(float(Hk))[None, None, :, None].expand_as(inputs["v"]).double()
    expected = dense_gradients(**inputs, mask=rf.Causal())
    groups = (torch.arange(Hq) // (Hq // Hk)).double()[None, None, :, None].expand(1, 10, Hq, 8)
    for results in in_process(2, layout, partial(attend_sharded, **inputs, mask=rf.Causal())):
        assert_close(results["out"], groups, torch.float64)
        assert_all_close(results, expected, torch.float64)


@layouts
def test_R21_every_row_of_a_batch_is_its_own_problem(layout):
    inputs = draw(queries=16, batch=3)
    whole = in_process(2, layout, partial(attend_sharded, **inputs, mask=rf.Causal()))[0]
    for row in range(3):
        alone = {name: x[row : row + 1] for name, x in inputs.items()}
        expected = dense_gradients(**alone, mask=rf.Causal())
        assert_all_close({name: x[row : row + 1] for name, x in whole.items()}, expected, torch.float64)


@layouts
@both_masks
@pytest.mark.parametrize(("length", "dim"), [(4, 4), (2, 1), (4, 1)])
def test_R25_the_smallest_problems_are_exact_and_keep_their_shape(length, dim, mask, layout):
    problem = {"queries": length, "heads": (1, 1), "dim": dim}
    for results in attend_in_process(2, layout, problem, {"mask": mask}):
        assert results["out"].shape == (1, length, 1, dim) and results["lse"].shape == (1, length, 1)
        assert_all_close(results, dense(problem, mask=mask), torch.float64)


@pytest.mark.parametrize(
    "dim", [1, 3, 8, 16, 24, 32, 40, 48, 56, 63, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 256, 512, 576]
)
def test_R17_every_head_dim_counts_its_last_channel(dim):
    """The only value that tells keys apart, and the only value of v, stand in the last channel."""
    inputs = draw(queries=9, heads=(1, 1), dim=dim)
    for name in ("q", "k", "v"):
        inputs[name][..., :-1] = 0.0
    expected = dense_gradients(**inputs, mask=rf.Causal())
    for results in in_process(2, rf.Zigzag(), partial(attend_sharded, **inputs, mask=rf.Causal())):
        assert_all_close(results, expected, torch.float64)


def test_R17_the_head_dims_of_latent_attention():
    """576 for q and k, 512 for v, one key head for all."""
    problem = {"queries": 12, "heads": (4, 1), "dim": 576, "value_dim": 512}
    for results in attend_in_process(2, rf.Zigzag(), problem, {"mask": rf.Causal()}):
        assert_all_close(results, dense(problem, mask=rf.Causal()), torch.float64)
