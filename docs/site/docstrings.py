"""Our docstrings as Sphinx reads them: prose, an argument a line, equations set off by four spaces."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

# "q: [B, Sq, Hq, D] ...", "left, right: tokens"; a sentence such as "Errors: ..." begins with a capital.
ARGUMENT = re.compile(r"[a-z_]+(?:, [a-z_]+)*: ")
# What reStructuredText would take for emphasis, a substitution or a reference.
SPECIAL = re.compile(r"([\\*|]|(?<=\w)_(?!\w))")


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, unindented as inspect.cleandoc leaves them."""
    rst: list[str] = []
    for is_gap, group in groupby(lines, key=lambda line: not line.strip()):
        if is_gap:
            continue
        block = list(group)
        if all(line.startswith("    ") for line in block):
            rst += ["::", "", *block, ""]
        else:
            rst += _block(block)
    return rst


def _block(lines: list[str]) -> list[str]:
    """A paragraph, or several arguments, each with its continuation lines; or first the one and then the other."""
    rst: list[str] = []
    is_argument = False
    for line in lines:
        argument = ARGUMENT.match(line)
        if argument:
            is_argument = True
            names = argument[0][:-2].split(", ")
            said = ", ".join(f"**{name}**" for name in names)
            rst += ["", f"* {said}: {_plain(line[argument.end() :])}"]
        elif is_argument and line.startswith("    "):
            rst.append(f"  {_plain(line.strip())}")
        else:
            rst += [""] if is_argument else []
            is_argument = False
            rst.append(_plain(line))
    return [*rst, ""]


def _plain(text: str) -> str:
    """Backticks are code, and everything else is what it says."""
    said, *rest = text.split("`")
    parts = [SPECIAL.sub(r"\\\1", said)]
    for i, part in enumerate(rest):
        parts.append(f"``{part}``" if i % 2 == 0 else SPECIAL.sub(r"\\\1", part))
    return "".join(parts)


def setup(app: Any) -> dict[str, bool]:
    def convert(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        lines[:] = as_rst(lines)

    app.connect("autodoc-process-docstring", convert)
    return {"parallel_read_safe": True}
