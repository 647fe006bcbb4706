"""Runs of two ranks that take a step on request: several runs can take turns.

`python -m benchmarks.turns MODULE:FUNCTION JSON FOLDER` is a rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from .common import REPO, in_turns
from .overhead import rank_environ, torchrun

RANKS = 2  # as many as overhead.torchrun starts
LIMIT_S = 240  # for a start, and for a step


class Ranks:
    """The measuring side. Each line to a rank asks for a step; each line from it is the result.

    Args:
        name: for errors.
        target: `module:function` of a rank, called with the stream of requests, `scratch`, the ranks' folder, and
            `arguments`; it yields the answers.
        folder: directory for the ranks' files.
        limit_s: the most seconds that ranks may take to start, and for an answer.
        checkout: the folder whose packages the ranks import.
        arguments: in JSON's types.

    Raises:
        RuntimeError: a rank ended early, or took too long; includes the ranks' output.
    """

    def __init__(
        self, name: str, target: str, folder: Path, limit_s: float = LIMIT_S, checkout: Path = REPO, **arguments: Any
    ) -> None:
        self.limit_s = limit_s
        self.name, self.scratch = name, Path(tempfile.mkdtemp(dir=folder))
        self.log = self.scratch / "log"
        self.streams: list[Any] = []
        with socket.socket(socket.AF_UNIX) as server, self.log.open("w") as log:
            server.bind(f"{self.scratch}/turns")
            server.listen(RANKS)
            server.settimeout(0.2)
            self.began = time.time()
            self.process = subprocess.Popen(
                torchrun(["benchmarks.turns", target, json.dumps(arguments), str(self.scratch)]),
                cwd=checkout,
                env=rank_environ() | {"PYTHONPATH": str(checkout)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            while len(self.streams) < RANKS:
                self._accept(server)

    def _accept(self, server: socket.socket) -> None:
        if self.process.poll() is not None or time.time() > self.began + self.limit_s:
            raise self._failed()
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return
        connection.settimeout(self.limit_s)
        self.streams.append(connection.makefile("rw"))
        connection.close()  # the stream stays open

    def answers(self, request: str | None = None) -> list[dict[str, Any]]:
        """The next line of each rank."""
        try:
            for stream in self.streams if request else ():
                print(request, file=stream, flush=True)
            lines = [stream.readline() for stream in self.streams]
        except OSError as error:
            raise self._failed() from error
        if not all(lines):
            raise self._failed()
        return [json.loads(line) for line in lines]

    def first_step(self) -> tuple[float, float]:
        """(seconds from the command to the first step's end on the last rank, its loss)."""
        answers = self.answers()
        return max(answer["at"] for answer in answers) - self.began, mean_loss(answers)

    def step(self) -> tuple[float, float, float]:
        """(seconds on the slower rank, mean loss, tokens that the answers count).

        All ranks have the same number of targets.
        """
        answers = self.answers("step")
        tokens = sum(answer.get("tokens", 0) for answer in answers)
        return max(answer["seconds"] for answer in answers), mean_loss(answers), tokens

    def peak(self) -> int:
        """Peak bytes of the rank that took more."""
        return max(int(answer["peak"]) for answer in self.answers())

    def _failed(self) -> RuntimeError:
        self._end()
        return RuntimeError(f"{self.name} stopped:\n{self.log.read_text()[-6000:]}")

    def _end(self) -> int:
        for stream in self.streams:
            stream.close()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            return self.process.wait(60)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._end() and kind is None:
            raise self._failed()


Arms = Mapping[str, Callable[[], Ranks]]
"""Name → what starts the ranks of an arm."""


def starts_of(arms: Arms, rounds: int, before: Callable[[], object] = lambda: None) -> dict[str, list[float]]:
    """Each arm's seconds from the command to the end of the first step; nothing else runs meanwhile."""

    def start(make: Callable[[], Ranks]) -> float:
        before()
        with make() as ranks:
            return ranks.first_step()[0]

    return in_turns({arm: partial(start, make) for arm, make in arms.items()}, rounds)


def side_by_side(arms: Arms, rounds: int) -> tuple[dict[str, float], dict[str, list[tuple[float, float, float]]]]:
    """All arms alive at once: the first step's loss of each, and its steps (`Ranks.step`), taken in turn."""
    with ExitStack() as running:
        alive = {arm: running.enter_context(make()) for arm, make in arms.items()}
        losses = {arm: ranks.first_step()[1] for arm, ranks in alive.items()}
        return losses, in_turns({arm: ranks.step for arm, ranks in alive.items()}, rounds)


def peaks_of(arms: Arms) -> dict[str, int]:
    """Peak bytes of each arm, on the rank that took more."""

    def peak(make: Callable[[], Ranks]) -> int:
        with make() as ranks:
            return ranks.peak()

    return {arm: peak(make) for arm, make in arms.items()}


def mean_loss(answers: Sequence[dict[str, Any]]) -> float:
    return float(sum(answer["loss"] for answer in answers) / len(answers))


def timed(steps: Iterator[Mapping[str, Any]], stream: TextIO) -> Iterator[dict[str, Any]]:
    """The first step's answer at once, then one step for each line received."""
    yield {**next(steps), "at": time.time()}
    while stream.readline():
        began = time.perf_counter()
        yield {**next(steps), "seconds": time.perf_counter() - began}


def serve(target: str, arguments: str, scratch: str) -> None:
    """A rank: send each answer of the target."""
    module, _, function = target.partition(":")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{scratch}/turns")
        stream = connection.makefile("rw")
        for answer in getattr(importlib.import_module(module), function)(stream, scratch, **json.loads(arguments)):
            print(json.dumps(answer), file=stream, flush=True)
        stream.close()
    leave()


def leave() -> None:
    import torch.distributed as dist

    gc.collect()  # an FSDP2 model that outlives the group can abort the process at exit
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(*sys.argv[1:])
