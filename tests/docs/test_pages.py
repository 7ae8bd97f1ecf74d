"""What the pages say is so: code runs as printed, messages stand in the source, pictures can be drawn again."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator

import pytest

import dev
from tests.scripts import launched, output_of

DOCS = dev.ROOT / "docs"
# Shorter templates, such as f"{name} {value}", match anything.
TELLING = 20


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_the_code_of_the_first_page_runs_alone_and_on_three_processes(tmp_path):
    path = tmp_path / "ring.py"
    path.write_text("".join(blocks("index.md", "python")))
    said = re.findall(
        r"rank (\d) of (\d) holds (\d+) tokens: differs by (\d)e([-+]\d+)",
        output_of(str(path)) + launched(3, str(path)),
    )
    alone, *three = sorted(said, key=lambda line: line[1])
    assert alone[:4] == ("0", "1", "1000", "0") and {line[:2] for line in three} == {(str(r), "3") for r in range(3)}
    assert sum(int(line[2]) for line in three) == 1000
    assert all(int(line[4]) <= -6 or line[3] == "0" for line in three)


def templates() -> Iterator[list[str]]:
    """The constant parts of every text in the package, with a value between each two."""
    for path in (dev.ROOT / "ringflash").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield [node.value]
            elif isinstance(node, ast.JoinedStr):
                yield re.split("\0", "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))


@pytest.fixture(scope="module")
def known() -> list[re.Pattern[str]]:
    """Texts of the package that say something, with room for values; the caller's name may stand before them."""
    told = [parts for parts in templates() if sum(map(len, parts)) >= TELLING]
    return [re.compile(r"(\w+: )?" + "(.*)".join(map(re.escape, parts)), re.S) for parts in told]


MESSAGES = [block.strip() for block in blocks("troubleshooting.md", "text")]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_every_message_of_the_troubleshooting_page_stands_in_the_source(known, message):
    assert any(pattern.fullmatch(message) for pattern in known)


def test_inline_reasons_of_the_troubleshooting_page_stand_in_the_source():
    source = "".join(path.read_text(encoding="utf-8") for path in (dev.ROOT / "ringflash").rglob("*.py"))
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    reasons = re.findall(r"`([a-z][A-Za-z']*(?: [A-Za-z']+){3,})`", text)
    assert len(reasons) >= 2
    assert [reason for reason in reasons if reason not in source] == []


def test_the_pictures_of_the_schedule_are_drawn_again_by_their_script(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("draw", DOCS / "figures/draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    monkeypatch.setattr(draw, "HERE", tmp_path)
    draw.draw()
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = set(
        re.findall(r"\]\(figures/([\w]+\.png)\)", "".join(p.read_text(encoding="utf-8") for p in DOCS.glob("*.md")))
    )
    measured = {name for name in shown if "_h200_" in name}
    assert drawn == shown - measured
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
