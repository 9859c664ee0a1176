"""Sphinx: the documentation as a site. `make docs` builds it from the pages as they lie in the repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kernels_dsl import __version__  # noqa: E402

project = "kernels-dsl"
author = "The kernels-dsl authors"
copyright = author
version = release = __version__

# The source folder is the repository's, so that links between pages, results and journal hold here as there.
root_doc = "docs/index"
include_patterns = [
    "docs/**", "README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "benchmarks/**/*.md",
    "examples/*.md", "tutorials/*.md",
]  # fmt: skip
exclude_patterns = ["docs/site/**", "**/.*", "build/**", ".venv/**"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
nitpicky = False
# Two modules of blocks may have a class of one name; annotations are then not linked.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_static_path, html_css_files = ["static"], ["wide.css"]
html_title = f"kernels-dsl {version}"
html_theme_options = {"source_directory": "docs/"}


def _escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings of blocks are plain text: their products and norms, `a * b` and `|x|`, are no markup.

    What Python says of the fields of a named tuple is left out: its class says what they are.
    """
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    if name.startswith("kernels_dsl.blocks."):
        for number, line in enumerate(lines):
            parts = re.split(r"(`[^`]*`)", line)
            lines[number] = "".join(p if p.startswith("`") else re.sub(r"([*|])", r"\\\1", p) for p in parts)


def setup(app: Any) -> None:
    """Sphinx's hook for extensions."""
    app.connect("autodoc-process-docstring", _escape)
