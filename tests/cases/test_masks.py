"""Section C of the cases: who sees whom, read from numbers that can be checked by hand."""

from functools import partial

import pytest
import torch

import ringflash as rf
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
def test_padding_that_holds_huge_numbers_has_no_effect(layout):
    """R33, as far as one packing for the batch says it: the padding of 12 - 7 tokens is full of 1e4."""
    mask = rf.Documents([7], causal=False, padding=5)
    inputs = draw(queries=12, heads=(2, 1), dtype=torch.float32)
    for name in ("q", "k", "v", "dout"):
        inputs[name][:, 7:] = 1e4
    inputs["dlse"] = None
    real = {name: x[:, :7] for name, x in inputs.items() if x is not None}
    expected = dense_gradients(**real, mask=rf.Full())
    for results in in_process(2, layout, partial(attend_sharded, **inputs, mask=mask)):
        for name, x in expected.items():
            assert_close(results[name][:, :7], x, torch.float32, name)
            assert (results[name][:, 7:] == (-torch.inf if name == "lse" else 0)).all()
