"""The README's code runs as printed: alone, and unchanged under torchrun, with the same result."""

import re

import pytest

from tests.scripts import ROOT, launched, output_of


@pytest.fixture(scope="module")
def snippet(tmp_path_factory):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    path = tmp_path_factory.mktemp("readme") / "snippet.py"
    path.write_text(code)
    return path


def lines_of(printed):
    # Processes share the pipe, and a line of one may begin in the middle of another's.
    return sorted(part.strip() for part in re.findall(r"rank(?:(?!rank)[^\n])*", printed))


def test_the_first_code_of_the_readme_is_short_and_runs_alone_and_on_two_processes(snippet):
    lines = [line for line in snippet.read_text().splitlines() if line.strip()]
    assert len(lines) <= 12
    (alone,) = lines_of(output_of(str(snippet)))
    two = lines_of(launched(2, str(snippet)))
    assert [line.split(":")[0] for line in [alone, *two]] == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"]
    norms = {float(line.split()[-1]) for line in [alone, *two]}
    assert max(norms) - min(norms) <= 1e-5 * max(norms)


def test_the_packed_batch_of_the_readme_runs_alone_and_on_three_processes(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, packed = re.findall(r"```python\n(.*?)```", text, re.S)
    path = tmp_path / "packed.py"
    path.write_text(packed.replace("print(", 'print("rank", '))
    (alone,) = lines_of(output_of(str(path)))
    three = lines_of(launched(3, str(path)))
    assert alone.startswith("rank torch.Size([1, 1000, 1, 100])") and len(three) == 3


def test_the_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
