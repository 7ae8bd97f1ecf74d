"""Run the GPU tests and keep their result: python benchmarks/run.py gpu_tests [--out DIR] [pytest arguments]."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch
from measure import RESULTS, write

ROOT = RESULTS.parent.parent


def what_went_wrong(case: ElementTree.Element) -> str:
    """The first line of a failure, "" of a case that has none: the log that has the rest stays on the GPU machine."""
    for child in case:
        if child.tag in ("failure", "error"):
            message = (child.get("message") or "").strip()
            return message.splitlines()[0][:200] if message else child.tag
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments, pytest_arguments = parser.parse_known_args()
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report.name}", *pytest_arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report.name).iter("testcase"))
    counts: dict[str, Counter[str]] = {}
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        counts.setdefault(str(case.get("classname")), Counter())[outcome] += 1
    lines = [
        f"- {name}: {', '.join(f'{n} {outcome}' for outcome, n in found.items())}" for name, found in counts.items()
    ]
    lines += [f"- **{case.get('name')}**: {message}" for case in cases if (message := what_went_wrong(case))]
    notes = "\n".join([f"`{' '.join(command[1:5])}` ended with exit code {code}.", "", *lines])
    gpus = torch.cuda.device_count()
    outcomes = {name: dict(found) for name, found in counts.items()}
    what = "gpu_tests" if gpus == 1 else f"gpu_tests_x{gpus}"
    print(write(what, [], gpus=gpus, matmul=0.0, out=arguments.out, notes=notes, exit_code=code, outcomes=outcomes))
    sys.exit(code)


if __name__ == "__main__":
    main()
