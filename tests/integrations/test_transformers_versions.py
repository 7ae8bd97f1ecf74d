"""R65: which transformers is there matters when register() is called, and not before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dev

ROOT = Path(__file__).resolve().parents[2]
OLDEST = dev.OTHER_TRANSFORMERS / dev.OLDEST_TRANSFORMERS

# The adapter is imported with no transformers to be had, then asked with none, and with one that is too old.
WITHOUT = """
import sys, types
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "accelerate"}:
            asked.append(name)
            raise ImportError(f"No module named {name}")
asked = []
sys.meta_path.insert(0, Absent())
import ringflash
from ringflash.integrations.transformers import RingTraining, check_model, local_inputs, register
print(asked)
for version in (None, "4.52.4", "4.9.2", "?"):
    if version is not None:
        sys.modules["transformers"] = types.ModuleType("transformers")
        sys.modules["transformers"].__version__ = version
    try:
        register()
    except ImportError as error:
        print(error)
"""


def run(*command, first=()):
    path = os.pathsep.join([*map(str, first), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def test_the_adapter_imports_without_transformers_and_register_says_what_is_missing_or_too_old():
    done = run("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    asked_on_import, absent, *old = done.stdout.splitlines()
    assert asked_on_import == "[]"
    assert absent.startswith("register: transformers is not installed; pip install 'transformers>=4.53'")
    assert [line.split()[2] for line in old] == ["4.52.4", "4.9.2", "?"]
    assert all("must be 4.53 or newer" in line for line in old)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.exists(), reason="`dev.py test` brings the oldest transformers")
def test_the_oldest_supported_transformers_passes_the_same_tests():
    pytest.importorskip("transformers")
    check = "import transformers; print(transformers.__version__)"
    assert run("-c", check, first=[OLDEST]).stdout.strip() == dev.OLDEST_TRANSFORMERS
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    done = run("-m", "pytest", *options, "tests/integrations/test_transformers.py", first=[OLDEST])
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
