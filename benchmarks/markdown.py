"""Helpers that write the tables of docs/benchmarks.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def listed(lines: Iterable[str]) -> list[str]:
    """A bulleted list as the one part of a section; no part without lines."""
    items = [f"- {line}" for line in lines]
    return ["\n".join(items)] if items else []


def section(title: str, *parts: str, environment: dict[str, Any] | None = None) -> str:
    """A section of the page: its parts with blank lines between them, and the machine that the figures are of.

    A part of one line is filled as a paragraph, but for headings, titles in bold and lists. Tables are parts of several
    lines.
    """
    filled = (part if "\n" in part or part.startswith(("#", "- ", "**")) else paragraph(part) for part in parts)
    measured = [machine(environment)] if environment else []
    return "\n\n".join([f"## {title}", *filled, *measured]) + "\n"


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
