"""benchmarks/errors.py on CPUs: what rings are compared, and that an error shows."""

import sys

import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from tests.benchmarks.test_ring import load


def loaded(tokens):
    errors = load("errors")
    errors.DEVICE, errors.DTYPE, errors.TOKENS, errors.HEAD_DIM = "cpu", torch.float32, tokens, 16
    return errors


def measured(tokens, spoil):
    """In a worker of two: (mask, what, errors) of every row; spoil: an error of one rank's shard is put in."""
    errors = loaded(tokens)
    if spoil and dist.get_rank():
        real = errors.rf.attention
        spoilt = {"attention": lambda q, *rest, **options: real(q * 1.01, *rest, **options)}
        errors.rf = type("Spoilt", (), {**vars(rf), **spoilt})
    try:
        rows = errors.measure(errors.groups_of(2))
        return [
            (row.mask, row.extra["what"], {name: float(row.extra[name]) for name in errors.RESULTS}) for row in rows
        ]
    finally:
        sys.modules.pop("errors")


@pytest.mark.parametrize("tokens", [64, 101])
def test_every_wire_and_route_is_held_to_float64(own_workers, tokens):
    mine, theirs = own_workers(2).run(measured, tokens, False, timeout_s=100.0)
    wires, routes = ("peer", "symmetric", "gathered"), ("keys", "queries")
    rings = {f"{wire}, {route} travel, 2 ranks" for wire in wires for route in routes}
    for mask in ("causal", "documents"):
        assert {what for of, what, _ in mine if of == mask} == {"torch", "alone"} | rings
    assert all(0 < error < 2e-6 for _, _, errors in mine for error in errors.values())
    of_rings = [[errors for _, what, errors in rows if what in rings] for rows in (mine, theirs)]
    assert of_rings[0] == of_rings[1]


def test_an_error_on_one_rank_shows_on_all(own_workers):
    for rows in own_workers(2).run(measured, 64, True, timeout_s=100.0):
        assert all(errors["out"] > 1e-4 for _, what, errors in rows if "ranks" in what)
