"""Ring: what it is made of, which positions it holds, and shard and gather as inverses with honest gradients."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.parallel.inprocess import Alone
from tests.rings import LAYOUTS, Untouchable, counted_calls, in_process, mesh_of_last, name_of, on_workers, subgroup

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
DTYPES = [torch.int64, torch.bool, torch.bfloat16, torch.float32]
# What torch cannot index; one entry each of the sizes that exist.
ODD_DTYPES = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64, torch.complex64]


def round_trip(ring, length, dtype, dim):
    """Whether gather(shard(x)) is x, for a tensor of 4 axes with the sequence at `dim`."""
    shape = [2, 3, 2, 3]
    shape[dim] = length
    x = (torch.arange(shape[0] * shape[1] * shape[2] * shape[3]).reshape(shape) % 5).to(dtype)
    mine = ring.shard(x, dim)
    assert torch.equal(mine, x.index_select(dim, ring.positions(length)))
    back = ring.gather(mine, dim, length=length)
    return back.dtype == dtype and back.shape == x.shape and torch.equal(back, x)


@layouts
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gather_undoes_shard(ranks, layout):
    """R64: any type, any axis, any length, also one that the ranks do not divide or reach."""
    for length in (1, 7, 16):
        for dtype in DTYPES:
            for dim in (0, 1, 2, 3, -1):
                assert in_process(ranks, layout, round_trip, length, dtype, dim) == [True] * ranks, (length, dtype, dim)


def odd_round_trips(ring):
    """Whether gather(shard(x)) has the bytes of x, for each of ODD_DTYPES."""
    whole = [torch.arange(1, 8).to(dtype)[None] for dtype in ODD_DTYPES]
    back = [ring.gather(ring.shard(x), length=7) for x in whole]
    return [
        b.dtype == x.dtype and torch.equal(b.view(torch.uint8), x.view(torch.uint8))
        for b, x in zip(back, whole, strict=True)
    ]


def test_any_type_makes_the_round_trip(workers):
    assert in_process(3, rf.Zigzag(), odd_round_trips) == [[True] * len(ODD_DTYPES)] * 3
    assert on_workers(workers, 3, rf.Zigzag(), odd_round_trips) == [[True] * len(ODD_DTYPES)] * 3


def copies(ring):
    """Whether copies are the ring itself, and what pickling says."""
    with pytest.raises(TypeError, match="Ring: holds a process group, which cannot be pickled"):
        pickle.dumps(ring)
    module = copy.deepcopy(rf.RingAttention(ring=ring))
    return copy.copy(ring) is ring and module.ring is ring


def test_a_copied_model_talks_on_the_same_ring(workers):
    assert on_workers(workers, 2, rf.Zigzag(), copies) == [True] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ring: ring.positions(8.0), TypeError, "positions: length is float; must be an integer"),
        (lambda ring: ring.positions(-8), ValueError, "positions: length = -8; must be >= 0"),
        (lambda ring: ring.positions(True), TypeError, "positions: length is bool"),
        (lambda ring: ring.gather(torch.zeros(1, 8), length=8.0), TypeError, "gather: length is float"),
        (lambda ring: ring.gather(torch.zeros(1, 8), length=9), ValueError, "holds 8 tokens; Zigzag.. gives it 9"),
        (lambda ring: ring.shard(torch.zeros(1, 8), None), TypeError, "shard: dim is NoneType; must be an integer"),
        (lambda ring: ring.shard(torch.zeros(1, 8), 2), ValueError, "shard: dim = 2; x of shape .1, 8. has no such"),
        (lambda ring: ring.shard([1, 2]), TypeError, "shard: x is list; must be a tensor"),
        (lambda ring: rf.Ring(check=1), TypeError, 'Ring: check is 1; must be True, False or "always"'),
    ],
)
def test_arguments_that_are_no_numbers_or_do_not_fit_are_refused_by_a_ring_of_one_as_well(call, error, message):
    with pytest.raises(error, match=message):
        call(rf.Ring())


def all_round_trips(ring):
    return [
        round_trip(ring, length, dtype, dim) for length in (1, 7, 16) for dtype in DTYPES for dim in (0, 1, 2, 3, -2)
    ]


@layouts
def test_gather_undoes_shard_between_processes(workers, layout):
    """R64 over gloo."""
    assert on_workers(workers, 3, layout, all_round_trips) == [[True] * 60] * 3


def test_predictions_keep_their_batch_and_get_their_length_back():
    """R64: [8, 512, V], not [16, 256, V]."""
    shapes = in_process(2, rf.Zigzag(), lambda ring: tuple(ring.gather(torch.zeros(8, 256, 3)).shape))
    assert shapes == [(8, 512, 3)] * 2


def gradients_of_both(ring, length):
    """d/dx and d/dw of sum(w * gather(f(shard(x)))) where every rank computes the same loss."""
    x = torch.arange(1.0, length + 1).reshape(1, length, 1).requires_grad_()
    w = torch.arange(1.0, length + 1).reshape(1, length, 1).requires_grad_()
    loss = (w * ring.gather(ring.shard(x) ** 2, length=length)).sum()
    return [g.flatten().tolist() for g in torch.autograd.grad(loss, (x, w))]


@layouts
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_gradients_through_shard_and_gather_are_those_of_one_process(length, ranks, layout):
    """R64: not ranks times that, and whole on every rank."""
    expected = [[2.0 * j * j for j in range(1, length + 1)], [float(j * j) for j in range(1, length + 1)]]
    assert in_process(ranks, layout, gradients_of_both, length) == [expected] * ranks


def test_gradients_through_shard_and_gather_are_those_of_one_process_between_processes(workers):
    expected = [[2.0 * j * j for j in range(1, 8)], [float(j * j) for j in range(1, 8)]]
    assert on_workers(workers, 4, rf.Striped(), gradients_of_both, 7) == [expected] * 4


@pytest.mark.parametrize(
    ("layout", "length", "expected"),
    [
        (rf.Contiguous(), 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (rf.Zigzag(), 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (rf.Striped(), 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (rf.Zigzag(), 16, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        (rf.Zigzag(), 16, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (rf.Contiguous(), 3, [[], [0], [1], [2]]),
        (rf.Striped(), 3, [[0], [1], [2], []]),
    ],
    ids=str,
)
def test_positions_are_global_and_in_order(layout, length, expected):
    """R62: the numbers of its text, and some ranks without any token."""
    positions = in_process(len(expected), layout, lambda ring: ring.positions(length))
    assert [p.tolist() for p in positions] == expected
    assert {p.dtype for p in positions} == {torch.int64}


def test_the_default_is_zigzag():
    assert rf.Ring().layout == rf.Zigzag()


def test_without_a_process_group_the_ring_is_this_process_alone():
    assert not dist.is_initialized()
    ring = rf.Ring()
    assert (ring.rank, ring.ranks) == (0, 1)
    assert isinstance(ring.transport, Alone)


def test_under_torchrun_a_forgotten_init_process_group_is_an_error(monkeypatch):
    """Every process would otherwise train alone, in silence."""
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(RuntimeError, match="launched by torchrun, but init_process_group was not called"):
        rf.Ring()


def what_a_ring_is(group_of):
    group = group_of()
    with counted_calls() as counts:
        ring = rf.Ring(group)
    return ring.rank, ring.ranks, counts


def default_group():
    return None


def one_axis_of_a_mesh():
    return mesh_of_four_by_two()["cp"]


def mesh_of_four_by_two():
    return init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))


@pytest.mark.parametrize(
    ("group_of", "expected"),
    [
        (default_group, [(rank, 8) for rank in range(8)]),
        (one_axis_of_a_mesh, [(0, 2), (1, 2)] * 4),
    ],
)
def test_a_ring_is_the_default_group_or_one_axis_of_a_mesh_and_makes_no_group(workers, group_of, expected):
    """R57, its smaller half."""
    assert workers.run(what_a_ring_is, group_of) == [(*place, {}) for place in expected]


def members_of_a_mesh():
    mesh = mesh_of_last(3)
    return (rf.Ring(mesh).rank, rf.Ring(mesh).ranks) if mesh.get_coordinate() is not None else None


def test_a_mesh_of_one_dimension_is_a_ring(workers):
    assert workers.run(members_of_a_mesh) == [None] * 5 + [(0, 3), (1, 3), (2, 3)]


def refusals_of_groups():
    errors = []
    for group in (mesh_of_four_by_two(), "world", 3, dist):
        try:
            rf.Ring(group)
        except (TypeError, ValueError) as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def test_what_is_not_one_ring_is_refused(workers):
    hint = "must be a ProcessGroup, a 1-D DeviceMesh or None"
    expected = [
        ("ValueError", "Ring: mesh has 2 dimensions ('dp', 'cp'); pass one, such as mesh['cp']"),
        ("TypeError", f"Ring: group is str; {hint}"),
        ("TypeError", f"Ring: group is int; {hint}"),
        ("TypeError", f"Ring: group is module; {hint}"),
    ]
    assert workers.run(refusals_of_groups) == [expected] * 8


def both_group_and_transport():
    group, is_member = subgroup(2)
    if is_member:
        with pytest.raises(ValueError, match="group and a Transport instance exclude each other"):
            rf.Ring(group, transport=Alone())
        return rf.Ring(group, transport="peer").ranks
    return None


def test_a_group_and_a_transport_exclude_each_other(workers):
    assert workers.run(both_group_and_transport) == [None] * 6 + [2, 2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rf.Ring(layout="zigzag"), TypeError, "layout is 'zigzag'; must be a Layout such as Zigzag"),
        (lambda: rf.Ring(layout=rf.Zigzag), TypeError, "must be a Layout such as Zigzag"),
        (
            lambda: rf.Ring(transport="udp"),
            ValueError,
            "transport = 'udp'; must be None, 'peer', 'gathered', 'symmetric' or a Transport",
        ),
        (lambda: rf.Ring().shard([1, 2]), TypeError, "shard: x is list; must be a tensor"),
        (lambda: rf.Ring().gather(None), TypeError, "gather: x is NoneType; must be a tensor"),
        (lambda: rf.Ring().shard(torch.zeros(3)), ValueError, r"shard: dim = 1; x of shape \(3,\) has no such axis"),
        (lambda: rf.Ring().gather(torch.zeros(3, 2), -3), ValueError, "gather: dim = -3; must be >= -2"),
        (lambda: rf.Ring().shard(torch.tensor(3.0), 0), ValueError, r"dim = 0; x of shape \(\) has no such axis"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3)])
def test_a_length_that_does_not_fit_is_refused_before_anything_is_sent(rank, held):
    """7 tokens on 2 ranks are 3 and 4 in a contiguous layout."""
    ring = rf.Ring(layout=rf.Contiguous(), transport=Untouchable(rank))
    message = rf"gather: rank {rank} of 2 holds {held} tokens; Contiguous\(\) gives it {7 - held} of length = 7"
    with pytest.raises(ValueError, match=message):
        ring.gather(torch.zeros(1, held), length=7)


def test_cutting_sends_nothing():
    ring = rf.Ring(transport=Untouchable(rank=1))
    assert ring.shard(torch.arange(8)[None]).tolist() == [[2, 3, 4, 5]]


def test_gather_counts_the_length_itself_where_ranks_divide_it():
    step = partial(lambda ring: ring.gather(ring.shard(torch.arange(12), 0), 0).tolist())
    assert in_process(3, rf.Striped(), step) == [list(range(12))] * 3
