"""Detect a rank without progress, report where every rank is, and end the job: it can then restart.

Each rank has its own thread, which no collective can block. When a step takes too long it writes this rank's stacks
to `RUN_DIR/logs/hang/rank_N.txt`; rank 0 then compares how far the ranks got and names those that did not arrive.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from ..errors import TrainingError, listed, report
from ..launch.failures import failure
from ..parallel.compat import nccl_trace, progress_of_groups

Loss = TypeVar("Loss")

_LOG = logging.getLogger(__name__)
WATCHED_S = 7 * 24 * 3600.0
"""Timeout of collectives in a watched job. It names no rank, and counts time while the job is suspended."""


@dataclass(frozen=True)
class Part:
    """A part of a run, and how long it may go on without a beat."""

    limit_s: float
    key: str = "run.step_timeout_s"  # the setting of the limit
    # called when the limit has passed; a new value counts as progress and restarts the limit
    signs: Callable[[], object] = lambda: None
    # rank → what that rank is doing in this part, as far as this rank can tell
    phase: Callable[[int], str] | None = None


class Watchdog:
    """Watches one rank between `start` and `stop`.

    `folder`: where the ranks write their stacks; on a file system that they share. `limit_s`: longest time without a
    `beat`; time in which the process is suspended does not count. `settle_s`: how long rank 0 waits for the other
    ranks' files before it names the missing ones. `hosts`: the host of each rank. `block`: returns the name of the
    block that this rank called last; empty if there is none. `pulse`: called every `pulse_s` seconds of a step that
    goes on, with its number, its part and its seconds so far.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limit_s: float,
        settle_s: float = 5.0,
        block: Callable[[], str] = str,
        hosts: Sequence[str] = (),
        key: str = "run.step_timeout_s",
        pulse: Callable[[int, str, float], None] | None = None,
        pulse_s: float = 30.0,
    ) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._part, self._hosts = Part(limit_s, key), hosts
        self._settle_s, self._block = settle_s, block
        self._pulse, self._pulse_s = pulse, pulse_s
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
        """The loss function with a beat before and after: a rank stuck in forward is behind one waiting in backward."""

        def watched(*args: Any) -> Loss:
            self.beat(self._step, "forward")
            total = loss(*args)
            self.beat(self._step, "backward or update")
            return total

        return watched

    def set_limit(self, seconds: float) -> None:
        """Change the limit to `run.step_timeout_s`, after the first step, which may compile."""
        self._part = Part(seconds)

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Watch a part, such as a save, by its own limit."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self.beat(self._step, self._doing)
            self._part = before

    def allowing(self, seconds: float) -> AbstractContextManager[None]:
        """Allow a part to take longer than a step: up to `seconds`, the value of `run.init_timeout_s`."""
        now = self._part
        return self.within(now if now.limit_s >= seconds else Part(seconds, "run.init_timeout_s", now.signs, now.phase))

    def _watch(self) -> None:
        """Count this thread's own ticks: a suspended process has none, and no other rank makes progress meanwhile."""
        idle, beats, now = 0.0, self._beats, time.monotonic()
        seen: object = None
        step, began, pulsed = self._step, now, now
        while not self._ended.wait(tick := min(1.0, self._part.limit_s / 10, self._pulse_s)):
            part = self._part  # before the beats: `within` beats, then restores it
            passed, now = time.monotonic() - now, time.monotonic()
            if self._step != step:
                step, began, pulsed = self._step, now, now
            elif self._pulse is not None and now - pulsed >= self._pulse_s:
                pulsed = now
                self._pulse(step, self._doing, now - began)
            if beats != self._beats:
                beats, idle, seen = self._beats, 0.0, part.signs()  # as the part begins
                continue
            idle += min(passed, 2 * tick)
            if idle <= part.limit_s:
                continue
            sign = part.signs()
            if sign != seen:
                idle, seen = 0.0, sign
            else:
                self._bite(part)

    def _bite(self, part: Part) -> None:
        at, waits = innermost(sys._current_frames().get(threading.main_thread().ident or 0))
        state = {"rank": self._rank, "step": self._step, "doing": self._doing, "beats": self._beats}
        state |= {"at": at, "waits": waits, "block": self._block(), "host": self._host(self._rank)}
        state |= {"phase": part.phase(self._rank) if part.phase is not None else "", "groups": progress_of_groups()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._file(self._rank).open("w") as file:
                file.write(json.dumps(state) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as problem:  # the job must end anyway
            _LOG.error("cannot write %s: %s", self._folder, problem)
        # In a thread: a GPU that hangs may block it forever.
        threading.Thread(target=dump_collectives, args=(self._rank,), name="flight recorder", daemon=True).start()
        # Rank 0 reports first; the others end by themselves in case rank 0 is stuck.
        time.sleep(self._settle_s * (1 if self._rank == 0 else 2))
        if self._beats != state["beats"]:  # progress after all; a collective's timeout would not have beaten
            return
        late = behind([*map(self._state, range(self._world_size))], lambda rank: self._silent(rank, part))
        part_name = "the step" if part.phase is None else "a save"
        error = TrainingError(
            f"no progress for {part.limit_s:.0f} s at step {self._step} ({self._doing}); {late}",
            f"see the ranks' stacks in {self._folder}; raise {part.key} if {part_name} really takes that long",
        )
        failure.record(error)
        report(error)
        _flush(sys.stdout)
        os._exit(error.exit_code)  # the main thread may be stuck in a collective for good

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if rank < len(self._hosts) else ""

    def _silent(self, rank: int, part: Part) -> str:
        """A rank that did not answer, with its host and what is known of its part in a save."""
        host = f" on {self._host(rank)}" if self._host(rank) else ""
        return f"{rank}{host}" + (f" ({part.phase(rank)})" if part.phase is not None else "")

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.txt"

    def _state(self, rank: int) -> dict[str, Any] | None:
        """A rank's state from its file; None for a rank without one."""
        try:
            with self._file(rank).open() as file:
                state: dict[str, Any] = json.loads(file.readline())
        except (OSError, ValueError):
            return None
        return state


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
        record = nccl_trace()
        if record is None:
            return None
        path.write_bytes(record)
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
            # `World.sum` waits for a piece of work itself, without a frame of torch.
            waits = waits or isinstance(frame.f_locals.get("work"), dist.Work)
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        # In Python a collective is a call in torch.distributed, one of its operators, or the autograd engine that waits
        # for its hooks.
        waits = waits or f"{os.sep}distributed{os.sep}" in name or name.endswith(f"autograd{os.sep}graph.py")
        waits = waits or (name.endswith(f"torch{os.sep}_ops.py") and "c10d" in str(frame.f_locals.get("self")))
        frame = frame.f_back
    return "nowhere", waits


def behind(states: list[dict[str, Any] | None], name: Callable[[int], str] = str) -> str:
    """The ranks that the others wait for: those without an answer, else those with the least progress.

    `name`: words for a rank that did not answer.
    """
    silent = [name(rank) for rank, state in enumerate(states) if state is None]
    if silent:
        return f"rank(s) {', '.join(silent)} did not even answer: stopped, dead, or their node is lost"
    answered = [state for state in states if state is not None]
    least = min(state["beats"] for state in answered)
    late = [state for state in answered if state["beats"] == least]
    # Of ranks that share a layer, those that wait in it for another one have made as little progress.
    late = [state for state in late if not state["waits"]] or late
    if len(late) == len(answered) and any(
        state.get("phase") for state in answered
    ):  # in a save: those that work, or are stuck
        late = [state for state in answered if not state["phase"].startswith("waiting")]
    if len(late) in (0, len(answered)):  # equal progress: ranks outside a collective keep the others waiting
        late = [state for state in answered if not state["waits"]]
    if len(late) in (0, len(answered)):
        if waits := _groups_of(answered, []):
            return f"all {len(answered)} ranks wait for each other{waits}"
        return f"all {len(answered)} ranks are at the same place, {answered[0]['at']}{_last_blocks(answered)}"
    # Who left out a collective goes on: those that wait for it there have made less progress.
    if all(state["waits"] for state in late):
        ranks = {state["rank"] for state in late}
        for _, begun in _uneven(answered):
            if all(begun.get(rank, 0) == max(begun.values()) for rank in ranks):
                late = [state for state in answered if begun.get(state["rank"], math.inf) < max(begun.values())]
                break
    named = []
    for state in late:
        phase, host = (f", {state['phase']}" if state.get("phase") else ""), state.get("host")
        at = f"(step {state['step']}, {state['doing']}{phase}, {state['at']})"
        named.append(f"rank {state['rank']}{f' on {host}' if host else ''} {at}")
    return f"did not arrive: {'; '.join(named)}{_last_blocks(answered)}{_groups_of(answered, late)}"


def _uneven(states: list[dict[str, Any]]) -> list[tuple[str, dict[int, int]]]:
    return failure.uneven_groups({state["rank"]: state.get("groups", ()) for state in states})


def _groups_of(states: list[dict[str, Any]], late: list[dict[str, Any]]) -> str:
    """The groups in which ranks wait: for `late`, or for any rank that has begun fewer collectives there."""
    texts = []
    for name, begun in _uneven(states):
        most = max(begun.values())
        behind = [rank for rank, number in begun.items() if number < most]
        if not late or any(state["rank"] in behind for state in late):
            fewest = min(begun.values())
            texts.append(
                f"; in the group {name} (ranks {listed([*begun])}) {most} collectives have begun, {fewest} on rank "
                f"{listed(behind)}"
            )
    return "".join(texts)


def _last_blocks(states: list[dict[str, Any]]) -> str:
    """The block that each rank called last, if they differ: their gathers do not match."""
    ranks: dict[str, list[str]] = {}
    for state in states:
        ranks.setdefault(state.get("block") or "none", []).append(str(state["rank"]))
    if len(ranks) < 2:
        return ""
    return "; last blocks: " + ", ".join(f"{name} on rank {', '.join(of[:4])}" for name, of in [*ranks.items()][:4])
