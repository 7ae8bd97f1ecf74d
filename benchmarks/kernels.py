"""Local kernels on one GPU: ours beside cuDNN and torch's flash attention, forward and backward, checked before timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, interleaved, matmul_tflops, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.schedule.plan import plan
from ringflash.testing.compare import relative_error

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
MASKS = {"full": rf.Full(), "causal": rf.Causal()}


def peer(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
    with sdpa_kernel(backend):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(
            *heads_first, is_causal=mask == "causal", enable_gqa=q.shape[2] != k.shape[2]
        ).transpose(1, 2)


def measure(head_dim: int, heads: tuple[int, int], mask: str, tokens: int, batch: int, rounds: int) -> list[Row]:
    """A forward and a backward row: `tokens` per sequence, `batch` sequences."""
    Hq, Hk = heads
    make = lambda H: torch.randn(batch, tokens, H, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout = make(Hq), make(Hk), make(Hk), make(Hq)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    runs: dict[str, Callable[[], Tensor]] = {
        "ringflash": lambda: rf.attention(q, k, v, mask=MASKS[mask], backend="triton"),
        **{name: lambda backend=backend: peer(backend, q, k, v, mask) for name, backend in PEERS.items()},
    }
    outs: dict[str, Tensor] = {}
    for name, run in list(runs.items()):
        try:
            outs[name] = run()
        except RuntimeError as error:  # this peer has no kernel for the shape
            print(f"{name}: {str(error).splitlines()[0]}")
            del runs[name]
    grads = {name: torch.autograd.grad(out, inputs, dout, retain_graph=True) for name, out in outs.items()}
    check(outs, grads)
    backwards = {
        name: lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True) for name, out in outs.items()
    }
    with torch.no_grad():
        forward = interleaved(runs, rounds)
    backward = interleaved(backwards, rounds)
    flops = 4.0 * head_dim * Hq * batch * plan(MASKS[mask], rf.Contiguous(), tokens).pairs
    rows = []
    for direction, times, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
        rows.append(
            Row(
                direction, head_dim, f"{Hq}:{Hk}", mask, tokens, batch, 1,
                {name: round(t.tflops(factor * flops), 1) for name, t in times.items()},
                extra={"spread": {name: round(t.spread, 3) for name, t in times.items()}},
            )
        )  # fmt: skip
    return rows


def check(outs: dict[str, Tensor], grads: dict[str, Any]) -> None:
    """Every timed shape agrees with a peer within twice the rounding of bf16, which both sides have."""
    reference = next((name for name in PEERS if name in outs), None)
    if reference is None:
        return
    pairs = [(outs["ringflash"], outs[reference]), *zip(grads["ringflash"], grads[reference], strict=True)]
    for ours, theirs in pairs:
        error = relative_error(ours, theirs)
        if not error < 1.5e-2:
            raise AssertionError(f"ringflash and {reference} differ by {error:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one length per head dim")
    arguments = parser.parse_args()
    ceiling = matmul_tflops()
    rows: list[Row] = []
    shapes = [(128, (16, 16)), (128, (64, 8)), (64, (32, 32)), (256, (8, 8))]
    for head_dim, heads in shapes:
        for mask in MASKS:
            for tokens in (8192,) if arguments.quick else (2048, 8192, 16384):
                rows += measure(head_dim, heads, mask, tokens, max(1, 16384 // tokens), arguments.rounds)
                for row in rows[-2:]:
                    print(
                        row.direction, row.head_dim, row.heads, row.mask, row.tokens, row.batch, row.tflops, flush=True
                    )
    notes = "Local kernels, bf16, medians of interleaved runs; `ringflash` is the Triton backend through rf.attention."
    print(write("kernels", rows, gpus=1, matmul=ceiling, out=arguments.out, notes=notes))


if __name__ == "__main__":
    main()
