"""Section C of the cases: who sees whom, read from numbers that can be checked by hand."""

from functools import partial
from unittest import mock

import pytest
import torch

import ringflash as rf
from ringflash.kernels.reference import Reference
from ringflash.schedule.plan import Plan
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.testing.oracle import dense_gradients, visible
from ringflash.testing.sharded import attend_sharded, draw
from ringflash.training import position_ids
from tests.rings import LAYOUTS, attend_in_process, dense, in_process, name_of, probe

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
F64 = torch.float64


def probed(ranks, layout, length, mask, dtype=F64):
    """out, exp(lse), dk and dv of the probe input, as lists, from every rank."""
    results = in_process(ranks, layout, partial(attend_sharded, **probe(length, dtype=dtype), mask=mask))
    assert all(torch.equal(results[0][name], other[name]) for other in results for name in other)
    lists = {name: x.double().flatten().tolist() for name, x in results[0].items()}
    return lists["out"], results[0]["lse"].double().exp().flatten().tolist(), lists["dk"], lists["dv"]


@layouts
@pytest.mark.parametrize("ranks", [1, 2])
def test_R15_an_odd_real_length_inside_an_even_padded_one(ranks, layout):
    mask = rf.Documents.from_cu_seqlens([0, 7], causal=False, length=8)
    out, seen, dk, dv = probed(ranks, layout, 8, mask)
    assert out == pytest.approx([3.0] * 7 + [0.0]) and seen == pytest.approx([7.0] * 7 + [0.0])
    assert dv == pytest.approx([1.0] * 7 + [0.0])
    assert dk[7 * 4 :] == [0.0] * 4 and dv[7] == 0.0


@layouts
def test_R15_two_odd_documents_inside_a_padded_length(layout):
    mask = rf.Documents.from_cu_seqlens([0, 4, 7], causal=False, length=10)
    out, _, _, dv = probed(2, layout, 10, mask)
    assert out == pytest.approx([1.5] * 4 + [5.0] * 3 + [0.0] * 3)
    assert dv[7:] == [0.0] * 3


def last_two_of(keys):
    """The probe with the last 2 of `keys` queries."""
    return {name: x if name in ("k", "v") else x[:, -2:] for name, x in probe(keys).items()}


@layouts
def test_R26_the_last_query_stands_at_the_last_key(layout):
    """Two queries over five keys see four and five of them; over six keys, which two ranks divide, five and six."""
    alone = attend_sharded(None, **last_two_of(5), mask=rf.Causal())
    assert alone["out"].flatten().tolist() == pytest.approx([1.5, 2.0])
    for results in in_process(2, layout, partial(attend_sharded, **last_two_of(6), mask=rf.Causal())):
        assert results["out"].flatten().tolist() == pytest.approx([2.0, 2.5])


def changed(before, after):
    """Which positions of [B, S, H, D] changed: bool [B, S]."""
    return ((before - after).abs() > 1e-12).any(-1).any(-1)


@layouts
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_R27_a_key_changes_the_rows_that_may_see_it_and_no_other(ranks, layout):
    """A batch of 32 copies; in copy j the key and value of position j are others, and the gradient of row j."""
    one = draw(queries=32, heads=(1, 1), dim=4)
    plain = {name: x.expand(32, *x.shape[1:]).clone() for name, x in one.items()}
    copy = torch.arange(32)
    keys = {name: x.clone() for name, x in plain.items()}
    keys["k"][copy, copy] += 1.0
    keys["v"][copy, copy] += 1.0
    rows = {name: x.clone() for name, x in plain.items()}
    rows["dout"][copy, copy] += 1.0
    rows["dlse"][copy, copy] += 1.0

    def attend(inputs):
        return in_process(ranks, layout, partial(attend_sharded, **inputs, mask=rf.Causal()))[0]

    before, with_keys, with_rows = attend(plain), attend(keys), attend(rows)
    sees = visible(rf.Causal(), 32, 32)[0]  # [row, key]
    assert torch.equal(changed(before["out"], with_keys["out"]), sees.T)
    assert torch.equal(changed(before["dv"], with_rows["dv"]), sees)
    assert torch.equal(changed(before["dk"], with_rows["dk"]), sees)
    assert torch.equal(changed(before["dq"], with_rows["dq"]), torch.eye(32, dtype=torch.bool))


@layouts
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_R27_the_probe_counts_every_key_once(ranks, layout):
    out, seen, _, dv = probed(ranks, layout, 32, rf.Causal())
    assert out == pytest.approx([i / 2 for i in range(32)])
    assert seen == pytest.approx([i + 1 for i in range(32)])
    assert dv == pytest.approx([sum(1 / n for n in range(j + 1, 33)) for j in range(32)])


@layouts
@pytest.mark.parametrize("ranks", [2, 4])
def test_R27_gradients_of_values_are_harmonic_numbers(ranks, layout):
    *_, dv = probed(ranks, layout, 8, rf.Causal())
    assert dv == pytest.approx([2.7179, 1.7179, 1.2179, 0.8845, 0.6345, 0.4345, 0.2679, 0.125], abs=5e-5)


@pytest.mark.parametrize("layout", [rf.Zigzag(), rf.Striped()], ids=name_of)
def test_R28_balanced_layouts_serve_full_attention(layout):
    problem = {"queries": 24, "heads": (4, 2)}
    for results in attend_in_process(4, layout, problem, {"mask": rf.Full()}):
        assert_all_close(results, dense(problem), F64)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mask", [rf.Causal(), rf.Full(), rf.Window(9, 0)], ids=name_of)
def test_R29_the_layout_does_not_change_the_result(mask, ranks):
    problem = {"queries": 48, "heads": (4, 2), "dtype": torch.float32}
    by_layout = [attend_in_process(ranks, layout, problem, {"mask": mask})[0] for layout in LAYOUTS]
    for other in by_layout[1:]:
        assert_all_close(other, by_layout[0], torch.float32)


PACKED = [3, 1, 7, 5]
PACKED_ROWS = [0, 0.5, 1, 3, 4, 4.5, 5, 5.5, 6, 6.5, 7, 11, 11.5, 12, 12.5, 13]


@layouts
@pytest.mark.parametrize(
    "mask",
    [
        rf.Documents(PACKED, causal=True),
        rf.Documents.from_cu_seqlens([0, 3, 4, 11, 16], causal=True),
        rf.Documents.from_position_ids(position_ids(PACKED), causal=True),
    ],
    ids=["lengths", "cu_seqlens", "position_ids"],
)
def test_R30_documents_that_cross_shard_borders_stay_apart(mask, layout):
    out, *_ = probed(4, layout, 16, mask)
    assert out == pytest.approx(PACKED_ROWS)
    problem = {"queries": 16, "heads": (2, 1)}
    for results in attend_in_process(2, layout, problem, {"mask": mask}):
        assert_all_close(results, dense(problem, mask=mask), F64)


@layouts
def test_R30_a_token_changes_later_rows_of_its_own_document_only(layout):
    one = draw(queries=16, heads=(1, 1), dim=4)
    plain = {name: x.expand(16, *x.shape[1:]).clone() for name, x in one.items()}
    keys = {name: x.clone() for name, x in plain.items()}
    copy = torch.arange(16)
    keys["k"][copy, copy] += 1.0
    keys["v"][copy, copy] += 1.0
    mask = rf.Documents(PACKED, causal=True)
    before, after = (
        in_process(4, layout, partial(attend_sharded, **inputs, mask=mask))[0]["out"] for inputs in (plain, keys)
    )
    document = torch.tensor([d for d, n in enumerate(PACKED) for _ in range(n)])
    expected = (document[:, None] == document[None, :]) & (copy[:, None] <= copy[None, :])  # [token, row]
    assert torch.equal(changed(before, after), expected)


@layouts
@pytest.mark.parametrize("lengths", [[4, 4, 8], [8, 8], [16], [1] * 16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_R31_documents_may_end_where_shards_end(lengths, causal, layout):
    problem = {"queries": 16, "heads": (2, 1)}
    mask = rf.Documents(lengths, causal=causal)
    for results in attend_in_process(2, layout, problem, {"mask": mask}):
        assert_all_close(results, dense(problem, mask=mask), F64)
        if lengths == [1] * 16:
            assert_close(results["out"], draw(**problem)["v"].expand(1, 16, 2, 8), F64)


@pytest.mark.parametrize(
    "borders",
    [
        [0, 5, 5, 16],
        (0, 5, 5, 16),
        torch.tensor([0, 5, 5, 16], dtype=torch.int32),
        torch.tensor([0, 5, 5, 16]),
        torch.tensor([0, 5, 5, 16]).clone(),
        torch.tensor([9, 9, 0, 5, 5, 16])[2:],
    ],
    ids=["list", "tuple", "int32", "int64", "clone", "offset"],
)
def test_R32_equal_borders_of_any_kind_give_the_same_bits(borders):
    problem = {"queries": 16, "heads": (2, 1), "dtype": torch.float32}
    mask = rf.Documents.from_cu_seqlens(borders, causal=True)
    expected = attend_in_process(2, rf.Zigzag(), problem, {"mask": rf.Documents([5, 11], causal=True)})
    results = attend_in_process(2, rf.Zigzag(), problem, {"mask": mask})
    for mine, other in zip(results, expected, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)


@layouts
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("borders", "heads"),
    [([0, 0, 5, 5, 12, 12], (4, 2)), ([0, 0, 0, 0, 1], (21, 7)), ([0, 0, 1, 1, 2, 2, 3], (2, 1)), ([0, 0, 0], (2, 1))],
    ids=str,
)
def test_R22_documents_may_be_empty(borders, heads, ranks, layout):
    problem = {"queries": borders[-1], "heads": heads}
    filled = sorted(set(borders))
    expected = dense(problem, mask=rf.Documents.from_cu_seqlens(filled, causal=True))
    mask = rf.Documents.from_cu_seqlens(borders, causal=True)
    for results in attend_in_process(ranks, layout, problem, {"mask": mask}):
        assert_all_close(results, expected, F64)


def alone(inputs, row, real, score):
    """What the oracle says about the real tokens of one batch row, on their own."""
    own = {name: x[row : row + 1, real] for name, x in inputs.items()}
    return dense_gradients(**own, mask=rf.Causal(), score=score)


@layouts
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("filling", [1e4, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("score", [rf.Score(), rf.Score(softcap=3.0, alibi=(0.1, 0.2))], ids=["plain", "softcap"])
def test_R33_R34_padded_batches(side, filling, score, layout):
    """The mask as collators give it, sharded like the tokens; what lies in the padding has no effect, be it NaN."""
    lengths = [12, 7 if side == "right" else 5]
    is_real = torch.zeros(2, 12, dtype=torch.bool)
    for row, n in enumerate(lengths):
        is_real[row, :n] = True
    is_real = is_real if side == "right" else is_real.flip(1)
    inputs = draw(batch=2, queries=12, heads=(2, 1), dtype=F64)
    for x in inputs.values():
        x[~is_real] = filling

    def step(ring):
        mask = rf.Padding.from_mask(ring.gather(ring.shard(is_real))) & rf.Causal()
        return attend_sharded(ring, **inputs, mask=mask, score=score)

    for results in in_process(2, layout, step):
        for row in range(2):
            real = is_real[row]
            for name, x in alone(inputs, row, real, score).items():
                assert_close(results[name][row : row + 1, real], x, F64, name)
                assert (results[name][row, ~real] == (-torch.inf if name == "lse" else 0)).all(), name


def test_R33_a_padding_mask_of_the_wrong_shape_is_refused():
    q = torch.zeros(2, 12, 2, 4)
    for shape in ((12,), (2, 12, 1), (1, 1, 12, 12)):
        with pytest.raises(ValueError, match="a mask of shape"):
            rf.Padding.from_mask(torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="made for 3 batch rows, q has 2"):
        rf.attention(q, q, q, mask=rf.Padding.from_mask(torch.ones(3, 12).bool()))
    with pytest.raises(ValueError, match="made for 11 tokens, the sequence has 12"):
        rf.attention(q, q, q, mask=rf.Padding.from_mask(torch.ones(2, 11).bool()))


def test_R21_key_lengths_per_batch_row():
    """Rows of 16, 9 and 1 real keys, queries of another length."""
    problem = {"batch": 3, "queries": 5, "keys": 16, "heads": (2, 1)}
    mask = rf.Padding.right([16, 9, 1], length=16, keys_only=True)
    for results in attend_in_process(2, rf.Zigzag(), problem, {"mask": mask}):
        assert_all_close(results, dense(problem, mask=mask), F64)


@layouts
def test_R26_keys_that_the_ranks_do_not_divide(layout):
    """Two queries, five keys, three of them on one rank."""
    for results in in_process(2, layout, partial(attend_sharded, **last_two_of(5), mask=rf.Causal())):
        assert results["out"].flatten().tolist() == pytest.approx([1.5, 2.0])


@layouts
def test_R35_a_prefix_is_seen_in_both_directions(layout):
    """The prefix of 5 ends inside rank 1 of a contiguous layout."""
    out, seen, _, _ = probed(4, layout, 16, rf.Prefix(5))
    assert out == pytest.approx([2.0] * 5 + [i / 2 for i in range(5, 16)])
    assert seen == pytest.approx([5.0] * 5 + [i + 1 for i in range(5, 16)])


@layouts
def test_first_tokens_and_a_window(layout):
    """A union of two intervals: means of positions 0, 1 and of the last three."""
    out, seen, _, _ = probed(4, layout, 16, rf.FirstKeys(2) & rf.Causal() | rf.Window(2, 0))
    assert seen == pytest.approx([1, 2, 3, 4] + [5] * 12)
    assert out == pytest.approx([0, 0.5, 1, 1.5] + [(0 + 1 + 3 * i - 3) / 5 for i in range(4, 16)])


LAYERS = 6
MANY = {"1": [128], "16": [8] * 16, "64": [2] * 64}


def work_of_documents(lengths, layers=LAYERS):
    """(calls of the backend, messages, times that index tensors were made) of several layers over one batch, by rank."""

    def step(ring):
        mask = rf.Documents(lengths, causal=True)
        q, k, v = (ring.shard(torch.randn(1, 128, 2, 4)).requires_grad_() for _ in range(3))
        for _ in range(layers):
            rf.attention(q, k, v, ring=ring, mask=mask).sum().backward()

    calls, made = [], []
    forward, form = Reference.forward, Plan._form_bounds
    with (
        mock.patch.object(Reference, "forward", lambda *a, **o: (calls.append(1), forward(*a, **o))[1]),
        mock.patch.object(Plan, "_form_bounds", lambda *a: (made.append(1), form(*a))[1]),
    ):
        in_process(4, rf.Striped(), step)
    return len(calls), len(made)


def test_R78_work_does_not_grow_with_the_number_of_documents():
    """Of 128 tokens on 4 ranks; and index tensors are made once per batch and rank, not per layer."""
    work = {name: work_of_documents(lengths) for name, lengths in MANY.items()}
    every_source = 4 * 4 * LAYERS
    assert work["1"] == (every_source, 4)
    assert all(calls <= every_source and made == 4 for calls, made in work.values())
