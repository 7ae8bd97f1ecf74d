"""The ring over NCCL: the cases of the gloo and in-process tests, one GPU per rank, kernels as they come."""

import pytest
import torch

import ringflash as rf
from ringflash.testing.compare import assert_all_close, relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw
from ringflash.testing.workers import Workers
from tests.rings import LAYOUTS, attend, attend_on_workers, masks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# One process of pytest-xdist, where it is used: each would start GPU workers of its own.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("nccl")]
N = 515  # odd, and no multiple of any tile


@pytest.fixture(scope="module")
def gpus():
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    with Workers(min(GPUS, 8), "nccl") as pool:
        yield pool


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", masks(N))
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_fp32_rings_equal_the_oracle(gpus, layout, name, backend):
    problem = {"batch": 2, "queries": N, "heads": (4, 2), "dim": 64, "dtype": torch.float32}
    mask = masks(N)[name]
    x = draw(**problem)
    expected = dense_gradients(x["q"], x["k"], x["v"], mask, x["dout"], x["dlse"])
    options = {"mask": mask, "backend": backend}
    for results in gpus.run(attend_on_workers, gpus.size, layout, {**problem, "device": "cuda"}, options):
        assert_all_close(results, expected, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("heads", [(8, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("peaky", [1.0, 8.0])
def test_bf16_error_does_not_grow_with_the_ring(gpus, layout, heads, peaky):
    """R04: fp32 sums, rounded once; at most a quarter more error than on one GPU."""
    problem = {"queries": 4096, "heads": heads, "dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": rf.Causal(), "backend": "triton", "scale": peaky / 8}
    x = draw(**problem)
    expected = dense_gradients(x["q"], x["k"], x["v"], rf.Causal(), x["dout"], x["dlse"], peaky / 8)
    alone = gpus.run(attend, None, problem, options, ranks=1)[0]
    for results in gpus.run(attend_on_workers, gpus.size, layout, problem, options):
        for name in ("out", "dq", "dk", "dv"):
            ring, one = relative_error(results[name], expected[name]), relative_error(alone[name], expected[name])
            assert ring <= 1.25 * one, f"{name}: {ring:.3g} on the ring, {one:.3g} on one GPU"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["full", "causal", "documents_causal", "window"])
def test_queries_that_travel_give_the_same_gradients(gpus, layout, name):
    problem = {"batch": 2, "queries": N, "heads": (4, 4), "dim": 64, "dtype": torch.float32}
    mask = masks(N)[name]
    x = draw(**problem)
    expected = dense_gradients(x["q"], x["k"], x["v"], mask, x["dout"], x["dlse"])
    options = {"mask": mask, "backend": "triton", "route": "queries"}
    for results in gpus.run(attend_on_workers, gpus.size, layout, {**problem, "device": "cuda"}, options):
        assert_all_close(results, expected, torch.float32)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
def test_both_routes_give_the_same_gradients_in_bf16(gpus, dim, deterministic):
    problem = {"queries": 2000, "heads": (4, 4), "dim": dim, "dtype": torch.bfloat16, "device": "cuda"}
    keys, queries = (
        gpus.run(
            attend_on_workers, gpus.size, rf.Zigzag(), problem,
            {"mask": rf.Causal(), "route": route, "deterministic": deterministic},
        )[-1]
        for route in ("keys", "queries")
    )  # fmt: skip
    for name in ("dq", "dk", "dv"):
        assert relative_error(queries[name], keys[name]) < 2e-3, name


def test_deterministic_rings_repeat_bit_for_bit(gpus):
    problem = {"queries": 2048, "heads": (8, 2), "dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    options = {"mask": rf.Causal(), "deterministic": True}
    first = gpus.run(attend_on_workers, gpus.size, rf.Zigzag(), problem, options)
    for _ in range(10):
        again = gpus.run(attend_on_workers, gpus.size, rf.Zigzag(), problem, options)
        for a, b in zip(first, again, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
