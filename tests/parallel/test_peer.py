"""The wire of send and receive, on gloo sub-groups whose ranks are not the global ones."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.parallel.peer import PeerTransport
from tests.rings import mesh_of_last, on_workers, subgroup

ROUND_TRIPS = [torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8]


def ranks_seen(ring):
    return ring.rank, ring.ranks, dist.get_rank()


def test_ranks_are_those_inside_the_group(workers):
    assert on_workers(workers, 3, rf.Zigzag(), ranks_seen) == [(0, 3, 5), (1, 3, 6), (2, 3, 7)]


def exchanged(ring, distance, numel):
    to, source = (ring.rank + distance) % ring.ranks, (ring.rank - distance) % ring.ranks
    send, received = torch.full((numel,), ring.rank, dtype=torch.float32), torch.empty(numel)
    ring.transport.exchange([(send, to)], [(received, source)]).wait()
    return received.unique().tolist(), received.numel()


@pytest.mark.parametrize(("ranks", "distance"), [(2, 1), (3, 1), (3, 2), (3, -1), (4, 2), (8, -3)])
def test_a_message_goes_from_group_rank_to_group_rank(workers, ranks, distance):
    results = on_workers(workers, ranks, rf.Zigzag(), exchanged, distance, 5)
    assert results == [([(rank - distance) % ranks], 5) for rank in range(ranks)]


@pytest.mark.parametrize("size_mib", [1, 64])
def test_messages_larger_than_any_socket_buffer_pass_both_ways_at_once(workers, size_mib):
    numel = size_mib * 2**20 // 4
    assert on_workers(workers, 2, rf.Zigzag(), exchanged, 1, numel) == [([1], numel), ([0], numel)]


def in_order(ring):
    """Three messages of different length and type to the same neighbour, received in the order sent."""
    to = source = 1 - ring.rank
    sent = [
        torch.full((n,), ring.rank, dtype=t)
        for n, t in ((3, torch.float32), (70000, torch.bfloat16), (1, torch.float64))
    ]
    received = [torch.empty_like(x) for x in sent]
    flights = [ring.transport.exchange([(x, to)], [(y, source)]) for x, y in zip(sent, received, strict=True)]
    for flight in flights:
        flight.wait()
    return [(x.unique().tolist(), x.numel()) for x in received]


def test_messages_between_the_same_two_ranks_keep_their_order(workers):
    first, second = on_workers(workers, 2, rf.Zigzag(), in_order)
    assert first == [([1], 3), ([1], 70000), ([1], 1)]
    assert second == [([0], 3), ([0], 70000), ([0], 1)]


def several_at_once(ring):
    """Rank 0 sends to both others at once, and receives from neither; nothing at all is no call."""
    received = torch.zeros(2)
    sends = [(torch.full((2,), 7.0 + to), to) for to in (1, 2)] if ring.rank == 0 else []
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as start:
        ring.transport.exchange(sends, [(received, 0)] if ring.rank else []).wait()
        ring.transport.exchange([], []).wait()
    return received.tolist(), [len(call.args[0]) for call in start.call_args_list]


def test_several_messages_go_in_one_exchange(workers):
    assert on_workers(workers, 3, rf.Zigzag(), several_at_once) == [([0, 0], [2]), ([8, 8], [1]), ([9, 9], [1])]


def collected(ring, dtype, lengths):
    mine = (torch.arange(lengths[ring.rank] * 3) + 100 * ring.rank).reshape(lengths[ring.rank], 3).to(dtype)
    shards = ring.transport.all_gather(mine, [(length, 3) for length in lengths])
    expected = [(torch.arange(n * 3) + 100 * rank).reshape(n, 3).to(dtype) for rank, n in enumerate(lengths)]
    return [x.dtype == dtype and torch.equal(x, y) for x, y in zip(shards, expected, strict=True)]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 0, 2], [0, 0, 0]], ids=str)
def test_tensors_of_any_type_and_length_are_collected_as_they_are(workers, lengths):
    for dtype in ROUND_TRIPS:
        assert on_workers(workers, 3, rf.Zigzag(), collected, dtype, lengths) == [[True] * 3] * 3


def objects(ring):
    return ring.transport.all_gather_object({"rank": ring.rank})


def test_small_values_are_collected_by_rank(workers):
    assert on_workers(workers, 3, rf.Zigzag(), objects) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def refusal_of_outsiders():
    """What the processes outside of a group, and of a mesh, are told."""
    refusals = []
    for group in (subgroup(3)[0], mesh_of_last(3)):
        try:
            rf.Ring(group)
            refusals.append(None)
        except ValueError as error:
            refusals.append(str(error))
    return refusals


def test_a_process_outside_the_group_is_told_so(workers):
    refusal = "Ring: this process is not in the group; make a Ring of it on its members only"
    assert workers.run(refusal_of_outsiders) == [[refusal] * 2] * 5 + [[None] * 2] * 3


def is_alone(ring):
    return isinstance(ring.transport, PeerTransport), ring.rank, ring.ranks


def test_a_group_of_one_is_a_ring_of_one(workers):
    assert on_workers(workers, 1, rf.Zigzag(), is_alone) == [(True, 0, 1)]
