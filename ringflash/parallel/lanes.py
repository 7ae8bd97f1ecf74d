"""Lanes: queues of copies and signals between the memories of ranks, which take no part of a GPU that computes.

On a GPU a lane is a stream: copies run on copy engines, and signals are read and written by the stream's front end, so the
host never waits and no multiprocessor moves data. On a CPU everything happens at once.

A signal is one int32 that its sender sets to 1 and its receiver, who waits for that, back to 0. Nothing else is counted, so
the same steps can be captured once and replayed for ever; a sender must know that the last signal was taken.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ringflash.schedule.copies import stream_handle

# What a lane does with a flag, the flag's address, and the rank that sets it.
SignalStep = tuple[Literal["signal", "take", "wait"], int, int]


class Signals:
    """Flags, in the order in which a lane takes, waits for and sets them: found once, and queued as one step."""

    def __init__(self, steps: Iterable[SignalStep]) -> None:
        self.steps = list(steps)

    @cached_property
    def batches(self) -> list[tuple[int, ctypes.Array[Any]]]:
        """(how many operations, these) of cuStreamBatchMemOp, which takes less than 256 at a time."""
        parts = {"signal": [(_WRITE, 1)], "take": [(_WAIT, 1), (_WRITE, 0)], "wait": [(_WAIT, 1)]}
        found = [_Operation(what, flag, value) for name, flag, _ in self.steps for what, value in parts[name]]
        return [
            (len(part), (_Operation * len(part))(*part))
            for part in (found[i : i + _BATCH] for i in range(0, len(found), _BATCH))
        ]


class Lane(ABC):
    """Steps are taken in the order in which they are queued. Memory and flags, an int32 each, are named by address: a pass
    queues dozens of steps, and a view of a tensor takes longer to make than a step to queue.
    """

    @abstractmethod
    def after(self, other: Lane) -> None:
        """What is queued from here on waits for what `other` holds now."""

    @abstractmethod
    def copy(self, to: int, origin: int, size: int) -> None:
        """Copy bytes within memory here, or to that of another rank."""

    @abstractmethod
    def copy_rows(self, to: int, origin: int, size: int, count: int, to_step: int, origin_step: int) -> None:
        """Copy `count` times `size` bytes that begin so many bytes apart."""

    @abstractmethod
    def signal(self, flag: int) -> None:
        """Set a flag, here or on another rank, once all that was queued before is done."""

    @abstractmethod
    def take(self, flag: int, sender: int) -> None:
        """Wait for a flag of this rank that `sender` sets, and clear it."""

    @abstractmethod
    def wait(self, flag: int) -> None:
        """Wait for a flag that a kernel of this rank sets, and leave it set."""

    def pass_on(self, signals: Signals) -> None:
        """All of them, in their order."""
        for what, flag, sender in signals.steps:
            if what == "take":
                self.take(flag, sender)
            elif what == "wait":
                self.wait(flag)
            else:
                self.signal(flag)

    def put(self, to: Tensor, x: Tensor) -> None:
        """Copy x into the memory `to`; both alike in shape and type, and dense but for axis 0."""
        if to.is_contiguous() and x.is_contiguous():
            self.copy(to.data_ptr(), x.data_ptr(), x.numel() * x.itemsize)
        else:
            for row, x_row in zip(to, x, strict=True):
                self.copy(row.data_ptr(), x_row.data_ptr(), x_row.numel() * x_row.itemsize)


class HostLane(Lane):
    """Memory of a CPU that ranks share."""

    def __init__(self, rank: int, patience_s: float, is_lost: Callable[[], bool]) -> None:
        self._rank, self._patience_s, self._is_lost = rank, patience_s, is_lost

    def after(self, other: Lane) -> None:
        pass

    def copy(self, to: int, origin: int, size: int) -> None:
        ctypes.memmove(to, origin, size)

    def copy_rows(self, to: int, origin: int, size: int, count: int, to_step: int, origin_step: int) -> None:
        for i in range(count):
            ctypes.memmove(to + i * to_step, origin + i * origin_step, size)

    def signal(self, flag: int) -> None:
        place = ctypes.c_int32.from_address(flag)
        assert not place.value, "the last signal was taken"
        place.value = 1

    def take(self, flag: int, sender: int) -> None:
        place = ctypes.c_int32.from_address(flag)
        since, nap = time.monotonic(), 0.0
        while not place.value:
            time.sleep(nap)
            nap = min(nap + 1e-5, 1e-3)
            if (waited := time.monotonic() - since) > self._patience_s or self._is_lost():
                raise RuntimeError(
                    f"Ring: rank {self._rank} waited {waited:.0f} s for a signal of rank {sender}, which is gone, or "
                    "computes for longer between two hops than the process group's timeout"
                )
        place.value = 0

    def wait(self, flag: int) -> None:
        assert ctypes.c_int32.from_address(flag).value, "what a kernel does on a CPU is done when it returns"


class StreamLane(Lane):
    """A stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self._handle, self._driver = stream, stream.cuda_stream, _driver()
        self._now = torch.cuda.Event()  # recorded again and again; who waits for it does so for what was there then

    def after(self, other: Lane) -> None:
        assert isinstance(other, StreamLane), "lanes of one rank are of one kind"
        if other._handle != self._handle:
            other._now.record(other.stream)
            self.stream.wait_event(other._now)

    def copy(self, to: int, origin: int, size: int) -> None:
        self._driver.copy(self._handle, to, origin, size)

    def copy_rows(self, to: int, origin: int, size: int, count: int, to_step: int, origin_step: int) -> None:
        if count == 1:
            self._driver.copy(self._handle, to, origin, size)
        else:
            self._driver.copy_rows(self._handle, to, origin, size, count, to_step, origin_step)

    def signal(self, flag: int) -> None:
        self._driver.write(self._handle, flag, 1)

    def take(self, flag: int, sender: int) -> None:
        self._driver.wait(self._handle, flag, 1)
        self._driver.write(self._handle, flag, 0)

    def wait(self, flag: int) -> None:
        self._driver.wait(self._handle, flag, 1)

    def pass_on(self, signals: Signals) -> None:
        for count, operations in signals.batches:
            self._driver.batch(self._handle, count, operations)


class Reach(ABC):
    """Memory of other ranks that can be written from here, and the lanes to do it in."""

    @abstractmethod
    def refuses(self, device: torch.device) -> str | None:
        """Why there is no such memory, or None; the same on every rank, all of which ask."""

    @abstractmethod
    def memory(self, size: int, device: torch.device) -> list[Tensor]:
        """`size` bytes of every rank, by rank, as uint8; all ranks call. It lasts as long as the tensors do."""

    @abstractmethod
    def everyone(self, value: object) -> list[Any]:
        """The value of every rank; all ranks call."""

    @abstractmethod
    def host_lane(self) -> Lane:
        """A lane for memory of the CPU."""

    def settle(self, device: torch.device) -> None:
        """Afterwards all that any rank has queued in its caller's lane is done; all ranks call. The host waits."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).record_event().synchronize()
        self.everyone(None)

    def here(self, device: torch.device) -> Lane:
        """The lane in which the caller computes."""
        return _lane_of(device, stream_handle(device)) if device.type == "cuda" else self.host_lane()

    def new_lane(self, device: torch.device) -> Lane:
        """A lane beside that one, of a higher priority: a hop that starts late is waited for."""
        return StreamLane(torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else self.host_lane()


@lru_cache(maxsize=64)
def _lane_of(device: torch.device, handle: int) -> StreamLane:
    """Of the current stream, which has this handle."""
    return StreamLane(torch.cuda.current_stream(device))


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, for operations on 32 bits: without options, as Driver.write and Driver.wait do them."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("unused", ctypes.c_uint64 * 2),
    )


_WAIT, _WRITE = 1, 2
_BATCH = 255


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{end}{name}", kind)
        for end in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t),
            ("Y", ctypes.c_size_t),
            ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64),
            ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]


_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says whose memory it is


class Driver:
    """Calls of CUDA's driver on a stream: torch has one end of the signals, and copies at ten times the host's time."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        flag = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
        self._write, self._wait = (_found(library, f"cuStream{name}Value32", flag) for name in ("Write", "Wait"))
        several = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
        self._batch = _found(library, "cuStreamBatchMemOp", several)
        copy = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._copy = _found(library, "cuMemcpyDtoDAsync", copy)
        self._copy_rows = _found(library, "cuMemcpy2DAsync", [ctypes.POINTER(_Rows), ctypes.c_void_p])

    def write(self, stream: int, flag: int, value: int) -> None:
        # Without options: what came before is visible to all GPUs before the value is.
        _check(self._write(stream, flag, value, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, flag: int, value: int) -> None:
        _check(self._wait(stream, flag, value, 0), "cuStreamWaitValue32")

    def batch(self, stream: int, count: int, operations: ctypes.Array[Any]) -> None:
        _check(self._batch(stream, count, operations, 0), "cuStreamBatchMemOp")

    def copy(self, stream: int, to: int, origin: int, size: int) -> None:
        _check(self._copy(to, origin, size, stream), "cuMemcpyDtoDAsync")

    def copy_rows(
        self, stream: int, to: int, origin: int, size: int, count: int, to_step: int, origin_step: int
    ) -> None:
        rows = _Rows(
            srcMemoryType=_UNIFIED, srcDevice=origin, srcPitch=origin_step,
            dstMemoryType=_UNIFIED, dstDevice=to, dstPitch=to_step, WidthInBytes=size, Height=count,
        )  # fmt: skip
        _check(self._copy_rows(ctypes.byref(rows), stream), "cuMemcpy2DAsync")


def _found(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    """The newest form of a function: the first ones need settings of the driver's."""
    function = getattr(library, f"{name}_v2", None) or getattr(library, name)
    function.argtypes = arguments
    return function


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"Ring: {what} failed with CUresult {result}")


@lru_cache(maxsize=1)
def _driver() -> Driver:
    return Driver()
