"""The sections of docs/benchmarks.md: Jinja templates in page.md, and the filters that write their figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined, Undefined

from .common import median_ci

UNKNOWN = "–"


def section(name: str, values: Mapping[str, Any]) -> str:
    """A section of page.md with these values.

    Paragraphs are filled; headings, titles in bold, lists, tables and what begins with ~ are not. Empty ones are left
    out.

    Raises:
        UndefinedError: the template shows a value that is not among them.
    """
    blocks = filter(None, (block.strip() for block in templates().get_template(name).render(values).split("\n\n")))
    filled = [
        block.removeprefix("~") if block.startswith(("#", "- ", "**", "|", "~")) else paragraph(block)
        for block in blocks
    ]
    return "\n\n".join(filled) + "\n"


@cache
def parts() -> tuple[str, dict[str, tuple[str, str]]]:
    """The introduction of page.md; and of each section by name its file of results and its template."""
    text = Path(__file__).with_name("page.md").read_text()
    introduction, *pieces = re.split(r"^@@ (\w+) ?(\S*)\n", text, flags=re.MULTILINE)
    each = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
    return introduction.strip() + "\n", {name: (file or name, template) for name, file, template in each}


@cache
def templates() -> Environment:
    loader = DictLoader({name: template for name, (_, template) in parts()[1].items()})
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "f": _known(format), "interval": interval, "percent": _known(percent), "change": _known(change),
        "mib": _known(mib), "gib": _known(gib), "millions": _known(millions), "median": median, "median_ci": median_ci,
        "machine": machine, "rows": rows,
    }  # fmt: skip
    made.globals |= {"ratios": ratios}
    return made


def _known(show: Callable[..., str]) -> Callable[..., str]:
    """The filter, with a dash for what is not known."""
    return lambda value, *form: UNKNOWN if value is None or isinstance(value, Undefined) else show(value, *form)


def rows(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def interval(values: Any, digits: int, by: float = 1) -> str:
    """A median with its interval, in units of 1 / `by`."""
    middle, low, high = (by * value for value in values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def change(share: float, digits: int) -> str:
    return f"{100 * share:+.{digits}f} %"


def mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.1f}"


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f}"


def millions(amount: float) -> str:
    return f"{amount / 1e6:,.0f}"


def machine(env: Mapping[str, Any]) -> str:
    gpus = ", ".join(env["gpus"]) or "no GPU"
    return (
        f"Measured {env['date'][:10]} at commit {str(env['commit'])[:10]} on {env['cpu']}, {env['cores']} cores, "
        f"{env['memory_gib']} GiB, {gpus}; Python {env['python']}, torch {env['torch']}, deepspeed {env['deepspeed']}."
    )


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
