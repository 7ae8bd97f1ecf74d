"""benchmarks/ring_kernels.py on a CPU: every rank computes its own part of the pairs, once, in either way."""

import sys

import pytest
import torch

import ringflash as rf
from ringflash import resolved
from ringflash.kernels.reference import Reference
from ringflash.parallel import function
from ringflash.schedule import landing
from ringflash.schedule.plan import plan
from tests.benchmarks.test_ring import load

TOTAL = 1024


class Counting(Reference):
    """Notes the pairs of every launch, and that all who wait are told to go on."""

    waits = True

    def __init__(self):
        self.launches = []

    def forward(self, q, k, v, bounds, score, into=None, is_last=False, arrivals=None):
        assert arrivals is None or bool(arrivals.flags.all())
        self.launches.append(bounds.pairs)
        assert k.shape[1] == bounds.columns or arrivals is not None
        return function.Partial.empty(q, v.shape[3])

    def backward(self, q, k, v, rows, bounds, score, dq, dk, dv, deterministic, is_all=False, lands=None):
        assert lands is None or bool(lands.arrivals.flags.all())
        self.launches.append(bounds.pairs)

    def gradients(self, q, k, v, rows, bounds, score, deterministic):
        self.launches.append(bounds.pairs)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def lands_backward(self, head_dim, value_dim):
        return True


@pytest.fixture
def ring_kernels(monkeypatch):
    module = load("ring_kernels")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "HEAD_DIM", 8)
    monkeypatch.setattr(load("ring"), "HEAD_DIM", 8)
    monkeypatch.setattr(landing, "MOST_BYTES", landing.MOST_BYTES)
    yield module
    for name in ("ring_kernels", "ring"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("heads", ["4:4", "4:1"])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "documents"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_together_visit_every_pair(ring_kernels, monkeypatch, ranks, mask, heads):
    counting = Counting()
    real = resolved._resolve

    def counted(*arguments):
        work, facts = real(*arguments)
        return function.Work(**{**vars(work), "forward": counting, "backward": counting}), facts

    monkeypatch.setattr(resolved, "_resolve", counted)
    case = ring_kernels.Case(TOTAL, heads, mask)
    launched = {}

    def noted(run, head_start_ms):
        counting.launches.clear()
        run()
        launched.setdefault(len(launched), list(counting.launches))
        return 1.0

    monkeypatch.setattr(ring_kernels, "time_ms", noted)
    forward, both = ring_kernels.measure(case, ranks, 1)
    assert forward.extra["efficiency"] == {"by source": 1 / ranks, "landed": 1 / ranks}
    assert (forward.direction, both.direction) == ("forward", "both")
    first = [launched[i] for i in range(2 * (1 + 2 * ranks))]  # forward and both of alone and of each rank in each way
    alone, by_source, landed = first[:2], first[2 : 2 + 2 * ranks], first[2 + 2 * ranks :]
    pairs = plan(case.rule, rf.Contiguous(), TOTAL).pairs
    assert [sum(launches) for launches in alone] == [pairs, 2 * pairs]
    for way in (by_source, landed):
        assert sum(sum(launches) for launches in way[::2]) == pairs
        assert sum(sum(launches) for launches in way[1::2]) == 2 * pairs
    if mask in ("causal", "full"):
        assert all(len(launches) == ranks for launches in by_source[::2])
        assert all(len(launches) == 1 for launches in landed[::2])
