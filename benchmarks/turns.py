"""Runs of two ranks that take a step on request: several runs can take turns."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from .common import REPO
from .overhead import rank_environ, torchrun

RANKS = 2  # as many as overhead.torchrun starts
LIMIT_S = 240  # for a start, and for a step


class Ranks:
    """The measuring side. Each line to a rank asks for a step; each line from it is the result.

    Args:
        name: for errors.
        worker: module and arguments of a rank, which calls `serve` with its last argument, the folder.
        folder: directory for the ranks' files.
        limit_s: the most seconds that ranks may take to start, and for an answer.

    Raises:
        RuntimeError: a rank ended early, or took too long; includes the ranks' output.
    """

    def __init__(self, name: str, worker: Sequence[str], folder: Path, limit_s: float = LIMIT_S) -> None:
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
                torchrun([*worker, str(self.scratch)]),
                cwd=REPO,
                env=rank_environ(),
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

    def answers(self, asked: str | None = None) -> list[dict[str, Any]]:
        """The next line of each rank."""
        try:
            for stream in self.streams if asked else ():
                print(asked, file=stream, flush=True)
            lines = [stream.readline() for stream in self.streams]
        except OSError as error:
            raise self._failed() from error
        if not all(lines):
            raise self._failed()
        return [json.loads(line) for line in lines]

    def first_step(self) -> tuple[float, float]:
        """(seconds from the command to the first step's end on the last rank, its loss)."""
        found = self.answers()
        return max(answer["at"] for answer in found) - self.began, mean_loss(found)

    def step(self) -> tuple[float, float]:
        """(seconds on the slower rank, mean loss: all ranks have the same number of targets)."""
        found = self.answers("step")
        return max(answer["seconds"] for answer in found), mean_loss(found)

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


def mean_loss(answers: Sequence[dict[str, Any]]) -> float:
    return float(sum(answer["loss"] for answer in answers) / len(answers))


def serve(
    scratch: str, answers: Callable[[TextIO], Iterator[dict[str, Any]]], end: Callable[[], None] | None = None
) -> None:
    """The rank's side: send each of `answers`, which read the requests; then `end`, by default `leave`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{scratch}/turns")
        stream = connection.makefile("rw")
        for answer in answers(stream):
            print(json.dumps(answer), file=stream, flush=True)
        stream.close()
    (end or leave)()


def timed(steps: Iterator[float], stream: TextIO) -> Iterator[dict[str, float]]:
    """The first step's loss at once, then one step for each line received."""
    yield {"loss": next(steps), "at": time.time()}
    while stream.readline():
        began = time.perf_counter()
        yield {"loss": next(steps), "seconds": time.perf_counter() - began}


def leave() -> None:
    import torch.distributed as dist

    gc.collect()  # an FSDP2 model that outlives the group can abort the process at exit
    if dist.is_initialized():
        dist.destroy_process_group()
