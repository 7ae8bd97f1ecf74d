"""R58: ranks that compute for longer than their process group waits."""

import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.kernels.reference import Reference

TIMEOUT_S = 2.0


def attend_slowly(seconds):
    """In a worker: one call on a ring of the last ranks, each of which computes seconds[rank] on every source.

    (whether the result is right, what was raised, seconds until then); None for others.
    """
    world, ranks = dist.get_world_size(), len(seconds)
    members = list(range(world - ranks, world))
    group = dist.new_group(members, timeout=timedelta(seconds=TIMEOUT_S))
    if dist.get_rank() not in members:
        return None
    ring = rf.Ring(group, layout=rf.Contiguous())
    x = torch.randn(1, 4 * ranks, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    forward, began = Reference.forward, time.monotonic()

    def slowly(*arguments, **options):
        time.sleep(seconds[ring.rank])
        return forward(*arguments, **options)

    try:
        with mock.patch.object(Reference, "forward", slowly):
            out = rf.attention(*(ring.shard(x) for _ in range(3)), ring=ring)
    except RuntimeError as error:
        return False, str(error), time.monotonic() - began
    return torch.allclose(out, ring.shard(rf.attention(x, x, x))), None, time.monotonic() - began


def test_a_step_longer_than_the_timeout_is_no_timeout(workers):
    """All compute alike: a hop is on its way before a step, and asked for after it."""
    everyone = workers.run(attend_slowly, [1.5 * TIMEOUT_S] * 3)[-3:]
    assert [(is_right, error) for is_right, error, _ in everyone] == [(True, None)] * 3
    assert all(seconds > 4 * TIMEOUT_S for *_, seconds in everyone)


def test_a_rank_that_keeps_the_others_waiting_is_named_with_numbers(workers):
    everyone = workers.run(attend_slowly, [0.0, 4 * TIMEOUT_S, 0.0])[-3:]
    _, error, _ = everyone[2]
    assert error.startswith(
        "Ring: rank 2 waited 2 s for messages from ranks [1] and to ranks [0]. One of them is gone, or"
    )
    assert "longer between two hops than the process group's timeout" in error
