"""`symmetric` and the other transports on real GPUs: results, streams, graphs, synchronisation, memory."""

import pytest
import torch

import ringflash as rf
from ringflash.kernels.partial import Partial
from ringflash.kernels.reference import Reference
from ringflash.parallel.function import Work, forward_pass
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule import landing
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close, relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from ringflash.testing.workers import Workers
from tests.rings import masks, subgroup

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# One process of pytest-xdist, where it is used: each would start GPU workers of its own.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("nccl")]
TRANSPORTS = ["peer", "gathered", "symmetric"]
N = 1030  # no multiple of any tile
BF16 = {"heads": (8, 4), "dtype": torch.bfloat16, "device": "cuda"}


@pytest.fixture(scope="module")
def gpus():
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    with Workers(min(GPUS, 8), "nccl") as pool:
        yield pool


RINGS = {}


def ring_of(transport, layout=None):
    """One for each transport: its memory stays."""
    if transport not in RINGS:
        RINGS[transport] = rf.Ring(subgroup(torch.distributed.get_world_size())[0], transport=transport)
    ring = RINGS[transport]
    if transport == "symmetric":
        assert isinstance(ring.transport, SymmetricTransport)
        assert ring.transport.refuses(torch.device("cuda", torch.cuda.current_device())) is None
    return ring.with_layout(rf.Zigzag() if layout is None else layout)


def attend_by(transport, layout, problem, options, most_bytes=None):
    landing.MOST_BYTES = 512 << 20 if most_bytes is None else most_bytes
    return {
        name: x.cpu() for name, x in attend_sharded(ring_of(transport, layout), **draw(**problem), **options).items()
    }


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("name", masks(N))
@pytest.mark.parametrize("layout", [rf.Contiguous(), rf.Zigzag(), rf.Striped()], ids=lambda x: type(x).__name__)
def test_fp32_equals_the_oracle(gpus, layout, name, route):
    problem = {"batch": 2, "queries": N, "heads": (4, 2), "dim": 64, "dtype": torch.float32}
    mask = masks(N)[name]
    x = draw(**problem)
    expected = dense_gradients(x["q"], x["k"], x["v"], mask, x["dout"], x["dlse"])
    options = {"mask": mask, "backend": "triton", "route": route}
    for results in gpus.run(attend_by, "symmetric", layout, {**problem, "device": "cuda"}, options):
        assert_all_close(results, expected, torch.float32)


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", masks(N))
def test_bf16_equals_the_oracle(gpus, name, dim, lands, route):
    """As the Hopper kernels serve it: all keys at once, which arrive meanwhile, or source by source."""
    problem = {"batch": 2, "queries": N, "dim": dim, **BF16}
    mask = masks(N)[name]
    expected = dense_gradients(**draw(**problem), mask=mask)
    for results in gpus.run(
        attend_by, "symmetric", rf.Zigzag(), problem, {"mask": mask, "route": route}, None if lands else 0
    ):
        for what, actual in results.items():
            assert relative_error(actual, expected[what].cpu()) < (1e-4 if what == "lse" else 6e-3), what


def attend_at_length(layout, problem, options, most_bytes):
    """The largest difference from the whole sequence on one GPU."""
    landing.MOST_BYTES = most_bytes
    ring = ring_of("symmetric", layout)
    inputs = draw(**problem)

    def results(q, k, v, dout, **options):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rf.attention(*leaves, **options)
        return (out, *torch.autograd.grad(out, leaves, dout))

    whole = [inputs[name] for name in ("q", "k", "v", "dout")]
    expected = [ring.shard(x) for x in results(*whole, mask=options["mask"], backend="hopper")]
    shards = [ring.shard(x) for x in whole]
    return max(
        relative_error(a, b)
        for _ in range(3)
        for a, b in zip(results(*shards, ring=ring, **options), expected, strict=True)
    )


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(3000, 0)], ids=["full", "causal", "window"])
def test_a_kernel_on_all_processors_gets_what_it_waits_for(gpus, mask, lands, route):
    """Enough tiles for every multiprocessor: what a waiting kernel needs must not want one."""
    problem = {"queries": 8192, "heads": (16, 16), "dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": mask, "backend": "hopper", "route": route}
    most_bytes = 1 << 30 if lands else 0
    assert max(gpus.run(attend_at_length, rf.Zigzag(), problem, options, most_bytes, timeout_s=100.0)) < 3e-3


def attend_on_streams(transport, problem, times):
    """R52: the largest difference from one process of calls whose inputs, forward and result are on streams of their own."""
    ring, worst = ring_of(transport), 0.0
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = draw(**problem)
    shards = [ring.shard(inputs[name]) for name in ("q", "k", "v", "dout")]
    expected = attend_sharded(ring, **{n: inputs[n] for n in ("q", "k", "v", "dout")}, mask=rf.Causal())
    expected = [ring.shard(expected[name]) for name in ("out", "dq", "dk", "dv")]
    torch.cuda.synchronize()
    for i in range(times):
        slow.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(slow):
            torch.cuda._sleep(200_000 * (1 + (i + ring.rank) % 2))
            q, k, v, dout = (x * 1.0 for x in shards)
        other.wait_stream(slow)
        with torch.cuda.stream(other):
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = rf.attention(*leaves, ring=ring, mask=rf.Causal())
            first = out.detach().clone()
        torch.cuda.current_stream().wait_stream(other)
        gradients = torch.autograd.grad(out, leaves, dout)
        worst = max([worst, *(relative_error(a, b) for a, b in zip((first, *gradients), expected, strict=True))])
    return worst


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_R52_streams_of_the_caller(gpus, transport):
    problem = {"queries": 2048, "dim": 64, **BF16}
    assert max(gpus.run(attend_on_streams, transport, problem, 200, timeout_s=100.0)) < 2e-3


def replay(transport, problem, route, most_bytes):
    """R73: the largest difference of 100 replays of a captured step, each with other inputs, from eager."""
    landing.MOST_BYTES = most_bytes
    ring = ring_of(transport)
    fixed = [ring.shard(draw(**problem)[x]).clone() for x in ("q", "k", "v", "dout")]
    leaves = [x.requires_grad_() for x in fixed[:3]]

    def step():
        out = rf.attention(*leaves, ring=ring, mask=rf.Causal(), route=route)
        return (out, *torch.autograd.grad(out, leaves, fixed[3]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph, worst = torch.cuda.CUDAGraph(), 0.0
    with torch.cuda.graph(graph):
        captured = step()
    for i in range(100):
        with torch.no_grad():
            for x in fixed:
                x.copy_(torch.randn_like(x))
        graph.replay()
        if i % 10 == 0:
            replayed = [x.clone() for x in captured]
            worst = max([worst, *(relative_error(a, b) for a, b in zip(replayed, step(), strict=True))])
    return worst


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("most_bytes", [1 << 30, 0], ids=["landed", "by_source"])
@pytest.mark.parametrize("transport", ["symmetric", "peer"])
def test_R73_a_captured_step_replays(gpus, transport, most_bytes, route):
    problem = {"queries": 4096, "dim": 128, **BF16}
    assert max(gpus.run(replay, transport, problem, route, most_bytes, timeout_s=100.0)) < 2e-3


def step_without_sync(transport, layout, mask, problem):
    """R80: raises where the host waits for the device."""
    ring = ring_of(transport, layout)
    leaves = [ring.shard(draw(**problem)[x]).clone().requires_grad_() for x in ("q", "k", "v")]
    dout = ring.shard(draw(**problem)["dout"])
    for i in range(3):
        if i == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = rf.attention(*leaves, ring=ring, mask=mask)
            torch.autograd.grad(out, leaves, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.parametrize("mask", [rf.Causal(), rf.Documents([1000, 48, 1000], causal=True)], ids=["dense", "packed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_R80_the_host_waits_for_nothing(gpus, transport, mask):
    layout = rf.Zigzag() if mask == rf.Causal() else rf.Balanced(mask)
    assert all(gpus.run(step_without_sync, transport, layout, mask, {"queries": 2048, "dim": 128, **BF16}))


def extra_memory(transport, tokens, most_bytes):
    """R59: bytes beside inputs, out, lse and gradients of forward, and of forward with backward."""
    landing.MOST_BYTES = most_bytes
    RINGS.clear()  # of tests before, whose memory stays
    ring = ring_of(transport)
    q = torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, tokens, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dout = torch.randn_like(q)
    extra = []
    for goes_back in (False, True):
        for _ in range(2):  # the first one makes what is kept
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = rf.attention(q, k, v, ring=ring, mask=rf.Causal(), route="keys", backend="hopper")
            results = [out]
            if goes_back:
                results += torch.autograd.grad(out, (q, k, v), dout)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            kept = sum(x.numel() * x.itemsize for x in results)
            del out, results
        workspaces = getattr(ring.transport, "_workspaces", {})
        extra.append(peak - kept + sum(x.blocks[ring.rank].numel() for x in workspaces.values()))
    return extra


@pytest.mark.parametrize("transport", ["peer", "symmetric"])
def test_R59_extra_memory_is_what_the_documents_say(gpus, transport):
    tokens = 32768
    forward, both = gpus.run(extra_memory, transport, tokens, 0)[-1]
    message = tokens * 8 * 256 * 2
    partial = 4 * tokens * 32 * 129
    sums = 4 * tokens * 8 * 256
    assert forward <= 1.1 * (partial + 2 * message)
    assert both <= 1.1 * (partial + 4 * tokens * 32 + 2 * message + 4 * sums)


class Sleeper(Reference):
    """Kernels of a known length in place of attention."""

    def __init__(self, cycles):
        self.cycles = cycles

    def forward(self, q, k, v, bounds, score, into=None, is_last=False):
        torch.cuda._sleep(self.cycles)
        return into or Partial.empty(q, v.shape[-1])


def overlapped(transport, cycles, tokens):
    """Milliseconds of sleep alone, of a pass of a ring that computes nothing, and of one that sleeps at every source."""
    ring = ring_of(transport, rf.Contiguous())
    here = plan(rf.Full(), ring.layout, tokens * ring.ranks, ring.rank, ring.ranks)
    q = torch.randn(1, tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, tokens, 8, 128, device="cuda", dtype=torch.bfloat16)

    def time_ms(run):
        run()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def ring_pass(cycles):
        backend = Sleeper(cycles)
        work = Work((here,), rf.Score(1.0), backend, backend, ring.transport, deterministic=False)
        return lambda: forward_pass(q, k, v, work)

    asleep = time_ms(lambda: [torch.cuda._sleep(cycles) for _ in range(ring.ranks)])
    return asleep, time_ms(ring_pass(0)), time_ms(ring_pass(cycles))


@pytest.mark.parametrize("transport", ["peer", "symmetric"])
def test_transfers_hide_under_compute(gpus, transport):
    """256 MiB a hop, which take 0.7 ms, beside 1.3 ms of sleep at each source."""
    for asleep, moving, both in gpus.run(overlapped, transport, 2_500_000, 65536):
        assert moving > 0.1 * asleep
        assert both < 1.1 * asleep


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
def test_R77_one_hardware_queue_is_enough(monkeypatch, lands):
    """As Megatron sets it; what is queued never waits for what is queued later."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    problem = {"batch": 2, "queries": N, "dim": 128, **BF16}
    expected = dense_gradients(**draw(**problem), mask=rf.Causal())
    with Workers(min(GPUS, 8), "nccl") as pool:
        options, most_bytes = {"mask": rf.Causal()}, None if lands else 0
        for results in pool.run(attend_by, "symmetric", rf.Zigzag(), problem, options, most_bytes, timeout_s=100.0):
            for what, actual in results.items():
                assert relative_error(actual, expected[what].cpu()) < (1e-4 if what == "lse" else 6e-3), what
