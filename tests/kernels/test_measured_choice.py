"""choose() by measured speed: the fastest that may serve, each direction by itself, alike on every rank."""

from dataclasses import replace

import pytest
import torch

import ringflash as rf
from ringflash import resolved
from ringflash.kernels import backend as backends
from ringflash.kernels.backend import Call, choose
from ringflash.kernels.table import Cell, KernelTable
from ringflash.testing.compare import assert_all_close
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw
from tests.rings import in_process

# The CPU's own kernels stand for those of a GPU: flash is somebody else's, the reference ours.
FLASH_FIRST, REFERENCE_FIRST = {"flash": 9.0, "reference": 1.0}, {"reference": 9.0, "flash": 1.0}


def table(forward=FLASH_FIRST, backward=FLASH_FIRST, gpu="cpu", masks=("full", "causal"), lengths=(1024,)):
    speeds = {"forward": forward, "backward": backward}
    cells = {Cell(d, 64, mask, n): s for d, s in speeds.items() for mask in masks for n in lengths}
    return KernelTable(gpu, cells, {})


CALL = Call(
    torch.device("cpu"), torch.float64, 4, 2, 64, 64, 0.125, frozenset(), False,
    mask="full", length_class=1024, is_alone=True,
)  # fmt: skip


def test_the_fastest_serves_in_each_direction_by_itself():
    mixed = table(FLASH_FIRST, REFERENCE_FIRST)
    assert choose(CALL, mixed).backend.name == "flash"
    assert choose(replace(CALL, direction="backward"), mixed).backend.name == "reference"


@pytest.mark.parametrize(
    ("change", "refusals"),
    [
        ({"is_alone": False}, (("flash", "it rounds what is yet to be merged, so it serves here only when named"),)),
        ({"head_dim": 48, "value_dim": 48}, (("flash", "head_dim 48 was not measured, so it serves here only when named"),)),
        ({"terms": frozenset({"softcap"})}, (("flash", "it has no softcap"),)),
        ({"mask": "other"}, ()),
        ({"length_class": 2048}, ()),
        ({"length_class": 0}, ()),
        ({"head_dim": 512, "value_dim": 512}, ()),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:attention. backend 'flash' cannot run this call:UserWarning")
def test_ours_serve_where_others_may_not_or_nothing_was_measured(change, refusals):
    choice = choose(replace(CALL, **change), table())
    assert (choice.backend.name, choice.refusals) == ("reference", refusals)
    if "terms" not in change:
        assert choose(replace(CALL, **change), "flash").backend.name == "flash"


def test_a_table_of_another_gpu_and_a_backend_that_nobody_knows_are_refused():
    with pytest.raises(
        ValueError, match="KernelTable of 'NVIDIA A100', the tensors are on 'cpu'; measure one here with"
    ):
        choose(CALL, table(gpu="NVIDIA A100"))
    with pytest.raises(ValueError, match="a KernelTable that ranks 'fa9'; it knows hopper, triton, cudnn"):
        choose(CALL, table({"fa9": 1.0}))


class Willing(backends.Backend):
    """Serves everything and computes nothing."""

    def __init__(self, name):
        self.name, self.rounds_partials = name, name in ("cudnn", "flash", "fa4")

    def refuses(self, call):
        return None

    def forward(self, *_, **__):
        raise AssertionError

    backward = forward


@pytest.fixture
def h200(monkeypatch):
    """As on an H200 where every backend serves; the answer is not kept."""
    monkeypatch.setattr(backends, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(backends, "_load", lambda name: (Willing(name), None))
    gpu = replace(CALL, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    return lambda **changes: choose.__wrapped__(replace(gpu, **changes)).backend.name


def test_the_devices_own_table_is_taken_unasked(h200, monkeypatch):
    own = table(
        forward={"cudnn": 3.0, "triton": 2.0, "hopper": 1.0}, backward={"hopper": 3.0, "cudnn": 2.0}, gpu="NVIDIA H200"
    )
    monkeypatch.setattr(backends, "committed", {"NVIDIA H200": own}.get)
    assert h200() == "cudnn" and h200(direction="backward") == "hopper"
    # In a ring, the fastest of ours.
    assert h200(is_alone=False) == "triton"
    assert h200(mask="other") == h200(length_class=4096) == "hopper"
    monkeypatch.setattr(backends, "gpu_name", lambda device: "NVIDIA A100")
    assert h200() == "hopper"


def test_the_committed_table_of_the_h200_serves_every_call_that_it_measured(h200):
    cells = backends.committed("NVIDIA H200").cells
    for cell, speeds in cells.items():
        facts = {"direction": cell.direction, "mask": cell.mask, "length_class": cell.length}
        found = h200(**facts, head_dim=cell.head_dim, value_dim=cell.head_dim)
        assert speeds[found] == max(speeds.values())
        assert h200(**facts, head_dim=cell.head_dim, value_dim=cell.head_dim, is_alone=False) in ("hopper", "triton")


def asked(monkeypatch, run):
    """The calls of forward that `run` makes attention() choose a backend for."""
    calls = []
    real = resolved.choose
    watched = lambda call, name: (calls.append(call) if call.direction == "forward" else None, real(call, name))[1]  # noqa: E731
    monkeypatch.setattr(resolved, "choose", watched)
    run()
    return calls


def attend(mask=None, queries=600, keys=600, **options):
    x = draw(queries=queries, keys=keys, heads=(1, 1), dim=8, dtype=torch.float32)
    rf.attention(x["q"], x["k"], x["v"], mask=mask, **options)


SINKS = rf.Score(sinks=torch.zeros(1))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, ("full", 1024, True)),
        ({"mask": rf.Causal()}, ("causal", 1024, True)),
        ({"mask": rf.Causal(), "ring": rf.Ring()}, ("causal", 1024, True)),
        ({"mask": rf.Causal(), "return_lse": True}, ("causal", 1024, False)),
        ({"mask": rf.Causal(), "score": SINKS}, ("causal", 1024, False)),
        ({"mask": rf.Window(9, 0)}, ("other", 1024, True)),
        ({"mask": rf.FirstKeys(4) & rf.Causal() | rf.Window(9, 0)}, ("other", 1024, False)),
        ({"mask": rf.Causal(), "queries": 90}, ("other", 1024, True)),
        ({"queries": 90}, ("other", 1024, True)),
        ({"queries": 500, "keys": 500}, ("full", 0, True)),
    ],
)
def test_attention_asks_with_mask_length_and_whether_anything_is_merged(monkeypatch, options, facts):
    (call,) = asked(monkeypatch, lambda: attend(**options))
    assert (call.mask, call.length_class, call.is_alone) == facts


def test_backward_is_chosen_by_itself_where_there_is_one(monkeypatch):
    directions = []
    real = resolved.choose
    watched = lambda call, name: (directions.append(call.direction), real(call, name))[1]  # noqa: E731
    monkeypatch.setattr(resolved, "choose", watched)
    q, k, v = (torch.zeros(1, 8, 1, 8, requires_grad=True) for _ in range(3))
    rf.attention(q, k, v)
    rf.attention(q.detach(), k.detach(), v.detach())
    assert directions == ["forward", "backward", "forward"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_asks_the_same_and_by_the_whole_length(monkeypatch, ranks):
    """1025 tokens: the shards differ, and none is in the class of the whole."""
    x = draw(queries=1025, heads=(1, 1), dim=8, dtype=torch.float32)

    def step(ring):
        rf.attention(*(ring.shard(x[name]) for name in "qkv"), ring=ring, mask=rf.Causal(), length=1025)

    calls = asked(monkeypatch, lambda: in_process(ranks, rf.Zigzag(), step))
    assert len(calls) == ranks and len(set(calls)) == 1
    assert (calls[0].mask, calls[0].length_class, calls[0].is_alone) == ("causal", 2048, False)


PROBLEM = {"queries": 600, "heads": (4, 2), "dim": 64, "dtype": torch.float64}


@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal()], ids=str)
@pytest.mark.parametrize(
    "speeds", [(FLASH_FIRST, FLASH_FIRST), (FLASH_FIRST, REFERENCE_FIRST), (REFERENCE_FIRST, FLASH_FIRST)]
)
def test_results_are_those_of_dense_attention_whoever_serves(mask, speeds):
    inputs = draw(**PROBLEM)
    leaves = [inputs[name].clone().requires_grad_() for name in "qkv"]
    out = rf.attention(*leaves, mask=mask, backend=table(*speeds))
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, inputs["dout"])), strict=True))
    whole = dense_gradients(**(inputs | {"dlse": None}), mask=mask)
    assert_all_close(found, {name: whole[name] for name in found}, torch.float64)


def test_a_module_keeps_a_table():
    inputs = draw(**(PROBLEM | {"queries": 20}))
    module = rf.RingAttention(mask=rf.Causal(), backend=table())
    out = module(*(inputs[name] for name in "qkv"))
    assert torch.equal(out, rf.attention(*(inputs[name] for name in "qkv"), mask=rf.Causal()))
