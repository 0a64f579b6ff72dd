"""How the book is built: `make docs`. What is generated at build time is in `_ext/`."""

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # autodoc imports Haystack

project = "ragfuse"
author = "the ragfuse authors"
copyright = "the ragfuse authors, Apache-2.0"
release = installed("ragfuse-kv")
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "book_reference",  # settings, commands, a page for every public name
    "book_files",  # links to files of the repository, notebooks, pictures
]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]
default_role = "code"
smartquotes_action = "qe"  # two hyphens stay: options begin with them
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"

html_theme = "furo"
html_title = "ragfuse"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e5d", "color-brand-content": "#0b6e5d"},
    "dark_css_variables": {"color-brand-primary": "#4fd1b5", "color-brand-content": "#4fd1b5"},
}
