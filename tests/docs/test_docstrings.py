"""docs/site/docstrings.py: our docstrings as reStructuredText. That no word is lost is held by test_site.py."""

from __future__ import annotations

import importlib.util

import pytest

import dev

SPEC = importlib.util.spec_from_file_location("docstrings", dev.ROOT / "docs/site/docstrings.py")
docstrings = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docstrings)


def rst(text: str) -> str:
    return "\n".join(docstrings.as_rst(text.splitlines())).strip()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("A sentence over\ntwo lines.", "A sentence over\ntwo lines."),
        ("q: [B, S];\n    in bf16.\nk, v: alike.", "* **q**: [B, S];\n  in bf16.\n\n* **k**, **v**: alike."),
        ("First.\n\n    a = b * c\n    d = e\n\nThen.", "First.\n\n::\n\n    a = b * c\n    d = e\n\nThen."),
        ("x: y.\nReturns z.", "* **x**: y.\n\nReturns z."),
        ("Errors: of `a_b`, p * q, |x|, a_.", "Errors: of ``a_b``, p \\* q, \\|x\\|, a\\_."),
    ],
    ids=["paragraph", "arguments", "equation", "a sentence ends arguments", "code and special characters"],
)
def test_prose_arguments_and_equations_keep_their_form(said, shown):
    assert rst(said) == shown
