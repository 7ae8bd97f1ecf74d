import numpy as np
import pytest
import torch

import ringflash as rf
from ringflash.schedule.mask import Intersection
from ringflash.testing.oracle import visible


def test_intersections_are_canonical_values():
    causal, window = rf.Causal(), rf.Window(3, None)
    assert causal & rf.Full() == causal
    assert rf.Full() & rf.Full() == rf.Full()
    assert causal & causal == causal
    assert (causal & window) & causal == Intersection((causal, window))
    assert hash(causal & window) == hash(rf.Causal() & rf.Window(3, None))


def test_masks_of_different_lengths_do_not_combine():
    with pytest.raises(ValueError, match=r"different sequence lengths \[4, 5\]"):
        rf.Documents([4], causal=True) & rf.Documents([5], causal=True)


@pytest.mark.parametrize(
    "form",
    [
        [0, 3, 3, 8],
        (0, 3, 3, 8),
        torch.tensor([0, 3, 3, 8], dtype=torch.int32),
        torch.tensor([0, 3, 3, 8], dtype=torch.int64),
        torch.tensor([0, 3, 3, 8]).clone(),
        torch.tensor([9, 0, 3, 3, 8])[1:],  # a view with a storage offset
        torch.tensor([0, 9, 3, 9, 3, 9, 8])[::2],
    ],
    ids=["list", "tuple", "int32", "int64", "clone", "offset", "strided"],
)
def test_cu_seqlens_in_any_form_are_the_same_mask(form):
    """R32: the decision is by value."""
    assert rf.Documents.from_cu_seqlens(form, causal=True) == rf.Documents([3, 0, 5], causal=True)


def test_cu_seqlens_leave_the_rest_of_the_length_as_padding():
    assert rf.Documents.from_cu_seqlens([0, 7], causal=False, length=8) == rf.Documents([7], causal=False, padding=1)


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (rf.Documents(np.array([[3, 5], [8, 0]]), causal=True), rf.Documents([[3, 5], [8, 0]], causal=True)),
        (rf.Documents(torch.tensor([[3, 5], [8, 0]]), causal=True), rf.Documents(((3, 5), (8, 0)), causal=True)),
        (
            rf.Documents.from_position_ids(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 0]]), causal=True),
            rf.Documents([[3, 1], [1, 2, 1]], causal=True),
        ),
        (
            rf.Documents.from_document_ids([7, 7, 2, 0, 0], causal=False, padding_id=0),
            rf.Documents([2, 1], causal=False, padding=2),
        ),
        (
            rf.Documents.from_document_ids(torch.tensor([[1, 1, 2], [5, -1, -1]]), causal=False, padding_id=-1),
            rf.Documents([[2, 1], [1]], causal=False, padding=[0, 2]),
        ),
        (
            rf.Padding.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])),
            rf.Padding([0, 1, 0], [2, 3, 0], length=3),
        ),
        (rf.Padding.from_mask(torch.ones(2, 3).bool()), rf.Padding([0, 0], [3, 3], length=3)),
        (rf.Causal() & rf.Window(3, 3), rf.Window(3, 3) & rf.Causal()),
        (rf.Causal() & rf.Full() & rf.Causal(), rf.Causal()),
    ],
    ids=range(9),
)
def test_forms_of_the_same_rule_are_the_same_mask(made, same):
    assert made == same and hash(made) == hash(same) and made.fingerprint == same.fingerprint


def test_integers_of_numpy_are_integers():
    assert rf.Window(np.int32(3), np.int64(0)) == rf.Window(3, 0)
    assert rf.Documents(np.array([3, 5], np.uint16), causal=True) == rf.Documents([3, 5], causal=True)


def test_no_position_ids_are_no_documents():
    assert rf.Documents.from_position_ids([], causal=True) == rf.Documents([], causal=True)


def test_a_message_names_a_long_mask_shortly_and_its_fingerprint_holds_all_of_it():
    packed = [list(range(1, 500)), [*range(1, 499), 500]]
    a, b = (rf.Documents(lengths, causal=True) for lengths in packed)
    assert len(str(a)) < 120 and str(a) == str(b)
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == rf.Documents(packed[0], causal=True).fingerprint


def test_restarting_position_ids_are_document_borders():
    assert rf.Documents.from_position_ids([0, 1, 2, 0, 0, 1], causal=True) == rf.Documents([3, 1, 2], causal=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rf.Window(-1, 0), ValueError, "left = -1"),
        (lambda: rf.Window(1.5, 0), TypeError, "Window: left is float; must be an integer >= 0"),
        (lambda: rf.Window(0, True), TypeError, "Window: right is bool; must be an integer >= 0"),
        (lambda: rf.Window(10**30, 0), ValueError, r"left = 10+; must be >= 0 and < 2\*\*62"),
        (lambda: rf.Documents(8, causal=True), TypeError, "lengths: is int; must be a list, tuple, array or tensor"),
        (lambda: rf.Documents({8, 3}, causal=True), TypeError, "lengths: is set; must be a list"),
        (lambda: rf.Documents({8: 3}, causal=True), TypeError, "lengths: is dict; must be a list"),
        (lambda: rf.Documents([3], causal=True, padding=1.0), TypeError, "padding is float; must be an integer"),
        (lambda: rf.Documents.from_cu_seqlens([0, 3], causal=True, length=True), TypeError, "length is bool"),
        (lambda: rf.Documents([3, -1], causal=True), ValueError, r"lengths\[1\] = -1"),
        (lambda: rf.Documents([3.0], causal=True), TypeError, "holds 3.0 of type float"),
        (lambda: rf.Documents(torch.tensor([3.0]), causal=True), TypeError, "float32; must be 1-D and integer"),
        (lambda: rf.Documents(torch.tensor([[[3]]]), causal=True), TypeError, "must be 1-D"),
        (lambda: rf.Documents(np.array(6), causal=True), TypeError, r"lengths: an array of shape \(\) and int64"),
        (lambda: rf.Documents([torch.tensor(3.0)], causal=True), TypeError, "holds tensor"),
        (lambda: rf.Documents([torch.tensor(True)], causal=True), TypeError, "holds tensor"),
        (lambda: rf.Documents(torch.tensor([3], device="meta"), causal=True), TypeError, "on meta; must be a plain"),
        (
            lambda: rf.Documents(torch.tensor([3]).to_sparse(), causal=True),
            TypeError,
            "sparse_coo on cpu; must be a plain",
        ),
        (lambda: rf.Documents([[3], [4]], causal=True), ValueError, r"sum to \[3, 4\]; must be equal, pad them"),
        (lambda: rf.Documents([[3], [-4]], causal=True), ValueError, r"lengths\[1\]\[0\] = -4"),
        (lambda: rf.Documents([[3], 4], causal=True), TypeError, r"lengths\[1\]: is int; must be a list"),
        (
            lambda: rf.Documents([3], causal=True, padding=[1, 2]),
            ValueError,
            "padding for 2 batch rows, lengths for all",
        ),
        (lambda: rf.Window(torch.tensor(True), 0), TypeError, "left is torch.bool tensor"),
        (lambda: rf.Chunked(0), ValueError, "Chunked: size = 0; must be >= 1"),
        (lambda: rf.Prefix(-1), ValueError, "Prefix: tokens = -1"),
        (lambda: rf.Prefix([]), ValueError, "Prefix: tokens is empty"),
        (lambda: rf.Prefix(1.5), TypeError, "Prefix: tokens is float"),
        (lambda: rf.FirstKeys(None), TypeError, "FirstKeys: tokens is NoneType"),
        (lambda: rf.Padding(3, 2, length=4), ValueError, "must be 0 <= start <= stop <= length = 4"),
        (lambda: rf.Padding.right(5, length=4), ValueError, "must be 0 <= start <= stop <= length = 4"),
        (lambda: rf.Padding.left([1, 5], length=4), ValueError, "lengths = .1, 5.; must be <= length = 4"),
        (lambda: rf.Padding([1, 2], [3, 3, 3], length=4), ValueError, r"for \[2, 3\] batch rows; must be equal"),
        (lambda: rf.Padding.from_mask(torch.ones(2, 3, 4)), ValueError, r"shape \(2, 3, 4\) and torch.float32"),
        (lambda: rf.Padding.from_mask(torch.tensor([[1, 0, 1]])), ValueError, "the mask has holes"),
        (lambda: rf.Padding.from_mask(torch.tensor([[1, 2, 2]])), ValueError, "other numbers than 0 and 1"),
        (lambda: rf.Padding.from_mask([[1, 1]]), TypeError, "the mask is list; must be a tensor"),
        (lambda: rf.Documents.from_document_ids([1, 2, 1], causal=True), ValueError, "hold 1 in several places"),
        (
            lambda: rf.Documents.from_document_ids([0, 1], causal=True, padding_id=0),
            ValueError,
            "hold 0 in several places",
        ),
        (lambda: rf.Documents.from_document_ids([1.0], causal=True), TypeError, "holds 1.0 of type float"),
        (lambda: rf.Padding.right(3, length=4) & rf.Documents([5], causal=True), ValueError, r"lengths \[4, 5\]"),
        (lambda: rf.Prefix((1, 2)) & rf.Prefix((1, 2, 3)), ValueError, r"numbers of batch rows \[2, 3\]"),
        (lambda: rf.Documents([3], causal="no"), TypeError, "causal is str; must be True or False"),
        (lambda: rf.Documents([3], causal=True, padding=-1), ValueError, "padding = -1"),
        (lambda: rf.Documents.from_cu_seqlens([1, 3], causal=True), ValueError, "must start with 0"),
        (lambda: rf.Documents.from_cu_seqlens([], causal=True), ValueError, "must start with 0"),
        (lambda: rf.Documents.from_cu_seqlens([0, 5, 3], causal=True), ValueError, "must not decrease"),
        (lambda: rf.Documents.from_cu_seqlens([0, 9], causal=True, length=8), ValueError, "past length = 8"),
        (lambda: rf.Documents.from_position_ids([1, 2], causal=True), ValueError, "must start at 0"),
        (lambda: rf.Documents.from_position_ids([0, 2], causal=True), ValueError, r"position_ids\[1\] = 2 after 0"),
    ],
)
def test_bad_masks_are_refused_with_the_argument_and_its_value(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_causal_must_be_named_for_documents():
    with pytest.raises(TypeError, match="causal"):
        rf.Documents([3])


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (rf.Window(1, 0) | rf.FirstKeys(2) & rf.Causal(), "put the mask that begins first first"),
        # The first mask stops showing keys in the middle that the window still shows.
        (rf.FirstKeys(4) & rf.Chunked(8) | rf.Window(5, 0), "moves back from one query to the next"),
        (rf.FirstKeys(4) & rf.Documents([5, 6, 5], causal=True) | rf.Window(5, 0), "moves back from one query"),
    ],
    ids=["order", "chunks", "documents"],
)
def test_a_union_that_is_no_interval_past_the_first_mask_is_refused_on_every_rank(union, message):
    for rank in range(4):
        with pytest.raises(ValueError, match=message):
            rf.plan(union.parts[1], rf.Contiguous(), 16, rank, 4)


def test_what_a_union_adds_where_its_first_mask_shows_nothing():
    """All of the second."""
    union = rf.FirstKeys(1) & rf.Documents([6], causal=True, padding=10) | rf.Window(3, 0)
    lo, hi = union.parts[1].bounds(torch.arange(16))
    column = torch.arange(16)
    seen = (lo[..., None] <= column) & (column < hi[..., None])
    assert torch.equal(seen, visible(rf.Window(3, 0), 16, 16) & ~visible(union.parts[0], 16, 16))


def test_unions_join_and_cross():
    a, b, c = rf.FirstKeys(2) & rf.Causal(), rf.Window(3, 0), rf.Causal()
    three = a | b | c
    assert len(three.parts) == len((a | (b | c)).parts) == 3
    assert torch.equal(visible(a | (b | c), 9, 9), visible(three, 9, 9))
    assert torch.equal(visible(three, 9, 9), visible(rf.Causal(), 9, 9))
    crossed = (a | b) & (a | c)
    assert torch.equal(visible(crossed, 9, 9), visible(a | b, 9, 9))
    with pytest.raises(TypeError):
        _ = (a | b) & 3


def test_a_union_is_cut_by_and_in_all_its_parts():
    documents = rf.Documents([5, 4], causal=True)
    union = (rf.FirstKeys(2) | rf.Window(1, 0)) & documents
    assert union == documents & (rf.FirstKeys(2) | rf.Window(1, 0))
    assert torch.equal(
        visible(union, 9, 9),
        (visible(rf.FirstKeys(2), 9, 9) | visible(rf.Window(1, 0), 9, 9)) & visible(documents, 9, 9),
    )
