"""KernelTable: cells, ranks, files; and that the committed ones are what the committed results say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringflash.kernels import table
from ringflash.kernels.backend import BACKENDS
from ringflash.kernels.table import Cell, KernelTable, committed, gpu_class, head_dim_class, length_class

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "ringflash" / "kernels" / "measured").glob("*.json"))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0), (1, 0), (512, 0), (513, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (4096, 4096), (4097, 8192),
        (8192, 8192), (10**6, 8192),
    ],
)  # fmt: skip
def test_lengths_fall_into_classes(tokens, expected):
    assert length_class(tokens) == expected


@pytest.mark.parametrize(
    ("dim", "expected"), [(1, 64), (64, 64), (65, 128), (128, 128), (192, 256), (256, 256), (257, 0)]
)
def test_head_dims_fall_into_those_that_are_measured(dim, expected):
    assert head_dim_class(dim) == expected


ROWS = [
    ("forward", 128, "full", 8192, {"cudnn": 600.0, "hopper": 500.0}),
    ("forward", 128, "full", 65536, {"cudnn": 600.0, "hopper": 800.0, "triton": 100.0}),
    ("backward", 128, "full", 4096, {"triton": 300.0}),
]


def test_rows_of_one_cell_are_averaged_and_backends_ranked_by_speed():
    made = KernelTable.of("NVIDIA H200", ROWS, {})
    assert made.cells[Cell("forward", 128, "full", 8192)] == {"hopper": 650.0, "cudnn": 600.0, "triton": 100.0}
    assert made.order("forward", 128, "full", 8192) == ("hopper", "cudnn", "triton")
    assert made.order("forward", 96, "full", 8192) == ("hopper", "cudnn", "triton")


def test_rows_without_a_class_rank_nobody():
    rows = [("forward", 64, "full", 512, {"triton": 1.0}), ("forward", 512, "full", 4096, {"triton": 1.0})]
    with pytest.raises(ValueError, match="cells = {}; must rank backends in one cell at least"):
        KernelTable.of("NVIDIA H200", rows, {})


@pytest.mark.parametrize(
    "asked",
    [
        ("forward", 64, "full", 8192),
        ("forward", 128, "causal", 8192),
        ("forward", 128, "full", 4096),
        ("forward", 512, "full", 8192),
    ],
)
def test_nobody_is_ranked_where_nothing_was_measured(asked):
    assert KernelTable.of("NVIDIA H200", ROWS, {}).order(*asked) == ()


def test_a_table_comes_back_from_its_file(tmp_path):
    made = KernelTable.of("NVIDIA H200", ROWS, {"torch": "2.11", "results": ["a.json"]})
    made.write(tmp_path / "mine.json")
    read = KernelTable.read(tmp_path / "mine.json")
    assert (read.gpu, read.cells, read.about) == (made.gpu, made.cells, made.about)
    assert [list(speeds) for speeds in read.cells.values()] == [list(speeds) for speeds in made.cells.values()]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"gpu": "x", "about": {}, "cells": [{}]}', '{"gpu": "x", "about": {}, "cells": [1]}']
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"KernelTable: .*bad.json is no table of `python -m ringflash bench kernels"):
        KernelTable.read(tmp_path / "bad.json")


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        KernelTable.read(tmp_path / "absent.json")


def test_a_gpu_is_known_by_its_whole_name(monkeypatch):
    assert gpu_class("NVIDIA H200") == "h200" and gpu_class("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert committed("NVIDIA H200").gpu == "NVIDIA H200"
    assert committed("NVIDIA H200 NVL") is None and committed("cpu") is None
    assert table.gpu_name(torch.device("cpu")) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert table.gpu_name(torch.device("cuda", 1)) == "GPU 1"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_table_is_what_the_results_that_it_names_give(path, tmp_path):
    known = KernelTable.read(path)
    assert gpu_class(known.gpu) == path.stem and known.cells
    assert {name for speeds in known.cells.values() for name in speeds} <= set(BACKENDS)
    results = [str(ROOT / "benchmarks" / "results" / name) for name in known.about["results"]]
    command = [sys.executable, str(ROOT / "benchmarks" / "table.py"), *results, "--out", str(tmp_path / "again.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_results_of_two_gpus_make_no_table(tmp_path):
    paths = []
    for gpu in ("NVIDIA H100", "NVIDIA H200"):
        paths.append(tmp_path / f"{gpu[-4:]}.json")
        paths[-1].write_text(json.dumps({"meta": {"gpu": gpu}, "rows": []}))
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "table.py"),
        *map(str, paths),
        "--out",
        str(tmp_path / "x.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "results of different GPUs, NVIDIA H100, NVIDIA H200" in done.stderr
    assert not (tmp_path / "x.json").exists()


CELL = {
    "direction": "forward",
    "head_dim": 64,
    "mask": "full",
    "length": 1024,
    "tflops": {"triton": 1.0, "hopper": 2.0},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"direction": "sideways"}, "direction 'sideways'; must be one of"),
        ({"head_dim": 96}, "head_dim 96; must be one of"),
        ({"head_dim": 64.9}, "head_dim 64.9; must be one of"),
        ({"mask": "other"}, "mask 'other'; must be one of"),
        ({"length": -1}, "length -1; must be one of"),
        ({"tflops": {}}, "ranks nobody"),
        ({"tflops": {"triton": float("nan")}}, "gives triton nan TFLOP/s; must be positive"),
        ({"tflops": {"triton": -5}}, "gives triton -5 TFLOP/s"),
        ({"tflops": {"triton": True}}, "gives triton True TFLOP/s"),
        ({"tflops": {"triton": "9"}}, "gives triton '9' TFLOP/s"),
    ],
)
def test_a_file_with_a_cell_that_means_nothing_is_refused_by_name(tmp_path, changes, message):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"gpu": "cpu", "about": {}, "cells": [{**CELL, **changes}]}))
    with pytest.raises(ValueError, match=f"{path} is no table.*{message}"):
        KernelTable.read(path)


@pytest.mark.parametrize(
    "content", ['{"gpu": null, "about": {}, "cells": [%s]}', '{"gpu": "cpu", "about": {}, "cells": [%s, %s]}']
)
def test_a_file_without_a_gpu_or_with_a_cell_twice_is_refused(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content.replace("%s", json.dumps(CELL)))
    with pytest.raises(ValueError, match="gpu = None|is there twice"):
        KernelTable.read(path)


@pytest.mark.parametrize(
    "content", ["[" * 200000, '{"cells": [1e999]}', "", "[]", '{"gpu": "cpu", "about": {}, "cells": []}']
)
def test_any_other_file_is_a_value_error(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no table"):
        KernelTable.read(path)


def test_the_speeds_rank_and_not_the_order_of_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"gpu": "cpu", "about": {}, "cells": [CELL]}))
    assert KernelTable.read(path).order("forward", 64, "full", 1024) == ("hopper", "triton")
