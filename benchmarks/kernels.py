"""Local kernels on one GPU: ours beside cuDNN, torch's flash and FlashAttention-4, forward and backward, in one run.

    python3 benchmarks/run.py kernels [--head-dims 128] [--tokens 8192 16384] [--total 16384] [--seconds 400] [--quick]

Every shape is checked before it is timed. What is done is on file after every shape, so a run that is cut off keeps it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Row, write

from ringflash.cli.bench import versions
from ringflash.cli.kernels import KERNELS, MASKS, Findings, Measured, Shape, line, measure, sentences
from ringflash.cli.timing import matmul_tflops

HEADS = [(128, 16, 16), (128, 64, 8), (64, 32, 32), (256, 8, 8)]  # head dim, query heads, key heads
TOKENS = {16384: (2048, 4096, 8192, 16384), 65536: (8192, 16384, 65536)}  # batch * tokens -> tokens
OWN, RIVALS = ("hopper", "triton"), ("cudnn", "fa4")
# Ours over the better rival: (full, causal) of 8k tokens and more, then of 2k and 4k.
GOALS = {
    ("forward", 128): ((1.06, 1.08), (1.03, 1.03)),
    ("forward", 64): ((1.00, 1.00), (1.00, 1.00)),
    ("forward", 256): ((1.02, 1.05), (1.00, 1.00)),
    ("backward", 128): ((1.03, 1.05), (1.02, 1.10)),
    ("backward", 64): ((1.00, 1.00), (0.97, 1.00)),
    ("backward", 256): ((1.20, 1.15), (1.10, 1.10)),
}
NOTES = (
    "Local kernels in bf16, medians of one interleaved run per shape, host time hidden. `hopper` and `triton` are our "
    "backends and `ringflash` what the library takes by itself, all through rf.attention; cuDNN and flash are torch's, "
    "`fa4` is FlashAttention-4, each called with tensors in the layout it likes. `ratio` is the better of our two over "
    "the better of cuDNN and FlashAttention-4, `goal` what it should reach, `choice` what is taken by itself over the "
    "best of all."
)


def goal(row: Measured) -> float | None:
    if row.shape.tokens < 2048:
        return None
    is_short = row.shape.tokens < 8192
    return GOALS[row.direction, row.shape.head_dim][is_short][row.shape.mask == "causal"]


def best(row: Measured, names: tuple[str, ...]) -> float | None:
    return max((row.tflops[name] for name in names if name in row.tflops), default=None)


def ratio(row: Measured) -> float | None:
    """Ours over the better rival, None where one side could not run."""
    own, rival = best(row, OWN), best(row, RIVALS)
    return None if own is None or rival is None else round(own / rival, 3)


def choice(row: Measured) -> float | None:
    """What the library takes by itself over the best of all; 1 but for noise where the table behind it is right."""
    taken, most = row.tflops.get("ringflash"), best(row, (*OWN, *RIVALS, "flash"))
    return None if taken is None or most is None else round(taken / most, 3)


def as_row(row: Measured) -> Row:
    shape = row.shape
    extra = {"ratio": ratio(row), "goal": goal(row), "choice": choice(row)}
    extra = {name: value for name, value in extra.items() if value is not None}
    extra |= {"largest_spread": max(row.spread.values()), "spread": row.spread}
    return Row(
        row.direction, shape.head_dim, shape.heads, shape.mask, shape.tokens, shape.batch, 1, row.tflops, extra=extra
    )


def ratios(rows: list[Measured]) -> Iterator[str]:
    """The table that a run ends with: one line per cell, and how many reach their goal."""
    reached = []
    for row in sorted(rows, key=lambda row: (row.direction != "forward", row.shape.head_dim)):
        own, rival, ours, aim = best(row, OWN), best(row, RIVALS), ratio(row), goal(row)
        if own is None or rival is None or ours is None:
            yield f"{row.direction:8} {row.shape!s:30} {'no ratio: one side could not run':>42}"
            continue
        verdict = ""
        if aim is not None:
            reached.append(ours >= aim)
            verdict = f"goal {aim:.2f} {'reached' if reached[-1] else 'MISSED'}"
        picked = "" if choice(row) is None else f"  choice {choice(row):.3f}"
        yield f"{row.direction:8} {row.shape!s:30} {own:6.0f} / {rival:6.0f} = {ours:.3f}  {verdict:17}{picked}"
    yield f"{sum(reached)} of {len(reached)} cells reach their goal"


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Those that the flags pick, in an order that a budget may cut: a head dim is whole before the next is begun."""
    picked = []
    for head_dim, Hq, Hk in HEADS:
        if head_dim not in arguments.head_dims or f"{Hq}:{Hk}" not in arguments.heads:
            continue
        for total in arguments.total:
            lengths = arguments.tokens or ((8192,) if arguments.quick else TOKENS[total])
            for mask in arguments.masks:
                picked += [Shape(head_dim, Hq, Hk, mask, S, total // S) for S in lengths if total % S == 0]
    return picked


def name(arguments: argparse.Namespace) -> str:
    """Of the results: a run of some shapes must not take the place of a run of others."""
    parts = ["kernels"]
    for prefix, values, everything in (
        ("d", arguments.head_dims, sorted({head_dim for head_dim, *_ in HEADS})),
        ("h", [x.replace(":", "x") for x in arguments.heads], [f"{Hq}x{Hk}" for _, Hq, Hk in HEADS]),
        ("", arguments.masks, list(MASKS)),
        ("t", [f"{total // 1024}k" for total in arguments.total], [f"{total // 1024}k" for total in TOKENS]),
        ("s", arguments.tokens or ([8192] if arguments.quick else []), []),
    ):
        if set(values) != set(everything):
            parts.append(prefix + "-".join(map(str, values)))
    return "_".join(parts)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py kernels", description=__doc__.splitlines()[0])
    all_heads = [f"{Hq}:{Hk}" for _, Hq, Hk in HEADS]
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=(64, 128, 256), default=[64, 128, 256])
    parser.add_argument("--heads", nargs="+", choices=all_heads, default=all_heads, help="query:key heads")
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a sequence; default those of each total")
    parser.add_argument(
        "--total", type=int, nargs="+", choices=list(TOKENS), default=list(TOKENS), help="batch * tokens"
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="who is measured")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no new shape is begun")
    parser.add_argument("--quick", action="store_true", help="one length per head dim")
    return parser.parse_args(arguments)


def main() -> None:
    arguments, start = parse(sys.argv[1:]), time.monotonic()
    wanted = shapes(arguments)
    if not wanted:
        sys.exit("kernels: no shape fits these flags; each of --tokens must divide a --total")
    ceiling = matmul_tflops()
    print(f"{torch.cuda.get_device_name()}, matmul {ceiling:.0f} TFLOP/s", flush=True)
    findings = Findings()
    for done, shape in enumerate(wanted):
        if time.monotonic() - start > arguments.seconds:
            left_out = f"{len(wanted) - done} shapes left out after {arguments.seconds:.0f} s, from this one on"
            findings.note(left_out, shape)
            break
        for row in measure(shape, findings, arguments.kernels, arguments.rounds):
            print(line(row), flush=True)
        keep(arguments, findings, ceiling)
    print("", *ratios(findings.rows), "", *said(findings), keep(arguments, findings, ceiling), sep="\n")
    sys.exit(1 if findings.faults else 0)


def said(findings: Findings) -> list[str]:
    return [*sentences(findings.notes), *(f"FAULT: {sentence}" for sentence in sentences(findings.faults))]


def keep(arguments: argparse.Namespace, findings: Findings, ceiling: float) -> Path:
    return write(
        name(arguments), [as_row(row) for row in findings.rows], gpus=1, matmul=ceiling, out=arguments.out,
        notes="\n".join([NOTES, "", *(f"- {sentence}" for sentence in said(findings))]).strip(),
        cudnn=versions()["cudnn"], flash_attn_4=versions()["flash_attn_4"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
