"""What masks cost on one GPU: bounds per row beside compile-time causal kernels, and packed documents beside one sequence.

Both by time per visible pair of the Triton kernels, checked before timed; launches are counted by the profiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from measure import Row, interleaved, matmul_tflops, write
from torch import Tensor

import ringflash as rf
from ringflash.kernels.triton import backward, forward, launch
from ringflash.schedule.plan import plan
from ringflash.testing.compare import relative_error

# (what the kernel reads, what a kernel made for causal squares would have in its place)
FORWARD_CAUSAL = [
    ("begin = tl.load(lo_ptr + first)", "begin = first * 0"),
    ("end = tl.load(hi_ptr + last)", "end = last + 1"),
    ("all_from = tl.load(lo_ptr + last)", "all_from = first * 0"),
    ("all_until = tl.load(hi_ptr + first)", "all_until = first + 1"),
    ("n_left = tl.minimum(tl.cdiv(tl.maximum(all_from - start, 0), BLOCK), n_all)", "n_left = 0"),
    ("lo = tl.load(lo_ptr + offs_q, mask=offs_q < Sq, other=0)", "lo = offs_q * 0"),
    ("hi = tl.load(hi_ptr + offs_q, mask=offs_q < Sq, other=0)", "hi = offs_q + 1"),
    (
        "seen = (lo[:, None] <= offs_k[None, :]) & (offs_k[None, :] < hi[:, None])",
        "seen = offs_k[None, :] < hi[:, None]",
    ),
]
SPLIT_COLUMNS = """
@triton.jit
def split_columns(first, last, Sq, BLOCK: tl.constexpr):
    n_all = tl.cdiv(tl.maximum(Sq - first, 0), BLOCK)
    n_left = tl.minimum(tl.cdiv(last - first, BLOCK), n_all)
    n_full = tl.maximum((Sq - first) // BLOCK, n_left)
    return first, n_left, n_full, n_all, first, Sq


@triton.jit
def _score_gradient("""
BACKWARD_CAUSAL = [
    ("from ringflash.kernels.triton.forward import", "from causal_forward import"),
    ("\n@triton.jit\ndef _score_gradient(", SPLIT_COLUMNS),
    (
        "split_blocks(\n        lo_ptr, hi_ptr, key, tl.minimum(key + BLOCK_K, Sk) - 1, BLOCK_Q, BLOCK_Q\n    )",
        "split_columns(key, tl.minimum(key + BLOCK_K, Sk) - 1, Sq, BLOCK_Q)",
    ),
    ("lo = tl.load(lo_ptr + offs_k, mask=offs_k < Sk, other=0)", "lo = offs_k"),
    ("hi = tl.load(hi_ptr + offs_k, mask=offs_k < Sk, other=0)", "hi = offs_k * 0 + end"),
    ("lo = tl.load(lo_ptr + offs_q, mask=offs_q < Sq, other=0)", "lo = offs_q * 0"),
    ("hi = tl.load(hi_ptr + offs_q, mask=offs_q < Sq, other=0)", "hi = offs_q + 1"),
    (
        "visible = (lo[:, None] <= offs_k[None, :]) & (offs_k[None, :] < hi[:, None])",
        "visible = offs_k[None, :] < hi[:, None]",
    ),
]


def rewritten(folder: Path, module: ModuleType, changes: list[tuple[str, str]]) -> ModuleType:
    """A kernel module with `changes` to its source, each of which must be found."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert old in text, f"{module.__name__} has changed; this benchmark must follow: {old}"
        text = text.replace(old, new)
    name = f"causal_{module.__name__.rsplit('.', 1)[1]}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def inputs(tokens: int, heads: tuple[int, int], head_dim: int, batch: int = 1) -> tuple[list[Tensor], Tensor]:
    make = lambda H: torch.randn(batch, tokens, H, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout = make(heads[0]), make(heads[1]), make(heads[1]), make(heads[0])
    return [x.requires_grad_() for x in (q, k, v)], dout


def overhead(tokens: int, head_dim: int, heads: tuple[int, int], kernels: dict[str, Any], rounds: int) -> list[Row]:
    """Kernels that read bounds beside the same kernels made for causal squares."""
    qkv, dout = inputs(tokens, heads, head_dim)
    attend = lambda: rf.attention(*qkv, mask=rf.Causal(), backend="triton")  # noqa: E731

    def fixed(run: Any) -> Any:
        with mock.patch.multiple(launch, **kernels):
            return run()

    outs = {"ringflash": attend(), "compile_time_causal": fixed(attend)}
    assert relative_error(outs["ringflash"], outs["compile_time_causal"]) < 1e-3
    grad = lambda out: torch.autograd.grad(out, qkv, dout, retain_graph=True)  # noqa: E731
    for a, b in zip(grad(outs["ringflash"]), fixed(lambda: grad(outs["ringflash"])), strict=True):
        assert relative_error(a, b) < 1e-3
    flops = 4.0 * head_dim * heads[0] * plan(rf.Causal(), rf.Contiguous(), tokens).pairs
    rows = []
    for direction, run, factor in (("forward", attend, 1.0), ("backward", lambda: grad(outs["ringflash"]), 2.5)):
        with torch.no_grad() if direction == "forward" else torch.enable_grad():
            times = interleaved({"ringflash": run, "compile_time_causal": lambda: fixed(run)}, rounds, head_start_ms=4)  # noqa: B023
        rows.append(
            Row(
                direction, head_dim, f"{heads[0]}:{heads[1]}", "causal", tokens, 1, 1,
                {name: round(t.tflops(factor * flops), 1) for name, t in times.items()},
                extra={"slower": round(times["ringflash"].median_ms / times["compile_time_causal"].median_ms - 1, 4)},
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
    with tempfile.TemporaryDirectory() as folder:
        changed = rewritten(Path(folder), forward, FORWARD_CAUSAL), rewritten(Path(folder), backward, BACKWARD_CAUSAL)
        kernels = {
            "forward_kernel": changed[0].forward_kernel,
            "key_gradient_kernel": changed[1].key_gradient_kernel,
            "query_gradient_kernel": changed[1].query_gradient_kernel,
        }
        rows = []
        for tokens, (head_dim, heads) in itertools.product((8192, 32768), ((128, (16, 16)), (64, (32, 32)))):
            rows += overhead(tokens, head_dim, heads, kernels, arguments.rounds)
    for head_dim, heads in ((128, (16, 16)), (64, (32, 32))):
        rows += packed(head_dim, heads, arguments.rounds)
    path = write(
        "masks", rows, gpus=1, matmul=matmul_tflops(), out=arguments.out, planning=planning(),
        notes="Rows with `compile_time_causal`: the same kernels with the bounds of a causal square compiled in. Rows with "
        "a `packing`: 64k tokens as packed documents; `time_per_pair` is relative to one causal sequence. `planning`: host "
        "milliseconds of one of 64 ranks for a new packed batch of 1M tokens, bounds and transposes queued on the GPU.",
    )  # fmt: skip
    print(path.with_suffix(".md").read_text())
