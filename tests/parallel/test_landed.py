"""All that a rank sees in one piece: where it lies, when it is there, and one call of the backend."""

import gc
import weakref

import pytest
import torch

import ringflash as rf
from ringflash.kernels.backend import Rows
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
    wait_no_more()


FORWARD, BACKWARD, LANDS_BACKWARD = Reference.forward, Reference.backward, Reference.lands_backward


def wait_no_more():
    Reference.waits, Reference.lands_backward = False, LANDS_BACKWARD


def whole(arrivals, rows, *tensors):
    """What landed and own rows, where they belong; the rest of what is given is not read."""
    size, found = landing.BLOCK_ROWS, []
    for landed, own in zip(tensors, arrivals.shard, strict=True):
        parts = [
            (own if place >= 0 else landed)[
                :, (at := place if place >= 0 else -1 - place) : at + min(size, rows - i * size)
            ]
            for i, place in enumerate(arrivals.places.tolist())
        ]
        found.append(torch.cat(parts, 1) if parts else landed[:, :0])
    return found


def wait_for_all():
    """Also in workers, which live on: they set it at each call."""

    def forward(self, q, k, v, bounds, score, into=None, is_last=False, arrivals=None):
        CALLS.append(None if arrivals is None else arrivals.flags.tolist())
        if arrivals is not None:
            k, v = whole(arrivals, bounds.columns, k, v)
        return FORWARD(self, q, k, v, bounds, score, into, is_last)

    def backward(self, q, k, v, rows, bounds, score, dq, dk, dv, deterministic, is_all=False, lands=None):
        if lands is None:
            BACKWARD(self, q, k, v, rows, bounds, score, dq, dk, dv, deterministic, is_all)
            return
        arrivals, departures = lands.arrivals, lands.departures
        CALLS.append(arrivals.flags.tolist())
        if lands.travels == "queries":
            dk.zero_(), dv.zero_()
            q, dout, lse, delta = whole(arrivals, bounds.rows, q, rows.dout, rows.lse, rows.delta)
            rows = Rows(dout, dout, lse, delta, rows.has_dlse)
        else:
            k, v = whole(arrivals, bounds.columns, k, v)
        assert all((x == 0).all() for x in (dq, dk, dv, departures.counts))
        assert (departures.flags == (departures.departing == 0)).all()
        BACKWARD(self, q, k, v, rows, bounds, score, dq, dk, dv, False)
        # As kernels do: a program of keys that nothing departs of does not count.
        assert departures.blocks.sum() == departures.departing
        if departures.departing:
            departures.flags.fill_(1)

    Reference.waits, Reference.forward = True, forward
    Reference.lands_backward, Reference.backward = lambda *_: True, backward


@pytest.fixture(autouse=True)
def _small_cells(monkeypatch):
    monkeypatch.setattr(landing, "BLOCK_ROWS", 1)


def attend_landed(member, layout, problem, options):
    return attend(rf.Ring(layout=layout, transport=SymmetricTransport(member, member.reach())), problem, options)


@layouts
@pytest.mark.parametrize("name", masks(29))
@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize(("ranks", "block"), [(2, 4), (5, 1)])
def test_every_mask(monkeypatch, ranks, block, route, name, layout):
    """Blocks of one row are own or another's; of four, often of both, and the last is not whole."""
    monkeypatch.setattr(landing, "BLOCK_ROWS", block)
    problem = {"queries": 29, "heads": (6, 2), "dim": 4, "value_dim": 3, "batch": 2}
    options = {"mask": masks(29)[name], "route": route}
    expected = dense(problem, mask=options["mask"])
    CALLS.clear()
    for results in run(ranks, lambda member: attend_landed(member, layout, problem, options)):
        assert_all_close(results, expected, torch.float64)
    # One call forward and one back a rank, with everything there. Of the parts of a union forward only, and one that sees
    # no other rank comes as it is.
    assert len(CALLS) == 2 * ranks
    assert all(call is None or set(call) <= {1} for call in CALLS)


PADDED = {
    "documents": rf.Documents([100, 150], causal=True, padding=262),
    "right": rf.Padding.right(125, length=512) & rf.Causal(),
    "right_window": rf.Padding.right(300, length=512) & rf.Window(60, 0),
    "left": rf.Padding.left([200, 7], length=512) & rf.Causal(),
}


@layouts
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_padding_that_others_hold(monkeypatch, route, name, layout):
    """Rows that see nothing end somewhere among keys of another rank: nobody waits for what nothing is added to."""
    monkeypatch.setattr(landing, "BLOCK_ROWS", 128)
    problem = {"queries": 512, "heads": (2, 2), "dim": 4, "batch": 2}
    options = {"mask": PADDED[name], "route": route}
    expected = dense(problem, mask=options["mask"])
    for results in run(2, lambda member: attend_landed(member, layout, problem, options)):
        assert_all_close(results, expected, torch.float64)


@pytest.mark.parametrize(("queries", "keys"), [(4, 64), (64, 4)])
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_ranks_that_hold_nothing(route, queries, keys):
    problem = {"queries": queries, "keys": keys, "heads": (2, 2), "dim": 4}
    for results in run(
        4, lambda member: attend_landed(member, rf.Zigzag(), problem, {"mask": rf.Full(), "route": route})
    ):
        assert_all_close(results, dense(problem, mask=rf.Full()), torch.float64)


def test_own_rows_that_no_block_holds_are_few_copies():
    for rank in range(2):
        here = plan(rf.Causal(), rf.Zigzag(), 8190, rank, 2)
        for lands in (here.landing, here.turned.landing):
            assert len(lands.mixed) <= 2 * len([run for run in lands.runs(rank) if run.owner == rank])


def test_a_layout_of_many_blocks_comes_source_by_source():
    problem = {"queries": 29, "heads": (2, 2)}
    CALLS.clear()
    for results in run(3, lambda member: attend_landed(member, rf.Striped(), problem, {"mask": rf.Causal()})):
        assert_all_close(results, dense(problem, mask=rf.Causal()), torch.float64)
    assert CALLS == [None] * 9


def test_what_is_too_much_comes_source_by_source(monkeypatch):
    problem = {"queries": 29, "heads": (2, 2)}
    lands = plan(rf.Causal(), rf.Zigzag(), 29, 0, 3).landing.most_landed
    assert lands < 29  # own rows are where they are
    monkeypatch.setattr(landing, "MOST_BYTES", lands * 2 * 16 * 8 - 1)
    CALLS.clear()
    run(3, lambda member: attend_landed(member, rf.Zigzag(), problem, {"mask": rf.Causal()}))
    assert CALLS == [None] * 9


def landed_by_name(ring, problem, options):
    wait_for_all()
    try:
        ring = rf.Ring(ring.transport.group, layout=ring.layout, transport="symmetric")
        return [attend(ring, {**problem, "queries": n}, options) for n in (13, 29, 8)]
    finally:
        wait_no_more()


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
def test_pieces_are_each_row_that_is_seen_once_in_cells_own_ones_first(mask, layout):
    for rank in range(4):
        here = plan(mask, layout, 32, rank, 4)
        for lands in (here.landing, here.landing_upwards, here.turned.landing):
            pieces = lands.pieces(rank)
            rows = sorted((piece.owner, row) for piece in pieces for row in range(piece.row, piece.row + piece.count))
            seen = [lands.needs.seen(rank, s) for s in range(4)]
            assert rows == [(s, row) for s in range(4) for row in range(seen[s].start, seen[s].stop)]
            size, (late_from, late_until) = lands.cell_rows(rank), lands.late(rank)
            assert all(piece.place // size == (piece.place + piece.count - 1) // size for piece in pieces)
            assert lands.bounds.pairs == (here.pairs if lands.travels == "keys" else pairs_of_keys(here))
            late = [late_from <= piece.place < late_until for piece in pieces]
            assert late == sorted(late) and not any(piece.owner == rank for piece in pieces[sum(not x for x in late) :])
            places = [piece.place for piece, is_late in zip(pieces, late, strict=True) if not is_late]
            assert places == sorted(places, reverse=lands.walk == "down")
            if mask == rf.Full():
                assert {piece.owner for piece in pieces[: len([p for p in pieces if p.owner == rank])]} == {rank}
            elif mask == rf.Causal() and layout == rf.Zigzag():
                assert not late_until or late_until - late_from == sum(p.count for p in lands.runs(rank) if p.place in
                                                                       range(late_from, late_until))  # fmt: skip


def pairs_of_keys(here):
    return sum(plan(here.mask, here.layout, here.length, r, here.ranks)[here.rank].pairs for r in range(here.ranks))


def test_cells_are_few_and_whole_blocks(monkeypatch):
    monkeypatch.setattr(landing, "BLOCK_ROWS", 128)
    for length, size in ((8192, 1024), (8200, 2048), (100, 128)):
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
