"""The short examples print what they say that they print, alone and under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("0*.py"))


def printed_by(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=EXAMPLES.parent,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def promised_by(script):
    """The indented lines of the docstring after the sentence that ends in "prints" or "prints, ...:"."""
    docstring = re.match(r'"""(.*?)"""', (EXAMPLES / script).read_text(encoding="utf-8"), re.S).group(1)
    block = re.search(r"\bprints\b[^\n]*:\n\n((?: {4}.*\n?|\n)+)", docstring).group(1)
    return [line.strip() for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_prints_what_it_says(script):
    path = f"examples/{script}"
    promised = promised_by(script)
    assert printed_by(path) == promised
    assert printed_by("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path) == promised


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_short(script):
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) <= 150
