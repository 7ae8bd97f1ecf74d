#!/usr/bin/env python3
"""Run this repository's commands, setting up what each one needs first.

    python3 dev.py train [flags]        train a language model with its sequence cut across processes
    python3 dev.py test [pytest args]   the tests that need no GPU
    python3 dev.py test-gpu [...]       the tests that need one
    python3 dev.py check                format, lint, types, architecture
    python3 dev.py bench [...]          benchmarks/run.py
    python3 dev.py docs                 the documentation site, in build/site
    python3 dev.py setup                only set up, for all of the above

Standard library only: it starts in a fresh clone on a machine that has nothing but Python 3.10 or newer.

Which Python runs a command, the first that fits:

1. The one that runs dev.py, if it has torch and all else the command needs. Nothing is installed.
2. `.venv` with a view of the torch that the running Python has. Only what is missing is installed, and a constraints
   file holds torch and Triton at the versions that are there.
3. `.venv` with a torch of its own: pip's where there is an NVIDIA GPU, a CPU build where there is none.

Tests compile kernels with more than one release of Triton. Those that `.venv` does not have lie in `.venv/other-triton`;
they come with `test` and `setup`, on Linux machines without a GPU. The oldest transformers that we support lies in
`.venv/other-transformers`, and comes with them.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the reader of this message runs an older one
    sys.exit("dev.py: needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; run it with a newer python3")

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
ENV = ROOT / ".venv"
ENV_PYTHON = ENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = ENV / "ringflash-setup.log"
# Tells an environment that may be thrown away and made again from one that somebody made by hand.
MADE_HERE = ENV / "ringflash-made-by-dev.py.txt"
# There while something is being installed; found at the start of a run, it says that the last one was cut off.
INSTALLING = ENV / "ringflash-installing.txt"

CPU_TORCH = "2.13.0"
# The version that the CUDA builds of torch 2.11 bring, so the interpreter runs the kernels of the GPUs we measure on.
CPU_TRITON = "3.6.0"
# The releases that tests compile the Hopper kernels with: those that kernels/hopper/gluon.py knows.
TRITONS = ("3.6.0", "3.8.0")
OTHER_TRITON = ENV / "other-triton"  # a folder for each release that is not the one in .venv
OTHER_TRANSFORMERS = ENV / "other-transformers"
# What the oldest transformers that the adapter supports needs, where .venv has it too new or not at all.
OLDEST_TRANSFORMERS = "4.53.0"
ITS_NEEDS = (
    "tokenizers==0.21.4",
    "huggingface-hub==0.36.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "certifi>=2024",
    "charset-normalizer>=3.4",
    "idna>=3",
)

PIP = (str(ENV_PYTHON), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
HOW_TO_BRING_A_TORCH = (
    "What to do: if the network was the trouble, run this again. Otherwise install the torch you want (2.11 or newer) "
    "for the Python that runs dev.py, or in an environment of your own, and run dev.py with that Python: it uses the "
    f"torch it finds there. The whole log: {LOG}"
)

EXTRAS = {
    "train": ("train",),
    "test": ("test",),
    "test-gpu": ("test-gpu",),
    "check": ("test", "dev"),
    "bench": ("train",),
    "docs": ("docs",),
    "setup": ("test", "dev"),
}
# OpenMP threads that spin while they wait take the core from whoever has work, once there are more threads than cores:
# beside other work on 2 cores the training example ran at 150 tokens/s spinning, 1200 sleeping.
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}

# Installed into .venv, but no reason to build one: an offline GPU machine may lack them, and the tests run without.
NICE_TO_HAVE = {"pytest-timeout", "pytest-xdist"}


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.stdout.flush()
    sys.exit(f"dev.py: error: {text}")


@dataclass(frozen=True)
class Requirement:
    """One line of pyproject.toml's dependency lists."""

    text: str
    name: str
    specifier: str
    marker: str

    @classmethod
    def parse(cls, text: str) -> Requirement:
        name, specifier, marker = re.fullmatch(r"([\w.-]+)([^;]*)(?:;(.*))?", text).groups("")  # type: ignore[union-attr]
        return cls(text, name, specifier.strip(), marker.strip())

    @property
    def applies(self) -> bool:
        if not self.marker:
            return True
        platform = re.fullmatch(r"sys_platform == '(\w+)'", self.marker)
        if platform is None:
            fail(f"pyproject.toml: dev.py cannot read the marker of {self.text!r}; it knows sys_platform == '...'")
        return sys.platform == platform[1]

    @property
    def is_met(self) -> bool:
        """Whether the Python that runs this has it, at a version that will do."""
        version = version_here(self.name)
        if version is None:
            # Some builds name the distribution otherwise: pytorch-triton holds the module triton.
            spec = importlib.util.find_spec(self.name.replace("-", "_"))
            return spec is not None and spec.origin is not None
        return satisfies(version, self.specifier)


def version_here(name: str) -> str | None:
    """The version of an installed distribution; importing it to ask would take seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, specifier: str) -> bool:
    """Compare release numbers: enough for the specifiers in pyproject.toml, and lenient to 2.11.0a0+vendor builds."""

    def release(text: str) -> list[int]:
        numbers = [int(n) for n in re.match(r"[\d.]*\d", text)[0].split(".")]  # type: ignore[index]
        return numbers + [0] * (4 - len(numbers))

    compare = {
        ">=": lambda a, b: a >= b,
        "<": lambda a, b: a < b,
        "==": lambda a, b: a == b,
    }
    clauses = re.findall(r"(>=|<|==)\s*([\d.]+)", specifier)
    return all(compare[operator](release(version), release(bound)) for operator, bound in clauses)


def dependency_lists() -> dict[str, list[str]]:
    """The arrays of [project] and its optional dependencies. Python 3.10 has no tomllib, hence by hand."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\n[tool.")[0]
    project = re.sub(r"^\s*#.*$", "", project, flags=re.M)
    arrays = re.findall(r"^([\w-]+) = \[(.*?)\]$", project, re.M | re.S)
    return {name: re.findall(r'"([^"]+)"', body) for name, body in arrays}


def requirements(extras: tuple[str, ...]) -> list[Requirement]:
    """What ringflash and these extras of it need on this platform. A name comes twice if two lists narrow it."""
    lists = dependency_lists()
    texts: dict[str, None] = {}

    def collect(name: str) -> None:
        for text in lists[name]:
            own_extras = re.fullmatch(r"ringflash\[([\w,-]+)\]", text)
            if own_extras:
                for extra in own_extras[1].split(","):
                    collect(extra)
            else:
                texts[text] = None

    for name in ("dependencies", *extras):
        collect(name)
    return [r for r in map(Requirement.parse, texts) if r.applies]


def torch_requirement() -> Requirement:
    return next(r for r in requirements(()) if r.name == "torch")


def missing_here(needed: list[Requirement]) -> list[str]:
    return [r.text for r in needed if not r.is_met]


def has_nvidia_gpu() -> bool:
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
        return True
    # A container can carry the program without a driver to talk to, so its being there is not enough.
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU" in answer.stdout


def cores() -> int:
    """Cores this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ask(python: Path | str, code: str) -> str:
    """What `code`, which sees this file as `dev`, prints in that Python."""
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=environment())
    if answer.returncode:
        fail(f"{python} could not run `{code}`:\n{answer.stderr.strip()}")
    return answer.stdout.strip()


def gpu_count(python: Path | str) -> int:
    return int(ask(python, "import torch; print(torch.cuda.device_count())"))


def python_for(command: str) -> str:
    """The Python that can run a command, set up if need be."""
    needed = requirements(EXTRAS[command])
    missing = [r for r in needed if not r.is_met]
    if all(r.name in NICE_TO_HAVE for r in missing):
        say(f"using this Python, {sys.executable}, and its torch {version_here('torch')}")
        return sys.executable
    set_up(needed)
    return str(ENV_PYTHON)


def set_up(needed: list[Requirement]) -> None:
    """Make .venv able to run what needs these. Safe to call again after an interruption.

    Whether .venv is complete is read off what is installed in it, each time: a third of a second, and unlike a stamp
    it notices a package that somebody removed.
    """
    started = time.monotonic()
    if ENV.exists() and not is_sound():
        remove("an earlier set-up did not finish; starting again")
    elif MADE_HERE.exists() and torch_requirement().is_met and missing_in_env([torch_requirement()]):
        remove(".venv has no torch and this Python has one; starting again around it")
    if not ENV.exists():
        create()
    if missing_in_env(needed):
        install_torch()
        install_the_rest(needed)
        say(f".venv is ready ({time.monotonic() - started:.0f} s)")
    else:
        say("using .venv, which has all it needs")


def is_sound() -> bool:
    """Whether nothing was cut off while .venv was filled, and its Python starts: one whose base is gone does not."""
    if INSTALLING.exists() or not ENV_PYTHON.exists():
        return False
    return subprocess.run([str(ENV_PYTHON), "-c", ""], capture_output=True).returncode == 0


def remove(why: str) -> None:
    """Start again from nothing. pip cannot tell a half-copied package from a whole one."""
    if not MADE_HERE.exists() and any(ENV.iterdir()):
        fail(f"the Python of {ENV} does not start, or an installation was cut off. dev.py did not make it: remove it")
    if Path(sys.prefix).resolve() == ENV.resolve():
        fail(f"the set-up of {ENV} was cut off; run this with the Python outside of it, which makes it afresh")
    say(why)
    shutil.rmtree(ENV)


def create() -> None:
    """Make the environment, with a view of the running Python's torch if that has one we can use."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        fail(
            "this Python comes without venv or ensurepip, which make environments. On Debian and Ubuntu: "
            f"apt install python{version}-venv (or python3-venv), then run this again"
        )
    ENV.mkdir()
    MADE_HERE.write_text("dev.py made this environment and may remove it.\n", encoding="utf-8")
    borrows_torch = torch_requirement().is_met
    in_a_venv = sys.prefix != sys.base_prefix
    flags = ["--system-site-packages"] if borrows_torch and not in_a_venv else []
    title = "making .venv" + (" around the torch that is here" if borrows_torch else "")
    if not logged(title, sys.executable, "-m", "venv", *flags, str(ENV)):
        fail(f"no environment could be made in {ENV}.\n{log_tail()}")
    # The first line is ringflash itself, for whoever activates .venv. An environment in an environment sees the
    # outermost Python's packages only, so those of the one between are named.
    lines = [str(ROOT), *(borrowed_folders() if borrows_torch and in_a_venv else [])]
    site_packages = ask(ENV_PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(site_packages) / "ringflash-here.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def borrowed_folders() -> list[str]:
    """Where the running Python finds packages, its standard library and this folder left out."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(ROOT)}
    return [p for p in sys.path if Path(p).is_dir() and p not in standard and not p.endswith("lib-dynload")]


def install_torch() -> None:
    """Install torch where there is none. One that is there stays, whatever it was built for."""
    torch = torch_requirement()
    if not missing_in_env([torch]):
        return
    if has_nvidia_gpu():
        # Together: a torch that brings a Triton too new for our kernels is then passed over for an older one.
        texts = [torch.text, *(r.text for r in requirements(("triton",)) if r.name == "triton")]
        pip_install("torch for this machine's NVIDIA GPU (gigabytes)", *texts)
        return
    if sys.platform == "linux":
        install_cpu_torch_on_linux()
    else:
        pip_install(torch.text, torch.text)
    if cuda_of_env_torch():
        fail(f"a CUDA build of torch was installed on a machine without a GPU. {HOW_TO_BRING_A_TORCH}")


def install_cpu_torch_on_linux() -> None:
    """A CPU build, never another: plain `pip install torch` brings gigabytes of CUDA to Linux.

    First from the indexes and folders this machine's pip is set up with. If they have none, from the index of CPU
    builds, whose place uv knows.
    """
    what = f"torch {CPU_TORCH}, CPU build (200 MB)"
    if logged(f"installing {what}", *PIP, f"torch=={CPU_TORCH}+cpu"):
        return
    say("pip's indexes have no such build; uv knows one that has")
    pip_install("uv", "uv")
    uv = (str(ENV_PYTHON), "-m", "uv", "pip", "install", "--python", str(ENV_PYTHON), "--torch-backend=cpu")
    if not logged(f"installing {what}, with uv", *uv, f"torch=={CPU_TORCH}"):
        fail(f"no {what}, from pip or from uv.\n{log_tail()}\n{HOW_TO_BRING_A_TORCH}")


def install_the_rest(needed: list[Requirement]) -> None:
    missing = missing_in_env(needed)
    if missing:
        constraints = ENV / "ringflash-constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in pins()), encoding="utf-8")
        names = ", ".join(dict.fromkeys(Requirement.parse(text).name for text in missing))
        pip_install(names, "--constraint", str(constraints), *missing)
    left = missing_in_env(needed)
    if left:
        fail(f"the set-up ended without {', '.join(left)}. The log: {LOG}")


def pins() -> list[str]:
    """Hold torch and Triton at what is there; without CUDA, choose the Triton whose interpreter we test with."""
    code = "from importlib import metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    there = dict(line.split("==", 1) for line in reversed(ask(ENV_PYTHON, code).split()))  # the first on the path wins
    held = {name: there[name] for name in ("torch", "triton") if name in there}
    if "triton" not in held and not cuda_of_env_torch():
        held["triton"] = CPU_TRITON
    return [f"{name}=={version}" for name, version in held.items()]


def cuda_of_env_torch() -> str:
    return ask(ENV_PYTHON, "import torch; print(torch.version.cuda or torch.version.hip or '')")


def missing_in_env(needed: list[Requirement]) -> list[str]:
    texts = [r.text for r in needed]
    code = f"import dev, json; print(json.dumps(dev.missing_here([dev.Requirement.parse(t) for t in {texts}])))"
    missing: list[str] = json.loads(ask(ENV_PYTHON, code))
    return missing


def bring_other_tritons(python: str) -> None:
    """Put the releases of Triton that .venv does not have into folders of their own; tests that find none are skipped.

    Not for a Python that is used as it is, and not where a GPU runs the kernels with the Triton of its torch.
    """
    if sys.platform != "linux" or Path(python) != ENV_PYTHON or has_nvidia_gpu():
        return
    here = ask(python, "import triton; print(triton.__version__)")
    for version in TRITONS:
        if release_of(version) != release_of(here):
            bring(OTHER_TRITON / version, "which tests compile kernels with (250 MB)", f"triton=={version}")


def bring_oldest_transformers(python: str) -> None:
    """Put it into a folder of its own; tests that find none are skipped. Not for a Python that is used as it is."""
    if Path(python) == ENV_PYTHON:
        texts = (f"transformers=={OLDEST_TRANSFORMERS}", *ITS_NEEDS)
        bring(OTHER_TRANSFORMERS / OLDEST_TRANSFORMERS, "the oldest that tests run with (60 MB)", *texts)


def bring(folder: Path, why: str, *texts: str) -> None:
    """Install these, and nothing that they depend on, into a folder that is not there yet."""
    if folder.exists():
        return
    what = texts[0].replace("==", " ")
    if not logged(f"installing {what}, {why}", *PIP, "--no-deps", "--target", str(folder), *texts):
        shutil.rmtree(folder, ignore_errors=True)
        fail(
            f"pip could not install {what} into {folder}.\n{log_tail()}\nThe whole log: {LOG}. Once that is "
            f"mended, run this again; `{ENV_PYTHON} -m pytest -m 'not gpu'` runs the tests that do without"
        )


def release_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def pip_install(what: str, *arguments: str) -> None:
    if not logged(f"installing {what}", *PIP, *arguments):
        fail(f"pip could not install {what}.\n{log_tail()}\nThe whole log: {LOG}. Once that is mended, run this again")


def logged(title: str, *command: str) -> bool:
    """Run one step of the set-up with its output in the log; whether it succeeded."""
    say(f"{title} ...")
    INSTALLING.write_text(f"{title}\n", encoding="utf-8")
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        # PIP_USER would send packages past .venv.
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment(PIP_USER="0"))
    INSTALLING.unlink()
    return done.returncode == 0


def log_tail() -> str:
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-12:])


def environment(**changes: str) -> dict[str, str]:
    """The environment variables of this process, with ringflash importable, installed or not."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, **changes}


def unless_set(**defaults: str) -> dict[str, str]:
    """These environment variables, with the user's own values where there are any."""
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def become(command: list[str], **changes: str) -> NoReturn:
    """Run a command as the last thing done here: its signals, output and exit status are then ours."""
    os.chdir(ROOT)
    if os.name == "nt":  # exec there returns to the shell at once
        sys.exit(subprocess.run(command, env=environment(**changes)).returncode)
    os.execve(command[0], command, environment(**changes))


def train(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dev.py train", add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int)
    options, flags = parser.parse_known_args(arguments)
    if options.processes is not None and options.processes < 1:
        fail(f"train: --processes {options.processes}; must be at least 1, or left out")
    python = python_for("train")
    example = "examples/train_long_context.py"
    if {"-h", "--help"} & set(flags):
        print(
            "dev.py train takes --processes N (else: one for each GPU, or two on CPU), and passes everything else on to:"
        )
        become([python, example, *flags])

    gpus = gpu_count(python)
    processes = options.processes or gpus or min(2, cores())
    say(f"training with each sequence cut across {processes} process{'es' if processes > 1 else ''}, {gpus} GPUs")
    # One machine: everything meets on loopback, also where the host name resolves to nothing or to the outside.
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    defaults = {"OMP_NUM_THREADS": str(max(1, cores() // processes)), **SLEEPING_THREADS}
    if sys.platform == "linux":
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    become([python, "-m", *launcher, example, *flags], **unless_set(**defaults))


def test(arguments: list[str]) -> None:
    # Without GPUs in sight the kernels run under Triton's interpreter: the same verdict on every machine.
    python = python_for("test")
    bring_other_tritons(python)
    bring_oldest_transformers(python)
    pytest = [python, "-m", "pytest", "-m", "not gpu", *(arguments or side_by_side(python))]
    become(pytest, CUDA_VISIBLE_DEVICES="", **unless_set(**SLEEPING_THREADS))


def side_by_side(python: str) -> list[str]:
    """The whole suite on all cores, where pytest-xdist is there: most tests use one."""
    has_xdist = ask(python, "import importlib.util as u; print(u.find_spec('xdist') is not None)") == "True"
    return ["-n", str(min(cores(), 8))] if has_xdist and cores() > 1 else []


def test_gpu(arguments: list[str]) -> None:
    python = python_for("test-gpu")
    if not gpu_count(python):
        fail("test-gpu: torch sees no GPU here; `dev.py test` runs what needs none")
    become([python, "-m", "pytest", "-m", "gpu", *arguments])


def check(arguments: list[str]) -> None:
    if arguments:
        fail(f"check takes no arguments, got {' '.join(arguments)}")
    python = python_for("check")
    steps = {
        "format": ["ruff", "format", "--check", "--quiet", "."],
        "lint": ["ruff", "check", "--quiet", "."],
        "types": ["mypy"],
        "architecture": ["pytest", "-q", "tests/test_architecture.py"],
    }
    failed = []
    for name, step in steps.items():
        say(f"{name}: {' '.join(step)}")
        if subprocess.run([python, "-m", *step], cwd=ROOT, env=environment()).returncode:
            failed.append(name)
    if failed:
        fail(f"check: {', '.join(failed)} failed")


def bench(arguments: list[str]) -> None:
    become([python_for("bench"), "benchmarks/run.py", *arguments])


def site(python: str, folder: Path) -> list[str]:
    """The command that builds the documentation into a folder, all of it: what was built before warns no more."""
    strict = ["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet"]
    return [
        python,
        "-m",
        "sphinx",
        *strict,
        "--conf-dir",
        "docs/site",
        "--doctree-dir",
        f"{folder}-read",
        ".",
        str(folder),
    ]


def docs(arguments: list[str]) -> None:
    if arguments:
        fail(f"docs takes no arguments, got {' '.join(arguments)}")
    folder = ROOT / "build" / "site"
    if subprocess.run(site(python_for("docs"), folder), cwd=ROOT, env=environment()).returncode:
        fail("docs: a warning is an error here; they stand above")
    say(f"open {folder / 'index.html'}")


def setup(arguments: list[str]) -> None:
    if arguments:
        fail(f"setup takes no arguments, got {' '.join(arguments)}")
    python = python_for("setup")
    bring_other_tritons(python)
    bring_oldest_transformers(python)


COMMANDS = {
    "train": train,
    "test": test,
    "check": check,
    "test-gpu": test_gpu,
    "bench": bench,
    "docs": docs,
    "setup": setup,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    if sys.argv[1] not in COMMANDS:
        fail(f"no command {sys.argv[1]!r}; there are {', '.join(COMMANDS)}")
    try:
        COMMANDS[sys.argv[1]](sys.argv[2:])
    except KeyboardInterrupt:
        print("\ndev.py: interrupted; run the same command again", flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
