"""The short examples print what they say that they print, alone and under torchrun."""

import difflib
import re

import pytest

from tests.scripts import ROOT, launched, output_of

EXAMPLES = ROOT / "examples"
OTHER = "05_huggingface_packed.py"  # which has a test of its own
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("0*.py") if path.name != OTHER)
# Two processes of these do other work.
ALONE = ["01_one_gpu.py", "04_fsdp2_plain.py"]


def lines_of(printed):
    return [line.strip() for line in printed.splitlines() if line.strip()]


def promised_by(script):
    """The indented lines of the docstring after the sentence that ends in "prints" ... ":"."""
    docstring = re.match(r'"""(.*?)"""', (EXAMPLES / script).read_text(encoding="utf-8"), re.S).group(1)
    block = re.search(r"\bprints\b[^\n]*:\n\n((?: {4}.*\n?|\n)+)", docstring).group(1)
    return lines_of(block)


@pytest.mark.parametrize("script", SCRIPTS)
def test_alone_it_prints_what_it_says(script):
    assert lines_of(output_of(f"examples/{script}")) == promised_by(script)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in ALONE])
def test_two_processes_print_the_same(script):
    assert lines_of(launched(2, f"examples/{script}")) == promised_by(script)


def test_five_changed_lines_make_the_plain_fsdp2_script_context_parallel():
    plain, parallel = (
        (EXAMPLES / script).read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
        for script in ("04_fsdp2_plain.py", "04_fsdp2.py")
    )
    changed = [line[2:] for line in difflib.ndiff(plain, parallel) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(changed) <= 5, changed
    assert promised_by("04_fsdp2.py") == promised_by("04_fsdp2_plain.py")


@pytest.mark.parametrize("script", [*SCRIPTS, OTHER])
def test_it_is_short(script):
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) <= 150
