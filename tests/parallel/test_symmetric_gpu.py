"""Two ranks as streams of one GPU: the order of copies, signals and kernels, without a second GPU."""

import pytest
import torch

import ringflash as rf
from ringflash.parallel.inprocess import run
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule import landing
from ringflash.testing.compare import relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw

pytestmark = pytest.mark.gpu
ROOM = (
    64 << 20
)  # asked for before any backward: autograd has one thread for a device, which must not wait for the other rank
MASKS = {
    "full": rf.Full(),
    "causal": rf.Causal(),
    "window": rf.Window(300, 20),
    "documents": rf.Documents([700, 1, 1200, 99], causal=True),
}


def attend_on_a_stream(member, layout, problem, options, times):
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = draw(**problem)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        transport = SymmetricTransport(member, member.reach())
        transport.workspace(device, slot_bytes=ROOM, sums_bytes=ROOM, landing_bytes=ROOM)
        ring = rf.Ring(layout=layout, transport=transport)
        results = []
        for i in range(times):
            if (i + member.rank) % 2:
                torch.cuda._sleep(2_000_000)  # now one rank is late, now the other
            results.append(attend_sharded(ring, **inputs, **options))
        torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lands", [True, False], ids=["landed", "by_source"])
@pytest.mark.parametrize(("backend", "dim"), [("hopper", 128), ("hopper", 64), ("hopper", 256), ("triton", 64)])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_dense_attention(name, backend, dim, lands, route, monkeypatch):
    monkeypatch.setattr(landing, "MOST_BYTES", ROOM if lands else 0)
    problem = {"batch": 2, "queries": 2000, "heads": (4, 2), "dim": dim, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": MASKS[name], "backend": backend, "route": route}
    expected = dense_gradients(**draw(**problem), mask=MASKS[name])
    everyone = run(2, lambda member: attend_on_a_stream(member, rf.Zigzag(), problem, options, 3))
    for results in everyone[0] + everyone[1]:
        for what in ("out", "lse", "dq", "dk", "dv"):
            assert relative_error(results[what], expected[what]) < (1e-5 if what == "lse" else 6e-3), what
    if backend == "hopper":  # its forward repeats bit for bit, whatever came when
        assert all(torch.equal(results["out"], everyone[0][0]["out"]) for results in everyone[0] + everyone[1])
