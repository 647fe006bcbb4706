"""Rank 0's progress display: bars on a terminal, else a line every few steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import gib
from ..memory.rows import RankRow
from ..memory.spread import Summary, pressure, summary

if TYPE_CHECKING:
    from rich.table import Table

REFRESH_S = 1.0
"""Least seconds between two drawings of a terminal."""
BARS = 8
"""At most this many ranks get a bar: those with the largest peaks."""
TIGHT = 0.9
"""A rank's bar turns red at this share of its memory."""


class Progress:
    """Shows loss, throughput, MFU if the GPU's peak is known, the ranks' memory, seconds spent on saves,
    and the remaining time.
    """

    def __init__(
        self,
        total: int,
        first: int,
        every: int,
        flops_per_token: float | None,
        peak_flops: float | None,
        targets: str = "tokens",
    ) -> None:
        self._targets = targets
        self._total, self._every = total, every
        self._mfu_per_token = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._began, self._first = time.perf_counter(), first
        self._saves_s = 0.0
        self._rows: Sequence[RankRow] = ()
        self._condensed: Summary | None = None
        self._screen = Screen(total, first) if sys.stderr.isatty() else None

    def update(self, record: Mapping[str, float], ranks: int, rows: Sequence[RankRow]) -> None:
        """Show a step's record; `rows` come from the last gather."""
        step = int(record["step"])
        self._saves_s += record.get("save_s", 0.0)
        if rows is not self._rows:
            self._rows, self._condensed = rows, summary(rows) if rows else None
        if self._screen is not None:
            self._screen.update(step, lambda: self._text(record, ranks), self._rows)
        elif step == self._first + 1 or step % self._every == 0 or step == self._total:
            text = self._text(record, ranks)
            print(f"step {step}/{self._total}  {text}  ETA {self._eta(step)}", file=sys.stderr, flush=True)

    def _text(self, record: Mapping[str, float], ranks: int) -> str:
        tokens_per_s = record["tokens_per_s"]
        parts = [f"loss {record['loss']:.4f}", f"{tokens_per_s:,.0f} {self._targets}/s"]
        if self._mfu_per_token is not None:
            parts.append(f"MFU {100 * self._mfu_per_token * tokens_per_s / ranks:.1f} %")
        if self._condensed is not None and self._condensed.peak is not None:
            metric, spread = self._condensed.peak
            kind = "peak RSS" if metric == "peak_rss" else "peak allocated"
            worst = f" (rank {spread.worst}, skew {spread.skew:.2f})" if len(self._rows) > 1 else ""
            parts.append(f"{kind} {gib(spread.max)}{worst}")
            parts += [f"slow: rank {slow.name}" for slow in self._condensed.stragglers[:1]]
        if self._saves_s:
            parts.append(f"saves {self._saves_s:.1f} s")
        return "  ".join(parts)

    def _eta(self, step: int) -> str:
        done = max(1, step - self._first)
        left = int((time.perf_counter() - self._began) / done * (self._total - step))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"

    def close(self) -> None:
        if self._screen is not None:
            self._screen.close()


class Screen:
    """The terminal display: a bar for the run, and below it bars of the ranks with the largest peaks.

    It has no thread: the end of a step draws it, at most once in `REFRESH_S`.
    """

    def __init__(self, total: int, first: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        console = Console(stderr=True)
        columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
        self._bar = RichProgress(*columns, TextColumn("{task.description}", markup=False), console=console)
        self._task = self._bar.add_task("", total=total, completed=first)
        self._group = Group
        # Only output to this terminal is printed above the bars; redirected output stays redirected.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()
        self._drawn, self._total = 0.0, total

    def update(self, step: int, text: Callable[[], str], rows: Sequence[RankRow]) -> None:
        """Draw, unless the last drawing was just now; `text` is only called to draw."""
        now = time.perf_counter()
        if now - self._drawn < REFRESH_S and step < self._total:
            return
        self._bar.update(self._task, completed=step, description=text())
        self._live.update(self._group(self._bar, ranks_table(rows)), refresh=True)
        self._drawn = now

    def close(self) -> None:
        self._live.stop()


def ranks_table(rows: Sequence[RankRow]) -> Table:
    """One line for each of the worst ranks: its peak as a share of its device's or host's memory, and its step time."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    worst = sorted(rows, key=pressure, reverse=True)[:BARS]
    for row in sorted(worst, key=lambda row: row.identity.rank):
        used, total = pressure(row), row.host_mem.limit if row.device_mem is None else row.device_mem.total
        style = "red" if total and used >= TIGHT * total else "green"
        table.add_row(
            Text(f"rank {row.name}"),
            ProgressBar(total=total or None, completed=used, width=20, complete_style=style, finished_style=style),
            Text(f"{gib(used)} of {gib(total)}"),
            Text("" if row.step_time_s is None else f"{1e3 * row.step_time_s:.0f} ms"),
        )
    if len(rows) > BARS:
        table.add_row(Text(f"({len(rows) - BARS} more)"))
    return table
