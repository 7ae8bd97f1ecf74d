"""The oracle on numbers that can be checked by hand."""

import math

import pytest
import torch

import ringflash as rf
from ringflash.testing.oracle import dense_attention, dense_gradients, visible
from tests.rings import probe

CAUSAL_MEANS = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
HARMONIC = [2.7179, 1.7179, 1.2179, 0.8845, 0.6345, 0.4345, 0.2679, 0.125]  # dv_j = H(8) - H(j)


def drawn(seen):
    """Rows of dots and crosses, a row per query."""
    return ["".join("x" if s else "." for s in row) for row in seen.tolist()]


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (rf.Full(), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (rf.Causal(), ["x...", "xx..", "xxx.", "xxxx"]),
        (rf.Window(1, 0), ["x...", "xx..", ".xx.", "..xx"]),
        (rf.Window(None, 1), ["xx..", "xxx.", "xxxx", "xxxx"]),
        (rf.Window(0, None), ["xxxx", ".xxx", "..xx", "...x"]),
        (rf.Documents([1, 2], causal=False, padding=1), ["x...", ".xx.", ".xx.", "...."]),
        (rf.Documents([0, 3, 1], causal=True), ["x...", "xx..", "xxx.", "...x"]),
        (rf.Documents([3, 1], causal=True) & rf.Window(1, 1), ["x...", "xx..", ".xx.", "...x"]),
        (rf.Prefix(3), ["xxx.", "xxx.", "xxx.", "xxxx"]),
        (rf.Chunked(3), ["xxx.", "xxx.", "xxx.", "...x"]),
        (rf.Chunked(2) & rf.Causal(), ["x...", "xx..", "..x.", "..xx"]),
        (rf.FirstKeys(2) & rf.Causal(), ["x...", "xx..", "xx..", "xx.."]),
        (rf.FirstKeys(1) & rf.Causal() | rf.Window(0, 0), ["x...", "xx..", "x.x.", "x..x"]),
        (rf.Padding.right(3, length=4), ["xxx.", "xxx.", "xxx.", "...."]),
        (rf.Padding.left(3, length=4) & rf.Causal(), ["....", ".x..", ".xx.", ".xxx"]),
        (rf.Padding.right(3, length=4, keys_only=True), ["xxx.", "xxx.", "xxx.", "xxx."]),
    ],
    ids=str,
)
def test_masks_show_what_their_sentence_says(mask, picture):
    assert drawn(visible(mask, 4, 4)[0]) == picture


def test_masks_with_batch_rows_show_each_row_its_own():
    rows = visible(rf.Documents([[1, 3], [4]], causal=False), 4, 4)
    assert drawn(rows[0]) == ["x...", ".xxx", ".xxx", ".xxx"]
    assert drawn(rows[1]) == ["xxxx"] * 4
    assert drawn(visible(rf.Padding.right([4, 1], length=4), 4, 4)[1]) == ["x...", "....", "....", "...."]
    assert drawn(visible(rf.Prefix((0, 2)), 2, 2)[1]) == ["xx", "xx"]


def test_the_last_query_stands_at_the_last_key():
    assert drawn(visible(rf.Causal(), 2, 5)[0]) == ["xxxx.", "xxxxx"]
    assert drawn(visible(rf.Causal(), 4, 2)[0]) == ["..", "..", "x.", "xx"]
    assert drawn(visible(rf.Window(1, 0), 2, 4)[0]) == [".xx.", "..xx"]


def test_a_mask_without_definition_is_refused():
    class Checkered(rf.Mask):
        def bounds(self, positions):
            raise NotImplementedError

    with pytest.raises(TypeError, match="no definition of Checkered"):
        visible(Checkered(), 2, 2)


def test_the_probe_input_gives_means_counts_and_harmonic_numbers():
    results = dense_gradients(**probe(8), mask=rf.Causal())
    assert results["out"].flatten().tolist() == pytest.approx(CAUSAL_MEANS)
    assert results["lse"].exp().flatten().tolist() == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])
    assert results["dv"].flatten().tolist() == pytest.approx(HARMONIC, abs=5e-5)
    assert results["dk"].abs().max() == 0


def test_rows_without_keys_are_zero_and_minus_infinity():
    """R03, by hand: 6 queries over 4 keys."""
    zeros = torch.zeros(1, 6, 1, 4)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None, None]
    results = dense_gradients(zeros, zeros[:, :4], v, rf.Causal(), torch.full((1, 6, 1, 1), 1e3))
    assert results["out"].flatten().tolist() == pytest.approx([0, 0, 1, 1.5, 2, 2.5])
    assert results["lse"].exp().flatten().tolist() == pytest.approx([0, 0, 1, 2, 3, 4])
    assert not any(results[name].isnan().any() for name in ("dq", "dk", "dv"))


def test_scale_is_one_over_root_head_dim_or_what_is_given():
    q = torch.ones(1, 1, 1, 4)
    keys = torch.tensor([1.0, 0.0]).expand(1, 4, 2).mT.reshape(1, 2, 1, 4)  # scores 4 and 0, before scaling
    v = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1)
    for scale, used in ((None, 0.5), (1.0, 1.0), (0.0, 0.0)):
        out, lse = dense_attention(q, keys, v, rf.Full(), rf.Score(scale=scale))
        weight = torch.tensor(4 * used).exp()
        assert float(out) == pytest.approx(float(weight / (weight + 1)))
        assert float(lse) == pytest.approx(float((weight + 1).log()))


def test_query_heads_use_key_heads_in_contiguous_groups():
    """R20, by hand: v of key head h is h."""
    v = torch.arange(3.0).reshape(1, 1, 3, 1).expand(1, 2, 3, 1)
    out, _ = dense_attention(torch.rand(1, 2, 6, 4), torch.rand(1, 2, 3, 4), v, rf.Full())
    assert out[0, 0, :, 0].tolist() == pytest.approx([0, 0, 1, 1, 2, 2])


def test_the_gradient_of_lse_is_the_weight_of_each_key():
    """One query of ones over keys of score 4 and 0: dk is weight * q * scale."""
    q = torch.ones(1, 1, 1, 4)
    keys = torch.tensor([1.0, 0.0]).expand(1, 4, 2).mT.reshape(1, 2, 1, 4)
    nothing = torch.zeros(1, 1, 1, 1)
    results = dense_gradients(q, keys, torch.zeros(1, 2, 1, 1), rf.Full(), nothing, torch.ones(1, 1, 1), scale=1.0)
    weight = float(torch.sigmoid(torch.tensor(4.0, dtype=torch.float64)))
    assert results["dk"][0, :, 0, 0].tolist() == pytest.approx([weight, 1 - weight])
    assert results["dq"][0, 0, 0].tolist() == pytest.approx([weight] * 4)


def test_scores_by_hand():
    """One query, two keys with scores 2 and 0: what each term makes of them."""
    q = torch.tensor([2.0]).reshape(1, 1, 1, 1)
    k = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1)
    v = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1)

    def weight(**terms):
        return float(dense_attention(q, k, v, rf.Full(), rf.Score(scale=1.0, **terms))[0])

    def share(first, *others):
        return math.exp(first) / (math.exp(first) + sum(map(math.exp, others)))

    assert weight() == pytest.approx(share(2, 0))
    assert weight(softcap=3.0) == pytest.approx(share(3 * math.tanh(2 / 3), 0))
    # The query stands at the last key: one token away from the first.
    assert weight(alibi=(0.5,)) == pytest.approx(share(2 - 0.5, 0))
    assert weight(sinks=torch.tensor([1.0])) == pytest.approx(share(2, 0, 1))
    assert weight(softcap=3.0, alibi=(0.5,)) == pytest.approx(share(3 * math.tanh(2 / 3) - 0.5, 0))
    kept = torch.tensor([True, False]).reshape(1, 1, 1, 2)
    out, _ = dense_attention(q, k, v, rf.Full(), rf.Score(scale=1.0, dropout=0.75, seed=1), kept)
    assert float(out) == pytest.approx(4 * share(2, 0))
