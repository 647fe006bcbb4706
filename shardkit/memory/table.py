"""The end-of-run table of every rank's memory, and `memory.jsonl`."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import DataError
from ..files import append_jsonl
from .rows import (
    BEST,
    LABELS,
    READABLE,
    SHOWN_SINGLY,
    SLOW,
    WORST,
    RankRow,
    Spread,
    StateKind,
    gather_json,
    growing,
    pressure,
    quantized_bytes,
    summary,
)  # fmt: skip

_STATES: dict[StateKind, str] = {
    "params": "params",
    "quantized": "quantized",
    "master_params": "master",
    "grads": "grads",
    "optimizer": "optimizer",
}
_OF_A_DEVICE = ["peak allocated", "peak reserved", "retries"]
"""Columns that ranks on the CPU have no figures for: its allocator counts nothing."""
_PLAIN_WIDTH = 160


def render_table(rows: Sequence[RankRow], width: int | None = None) -> str:
    """One line per rank and a summary of one gather's rows, as text.

    `*` marks the worst rank: largest peak allocated, or largest peak RSS on the CPU. Above 16 ranks only the 8 worst
    and the 2 best have a line. Columns of a device's allocator are left out on the CPU. `–`: not known. `+…h`: bytes on
    the host beside those on the device.

    `rows`: the result of `MemoryLedger.gather`. `width`: columns; default: the terminal's, or as wide as needed,
    without colour, if stdout is not a terminal.
    """
    if not rows:
        return "no memory rows were gathered"
    terminal = sys.stdout.isatty()
    out = io.StringIO()
    console = Console(
        file=out,
        width=width if width is not None or terminal else _PLAIN_WIDTH,
        force_terminal=terminal,
        no_color=not terminal,
        highlight=False,
        emoji=False,
        markup=False,
    )
    # `soft_wrap` keeps lines whole that are longer than the console, where rich would break them.
    console.print(_fitting(rows, console), soft_wrap=True)
    for line in _summary_lines(rows):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def write_jsonl(path: str | Path, step: int, rows: Sequence[RankRow]) -> bool:
    """Append one gather's rows to `memory.jsonl`; False if the disk refused (warned about once, never fatal)."""
    return append_jsonl(path, gather_json(step, time.time(), rows))


def read_jsonl(path: str | Path) -> Iterator[tuple[int, list[RankRow]]]:
    """(step, rows) of every gather in a `memory.jsonl`."""
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                gathered = json.loads(line)
                schema = gathered["schema"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number} is not a memory record: {error}", "remove the damaged line"
                ) from error
            if schema not in READABLE:
                raise DataError(
                    f"{path}:{number} has schema {schema}, this version reads {READABLE[0]} to {READABLE[-1]}",
                    "read it with the version that wrote it",
                )
            yield gathered["step"], [RankRow.from_json(row) for row in gathered["ranks"]]


def _fitting(rows: Sequence[RankRow], console: Console) -> Table:
    """The table, without its least informative columns if it is too wide; numbers are never cut."""
    on_gpu = any(row.device_mem for row in rows)
    absent = [] if on_gpu else [*_OF_A_DEVICE]
    if not any(map(quantized_bytes, rows)):
        absent.append("quantized")
    omit: list[str] = ["host"]
    if on_gpu and not any(row.alloc_retries for row in rows):
        omit.append("retries")
    if not any(row.state and row.state["master_params"].total for row in rows):
        omit.append("master")
    for count in range(len(omit) + 1):
        table = _table(rows, [*absent, *omit[:count]])
        width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        if width <= console.width:
            break
    console.width = max(console.width, width)
    return table


def _table(rows: Sequence[RankRow], omit: Sequence[str]) -> Table:
    ordered = sorted(rows, key=pressure, reverse=True)
    shown: list[RankRow | None] = list(rows)
    if len(rows) > SHOWN_SINGLY:
        shown = [*ordered[:WORST], None, *ordered[-BEST:]]
    columns = [column for column in _columns(rows) if column[0] not in omit]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for title, unit, _ in columns:
        justify: Literal["left", "right"] = "left" if title == "host" else "right"
        table.add_column("\n".join([*title.split(), unit]).rstrip(), justify=justify, no_wrap=True)
    for row in shown:
        if row is None:
            table.add_row(f"({len(rows) - WORST - BEST}", "more)")
            continue
        rank, *cells = (cell(row) for _, _, cell in columns)
        is_worst = row is ordered[0] and len(rows) > 1
        table.add_row(f"*{rank}" if is_worst else rank, *cells, style="bold red" if is_worst else "")
    return table


def _columns(rows: Sequence[RankRow]) -> list[tuple[str, str, Callable[[RankRow], str]]]:
    """(title, unit, a row's cell) of each column. A column has one unit, so that numbers compare at a glance."""
    state = _unit(max((max(b.device, b.host) for row in rows for b in (row.state or {}).values()), default=0))
    device = _unit(max((row.device_mem.peak_reserved for row in rows if row.device_mem), default=0))
    host = _unit(max(row.host_mem.peak_rss for row in rows))
    seconds = _time_unit(max((row.step_time_s or 0.0 for row in rows), default=0.0))

    def state_cell(kind: StateKind, row: RankRow) -> str:
        n_bytes = None if row.state is None else row.state.get(kind)
        if n_bytes is None:
            return "–"
        on_host = f"{_number(n_bytes.host, state[1])}h" if n_bytes.host else ""
        if on_host and not n_bytes.device:
            return on_host
        return _number(n_bytes.device, state[1]) + (f" +{on_host}" if on_host else "")

    return [
        ("rank", "", lambda row: str(row.identity.rank)),
        ("host", "", lambda row: row.identity.host),
        *((title, state[0], partial(state_cell, kind)) for kind, title in _STATES.items()),
        ("peak allocated", device[0], lambda row: _number(getattr(row.device_mem, "peak_allocated", None), device[1])),
        ("peak reserved", device[0], lambda row: _number(getattr(row.device_mem, "peak_reserved", None), device[1])),
        ("RSS", host[0], lambda row: _number(row.host_mem.rss, host[1])),
        ("peak RSS", host[0], lambda row: _number(row.host_mem.peak_rss, host[1])),
        ("retries", "", lambda row: "–" if row.alloc_retries is None else str(row.alloc_retries)),
        ("step time", seconds[0], lambda row: _number(row.step_time_s, seconds[1])),
    ]


def _unit(largest: float) -> tuple[str, float]:
    return ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)


def _time_unit(largest_s: float) -> tuple[str, float]:
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e-3)


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "–"
    scaled = value / scale
    return f"{scaled:.2f}" if scaled < 100 else f"{scaled:.1f}"


def _summary_lines(rows: Sequence[RankRow]) -> Iterator[str]:
    condensed = summary(rows)
    if any(row.state and any(b.host for b in row.state.values()) for row in rows) and rows[0].device_mem is not None:
        yield "h: held in host memory"
    if len(rows) > 1:
        yield f"*: largest peak {'RSS' if rows[0].device_mem is None else 'allocated'}"
        for name, spread in condensed.spreads.items():
            yield _spread_line(name, spread)
    if condensed.peak is not None and len(condensed.nodes) > 1:
        metric = condensed.peak[0]
        nodes = sorted(condensed.nodes.items(), key=lambda node: -node[1][metric].max)
        for host, spreads in nodes[: SHOWN_SINGLY if len(nodes) <= SHOWN_SINGLY else WORST]:
            yield f"node {host}: {_spread_line(metric, spreads[metric])}"
        if len(nodes) > SHOWN_SINGLY:
            yield f"({len(nodes) - WORST} more nodes)"
    yield from growing(rows)
    for slow in condensed.stragglers:
        yield f"slow: rank {slow.name} is busy for {slow.ratio:.2f} × the median of a step (limit {SLOW} ×)"


def _spread_line(name: str, spread: Spread) -> str:
    unit, scale = _time_unit(spread.max) if name == "step_time_s" else _unit(spread.max)
    return (
        f"{LABELS[name] + ':':<16}max {_number(spread.max, scale)} {unit} (rank {spread.worst}), "
        f"min {_number(spread.min, scale)} {unit}, max / mean {spread.skew:.2f}"
    )
