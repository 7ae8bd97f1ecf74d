"""What benchmarks/ makes of the times: which shapes, which goals, what is kept; on the CPU, with a stopped clock."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import ringflash as rf
from ringflash.cli import timing
from ringflash.cli.kernels import Findings, Measured, Shape
from ringflash.cli.timing import Timing

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A file of benchmarks/ as run.py sees it: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {path.stem for path in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    yield importlib.import_module
    for name in names & set(sys.modules):
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def clock(monkeypatch):
    """Every call takes a microsecond, and is made."""
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: (run(), 1e-3)[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


def row(direction, shape, **tflops):
    """Measured, at these speeds."""
    flops = shape.flops(direction)
    return Measured(shape, direction, {name: Timing(flops / speed / 1e9, 0.01) for name, speed in tflops.items()})


LONG, SHORT = Shape(128, 16, 16, "causal", 8192, 2), Shape(128, 16, 16, "full", 4096, 4)


def test_the_shapes_are_those_asked_for(load):
    kernels = load("kernels")
    everything = kernels.shapes(kernels.parse([]))
    assert len(everything) == 4 * 2 * (4 + 3)
    assert {shape.tokens * shape.batch for shape in everything} == {16384, 65536}
    flags = "--head-dims 128 --heads 16:16 --tokens 8192 16384 --total 16384 --masks full"
    some = kernels.shapes(kernels.parse(flags.split()))
    assert some == [Shape(128, 16, 16, "full", 8192, 2), Shape(128, 16, 16, "full", 16384, 1)]
    assert {shape.head_dim for shape in kernels.shapes(kernels.parse(["--head-dims", "64"]))} == {64}
    quick = kernels.shapes(kernels.parse(["--quick", "--total", "16384"]))
    assert len(quick) == 8 and {shape.tokens for shape in quick} == {8192}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "kernels"),
        ("--head-dims 128", "kernels_d128"),
        ("--head-dims 64 --masks causal --total 65536", "kernels_d64_causal_t64k"),
        ("--heads 16:16 --tokens 8192 16384", "kernels_h16x16_s8192-16384"),
        ("--quick", "kernels_s8192"),
    ],
)
def test_runs_of_other_shapes_do_not_share_a_file(load, flags, name):
    kernels = load("kernels")
    assert kernels.name(kernels.parse(flags.split())) == name


def test_the_ratio_is_the_better_of_ours_over_the_better_rival(load):
    kernels = load("kernels")
    found = row("forward", LONG, hopper=660, triton=400, ringflash=640, cudnn=600, fa4=550, flash=800)
    assert (kernels.ratio(found), kernels.goal(found), kernels.choice(found)) == (1.1, 1.08, 0.8)
    assert kernels.goal(row("backward", SHORT, hopper=1.0)) == 1.02
    assert kernels.goal(row("backward", Shape(256, 8, 8, "full", 16384, 1), hopper=1.0)) == 1.20
    assert kernels.goal(row("forward", Shape(64, 32, 32, "full", 1024, 16), hopper=1.0)) is None
    assert kernels.ratio(row("forward", LONG, hopper=660, flash=300)) is None


def test_a_run_ends_with_every_cell_beside_its_goal(load):
    kernels = load("kernels")
    lines = list(
        kernels.ratios(
            [
                row("backward", SHORT, hopper=500, cudnn=500),
                row("forward", LONG, hopper=660, ringflash=660, cudnn=600, fa4=610),
                row("forward", SHORT, hopper=660),
            ]
        )
    )
    assert "660 /    610 = 1.082  goal 1.08 reached  choice 1.000" in lines[0]
    assert "no ratio" in lines[1]
    assert "500 /    500 = 1.000  goal 1.02 MISSED" in lines[2]
    assert lines[3] == "1 of 2 cells reach their goal"


def run_kernels(load, monkeypatch, tmp_path, *flags):
    """main() on the CPU, of small shapes; its exit status and what it wrote."""
    kernels = load("kernels")
    monkeypatch.setattr(kernels, "HEADS", [(64, 2, 1)])
    monkeypatch.setattr(kernels, "TOKENS", {256: (64, 128)})
    monkeypatch.setattr(kernels, "matmul_tflops", lambda: 800.0)
    monkeypatch.setattr(kernels, "ratios", lambda rows: [f"{len(rows)} rows"])
    on_gpu = kernels.measure
    monkeypatch.setattr(kernels, "measure", lambda *arguments: on_gpu(*arguments, device="cpu"))
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--out", str(tmp_path), "--rounds", "2", *flags])
    with pytest.raises(SystemExit) as ended:
        kernels.main()
    (path,) = tmp_path.glob("*.json")
    return ended.value.code, json.loads(path.read_text()), path.with_suffix(".md").read_text()


FLAGS = ("--kernels", "ringflash", "flash", "fa4")


def test_a_run_keeps_speeds_spreads_ceiling_versions_and_who_was_absent(load, clock, monkeypatch, tmp_path, capsys):
    code, results, page = run_kernels(load, monkeypatch, tmp_path, *FLAGS)
    assert code == 0 and len(results["rows"]) == 2 * 2 * 2
    assert set(results["rows"][0]["tflops"]) == {"ringflash", "flash"}
    assert results["rows"][0]["extra"]["spread"] == {"ringflash": 0.0, "flash": 0.0}
    assert results["meta"]["matmul_tflops"] == 800.0 and "cudnn" in results["meta"]
    assert "fa4 cannot run forward: ModuleNotFoundError" in page and "8 rows" in capsys.readouterr().out


def test_no_new_shape_is_begun_when_the_time_is_up(load, clock, monkeypatch, tmp_path):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    code, results, page = run_kernels(load, monkeypatch, tmp_path, *FLAGS, "--seconds", "25")
    assert code == 0 and len(results["rows"]) == 2 * 2
    assert "2 shapes left out after 25 s, from this one on (d64 2:1 causal 64 x 4)" in page


def test_what_is_done_is_on_file_when_a_run_is_cut_off(load, clock, monkeypatch, tmp_path):
    kernels = load("kernels")
    measure = kernels.measure
    done = []

    def cut_off(shape, *arguments, **options):
        done.append(shape)
        if len(done) == 3:
            raise KeyboardInterrupt
        return measure(shape, *arguments, **options)

    monkeypatch.setattr(kernels, "measure", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_kernels(load, monkeypatch, tmp_path, *FLAGS)
    (path,) = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["rows"]) == 2 * 2


def test_a_fault_is_on_file_and_is_the_exit_status(load, clock, monkeypatch, tmp_path):
    kernels = load("kernels")

    def faulty(shape, findings, *_, **__):
        findings.fault("hopper differs from cudnn", shape)
        return []

    monkeypatch.setattr(kernels, "measure", faulty)
    code, _, page = run_kernels(load, monkeypatch, tmp_path, *FLAGS)
    assert code == 1 and "FAULT: hopper differs from cudnn" in page


def test_pictures_are_drawn_from_the_file(load, tmp_path):
    pytest.importorskip("matplotlib")
    plot = load("plot")
    rows = [
        load("kernels").as_row(row(direction, shape, hopper=600, cudnn=500))
        for direction in ("forward", "backward")
        for shape in (LONG, SHORT, Shape(64, 32, 32, "full", 2048, 8))
    ]
    meta = {"gpu": "NVIDIA H200", "matmul_tflops": 780, "torch": "2.11", "date": "2026-12-01", "commit": "abc"}
    paths = []
    for i, part in enumerate((rows[:3], rows[3:])):
        paths.append(tmp_path / f"part{i}.json")
        paths[-1].write_text(json.dumps({"meta": meta, "rows": [vars(x) for x in part]}))
    drawn = plot.kernels(paths, tmp_path)
    assert [path.name for path in drawn] == [
        f"part0_{family}_{kind}.png" for family in ("d128_h16x16_16k", "d64_h32x32_16k") for kind in ("bars", "lines")
    ]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    paths[1].write_text(json.dumps({"meta": {**meta, "gpu": "NVIDIA H100"}, "rows": []}))
    with pytest.raises(SystemExit, match="results of different GPUs"):
        plot.kernels(paths, tmp_path)


SMALL = {"causal": rf.Causal(), "documents": rf.Documents([64] * 4, causal=True), "window": rf.Window(63, 0)}


@pytest.fixture
def forms(load, clock, monkeypatch):
    forms = load("forms")
    monkeypatch.setattr(forms, "HEADS", {64: 2})
    monkeypatch.setattr(forms, "CHECKED", 32)
    return forms


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_hop_is_timed_beside_the_plain_call_in_both_directions(forms, mask):
    rows = list(forms.ring("reference", 64, mask, 2, tokens=128, device="cpu"))
    assert [row.direction for row in rows] == ["forward", "backward"]
    assert [row.extra["hop_over_plain"] for row in rows] == [0.0, 0.0]
    assert set(rows[0].tflops) == {"reference plain", "reference hop"}
    assert "hop over plain +0.0%, goal +2%: reached" in forms.line(rows[0])


def test_masks_are_timed_by_visible_pair_beside_causal(forms):
    rows = list(forms.masked("reference", 64, 2, SMALL, 256, "cpu"))
    assert [(row.direction, row.mask) for row in rows] == [(d, m) for d in ("forward", "backward") for m in SMALL]
    # All calls take equally long here, so speed per pair is the share of pairs.
    pairs = 256 * 257 / 2
    assert rows[0].extra["speed_per_pair"] == 1.0
    assert rows[1].extra["speed_per_pair"] == round(4 * 64 * 65 / 2 / pairs, 3)
    assert rows[2].extra["speed_per_pair"] == round((256 * 64 - 64 * 63 / 2) / pairs, 3)
    assert "MISSED" in forms.line(rows[1])


@pytest.mark.parametrize("mask", SMALL)
def test_the_last_rows_are_those_of_the_reference_and_a_wrong_one_is_found(forms, mask):
    *qkv, dout = forms.inputs(256, 64, "cpu")
    leaves = [x.requires_grad_() for x in qkv]
    out = rf.attention(*leaves, mask=SMALL[mask])
    gradients = torch.autograd.grad(out, leaves, dout)
    forms.check("right", forms.last_rows(qkv, dout, SMALL[mask], out, gradients))
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        results = [out.detach(), *gradients]
        results[i] = 1.03 * results[i]
        with pytest.raises(AssertionError, match=f"wrong: {name} is off by 0.0[23]"):
            forms.check("wrong", forms.last_rows(qkv, dout, SMALL[mask], results[0], tuple(results[1:])))


def test_the_budget_and_refusals_of_forms_are_said(forms, monkeypatch, tmp_path, capsys):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    monkeypatch.setattr(forms, "matmul_tflops", lambda: 800.0)
    monkeypatch.setattr(sys, "argv", ["forms.py", "--out", str(tmp_path), "--head-dims", "64", "--seconds", "15"])

    def refused(*_):
        yield from ()
        raise NotImplementedError("not here")

    monkeypatch.setattr(forms, "ring", refused)
    with pytest.raises(SystemExit) as ended:
        forms.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "hopper d64 ring full: not here" in said
    assert "left out after 15 s, from this one on: hopper d64 ring causal" in said
    (path,) = tmp_path.glob("*.md")
    assert "not here" in path.read_text()


def test_findings_of_many_shapes_are_kept_together():
    findings = Findings()
    findings.note("x", LONG)
    findings.note("x", SHORT)
    assert findings.notes == {"x": [LONG, SHORT]}
