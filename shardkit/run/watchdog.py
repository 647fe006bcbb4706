"""Detect a rank without progress, report where every rank is, and end the job: it can then restart.

Each rank has its own thread, which no collective can block. When a step takes too long it writes this rank's stacks
to `RUN_DIR/logs/hang/rank_N.txt`; rank 0 then compares how far the ranks got and names those that did not arrive.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from ..errors import TrainingError, report
from ..launch.failures import failure
from ..parallel.compat import nccl_trace

Loss = TypeVar("Loss")

_LOG = logging.getLogger(__name__)
WATCHED_S = 7 * 24 * 3600.0
"""Timeout for collectives of a watched job: their own names no rank, and counts time while the job is suspended."""


def _none() -> object:
    return None


class Watchdog:
    """Watches one rank between `start` and `stop`.

    Args:
        folder: where the ranks write their stacks; on a file system that they share.
        limit_s: longest time without a `beat`; time in which the process is suspended does not count.
        settle_s: how long rank 0 waits for the other ranks' files before it names the missing ones.
        block: returns the name of the block that this rank called last; empty if there is none.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limit_s: float,
        settle_s: float = 5.0,
        block: Callable[[], str] = str,
    ) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._limit_s, self._signs = limit_s, _none
        self._settle_s, self._block = settle_s, block
        self._step, self._doing, self._beats = 0, "start", 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; rename the file that an earlier attempt of this rank left."""
        earlier = self._file(self._rank)
        if earlier.exists():
            earlier.replace(earlier.with_suffix(".earlier.txt"))
        self.beat(self._step, self._doing)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; no effect if it never began."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, step: int, doing: str) -> None:
        """Note that this rank begins `doing` in optimizer step `step`; costs a few attribute writes."""
        self._step, self._doing, self._beats = step, doing, self._beats + 1

    def around(self, loss: Callable[..., Loss]) -> Callable[..., Loss]:
        """`loss`, with a beat before and after: a rank stuck in forward is then behind a rank waiting in backward."""

        def watched(*args: Any) -> Loss:
            self.beat(self._step, "forward")
            found = loss(*args)
            self.beat(self._step, "backward or update")
            return found

        return watched

    def set_limit(self, seconds: float) -> None:
        """Change the limit, after the first step, which may compile."""
        self._limit_s = seconds

    @contextmanager
    def allowing(self, seconds: float, signs: Callable[[], object] = _none) -> Iterator[None]:
        """Allow a part, such as a save, to take longer than a step.

        Args:
            signs: called when the limit has passed; a new value counts as progress and restarts the limit.
        """
        before = self._limit_s, self._signs
        self._limit_s, self._signs = max(self._limit_s, seconds), signs
        try:
            yield
        finally:
            self.beat(self._step, self._doing)
            self._limit_s, self._signs = before

    def _watch(self) -> None:
        """Count this thread's own ticks: a suspended process has none, and no other rank makes progress meanwhile."""
        idle, beats, now = 0.0, self._beats, time.monotonic()
        seen: object = None
        while not self._ended.wait(tick := min(1.0, self._limit_s / 10)):
            limit_s, signs = self._limit_s, self._signs  # before the beats: `allowing` beats, then restores these
            passed, now = time.monotonic() - now, time.monotonic()
            idle = idle + min(passed, 2 * tick) if beats == self._beats else 0.0
            beats = self._beats
            if idle <= limit_s:
                continue
            sign = signs()
            if sign != seen:
                idle, seen = 0.0, sign
            else:
                self._bite()

    def _bite(self) -> None:
        at, waits = innermost(sys._current_frames().get(threading.main_thread().ident or 0))
        where = {"rank": self._rank, "step": self._step, "doing": self._doing, "beats": self._beats}
        where |= {"at": at, "waits": waits, "block": self._block()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._file(self._rank).open("w") as file:
                file.write(json.dumps(where) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as problem:  # the job must end anyway
            _LOG.error("cannot write %s: %s", self._folder, problem)
        # In a thread: a GPU that hangs may block it forever.
        threading.Thread(target=dump_collectives, args=(self._rank,), name="flight recorder", daemon=True).start()
        # Rank 0 reports first; the others end by themselves in case rank 0 is stuck.
        time.sleep(self._settle_s * (1 if self._rank == 0 else 2))
        if self._beats != where["beats"]:  # progress after all; a collective's timeout would not have beaten
            return
        error = TrainingError(
            f"no progress for {self._limit_s:.0f} s at step {self._step} ({self._doing}); {behind(self._states())}",
            f"see the ranks' stacks in {self._folder}; raise run.step_timeout_s if the step really takes that long",
        )
        failure.record(error)
        report(error)
        _flush(sys.stdout)
        os._exit(error.exit_code)  # the main thread may be stuck in a collective for good

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.txt"

    def _states(self) -> list[dict[str, Any] | None]:
        """Each rank's state from its file; None for a rank without one."""
        return [self._state(rank) for rank in range(self._world_size)]

    def _state(self, rank: int) -> dict[str, Any] | None:
        try:
            with self._file(rank).open() as file:
                found: dict[str, Any] = json.loads(file.readline())
        except (OSError, ValueError):
            return None
        return found


def _flush(stream: TextIO) -> None:
    """Write out what this process printed, unless the main thread is stuck in a write and holds the stream."""

    def flush() -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()

    flushing = threading.Thread(target=flush, name="flush", daemon=True)
    flushing.start()
    flushing.join(1.0)


def dump_collectives(rank: int) -> Path | None:
    """Write NCCL's last collectives to the file of its own timeout, which this job would not reach; on GPUs only."""
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not prefix:
        return None
    path = Path(f"{prefix}{rank}")
    try:
        found = nccl_trace()
        if found is None:
            return None
        path.write_bytes(found)
    except (OSError, RuntimeError) as problem:
        _LOG.error("cannot write NCCL's flight record to %s: %s", path, problem)
        return None
    return path


def innermost(frame: FrameType | None) -> tuple[str, bool]:
    """(the innermost frame outside torch, whether the stack waits for other ranks)."""
    waits = False
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        # In Python a collective is a call in torch.distributed, or the autograd engine waiting for its hooks.
        waits = waits or f"{os.sep}distributed{os.sep}" in name or name.endswith(f"autograd{os.sep}graph.py")
        frame = frame.f_back
    return "nowhere", waits


def behind(states: list[dict[str, Any] | None]) -> str:
    """The ranks that the others wait for: those without an answer, else those with the least progress."""
    silent = [str(rank) for rank, state in enumerate(states) if state is None]
    if silent:
        return f"rank(s) {', '.join(silent)} did not even answer: stopped, dead, or their node is lost"
    known = [state for state in states if state is not None]
    least = min(state["beats"] for state in known)
    late = [state for state in known if state["beats"] == least]
    if len(late) == len(known):  # equal progress: ranks outside a collective keep the others waiting
        late = [state for state in known if not state["waits"]]
    if len(late) in (0, len(known)):
        return f"all {len(known)} ranks are at the same place, {known[0]['at']}{_last_blocks(known)}"
    names = "; ".join(f"rank {s['rank']} (step {s['step']}, {s['doing']}, {s['at']})" for s in late)
    return f"did not arrive: {names}{_last_blocks(known)}"


def _last_blocks(states: list[dict[str, Any]]) -> str:
    """The block that each rank called last, if they differ: their gathers do not match."""
    ranks: dict[str, list[str]] = {}
    for state in states:
        ranks.setdefault(state.get("block") or "none", []).append(str(state["rank"]))
    if len(ranks) < 2:
        return ""
    return "; last blocks: " + ", ".join(f"{name} on rank {', '.join(of[:4])}" for name, of in [*ranks.items()][:4])
