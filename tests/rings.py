"""Functions that tests send to worker processes, and the cases they share."""

from functools import lru_cache

import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.parallel.inprocess import run
from ringflash.parallel.transport import Transport
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw

LAYOUTS = [rf.Contiguous(), rf.Zigzag(), rf.Striped()]


def name_of(value):
    """A short pytest id for a layout or a mask."""
    return type(value).__name__.lower() if isinstance(value, (rf.Layout, rf.Mask)) else str(value).replace(" ", "")


def masks(length):
    """A mask of every kind for a self-attention of `length` >= 12 tokens."""
    third = length // 3
    packed = [third - 1, 0, 1, length - third - 3, 3]
    return {
        "full": rf.Full(),
        "causal": rf.Causal(),
        "window": rf.Window(5, 2),
        "window_past": rf.Window(third, 0),
        "documents_causal": rf.Documents(packed, causal=True),
        "documents_full": rf.Documents(packed, causal=False),
        "documents_padded": rf.Documents([third, length - third - 3], causal=True, padding=3),
        "documents_window": rf.Documents(packed, causal=True) & rf.Window(4, 0),
    }


def dense(problem, *, mask=None, scale=None):
    """What the oracle says about `draw(**problem)`."""
    return dense_gradients(**draw(**problem), mask=rf.Full() if mask is None else mask, scale=scale)


def probe(length, *, dim=4, dtype=torch.float64):
    """q = k = 0 and v[j] = j: rows are means of the positions seen, exp(lse) counts them. dout = 1."""
    zeros = torch.zeros(1, length, 1, dim, dtype=dtype)
    v = torch.arange(length, dtype=dtype)[None, :, None, None]
    return {"q": zeros, "k": zeros, "v": v, "dout": torch.ones_like(v)}


@lru_cache
def subgroup(ranks, backend=None):
    """The LAST `ranks` members of the world, so that rank 0 of the ring is not rank 0 of the world."""
    world = dist.get_world_size()
    members = list(range(world - ranks, world))
    return dist.new_group(members, backend=backend), dist.get_rank() in members


def on_subgroup(ranks, layout, step, *arguments):
    """In a worker: `step(ring, *arguments)` in a ring of the last `ranks` processes, None on the others."""
    group, is_member = subgroup(ranks)
    return step(rf.Ring(group, layout=layout), *arguments) if is_member else None


def on_workers(workers, ranks, layout, step, *arguments, timeout_s=60.0):
    """`step(ring, *arguments)` on a gloo ring of the last `ranks` workers; results by rank of the ring."""
    return workers.run(on_subgroup, ranks, layout, step, *arguments, timeout_s=timeout_s)[-ranks:]


def in_process(ranks, layout, step, *arguments):
    """`step(ring, *arguments)` on every rank of an in-process ring; results by rank."""
    return run(ranks, lambda member: step(rf.Ring(layout=layout, transport=member), *arguments))


def attend(ring, problem, options):
    """out, lse, dq, dk, dv of the whole sequence, gathered on every rank."""
    return attend_sharded(ring, **draw(**problem), **options)


def attend_in_process(ranks, layout, problem, options):
    """The gathered results of every rank of an in-process ring."""
    return in_process(ranks, layout, attend, problem, options)


def attend_on_workers(ranks, layout, problem, options):
    """In a worker: the gathered results of a ring of the last `ranks` processes, None on the others."""
    return on_subgroup(ranks, layout, attend, problem, options)


class Untouchable(Transport):
    """The wire of a test in which nothing may be sent."""

    def __init__(self, rank=0, ranks=2):
        super().__init__(rank, ranks)

    def stream(self, *arguments, **options):
        raise AssertionError("a shard was sent")

    def all_gather(self, *arguments):
        raise AssertionError("a tensor was sent")

    def all_gather_object(self, value):
        raise AssertionError("a value was sent")
