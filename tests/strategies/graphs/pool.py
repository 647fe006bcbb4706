"""Ranks that are started once and train one model after the other; ranks that hang or fail are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.ranks import _context, _end, _Job, _main

from .engines import Report

PREPARED_IN_S, GRACE_S = 300.0, 30.0
"""Longest wait beyond a payload's limit for processes that start and for DeepSpeed's CPU optimizer, which is compiled
when it is first used; and the wait for the other ranks once one rank has failed. A busy machine may leave a rank
waiting for many seconds before it says that it refuses, as the others do."""


class Pool:
    """`world` ranks in one process group.

    Attributes:
        limit_s: longest time of a payload before its ranks count as hanging.
        stacks: where the ranks stood that did not report on the last failed payload.
        starts: how often ranks were started.
    """

    def __init__(self, world: int, limit_s: float = 40.0) -> None:
        self.world, self.limit_s = world, limit_s
        self.starts = 0
        self.stacks = ""
        self._compiled = False
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._fresh = True

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, payload: Any) -> list[Report | None]:
        """Every rank's report of a payload; None for a rank that did not send one in time.

        A payload pickles; `run(curve)` appends each step's loss and norm; `compiles`: it needs DeepSpeed's CPU
        optimizer.
        """
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send(payload)
        prepares = self._fresh or (payload.compiles and not self._compiled)
        reports = self._collect(time.monotonic() + self.limit_s + (PREPARED_IN_S if prepares else 0.0))
        self._fresh, self._compiled = False, self._compiled or payload.compiles
        if any(report is None or not report.clean for report in reports):
            self.stacks = self._stacks() if None in reports else ""
            self.stop()  # a rank that has failed may have left messages behind
        return reports

    def _collect(self, deadline: float) -> list[Report | None]:
        reports: list[Report | None] = [None] * self.world
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    reports[rank] = report = pipe.recv()
                except (EOFError, OSError):
                    report = reports[rank] = Report([], f"rank {rank} died", clean=False)
                if report is not None and report.error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return reports

    def _start(self) -> None:
        self.starts += 1
        self._fresh = True
        self._folder = tempfile.TemporaryDirectory(prefix="graphs-")
        ends = [Pipe() for _ in range(self.world)]
        self._pipes = [end for end, _ in ends]
        theirs = [end for _, end in ends]
        context = _context(None, False)
        kwargs = {"pipes": theirs, "stacks": self._folder.name}
        target = "tests.strategies.graphs.engines:serve"
        job = _Job(self.world, target, 24 * 3600.0, {}, True, False, kwargs, self._folder.name)
        self._ranks = [context.Process(target=_main, args=(rank, job)) for rank in range(self.world)]
        for process in self._ranks:
            process.start()
        for end in theirs:
            end.close()

    def _stacks(self) -> str:
        """Where the ranks stand that still run, innermost call first."""
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        told = []
        for rank in range(self.world):
            file = Path(self._folder.name, f"{rank}.stack")
            told.append(f"rank {rank}:\n{file.read_text() if file.exists() else 'not started'}")
        return "\n".join(told)

    def stop(self) -> None:
        for process in self._ranks:
            _end(process)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
