"""Ranks as threads of one process: results by rank, and an error of one stops all."""

import time

import pytest
import torch

import ringflash as rf
from ringflash.parallel.inprocess import PATIENCE_S, Alone, run


def test_results_come_by_rank():
    assert run(3, lambda member: (member.rank, member.ranks)) == [(0, 3), (1, 3), (2, 3)]


def test_messages_arrive_as_they_were_when_sent():
    def step(member):
        mine, received = torch.full((2,), float(member.rank)), torch.empty(2)
        in_flight = member.exchange([(mine, (member.rank + 1) % 3)], [(received, (member.rank - 1) % 3)])
        mine.fill_(-1.0)
        in_flight.wait()
        return received.tolist()

    assert run(3, step) == [[2, 2], [0, 0], [1, 1]]


def test_the_first_error_is_raised_and_the_others_do_not_wait_for_ever():
    def step(member):
        if member.rank == 1:
            raise ValueError("no luck")
        member.all_gather_object(None)

    start = time.monotonic()
    with pytest.raises(ValueError, match="no luck"):
        run(3, step)
    assert time.monotonic() - start < PATIENCE_S / 2


def test_a_lost_message_is_named_with_both_ranks(monkeypatch):
    monkeypatch.setattr("ringflash.parallel.inprocess.PATIENCE_S", 0.2)

    def step(member):
        if member.rank == 0:
            member.exchange([(torch.zeros(1), 1)], [(torch.empty(1), 1)]).wait()

    with pytest.raises(RuntimeError, match="in-process rank 0: no message from rank 1 within"):
        run(2, step)


def test_a_ring_of_one_has_no_neighbour():
    alone = Alone()
    assert (alone.rank, alone.ranks) == (0, 1)
    assert rf.Ring(transport=alone).positions(5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="no neighbour"):
        alone.exchange([(torch.zeros(1), 0)], [])
