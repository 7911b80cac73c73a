"""Settings of Sphinx: `./lab docs` builds these pages."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the reference imports the kernels, and needs no GPU

import docstrings  # noqa: E402
import generate  # noqa: E402

generate.write(HERE / "generated")

project = "MoE Workbench"
copyright = "MoE Workbench authors"
html_title = "MoE Workbench"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_copy_source = False

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generated/parts/*"]
suppress_warnings = ["ref.python"]  # a name that several modules have: the first is linked
default_role = "py:obj"  # names in docstrings link where they can
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
highlight_language = "none"
nb_execution_mode = "off"  # tests run the notebooks; here they show their text and code

autodoc_member_order = "bysource"
autodoc_mock_imports = [] if importlib.util.find_spec("triton") else ["triton"]
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90


def setup(app: Any) -> None:
    """Connect the plain docstrings."""
    app.connect("autodoc-process-docstring", docstrings.as_rst, priority=400)
