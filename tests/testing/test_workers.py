"""The pool of worker processes: what goes wrong in one is reported with its rank, and the pool works again."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ringflash.testing.workers import WorkerError, Workers


@pytest.fixture(scope="module")
def three():
    with Workers(3) as pool:
        yield pool


def rank_sum(addend):
    total = torch.tensor([dist.get_rank() + addend])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def wait_for(rank):
    """One rank never joins what the others wait in."""
    if dist.get_rank() == rank:
        raise ValueError("not coming")
    dist.all_reduce(torch.zeros(1))


def unwritten():
    return torch.empty(2).isnan().tolist()


def test_results_come_by_rank(three):
    assert three.run(rank_sum, 1) == [(0, 6), (1, 6), (2, 6)]


def test_the_same_processes_serve_every_call(three):
    assert three.run(os.getpid) == three.run(os.getpid)


def test_only_the_first_ranks_are_asked_if_so_wished(three):
    assert len(three.run(os.getpid, ranks=2)) == 2


def test_workers_run_under_poison(three):
    assert three.run(unwritten) == [[True, True]] * 3


def test_a_worker_that_raises_is_named_with_its_traceback_and_the_pool_works_again(three):
    with pytest.raises(WorkerError, match=r"(?s)\Arank 1: Traceback.*in raise_on.*ValueError: no luck on 1\s*\Z"):
        three.run(raise_on, 1)
    assert three.run(rank_sum, 0) == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_that_hangs_is_named_and_the_pool_works_again(three):
    three.run(os.getpid)  # started: the time below is that of the call alone
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"\Arank 2: no answer in 1 s: hangs\Z"):
        three.run(sleep_on, 2, timeout_s=1.0)
    assert time.monotonic() - start < 10
    assert three.run(rank_sum, 0) == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_that_dies_is_named_with_its_exit_code_and_the_pool_works_again(three):
    with pytest.raises(WorkerError, match=r"\Arank 0: died with exit code 7\Z"):
        three.run(die_on, 0)
    assert three.run(rank_sum, 0) == [(0, 3), (1, 3), (2, 3)]


def test_the_error_is_shown_first_and_those_who_waited_for_it_after(three):
    with pytest.raises(WorkerError, match=r"(?s)\Arank 1: .*not coming.*rank 0: no answer after another rank failed"):
        three.run(wait_for, 1)


def test_nothing_of_the_pool_is_left_after_it():
    with Workers(2) as pool:
        processes = pool.run(os.getpid)
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
