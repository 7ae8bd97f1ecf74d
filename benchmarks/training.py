"""Train the example on every GPU and on one, and keep both losses: python benchmarks/run.py training [--out DIR]."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from measure import RESULTS, Row, torchrun, write

from ringflash.cli.timing import matmul_tflops

EXAMPLE = RESULTS.parent.parent / "examples" / "train_long_context.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=65_536)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--steps", arguments.steps, "--seq-len", arguments.seq_len, "--compare-steps", arguments.steps]
        code = torchrun(gpus, EXAMPLE, "--out", folder, "--compare", *map(str, flags))
        compared = json.loads((Path(folder) / "compare.json").read_text())
        metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = []
    for name, ranks in (("ring", gpus), ("alone", 1)):
        speeds = compared[name]["tokens_per_s"][1:]
        peaks = [max(peak) for peak in compared[name]["peak_memory_bytes"]]
        extra = {"tokens_per_s": round(median(speeds)), "peak_memory_bytes": max(peaks), "loss": compared[name]["loss"]}
        rows.append(Row("both", 64, "16:4", "documents", arguments.seq_len, 1, ranks, {}, extra=extra))
    notes = "\n".join(
        [
            f"`examples/train_long_context.py`, {arguments.steps} steps of {arguments.seq_len:,} tokens, bf16, FSDP2 and a",
            f"zigzag ring over {gpus} GPUs with NCCL, beside the same steps on one GPU. Exit code {code}.",
            "",
            f"- largest relative difference of loss: {compared['largest_relative_difference']:.2e} (allowed 1e-3)",
            f"- largest absolute difference of loss: {compared['largest_absolute_difference']:.2e}",
            f"- loss: {metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f}",
            *map(sentence, rows),
        ]
    )
    difference = compared["largest_relative_difference"]
    what = f"training_x{gpus}"
    print(
        write(
            what,
            rows,
            gpus=gpus,
            matmul=matmul_tflops(),
            out=arguments.out,
            notes=notes,
            largest_relative_difference=difference,
        )
    )
    sys.exit(code)


def sentence(row: Row) -> str:
    peak = row.extra["peak_memory_bytes"] / 2**30
    return f"- {row.gpus} GPU(s): {row.extra['tokens_per_s']:,} tokens/s, peak {peak:.1f} GiB a GPU"


if __name__ == "__main__":
    main()
