"""The command line: which command is meant."""

from __future__ import annotations

import sys

from ringflash.cli import bench

USAGE = "usage: python -m ringflash bench kernels [--out FILE] [--quick]"


def main(arguments: list[str]) -> int:
    """Run a command; its exit status, 2 where none is meant."""
    if arguments[:2] != ["bench", "kernels"]:
        is_asked = arguments in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    return bench.kernels(arguments[2:])
