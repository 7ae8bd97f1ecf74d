"""benchmarks/ring.py and its plain ring on CPUs: what is compared is right, and figures follow from the times."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import ringflash as rf
from ringflash.testing.compare import assert_all_close
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def load(name):
    """In a worker too: its own folder is on the path of what run.py starts."""
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    return importlib.import_module(name)


def plain():
    """The plain ring over torch's flash for CPUs, which has another signature."""
    module = load("plain_ring")
    module.flash = cpu
    module.flash_backward = lambda dout, q, k, v, out, lse, cq, ck, n, m, p, causal, *seeds: cpu_backward(
        dout, q, k, v, out, lse, p, causal
    )
    return module


def attend_plainly(problem, is_causal):
    """In a worker: the gathered results of the default group."""
    ring = rf.Ring()
    x = draw(**problem)
    leaves = [ring.shard(x[name]).requires_grad_() for name in ("q", "k", "v")]
    out = plain().PlainRing(is_causal)(*leaves)
    gradients = torch.autograd.grad(out, leaves, ring.shard(x["dout"]))
    names = ("out", "dq", "dk", "dv")
    return {name: ring.gather(value.detach()) for name, value in zip(names, (out, *gradients), strict=True)}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_plain_ring_is_right(workers, is_causal):
    problem = {"queries": 64, "heads": (4, 2), "dim": 8, "dtype": torch.float32}
    x = draw(**problem)
    mask = rf.Causal() if is_causal else rf.Full()
    expected = dense_gradients(x["q"], x["k"], x["v"], mask, x["dout"])
    for results in workers.run(attend_plainly, problem, is_causal):
        assert_all_close(results, {name: expected[name] for name in results}, torch.float32)


def measured(mask):
    """In a worker: the rows of a case, by a stopped clock."""
    ring, _ = load("ring"), plain()
    ring.DEVICE, ring.HEAD_DIM = "cpu", 8
    ring.context_parallel = lambda case, inputs: None
    ring.time_ms, ring.host_ms = lambda call, goes_back: float(len(call(goes_back))), lambda case, call: 0.25
    found = ring.candidates
    ring.candidates = lambda *arguments: {name: x for name, x in found(*arguments).items() if x is not None}
    try:
        rings = {name: rf.Ring(transport=name) for name in ("symmetric", "peer", "gathered")}
        rows = ring.measure(ring.Case(512, "4:2", mask), rings, 2)
        return [(row.direction, row.efficiency, row.extra, row.tflops) for row in rows]
    finally:
        del sys.modules["ring"]


@pytest.mark.parametrize("mask", ["causal", "full", "documents", "window"])
def test_every_candidate_is_checked_and_timed(workers, mask):
    everyone = workers.run(measured, mask, timeout_s=120.0)
    for forward, both in everyone:
        assert (forward[0], both[0]) == ("forward", "both")
        rings = {"symmetric", "peer", "gathered", "symmetric, queries travel"}
        assert set(both[2]["efficiency"]) == rings | ({"plain NCCL ring"} if mask in ("causal", "full") else set())
        assert set(both[3]) == {"alone", *both[2]["efficiency"]}
        assert both[1] == forward[1] == 1 / 8  # as long as one of eight alone


def test_goals_are_those_of_two_gpus():
    ring = load("ring")
    assert ring.goal_of(ring.Case(8192, "64:8", "causal"), 2) == 0.95
    assert ring.goal_of(ring.Case(131072, "16:16", "documents"), 2) == 0.9
    assert ring.goal_of(ring.Case(8192, "64:8", "causal"), 4) is None
    assert sum(ring.DOCUMENTS) == 128
