"""Run a benchmark by name: python benchmarks/run.py kernels [--quick] [--out DIR]."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What reads results, or is read by those that make them, runs on its own.
NAMES = sorted({path.stem for path in HERE.glob("*.py")} - {"run", "measure", "plot", "table", "plain_ring", "gpt"})

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: run.py NAME [flags]; NAME is one of {', '.join(NAMES)}")
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    name = sys.argv.pop(1)
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
