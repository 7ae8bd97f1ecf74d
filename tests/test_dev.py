"""dev.py: what it reads, and what it would do on machines that are not this one. Nothing is installed here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dev


class Commands:
    """Stands in for dev.logged: notes each command, and lets those fail that contain one of `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.run: list[str] = []

    def __call__(self, title: str, *command: str) -> bool:
        self.run.append(" ".join(command).removeprefix(" ".join(dev.PIP)).strip())
        return not any(word in self.run[-1] for word in self.failing)


@pytest.fixture
def machine(monkeypatch):
    """A Linux machine without a GPU and an empty .venv; returns a function that says otherwise."""

    def be(*, platform: str = "linux", gpu: bool = False, cuda: str = "", failing: tuple[str, ...] = ()) -> Commands:
        commands = Commands(*failing)
        monkeypatch.setattr(dev.sys, "platform", platform)
        monkeypatch.setattr(dev, "has_nvidia_gpu", lambda: gpu)
        monkeypatch.setattr(dev, "cuda_of_env_torch", lambda: cuda)
        monkeypatch.setattr(dev, "missing_in_env", lambda needed: [r.text for r in needed])
        monkeypatch.setattr(dev, "log_tail", lambda: "  | the end of the log")
        monkeypatch.setattr(dev, "logged", commands)
        return commands

    return be


def test_dependencies_are_read_as_a_toml_reader_reads_them():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((dev.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = dev.dependency_lists()
    assert lists["dependencies"] == project["dependencies"]
    assert {name: lists[name] for name in project["optional-dependencies"]} == project["optional-dependencies"]


@pytest.mark.parametrize("command", dev.EXTRAS)
def test_every_command_needs_torch_and_known_extras(command):
    names = [r.name for r in dev.requirements(dev.EXTRAS[command])]
    assert "torch" in names and "einops" in names


def test_gpu_tests_take_the_numpy_that_is_there():
    """Its upper bound is for Triton's interpreter; an offline GPU machine has a newer one."""
    bounds = {
        command: [r.specifier for r in dev.requirements(dev.EXTRAS[command]) if r.name == "numpy"]
        for command in ("test", "test-gpu")
    }
    assert any("<" in bound for bound in bounds["test"])
    assert not any("<" in bound for bound in bounds["test-gpu"])


def test_training_needs_no_test_tools_and_no_triton():
    assert {r.name for r in dev.requirements(dev.EXTRAS["train"])} == {"torch", "einops", "numpy", "matplotlib"}


@pytest.mark.parametrize(
    ("version", "specifier", "verdict"),
    [
        ("2.11.0+cu130", ">=2.11", True),
        ("2.11.0a0+vendor25.9", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.10.0", ">=3.6,<3.9", False),
        ("3.8.1", ">=3.6,<3.9", True),
        ("3.5.9", ">=3.6,<3.9", False),
        ("0.7", ">=0.7.0", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version, specifier, verdict):
    assert dev.satisfies(version, specifier) is verdict


def test_every_specifier_of_the_project_is_one_that_can_be_compared():
    for names in dev.dependency_lists().values():
        for text in names:
            if not text.startswith("ringflash[") and re.match(r"[\w.-]+[<>=!~]", text):
                specifier = dev.Requirement.parse(text).specifier
                assert re.fullmatch(r"((>=|<|==)[\d.]+,?)+", specifier), text


def test_a_marker_decides_whether_a_requirement_applies(monkeypatch):
    triton = dev.Requirement.parse("triton>=3.6,<3.9; sys_platform == 'linux'")
    monkeypatch.setattr(dev.sys, "platform", "darwin")
    assert not triton.applies
    monkeypatch.setattr(dev.sys, "platform", "linux")
    assert triton.applies


def test_a_marker_that_cannot_be_read_is_an_error():
    with pytest.raises(SystemExit, match="cannot read the marker"):
        _ = dev.Requirement.parse("torch>=2.11; python_version < '3.12'").applies


def test_without_a_gpu_linux_gets_the_cpu_build_that_pip_has(machine):
    commands = machine()
    dev.install_torch()
    assert commands.run == [f"torch=={dev.CPU_TORCH}+cpu"]


def test_without_a_gpu_linux_gets_the_cpu_build_that_uv_knows_if_pip_has_none(machine):
    commands = machine(failing=("+cpu",))
    dev.install_torch()
    assert commands.run[1] == "uv"
    assert "--torch-backend=cpu" in commands.run[2]
    assert f"torch=={dev.CPU_TORCH}" in commands.run[2]


def test_without_a_gpu_no_cpu_build_is_an_error_and_never_a_cuda_build(machine):
    commands = machine(failing=("torch",))
    with pytest.raises(SystemExit, match="from pip or from uv") as error:
        dev.install_torch()
    assert "the end of the log" in str(error.value)
    assert "run dev.py with that Python" in str(error.value)
    assert all("+cpu" in c or "=cpu" in c or c == "uv" for c in commands.run)


def test_a_cuda_build_that_came_all_the_same_is_an_error(machine):
    machine(cuda="13.0")
    with pytest.raises(SystemExit, match="a CUDA build of torch was installed on a machine without a GPU"):
        dev.install_torch()


def test_with_a_gpu_pip_chooses_the_torch_and_a_triton_we_know(machine):
    commands = machine(gpu=True, cuda="13.0")
    dev.install_torch()
    assert commands.run == ["torch>=2.11 triton>=3.6,<3.9; sys_platform == 'linux'"]


def test_other_systems_get_what_pip_offers(machine):
    commands = machine(platform="darwin")
    dev.install_torch()
    assert commands.run == ["torch>=2.11"]


def test_a_torch_that_is_there_is_left_alone(machine, monkeypatch):
    commands = machine(gpu=True)
    monkeypatch.setattr(dev, "missing_in_env", lambda needed: [])
    dev.install_torch()
    assert commands.run == []


@pytest.mark.parametrize(
    ("there", "cuda", "held"),
    [
        ("torch==2.11.0+cu130 triton==3.6.0 numpy==2.0.0", "13.0", ["torch==2.11.0+cu130", "triton==3.6.0"]),
        ("torch==2.13.0+cpu numpy==2.0.0", "", ["torch==2.13.0+cpu", f"triton=={dev.CPU_TRITON}"]),
        ("torch==2.13.0+cpu triton==3.7.1", "", ["torch==2.13.0+cpu", "triton==3.7.1"]),
        ("torch==2.13.0 pytorch-triton==3.7.0", "13.0", ["torch==2.13.0"]),
        ("torch==2.12.0 torch==2.11.0", "13.0", ["torch==2.12.0"]),
    ],
    ids=["cuda", "cpu", "cpu with a triton of its own", "cuda with another triton", "two, the first on the path wins"],
)
def test_what_is_there_is_held(machine, monkeypatch, there, cuda, held):
    machine(cuda=cuda)
    monkeypatch.setattr(dev, "ask", lambda python, code: there)
    assert dev.pins() == held


def test_nothing_is_installed_where_only_a_nicety_is_missing(monkeypatch):
    met = property(lambda self: self.name != "pytest-timeout")
    monkeypatch.setattr(dev.Requirement, "is_met", met)
    monkeypatch.setattr(dev, "set_up", lambda needed: pytest.fail("set up"))
    assert dev.python_for("test-gpu") == sys.executable


@pytest.fixture
def env(monkeypatch, tmp_path):
    """A place for .venv of our own; returns its path."""
    place = tmp_path / ".venv"
    monkeypatch.setattr(dev, "ENV", place)
    monkeypatch.setattr(dev, "ENV_PYTHON", place / "bin" / "python")
    for name in ("LOG", "MADE_HERE", "INSTALLING"):
        monkeypatch.setattr(dev, name, place / getattr(dev, name).name)
    return place


@pytest.fixture
def tritons(env, machine, monkeypatch):
    """Says which Triton is in .venv and brings the others; returns what was installed."""
    monkeypatch.setattr(dev, "OTHER_TRITON", env / "other-triton")

    def bring(here: str, *, python: str | None = None, **facts) -> list[str]:
        commands = machine(**facts)
        monkeypatch.setattr(dev, "ask", lambda python, code: here)
        dev.bring_other_tritons(python or str(dev.ENV_PYTHON))
        return commands.run

    return bring


def test_the_tests_get_each_release_of_triton_that_kernels_know():
    shim = (dev.ROOT / "ringflash/kernels/hopper/gluon.py").read_text(encoding="utf-8")
    known = re.search(r"^VERSIONS = \((.*)\)$", shim, re.M)[1]
    assert [dev.release_of(version) for version in dev.TRITONS] == re.findall(r'"([\d.]+)"', known)
    assert dev.CPU_TRITON in dev.TRITONS


@pytest.mark.parametrize(
    ("here", "brought"), [("3.6.0", ["3.8.0"]), ("3.8.1+vendor", ["3.6.0"]), ("3.7.0", ["3.6.0", "3.8.0"])]
)
def test_a_release_of_triton_that_the_environment_lacks_gets_a_folder_of_its_own(tritons, here, brought):
    assert tritons(here) == [f"--no-deps --target {dev.OTHER_TRITON / v} triton=={v}" for v in brought]


def test_a_release_of_triton_that_is_there_is_not_installed_again(tritons):
    (dev.OTHER_TRITON / "3.8.0").mkdir(parents=True)
    assert tritons("3.6.0") == []


@pytest.mark.parametrize("facts", [{"gpu": True}, {"platform": "darwin"}, {"python": sys.executable}], ids=str)
def test_no_other_triton_for_gpus_other_systems_and_a_python_used_as_it_is(tritons, facts):
    assert tritons("3.6.0", **facts) == []


def test_a_triton_that_cannot_be_installed_is_an_error_that_says_how_to_do_without(tritons):
    with pytest.raises(SystemExit, match="could not install triton 3.8.0 into .*other-triton") as error:
        tritons("3.6.0", failing=("3.8.0",))
    assert "the end of the log" in str(error.value)
    assert "-m pytest -m 'not gpu'` runs the tests that do without" in str(error.value)


def test_the_tests_get_the_oldest_transformers_that_the_adapter_takes(env, machine, monkeypatch):
    commands = machine()
    monkeypatch.setattr(dev, "OTHER_TRANSFORMERS", env / "other-transformers")
    folder = dev.OTHER_TRANSFORMERS / dev.OLDEST_TRANSFORMERS
    dev.bring_oldest_transformers(sys.executable)  # a Python that is used as it is
    dev.bring_oldest_transformers(str(dev.ENV_PYTHON))
    folder.mkdir(parents=True)
    dev.bring_oldest_transformers(str(dev.ENV_PYTHON))
    assert len(commands.run) == 1
    assert commands.run[0].startswith(f"--no-deps --target {folder} transformers=={dev.OLDEST_TRANSFORMERS} ")
    adapter = (dev.ROOT / "ringflash/integrations/transformers/register.py").read_text(encoding="utf-8")
    oldest = ".".join(re.search(r"^OLDEST = \((\d+), (\d+)\)", adapter, re.M).groups())
    assert dev.release_of(dev.OLDEST_TRANSFORMERS) == oldest
    assert f"transformers>={oldest},<6" in dev.dependency_lists()["transformers"]


def test_a_python_without_venv_is_told_what_to_install(env, monkeypatch):
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"apt install python3\.\d+-venv"):
        dev.create()
    assert not env.exists()


def test_a_set_up_that_was_cut_off_is_found_and_removed(env, monkeypatch):
    dev.ENV_PYTHON.parent.mkdir(parents=True)
    dev.ENV_PYTHON.symlink_to(sys.executable)
    dev.MADE_HERE.touch()
    assert dev.is_sound()

    def cut_off(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dev.subprocess, "run", cut_off)
        with pytest.raises(KeyboardInterrupt):
            dev.logged("installing", sys.executable)
    assert not dev.is_sound()
    dev.remove("why")
    assert not env.exists()


def test_a_step_that_failed_leaves_nothing_to_clean_up(env):
    env.mkdir()
    assert not dev.logged("installing", sys.executable, "-c", "print('no such package'); raise SystemExit(1)")
    assert not dev.INSTALLING.exists()
    assert "no such package" in dev.log_tail()


def test_a_torch_that_turns_up_later_is_borrowed(env, machine, monkeypatch):
    """As after an error that said: install the torch you want, then run this again."""
    machine()
    made = []
    monkeypatch.setattr(dev, "create", lambda: (made.append(env.exists()), env.mkdir()))
    monkeypatch.setattr(dev, "is_sound", lambda: True)
    monkeypatch.setattr(dev.Requirement, "is_met", property(lambda self: self.name == "torch"))
    monkeypatch.setattr(dev, "missing_in_env", lambda needed: [] if made else [r.text for r in needed])
    env.mkdir()
    dev.MADE_HERE.touch()
    dev.set_up([dev.torch_requirement()])
    assert made == [False]


def test_an_environment_that_somebody_else_made_is_never_removed(env):
    env.mkdir()
    (env / "theirs").touch()
    with pytest.raises(SystemExit, match=r"dev\.py did not make it"):
        dev.remove("why")
    assert (env / "theirs").exists()


@pytest.fixture
def launched(monkeypatch):
    """What `train` would become: its command and the environment variables it sets."""
    seen = {}

    def become(command, **changes):
        seen.update(command=command, changes=changes)
        raise SystemExit(0)

    monkeypatch.setattr(dev, "become", become)
    monkeypatch.setattr(dev, "python_for", lambda command: "python")
    monkeypatch.setattr(dev, "cores", lambda: 8)
    monkeypatch.setattr(dev, "gpu_count", lambda python: 0)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def train(*arguments: str, gpus: int = 0) -> dict:
        monkeypatch.setattr(dev, "gpu_count", lambda python: gpus)
        with pytest.raises(SystemExit):
            dev.train(list(arguments))
        return seen

    return train


@pytest.mark.parametrize(
    ("arguments", "gpus", "processes"),
    [((), 0, 2), ((), 4, 4), (("--processes", "3"), 0, 3), (("--processes=1",), 4, 1)],
)
def test_training_takes_every_gpu_or_two_processes_unless_told(launched, arguments, gpus, processes):
    assert f"--nproc-per-node={processes}" in launched(*arguments, gpus=gpus)["command"]


def test_training_on_no_process_is_refused(launched):
    with pytest.raises(SystemExit, match="--processes 0; must be at least 1"):
        dev.train(["--processes", "0"])


def test_training_flags_reach_the_example_in_their_order(launched):
    command = launched("--steps", "5", "--processes", "2", "--no-compare", "--out", "x")["command"]
    assert command[command.index("examples/train_long_context.py") + 1 :] == [
        "--steps",
        "5",
        "--no-compare",
        "--out",
        "x",
    ]


def test_training_meets_on_loopback_and_shares_the_cores(launched):
    seen = launched()
    assert {"--standalone", "--local-addr=127.0.0.1"} <= set(seen["command"])
    assert seen["changes"]["OMP_NUM_THREADS"] == "4"
    if sys.platform == "linux":
        assert seen["changes"]["GLOO_SOCKET_IFNAME"] == seen["changes"]["NCCL_SOCKET_IFNAME"] == "lo"


def test_what_the_user_set_wins_over_the_defaults(launched, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launched()["changes"]["OMP_NUM_THREADS"] == "7"


def test_an_unknown_command_names_the_known_ones():
    done = subprocess.run([sys.executable, dev.__file__, "trian"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no command 'trian'" in done.stderr
    assert "train, test, check" in done.stderr


def test_it_needs_nothing_but_the_standard_library():
    """-I -S: no site-packages, no user folder, nothing but Python."""
    done = subprocess.run([sys.executable, "-I", "-S", dev.__file__, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python3 dev.py train" in done.stdout


@pytest.mark.parametrize("path", ["dev.py", "pyproject.toml", "Makefile", ".ci/run"])
def test_no_host_and_no_machine_is_named(path):
    text = (Path(dev.ROOT) / path).read_text(encoding="utf-8")
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text)
