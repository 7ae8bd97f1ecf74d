"""Sums over each document are the same on every rank, and their gradients those of one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.testing.compare import assert_close
from ringflash.training import sequence_sums
from tests.rings import LAYOUTS, Untouchable, counted_calls, in_process, on_workers


def summed(ring, values, documents, weights):
    """Sums, and the gradient of a loss that every rank computes from them, gathered."""
    local = ring.shard(values.detach()).requires_grad_()
    sums = sequence_sums(local, documents, ring)
    (sums.square() * weights).sum().backward()
    return sums.detach(), ring.gather(local.grad, length=values.shape[1])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    padding=st.integers(0, 5),
    ranks=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
    batch=st.integers(1, 3),
)
def test_sums_and_gradients_are_those_of_one_process(lengths, padding, ranks, layout, batch):
    documents = rf.Documents(lengths, causal=True, padding=padding)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(batch, documents.length, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(batch, len(lengths), generator=generator, dtype=torch.float64)
    expected = torch.stack([x.sum(1) for x in values.split([*lengths, padding], dim=1)], dim=1)[:, :-1]
    (expected.square() * weights).sum().backward()
    for sums, gradient in in_process(ranks, layout, summed, values, documents, weights):
        assert_close(sums, expected, torch.float64)
        assert_close(gradient, values.grad, torch.float64)


def calls_of_sums(ring):
    documents = rf.Documents([5, 3], causal=True)
    local = ring.shard(torch.arange(8.0)[None]).bfloat16().requires_grad_()
    sequence_sums(local, documents, ring)  # the ranks compare documents once
    with counted_calls() as forward:
        sums = sequence_sums(local, documents, ring)
    with counted_calls() as backward:
        sums.sum().backward()
    return sums.tolist(), sums.dtype, forward, backward


def test_one_exchange_forward_and_none_backward(workers):
    expected = ([[10.0, 18.0]], torch.float32, {"all_gather": 1}, {})
    assert on_workers(workers, 3, rf.Striped(), calls_of_sums) == [expected] * 3


def other_documents(ring):
    sequence_sums(torch.ones(1, 4), rf.Documents([4 + ring.rank, 4 - ring.rank], causal=True), ring)


def test_ranks_with_other_documents_are_told():
    with pytest.raises(
        ValueError, match=r"sequence_sums: documents differs among the ranks .* rank 0: Doc.*, rank 1: Doc"
    ):
        in_process(2, rf.Zigzag(), other_documents)


RING, DOCUMENTS = rf.Ring(transport=Untouchable()), rf.Documents([5, 3], causal=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, DOCUMENTS, RING), TypeError, "values is NoneType; must be a floating point tensor"),
        ((torch.ones(1, 4).long(), DOCUMENTS, RING), TypeError, "values is torch.int64"),
        ((torch.ones(1, 4), [5, 3], RING), TypeError, "documents is list; must be a Documents mask"),
        ((torch.ones(1, 4), DOCUMENTS, None), TypeError, "ring is NoneType; must be a Ring"),
        ((torch.ones(4), DOCUMENTS, RING), ValueError, r"values has shape \(4,\); must be \[B, S_local\]"),
        ((torch.ones(1, 8), DOCUMENTS, RING), ValueError, r"rank 0 of 2 holds 8 tokens; .* documents.length = 8"),
    ],
)
def test_what_has_no_sums_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"sequence_sums: {message}"):
        sequence_sums(*arguments)


def test_documents_that_differ_by_batch_row():
    values = torch.arange(12.0).reshape(2, 6)
    documents = rf.Documents([[2, 3], [6]], causal=True, padding=[1, 0])
    for sums in in_process(2, rf.Zigzag(), lambda ring: sequence_sums(ring.shard(values), documents, ring)):
        assert sums.tolist() == [[0 + 1, 2 + 3 + 4], [51.0, 0.0]]
    with pytest.raises(ValueError, match="documents has 2 batch rows, values has 1"):
        sequence_sums(values[:1], documents, rf.Ring())
