"""The house rules of the package, read from its source: who imports whom, what is kept out, how long things get.

Nothing of ringflash is imported here, but by the last tests, in a process of their own.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringflash"

# A folder or file of ringflash/ -> its floor. A file imports from its own floor and from those below. The public names
# (ringflash/__init__.py) stand between what they offer and what is built with them.
FLOORS = {
    "schedule": 0,
    "kernels": 1,
    "parallel": 2,
    "ring": 3,
    "attention": 3,
    "operator": 3,
    "resolved": 3,
    "module": 3,
    "training": 5,
    "integrations": 5,
    "compat": 5,
    "sdpa": 3,
    "cli": 5,
    "__main__": 5,
    "testing": 6,
}
PUBLIC_NAMES_FLOOR = 4
DISTRIBUTED_LIVES_IN = ("parallel/", "ring.py", "testing/")
TRITON_LIVES_IN = ("kernels/triton/", "kernels/hopper/", "testing/")
AT_THE_EDGE = ("cli/", "__main__.py", "testing/")  # what people start by hand: may print, read the environment, wait

BANNED_NAMES = {"common", "data", "helper", "helpers", "info", "manager", "misc", "tmp", "util", "utils"}

# What is longer than the rule, how long it may be, and why. An entry that is no longer needed fails.
LONG_FILES: dict[str, tuple[int, str]] = {}
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}  # "kernels/triton/forward.py:name"


@dataclass(frozen=True)
class Source:
    """One file of the package. `path` is relative to ringflash/, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(("ringflash", *(p for p in parts if p != "__init__")))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def is_kernel(self) -> bool:
        return self.path.startswith("kernels/")

    def lives_in(self, places: tuple[str, ...]) -> bool:
        return self.path.startswith(places)

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, what) for each import, wherever it stands: `from a import b` gives a.b, relative ones are resolved."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._resolve(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def _resolve(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *([node.module] if node.module else [])])

    def uses(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of each chain of attributes, import aliases spelled out: `dist.barrier`, `os.environ`."""
        aliases = self.aliases
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and (name := dotted(node)):
                first, _, rest = name.partition(".")
                yield node.lineno, ".".join(filter(None, (aliases.get(first, first), rest)))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> what was imported under it."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {a.asname: a.name for a in node.names if a.asname}
                names |= {a.name.split(".")[0]: a.name.split(".")[0] for a in node.names if not a.asname}
            elif isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{self._resolve(node)}.{a.name}" for a in node.names}
        return names


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for what hangs on anything but a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_or_is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def floor_of_file(source: Source) -> int | None:
    parts = source.module.split(".")
    return FLOORS.get(parts[1]) if len(parts) > 1 else PUBLIC_NAMES_FLOOR


def floor_of_import(name: str) -> int:
    """`from ringflash import Ring` reaches for the public names, `from ringflash import schedule` does not."""
    parts = name.split(".")
    return FLOORS.get(parts[1], PUBLIC_NAMES_FLOOR) if len(parts) > 1 else PUBLIC_NAMES_FLOOR


SOURCES = [
    Source(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
]


def report(violations: Iterator[str] | list[str]) -> None:
    lines = list(violations)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_there_is_a_package_to_check():
    assert {"__init__.py", "attention.py", "ring.py"} <= {source.path for source in SOURCES}


def test_every_file_has_a_floor():
    report(
        f"{source.path}: FLOORS in this test does not say where {source.module} belongs"
        for source in SOURCES
        if floor_of_file(source) is None
    )


def test_no_file_imports_from_a_floor_above_its_own():
    def violations() -> Iterator[str]:
        for source in SOURCES:
            for line, name in source.imports():
                if is_or_is_in(name, "ringflash") and floor_of_import(name) > (floor_of_file(source) or 0):
                    yield f"{source.path}:{line}: imports {name}, which is above it"

    report(violations())


def test_nothing_imports_the_testing_package():
    report(
        f"{source.path}:{line}: imports {name}"
        for source in SOURCES
        for line, name in source.imports()
        if is_or_is_in(name, "ringflash.testing") and not source.path.startswith("testing/")
    )


def test_torch_distributed_stays_where_processes_meet():
    report(
        sorted(
            {
                f"{source.path}:{line}: uses torch.distributed; only {', '.join(DISTRIBUTED_LIVES_IN)} may"
                for source in SOURCES
                if not source.lives_in(DISTRIBUTED_LIVES_IN)
                for line, name in [*source.imports(), *source.uses()]
                if is_or_is_in(name, "torch.distributed")
            }
        )
    )


def test_triton_stays_in_its_kernels():
    report(
        f"{source.path}:{line}: imports {name}; only {', '.join(TRITON_LIVES_IN)} may"
        for source in SOURCES
        if not source.lives_in(TRITON_LIVES_IN)
        for line, name in source.imports()
        if is_or_is_in(name, "triton")
    )


def test_no_environment_variable_is_read():
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    report(
        sorted(
            {
                f"{source.path}:{line}: {name}; what changes a result is an argument"
                for source in SOURCES
                if not source.lives_in(AT_THE_EDGE)
                for line, name in [*source.imports(), *source.uses()]
                if any(is_or_is_in(name, banned) for banned in names)
            }
        )
    )


# Where the host waits, and why.
WAITING = {"parallel/lanes.py": "when memory that ranks share must grow, whoever uses the old one is done first"}


def test_nothing_waits_for_the_device_or_for_everybody():
    def violations() -> Iterator[str]:
        for source in SOURCES:
            if source.lives_in(AT_THE_EDGE) or source.path in WAITING:
                continue
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    # A barrier in a kernel is one of a block's threads, and another matter.
                    waits = {"synchronize"} if source.is_kernel else {"synchronize", "barrier", "monitored_barrier"}
                    if node.func.attr in waits:
                        yield f"{source.path}:{node.lineno}: {node.func.attr}(); wait on the event or handle you need"

    report(violations())


def test_nothing_prints():
    report(
        f"{source.path}:{node.lineno}: print()"
        for source in SOURCES
        if not source.lives_in(AT_THE_EDGE)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in ("print", "builtins.print")
    )


MUTABLE_CALLS = {"bytearray", "dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap"}
MUTABLE_CALLS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local", "Lock", "RLock"}
MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATING_METHODS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
MUTATING_METHODS |= {"update", "sort", "reverse", "appendleft", "popleft"}


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_LITERALS)


def mutable_globals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in module_level(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs on import: into `if` and `try` and class bodies, not into functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from module_level(node)


def changed_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names whose contents a statement changes: NAME[...] = x, del NAME[...], NAME.append(x)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    yield node.lineno, target.value.id
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.attr in MUTATING_METHODS
        ):
            yield node.lineno, node.func.value.id


def test_no_state_at_module_level():
    def violations() -> Iterator[str]:
        for source in SOURCES:
            tables = {name: line for line, name in mutable_globals(source.tree) if not name.startswith("__")}
            for name, line in tables.items():
                if not name.lstrip("_").isupper():
                    yield f"{source.path}:{line}: {name} can be changed; a constant table is UPPER_CASE, state has an owner"
            for line, name in changed_names(source.tree):
                if name in tables and name.isupper():
                    yield f"{source.path}:{line}: changes the constant table {name}"
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Global):
                    yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"

    report(violations())


def test_caches_are_bounded():
    def violations() -> Iterator[str]:
        for source in SOURCES:
            for line, name in source.uses():
                if name == "functools.cache":
                    yield f"{source.path}:{line}: functools.cache grows for ever; use lru_cache(maxsize=...)"
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call) and dotted(node.func).endswith("lru_cache"):
                    sizes = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "maxsize")]
                    if any(isinstance(size, ast.Constant) and size.value is None for size in sizes):
                        yield f"{source.path}:{node.lineno}: lru_cache(maxsize=None) grows for ever"

    report(violations())


def assigned_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What `a.b = x` and `setattr(a, "b", x)` change, as dotted names."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        yield from ((t.lineno, dotted(t)) for t in targets if isinstance(t, ast.Attribute))
        if isinstance(node, ast.Call) and dotted(node.func) == "setattr" and node.args:
            yield node.lineno, dotted(node.args[0])


def test_other_peoples_modules_are_not_changed():
    report(
        f"{source.path}:{line}: changes {name}, which came by import"
        for source in SOURCES
        if not source.lives_in(("testing/",))
        for line, name in assigned_attributes(source.tree)
        if name.partition(".")[0] in source.aliases
    )


def test_importing_probes_for_no_package():
    """What is installed is asked when a backend is chosen, not when ringflash is imported. torch always is: what a release
    of it keeps where may be tried.
    """

    def violations() -> Iterator[str]:
        for source in SOURCES:
            lines = {line for line, name in source.imports() if not is_or_is_in(name, "torch")}
            for node in module_level(source.tree):
                if isinstance(node, ast.Try) and lines & {n.lineno for n in node.body}:
                    yield f"{source.path}:{node.lineno}: tries an import"
                elif isinstance(node, ast.Call):
                    name = dotted(node.func).rpartition(".")[2]
                    if name in ("find_spec", "import_module", "__import__", "version"):
                        yield f"{source.path}:{node.lineno}: {name}() on import"

    report(violations())


# Names that users import: the package's, and those of training and of the adapters, which most programs never need.
PUBLIC_PACKAGES = ("__init__.py", "training/__init__.py", "integrations/transformers/__init__.py")


def test_only_public_packages_re_export():
    def violations() -> Iterator[str]:
        for source in SOURCES:
            if source.path in PUBLIC_PACKAGES:
                continue
            if source.is_package:
                kept = [node for node in source.tree.body if not is_docstring(node) and not is_future_import(node)]
                yield from (f"{source.path}:{node.lineno}: holds more than a docstring" for node in kept)
            for node in source.tree.body:
                if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
                    yield f"{source.path}:{node.lineno}: __all__; the public names are those of ringflash/__init__.py"

    report(violations())


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_future_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def test_names_of_files_say_what_is_in_them():
    paths = [PurePosixPath(source.path) for source in SOURCES]
    report(sorted({f"{path}: a name that could hold anything" for path in paths if BANNED_NAMES & names_of(path)}))


def names_of(path: PurePosixPath) -> set[str]:
    return {part.strip("_") for part in path.with_suffix("").parts}


def lengths_of_files() -> dict[str, tuple[int, int]]:
    """path -> (lines, lines allowed)."""
    return {source.path: (len(source.text.splitlines()), 600 if source.is_kernel else 400) for source in SOURCES}


def lengths_of_functions() -> dict[str, tuple[int, int]]:
    return {
        f"{source.path}:{node.name}": (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            150 if source.is_kernel else 80,
        )
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize(
    ("lengths", "exceptions"),
    [(lengths_of_files(), LONG_FILES), (lengths_of_functions(), LONG_FUNCTIONS)],
    ids=["files", "functions"],
)
def test_what_a_reader_must_hold_in_the_head_stays_small(lengths, exceptions):
    def violations() -> Iterator[str]:
        for name, (lines, allowed) in lengths.items():
            limit, _ = exceptions.get(name, (allowed, ""))
            if lines > limit:
                yield f"{name}: {lines} lines, allowed are {limit}"
        for name, (_, reason) in exceptions.items():
            if name not in lengths or lengths[name][0] <= lengths[name][1]:
                yield f"{name}: needs no exception any more; remove it"
            if not reason:
                yield f"{name}: an exception without a reason"

    report(violations())


# Stands in for the calls that create a CUDA context or ask the driver, and notes that they were made.
WATCHED_IMPORT = """
import json, sys, torch
asked = []
for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_capability"):
    real = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *a, name=name, real=real, **k: (asked.append(name), real(*a, **k))[1])
before = set(sys.modules)
import ringflash
print(json.dumps({"asked": asked, "new": sorted({m.partition(".")[0] for m in set(sys.modules) - before}),
                  "ringflash": sorted(m for m in sys.modules if m.startswith("ringflash."))}))
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_importing_ringflash_prints_nothing():
    done = run_python("import ringflash")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_ringflash_wakes_no_gpu_and_loads_no_optional_package():
    done = run_python(WATCHED_IMPORT)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert not seen["asked"]
    optional = {
        "triton",
        "matplotlib",
        "transformers",
        "accelerate",
        "flash_attn",
        "flash_attn_interface",
        "numpy",
        "tqdm",
    }
    assert not optional & set(seen["new"])
    chosen_later = ("ringflash.kernels.triton.", "ringflash.kernels.hopper.", "ringflash.testing", "ringflash.cli")
    assert not [module for module in seen["ringflash"] if module.startswith(chosen_later)]
