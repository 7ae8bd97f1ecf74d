"""python -m ringflash bench kernels: what it prints, what it writes, and that attention() takes it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringflash as rf
from ringflash.cli import bench, main, timing
from ringflash.cli.kernels import Shape
from ringflash.kernels.table import Cell, KernelTable

ROOT = Path(__file__).resolve().parents[2]
USAGE = "usage: python -m ringflash bench kernels [--out FILE] [--quick]"


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "rings"], ["kernels"], ["bench", "--quick", "kernels"]])
def test_no_command_or_a_wrong_one_prints_a_usage_line(capsys, arguments):
    assert main.main(arguments) == 2
    assert capsys.readouterr() == ("", USAGE + "\n")


def test_help_is_no_mistake(capsys):
    assert main.main(["--help"]) == 0
    assert capsys.readouterr() == (USAGE + "\n", "")


def test_the_module_runs_and_its_exit_status_is_the_commands():
    command = [sys.executable, "-m", "ringflash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", USAGE + "\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fast"], "unrecognized arguments"),
        (["--out", "/no/x.json"], "cannot be written to: No such file"),
        (["--out", "/"], "cannot be written to: Is a directory"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", "kernels", *flags])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["bench", "kernels"]) == 1
    assert capsys.readouterr() == ("", "bench kernels: torch sees no GPU here\n")


def test_every_cell_of_a_table_is_measured_with_the_same_number_of_tokens():
    shapes = bench.shapes(bench.TOKENS)
    cells = {Cell("forward", shape.head_dim, shape.mask, shape.tokens) for shape in shapes}
    assert len(cells) == len(shapes) == 3 * 2 * 5
    assert {shape.tokens * shape.batch for shape in shapes} == {16384}
    assert {shape.query_heads * shape.head_dim for shape in shapes} == {2048}
    assert Shape(128, 16, 16, "causal", 1024, 16) in shapes


@pytest.fixture
def small(monkeypatch):
    """The CPU as the GPU, two kernels, one small shape for each mask; the library's own is twice as fast as flash."""
    real = bench.measure
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    monkeypatch.setattr(bench, "matmul_tflops", lambda: 800.0)
    monkeypatch.setattr(bench, "HEADS", ((64, 1),))
    monkeypatch.setattr(bench, "QUICK_TOKENS", (1024,))
    monkeypatch.setattr(bench, "TOTAL", 1024)
    monkeypatch.setattr(
        bench, "measure", lambda shape, findings: real(shape, findings, ("ringflash", "flash", "fa4"), 2, "cpu")
    )
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: 1e-3)


def test_what_is_measured_is_printed_and_is_a_table_that_attention_takes(small, tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main.main(["bench", "kernels", "--quick", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cpu, matmul 800 TFLOP/s")
    assert "forward  d64 1:1 causal 1024 x 1:  ringflash 134" in said
    assert "backward d64  full   to 1024  flash 671" in said
    assert "fa4 cannot run forward: ModuleNotFoundError" in said
    assert f"backend=rf.KernelTable.read({str(path)!r})" in said
    found = KernelTable.read(path)
    assert set(found.cells) == {Cell(d, 64, mask, 1024) for d in ("forward", "backward") for mask in ("full", "causal")}
    assert all(list(speeds) == ["flash"] for speeds in found.cells.values())
    assert found.about["torch"] == torch.__version__ and "flash_attn_4" in found.about
    q, k, v = (torch.randn(1, 1024, 1, 64) for _ in range(3))
    by_table = rf.attention(q, k, v, mask=rf.Causal(), backend=found)
    assert torch.equal(by_table, rf.attention(q, k, v, mask=rf.Causal(), backend="flash"))


def test_without_out_nothing_is_written(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["bench", "kernels", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_said_and_is_the_exit_status(small, monkeypatch, capsys):
    def faulty(shape, findings):
        findings.fault("hopper differs from cudnn", shape)
        return []

    monkeypatch.setattr(bench, "measure", faulty)
    assert main.main(["bench", "kernels", "--quick"]) == 1
    assert "FAULT: hopper differs from cudnn (d64 1:1 full 1024 x 1 and 1 more)" in capsys.readouterr().out
