"""Record keeping that all benchmarks share; what they time with is in ringflash/cli/timing.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from ringflash.kernels.table import gpu_class

RESULTS = Path(__file__).resolve().parent / "results"
RUN = RESULTS.parent / "run.py"


@dataclass
class Row:
    """One line of a results file; tflops are per GPU, 4 D per visible pair and head forward, 2.5 times that backward."""

    direction: str
    head_dim: int
    heads: str
    mask: str
    tokens: int
    batch: int
    gpus: int
    tflops: dict[str, float]
    efficiency: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def torchrun(gpus: int, script: Path, *arguments: str) -> int:
    """The exit status of a script in a process for each GPU of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", str(script)]
    return subprocess.run([*command, *arguments], check=False).returncode


def command() -> str:
    """What a reader types to get these figures; where they are written to is the reader's affair."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return " ".join(["python3 benchmarks/run.py", Path(sys.argv[0]).stem, *arguments])


def commit() -> str:
    """Of the tree that is measured; a machine that got a copy without .git is told in RINGFLASH_COMMIT."""
    if "RINGFLASH_COMMIT" in os.environ:
        return os.environ["RINGFLASH_COMMIT"]
    try:
        arguments = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=RESULTS.parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(what: str, rows: list[Row], *, gpus: int, matmul: float, out: Path | None, notes: str, **meta: Any) -> Path:
    """results/<what>_<hardware>_<date>.json and .md; returns the JSON's path."""
    folder = RESULTS if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": gpus,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "matmul_tflops": round(matmul, 1),
        "command": command(),
        **meta,
    }
    path = folder / f"{what}_{gpu_class(torch.cuda.get_device_name())}_{date.today().isoformat()}.json"
    body = [{key: value for key, value in asdict(row).items() if value not in (None, {})} for row in rows]
    path.write_text(json.dumps({"meta": about, "rows": body}, indent=1) + "\n")
    path.with_suffix(".md").write_text(_markdown(what, about, rows, notes))
    return path


def _cell(value: Any) -> Any:
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value


def _markdown(what: str, about: dict[str, Any], rows: list[Row], notes: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.tflops))
    lines = [f"# {what}", "", notes, "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    head = ["direction", "head dim", "heads", "mask", "tokens", "batch", "gpus", *(f"{n}, TFLOP/s" for n in names)]
    extras = list(dict.fromkeys(name for row in rows for name in row.extra if name != "spread"))
    head += [name.replace("_", " ") for name in extras]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.direction, row.head_dim, row.heads, row.mask, row.tokens, row.batch, row.gpus]
        cells += [f"{row.tflops[n]:.0f}" if n in row.tflops else "" for n in names]
        cells += [_cell(row.extra.get(name, "")) for name in extras]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
