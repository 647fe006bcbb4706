"""Rank 0's records of each step: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, gib, importing
from ..files import append_jsonl, extend_last_line
from ..memory.rows import SHOWN_SINGLY, RankRow, Summary, pressure, summary
from .catalog import STEP_PARTS

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table


_LOG = logging.getLogger(__name__)
BOARD_S = 5.0
"""Seconds of steps that go to TensorBoard together: one by one, each would wake its writer's thread."""
_QUEUE = 10_000
"""Events that TensorBoard's writer takes at once; with its default of 10, the step would wait for its thread."""


def targets_called(task: object, factory: object) -> str:
    """The word for the targets that a task's loss averages over; more specific only for built-in tasks."""
    if factory is not None:
        return "targets"
    return "samples" if task in ("image_classification", "super_resolution") else "tokens"


class MetricsWriter:
    """Appends one JSON object per optimizer step; TensorBoard gets the same numbers and every gather's memory.

    `catalog.METRICS` lists the fields of a step's object. A number that is not finite is written as null.

    `wandb_project`: also log to this Weights & Biases project; the run keeps its id when it is resumed. `settings`: the
    run's config for Weights & Biases. `steps_before`: steps that the resumed run has already recorded; TensorBoard
    drops later ones.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        steps_before: int = 0,
        wandb_project: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._wandb = None if wandb_project is None else _start_wandb(run_dir, wandb_project, settings or {})
        self._purge_step = steps_before + 1 if steps_before else None
        self._path = run_dir / "metrics.jsonl"
        self._tensorboard_dir = run_dir / "tensorboard" if tensorboard else None
        self._board: Any = None
        self._events: list[tuple[float, int, Mapping[str, float], Mapping[str, str]]] = []
        """For TensorBoard: the time in seconds since 1970, the step, its numbers and texts."""
        self._shown = 0.0

    def write(self, record: dict[str, float]) -> None:
        clean = {k: v if math.isfinite(v) else None for k, v in record.items()}
        append_jsonl(self._path, clean)
        step, figures = int(record["step"]), {f"train/{k}": v for k, v in record.items() if k != "step"}
        if self._wandb is not None:
            self._wandb.log(figures, step=step)
        if self._tensorboard_dir is not None:
            self._picture(figures, step)

    def write_samples(self, texts: Sequence[Mapping[str, Any]]) -> None:
        """Append texts of an evaluation to `samples.jsonl` ("step", "prompt", "text", "tokens"), and to TensorBoard."""
        if not texts:
            return
        append_jsonl(self._path.with_name("samples.jsonl"), *texts)
        if self._tensorboard_dir is not None:
            shown = {f"samples/{i}": f"{text['prompt']} **→** {text['text']}" for i, text in enumerate(texts)}
            self._picture({}, int(texts[0]["step"]), shown)

    def ended(self, late_fields: Mapping[str, float]) -> None:
        """Add to the last step's object what is known only at the run's end."""
        extend_last_line(self._path, late_fields)

    def flush(self) -> None:
        """Write TensorBoard's events to disk, for a save: a run that is resumed from it does not repeat their steps."""
        if self._events or self._board is not None:
            self._show(flush=True)

    def _picture(self, scalars: Mapping[str, float], step: int, texts: Mapping[str, str] | None = None) -> None:
        self._events.append((time.time(), step, scalars, texts or {}))
        is_later = self._board is not None or step > self._events[0][1]  # the first step does not wait for the import
        if is_later and time.perf_counter() - self._shown >= BOARD_S:
            self._show()

    def _show(self, flush: bool = False) -> None:
        """Hand the events to TensorBoard, which writes them within two minutes, or now."""
        events, self._events, self._shown = self._events, [], time.perf_counter()
        try:
            for event in events:
                self._add(*event)
            if flush:
                self._board.flush()
        except OSError as error:  # a full disk ends the plots, not the run
            _LOG.warning("no more TensorBoard events%s: %s", f" from step {events[0][1]} on" if events else "", error)
            self._tensorboard_dir = self._board = None

    def _add(self, moment: float, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        if self._board is None:  # the import takes most of a second
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._tensorboard_dir), purge_step=self._purge_step, max_queue=_QUEUE)
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: `add_scalar` makes one of each, which takes the step's thread and the writer's longer.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
        self._board.file_writer.add_summary(Summary(value=values), step, moment)
        for name, text in texts.items():
            self._board.add_text(name, text, step, moment)

    def write_memory(self, step: int, rows: Sequence[RankRow]) -> None:
        """Write each gather's spread to TensorBoard, and each rank's peak unless the world is large."""
        if self._tensorboard_dir is None or not rows:
            return
        condensed = summary(rows)
        scalars = {
            f"memory/{name}/{key}": getattr(spread, key)
            for name, spread in condensed.spreads.items()
            for key in ("max", "min", "skew")
        }
        if condensed.peak is not None and len(rows) <= SHOWN_SINGLY:
            scalars |= {f"memory_of_rank/{condensed.peak[0]}/{row.identity.rank}": pressure(row) for row in rows}
        self._picture(scalars, step)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._events:
            self._show()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                _LOG.warning("the last TensorBoard events are lost: %s", error)


def _start_wandb(run_dir: Path, project: str, settings: dict[str, Any]) -> Any:
    """A Weights & Biases run whose id is kept in the run directory."""
    fix = "pip install 'shardkit[wandb]', or remove logging.wandb_project"
    with importing(f"logging.wandb_project={project} needs wandb", fix):
        import wandb
    id_file = run_dir / "wandb" / "run_id"
    run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
    try:
        run = wandb.init(
            project=project, dir=str(run_dir), id=run_id, resume="allow", config=settings, name=run_dir.name
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(
            f"logging.wandb_project={project}: {error}",
            "log in with `wandb login`, set WANDB_MODE=offline, or remove logging.wandb_project",
        ) from error
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run_id + "\n")
    return run


# Rank 0's progress display: bars on a terminal, else a line on stdout every few steps.

LINE_S = 30.0
"""Longest pause in seconds between two lines without a terminal, if steps end meanwhile."""
REFRESH_S = 1.0
"""Least seconds between two drawings of a terminal."""
BARS = 8
"""At most this many ranks get a bar: those with the largest peaks."""
TIGHT = 0.9
"""A rank's bar turns red at this share of its memory."""


class RunProgress:
    """Shows loss, throughput, MFU if the GPU's peak is known, the ranks' memory, seconds spent on saves,
    and the remaining time.

    `total`: the last step; `None`: unknown. `steps_before`: steps that were taken before. `every`: steps between two
    lines where stdout or stderr is no terminal, fewer if they take long; `None`: a terminal alone is written to, and
    only while nothing else draws bars there.
    """

    def __init__(
        self,
        total: int | None,
        steps_before: int,
        every: int | None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        targets: str = "tokens",
    ) -> None:
        self._targets = targets
        self._total, self._every = total, every
        self._mfu_per_token = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._began, self._steps_before = time.perf_counter(), steps_before
        self._saves_s = 0.0
        self._rows: Sequence[RankRow] = ()
        self._condensed: Summary | None = None
        self._last_line_at = time.perf_counter()
        self._drawn = -math.inf
        self._bar: Progress | None = None
        self._live: Live | None = None
        if draws_bars():
            from rich.console import Console
            from rich.live import Live

            # No thread refreshes it: that would compete with the step for the interpreter.
            self._live = Live(console=Console(file=sys.stderr), auto_refresh=False)

    def update(self, record: Mapping[str, float], ranks: int, rows: Sequence[RankRow]) -> None:
        """Show a step's record; `rows` come from the last gather."""
        step = int(record["step"])
        self._saves_s += record.get("save_s", 0.0)
        if rows is not self._rows:
            self._rows, self._condensed = rows, summary(rows) if rows else None
        if self._live is not None:
            self._draw(self._live, step, record, ranks)
            return
        now = time.perf_counter()
        ends = step in (self._steps_before + 1, self._total)
        if self._every is not None and (ends or step % self._every == 0 or now - self._last_line_at >= LINE_S):
            self._last_line_at = now
            steps_taken = max(1, step - self._steps_before)
            seconds_left = int((now - self._began) / steps_taken * ((self._total or step) - step))
            eta = f"{seconds_left // 3600}:{seconds_left // 60 % 60:02d}:{seconds_left % 60:02d}"
            print(f"step {step}/{self._total}  {self._text(record, ranks)}  ETA {eta}", flush=True)

    def _text(self, record: Mapping[str, float], ranks: int) -> str:
        parts = [f"loss {record['loss']:.4f}"] if "loss" in record else []
        tokens_per_s, processed = record.get("tokens_per_s"), record.get("positions_per_s", 0.0)
        if tokens_per_s is None:
            parts.append(f"{1e3 * record['step_time_s']:,.0f} ms a step")
        else:
            parts.append(f"{tokens_per_s:,.0f} {self._targets}/s")
            if tokens_per_s < 0.995 * processed:
                parts[-1] += f" in the loss ({processed:,.0f} with prompts and padding)"
        if self._mfu_per_token is not None and tokens_per_s is not None:
            parts.append(f"MFU {100 * self._mfu_per_token * tokens_per_s / ranks:.1f} %")
        if self._condensed is not None and self._condensed.peak is not None:
            metric, spread = self._condensed.peak
            kind = "peak RSS" if metric == "peak_rss" else "peak allocated"
            worst = f" (rank {spread.worst}, {spread.skew:.2f} × the mean)" if len(self._rows) > 1 else ""
            parts.append(f"{kind} {gib(spread.max)}{worst}")
            parts += [f"slow: rank {slow.name}" for slow in self._condensed.stragglers[:1]]
        if self._saves_s:
            parts.append(f"saves {self._saves_s:.1f} s")
        return "  ".join(parts)

    def _draw(self, live: Live, step: int, record: Mapping[str, float], ranks: int) -> None:
        """A bar for the run, and below it the parts of a step and bars of the ranks with the largest peaks."""
        from rich.console import Group
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        now = time.perf_counter()
        if now - self._drawn < REFRESH_S and step != self._total:
            return
        self._drawn = now
        # A loop that is watched may have bars of its own, which two displays on one terminal would tear apart.
        if self._every is None and _tqdm_draws():
            live.stop()
            return
        if self._bar is None:
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(), text)
            self._bar.add_task("", total=self._total, completed=self._steps_before)
        self._bar.update(self._bar.task_ids[0], completed=step, description=self._text(record, ranks))
        live.start()  # not earlier: while it is started, print and logging go through it
        live.update(Group(self._bar, Text(parts_of(record)), ranks_table(self._rows)), refresh=True)

    def close(self) -> None:
        """Leave the last bars on the terminal."""
        if self._live is not None:
            self._live.stop()


def draws_bars() -> bool:
    """Whether progress is bars on a terminal: neither stdout nor stderr goes to a file or a pipe."""
    return sys.stderr.isatty() and sys.stdout.isatty()


def _tqdm_draws() -> bool:
    """Whether a bar of tqdm is open in this process."""
    module = sys.modules.get("tqdm")
    kinds = [] if module is None else [module.tqdm]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return any(kind.monitor is not None and kind.monitor.get_instances() for kind in kinds)


def parts_of(record: Mapping[str, float]) -> str:
    """A step's time and its parts: `step 412 ms: waiting for data 2 %, forward 31 %, backward 58 %, update 9 %`."""
    if "forward_s" not in record:
        return ""
    step_s = record["step_time_s"]
    parts = [f"{name} {record[key] / step_s:.0%}".replace("%", " %") for key, name in STEP_PARTS.items()]
    return f"step {1e3 * step_s:,.0f} ms: {', '.join(parts)}"


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
