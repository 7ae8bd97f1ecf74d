"""Gradients that travel in 16 bits: half the bytes, an error that is stated, and only where it is asked for."""

import pytest
import torch

import ringflash as rf
from ringflash.parallel.gathered import GatheredTransport
from ringflash.parallel.inprocess import run
from ringflash.schedule.plan import plan
from ringflash.testing.compare import relative_error
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import note_messages, on_workers, sent_bytes

routes = pytest.mark.parametrize("route", ["keys", "queries"])
PROBLEM = {"queries": 128, "heads": (4, 4), "dim": 32, "dtype": torch.float32}


def gradients(ranks, route, gradient_dtype, make=lambda member: member, layout=None):
    def step(member):
        ring = rf.Ring(layout=layout, transport=make(member), gradient_dtype=gradient_dtype)
        return attend_sharded(ring, **draw(**PROBLEM), mask=rf.Causal(), route=route)

    return run(ranks, step)[0]


# What Ring's docstring says, of hops and of the other.
STATED = {2: 0.9e-3, 4: 1.7e-3, 8: 3.0e-3, 16: 4.8e-3}


@routes
@pytest.mark.parametrize("make", [lambda member: member, GatheredTransport], ids=["hops", "gathered"])
@pytest.mark.parametrize("ranks", STATED)
def test_the_error_is_as_large_as_stated(ranks, make, route):
    """Of what travels; what stays at home, and out, keep their bits."""
    stated = min(STATED[ranks], 1.5e-3) if make is GatheredTransport else STATED[ranks]
    exact, rounded = (gradients(ranks, route, dtype, make) for dtype in (None, torch.bfloat16))
    travelling = {"keys": ("dk", "dv"), "queries": ("dq",)}[route]
    for name in exact:
        if name in travelling:
            assert 1e-4 < relative_error(rounded[name], exact[name]) < 1.05 * stated, name
        else:
            assert torch.equal(rounded[name], exact[name]), name


@routes
def test_float32_is_what_nothing_says(route):
    exact, named = (gradients(4, route, dtype) for dtype in (None, torch.float32))
    assert all(torch.equal(exact[name], named[name]) for name in exact)


@routes
def test_half_the_bytes_of_gradients_move(route):
    def step(member):
        events = []
        note_messages(member, events)
        ring = rf.Ring(transport=member, gradient_dtype=torch.bfloat16)
        x = draw(**PROBLEM)
        q, k, v = (ring.shard(x[name]).requires_grad_() for name in ("q", "k", "v"))
        out = rf.attention(q, k, v, ring=ring, route=route)
        events.clear()
        out.sum().backward()
        return sent_bytes(events)

    sizes = {"batch": 1, "head_dim": 32, "value_dim": 32, "itemsize": 4, "gradient_itemsize": 2}
    for rank, sent in enumerate(run(4, step)):
        here = plan(rf.Full(), rf.Zigzag(), 128, rank, 4)
        if route == "keys":
            assert sent == here.backward_bytes(key_heads=4, **sizes)
        else:
            assert sent == here.queries_bytes(query_heads=4, **sizes)


def on_group(ring, route):
    other = rf.Ring(ring.transport.group, layout=ring.layout, gradient_dtype=torch.bfloat16)
    return attend_sharded(other, **draw(**PROBLEM), mask=rf.Causal(), route=route)


@routes
def test_real_processes_round_alike(workers, route):
    expected = gradients(4, route, torch.bfloat16)
    for results in on_workers(workers, 4, rf.Zigzag(), on_group, route):
        assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_ranks_that_differ_are_told():
    def step(member):
        dtype = torch.bfloat16 if member.rank else None
        q = torch.randn(1, 4, 2, 8).requires_grad_()
        return rf.attention(q, q, q, ring=rf.Ring(transport=member, gradient_dtype=dtype))

    with pytest.raises(
        ValueError, match="gradient_dtype differs among the ranks of the ring; rank 0: None, rank 1: torch"
    ):
        run(2, step)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, "bf16"])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match="Ring: gradient_dtype = .*; must be None, torch.bfloat16 or torch.float32"):
        rf.Ring(gradient_dtype=dtype)
