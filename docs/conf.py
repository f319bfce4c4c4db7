"""Sphinx configuration; `make docs` builds with warnings as errors."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "refattn"
author = "The refattn developers"
project_copyright = f"2026, {author}"
version = release = installed_version("refattn")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "absolute_values",
    "from_the_package",
]
exclude_patterns = [
    "_build",
    "accuracy_table.md",
    "tolerances_table.md",
    "mutation_score_table.md",
    "mechanisms/_template.md",
]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the numpydoc sections give types in words
numpydoc_show_class_members = False
autosummary_generate = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Reference attention mechanisms, and a verifier for yours",
    "fixed_sidebar": True,
    "page_width": "1100px",
}
