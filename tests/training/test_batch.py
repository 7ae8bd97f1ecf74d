"""Shift, then shard: every label is the next token of its document, whoever holds it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringflash as rf
from ringflash.training import documents, position_ids, shard_batch, shift_labels
from tests.rings import LAYOUTS, Untouchable, in_process, name_of

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


@given(real=st.lists(st.integers(0, 6), min_size=1, max_size=3), padded=st.integers(0, 3), left=st.booleans())
def test_positions_of_padded_samples_count_their_real_tokens(real, padded, left):
    """R34: 0-based positions per sample, whichever side is padded."""
    S = max(real) + padded
    mask = torch.tensor([[(p >= S - n) if left else (p < n) for p in range(S)] for n in real], dtype=torch.bool)
    positions = position_ids(mask.view(len(real), S))
    assert positions.dtype == torch.int64
    for n, row, own in zip(real, positions, mask, strict=True):
        assert row[own].tolist() == list(range(n))
        assert not row[~own].any()


def test_R34_left_padded_positions():
    mask = torch.arange(12)[None] >= torch.tensor([[0], [7]])
    assert position_ids(mask)[1].tolist() == [0] * 7 + [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given_documents", "error", "message"),
    [
        (torch.ones(2, 4, dtype=torch.int64), TypeError, r"shape \(2, 4\) and torch.int64; .* attention_mask.bool"),
        (torch.ones(4, dtype=torch.bool), ValueError, r"mask of shape \(4,\); must be \[B, S\]"),
        ([3, -1], ValueError, "a length = -1; must be >= 0"),
        ([3, 1.0], TypeError, "documents: holds 1.0 of type float"),
    ],
)
def test_what_has_no_positions_is_refused(given_documents, error, message):
    with pytest.raises(error, match=f"position_ids: .*{message}|position_ids: {message}"):
        position_ids(given_documents)


def test_padding_has_no_labels():
    assert shift_labels(TOKENS, lengths=[3, 2], padding=3).tolist() == [[11, 12, -100, 14, -100, -100, -100, -100]]
    assert shift_labels(TOKENS, padding=6).tolist() == [[11] + [-100] * 7]
    assert shift_labels(TOKENS, padding=8).tolist() == [[-100] * 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": 9}, "padding = 9; the sequence has 8 tokens"),
        ({"padding": -1}, "padding = -1; must be >= 0"),
        ({"lengths": [8], "padding": 1}, "lengths sum to 8 and padding is 1, the sequence has 8 tokens"),
        ({"lengths": [9, -1]}, "a length = -1; must be >= 0"),
    ],
)
def test_padding_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=f"shift_labels: {message}"):
        shift_labels(TOKENS, **options)


PACKED = {
    "lengths": [3, 0, 5],
    "cu_seqlens": torch.tensor([0, 3, 3, 8], dtype=torch.int32),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
}


@pytest.mark.parametrize("name", PACKED)
def test_every_description_of_packed_documents_gives_one_packing(name):
    packing = documents(**{name: PACKED[name]}, causal=False)
    lengths = (3, 5) if name == "position_ids" else (3, 0, 5)
    assert packing.mask == rf.Documents(lengths, causal=False)
    assert packing.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert packing.labels(TOKENS).tolist() == [[11, 12, -100, 14, 15, 16, 17, -100]]


@pytest.mark.parametrize("name", ["lengths", "cu_seqlens"])
def test_what_a_length_leaves_is_padding(name):
    packing = documents(**{name: PACKED[name]}, causal=True, length=10)
    assert packing.mask == rf.Documents([3, 0, 5], causal=True, padding=2)
    assert packing.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert packing.labels(torch.arange(10)[None], ignore_index=-1).tolist() == [[1, 2, -1, 4, 5, 6, 7, -1, -1, -1]]


@pytest.mark.parametrize(
    "description",
    [
        {"lengths": [[3, 2], [5]], "length": 6},
        {"lengths": torch.tensor([[3, 2], [5, 0]]), "length": 6},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]])},
    ],
    ids=["lists", "tensor", "position_ids"],
)
def test_batch_rows_may_be_packed_differently(description):
    """The last token is padding, but for position ids, which make a document of it."""
    packing = documents(**description, causal=True)
    assert packing.mask.batch == 2 and packing.mask.length == 6
    assert packing.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
    labels = packing.labels(torch.arange(12).reshape(2, 6)).tolist()
    assert labels == [[1, 2, -100, 4, -100, -100], [7, 8, 9, 10, -100, -100]]
    with pytest.raises(ValueError, match=r"labels: tokens has shape \(1, 6\), but the batch was packed as Documents"):
        packing.labels(torch.arange(6)[None])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], "tokens is list; must be a tensor"),
        (torch.zeros(2, 3), "tokens is a torch.float32 tensor"),
        (torch.zeros(2, 3).bool(), "tokens is a torch.bool tensor"),
        (torch.zeros(2, 3, dtype=torch.uint8), "tokens is a torch.uint8 tensor"),
        (torch.tensor(3), "tokens has no axis"),
    ],
)
def test_tokens_that_cannot_hold_labels_are_refused(tokens, message):
    with pytest.raises(TypeError, match=f"shift_labels: {message}"):
        shift_labels(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "documents: got nothing; must be exactly one of lengths, cu_seqlens, position_ids"),
        ({"lengths": [8], "cu_seqlens": [0, 8]}, r"documents: got \['lengths', 'cu_seqlens'\]; must be exactly one"),
        ({"lengths": [8], "length": 7}, "documents: lengths describe 8 tokens, length = 7; must be at most that"),
        ({"position_ids": [0, 1], "length": 3}, "documents: position_ids describe 2 tokens, length = 3; must be equal"),
        (
            {"lengths": [[8], [9, 1]], "length": 9},
            "documents: lengths describe 10 tokens, length = 9; must be at most that",
        ),
        ({"position_ids": [0, 2]}, r"position_ids\[1\] = 2 after 0"),
        ({"cu_seqlens": [1, 2]}, "must start with 0"),
    ],
)
def test_documents_that_contradict_themselves_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        documents(**options, causal=True)


@given(
    B=st.integers(1, 4), S=st.integers(0, 9), layout=st.sampled_from(LAYOUTS), rank=st.integers(0, 2), data=st.data()
)
def test_batches_are_cut_like_their_parts_and_send_nothing(B, S, layout, rank, data):
    ring = rf.Ring(layout=layout, transport=Untouchable(rank, 3))
    shapes = {"ids": (B, S), "positions": (3, B, S), "mask": (B, 1, 1, S), "time_first": (S, B)}
    batch = {name: torch.randn(shape) for name, shape in shapes.items()}
    dims = {"ids": 1, "positions": 2, "mask": 3, "time_first": 0}
    dims = {name: data.draw(st.sampled_from([dim, dim - batch[name].dim()])) for name, dim in dims.items()}
    local = shard_batch(batch, ring, dims, length=data.draw(st.sampled_from([None, S])))
    mine = ring.positions(S)
    assert torch.equal(local["ids"], batch["ids"][:, mine])
    assert torch.equal(local["positions"], batch["positions"][:, :, mine])
    assert torch.equal(local["mask"], batch["mask"][..., mine])
    assert torch.equal(local["time_first"], batch["time_first"][mine])


def test_what_has_no_sequence_axis_is_passed_through():
    images, names = torch.ones(2, 3), ["a", "b"]
    local = shard_batch({"images": images, "names": names}, NOWHERE, {"images": None, "names": None})
    assert local["images"] is images
    assert local["names"] is names


NOWHERE = rf.Ring(transport=Untouchable())
BATCH = {"ids": torch.zeros(3, 8), "positions": torch.zeros(3, 3, 8)}


@pytest.mark.parametrize(
    ("batch", "dims", "options", "error", "message"),
    [
        (BATCH, {"ids": 1}, {}, ValueError, "dims does not say where positions is cut; must name"),
        (
            BATCH,
            {"ids": 1, "positions": 2, "label": 1},
            {},
            ValueError,
            "dims names label; the batch has only ids, positions",
        ),
        (
            BATCH,
            {"ids": 1, "positions": 1},
            {},
            ValueError,
            "ids has 8 along axis 1, positions has 3 along axis 1; all must",
        ),
        (BATCH, {"ids": 0, "positions": 1}, {"length": 8}, ValueError, "ids has 3 .* whole sequence's length, 8"),
        (
            BATCH,
            {"ids": 1, "positions": 3},
            {},
            ValueError,
            r"dims\['positions'\] = 3; .* \(3, 3, 8\) has no such axis",
        ),
        (BATCH, {"ids": 1, "positions": "S"}, {}, TypeError, r"dims\['positions'\] is 'S'; must be an integer or None"),
        (BATCH, {"ids": True, "positions": 2}, {}, TypeError, r"dims\['ids'\] is True"),
        ({"ids": [1, 2]}, {"ids": 0}, {}, TypeError, "ids is list, dims gives it axis 0; must be a tensor, or None"),
        (BATCH, {"ids": 1, "positions": 2}, {"length": -1}, ValueError, "length = -1; must be >= 0"),
    ],
)
def test_R63_axes_that_are_not_declared_or_not_the_sequence_are_refused(batch, dims, options, error, message):
    with pytest.raises(error, match=f"shard_batch: .*{message}|shard_batch: {message}"):
        shard_batch(batch, NOWHERE, dims, **options)
