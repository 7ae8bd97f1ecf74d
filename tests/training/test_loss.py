"""Counting tokens over groups, the share of each rank, and what is refused before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import ringflash as rf
from ringflash.testing.compare import assert_close
from ringflash.training import BatchTokens, count_tokens, token_loss
from tests.rings import Untouchable, counted_calls, in_process, on_workers

LABELS = torch.tensor([[3, -100, 1, 0], [-100, -100, 2, 1]])
NOWHERE = rf.Ring(transport=Untouchable())


def drawn(dtype=torch.float64):
    return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_alone_it_is_the_mean_of_torch():
    logits = drawn().requires_grad_()
    tokens = count_tokens(LABELS, None, averaged_over=1)
    loss = token_loss(logits, LABELS, tokens)
    expected = functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    assert (int(tokens.count), tokens.averaged_over) == (5, 1)
    assert_close(loss, expected, torch.float64)
    assert_close(tokens.true_loss(loss), expected, torch.float64)
    assert_close(*(torch.autograd.grad(x, logits)[0] for x in (loss, expected)), torch.float64)


def test_a_label_to_ignore_can_be_named_once_for_counting_and_loss():
    labels = LABELS.masked_fill(LABELS == -100, 0)
    tokens = count_tokens(labels, None, averaged_over=1, ignore_index=0)
    expected = functional.cross_entropy(drawn().flatten(0, 1), labels.flatten(), ignore_index=0)
    assert int(tokens.count) == 4
    assert_close(token_loss(drawn(), labels, tokens), expected, torch.float64)


def test_sixteen_bit_logits_are_added_up_in_fp32():
    loss = token_loss(drawn(torch.bfloat16), LABELS.int(), count_tokens(LABELS.int(), None, averaged_over=1))
    expected = functional.cross_entropy(drawn(torch.bfloat16).double().flatten(0, 1), LABELS.flatten())
    assert loss.dtype == torch.float32
    assert_close(loss, expected, torch.float32)


def test_a_batch_without_valid_tokens_has_loss_and_gradient_zero():
    logits = drawn().requires_grad_()
    labels = torch.full_like(LABELS, -100)
    tokens = count_tokens(labels, None, averaged_over=1)
    loss = token_loss(logits, labels, tokens)
    loss.backward()
    assert [float(x) for x in (loss.detach(), tokens.true_loss(loss), logits.grad.abs().max())] == [0.0, 0.0, 0.0]


def test_the_true_loss_has_no_gradient():
    tokens = count_tokens(LABELS, None, averaged_over=1)
    assert not tokens.true_loss(token_loss(drawn().requires_grad_(), LABELS, tokens)).requires_grad


def uneven_micro_batches(ring):
    """Rank r has r micro batches and 10 r labels in each, and one that is empty."""
    labels = [torch.zeros(10 * ring.rank, dtype=torch.int64)] * ring.rank + [torch.zeros(2, 0, dtype=torch.int64)]
    return int(count_tokens(labels, ring, averaged_over=1).count)


def test_micro_batches_are_counted_whatever_their_number():
    assert in_process(3, rf.Zigzag(), uneven_micro_batches) == [50, 50, 50]


def calls_of_a_step(ring):
    """What is communicated to count, to form the loss of each of 3 micro batches, and to report."""
    calls = []
    with counted_calls() as counts:
        tokens = count_tokens([LABELS] * 3, ring.transport.group, averaged_over=2)
    calls.append(counts)
    with counted_calls() as counts:
        losses = torch.stack([token_loss(drawn(), LABELS, tokens) for _ in range(3)])
    calls.append(counts)
    with counted_calls() as counts:
        reported = tokens.true_loss(losses)
    return [*calls, counts], float(reported)


def test_a_step_counts_with_one_exchange_and_reports_with_one(workers):
    expected = functional.cross_entropy(drawn().flatten(0, 1), LABELS.flatten())
    for calls, reported in on_workers(workers, 2, rf.Zigzag(), calls_of_a_step):
        assert calls == [{"all_gather": 1}, {}, {"all_gather": 1}]
        assert reported == pytest.approx(float(expected))


def counts_by_group():
    """In every worker: labels that count its global rank + 1, over all, one axis and both axes of a mesh."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(world).reshape(2, -1), mesh_dim_names=("dp", "cp"))
    labels = torch.zeros(rank + 1, dtype=torch.int64)
    groups = [None, dist.group.WORLD, mesh, mesh["dp", "cp"], mesh["cp"], mesh["cp"].get_group(), rf.Ring(mesh["dp"])]
    counts = [int(count_tokens(labels, group, averaged_over=1).count) for group in groups]
    tokens = count_tokens(labels, mesh, averaged_over=world)
    bits = tokens.true_loss(torch.tensor(0.1) * (rank + 1)).item()
    try:
        count_tokens(labels, DeviceMesh("cpu", torch.arange(world).reshape(2, -1)), averaged_over=1)
    except ValueError as error:
        return counts, bits, str(error)


def test_every_form_of_group_counts_over_its_ranks(workers):
    results = workers.run(counts_by_group)
    for rank, (counts, bits, error) in enumerate(results):
        row = sum(range(1, 5)) if rank < 4 else sum(range(5, 9))
        column = (rank % 4 + 1) + (rank % 4 + 5)
        assert counts == [36, 36, 36, 36, row, row, column]
        assert bits == results[0][1] == pytest.approx(0.45)
        assert "group is a mesh of 2 dimensions without names; must have mesh_dim_names" in error


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: count_tokens([], NOWHERE, averaged_over=1), ValueError, "labels is an empty list"),
        (
            lambda: count_tokens(drawn(), NOWHERE, averaged_over=1),
            TypeError,
            "labels is a tensor of torch.float64; must",
        ),
        (lambda: count_tokens([LABELS, 3], NOWHERE, averaged_over=1), TypeError, "labels is int; must be an integer"),
        (lambda: count_tokens(LABELS > 0, NOWHERE, averaged_over=1), TypeError, "labels is a tensor of torch.bool"),
        (lambda: count_tokens(LABELS, NOWHERE, averaged_over=0), ValueError, "averaged_over = 0; must be >= 1"),
        (lambda: count_tokens(LABELS, NOWHERE, averaged_over=True), TypeError, "averaged_over is bool"),
        (
            lambda: count_tokens(LABELS, NOWHERE, averaged_over=4),
            ValueError,
            "averaged_over = 4, tokens are counted over 2 ranks; it must divide them",
        ),
        (lambda: count_tokens(LABELS, NOWHERE, averaged_over=1, ignore_index=1.0), TypeError, "ignore_index is float"),
        (lambda: count_tokens(LABELS, "cp", averaged_over=1), TypeError, "group is str; must be a ProcessGroup"),
    ],
)
def test_what_cannot_be_counted_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def alone():
    return count_tokens(LABELS, None, averaged_over=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: token_loss(drawn(), LABELS, 8), TypeError, "tokens is int; must come from count_tokens"),
        (lambda: token_loss(drawn(), drawn(), alone()), TypeError, "labels is a tensor of torch.float64"),
        (lambda: token_loss(LABELS, LABELS, alone()), TypeError, "logits is a tensor of torch.int64"),
        (lambda: token_loss(None, LABELS, alone()), TypeError, "logits is NoneType"),
        (
            lambda: token_loss(drawn()[:, :3], LABELS, alone()),
            ValueError,
            r"logits \(2, 3, 5\) do not fit labels \(2, 4\)",
        ),
        (
            lambda: token_loss(drawn()[..., 0], LABELS, alone()),
            ValueError,
            r"logits \(2, 4\) do not fit labels \(2, 4\)",
        ),
    ],
)
def test_what_has_no_loss_is_refused(call, error, message):
    with pytest.raises(error, match=f"token_loss: {message}"):
        call()


def test_tokens_are_a_value():
    assert isinstance(alone(), BatchTokens)
    with pytest.raises(AttributeError):
        alone().averaged_over = 2
