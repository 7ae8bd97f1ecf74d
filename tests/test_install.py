"""R66: it installs without compiling, and needs nothing but torch, einops and numpy to import and to attend on a CPU.

R65: nor does it mind which of its optional companions are there, and what they have become.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = [
    "triton",
    "matplotlib",
    "hypothesis",
    "pytest",
    "transformers",
    "accelerate",
    "flash_attn",
    "flash_attn_interface",
]

ATTEND = """
import torch
import ringflash as rf
q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
rf.attention(q, k, v, mask=rf.Causal()).sum().backward()
print(q.grad.isfinite().all().item())
"""

# Everything an extra brings, made impossible to import.
WITHOUT_EXTRAS = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Absent())
{ATTEND}
try:
    rf.attention(q, k, v, backend="triton")
except NotImplementedError as error:
    print(error)
"""

# What the core takes into a process that has torch, whatever else is there to be taken.
NEWCOMERS = f"""
import sys
import torch, numpy
before = set(sys.modules)
{ATTEND}
import ringflash.training
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names) - {{"torch", "numpy"}}))
"""

CHANGED = f"""
{ATTEND}
import sys
print(sorted(name for name in sys.modules if name.startswith(("flash_attn", "transformers"))))
from ringflash.kernels import vendor
print(vendor._lacks_flash_attention_4())
"""


def run(python: Path | str, *arguments: str, paths: tuple[Path, ...] = (), cwd: Path = ROOT) -> list[str]:
    """The lines that a command of this Python prints; what can be imported is what is installed, and `paths`."""
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=240, env=told, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_core_needs_no_optional_package():
    attended, reason = run(sys.executable, "-c", WITHOUT_EXTRAS, paths=(ROOT,))
    assert attended == "True"
    assert reason.startswith("attention: backend 'triton' cannot run this call: triton is not installed")


def test_the_core_imports_no_optional_package_that_is_there():
    """R65: here transformers, matplotlib and others are installed, and none of them is touched."""
    assert run(sys.executable, "-c", NEWCOMERS, paths=(ROOT,)) == ["True", "['einops', 'ringflash']"]


@pytest.fixture
def changed(tmp_path) -> Path:
    """Companions of a later release: flash-attn with other arguments, and a transformers that cannot be imported."""
    for name in ("flash_attn", "flash_attn/cute", "flash_attn_4-99.0.dist-info", "transformers"):
        (tmp_path / name).mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("def flash_attn_func(*, tensors): ...\n")
    (tmp_path / "flash_attn/cute/__init__.py").write_text("from flash_attn import flash_attn_func\n")
    (tmp_path / "flash_attn/cute/interface.py").write_text("def flash_attn_func(*, tensors): ...\n")
    (tmp_path / "transformers/__init__.py").write_text("raise RuntimeError('needs a newer torch')\n")
    about = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 99.0\n"
    (tmp_path / "flash_attn_4-99.0.dist-info/METADATA").write_text(about)
    return tmp_path


def test_companions_that_have_changed_are_left_alone_and_refused_by_their_version(changed):
    """R65: with a stub; one clear sentence when it is asked for, nothing at import."""
    attended, imported, reason = run(sys.executable, "-c", CHANGED, paths=(changed, ROOT))
    assert (attended, imported) == ("True", "[]")
    assert re.fullmatch("flash-attn-4 99.0 is not one of .*, whose entry for backward is known", reason)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder))
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    """Built from the sdist, as installers do, and not from this folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    (source,) = (path for path in sdist.parent.iterdir() if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(sdist.parent / "wheel"), cwd=source)
    (path,) = (sdist.parent / "wheel").glob("*.whl")
    return path


def files(folder: str) -> set[str]:
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_sdist_holds_what_is_needed_to_build_to_test_and_to_read(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files("ringflash") | files("tests") | files("examples") | files("docs") <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "dev.py", "PKG-INFO"} <= names
    assert not [
        name for name in names if re.search(r"(^|/)(__pycache__|\.\w+_cache|\.venv|runs|build)/|\.py[co]$", name)
    ]


def test_the_wheel_is_pure_python_and_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files("ringflash")
    assert {"ringflash/py.typed", "ringflash/kernels/measured/h200.json"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_asks_for_torch_einops_and_numpy_and_all_else_is_extra(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    told = zipfile.ZipFile(wheel).read(name).decode()
    needed = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", told, re.M)]
    assert {r.name for r in needed if not r.marker or r.marker.evaluate({"extra": ""})} == {"torch", "einops", "numpy"}


def borrowed(names: list[str]) -> Iterator[metadata.Distribution]:
    """The distributions of these names and all that they need, as they are installed here."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop().lower()
        if name not in seen:
            seen.add(name)
            found = metadata.distribution(name)
            yield found
            needed = map(Requirement, found.requires or ())
            waiting += [r.name for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]


def test_the_wheel_installs_beside_torch_and_two_processes_attend(wheel, tmp_path):
    """R66: a fresh environment with torch, einops and numpy, whose files are ours by links, and no network."""
    shelf, env = tmp_path / "shelf", tmp_path / "env"
    shelf.mkdir()
    for distribution in borrowed(["torch", "einops", "numpy"]):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (shelf / top).symlink_to(Path(str(distribution.locate_file(top))))
    run(sys.executable, "-m", "venv", "--without-pip", str(env))
    python = env / ("Scripts" if os.name == "nt" else "bin") / "python"
    (packages,) = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(packages) / "shelf.pth").write_text(f"{shelf}\n")
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", str(wheel))

    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1])
    where = "import ringflash, importlib.util as u; print(ringflash.__file__, u.find_spec('pytest'))"
    assert run(python, "-c", where, cwd=tmp_path) == [f"{Path(packages) / 'ringflash' / '__init__.py'} None"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    printed = "\n".join(run(python, *launcher, str(example), cwd=tmp_path))
    assert sorted(re.findall(r"rank (\d) of 2: \(1, 1024, 8, 64\)", printed)) == ["0", "1"]
