"""Functions that tests send to worker processes, and the cases they share."""

import time
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.kernels.backend import Backend
from ringflash.kernels.reference import Reference
from ringflash.parallel.function import RingAttentionFunction, Work
from ringflash.parallel.inprocess import run
from ringflash.parallel.passage import InFlight
from ringflash.parallel.transport import Transport
from ringflash.schedule.plan import plan
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from tests.philox import kept_pairs

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
        "prefix": rf.Prefix(third),
        "chunked": rf.Chunked(5) & rf.Causal(),
        "first_and_window": rf.FirstKeys(2) & rf.Causal() | rf.Window(4, 0),
    }


def dense(problem, *, mask=None, scale=None, score=None):
    """What the oracle says about `draw(**problem)`."""
    inputs = draw(**problem)
    kept = None
    if score is not None and score.dropout:
        (B, Sq, Hq, _), Sk = inputs["q"].shape, inputs["k"].shape[1]
        kept = kept_pairs(score.seed, score.dropout, B, Hq, Sq, Sk)
    return dense_gradients(**inputs, mask=rf.Full() if mask is None else mask, scale=scale, score=score, kept=kept)


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


@lru_cache
def mesh_of_last(ranks):
    """A mesh of one dimension over the same members."""
    world = dist.get_world_size()
    return DeviceMesh("cpu", list(range(world - ranks, world)))


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
    """out, lse, dq, dk, dv of the whole sequence, gathered on every rank, on the CPU."""
    return {name: x.cpu() for name, x in attend_sharded(ring, **draw(**problem), **options).items()}


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


# What communicates or makes groups; isend and irecv go through batch_isend_irecv, which compares them by identity.
WIRE_CALLS = ["batch_isend_irecv", "send", "recv", "all_gather", "all_gather_into_tensor", "all_gather_object"]
WIRE_CALLS += [
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
]
WIRE_CALLS += ["monitored_barrier", "new_group", "new_subgroups", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
WIRE_CALLS += ["scatter", "split_group"]


@contextmanager
def counted_calls():
    """How often each function of torch.distributed that communicates or makes a group was called inside; a dict."""
    counts = {}
    mocks = {name: mock.Mock(wraps=getattr(dist, name)) for name in WIRE_CALLS}
    new_group = dist.distributed_c10d._new_group_with_tag
    mocked_new_group = mock.Mock(wraps=new_group)
    with (
        mock.patch.multiple(dist, **mocks),
        mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", mocked_new_group),
    ):
        yield counts
    counts |= {name: called.call_count for name, called in mocks.items() if called.call_count}
    if mocked_new_group.call_count:
        counts["new_group"] = mocked_new_group.call_count


class Recorder(Backend):
    """The reference, noting in `events` whose keys it is given; v of each source must hold the source's rank."""

    name = "recorder"

    def __init__(self, events):
        self.events, self.reference = events, Reference()
        self.kept = []  # what was given to add into

    def refuses(self, call):
        return None

    def forward(self, q, k, v, *arguments, **options):
        self.events.append(("forward", int(v.flatten()[0])))
        self.kept.append(options.get("into"))
        return self.reference.forward(q, k, v, *arguments, **options)

    def backward(self, q, k, v, *arguments, **options):
        self.events.append(("backward", int(v.flatten()[0])))
        self.kept.append((*arguments, *options.values()))
        return self.reference.backward(q, k, v, *arguments, **options)


class NotedInFlight(InFlight):
    def __init__(self, in_flight, note):
        self.in_flight, self.note = in_flight, note

    def wait(self):
        self.note()
        self.in_flight.wait()


def note_messages(transport, events):
    """From now on the transport notes ("start", bytes sent) and ("wait", bytes received) of each exchange that has any."""
    exchange = transport.exchange

    def size(messages):
        return sum(x.numel() * x.itemsize for x, _ in messages)

    def note(what, messages):
        if messages:
            events.append((what, size(messages)))

    def noted(sends, receives):
        note("start", sends)
        return NotedInFlight(exchange(sends, receives), lambda: note("wait", receives))

    transport.exchange = noted


class ThrottledInFlight(InFlight):
    def __init__(self, in_flight, ready):
        self.in_flight, self.ready = in_flight, ready

    def wait(self):
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.in_flight.wait()


def throttle(transport, bytes_per_s):
    """From now on what is sent takes its time on a link that carries one message after another."""
    exchange, free = transport.exchange, [0.0]

    def throttled(sends, receives):
        size = sum(x.numel() * x.itemsize for x, _ in sends)
        free[0] = max(free[0], time.monotonic()) + size / bytes_per_s
        return ThrottledInFlight(exchange(sends, receives), free[0])

    transport.exchange = throttled


def sent_bytes(events):
    return sum(size for what, size in events if what == "start")


def messages_of(ring, problem, mask, route="keys"):
    """(events of the forward pass, events of the backward pass) on this rank."""
    inputs = draw(**problem)
    events = []
    note_messages(ring.transport, events)
    q, k, v = (ring.shard(inputs[name]).requires_grad_() for name in ("q", "k", "v"))
    out = rf.attention(q, k, v, ring=ring, mask=mask, length=inputs["q"].shape[1], route=route)
    after_forward = len(events)
    out.sum().backward()
    return events[:after_forward], events[after_forward:]


def work_of(ring, mask, length, route="keys"):
    """(events of the forward pass, of the backward pass, what the backend was given to add into) on this rank, in bf16."""
    events = []
    note_messages(ring.transport, events)
    here = plan(mask, ring.layout, length, ring.rank, ring.ranks)
    q, k = torch.randn(2, 1, here.positions.numel(), 2, 4, dtype=torch.bfloat16)
    v = torch.full_like(k, float(ring.rank))
    recorder = Recorder(events)
    work = Work(
        plans=(here,),
        score=rf.Score(0.5),
        forward=recorder,
        backward=recorder,
        transport=ring.transport,
        deterministic=False,
        route=route,
    )
    out, _ = RingAttentionFunction.apply(*(x.requires_grad_() for x in (q, k, v)), None, work)
    after_forward = len(events)
    out.sum().backward()
    return events[:after_forward], events[after_forward:], recorder.kept
