"""python -m ringflash bench kernels: which kernels are fastest on this GPU, as a table that attention() takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ringflash as rf
from ringflash.cli.kernels import MASKS, Findings, Shape, line, measure, sentences
from ringflash.cli.timing import matmul_tflops
from ringflash.kernels.backend import BACKENDS
from ringflash.kernels.table import LENGTHS, KernelTable

# One cell each of a table, and one length beyond: head dim and heads of 2048 columns, 16k tokens in all.
HEADS = ((64, 32), (128, 16), (256, 8))
TOKENS = (*LENGTHS, 16384)
QUICK_TOKENS = (4096, 16384)
TOTAL = 16384


def kernels(arguments: list[str]) -> int:
    """Measure, print, and write a table to --out; 1 where a kernel of ours failed, or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m ringflash bench kernels", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table here, for rf.KernelTable.read(FILE)")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(map(str, QUICK_TOKENS))} tokens")
    chosen = parser.parse_args(arguments)
    # Before minutes of measuring, not after.
    if chosen.out is not None:
        is_new = not chosen.out.exists()
        try:
            chosen.out.open("a").close()
            if is_new:
                chosen.out.unlink()
        except OSError as error:
            parser.error(f"--out {chosen.out}: cannot be written to: {error.strerror}")
    if not torch.cuda.is_available():
        print("bench kernels: torch sees no GPU here", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, matmul {matmul_tflops():.0f} TFLOP/s; TFLOP/s by kernel (spread of the middle half)", flush=True)
    findings = Findings()
    for shape in shapes(QUICK_TOKENS if chosen.quick else TOKENS):
        for row in measure(shape, findings):
            print(line(row), flush=True)
    rows = [(m.direction, m.shape.head_dim, m.shape.mask, m.shape.tokens, m.tflops) for m in findings.rows]
    found = table(gpu, rows, {"command": "python -m ringflash bench kernels", **versions()}) if rows else None
    print("", *([] if found is None else ranking(found)), "", sep="\n")
    for sentence in (*sentences(findings.notes), *(f"FAULT: {fault}" for fault in sentences(findings.faults))):
        print(sentence)
    if found is None:
        print("bench kernels: no kernel ran, so there is no table", file=sys.stderr)
        return 1
    if chosen.out is not None:
        found.write(chosen.out)
        print(f"written; use it as rf.attention(..., backend=rf.KernelTable.read({str(chosen.out)!r}))")
    return 1 if findings.faults else 0


def shapes(tokens: Iterable[int]) -> list[Shape]:
    return [Shape(D, H, H, mask, S, TOTAL // S) for D, H in HEADS for mask in MASKS for S in tokens]


def table(
    gpu: str, rows: Iterable[tuple[str, int, str, int, Mapping[str, float]]], about: Mapping[str, Any]
) -> KernelTable:
    """Of rows of KernelTable.of, less who is no backend, such as what the library takes by itself."""
    served = [
        (direction, head_dim, mask, tokens, {name: speed for name, speed in speeds.items() if name in BACKENDS})
        for direction, head_dim, mask, tokens, speeds in rows
    ]
    return KernelTable.of(gpu, served, about)


def ranking(found: KernelTable) -> list[str]:
    """A line per cell, the fastest first."""
    lines = []
    for cell, speeds in found.cells.items():
        length = f"to {cell.length}" if cell.length < LENGTHS[-1] else "beyond"
        ranked = " > ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        lines.append(f"{cell.direction:8} d{cell.head_dim:<3} {cell.mask:6} {length:7}  {ranked}")
    return lines


def versions() -> dict[str, Any]:
    """Of all that the figures depend on; None for what is not installed."""
    found = {"ringflash": rf.__version__, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    for distribution in ("triton", "flash-attn-4"):
        try:
            found[distribution.replace("-", "_")] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[distribution.replace("-", "_")] = None
    return {**found, "date": date.today().isoformat()}
