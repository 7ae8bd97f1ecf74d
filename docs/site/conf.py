"""Settings of the documentation site: `python3 dev.py docs`.

The repository is the source folder, so a link that holds in a clone holds on the site, and one that does not is an error.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import ringflash  # noqa: E402 - found by the line above

project = "ringflash"
release = ringflash.__version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "benchmarks/results/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/progress.md", ".*", "build", "dist", "runs", "tests", "ringflash", "examples"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what fulfils a contract is said where the contract is
python_maximum_signature_line_length = 100

smartquotes = False  # "peer" is code

html_theme = "furo"
html_title = f"ringflash {release}"
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False
