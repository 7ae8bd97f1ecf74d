"""Section E of the cases: groups, rings of one, and who talks when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.testing.compare import assert_all_close
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import LAYOUTS, counted_calls, masks, name_of, on_workers

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
PROBLEM = {"queries": 24, "heads": (4, 2), "dtype": torch.float32}


def same_bits(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


@layouts
@pytest.mark.parametrize("name", masks(24))
def test_R54_a_ring_of_one_gives_the_bits_of_one_device(name, layout):
    """Without a process group."""
    assert not dist.is_initialized()
    mask = masks(24)[name]
    local = attend_sharded(None, **draw(**PROBLEM), mask=mask)
    assert same_bits(attend_sharded(rf.Ring(layout=layout), **draw(**PROBLEM), mask=mask), local)


def ring_of_one(ring):
    """Which masks give other bits than one device, and what was called meanwhile."""
    differing = []
    with counted_calls() as counts:
        for name, mask in masks(24).items():
            local = attend_sharded(None, **draw(**PROBLEM), mask=mask)
            if not same_bits(attend_sharded(ring, **draw(**PROBLEM), mask=mask), local):
                differing.append(name)
    return differing, counts


@layouts
def test_R54_a_group_of_one_gives_the_bits_of_one_device_and_makes_no_call(workers, layout):
    assert on_workers(workers, 1, layout, ring_of_one) == [([], {})]


def grid_of_two_by_two_by_two(layers):
    """In each of 8 workers: data x ring x tensor parallel, every layer with a module and a Ring of its own.

    The two halves of the world build their layers in opposite order.
    """
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    order = range(layers) if mesh.get_local_rank("dp") == 0 else reversed(range(layers))
    modules = {}
    row, head = mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("tp")
    inputs = draw(batch=2, queries=16, heads=(4, 4), seed=3)
    mine = {name: x[row : row + 1, :, head : head + 2] for name, x in inputs.items()}
    dist.barrier()
    with counted_calls() as counts:
        for layer in order:
            modules[layer] = rf.RingAttention(ring=rf.Ring(mesh["cp"]), mask=rf.Causal())
    building = dict(counts)
    with counted_calls() as counts:
        for layer in range(layers):
            results = attend_sharded(modules[layer].ring, **mine, mask=rf.Causal())
    expected = dense_gradients(**mine, mask=rf.Causal())
    assert_all_close(results, expected, torch.float64)
    return building, counts.get("new_group", 0), modules[0].ring.rank


def test_R57_rings_and_layers_make_no_group_in_whatever_order_they_are_built(workers):
    results = workers.run(grid_of_two_by_two_by_two, 12)
    assert results == [({}, 0, rank) for rank in [0, 0, 1, 1, 0, 0, 1, 1]]


def two_rings(layout):
    """In a worker: attention across the rows of a 4 x 2 grid, then across its columns."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("rows", "columns"))
    expected = dense_gradients(**draw(**PROBLEM), mask=rf.Causal())
    for name in ("rows", "columns", "rows"):
        results = attend_sharded(rf.Ring(mesh[name], layout=layout), **draw(**PROBLEM), mask=rf.Causal())
        assert_all_close(results, expected, torch.float32)
    return True


@layouts
def test_two_rings_that_cross_in_one_process_do_not_mix_their_messages(workers, layout):
    assert workers.run(two_rings, layout) == [True] * 8


def frozen_by_rank(ring):
    """Each rank wants the gradient of another input; nobody waits for ever."""
    inputs = draw(**PROBLEM)
    local = [ring.shard(inputs[name]).requires_grad_(i == ring.rank) for i, name in enumerate(("q", "k", "v"))]
    rf.attention(*local, ring=ring).backward(ring.shard(inputs["dout"]))
    return local[ring.rank].grad, [x.grad is None for x in local]


def test_ranks_may_freeze_different_inputs(workers):
    inputs = draw(**PROBLEM) | {"dlse": None}
    expected = dense_gradients(**inputs, mask=rf.Full())
    results = on_workers(workers, 3, rf.Contiguous(), frozen_by_rank)
    for rank, (gradient, is_none) in enumerate(results):
        name = ("dq", "dk", "dv")[rank]
        assert_all_close({name: gradient}, {name: expected[name][:, 8 * rank : 8 * rank + 8]}, torch.float32)
        assert is_none == [name != "dq", name != "dk", name != "dv"]


def checkpointed(ring, use_reentrant):
    """Whether two layers have the same gradients when the second is recomputed in backward."""
    inputs = draw(**PROBLEM)
    attend = partial(rf.attention, ring=ring, mask=rf.Causal())
    gradients = []
    for second in (attend, partial(checkpoint, attend, use_reentrant=use_reentrant)):
        q, k, v = (ring.shard(inputs[name]).requires_grad_() for name in ("q", "k", "v"))
        second(attend(q, k, v), k, v).backward(ring.shard(inputs["dout"]))
        gradients.append([q.grad, k.grad, v.grad])
    return all(map(torch.equal, *gradients))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_R44_recomputing_a_layer_in_backward_changes_no_bit(workers, use_reentrant):
    assert on_workers(workers, 2, rf.Zigzag(), checkpointed, use_reentrant) == [True, True]
