"""What stands in a table's cells: numbers in units that read well, with the exact ones behind them, and words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import gib

Unit = Literal["bytes", "s", "count", "plain", "rate", "share"]


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and the exact number behind it (bytes, seconds) where it shows one.

    Attributes:
        colour: of a small square before the text, the key to a chart; none if empty.
    """

    text: str
    value: float | None = None
    numeric: bool = True
    colour: str = ""

    @property
    def exact(self) -> str:
        """The number as a program would read it; empty without one."""
        return "" if self.value is None or not math.isfinite(self.value) else repr(self.value)


def n_bytes(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(gib(value), value)


def quantity(value: float | None, unit: Unit) -> Cell:
    """A number in its unit; `value` in bytes, seconds or as it is."""
    if value is None:
        return Cell("–")
    if unit == "bytes":
        return n_bytes(value)
    texts = {
        "s": f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms",
        "count": f"{value:,.0f}",
        "plain": f"{value:.4f}",
        "rate": f"{value:,.0f}",
        "share": f"{100 * value:.2f} %",
    }
    return Cell(texts[unit], value)


def percent(share: float | None) -> Cell:
    return Cell("–") if share is None else Cell(f"{100 * share:+.1f} %".replace("-0.0 %", "+0.0 %"), share)


def words(value: object) -> Cell:
    return Cell(str(value), numeric=False)
