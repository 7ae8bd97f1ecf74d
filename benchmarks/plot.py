"""Draw what a benchmark measured, on any machine that has matplotlib.

    python3 benchmarks/plot.py kernels RESULT.json [RESULT.json ...] [--out DIR]
    python3 benchmarks/plot.py ring RESULT.json [RESULT.json ...] [--out DIR]
    python3 benchmarks/plot.py train RESULT.json [RESULT.json ...] [--out DIR]

Kernels, per head dim and heads: bars, one group per length, and lines over length; directions by masks in each picture.
Rings: the efficiency of each way over the length of a causal sequence, by heads, forward and with backward.
Training: model TFLOP/s per GPU of each way to attend over the length, and the peak of memory; a picture per file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "ringflash": "#d62728", "hopper": "#ff7f0e", "triton": "#bcbd22", "cudnn": "#2ca02c", "fa4": "#1f77b4",
    "flash": "#7f7f7f",
}  # fmt: skip
PANELS = [(direction, mask) for direction in ("forward", "backward") for mask in ("full", "causal")]


@dataclass(frozen=True)
class Family:
    """Rows that share a picture."""

    head_dim: int
    heads: str
    total: int  # batch * tokens

    @classmethod
    def of(cls, row: dict[str, Any]) -> Family:
        return cls(row["head_dim"], row["heads"], row["tokens"] * row["batch"])

    def __str__(self) -> str:
        return f"d{self.head_dim}_h{self.heads.replace(':', 'x')}_{self.total // 1024}k"


def read(paths: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(meta of the first, rows of all). Figures of other hardware are not put beside these."""
    results = [json.loads(path.read_text()) for path in paths]
    if len(gpus := {result["meta"]["gpu"] for result in results}) > 1:
        raise SystemExit(f"plot: results of different GPUs, {', '.join(sorted(gpus))}; draw them apart")
    return results[0]["meta"], [row for result in results for row in result["rows"]]


def draw(kind: str, family: Family, rows: list[dict[str, Any]], meta: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), sharey=True, layout="constrained")
    names = [name for name in COLORS if any(name in row["tflops"] for row in rows)]
    for axis, (direction, mask) in zip(axes.flat, PANELS, strict=True):
        cells = sorted(
            (row for row in rows if (row["direction"], row["mask"]) == (direction, mask)), key=lambda row: row["tokens"]
        )
        places = range(len(cells))
        for i, name in enumerate(names):
            speeds = [row["tflops"].get(name, float("nan")) for row in cells]
            if kind == "bars":
                width = 0.85 / len(names)
                middle = [place + (i - (len(names) - 1) / 2) * width for place in places]
                axis.bar(middle, speeds, width, label=name, color=COLORS[name])
            else:
                axis.plot(places, speeds, marker="o", label=name, color=COLORS[name])
        axis.axhline(meta["matmul_tflops"], linestyle="--", color="black", linewidth=0.8, label="matmul 8192³")
        axis.set_xticks(places, [f"{row['tokens'] // 1024}k x {row['batch']}" for row in cells])
        axis.set_title(f"{direction}, {mask}")
        axis.set_ylabel("TFLOP/s")
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names) + 1)
    versions = f"torch {meta['torch']}, {meta['date']}, {meta['commit']}"
    figure.suptitle(f"{meta['gpu']}, bf16, head dim {family.head_dim}, heads {family.heads}; {versions}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def kernels(paths: list[Path], out: Path) -> list[Path]:
    meta, rows = read(paths)
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for family in dict.fromkeys(map(Family.of, rows)):
        own = [row for row in rows if Family.of(row) == family]
        for kind in ("bars", "lines"):
            drawn.append(out / f"{paths[0].stem}_{family}_{kind}.png")
            draw(kind, family, own, meta, drawn[-1])
    return drawn


RING_COLORS = {
    "symmetric": "#d62728", "peer": "#ff7f0e", "gathered": "#bcbd22", "torch context parallel": "#2ca02c",
    "plain NCCL ring": "#7f7f7f",
}  # fmt: skip


def ring(paths: list[Path], out: Path) -> list[Path]:
    meta, rows = read(paths)
    out.mkdir(parents=True, exist_ok=True)
    causal = sorted((row for row in rows if row["mask"] == "causal"), key=lambda row: row["tokens"])
    heads, directions = sorted({row["heads"] for row in causal}), ("forward", "both")
    figure, axes = plt.subplots(
        len(heads), 2, figsize=(12, 4 * len(heads)), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (h, direction) in zip(axes.flat, [(h, d) for h in heads for d in directions], strict=True):
        cells = [row for row in causal if (row["heads"], row["direction"]) == (h, direction)]
        places = range(len(cells))
        for name, color in RING_COLORS.items():
            axis.plot(places, [c["extra"]["efficiency"].get(name) for c in cells], marker="o", label=name, color=color)
        axis.axhline(1.0, linestyle="--", color="black", linewidth=0.8)
        axis.set_xticks(places, [f"{row['tokens'] // 1024}k" for row in cells])
        axis.set_title(f"{'forward' if direction == 'forward' else 'forward and backward'}, heads {h}")
        axis.set_ylabel("TFLOP/s per GPU, of one alone")
        axis.set_xlabel("tokens of the whole sequence")
        axis.grid(axis="y", alpha=0.3)
        axis.set_ylim(0, 1.1)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RING_COLORS))
    versions = f"torch {meta['torch']}, {meta['date']}, {meta['commit']}"
    figure.suptitle(f"{meta['gpus']} x {meta['gpu']}, bf16, head dim 128, causal; {versions}")
    path = out / f"{paths[0].stem}_efficiency.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


TRAIN_COLORS = {
    "ringflash": "#d62728", "torch": "#7f7f7f", "torch cudnn": "#2ca02c", "torch context parallel": "#2ca02c",
}  # fmt: skip


def train(paths: list[Path], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for path in paths:
        meta, rows = read([path])
        rows = sorted(rows, key=lambda row: row["tokens"])
        names = [name for name in TRAIN_COLORS if any(name in row["tflops"] for row in rows)]
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        panels = {
            "model TFLOP/s per GPU": [row["tflops"] for row in rows],
            "peak GiB": [row["extra"]["peak_gib"] for row in rows],
        }
        for axis, (title, figures) in zip(axes, panels.items(), strict=True):
            width = 0.8 / len(names)
            for i, name in enumerate(names):
                middle = [place + (i - (len(names) - 1) / 2) * width for place in range(len(rows))]
                heights = [of_row.get(name, float("nan")) for of_row in figures]
                axis.bar(middle, heights, width, label=name, color=TRAIN_COLORS[name])
            axis.set_xticks(range(len(rows)), [f"{row['tokens'] // 1024}k x {row['batch']}" for row in rows])
            axis.set_xlabel("tokens of a sequence x sequences")
            axis.set_title(title)
            axis.grid(axis="y", alpha=0.3)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
        versions = f"torch {meta['torch']}, {meta['date']}, {meta['commit']}"
        figure.suptitle(f"{meta['gpus']} x {meta['gpu']}, GPT of 1.3 billion weights, bf16; {versions}")
        drawn.append(out / f"{path.stem}.png")
        figure.savefig(drawn[-1], dpi=110)
        plt.close(figure)
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kernels", "ring", "train"))
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, help="folder for the pictures; default that of the first result")
    arguments = parser.parse_args()
    draw_all = {"kernels": kernels, "ring": ring, "train": train}[arguments.what]
    print(*draw_all(arguments.results, arguments.out or arguments.results[0].parent), sep="\n")
