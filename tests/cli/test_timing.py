"""Timing: candidates take turns, and what is reported is the middle."""

import pytest

from ringflash.cli import timing
from ringflash.cli.timing import Timing, interleaved


def test_candidates_take_turns_and_are_warmed_up_first(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: (run(), 1.0)[1])
    interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3, warmup=2)
    assert "".join(calls) == "aabb" + "ab" + "ba" + "ab", "and each takes each place"


def test_the_head_start_reaches_every_timed_call(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: asked.append(head_start_ms) or 1.0)
    interleaved({"a": lambda: None}, rounds=4, head_start_ms=2.5)
    assert asked == [2.5] * 4


def test_the_median_and_the_middle_half_of_the_times_are_reported():
    timing = Timing.of([100.0, 2.0, 1.0, 3.0, 2.0, 2.0, 2.5, 0.1])
    assert timing.median_ms == 2.0
    assert timing.spread == pytest.approx((2.5 - 2.0) / 2.0)
    assert timing.tflops(4e9) == pytest.approx(2.0)
