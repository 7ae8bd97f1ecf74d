"""R66: it installs without compiling, and needs nothing but torch, einops and numpy to import and to attend on a CPU."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Everything an extra brings, made impossible to import.
WITHOUT_EXTRAS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "matplotlib", "hypothesis", "pytest", "transformers", "flash_attn"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Absent())
import torch
import ringflash as rf
q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
rf.attention(q, k, v, mask=rf.Causal()).sum().backward()
print(q.grad.isfinite().all().item())
try:
    rf.attention(q, k, v, backend="triton")
except NotImplementedError as error:
    print(error)
"""


def test_the_core_needs_no_optional_package():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    attended, reason = done.stdout.splitlines()
    assert attended == "True"
    assert reason.startswith("attention: backend 'triton' cannot run this call: triton is not installed")


@pytest.mark.slow
def test_the_wheel_is_pure_python_and_typed(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringflash/py.typed" in names and "ringflash/kernels/triton/forward.py" in names
    assert "ringflash/kernels/measured/h200.json" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]
