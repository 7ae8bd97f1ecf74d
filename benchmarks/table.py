"""Write the table that choose() takes backends from, out of what benchmarks/kernels.py measured on one kind of GPU.

    python3 benchmarks/table.py RESULT.json [RESULT.json ...] [--out FILE]

Tables in ringflash/kernels/measured are written by this command, never by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ringflash.cli import bench  # noqa: E402
from ringflash.cli.kernels import MASKS  # noqa: E402
from ringflash.kernels.table import KernelTable, gpu_class  # noqa: E402

# Of a result's meta: what a reader needs to know whether the figures still hold.
ABOUT = ("torch", "triton", "cudnn", "flash_attn_4", "commit", "date")


def table(paths: list[Path]) -> KernelTable:
    """Of all rows with a mask that tables tell apart."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    metas = [result["meta"] for result in results]
    if len(gpus := {meta["gpu"] for meta in metas}) > 1:
        sys.exit(f"table: results of different GPUs, {', '.join(sorted(gpus))}; write a table for each")
    rows = [
        (row["direction"], row["head_dim"], row["mask"], row["tokens"], row["tflops"])
        for result in results
        for row in result["rows"]
        if row["mask"] in MASKS
    ]
    about = {"results": [path.name for path in paths], **{name: metas[-1].get(name) for name in ABOUT}}
    return bench.table(metas[0]["gpu"], rows, about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, help="default: ringflash/kernels/measured/<gpu>.json")
    arguments = parser.parse_args()
    found = table(arguments.results)
    path = arguments.out or ROOT / "ringflash" / "kernels" / "measured" / f"{gpu_class(found.gpu)}.json"
    found.write(path)
    print(path)
