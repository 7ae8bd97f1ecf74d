"""Ranks that call with different shapes get the same error everywhere, instead of a hang or of wrong numbers (R50)."""

import time

import pytest
import torch

import ringflash as rf
from ringflash.parallel.inprocess import run
from tests.rings import Untouchable, in_process, on_workers

PLAIN = {"batch": 1, "tokens": 8, "heads": (4, 2), "dim": 16, "value_dim": 16, "dtype": torch.float32}
# What rank 1 does otherwise, and what every rank is then told.
DIFFERENCES = {
    "tokens": (
        {"tokens": 7},
        "length differs among the ranks of the ring; rank 0: 16, rank 1: 14. Pass length="
        " where the ranks hold different numbers of tokens",
    ),
    "batch": (
        {"batch": 2},
        "batch differs among the ranks of the ring; rank 0: 1, rank 1: 2. All ranks of a ring need the same batch",
    ),
    "query_heads": ({"heads": (8, 2)}, "query heads differs among the ranks of the ring; rank 0: 4, rank 1: 8"),
    "key_heads": ({"heads": (4, 4)}, "key heads differs among the ranks of the ring; rank 0: 2, rank 1: 4"),
    "dim": ({"dim": 32}, "head_dim differs among the ranks of the ring; rank 0: 16, rank 1: 32"),
    "value_dim": ({"value_dim": 8}, "value_dim differs among the ranks of the ring; rank 0: 16, rank 1: 8"),
    "dtype": (
        {"dtype": torch.bfloat16},
        "dtype differs among the ranks of the ring; rank 0: torch.float32, rank 1: torch.bfloat16",
    ),
}


def tensors(batch, tokens, heads, dim, value_dim, dtype):
    shapes = [(heads[0], dim), (heads[1], dim), (heads[1], value_dim)]
    return [torch.zeros(batch, tokens, *shape, dtype=dtype) for shape in shapes]


def refusal(ring, otherwise):
    """The error of this rank when the last rank calls `otherwise`."""
    start = time.monotonic()
    shapes = PLAIN | otherwise if ring.rank == ring.ranks - 1 else PLAIN
    try:
        rf.attention(*tensors(**shapes), ring=ring)
    except ValueError as error:
        assert time.monotonic() - start < 10
        return str(error)
    return None


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told_the_field_and_each_ranks_value(name):
    otherwise, message = DIFFERENCES[name]
    assert in_process(2, rf.Zigzag(), refusal, otherwise) == [f"attention: {message}"] * 2


def refusals(ring):
    return [refusal(ring, otherwise) for otherwise, _ in DIFFERENCES.values()]


def test_every_process_is_told_the_field_and_each_ranks_value(workers):
    expected = [f"attention: {message}" for _, message in DIFFERENCES.values()]
    assert on_workers(workers, 2, rf.Zigzag(), refusals) == [expected] * 2


def test_all_ranks_are_listed_not_only_those_that_differ():
    message = "attention: batch differs among the ranks of the ring; rank 0: 1, rank 1: 1, rank 2: 1, rank 3: 5. "
    message += "All ranks of a ring need the same batch"
    assert in_process(4, rf.Zigzag(), refusal, {"batch": 5}) == [message] * 4


def test_repeatable_bits_are_wanted_by_all_or_none():
    """They come by another way home."""

    def step(member):
        x = torch.zeros(1, 8, 2, 4)
        with pytest.raises(ValueError, match="deterministic differs .* rank 0: True, rank 1: False"):
            rf.attention(x, x, x, ring=rf.Ring(transport=member), deterministic=member.rank == 0)
        return True

    assert all(run(2, step))


def test_layouts_that_differ_are_refused():
    def step(member):
        layout = rf.Striped() if member.rank else rf.Contiguous()
        try:
            rf.attention(*tensors(**PLAIN), ring=rf.Ring(layout=layout, transport=member))
        except ValueError as error:
            return str(error)

    first, second = run(2, step)
    assert first == second
    assert first.startswith("attention: layout differs among the ranks of the ring; rank 0: Contiguous() [")
    assert ", rank 1: Striped() [" in first


def test_layouts_that_differ_far_inside_are_refused():
    def step(member):
        lengths = [3] * 30 + ([1, 9] if member.rank else [9, 1])
        layout = rf.Balanced(rf.Documents(lengths, causal=True))
        x = torch.zeros(1, layout.shard_length(100, member.rank, 2), 2, 4)
        with pytest.raises(ValueError, match="layout differs among the ranks"):
            rf.attention(x, x, x, ring=rf.Ring(layout=layout, transport=member))

    run(2, step)


@pytest.mark.parametrize(
    ("otherwise", "message"),
    [
        (
            {"x": torch.zeros(1, 3)},
            "length differs among the ranks of the ring; rank 0: 4, rank 1: 6. Pass length= where the ranks hold different "
            "numbers of tokens",
        ),
        (
            {"x": torch.zeros(3, 2)},
            r"shape without dim differs among the ranks of the ring; rank 0: (1,), rank 1: (3,)",
        ),
        (
            {"x": torch.zeros(1, 2).int()},
            "dtype differs among the ranks of the ring; rank 0: torch.float32, rank 1: torch.int32",
        ),
        ({"x": torch.zeros(2, 1), "dim": 0}, "dim differs among the ranks of the ring; rank 0: 1, rank 1: 0"),
    ],
)
def test_gather_tells_every_rank_as_well(otherwise, message):
    def step(ring):
        arguments = {"x": torch.zeros(1, 2)} | (otherwise if ring.rank == 1 else {})
        try:
            ring.gather(**arguments)
        except ValueError as error:
            return str(error)

    assert in_process(2, rf.Zigzag(), step) == [f"gather: {message}"] * 2


def exchanges(ring, calls):
    """How many checks were exchanged after each of `calls`, which change what PLAIN says or name a mask."""
    original, count = ring.transport.all_gather_object, []
    ring.transport.all_gather_object = lambda value: count.append(None) or original(value)
    counts = []
    for call in calls:
        shapes = {name: call.get(name, value) for name, value in PLAIN.items()}
        rf.attention(*tensors(**shapes), ring=ring, mask=call.get("mask"))
        counts.append(len(count))
    return counts


def test_shapes_are_compared_once_each():
    calls = [{}, {}, {"batch": 2}, {}, {"batch": 2}, {"dtype": torch.float64}]
    assert in_process(2, rf.Zigzag(), exchanges, calls) == [[1, 1, 2, 2, 2, 3]] * 2


def test_a_refused_call_is_compared_again():
    """What was refused is not remembered as agreed."""

    def twice(ring):
        return refusal(ring, {"batch": 2}), refusal(ring, {"batch": 2})

    message = (
        "attention: batch differs among the ranks of the ring; rank 0: 1, rank 1: 2. All ranks of a ring need the "
    )
    message += "same batch"
    assert in_process(2, rf.Zigzag(), twice) == [(message, message)] * 2


def test_the_check_can_be_turned_off():
    def step(member):
        return exchanges(rf.Ring(transport=member, check=False), [{}, {"batch": 2}])

    assert run(2, step) == [[0, 0]] * 2


def test_every_mask_is_compared_once():
    masks = [rf.Full(), rf.Causal(), rf.Documents([9, 7], causal=True), rf.Documents([3, 13], causal=True)]
    calls = [{"mask": mask} for mask in (*masks, *masks)]
    assert in_process(2, rf.Zigzag(), exchanges, calls) == [[1, 2, 3, 4, 4, 4, 4, 4]] * 2


def test_what_was_compared_long_ago_is_forgotten_and_compared_again(monkeypatch):
    """On all ranks at once, for they made the same calls."""
    monkeypatch.setattr("ringflash.ring.AGREED", 2)
    windows = [rf.Window(left, 0) for left in (1, 2, 3, 1)]
    assert in_process(2, rf.Zigzag(), exchanges, [{"mask": mask} for mask in windows]) == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("name", "of_rank", "said"),
    [
        ("mask", [rf.Full(), rf.Window(0, 0)], ["Full() [", "Window(left=0, right=0) ["]),
        ("mask", [rf.Documents([9, 7], causal=True), rf.Documents([7, 9], causal=True)], ["(9, 7)", "(7, 9)"]),
        ("scale", [0.5, 0.25], ["scale=0.5", "scale=0.25"]),
    ],
)
def test_masks_and_scores_that_differ_are_refused_by_every_rank(name, of_rank, said):
    """They would give wrong numbers in silence, or a hang where they disagree about the hops."""

    def step(ring):
        with pytest.raises(ValueError, match="differs among the ranks") as caught:
            rf.attention(*tensors(**PLAIN), ring=ring, **{name: of_rank[ring.rank]})
        return str(caught.value)

    texts = in_process(2, rf.Contiguous(), step)
    assert texts[0] == texts[1]
    assert f"attention: {'mask' if name == 'mask' else 'score'} differs among the ranks" in texts[0]
    assert all(part in texts[0] for part in said)


def test_a_ring_that_always_compares_finds_ranks_that_fall_out_of_step():
    """Both masks are known to both ranks, and one rank is a step behind."""

    def step(member):
        ring = rf.Ring(transport=member, check="always")
        for mask in (rf.Full(), rf.Causal()):
            rf.attention(*tensors(**PLAIN), ring=ring, mask=mask)
        with pytest.raises(ValueError, match="mask differs among the ranks") as caught:
            rf.attention(*tensors(**PLAIN), ring=ring, mask=rf.Causal() if ring.rank else rf.Full())
        return str(caught.value)

    assert len(set(run(2, step))) == 1


def test_a_rank_that_needs_no_gradient_is_told_apart():
    """It would run no backward, and the others would wait for it in theirs."""

    def step(ring):
        q, k, v = tensors(**PLAIN)
        with pytest.raises(
            ValueError, match="whether a gradient is needed differs among .*; rank 0: True, rank 1: False"
        ):
            rf.attention(q.requires_grad_(ring.rank == 0), k, v, ring=ring)

    in_process(2, rf.Zigzag(), step)


def test_seeds_may_differ_in_every_call_without_an_exchange():
    scores = [rf.Score(dropout=0.1, seed=seed) for seed in range(3)]

    def step(ring):
        original, count = ring.transport.all_gather_object, []
        ring.transport.all_gather_object = lambda value: count.append(None) or original(value)
        for score in scores:
            rf.attention(*tensors(**PLAIN), ring=ring, score=score)
        return len(count)

    assert in_process(2, rf.Zigzag(), step) == [1, 1]


def test_a_rank_in_another_call_is_told_apart():
    def step(ring):
        x = torch.zeros(1, 8, 2, 4)
        with pytest.raises(
            ValueError, match="call differs among the ranks of the ring; rank 0: attention, rank 1: gather"
        ):
            ring.gather(x) if ring.rank else rf.attention(x, x, x, ring=ring)

    in_process(2, rf.Zigzag(), step)


def test_what_a_rank_can_see_alone_is_refused_before_any_exchange():
    ring = rf.Ring(transport=Untouchable())
    q, k, v = tensors(**PLAIN)
    with pytest.raises(ValueError, match="q has head dim 16 and k has 8"):
        rf.attention(q, k[..., :8], v, ring=ring)
