"""Sphinx configuration; built by `make docs` with warnings as errors."""

from importlib.metadata import version as installed_version

project = "lightning-zeroplus"
author = "the lightning-zeroplus authors"
version = release = installed_version("lightning-zeroplus")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Docstrings are read as plain text first: a name in single backquotes is code.
default_role = "code"

html_theme = "furo"
html_title = "lightning-zeroplus"
