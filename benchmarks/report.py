"""`python -m benchmarks.report` makes docs/benchmarks.md from benchmarks/results/*.json: no figure is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .common import REPO, RESULTS
from .gpu.tables import on_a_gpu
from .markdown import parts, section
from .sections import FIGURES

PAGE = REPO / "docs" / "benchmarks.md"
GPU = "gpu"
"""The section that is made of many files."""


def page() -> str:
    """The text of docs/benchmarks.md: each section of page.md whose file of results exists."""
    introduction, sections = parts()
    texts = [introduction]
    for name, (file, _) in sections.items():
        path = RESULTS / f"{file}.json"
        if name == GPU:
            texts.append(on_a_gpu(RESULTS))
        elif path.exists():
            texts.append(rendered(name, json.loads(path.read_text())))
    return "\n".join(texts)


def rendered(name: str, result: Mapping[str, Any]) -> str:
    """A section with its result and the figures made of it."""
    figures = FIGURES[name](result) if name in FIGURES else {}
    return section(name, {**result, **figures})


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
