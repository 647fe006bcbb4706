"""The site: `make docs` builds it from README.md, docs/ and the docstrings, and ends at the first broken link.

Nothing is fetched from the network, neither when it is built nor when it is read.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import mermaidx
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shardkit import __version__

project = "shardkit"
release = version = __version__
copyright = author = "the shardkit authors"

# The source directory is the repository's root, so that a link means the same here and on a code host.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "examples/README.md", "tests/emulated_cuda/README.md"]
exclude_patterns = [".*", "build", "runs", "benchmarks", "docs/conf.py"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
default_role = "code"  # `name` in a docstring
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"shardkit {version}"
html_extra_path = ["site/index.html"]  # leads from the site's root to docs/index.html
html_copy_source = html_show_sphinx = False


class Mermaid(SphinxDirective):
    """A drawing, made by mermaid when the site is built: a drawing that mermaid cannot read ends the build."""

    has_content = True
    _count = itertools.count(1)

    def run(self) -> list[nodes.Node]:
        try:
            svg = mermaidx.render("\n".join(self.content)).svg()
        except Exception as error:  # whatever mermaid's own parser raises
            raise self.error(f"mermaid cannot read this drawing: {error}") from error
        svg = svg.replace("my-svg", f"drawing-{next(self._count)}")  # ids are for a whole page
        return [nodes.raw("", f'<div class="drawing" style="background: white">{svg}</div>', format="html")]


def mark_code(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """In docstrings an indented block after a colon is code."""
    for number, line in enumerate(lines[:-2]):
        if line.endswith(":") and not lines[number + 1] and re.match(r" {4}\S", lines[number + 2]):
            lines[number] += ":"


def keep_sentence(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """napoleon takes the words before a property's first colon for its type."""
    if what == "property":
        lines[0] = lines[0].replace(": ", " – ", 1)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    app.connect("autodoc-process-docstring", keep_sentence, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", mark_code, priority=900)  # after napoleon, which reads `Args:`
    return {"parallel_read_safe": True}
