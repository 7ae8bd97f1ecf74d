"""The documentation site: it builds without a warning, holds every public name, and asks nobody for anything."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

import dev
import ringflash
import ringflash.training

NAMES = [f"ringflash.{name}" for name in ringflash.__all__]
NAMES += [f"ringflash.training.{name}" for name in ringflash.training.__all__]
# What a browser fetches by itself; a link that a reader may follow is not among it.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


def build(folder: Path, source: Path = dev.ROOT, *settings: str) -> subprocess.CompletedProcess[str]:
    command = dev.site(sys.executable, folder)
    command[command.index(".")] = str(source)
    command[command.index("docs/site")] = str(dev.ROOT / "docs/site")
    return subprocess.run([*command, *settings], cwd=dev.ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, BeautifulSoup]:
    """Every page, by its path."""
    folder = tmp_path_factory.mktemp("site") / "html"
    done = build(folder)
    assert done.returncode == 0, done.stderr
    pages = {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in folder.rglob("*.html")}
    styles = {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in folder.rglob("*.css")}
    assert "_static/styles/furo.css" in styles
    fetched = [name for name, text in styles.items() if re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", text)]
    assert fetched == []
    return {name: BeautifulSoup(text, "html.parser") for name, text in pages.items()}


def test_every_page_of_the_docs_is_on_the_site(site):
    pages = [p.relative_to(dev.ROOT).with_suffix(".html") for p in (dev.ROOT / "docs").rglob("*.md")]
    assert {str(p) for p in pages} - {"docs/progress.html"} <= set(site)
    assert {"CHANGELOG.html", "CONTRIBUTING.html", "index.html"} <= set(site)


def test_every_page_is_reached_from_the_sidebar(site):
    links = site["docs/index.html"].select(".sidebar-tree a.reference")
    reached = {os.path.normpath(f"docs/{link['href']}") for link in links if link["href"] != "#"}
    assert {name for name in site if name.startswith("docs/")} - reached == {"docs/index.html"}


def test_a_broken_link_and_a_name_that_is_not_there_fail_the_build(tmp_path):
    """In a folder of one page, with the settings and the command of the real one."""
    (tmp_path / "docs").mkdir()
    page = "# A page\n\n[gone](gone.md)\n\n```{eval-rst}\n.. autofunction:: ringflash.no_such_name\n```\n"
    (tmp_path / "docs/index.md").write_text(page)
    done = build(tmp_path / "html", tmp_path)
    assert done.returncode != 0
    assert "cross-reference target not found: 'gone.md'" in done.stderr
    assert "no_such_name" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_stands_on_a_page_with_every_word_of_its_docstring(site, name):
    (entry,) = [found for page in site.values() if (found := page.find(id=name))]
    value = ringflash if name.count(".") == 1 else ringflash.training
    said = inspect.getdoc(getattr(value, name.rpartition(".")[2]))
    shown = entry.find_next_sibling("dd").get_text()
    assert squeezed(said.replace("`", "")) in squeezed(shown)


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_no_page_fetches_anything_from_elsewhere(site):
    fetched = [
        f"{name}: {tag[attribute]}"
        for name, page in site.items()
        for kind, attribute in FETCHED.items()
        for tag in page.find_all(kind)
        if re.match(r"(https?:)?//", tag.get(attribute, ""))
    ]
    assert fetched == []
