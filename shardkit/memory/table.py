"""The end-of-run table of every rank's memory, and `memory.jsonl`."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import DataError
from ..files import append_jsonl
from .rows import READABLE, RankRow, StateBytes, StateKind, gather_json, quantized_bytes
from .spread import BEST, LABELS, SHOWN_SINGLY, SLOW, WORST, Spread, Summary, pressure, summary

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

    Args:
        rows: the result of `MemoryLedger.gather`.
        width: columns; default: the terminal's, or as wide as needed, without colour, if stdout is not a terminal.
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
    console.print(_fitting(rows, console), soft_wrap=True)
    for line in _summary_lines(rows):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def write_jsonl(path: str | Path, step: int, rows: Sequence[RankRow]) -> bool:
    """Append one gather's rows to `memory.jsonl`; False if the disk refused (warned about once, never fatal).

    Raises:
        ConfigError: the file cannot be opened for writing.
    """
    return append_jsonl(path, gather_json(step, time.time(), rows))


def read_jsonl(path: str | Path) -> Iterator[tuple[int, list[RankRow]]]:
    """(step, rows) of every gather in a `memory.jsonl`.

    Raises:
        DataError: a line is not JSON, or this version does not know its schema.
    """
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
    table = _table(rows, absent)
    for count in range(1, len(omit) + 1):
        if _width(table, console) <= console.width:
            break
        table = _table(rows, [*absent, *omit[:count]])
    console.width = max(console.width, _width(table, console))
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _table(rows: Sequence[RankRow], omit: Sequence[str]) -> Table:
    units = _Units(rows)
    ordered = sorted(rows, key=pressure, reverse=True)
    worst = ordered[0]
    shown: list[RankRow | None] = list(rows)
    if len(rows) > SHOWN_SINGLY:
        shown = [*ordered[:WORST], None, *ordered[-BEST:]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    headers = units.headers()
    for title, unit in headers:
        if title not in omit:
            justify: Literal["left", "right"] = "left" if title == "host" else "right"
            table.add_column("\n".join([*title.split(), unit]).rstrip(), justify=justify, no_wrap=True)
    for row in shown:
        if row is None:
            gap = [f"({len(rows) - WORST - BEST}", "more)"]
            table.add_row(*gap)
            continue
        marked = row is worst and len(rows) > 1
        cells = units.cells(row, "*" if marked else "")
        shown_cells = (cell for (title, _), cell in zip(headers, cells, strict=True) if title not in omit)
        table.add_row(*shown_cells, style="bold red" if marked else "")
    return table


class _Units:
    """One unit per column, so that numbers compare at a glance."""

    def __init__(self, rows: Sequence[RankRow]) -> None:
        state = max((max((b.device, b.host)) for row in rows if row.state for b in row.state.values()), default=0)
        device = max((row.device_mem.peak_reserved for row in rows if row.device_mem), default=0)
        host = max(row.host_mem.peak_rss for row in rows)
        self._state, self._device, self._host = _unit(state), _unit(device), _unit(host)
        slowest = max((row.step_time_s for row in rows if row.step_time_s is not None), default=0.0)
        self._time = ("s", 1.0) if slowest >= 10 else ("ms", 1e-3)

    def headers(self) -> list[tuple[str, str]]:
        state, device, host = self._state[0], self._device[0], self._host[0]
        return [
            ("rank", ""),
            ("host", ""),
            *((label, state) for label in _STATES.values()),
            ("peak allocated", device),
            ("peak reserved", device),
            ("RSS", host),
            ("peak RSS", host),
            ("retries", ""),
            ("step time", self._time[0]),
        ]

    def cells(self, row: RankRow, mark: str) -> list[str]:
        device, host = row.device_mem, row.host_mem
        return [
            f"{mark}{row.identity.rank}",
            row.identity.host,
            *(self._state_cell(None if row.state is None else row.state.get(kind)) for kind in _STATES),
            _number(None if device is None else device.peak_allocated, self._device[1]),
            _number(None if device is None else device.peak_reserved, self._device[1]),
            _number(host.rss, self._host[1]),
            _number(host.peak_rss, self._host[1]),
            "–" if row.alloc_retries is None else str(row.alloc_retries),
            _number(row.step_time_s, self._time[1]),
        ]

    def _state_cell(self, n_bytes: StateBytes | None) -> str:
        if n_bytes is None:
            return "–"
        scale = self._state[1]
        on_host = f"{_number(n_bytes.host, scale)}h" if n_bytes.host else ""
        if not on_host or n_bytes.device:
            return _number(n_bytes.device, scale) + (f" +{on_host}" if on_host else "")
        return on_host


def _unit(largest: float) -> tuple[str, float]:
    return ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)


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
        yield from _node_lines(condensed)
    for slow in condensed.stragglers:
        yield f"slow: rank {slow.name} is busy for {slow.ratio:.2f} × the median of a step (limit {SLOW} ×)"


def _node_lines(condensed: Summary) -> Iterator[str]:
    """A line per node if there are several, or for the worst nodes if there are many."""
    if condensed.peak is None or len(condensed.nodes) < 2:
        return
    metric = condensed.peak[0]
    nodes = sorted(condensed.nodes.items(), key=lambda node: -node[1][metric].max)
    for host, spreads in nodes[: SHOWN_SINGLY if len(nodes) <= SHOWN_SINGLY else WORST]:
        yield f"node {host}: {_spread_line(metric, spreads[metric])}"
    if len(nodes) > SHOWN_SINGLY:
        yield f"({len(nodes) - WORST} more nodes)"


def _spread_line(name: str, spread: Spread) -> str:
    unit, scale = (("s", 1.0) if spread.max >= 10 else ("ms", 1e-3)) if name == "step_time_s" else _unit(spread.max)
    return (
        f"{LABELS[name] + ':':<16}max {_number(spread.max, scale)} {unit} (rank {spread.worst}), "
        f"min {_number(spread.min, scale)} {unit}, max / mean {spread.skew:.2f}"
    )
