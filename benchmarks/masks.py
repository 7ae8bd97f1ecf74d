"""What masks cost on one GPU: bounds per row beside compile-time causal kernels, and packed documents beside one sequence.

Both by time per visible pair of the Triton kernels, checked before timed; launches are counted by the profiler.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from measure import Row, write
from torch import Tensor

import ringflash as rf
from ringflash.cli.timing import interleaved, matmul_tflops
from ringflash.schedule.plan import plan
from ringflash.testing.compare import relative_error


def inputs(tokens: int, heads: tuple[int, int], head_dim: int, batch: int = 1) -> tuple[list[Tensor], Tensor]:
    make = lambda H: torch.randn(batch, tokens, H, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout = make(heads[0]), make(heads[1]), make(heads[1]), make(heads[0])
    return [x.requires_grad_() for x in (q, k, v)], dout


def overhead(tokens: int, head_dim: int, heads: tuple[int, int], rounds: int) -> list[Row]:
    """Kernels that read bounds beside the same kernels with those of a causal square compiled in, and what a call takes."""
    qkv, dout = inputs(tokens, heads, head_dim)
    attend = lambda: rf.attention(*qkv, mask=rf.Causal(), backend="triton")  # noqa: E731
    bounds = plan(rf.Causal(), rf.Contiguous(), tokens)[0]

    def forced(is_causal: bool, run: Any) -> Any:
        """`run` with kernels compiled for a causal square, or with those that read bounds."""
        kept = bounds.shape
        object.__setattr__(bounds, "shape", "causal" if is_causal else "rows")
        try:
            return run()
        finally:
            object.__setattr__(bounds, "shape", kept)

    outs = {name: forced(name != "bounds", attend) for name in ("bounds", "compile_time_causal")}
    assert relative_error(outs["bounds"], outs["compile_time_causal"]) < 1e-3
    grad = lambda out: torch.autograd.grad(out, qkv, dout, retain_graph=True)  # noqa: E731
    for a, b in zip(*(forced(name != "bounds", lambda: grad(outs["bounds"])) for name in outs), strict=True):
        assert relative_error(a, b) < 1e-3
    flops = 4.0 * head_dim * heads[0] * plan(rf.Causal(), rf.Contiguous(), tokens).pairs
    rows = []
    for direction, run, factor in (("forward", attend, 1.0), ("backward", lambda: grad(outs["bounds"]), 2.5)):
        with torch.no_grad() if direction == "forward" else torch.enable_grad():
            candidates = {
                "ringflash": run,
                "bounds": lambda: forced(False, run),  # noqa: B023
                "compile_time_causal": lambda: forced(True, run),  # noqa: B023
            }
            times = interleaved(candidates, rounds, head_start_ms=4)
        best = min(times["bounds"].median_ms, times["compile_time_causal"].median_ms)
        rows.append(
            Row(
                direction, head_dim, f"{heads[0]}:{heads[1]}", "causal", tokens, 1, 1,
                {name: round(t.tflops(factor * flops), 1) for name, t in times.items()},
                extra={
                    "bounds slower": round(times["bounds"].median_ms / times["compile_time_causal"].median_ms - 1, 4),
                    "call slower than best": round(times["ringflash"].median_ms / best - 1, 4),
                },
            )
        )  # fmt: skip
    return rows


PACKINGS = {
    "64 x 1k": [1024] * 64,
    "16 x 4k": [4096] * 16,
    "48k + 16 x 1k": [49152] + [1024] * 16,
    "512 x 128": [128] * 512,
}


def launches(run: Any) -> int:
    """Kernels that one call starts."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if "Mem" not in event.key)


def packed(head_dim: int, heads: tuple[int, int], rounds: int) -> list[Row]:
    """64k tokens as documents beside the same tokens as one causal sequence."""
    tokens = 65536
    qkv, dout = inputs(tokens, heads, head_dim)
    masks = {"one": rf.Causal(), **{name: rf.Documents(lengths, causal=True) for name, lengths in PACKINGS.items()}}
    outs = {name: rf.attention(*qkv, mask=mask, backend="triton") for name, mask in masks.items()}
    check_documents(qkv, outs["48k + 16 x 1k"], PACKINGS["48k + 16 x 1k"])
    grad = lambda out: torch.autograd.grad(out, qkv, dout, retain_graph=True)  # noqa: E731
    rows = []
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        runs = {
            name: (lambda m=mask: rf.attention(*qkv, mask=m, backend="triton"))
            if direction == "forward"
            else (lambda o=outs[name]: grad(o))
            for name, mask in masks.items()
        }
        with torch.no_grad() if direction == "forward" else torch.enable_grad():
            times = interleaved(runs, rounds, head_start_ms=4)
            counts = {name: launches(run) for name, run in runs.items()}
        per_pair = {
            name: times[name].median_ms / plan(mask, rf.Contiguous(), tokens).pairs for name, mask in masks.items()
        }
        for name, mask in masks.items():
            flops = factor * 4.0 * head_dim * heads[0] * plan(mask, rf.Contiguous(), tokens).pairs
            rows.append(
                Row(
                    direction, head_dim, f"{heads[0]}:{heads[1]}", "causal" if name == "one" else "documents", tokens, 1, 1,
                    {"ringflash": round(times[name].tflops(flops), 1)},
                    extra={
                        "packing": name, "ms": round(times[name].median_ms, 3),
                        "time_per_pair": round(per_pair[name] / per_pair["one"], 3), "launches": counts[name],
                    },
                )
            )  # fmt: skip
    return rows


def check_documents(qkv: list[Tensor], out: Tensor, lengths: list[int]) -> None:
    """The last document equals itself alone."""
    own = [x[:, -lengths[-1] :] for x in qkv]
    alone = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in own), is_causal=True, enable_gqa=True
    )
    assert relative_error(out[:, -lengths[-1] :], alone.transpose(1, 2)) < 1.5e-2


def planning(ranks: int = 64, tokens: int = 1 << 20) -> list[dict[str, Any]]:
    """Host milliseconds of a rank for a new packed batch, by layout: until everything is queued on the GPU."""
    device = torch.device("cuda")
    rows = []
    makers = {
        "zigzag": lambda mask: rf.Zigzag(),
        "contiguous": lambda mask: rf.Contiguous(),
        "striped": lambda mask: rf.Striped(),
        "balanced": rf.Balanced,
    }
    for mean, (name, make) in itertools.product((1000, 8000, 100000), makers.items()):
        times = []
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(mean // 10, 2 * mean, (4 * tokens // mean,), generator=generator)
            drawn = drawn[drawn.cumsum(0) < tokens]
            lengths = [*drawn.tolist(), tokens - int(drawn.sum())]
            torch.cuda.synchronize()
            start = time.perf_counter()
            mask = rf.Documents(lengths, causal=True)
            mine = plan(mask, make(mask), tokens, ranks // 3, ranks)
            for source in mine.sources:
                mine[source].to(device)
                mine[source].columns_to(device)
            times.append((time.perf_counter() - start) * 1e3)
        rows.append({"layout": name, "mean_document": mean, "ms": round(sorted(times)[len(times) // 2], 2)})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for tokens, (head_dim, heads) in itertools.product((8192, 32768), ((128, (16, 16)), (64, (32, 32)))):
        rows += overhead(tokens, head_dim, heads, arguments.rounds)
    for head_dim, heads in ((128, (16, 16)), (64, (32, 32))):
        rows += packed(head_dim, heads, arguments.rounds)
    path = write(
        "masks", rows, gpus=1, matmul=matmul_tflops(), out=arguments.out, planning=planning(),
        notes="Rows with `bounds`: kernels that read every row's bounds, the same kernels with those of a causal square "
        "compiled in, and what a call takes of the two. Rows with a `packing`: 64k tokens as packed documents; "
        "`time_per_pair` is relative to one causal sequence. `planning`: host milliseconds of one of 64 ranks for a new "
        "packed batch of 1M tokens, bounds and transposes queued on the GPU.",
    )  # fmt: skip
    print(path.with_suffix(".md").read_text())
