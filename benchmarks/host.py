"""What a call of attention takes of the host's time on one GPU: python3 benchmarks/run.py host [--out DIR]

Microseconds of a forward and of a backward call, of 50 in a row, as layers of a step follow one another; medians of 8
rows. bf16, head dim 128, one causal sequence of 1,024 tokens. Beside ours torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, write
from torch import Tensor

import ringflash as rf
from ringflash.cli.timing import in_turn

DEVICE, DTYPE, TOKENS, HEAD_DIM = "cuda", torch.bfloat16, 1024, 128
IN_A_ROW, ROWS = 50, 8


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def row_us(attend: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> tuple[float, float]:
    """(forward, backward) of a call, by the host's clock, which the device does not hold up."""
    wait()
    since = time.perf_counter()
    outs = [attend(*leaves) for _ in range(IN_A_ROW)]
    forward = time.perf_counter() - since
    wait()
    since = time.perf_counter()
    for out in outs:
        torch.autograd.grad(out, leaves, dout)
    return forward * 1e6 / IN_A_ROW, (time.perf_counter() - since) * 1e6 / IN_A_ROW


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(heads: tuple[int, int]) -> list[Row]:
    attends: dict[str, Any] = {"ringflash": lambda q, k, v: rf.attention(q, k, v, mask=rf.Causal()), "torch": by_torch}
    shapes = [(1, TOKENS, H, HEAD_DIM) for H in (heads[0], heads[1], heads[1])]
    leaves = [torch.randn(shape, device=DEVICE, dtype=DTYPE).requires_grad_() for shape in shapes]
    dout = torch.randn_like(leaves[0])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in attends}
    for i in range(ROWS + 1):
        for name in in_turn(list(attends), i):
            found = row_us(attends[name], leaves, dout)
            if i:  # in the first one kernels are compiled
                times[name].append(found)
    return [
        Row(
            direction, HEAD_DIM, f"{heads[0]}:{heads[1]}", "causal", TOKENS, 1, 1, {},
            extra={"host_us": {name: round(median(one[place] for one in rows)) for name, rows in times.items()}},
        )
        for place, direction in enumerate(("forward", "backward"))
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    rows = [row for heads in ((16, 16), (32, 8)) for row in measure(heads)]
    for row in rows:
        print(row.direction, row.heads, row.extra["host_us"])
    print(write("host", rows, gpus=1, matmul=0.0, out=arguments.out, notes=str(__doc__).split("\n\n")[1]))


if __name__ == "__main__":
    main()
