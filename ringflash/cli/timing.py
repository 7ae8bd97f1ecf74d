"""Times of competing calls on one GPU, taken in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate over the rounds of one run."""

    median_ms: float
    spread: float  # (largest - smallest) / median of the middle half

    @classmethod
    def of(cls, times_ms: list[float]) -> Timing:
        times = sorted(times_ms)
        middle = times[len(times) // 4 : len(times) - len(times) // 4]
        median = statistics.median(times)
        return cls(median, (middle[-1] - middle[0]) / median)

    def tflops(self, flops: float) -> float:
        return flops / self.median_ms / 1e9


def in_turn(candidates: list[T], round: int) -> list[T]:
    """The order of a round, so that each takes each place: whoever follows a long rest, or a slow neighbour, finds the GPU
    at another clock.
    """
    first = round % len(candidates)
    return candidates[first:] + candidates[:first]


def interleaved(
    candidates: dict[str, Callable[[], Any]], rounds: int = 15, warmup: int = 3, *, head_start_ms: float = 0.0
) -> dict[str, Timing]:
    """Time every candidate once per round, in turn, so that clocks and heat are the same for all.

    head_start_ms: how long the GPU is kept busy before each, so that the host has queued everything when it starts, as in
        a training step; 0 counts the host's time to the first launch in.
    """
    for run in candidates.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for i in range(rounds):
        for name, run in in_turn(order, i):
            times[name].append(time_ms(run, head_start_ms))
    return {name: Timing.of(values) for name, values in times.items()}


def time_ms(run: Callable[[], Any], head_start_ms: float) -> float:
    """Of one call, on the device's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if head_start_ms:
        torch.cuda._sleep(int(head_start_ms * 2e6))  # cycles, at most 2 GHz
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def matmul_tflops(size: int = 8192) -> float:
    """The ceiling of this run: a square bf16 matrix product on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return interleaved({"matmul": lambda: a @ b})["matmul"].tflops(2 * size**3)
