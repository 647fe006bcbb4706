"""Helpers that write the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(filter(None, [rows([head]), "|---" * len(head) + "|", rows(lines)]))


def rows(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def listed(lines: Iterable[str]) -> list[str]:
    """A bulleted list as one block; none without lines."""
    items = [f"- {line}" for line in lines]
    return ["\n".join(items)] if items else []


def section(template: str, values: Mapping[str, Any]) -> str:
    """A section of the page: a template with its values, and the machine that the figures are of.

    Paragraphs are filled; headings, titles in bold, lists, tables and what begins with ~ are not. Empty ones are left
    out. `measured` among the values takes the machine's line.
    """
    blocks = filter(None, (block.strip() for block in template.format_map(values).split("\n\n")))
    filled = [
        block.removeprefix("~") if block.startswith(("#", "- ", "**", "|", "~")) else paragraph(block)
        for block in blocks
    ]
    return "\n\n".join([*filled, *([] if "measured" in values else [machine(values["environment"])])]) + "\n"


@cache
def templates() -> dict[str, str]:
    """The sections of page.md by name."""
    _, *parts = re.split(r"^@@ (\w+)\n", Path(__file__).with_name("page.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def interval(values: Any, digits: int) -> str:
    middle, low, high = values
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def machine(env: dict[str, Any]) -> str:
    gpus = ", ".join(env["gpus"]) or "no GPU"
    return (
        f"Measured {env['date'][:10]} at commit {str(env['commit'])[:10]} on {env['cpu']}, {env['cores']} cores, "
        f"{env['memory_gib']} GiB, {gpus}; Python {env['python']}, torch {env['torch']}, deepspeed {env['deepspeed']}."
    )


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.1f}"
