"""benchmarks/host.py on a CPU: both candidates are called, forward and backward, and a call's share is reported."""

import sys

import torch

from tests.benchmarks.test_ring import load


def test_a_row_is_divided_by_its_calls(monkeypatch):
    host = load("host")
    host.DEVICE, host.DTYPE, host.TOKENS, host.HEAD_DIM, host.IN_A_ROW, host.ROWS = "cpu", torch.float32, 16, 8, 5, 3
    clock = iter(x for _ in range(100) for x in (0.0, 5e-4, 0.0, 1e-3))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    try:
        forward, backward = host.measure((4, 2))
        x = [torch.randn(1, 16, H, 8) for H in (4, 2, 2)]
        assert torch.allclose(host.by_torch(*x), host.rf.attention(*x, mask=host.rf.Causal()), atol=1e-5)
    finally:
        sys.modules.pop("host")
    assert (forward.direction, forward.heads, forward.extra["host_us"]) == (
        "forward",
        "4:2",
        {"ringflash": 100, "torch": 100},
    )
    assert backward.extra["host_us"] == {"ringflash": 200, "torch": 200}
