"""Run torch's profiler over the steps of `profile.start` and `profile.steps`, and write its trace and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..config.schema import RunConfig
from ..memory.ledger import MemoryLedger
from ..memory.probe import HasState, Phases
from ..memory.rows import PhaseName
from ..memory.tracing.compat import keep_history, stacks_in_tables, write_history
from ..parallel.world import World

_RANGES: dict[PhaseName, str] = {"forward": "## forward ##", "backward": "## backward ##", "update": "## optimizer ##"}
_ROWS = 30
"""Most operators in each table."""
_STACK_DEPTH = 10
"""Callers by which operators are told apart with `profile.stack`; torch's own take about half of them."""
_HISTORY = 200_000
"""Number of events in a snapshot of the CUDA allocator."""


class Profiler:
    """Profiles some steps of a run; it does not affect the others.

    `run_dir`: the run directory; files go to its `profile/`.
    """

    def __init__(self, config: RunConfig, world: World, ledger: MemoryLedger, run_dir: Path) -> None:
        settings = self._settings = config.profile
        self._world, self._ledger, self._folder = world, ledger, run_dir / "profile"
        self._is_profiled = settings.ranks == "all" or world.rank in settings.ranks
        self._first_step = settings.start or 0
        self._last_step = self._first_step + settings.steps - 1
        self._on_cuda = world.device.type == "cuda"
        self._torch: profile | None = None
        self._tracing = False
        self._steps: list[int] = []
        self._seen: tuple[int, int] | None = None

    def before(self, step: int) -> Phases:
        """The `Phases` of `step`: the ledger, or in a profiled step this profiler, which adds ranges to the trace."""
        self._seen = (self._seen[0] if self._seen else step, step)
        if step == self._first_step and self._is_profiled:
            if self._on_cuda:
                keep_history(_HISTORY)
            self._torch = profile(
                activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_cuda,
                profile_memory=True,
                record_shapes=self._settings.record_shapes,
                with_stack=self._settings.stack,
                experimental_config=stacks_in_tables() if self._settings.stack else None,
            )
            self._torch.start()
            self._tracing = True
        if self._torch is None:
            return self._ledger
        self._steps.append(step)
        return self

    def after(self, step: int) -> None:
        """Stop tracing after the last profiled step, before an evaluation or a save."""
        if self.ends_with(step):
            self._stop()

    @contextmanager
    def phase(self, name: PhaseName, follows: bool = False) -> Iterator[None]:
        """Account a phase of a profiled step and mark it as a range in the trace."""
        with self._ledger.phase(name, follows), record_function(_RANGES[name]):
            yield

    def sample_state(self, source: HasState) -> None:
        self._ledger.sample_state(source)

    def ends_with(self, step: int) -> bool:
        """Whether this is the last profiled step, on any rank."""
        return step == self._last_step

    def finish(self) -> None:
        """Write this rank's files after the last profiled step."""
        if self._torch is not None:
            self._write(self._torch)

    def close(self, failed: bool) -> None:
        """End of the run: write the steps that were profiled, or say that there were none."""
        if self._torch is not None:
            self._stop()
            # A failed run's trace ends within a step; the allocator's history still explains an out-of-memory error.
            self._write(None if failed else self._torch)
        elif self._world.is_main and self._seen is not None and not failed:
            first_step, last_step = self._seen
            if not first_step <= self._first_step <= last_step:
                say(
                    f"profile.start={self._first_step}: nothing was profiled, "
                    f"this run did steps {first_step} to {last_step}"
                )

    def _stop(self) -> None:
        if self._tracing and self._torch is not None:
            self._tracing = False
            self._torch.stop()

    def _write(self, trace: profile | None) -> None:
        """Write the trace and its tables, if there is a trace, and on CUDA the allocator's history."""
        self._torch = None
        if trace is None and not self._on_cuda:
            return
        stem, tables = f"rank{self._world.rank}", self._folder / f"rank{self._world.rank}_tables.txt"
        try:
            self._folder.mkdir(exist_ok=True)
            if trace is not None:
                trace.export_chrome_trace(str(self._folder / f"{stem}_trace.json.gz"))
                tables.write_text(self._tables(trace), encoding="utf-8")
            if self._on_cuda:
                write_history(str(self._folder / f"{stem}_snapshot.pickle"))
        except OSError as error:  # a full disk must not end the run
            say(f"rank {self._world.rank}: the profile cannot be written: {error}")
            return
        if trace is not None and (self._world.is_main or self._settings.ranks != "all"):
            numbers = sorted({self._steps[0], self._steps[-1]})
            say(f"profiled step {'-'.join(map(str, numbers))} on rank {self._world.rank}: {tables}")

    def _tables(self, trace: profile) -> str:
        """Torch's tables of the operators that take the most time and allocate the most memory, over all its steps."""
        averages = trace.key_averages(
            group_by_input_shape=self._settings.record_shapes,
            group_by_stack_n=_STACK_DEPTH if self._settings.stack else 0,
        )
        device = self._world.device.type
        parts = [
            f"rank {self._world.rank} of {self._world.size} on {device}, torch {torch.__version__}, "
            f"steps {', '.join(map(str, self._steps))}\n"
        ]
        for title, order in (("time", f"self_{device}_time_total"), ("memory", f"self_{device}_memory_usage")):
            # torch calls every accelerator "device" in the names by which it sorts.
            table = averages.table(sort_by=order.replace("cuda", "device"), row_limit=_ROWS, max_src_column_width=120)
            parts.append(f"Operators by their own {title}\n{table}")
        return "\n".join(parts)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
