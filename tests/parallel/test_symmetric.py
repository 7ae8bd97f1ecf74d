"""Puts into each other's memory: what arrives, what moves, what is kept, and what is said where it cannot be done."""

import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.parallel import reach
from ringflash.parallel.inprocess import MemberReach, run
from ringflash.parallel.lanes import HostLane
from ringflash.parallel.memory import Workspace, aligned
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close
from tests.rings import LAYOUTS, attend, attend_in_process, dense, masks, name_of, on_workers

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
routes = pytest.mark.parametrize("route", ["keys", "queries"])


def symmetric(member):
    return SymmetricTransport(member, member.reach())


def attend_symmetric(ranks, layout, problem, options):
    """As `attend_in_process`, through memory of the others."""
    return run(ranks, lambda member: attend(rf.Ring(layout=layout, transport=symmetric(member)), problem, options))


@routes
@layouts
@pytest.mark.parametrize(
    ("ranks", "name"), [*((5, name) for name in masks(29)), (2, "causal"), (8, "causal"), (8, "first_and_window")]
)
def test_every_mask_and_layout(ranks, name, layout, route):
    problem = {"queries": 29, "heads": (6, 2), "dim": 4, "value_dim": 3, "batch": 2}
    options = {"mask": masks(29)[name], "route": route}
    expected = dense(problem, mask=options["mask"])
    for results in attend_symmetric(ranks, layout, problem, options):
        assert_all_close(results, expected, torch.float64)


@routes
@layouts
def test_two_ranks_give_the_bits_of_a_ring(layout, route):
    """With one other rank there is one order of additions."""
    problem = {"queries": 29, "heads": (4, 2), "dim": 4, "dtype": torch.float32}
    options = {"mask": rf.Causal(), "route": route}
    ring = attend_in_process(2, layout, problem, options)
    for one, other in zip(attend_symmetric(2, layout, problem, options), ring, strict=True):
        assert all(torch.equal(one[what], other[what]) for what in other)


@layouts
def test_gradients_repeat_bit_for_bit(layout):
    """The owner adds in the order of hops, whoever is the first to send."""
    problem = {"queries": 61, "heads": (2, 2), "dtype": torch.float32}
    first = attend_symmetric(4, layout, problem, {"mask": rf.Full()})
    for _ in range(5):
        again = attend_symmetric(4, layout, problem, {"mask": rf.Full()})
        assert all(torch.equal(a[what], b[what]) for a, b in zip(first, again, strict=True) for what in a)


def attend_by_name(ring, problem, options):
    ring = rf.Ring(ring.transport.group, layout=ring.layout, transport="symmetric")
    assert isinstance(ring.transport, SymmetricTransport)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Again and again, longer and shorter, through the memory that is there.
        return [attend(ring, {**problem, "queries": n}, options) for n in (13, 29, 8, 29)]


@routes
@layouts
@pytest.mark.parametrize("ranks", [2, 5])
def test_real_processes_equal_dense_attention(workers, ranks, layout, route):
    problem = {"heads": (4, 2), "batch": 2}
    options = {"mask": rf.Window(9, 0), "route": route}
    for results in on_workers(workers, ranks, layout, attend_by_name, problem, options):
        for n, result in zip((13, 29, 8, 29), results, strict=True):
            assert_all_close(result, dense({**problem, "queries": n}, mask=options["mask"]), torch.float64)


class NotedLane(HostLane):
    """Notes the size of what is put."""

    sizes: list[int]

    def copy(self, to, origin, size):
        self.sizes.append(size)
        super().copy(to, origin, size)


class NotedReach(MemberReach):
    def __init__(self, member, failed):
        super().__init__(member, failed)
        self.sizes = []

    def new_lane(self, device):
        lane = NotedLane(self._member.rank, 60.0, self._failed.is_set)
        lane.sizes = self.sizes
        return lane


def bytes_of(member, mask, layout, tokens):
    """Bytes put (in forward, in backward) by a rank."""
    noted = NotedReach(member, member._mail.failed)
    ring = rf.Ring(layout=layout, transport=SymmetricTransport(member, noted))
    q, k, v = (torch.randn(1, tokens // member.ranks, 2, 4).requires_grad_() for _ in range(3))
    out = rf.attention(q, k, v, ring=ring, mask=mask, route="keys")
    forward = sum(noted.sizes)
    out.sum().backward()
    return forward, sum(noted.sizes) - forward


SEEN = [rf.Full(), rf.Causal(), rf.Window(3, 0), rf.Documents([5, 20, 7], causal=True)]


@layouts
@pytest.mark.parametrize("mask", SEEN, ids=name_of)
def test_what_is_seen_moves_once_and_nothing_else(mask, layout):
    """4 ranks of 8 tokens, K and V of 2 heads of 4 in fp32: 64 bytes a row, there and back."""
    plans = [plan(mask, layout, 32, rank, 4) for rank in range(4)]

    def rows(viewer, owner):
        return 0 if viewer == owner else plans[viewer].keys(owner).stop - plans[viewer].keys(owner).start

    for rank, (forward, backward) in enumerate(run(4, lambda member: bytes_of(member, mask, layout, 32))):
        sent = 64 * sum(rows(viewer, rank) for viewer in range(4))
        assert forward == sent
        assert backward == sent + 64 * sum(rows(rank, owner) for owner in range(4))


def test_memory_is_kept_and_does_not_grow_with_ranks():
    def sizes(member):
        transport = symmetric(member)
        ring = rf.Ring(layout=rf.Zigzag(), transport=transport)
        x = torch.randn(1, 256, 2, 64)
        held = []
        for _ in range(3):
            rf.attention(x, x, x, ring=ring, mask=rf.Causal())
            held.append(transport._workspaces[x.device])
        assert held[0] is held[2]
        return held[0].blocks[member.rank].numel()

    message = 2 * 256 * 2 * 64 * 4  # K and V
    for ranks in (2, 4, 8):
        everyone = run(ranks, sizes)
        assert len(set(everyone)) == 1
        assert 2 * message <= everyone[0] <= 2 * message * 1.05


def test_lengths_that_change_ask_for_memory_a_few_times_only():
    sizes = {size: aligned(size) for size in range(10_000, 20_000)}
    assert all(size <= taken <= size * 1.07 for size, taken in sizes.items())
    assert len({Workspace.total_bytes(2, taken, 0, 0) for taken in sizes.values()}) <= 32


def on_two_hosts(ring):
    """In a worker: a call in a ring whose ranks have other host names, the warnings, and whether the result is right."""
    ring = rf.Ring(ring.transport.group, transport="symmetric")
    x = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with (
        mock.patch.object(reach.socket, "gethostname", return_value=f"host{ring.rank}"),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        outs = [rf.attention(*(ring.shard(x) for _ in range(3)), ring=ring) for _ in range(2)]
    right = torch.allclose(outs[1], ring.shard(rf.attention(x, x, x)))
    return right, [str(warning.message) for warning in seen]


def test_without_shared_memory_peer_serves_and_it_is_said_once(workers):
    said = "Ring: transport 'symmetric' sends as 'peer' does, because its ranks are on several hosts"
    assert on_workers(workers, 3, rf.Zigzag(), on_two_hosts) == [(True, [said])] * 3


def wait_in_vain():
    """In a worker: the error of the last rank but one of a ring, whose other rank never comes."""
    world = dist.get_world_size()
    members = [world - 2, world - 1]
    group = dist.new_group(members, timeout=timedelta(seconds=2))
    if dist.get_rank() not in members:
        return None
    ring = rf.Ring(group, transport="symmetric", check=False, layout=rf.Contiguous())
    x = torch.randn(1, 4, 1, 8)
    rf.attention(x, x, x, ring=ring)
    try:
        if ring.rank == 0:
            rf.attention(x, x, x, ring=ring)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named(workers):
    waiting, other = workers.run(wait_in_vain)[-2:]
    assert other == "no error"
    assert waiting.startswith("Ring: rank 0 waited 2 s for a signal of rank 1, which is gone, or computes for longer")


def test_a_ring_of_one_needs_no_memory():
    x = torch.randn(1, 5, 2, 4, dtype=torch.float64)
    assert torch.equal(rf.attention(x, x, x, ring=rf.Ring(transport="symmetric")), rf.attention(x, x, x))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_call_after_one_that_broke_off_is_refused(after):
    """Signals that were set and not taken would let a later call read what is not there yet."""

    def step(member):
        transport = symmetric(member)
        x = torch.randn(1, 6, 2, 4)
        needs = plan(rf.Full(), rf.Contiguous(), 24, member.rank, 4).needs
        passage = iter(transport.stream((x, x), needs))
        for _ in range(after):
            next(passage)
        del passage
        with pytest.raises(RuntimeError, match="ended in an error in the middle of its messages.*Make a new Ring"):
            transport.stream((x, x), needs)

    run(4, step)


def test_a_first_call_of_inference_leaves_memory_that_training_can_use():
    def step(member):
        ring = rf.Ring(layout=rf.Zigzag(), transport=symmetric(member))
        x = torch.randn(1, 8, 2, 4, requires_grad=True)
        with torch.inference_mode():
            rf.attention(x, x, x, ring=ring, mask=rf.Causal())
        rf.attention(x, x, x, ring=ring, mask=rf.Causal()).sum().backward()
        return bool(x.grad.isfinite().all())

    assert run(2, step) == [True, True]


def test_the_default_device_is_nobodys_affair():
    def step(member):
        ring = rf.Ring(layout=rf.Zigzag(), transport=symmetric(member))
        x = torch.randn(1, 8, 2, 4)
        with torch.device("meta"):
            return rf.attention(x, x, x, ring=ring, mask=rf.Window(3, 1)).device.type

    assert run(2, step) == ["cpu", "cpu"]


def share_too_much(ring):
    """In a worker: what is said where shared memory is full on one rank."""

    def full(file, offset, size):
        raise OSError(28, "No space left on device")

    ring = rf.Ring(ring.transport.group, transport="symmetric")
    x = torch.randn(1, 8, 2, 4)
    with mock.patch.object(reach.os, "posix_fallocate", full if ring.rank == 1 else reach.os.posix_fallocate):
        try:
            rf.attention(x, x, x, ring=ring)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_no_room_for_shared_memory_is_an_error_on_every_rank(workers):
    for said in on_workers(workers, 3, rf.Zigzag(), share_too_much):
        assert said.startswith("Ring: transport 'symmetric' shares memory among ranks, and rank 1 has no room for ")


def attend_over_another_wire(ring):
    ring = rf.Ring(ring.transport.group, transport="symmetric" if ring.rank == 1 else "peer")
    x = torch.randn(1, 8, 2, 4)
    try:
        rf.attention(x, x, x, ring=ring)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_of_different_transports_are_told(workers):
    for said in on_workers(workers, 2, rf.Zigzag(), attend_over_another_wire):
        assert said.startswith(
            "attention: transport differs among the ranks of the ring; rank 0: PeerTransport, rank 1: S"
        )
