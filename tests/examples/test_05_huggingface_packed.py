"""examples/05_huggingface_packed.py: what it prints alone and on two processes is what it says."""

import re
import runpy

import pytest

from tests.scripts import ROOT, launched

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = ROOT / "examples/05_huggingface_packed.py"


def losses(text):
    return {
        name.strip(): float(loss) for name, loss in re.findall(r"^ *(step +\d+|evaluation)  loss (\S+)$", text, re.M)
    }


def test_it_prints_the_same_losses_alone_and_on_two_processes(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    alone = capsys.readouterr().out
    together = launched(2, str(EXAMPLE), timeout_s=240)
    assert alone.startswith("1 process: 64 tokens of a batch on each\n")
    assert "2 processes: 32 tokens of a batch on each\n" in together
    said = losses(EXAMPLE.read_text(encoding="utf-8"))
    assert len(said) == 7
    assert losses(alone) == pytest.approx(losses(together), rel=1e-3)
    # Another torch may round otherwise, which sixty steps make larger.
    assert losses(alone) == pytest.approx(said, rel=0.02)


def test_it_can_be_read_in_one_sitting():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
