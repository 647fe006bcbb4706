"""One start of an arm of `benchmarks.peers`: two ranks under torchrun, which take a step when they are told to."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from .common import REPO
from .overhead import rank_environ, torchrun
from .peers_arms import steps_of

RANKS = 2  # as overhead.torchrun starts
LIMIT_S = 240  # for a start, and for a step


class Ranks:
    """The side of the measurement. A line to a rank is one more step; a line from it is what became of it.

    Args:
        mode: "turns", or "peak" or "refusal" for one answer of that kind.
        count: how many steps it is going to take.

    Raises:
        RuntimeError: a rank ended early, or took more than four minutes; holds what the ranks printed.
    """

    def __init__(self, engine: str, arm: str, tokens: str, folder: Path, count: int, mode: str = "turns") -> None:
        self.name, scratch = f"{engine} {arm}", tempfile.mkdtemp(dir=folder)
        self.log = Path(scratch, "log")
        self.streams: list[Any] = []
        argv = ["benchmarks.peers", "--worker", mode, engine, arm, tokens, scratch, str(count)]
        with socket.socket(socket.AF_UNIX) as server, self.log.open("w") as log:
            server.bind(f"{scratch}/turns")
            server.listen(RANKS)
            server.settimeout(0.2)
            self.began = time.time()
            self.process = subprocess.Popen(
                torchrun(argv), cwd=REPO, env=rank_environ(), stdout=log, stderr=subprocess.STDOUT
            )
            while len(self.streams) < RANKS:
                self._accept(server)

    def _accept(self, server: socket.socket) -> None:
        if self.process.poll() is not None or time.time() > self.began + LIMIT_S:
            raise self._failed()
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return
        connection.settimeout(LIMIT_S)
        self.streams.append(connection.makefile("rw"))
        connection.close()  # which leaves the stream open

    def _answers(self, asked: str | None = None) -> list[dict[str, Any]]:
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
        """Seconds from the command to its end on the last rank, and its loss."""
        found = self._answers()
        return max(answer["at"] for answer in found) - self.began, fmean(answer["loss"] for answer in found)

    def step(self) -> tuple[float, float]:
        """Seconds that it took the slower rank, and the loss: all ranks have as many targets."""
        found = self._answers("step")
        return max(answer["seconds"] for answer in found), fmean(answer["loss"] for answer in found)

    def peak(self) -> int:
        """Bytes, of the rank that took more."""
        return max(int(answer["peak"]) for answer in self._answers())

    def refusal(self) -> str:
        said: str = self._answers()[0]["refused"]
        return said

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


def worker(mode: str, engine: str, arm: str, tokens: str, scratch: str, count: str) -> None:
    """The side of a rank."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{scratch}/turns")
        stream = connection.makefile("rw")
        steps = steps_of(engine, arm, tokens, scratch, int(count))
        for answer in {"turns": _turns, "peak": _peak, "refusal": _refusal}[mode](steps, stream):
            print(json.dumps(answer), file=stream, flush=True)
        steps.close()
        stream.close()
    _leave()


def _turns(steps: Iterator[float], stream: TextIO) -> Iterator[dict[str, float]]:
    yield {"loss": next(steps), "at": time.time()}
    while stream.readline():
        began = time.perf_counter()
        yield {"loss": next(steps), "seconds": time.perf_counter() - began}


def _peak(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, int]]:
    from torch.profiler import ProfilerActivity, profile

    from .plan_accuracy import allocated, held_addresses

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _loss in steps:
            pass
        gc.collect()
        alive = held_addresses()
    yield {"peak": max(total for _, total in allocated(profiler, alive))}


def _refusal(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, str]]:
    try:
        loss = next(steps)
    except (RuntimeError, ValueError) as error:
        yield {"refused": f"{type(error).__name__}: {error}"}
        return
    raise RuntimeError(f"it trains, with a loss of {loss}: move it to ARMS in peers_arms.py")


def _leave() -> None:
    import torch.distributed as dist

    gc.collect()  # an FSDP2 model that outlives the group can abort the process at exit
    if dist.is_initialized():
        dist.destroy_process_group()
