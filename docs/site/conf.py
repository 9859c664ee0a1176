"""Sphinx: the documentation as a site. `make docs` builds it from the pages as they lie in the repository."""

from __future__ import annotations

import sys
from pathlib import Path

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

html_theme = "furo"
html_title = f"kernels-dsl {version}"
html_theme_options = {"source_directory": "docs/"}
