"""Is the ring exact? Train the same steps in one process, which has no ring and no FSDP, and look at every loss."""

import math
from collections.abc import Iterable

import torch

# How far two runs may drift apart that compute the same sums in another order, and then feed each loss into the next.
# fp32: absolute, in nats. bf16: relative; a sum of bf16 products rounds at 2^-8.
TOLERANCE = {torch.float32: ("absolute", 1e-4), torch.bfloat16: ("relative", 1e-3)}


def compare(ring_rows: list[dict], alone_rows: list[dict], dtype: torch.dtype) -> dict:
    """Both runs' numbers step by step, their differences and the verdict: the contents of compare.json."""
    measure, tolerance = TOLERANCE[dtype]
    steps = [row["step"] for row in alone_rows]
    by_step = {row["step"]: row for row in ring_rows}
    pairs = [(by_step[row["step"]]["loss"], row["loss"]) for row in alone_rows]
    absolute = [abs(ring - alone) for ring, alone in pairs]
    relative = [abs(ring - alone) / abs(alone) for ring, alone in pairs]
    measured = absolute if measure == "absolute" else relative
    return {
        "steps": steps,
        "ring": pick(by_step[step] for step in steps),
        "alone": pick(alone_rows),
        "difference": absolute,
        "largest_absolute_difference": largest(absolute),
        "largest_relative_difference": largest(relative),
        "measure": measure,
        "tolerance": tolerance,
        # A NaN compares as false, so it fails.
        "agrees": all(difference <= tolerance for difference in measured),
    }


def largest(differences: list[float]) -> float:
    """The maximum, and NaN if there is one: max() passes over a NaN that is not the first."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def pick(rows: Iterable[dict]) -> dict[str, list]:
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in ("loss", "grad_norm", "tokens_per_s", "peak_memory_bytes")}
