"""Everything at once: the bits of a ring, in one exchange each way."""

import pytest
import torch

import ringflash as rf
from ringflash.parallel.gathered import GatheredTransport
from ringflash.parallel.inprocess import Alone, run
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close
from tests.rings import (
    LAYOUTS,
    attend,
    attend_in_process,
    dense,
    masks,
    name_of,
    note_messages,
    on_workers,
    sent_bytes,
)

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
routes = pytest.mark.parametrize("route", ["keys", "queries"])


def attend_gathered(ring, problem, options):
    """As `attend`, on the same ranks, everything at once."""
    return attend(rf.Ring(layout=ring.layout, transport=GatheredTransport(ring.transport)), problem, options)


def gathered_in_process(ranks, layout, problem, options):
    return run(ranks, lambda member: attend_gathered(rf.Ring(layout=layout, transport=member), problem, options))


@routes
@layouts
@pytest.mark.parametrize("name", masks(29))
@pytest.mark.parametrize("length", [12, 29])
def test_the_bits_are_those_of_a_ring(length, name, layout, route):
    """Sums are formed in the same order, which ranks fix and arrival does not; 4 ranks, uneven shards."""
    problem = {"queries": length, "heads": (6, 2), "dim": 4, "value_dim": 3, "batch": 2, "dtype": torch.float32}
    options = {"mask": masks(length)[name], "route": route}
    ring = attend_in_process(4, layout, problem, options)
    for one, other in zip(gathered_in_process(4, layout, problem, options), ring, strict=True):
        assert all(torch.equal(one[what], other[what]) for what in other)


@routes
@layouts
def test_real_processes_equal_dense_attention(workers, layout, route):
    problem = {"queries": 29, "heads": (4, 2)}
    mask = rf.Documents([8, 9, 12], causal=True)
    for results in on_workers(workers, 4, layout, attend_gathered, problem, {"mask": mask, "route": route}):
        assert_all_close(results, dense(problem, mask=mask), torch.float64)


def named_on_a_group(ring, problem):
    return attend(rf.Ring(ring.transport.group, layout=ring.layout, transport="gathered"), problem, {})


def test_it_is_a_transport_of_a_group_by_name(workers):
    problem = {"queries": 13, "heads": (2, 2)}
    for results in on_workers(workers, 3, rf.Zigzag(), named_on_a_group, problem):
        assert_all_close(results, dense(problem), torch.float64)


def events_of(member, problem, mask, layout):
    """(forward, backward) messages of a rank, as `messages_of` notes them."""
    ring = rf.Ring(layout=layout, transport=GatheredTransport(member))
    events = []
    note_messages(member, events)
    q, k, v = (torch.randn(1, problem // 4, 2, 4).requires_grad_() for _ in range(3))
    out = rf.attention(q, k, v, ring=ring, mask=mask, route="keys")
    forward = list(events)
    out.sum().backward()
    return forward, events[len(forward) :]


@layouts
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(3, 0)], ids=name_of)
def test_one_exchange_each_way_moves_what_is_seen_and_nothing_else(mask, layout):
    """4 ranks of 8 tokens, K and V of 2 heads of 4 in fp32: 64 bytes a row, there and back."""
    for rank, (forward, backward) in enumerate(run(4, lambda member: events_of(member, 32, mask, layout))):
        plans = [plan(mask, layout, 32, other, 4) for other in range(4)]
        sent = sum(64 * (p.keys(rank).stop - p.keys(rank).start) for p in plans if p.rank != rank)
        returned = sum(64 * (plans[rank].keys(s).stop - plans[rank].keys(s).start) for s in range(4) if s != rank)
        assert sent_bytes(forward) == sent
        assert sent_bytes(backward) == sent + returned
        assert len([what for what, _ in forward if what == "start"]) <= 1
        assert len([what for what, _ in backward if what == "start"]) <= 2


def test_a_ring_of_one_exchanges_nothing():
    x = torch.randn(1, 5, 2, 4, dtype=torch.float64)
    ring = rf.Ring(transport=GatheredTransport(Alone()))
    assert torch.equal(rf.attention(x, x, x, ring=ring), rf.attention(x, x, x))
