"""How Sphinx builds these pages: ``make docs``, or ``python -m sphinx docs FOLDER``.

The package must be installed with brainstorm 0.5, since the reference comes from its
docstrings; no GPU and no driver are needed.
"""

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "brainstorm-dbuf"
author = "the maintainers of brainstorm-dbuf"
release = version = importlib.metadata.version(project)

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]
exclude_patterns = ["_ext"]

# References to what is ours must lead somewhere. NumPy's, brainstorm's and Python's own
# pages are not fetched for the build, which needs no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!brainstorm_dbuf\b).*")]

autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# As arguments are, also where several share a line.
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

toc_object_entries = False

html_theme = "alabaster"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_theme_options = {
    "description": f"Double-buffered input for brainstorm. Version {release}.",
    "description_font_style": "normal",
    "fixed_sidebar": True,
    "page_width": "1080px",
    "sidebar_width": "240px",
    "font_family": "system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif",
    "head_font_family": "system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, "
    "sans-serif",
    "code_font_family": "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace",
    "font_size": "16px",
    "code_font_size": "0.84em",
    "show_relbars": False,
    "show_powered_by": True,
}
pygments_style = "friendly"
