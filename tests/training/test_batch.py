"""Shift, then shard: every label is the next token of its document, whoever holds it."""

import pytest
import torch

import ringflash as rf
from ringflash.training import position_ids, shift_labels
from tests.rings import LAYOUTS, in_process, name_of

TOKENS = torch.arange(10, 18)[None]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (rf.Contiguous(), [[11, 12, 13, 14], [15, 16, 17, -100]]),
        (rf.Zigzag(), [[11, 12, 17, -100], [13, 14, 15, 16]]),
        (rf.Striped(), [[11, 13, 15, 17], [12, 14, 16, -100]]),
    ],
    ids=name_of,
)
def test_labels_are_shifted_over_shard_borders(layout, expected):
    """R39, its numbers."""
    labels = in_process(2, layout, lambda ring: ring.shard(shift_labels(TOKENS))[0].tolist())
    assert labels == expected
    assert sum(label != -100 for shard in labels for label in shard) == 7


def test_the_last_token_of_every_document_has_no_label():
    labels = shift_labels(TOKENS, lengths=[3, 0, 1, 4])
    assert labels.tolist() == [[11, 12, -100, -100, 15, 16, 17, -100]]


def test_every_row_of_a_batch_is_shifted_by_itself():
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, -100], [5, 6, -100]]


def test_the_ignored_label_can_be_named_and_tokens_are_not_written_to():
    tokens = TOKENS.clone()
    assert shift_labels(tokens, ignore_index=-1).tolist() == [[11, 12, 13, 14, 15, 16, 17, -1]]
    assert torch.equal(tokens, TOKENS)


def test_one_token_has_no_label_and_no_token_is_fine():
    assert shift_labels(torch.tensor([[5]])).tolist() == [[-100]]
    assert shift_labels(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


@pytest.mark.parametrize(("lengths", "total"), [([3, 4], 7), ([9], 9), ([], 0)], ids=str)
def test_documents_of_another_length_are_refused(lengths, total):
    with pytest.raises(ValueError, match=f"shift_labels: lengths sum to {total}, the sequence has 8 tokens"):
        shift_labels(TOKENS, lengths=lengths)


def test_positions_restart_with_every_document():
    assert position_ids([3, 0, 1, 2]).tolist() == [0, 1, 2, 0, 0, 1]
    assert position_ids([]).tolist() == []
    assert position_ids([2]).dtype == torch.int64


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_positions_are_cut_like_tokens(layout):
    """R62: packed documents [5, 11] with restarting positions."""
    whole = position_ids([5, 11])
    assert rf.Documents.from_position_ids(whole, causal=True) == rf.Documents([5, 11], causal=True)
    for ring_positions, mine in in_process(4, layout, lambda ring: (ring.positions(16), ring.shard(whole, 0))):
        assert mine.tolist() == [p if p < 5 else p - 5 for p in ring_positions.tolist()]
