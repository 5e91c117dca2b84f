"""Settings of the documentation site: `make docs` builds it into build/docs."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference

import metaphrase

project = "Metaphrase"
author = "The Metaphrase developers"
version = release = metaphrase.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
html_theme = "furo"
html_title = f"Metaphrase {release}"
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False
# Docstrings write names of code in single backticks.
default_role = "code"
# Quotes and dashes of help texts are code.
smartquotes = False
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
myst_heading_anchors = 3
copybutton_prompt_text = "$ "


def read_notebook(app, name, source):
    """Turn a notebook into a page: its text and code, and a link to the file after the title."""
    path = app.env.doc2path(name)
    if path.suffix == ".ipynb":
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(source[0])["cells"]]
        parts = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in cells]
        parts.insert(1, f"{{download}}`Download this notebook <{path.name}>`")
        source[0] = "\n\n".join(parts)


def insert_reference(app, name, source):
    """Fill the marks of a page, such as `<!-- recipe_fields -->`, with text made from the code and from `benchmarks/`."""
    for mark, make in reference.TEXTS.items():
        if f"<!-- {mark} -->" in source[0]:
            source[0] = source[0].replace(f"<!-- {mark} -->", make())
    # Two files outside this folder are a page of the site.
    for path in ("../benchmarks/README.md", "../benchmarks/results/README.md"):
        source[0] = source[0].replace(f"({path})", "(results.md)")


def setup(app):
    app.connect("source-read", read_notebook)
    app.connect("source-read", insert_reference)
