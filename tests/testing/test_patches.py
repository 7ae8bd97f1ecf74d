"""What tests put in place of names of the package is there: those that need a GPU do not run where most changes are made."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def modules_of(tree):
    """Modules of the package by the name under which a file has them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ringflash":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return {name: module for name, module in found.items() if module.startswith("ringflash.") and is_module(module)}


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def patched(tree):
    """(name of what is patched, attribute) of every setattr, patch.object and assignment to an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("setattr", "object"):
            target, *rest = node.args or [None]
            if isinstance(target, ast.Name) and rest and isinstance(rest[0], ast.Constant):
                yield target.id, rest[0].value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    yield target.value.id, target.attr


def missing(text):
    """Of each function, which may import what another one has under the same name."""
    whole = ast.parse(text)
    functions = [node for node in whole.body if isinstance(node, ast.FunctionDef)]
    outside = ast.Module([node for node in whole.body if node not in functions], [])
    everywhere = modules_of(outside)
    return [
        f"{modules[name]}.{attribute}"
        for tree in (outside, *functions)
        for modules in [everywhere | modules_of(tree)]
        for name, attribute in patched(tree)
        if name in modules and not hasattr(importlib.import_module(modules[name]), attribute)
    ]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_what_is_patched_is_there(path):
    assert not missing(path.read_text(encoding="utf-8"))


def test_what_is_gone_is_found():
    assert missing("from ringflash.schedule import landing\nlanding.GONE = 1\nlanding.CELLS = 2") == [
        "ringflash.schedule.landing.GONE"
    ]
    text = "def f(monkeypatch):\n    from ringflash.kernels.hopper import tuning\n    monkeypatch.setattr(tuning, 'gone', 1)"
    assert missing(text) == ["ringflash.kernels.hopper.tuning.gone"]
