"""Own rows in two parts: the first while others' are on their way, the last while gradients go home."""

import pytest
import torch

import ringflash as rf
from ringflash.parallel import function
from ringflash.parallel.inprocess import run
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.schedule.plan import plan
from ringflash.testing.compare import assert_all_close
from tests.rings import LAYOUTS, attend, dense, in_process, masks, name_of, work_of

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
routes = pytest.mark.parametrize("route", ["keys", "queries"])
WIRES = {
    "neighbours": lambda member: member,
    "symmetric": lambda member: SymmetricTransport(member, member.reach()),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(function, "TILE", 2)


@routes
@layouts
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", masks(29))
def test_gradients_are_those_of_dense_attention(name, wire, layout, route):
    problem = {"queries": 29, "heads": (4, 2), "dim": 4, "value_dim": 3, "batch": 2}
    options = {"mask": masks(29)[name], "route": route}
    expected = dense(problem, mask=options["mask"])
    for results in run(
        3, lambda member: attend(rf.Ring(layout=layout, transport=WIRES[wire](member)), problem, options)
    ):
        assert_all_close(results, expected, torch.float64)


@routes
def test_own_rows_come_first_and_last_in_backward(route):
    """3 ranks of 8 tokens under a full mask: half of the own rows, the others' in the order of hops, the rest."""
    for rank, (forward, backward, _) in enumerate(in_process(3, rf.Contiguous(), work_of, rf.Full(), 24, route)):
        assert [x for what, x in forward if what == "forward"] == [rank, (rank - 1) % 3, (rank - 2) % 3]
        visits = len([x for what, x in backward if what == "backward"])
        assert visits == 4
        # What comes home is waited for when everything is computed.
        assert backward[-1][0] == "wait"


@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal(), rf.Window(9, 0)], ids=name_of)
def test_the_first_part_has_about_half_of_the_work(mask):
    here = plan(mask, rf.Zigzag(), 2048, 1, 2)
    own = here.part(1, here.keys(1)).pairs
    assert here.part(1, slice(0, here.early)).pairs == pytest.approx(own / 2, rel=0.02)
    turned = here.turned
    assert turned.part(1, slice(0, turned.early)).pairs == pytest.approx(own / 2, rel=0.02)


def test_a_shard_of_less_than_a_tile_is_not_cut():
    assert function.whole_tiles(1) is None
    assert function.whole_tiles(5) == 4
