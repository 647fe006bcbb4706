"""Run torch's profiler over the steps of `profile.start` and `profile.steps`, and write its results."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..config.schema import RunConfig
from ..memory.ledger import MemoryLedger
from ..memory.phases import Phases
from ..memory.rows import PhaseName
from ..memory.state import HasState, local_tensors, weight_state
from ..memory.tracing.compat import keep_history, write_history
from ..parallel.world import World
from ..report.profile.account import STATE, Snapshot, account, summarise
from ..report.profile.chrome_trace import RANGES, read_trace
from ..report.profile.show import FOLDER, SCHEMA
from ..report.profile.timeline import render
from ..strategies import Strategy

_RANGE = {phase: name for name, phase in RANGES.items()}
_PHASE: dict[PhaseName, str] = {"forward": "forward", "backward": "backward", "update": "optimizer"}
_HISTORY = 200_000
"""Number of events in a snapshot of the CUDA allocator."""


class Profiler:
    """Profiles some steps of a run; it does not affect the others.

    Args:
        run_dir: the run directory; files go to its `profile/`.
    """

    def __init__(
        self, config: RunConfig, world: World, strategy: Strategy, ledger: MemoryLedger, run_dir: Path
    ) -> None:
        ranks = config.profile.ranks
        self._config, self._world, self._folder = config, world, run_dir / FOLDER
        self._strategy, self._ledger = strategy, ledger
        self._is_profiled = ranks == "all" or world.rank in ranks
        self._first_step = config.profile.start or 0
        self._last_step = self._first_step + config.profile.steps - 1
        self._torch: profile | None = None
        self._tracing = False
        self._steps: list[int] = []
        self._seen: tuple[int, int] | None = None
        self._snapshots: list[Snapshot] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._in_use: int | None = None

    def before(self, step: int) -> Phases:
        """The `Phases` of `step`: the ledger, or in a profiled step this profiler, which adds ranges to the trace."""
        self._seen = (self._seen[0] if self._seen else step, step)
        if step == self._first_step and self._is_profiled:
            self._start()
        if self._torch is None:
            return self._ledger
        self._steps.append(step)
        return self

    def after(self, step: int) -> None:
        """Stop tracing after the last profiled step, before an evaluation or a save."""
        if self.ends_with(step) and self._torch is not None:
            self._stop()

    @contextmanager
    def phase(self, name: PhaseName, follows: bool = False) -> Iterator[None]:
        """Account a phase of a profiled step and mark it as a range in the trace."""
        with self._ledger.phase(name, follows), record_function(_RANGE[_PHASE[name]]):
            yield
        self._look(_PHASE[name])

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
            if failed:
                self._keep_history()  # useful after an out-of-memory error; the trace has no whole step
            else:
                self._write(self._torch)
        elif self._world.is_main and self._seen is not None and not failed:
            first_step, last_step = self._seen
            if not first_step <= self._first_step <= last_step:
                say(
                    f"profile.start={self._first_step}: nothing was profiled, "
                    f"this run did steps {first_step} to {last_step}"
                )

    @property
    def _on_cuda(self) -> bool:
        return self._world.device.type == "cuda"

    def _start(self) -> None:
        settings = self._config.profile
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_cuda
        if self._on_cuda:
            keep_history(_HISTORY)
            self._in_use = torch.cuda.memory_allocated(self._world.device)
        self._look("start")
        self._torch = profile(
            activities=activities, profile_memory=True, record_shapes=settings.record_shapes, with_stack=settings.stack
        )
        self._torch.start()
        self._tracing = True

    def _stop(self) -> None:
        if self._tracing and self._torch is not None:
            self._tracing = False
            self._torch.stop()

    def _look(self, after: str) -> None:
        """Note the current addresses of state. Gathered parameters count if the model still holds them."""
        gone = [address for address, storage in self._storages.items() if storage() is None]
        for address in gone:
            del self._storages[address]
        storages: dict[int, tuple[str, int]] = {}
        state = self._strategy.state_tensors()
        gathered = chain.from_iterable(map(weight_state, self._strategy.model.parameters()))
        for kind, tensor in chain(state, gathered):
            for local in local_tensors(tensor):
                storage = local.untyped_storage()
                if local.device.type != self._world.device.type or storage.nbytes() == 0:
                    continue
                earlier = storages.get(storage.data_ptr())
                if earlier is None or STATE.index(kind) < STATE.index(earlier[0]):
                    storages[storage.data_ptr()] = (kind, storage.nbytes())
                    self._storages.setdefault(storage.data_ptr(), weakref.ref(storage))
        self._snapshots.append(Snapshot(after, storages, frozenset(gone)))

    def _keep_history(self) -> None:
        self._torch = None
        try:
            self._save_allocator_history()
        except OSError as error:
            say(f"rank {self._world.rank}: the allocator's history cannot be written: {error}")

    def _write(self, traced: profile) -> None:
        self._torch = None
        try:
            files = self._write_files(traced)
        except OSError as error:  # a full disk must not end the run
            say(f"rank {self._world.rank}: the profile cannot be written: {error}")
            return
        if self._world.is_main or self._config.profile.ranks != "all":
            numbers = sorted({self._steps[0], self._steps[-1]})
            say(f"profiled step {'-'.join(map(str, numbers))} on rank {self._world.rank}: {files['memory']}")

    def _write_files(self, traced: profile) -> dict[str, str]:
        self._folder.mkdir(exist_ok=True)
        stem, device = f"rank{self._world.rank}", self._world.device.type
        trace = self._folder / f"{stem}_trace.json.gz"
        traced.export_chrome_trace(str(trace))
        accounts = account(read_trace(trace, device), self._snapshots, self._in_use)
        files = {"trace": trace.name, "memory": f"{stem}_memory.html"}
        if self._save_allocator_history():
            files["snapshot"] = f"{stem}_snapshot.pickle"
        summary = {**self._identity(), **summarise(accounts, self._steps), "files": files}
        (self._folder / files["memory"]).write_text(render(accounts, summary), encoding="utf-8")
        (self._folder / f"{stem}_summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        return {name: str(self._folder / file) for name, file in files.items()}

    def _identity(self) -> dict[str, Any]:
        config = self._config
        return {
            "schema": SCHEMA,
            "rank": self._world.rank,
            "world_size": self._world.size,
            "device": self._world.device.type,
            "torch": torch.__version__,
            "settings": {
                "parallel.strategy": config.parallel.strategy,
                "precision.mode": config.precision.mode,
                "activation.policy": config.activation.policy,
                "train.micro_batch_size": config.train.micro_batch_size,
            },
        }

    def _save_allocator_history(self) -> bool:
        """On CUDA, write every allocation with its Python stack (pytorch.org/memory_viz); returns whether it did."""
        if not self._on_cuda:
            return False
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank{self._world.rank}_snapshot.pickle"
        return write_history(str(path))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
