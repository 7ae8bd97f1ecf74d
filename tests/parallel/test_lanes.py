"""Flags that are queued as one step are taken and set as one by one."""

import ctypes

import pytest

from ringflash.parallel import lanes
from ringflash.parallel.lanes import HostLane, Signals, StreamLane

# CUstreamBatchMemOpType
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2


class Noting:
    """A driver that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def write(self, stream, flag, value):
        self.calls.append((WRITE_VALUE_32, flag, value))

    def wait(self, stream, flag, value):
        self.calls.append((WAIT_VALUE_32, flag, value))

    def batch(self, stream, count, operations):
        assert count == len(operations) < 256
        assert all(one.flags == 0 for one in operations)
        self.calls.append([(one.operation, one.address, one.value) for one in operations])


class Stream:
    cuda_stream = 7


@pytest.fixture
def lane(monkeypatch):
    monkeypatch.setattr(lanes, "_driver", Noting)
    monkeypatch.setattr(lanes.torch.cuda, "Event", object)
    return StreamLane(Stream())


def one_by_one(lane, steps):
    for what, flag, sender in steps:
        lane.take(flag, sender) if what == "take" else getattr(lane, what)(flag)


@pytest.mark.parametrize("count", [0, 3, 300])
def test_a_batch_is_what_single_steps_are(lane, count):
    steps = [(("take", "signal", "wait")[i % 3], 4096 + 4 * i, i % 5) for i in range(count)]
    one_by_one(lane, steps)
    single, lane._driver.calls = lane._driver.calls, []
    signals = Signals(steps)
    lane.pass_on(signals)
    lane.pass_on(signals)
    batched = [step for batch in lane._driver.calls for step in batch]
    assert batched == 2 * single
    assert len(lane._driver.calls) <= 2 * -(-4 * count // 3 // 255)


def test_an_operation_is_laid_out_as_the_driver_reads_it():
    """A union of 48 bytes: operation, address, value and flags at 0, 8, 16 and 24."""
    places = {name: getattr(lanes._Operation, name).offset for name, _ in lanes._Operation._fields_}
    assert ctypes.sizeof(lanes._Operation) == 48
    assert {name: places[name] for name in ("operation", "address", "value", "flags")} == {
        "operation": 0, "address": 8, "value": 16, "flags": 24,
    }  # fmt: skip


def test_on_a_host_they_are_taken_and_set_at_once():
    flags = (ctypes.c_int32 * 3)(1, 0, 1)
    at = [ctypes.addressof(flags) + 4 * i for i in range(3)]
    HostLane(0, 1.0, lambda: False).pass_on(Signals([("take", at[0], 1), ("signal", at[1], 0), ("wait", at[2], 0)]))
    assert list(flags) == [0, 1, 1]
