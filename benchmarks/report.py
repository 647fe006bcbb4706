"""`python -m benchmarks.report` makes docs/benchmarks.md from benchmarks/results/*.json: no figure is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .common import REPO, RESULTS
from .gpu.tables import on_a_gpu
from .markdown import section, templates
from .report_compiled import compiled
from .sections import SECTIONS, other_loops, peers_on_cards

PAGE = REPO / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Generated from `benchmarks/results/*.json` by `python -m benchmarks.report`; a test compares. Ratios are medians of
pairs measured in one run; brackets give the distribution-free 95 % interval of the median. Absolute times say little
beyond the machine named; time ratios below 1 favour shardkit.
"""
ON_CARDS = {"compiled": compiled, "peers": peers_on_cards, "other_loops": partial(other_loops, emulated=True)}


def page() -> str:
    """The text of docs/benchmarks.md."""
    on_cards = _rendered(ON_CARDS, RESULTS / "emulated", peers="peers_on_cards")
    return "\n".join([INTRO, *_rendered(SECTIONS, RESULTS), on_a_gpu(RESULTS), *on_cards])


def rendered(name: str, result: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A section of page.md with its result and the values made of it."""
    return section(templates()[name], {**result, **values})


def _rendered(
    sections: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]], results: Path, **templates: str
) -> Iterator[str]:
    """The sections whose file of results exists; `templates`: those that have another name."""
    for name, values in sections.items():
        path = results / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            yield rendered(templates.get(name, name), result, values(result))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
