"""Settings of the documentation site: `make docs` builds it into docs/_build/html.

Why Sphinx with MyST and furo: the reference is made from the code during the build, which needs hooks into the build
and documentation of imported objects (help texts live in dataclass metadata). Sphinx has both, its strict mode reports
every broken link, and the pages need no network to be viewed. Zensical 0.0.73, the alternative, rendered docstrings
well and quickly, but ran no build hooks and read source text only, so that options had no help texts.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = METADATA["name"]
author = copyright = METADATA["authors"][0]["name"]
release = version = METADATA["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "mathml", "raw_results"]
exclude_patterns = ["_build"]
smartquotes = False  # would turn the -- of options into a dash
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 120
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
