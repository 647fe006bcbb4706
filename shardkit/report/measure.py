"""The figures of a run that pages show, defined in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, Literal

from ..memory.rows import BEST, LABELS, PHASES, SHOWN_SINGLY, WORST, PhaseName, RankRow, Straggler, pressure, summary
from ..telemetry.catalog import STEP_PARTS
from .html import Unit
from .read import Gather, Run, mapping, number

STEP_PHASES: tuple[PhaseName, ...] = ("forward", "backward", "update")
UNATTRIBUTED = "unattributed"
Parts = dict[str, int]
"""Bytes by category."""


@dataclass(frozen=True)
class KeyFigure:
    """One number of a run; `remark` says on which rank, at which step or how."""

    label: str
    value: float | None
    unit: Unit
    remark: str = ""


def column(run: Run, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a field of metrics.jsonl, for the steps where it is a number."""
    pairs = [(record["step"], figure) for record in run.metrics if (figure := number(record.get(key))) is not None]
    return [step for step, _ in pairs], [figure for _, figure in pairs]


def key_figures(run: Run) -> list[KeyFigure]:
    """The key figures of a run in display order; figures that the run does not have are None."""
    steps, losses = column(run, "loss")
    best = min(zip(losses, steps, strict=True), default=None)
    _, validation = column(run, "val_loss")
    # Without the first step, which compiles and warms up.
    tokens, times = (ys[1:] or ys for _, ys in (column(run, key) for key in ("tokens_per_s", "step_time_s")))
    saves, end_saves, skipped = (column(run, key)[1] for key in ("save_s", "end_save_s", "skipped"))
    condensed = summary(run.last_rows)
    spreads = condensed.spreads
    figures = [
        KeyFigure("optimizer steps", float(steps[-1]) if steps else None, "count"),
        KeyFigure("final loss", losses[-1] if losses else None, "plain"),
        KeyFigure("best loss", best[0] if best else None, "plain", f"step {best[1]}" if best else ""),
        KeyFigure("validation loss", validation[-1] if validation else None, "plain"),
        KeyFigure(f"{run.targets} per second", median(tokens) if tokens else None, "rate", "median over steps"),
        KeyFigure("step time", median(times) if times else None, "s", "median over steps"),
        *(
            KeyFigure(label, _share_of_steps(run, key), "share", "of step time, rank 0")
            for key, label in STEP_PARTS.items()
        ),
        KeyFigure("stalled by saves", sum(saves + end_saves) if saves + end_saves else None, "s", "in all"),
    ]
    for key in ("peak_allocated", "peak_reserved", "peak_rss", "state"):
        spread = spreads.get(key)
        figures.append(
            KeyFigure(LABELS[key], spread.max if spread else None, "bytes", f"rank {spread.worst}" if spread else "")
        )
    skew = None if condensed.peak is None else condensed.peak[1].skew
    figures.append(KeyFigure("largest peak / mean peak", skew, "plain", "1: all ranks need the same memory"))
    if any(record.get("skipped") is not None for record in run.metrics):
        figures.append(KeyFigure("skipped steps", sum(skipped), "count", "no update"))
    return figures


def _share_of_steps(run: Run, key: str) -> float | None:
    """The part of step time that `key` counts, over the steps that have it: older starts of a run may lack it."""
    pairs = ((number(record.get(key)), number(record.get("step_time_s"))) for record in run.metrics)
    measured = [(part, step_s) for part, step_s in pairs if part is not None and step_s is not None]
    step_s = sum(step_s for _, step_s in measured)
    return sum(part for part, _ in measured) / step_s if step_s > 0 else None


def stragglers(run: Run) -> list[tuple[Straggler, int]]:
    """(its worst gather, number of gathers in which it was slow) for every rank that was ever slow."""
    by_rank: dict[str, list[Straggler]] = {}
    for gather in run.gathers:
        for slow in summary(gather.rows).stragglers:
            by_rank.setdefault(slow.name, []).append(slow)
    worst = [(max(times, key=lambda slow: slow.ratio), len(times)) for times in by_rank.values()]
    return sorted(worst, key=lambda entry: -entry[0].ratio)


def shown(rows: Sequence[RankRow]) -> list[RankRow]:
    """The rows to show one by one: all, or in a large world those under most and least memory pressure."""
    if len(rows) <= SHOWN_SINGLY:
        return list(rows)
    ordered = sorted(rows, key=pressure, reverse=True)
    return sorted([*ordered[:WORST], *ordered[-BEST:]], key=lambda row: row.identity.rank)


def on_gpu(run: Run) -> bool:
    return any(row.device_mem is not None for row in run.last_rows)


def interval_peak(row: RankRow, kind: Literal["allocated", "reserved", "rss"]) -> int | None:
    """The peak since the previous gather, over forward, backward, update; without these, the row's overall figure."""
    peaks = [getattr(row.phases[phase], f"peak_{kind}") for phase in STEP_PHASES if phase in row.phases]
    instead = row.host_mem.rss if kind == "rss" else getattr(row.device_mem, f"peak_{kind}", None)
    return max((peak for peak in peaks if peak is not None), default=instead)


def series(run: Run, figure: Callable[[RankRow], float | None]) -> dict[str, tuple[list[int], list[float]]]:
    """(steps, values) over the gathers by rank, for the ranks of `shown`."""
    names = {row.name for row in shown(run.last_rows)}
    by_rank: dict[str, tuple[list[int], list[float]]] = {}
    for gather in run.gathers:
        for row in gather.rows:
            if row.name in names and (measured := figure(row)) is not None:
                steps, ys = by_rank.setdefault(row.name, ([], []))
                steps.append(gather.step)
                ys.append(measured)
    return by_rank


def worst_over_time(run: Run) -> tuple[list[int], list[int]]:
    """(steps, bytes): at each gather the largest peak of any rank."""
    kind: Literal["allocated", "rss"] = "allocated" if on_gpu(run) else "rss"
    peaks = [
        (gather.step, max((p for row in gather.rows if (p := interval_peak(row, kind)) is not None), default=None))
        for gather in run.gathers
    ]
    measured = [(step, peak) for step, peak in peaks if peak is not None]
    return [step for step, _ in measured], [peak for _, peak in measured]


def phase_peaks(gathers: Sequence[Gather], rank: int) -> dict[str, int]:
    """A rank's largest peak by phase over all gathers: allocated on a GPU, RSS on the CPU."""
    peaks: dict[str, int] = {}
    for gather in gathers:
        for row in (row for row in gather.rows if row.identity.rank == rank):
            for phase, memory in row.phases.items():
                peak = memory.peak_rss if memory.peak_allocated is None else memory.peak_allocated
                peaks[phase] = max(peaks.get(phase, 0), peak)
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def parts(row: RankRow) -> dict[str, Parts]:
    """A row's memory by place and category; the rest of the peak is `unattributed`."""

    def with_rest(attributed: Parts, total: int) -> Parts:
        return {**attributed, UNATTRIBUTED: max(0, total - sum(attributed.values()))}

    state = row.state or {}
    staging = {"staging": row.host_mem.staging}
    on_device: Parts = {kind: n_bytes.device for kind, n_bytes in state.items()}
    if row.device_mem is None:
        return {"host": with_rest({**on_device, **staging}, row.host_mem.peak_rss)}
    on_host: Parts = {kind: n_bytes.host for kind, n_bytes in state.items()}
    return {
        "device": with_rest(on_device, row.device_mem.peak_allocated),
        "host": with_rest({**on_host, **staging}, row.host_mem.peak_rss),
    }


def state_alone(locations: dict[str, Parts]) -> dict[str, Parts]:
    """`parts` without the unattributed rest."""
    return {
        location: {kind: n for kind, n in parts.items() if kind != UNATTRIBUTED}
        for location, parts in locations.items()
    }


@dataclass(frozen=True)
class RankStepTime:
    """One rank's mean step in seconds: total, waiting for data, and in forward."""

    total: float
    data: float
    forward: float

    @property
    def remainder(self) -> float:
        return max(0.0, self.total - self.data - self.forward)


def last_start(run: Run) -> list[Gather]:
    """The gathers of the run's last start, which may have other ranks than earlier ones."""
    try:
        began = datetime.strptime(str(run.environment.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        began = None
    recent = [gather for gather in run.gathers if began is not None and gather.time >= began] or list(run.gathers)
    # Without the time of the start, a step that does not grow or another number of ranks shows where it began.
    start = len(recent) - 1
    alike = [len(gather.rows) == len(recent[-1].rows) for gather in recent]
    while start > 0 and alike[start - 1] and recent[start - 1].step < recent[start].step:
        start -= 1
    return recent[max(start, 0) :]


def step_times(run: Run) -> dict[int, RankStepTime]:
    """Mean step by rank in the run's last start, over all gathers but its first, which includes one-time work."""
    by_rank: dict[int, list[tuple[float, float, float]]] = {}
    gathers = last_start(run)
    for gather in gathers[1:] or gathers:
        for row in gather.rows:
            if row.step_time_s is not None:
                waiting = row.data_wait_s or 0.0
                # Without a time of its own work, a rank's `busy_s` is its whole step, which says nothing of forward.
                forward = max(0.0, (row.busy_s or 0.0) - waiting) if row.busy_s != row.step_time_s else 0.0
                by_rank.setdefault(row.identity.rank, []).append((row.step_time_s, waiting, forward))
    means = {rank: [sum(v) / len(v) for v in zip(*figures, strict=True)] for rank, figures in by_rank.items()}
    return {rank: RankStepTime(*figures) for rank, figures in means.items()}


def status(run: Run) -> tuple[bool, str]:
    """(whether all is well, in words: the run's progress, and what ended it if it failed)."""
    if rehearsed := mapping(run.environment.get("rehearsed")):
        return rehearsed.get("fits") is True, f"rehearsed on emulated cards: {rehearsed.get('reason')}"
    last_step = run.metrics[-1]["step"] if run.metrics else 0
    max_steps = run.setting("train.max_steps")
    if run.setting("train.epochs") is not None:  # the data decide
        max_steps = run.environment.get("last_step")
    if isinstance(max_steps, int) and last_step >= max_steps:
        return True, f"finished {last_step} of {max_steps} steps"
    so_far = f"step {last_step} of {max_steps}" if max_steps is not None else f"step {last_step}"
    # The run may have continued after host memory ran low or after an earlier start failed.
    real = {rank: record for rank, record in run.ooms.items() if record.get("kind") != "host-risk"}
    ooms = [rank for rank, record in real.items() if (number(record.get("step")) or last_step) >= last_step]
    if ooms:
        return False, f"out of memory on rank {', '.join(map(str, ooms))} at {so_far}"
    if run.failures:
        rank, message = run.failures[0]
        return False, f"failed at {so_far}: rank {rank}: {message}"
    return False, f"not finished: {so_far}"


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config as a flat dict with dotted names."""
    sections = ((section, values) for section, values in config.items() if isinstance(values, dict))
    return {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
