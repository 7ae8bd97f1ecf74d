"""All that a rank sees in one piece: where it lies, when it is there, and one call of the backend."""

import gc
import weakref

import pytest
import torch

import ringflash as rf
from ringflash.kernels.reference import Reference
from ringflash.parallel.inprocess import run
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule import landing
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close
from tests.rings import attend, dense, masks, name_of, on_workers

LAYOUTS = [rf.Contiguous(), rf.Zigzag()]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
CALLS = []


@pytest.fixture(autouse=True)
def _waiting_reference(monkeypatch):
    """The reference takes what arrives: on a CPU, everything has by the time of the call."""
    wait_for_all()
    yield
    Reference.waits = False


FORWARD = Reference.forward


def wait_for_all():
    """Also in workers, which live on: they set it at each call."""

    def forward(self, q, k, v, bounds, score, into=None, is_last=False, arrivals=None):
        CALLS.append(None if arrivals is None else arrivals.flags.tolist())
        return FORWARD(self, q, k, v, bounds, score, into, is_last)

    Reference.waits, Reference.forward = True, forward


@pytest.fixture(autouse=True)
def _small_cells(monkeypatch):
    monkeypatch.setattr(landing, "CELL_ROWS", 1)


def attend_landed(member, layout, problem, options):
    return attend(rf.Ring(layout=layout, transport=SymmetricTransport(member, member.reach())), problem, options)


@layouts
@pytest.mark.parametrize("name", masks(29))
@pytest.mark.parametrize("ranks", [2, 5])
def test_every_mask(ranks, name, layout):
    problem = {"queries": 29, "heads": (6, 2), "dim": 4, "value_dim": 3, "batch": 2}
    options = {"mask": masks(29)[name]}
    expected = dense(problem, mask=options["mask"])
    CALLS.clear()
    for results in run(ranks, lambda member: attend_landed(member, layout, problem, options)):
        assert_all_close(results, expected, torch.float64)
    # One call a rank and part of the mask, with everything there; a part that sees no other rank comes as it is.
    parts = 2 if isinstance(options["mask"], rf.Union) else 1
    assert len(CALLS) == ranks * parts
    assert all(call is None or set(call) <= {1} for call in CALLS)


def test_a_layout_of_many_blocks_comes_source_by_source():
    problem = {"queries": 29, "heads": (2, 2)}
    CALLS.clear()
    for results in run(3, lambda member: attend_landed(member, rf.Striped(), problem, {"mask": rf.Causal()})):
        assert_all_close(results, dense(problem, mask=rf.Causal()), torch.float64)
    assert CALLS == [None] * 9


def test_what_is_too_much_comes_source_by_source(monkeypatch):
    problem = {"queries": 29, "heads": (2, 2)}
    monkeypatch.setattr(landing, "MOST_BYTES", 29 * 2 * 16 * 8 - 1)
    CALLS.clear()
    run(3, lambda member: attend_landed(member, rf.Zigzag(), problem, {"mask": rf.Causal()}))
    assert CALLS == [None] * 9


def landed_by_name(ring, problem, options):
    wait_for_all()
    try:
        ring = rf.Ring(ring.transport.group, layout=ring.layout, transport="symmetric")
        return [attend(ring, {**problem, "queries": n}, options) for n in (13, 29, 8)]
    finally:
        Reference.waits = False


@layouts
def test_real_processes(workers, layout):
    problem = {"heads": (4, 2), "batch": 2}
    for results in on_workers(workers, 4, layout, landed_by_name, problem, {"mask": rf.Causal()}):
        for n, result in zip((13, 29, 8), results, strict=True):
            assert_all_close(result, dense({**problem, "queries": n}, mask=rf.Causal()), torch.float64)


@layouts
@pytest.mark.parametrize(
    "mask", [rf.Full(), rf.Causal(), rf.Window(7, 2), rf.Documents([5, 20, 7], causal=True)], ids=name_of
)
def test_pieces_are_each_row_that_is_seen_once_in_cells_the_last_first(mask, layout):
    for rank in range(4):
        here = plan(mask, layout, 32, rank, 4)
        pieces = here.landing.pieces(rank)
        rows = sorted((piece.owner, row) for piece in pieces for row in range(piece.row, piece.row + piece.count))
        assert rows == [(s, row) for s in range(4) for row in range(here.keys(s).start, here.keys(s).stop)]
        assert [piece.place for piece in pieces] == sorted((piece.place for piece in pieces), reverse=True)
        size = here.landing.cell_rows(rank)
        assert all(piece.place // size == (piece.place + piece.count - 1) // size for piece in pieces)
        assert here.landing.bounds.pairs == here.pairs
        if mask == rf.Full():  # own rows stand last
            assert {piece.owner for piece in pieces[: len([p for p in pieces if p.owner == rank])]} == {rank}


def test_cells_are_few_and_whole_blocks(monkeypatch):
    monkeypatch.setattr(landing, "CELL_ROWS", 128)
    for length, size in ((8192, 512), (8200, 1024), (100, 128)):
        here = plan(rf.Causal(), rf.Zigzag(), length, 0, 2)
        assert here.landing.cell_rows(0) == size
        assert len({piece.place // size for piece in here.landing.pieces(0)}) <= landing.CELLS


def test_memory_that_grew_is_let_go():
    """What is kept of earlier calls does not hold on to the memory that they used."""

    def step(member):
        transport = SymmetricTransport(member, member.reach())
        ring = rf.Ring(layout=rf.Zigzag(), transport=transport)
        alive = []
        for n in (8, 64, 8, 128):
            x = torch.randn(1, n, 2, 16)
            out = rf.attention(x, x, x, ring=ring, mask=rf.Causal())
            assert out.isfinite().all()
            alive.append(weakref.ref(transport._workspaces[x.device]))
        gc.collect()
        return [memory() is not None for memory in alive]

    assert run(2, step) == [[False, False, False, True]] * 2


def test_a_first_call_of_inference_leaves_flags_that_training_can_use():
    def step(member):
        ring = rf.Ring(layout=rf.Zigzag(), transport=SymmetricTransport(member, member.reach()))
        x = torch.randn(1, 8, 2, 4, requires_grad=True)
        with torch.inference_mode():
            rf.attention(x, x, x, ring=ring, mask=rf.Causal())
        rf.attention(x, x, x, ring=ring, mask=rf.Causal()).sum().backward()
        return bool(x.grad.isfinite().all())

    CALLS.clear()
    assert run(2, step) == [True, True]
    assert None not in CALLS
