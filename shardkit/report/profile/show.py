"""A run's profile: read from its files, and printed by `shardkit profile`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError, gib, printable
from ...files import parse_json, read_regular
from .account import CATEGORIES
from .chrome_trace import OUTSIDE, PHASES

FOLDER = "profile"
SCHEMA = 1
"""Version of `rank{r}_summary.json`; raised when a field changes its meaning or goes away."""


def read_summaries(run_dir: Path) -> list[dict[str, Any]]:
    """Every profiled rank's summary, the one with the largest peak first.

    Raises:
        DataError: no such directory, a run without a profile, or an invalid summary file.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a directory", "pass the run.dir of a run")
    paths = sorted((run_dir / FOLDER).glob("rank*_summary.json"))
    if not paths:
        raise DataError(
            f"{run_dir} holds no profile", "train with profile.start=STEP, a step of the run (later than the first)"
        )
    summaries = [_read(path) for path in paths]
    return sorted(summaries, key=lambda summary: (-summary["peak"]["bytes"], summary["rank"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        summary = parse_json(read_regular(path))
        schema = summary["schema"]
        if schema == SCHEMA:
            summary["files"] = {name: str(path.parent / file) for name, file in summary["files"].items()}
            show("", [summary])  # another program may have written it: refuse here what cannot be shown
            compare(("", ""), (summary, summary))
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}: {printable(error)}", "profile the run again"
        ) from error
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema}, this version reads {SCHEMA}", "profile the run again")
    return dict(summary)


Summary = Mapping[str, Any]
TOP = 8


def show(name: str, ranks: Sequence[Summary]) -> str:
    """One run in text: the first of `ranks` (the largest peak) in full, the peaks of the others."""
    return "\n".join(line.rstrip() for line in _single(name, ranks))


def compare(names: tuple[str, str], runs: tuple[Summary, Summary]) -> str:
    """Two runs side by side, one rank of each, with the changes from the first to the second."""
    return "\n".join(line.rstrip() for line in _two(names, runs))


def _single(name: str, ranks: Sequence[Summary]) -> Iterator[str]:
    worst = ranks[0]
    yield f"{name}: {_who(worst)}"
    if len(ranks) > 1:
        yield "peaks: " + ", ".join(f"rank {s['rank']} {gib(s['peak']['bytes'])}" for s in ranks[:TOP])
    peak = worst["peak"]
    yield ""
    yield f"peak: {gib(peak['bytes'])} on {worst['device']}, in {peak['phase']} of step {peak['step']}"
    shares = [[c, gib(n), _share(n, peak["bytes"])] for c, n in peak["categories"].items() if n]
    yield from _table([], shares, "<>>")
    yield "  most of it made by:"
    live = [[e["op"], e["phase"], e["category"], gib(e["bytes"])] for e in peak["live"][:4]]
    yield from _table([], live, "<<<>")
    made = worst["allocations"]
    if made:
        top = made[0]
        yield ""
        yield f"{top['op']} allocates the most: {gib(top['bytes'])} a step in {top['phase']}, {top['count']:g} times"
        rows = [
            [e["op"], e["phase"], f"{e['count']:g}", gib(e["bytes"]), gib(e["largest"]), e["where"] or ""]
            for e in made[:TOP]
        ]
        yield from _table(["by", "in", "count", "bytes/step", "largest", ""], rows, "<<>>><")
    yield from _times(worst)
    yield ""
    yield "files:"
    for kind, path in worst["files"].items():
        yield f"  {path}{_HINT.get(kind, '')}"


_HINT = {
    "trace": "   (open in ui.perfetto.dev)",
    "memory": "   (open in a browser)",
    "snapshot": "   (open in pytorch.org/memory_viz)",
}


def _times(summary: Summary) -> Iterator[str]:
    key = "device_us" if any(op["device_us"] for ops in summary["ops"].values() for op in ops) else "self_us"
    for phase in (*PHASES, OUTSIDE):
        ops, took = summary["ops"][phase], summary["phases"][phase]["ms"]
        if took is None or not ops:
            continue
        yield ""
        yield f"{phase}: {took:.2f} ms a step; most {'device' if key == 'device_us' else 'self'} time:"
        rows = [[op["op"], f"{op['count']:g}", f"{op[key] / 1e3:.3f} ms"] for op in ops[: TOP // 2]]
        yield from _table([], rows, "<>>")


def _two(names: tuple[str, str], runs: tuple[Summary, Summary]) -> Iterator[str]:
    for label, name, run in zip("AB", names, runs, strict=True):
        yield f"{label}: {name}: {_who(run)}"
    differing = [key for key in runs[0]["settings"] if runs[0]["settings"][key] != runs[1]["settings"].get(key)]
    for key in differing:
        yield f"  {key}: {runs[0]['settings'][key]} | {runs[1]['settings'].get(key)}"
    yield ""
    before, after = runs[0]["peak"], runs[1]["peak"]
    yield f"peak: A in {before['phase']}, B in {after['phase']}"
    held = {c: (before["categories"].get(c, 0), after["categories"].get(c, 0)) for c in CATEGORIES}
    rows = [
        [c, *_change(*held[c]), _share(held[c][0], before["bytes"]), _share(held[c][1], after["bytes"])]
        for c in CATEGORIES if any(held[c])
    ]  # fmt: skip
    rows.append(["all", *_change(before["bytes"], after["bytes"]), "", ""])
    yield from _table(["", "A", "B", "change", "of A", "of B"], rows, "<>>>>>")
    yield ""
    yield "allocated per step:"
    made = [{(e["op"], e["phase"]): e["bytes"] for e in run["allocations"]} for run in runs]
    keys = sorted({*made[0], *made[1]}, key=lambda k: -max(made[0].get(k, 0), made[1].get(k, 0)))[: 2 * TOP]
    rows = [[op, phase, *_change(made[0].get((op, phase), 0), made[1].get((op, phase), 0))] for op, phase in keys]
    yield from _table(["by", "in", "A", "B", "change"], rows, "<<>>>")
    yield ""
    yield "time per step:"
    took = [[run["phases"][phase]["ms"] for run in runs] for phase in PHASES]
    rows = [[phase, f"{a:.2f} ms", f"{b:.2f} ms", _percent(a, b)] for phase, (a, b) in zip(PHASES, took, strict=True)]
    yield from _table(["", "A", "B", "change"], rows, "<>>>")


def _who(summary: Summary) -> str:
    steps = summary["steps"]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"rank {summary['rank']} of {summary['world_size']}, {span}, {summary['settings']['parallel.strategy']}"


def _change(before: float, after: float) -> list[str]:
    return [gib(before) if before else "–", gib(after) if after else "–", _percent(before, after)]


def _percent(before: float, after: float) -> str:
    return f"{100 * (after - before) / before:+.1f} %" if before else ("new" if after else "")


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else ""


def _table(head: list[str], rows: list[list[str]], align: str) -> Iterator[str]:
    """Indented columns; `align` has `<` or `>` for each column."""
    lines = [head, *rows] if head else rows
    widths = [max(len(line[i]) for line in lines) for i in range(len(align))] if lines else []
    for line in lines:
        yield "  " + "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(line, align, widths, strict=True))
