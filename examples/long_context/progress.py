"""What a person sees while it trains, and what a program reads afterwards."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO


class Progress:
    """One line that redraws itself on a terminal; a line every few steps anywhere else (a log file, a pipe)."""

    def __init__(
        self, title: str, *, steps: int, first: int, log_every: int | None, stream: TextIO = sys.stdout
    ) -> None:
        self.title, self.steps, self.first, self.stream = title, steps, first, stream
        self.log_every = log_every or max(1, (steps - first) // 20)
        self.begin = time.perf_counter()
        self.in_place = stream.isatty()

    def show(self, metrics: dict) -> None:
        done = metrics["step"] + 1
        is_last = done == self.steps
        if not (self.in_place or is_last or metrics["step"] % self.log_every == 0):
            return
        # From all steps so far: the first one of a GPU compiles kernels, then this estimate comes down by itself.
        left_s = (time.perf_counter() - self.begin) / (done - self.first) * (self.steps - done)
        line = (
            f"{self.title} {done:>{len(str(self.steps))}}/{self.steps} {{bar}} loss {metrics['loss']:.4f}  "
            f"{metrics['tokens_per_s']:,.0f} tokens/s  {left_s:.0f} s left  "
            f"{max(metrics['peak_memory_bytes']) / 2**20:,.0f} MiB per rank"
        )
        if not self.in_place:
            print(line.replace("{bar} ", ""), file=self.stream, flush=True)
            return
        room = shutil.get_terminal_size().columns - len(line) + len("{bar}") - 1
        line = line.replace("{bar}", bar(done / self.steps, width=max(5, min(30, room))))
        # \x1b[2K wipes what a longer line left behind.
        print(f"\r\x1b[2K{line}", end="\n" if is_last else "", file=self.stream, flush=True)


def bar(share: float, *, width: int) -> str:
    full = int(share * width)
    return "━" * full + ("╸" if full < width else "") + "·" * (width - full - 1)


class MetricsFile:
    """One JSON object per step. A resumed run keeps the lines before the step it starts at, and writes the rest anew."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        self.rows = [row for row in read_metrics(path) if row["step"] < first_step] if path.exists() else []
        self._file = path.open("w")
        for row in self.rows:
            self._write(row)

    def append(self, row: dict) -> None:
        self.rows.append(row)
        self._write(row)

    def _write(self, row: dict) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()  # readable while it trains, complete after a crash

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
