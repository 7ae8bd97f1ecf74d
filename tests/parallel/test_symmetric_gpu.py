"""Two processes on one GPU, which share memory through CUDA's handles: copies, signals and kernels in their real order."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

import ringflash as rf
from ringflash.parallel.peer import PeerTransport
from ringflash.parallel.reach import GroupReach
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule import landing
from ringflash.testing.compare import relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw
from ringflash.testing.workers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]
MASKS = {
    "full": rf.Full(),
    "causal": rf.Causal(),
    "window": rf.Window(300, 20),
    "documents": rf.Documents([700, 1, 1200, 99], causal=True),
}


class SameGpu(GroupReach):
    """CUDA's symmetric memory wants a GPU for each rank; handles between processes do not."""

    def refuses(self, device):
        return None

    def _symmetric(self, size, device):
        mine = torch.empty(size, dtype=torch.uint8, device=device)
        return [
            mine if rank == self._rank else rebuild(*arguments)
            for rank, (rebuild, arguments) in enumerate(self.everyone(reduce_tensor(mine)))
        ]


def ring_on_one_gpu(layout):
    wire = PeerTransport(dist.group.WORLD)
    return rf.Ring(layout=layout, transport=SymmetricTransport(wire, SameGpu(lambda: wire.group)))


def attend_on_one_gpu(layout, problem, options, times, lands):
    """(errors of each result, whether out repeats bit for bit) of this rank."""
    landing.MOST_BYTES = 1 << 30 if lands else 0
    torch.cuda.set_device(0)
    inputs = draw(**problem)
    expected = dense_gradients(**inputs, mask=options["mask"])
    ring = ring_on_one_gpu(layout)
    results = []
    for i in range(times):
        if (i + ring.rank) % 2:
            torch.cuda._sleep(20_000_000)  # now one rank is late, now the other
        q, k, v = (ring.shard(inputs[x]).clone().requires_grad_() for x in ("q", "k", "v"))
        out, lse = rf.attention(q, k, v, ring=ring, return_lse=True, **options)
        gradients = torch.autograd.grad((out, lse), (q, k, v), [ring.shard(inputs[x]) for x in ("dout", "dlse")])
        results.append(dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)))
    errors = [{what: relative_error(one[what], ring.shard(expected[what])) for what in one} for one in results]
    return errors, all(torch.equal(one["out"], results[0]["out"]) for one in results)


@pytest.fixture(scope="module")
def pair():
    with Workers(2, "gloo") as pool:
        yield pool


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize(("backend", "dim"), [("hopper", 128), ("hopper", 64), ("hopper", 256), ("triton", 64)])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_dense_attention(pair, name, backend, dim, lands, route):
    problem = {"batch": 2, "queries": 2000, "heads": (4, 2), "dim": dim, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": MASKS[name], "backend": backend, "route": route}
    for errors, repeats in pair.run(attend_on_one_gpu, rf.Zigzag(), problem, options, 3, lands, timeout_s=100.0):
        for one in errors:
            assert all(error < (1e-4 if what == "lse" else 6e-3) for what, error in one.items()), one
        assert repeats


def replay_on_one_gpu(layout, problem, options, lands):
    """R73: the largest error of 20 replays of a captured forward and backward, each with other inputs, against eager."""
    landing.MOST_BYTES = 1 << 30 if lands else 0
    torch.cuda.set_device(0)
    ring = ring_on_one_gpu(layout)
    fixed = [ring.shard(draw(**problem)[x]).clone() for x in ("q", "k", "v", "dout")]
    leaves = [x.requires_grad_() for x in fixed[:3]]

    def step():
        out = rf.attention(*leaves, ring=ring, **options)
        return (out, *torch.autograd.grad(out, leaves, fixed[3]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    worst = 0.0
    for seed in range(20):
        inputs = draw(**problem, seed=seed)
        with torch.no_grad():
            for x, name in zip(fixed, ("q", "k", "v", "dout"), strict=True):
                x.copy_(ring.shard(inputs[name]))
        graph.replay()
        replayed = [x.clone() for x in captured]
        eager = step()
        worst = max([worst, *(relative_error(a, b) for a, b in zip(replayed, eager, strict=True))])
    return worst


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_captured_step_replays(pair, backend, lands, route):
    problem = {"queries": 1000, "heads": (4, 2), "dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": rf.Causal(), "backend": backend, "route": route}
    assert max(pair.run(replay_on_one_gpu, rf.Zigzag(), problem, options, lands, timeout_s=100.0)) < 1e-3


def attend_to_padding(side, problem, options, lands):
    """R33, R34: the worst error of real rows, and whether padded ones are exactly nothing, where padding holds NaN."""
    landing.MOST_BYTES = 1 << 30 if lands else 0
    torch.cuda.set_device(0)
    S, lengths = problem["queries"], [problem["queries"], problem["queries"] * 5 // 12]
    mask = getattr(rf.Padding, side)(lengths, length=S) & rf.Causal()
    inputs = draw(**problem)
    expected = dense_gradients(**inputs, mask=mask)
    is_real = torch.arange(S, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    is_real = is_real if side == "right" else is_real.flip(1)
    for x in inputs.values():
        x[~is_real] = torch.nan
    ring = ring_on_one_gpu(rf.Zigzag())
    q, k, v = (ring.shard(inputs[x]).clone().requires_grad_() for x in ("q", "k", "v"))
    out, lse = rf.attention(q, k, v, ring=ring, mask=mask, return_lse=True, **options)
    gradients = torch.autograd.grad((out, lse), (q, k, v), [ring.shard(inputs[x]) for x in ("dout", "dlse")])
    here, worst, is_nothing = ring.shard(is_real), {}, True
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
        worst[name] = relative_error(x[here], ring.shard(expected[name])[here])
        is_nothing &= bool((x[~here] == (-torch.inf if name == "lse" else 0)).all())
    return worst, is_nothing


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_R33_R34_what_lies_in_the_padding_has_no_effect(pair, side, lands, route):
    problem = {"batch": 2, "queries": 2000, "heads": (4, 2), "dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"backend": "hopper", "route": route}
    for worst, is_nothing in pair.run(attend_to_padding, side, problem, options, lands, timeout_s=100.0):
        assert all(error < (1e-4 if what == "lse" else 6e-3) for what, error in worst.items()), worst
        assert is_nothing
