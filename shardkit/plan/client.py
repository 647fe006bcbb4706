"""Run the planner in its own process: the caller needs no torch and survives a crash of the trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, Literal

from .. import errors
from ..config.libraries import NameGone
from ..config.schema import RunConfig
from ..errors import ShardkitError
from ..files import module_command
from .model.estimate import MemoryEstimate, Method
from .target import Target

Look = Literal["good", "any"]


class Planner:
    """Predicts the memory of configs on one target; a context manager that ends its processes on exit.

    Rank 0 has the largest shard. Where it may not take the most (ZeRO-1 and 2 with several buckets), a second process
    plans the last rank. A process tries a fake CUDA device first. If the device fails or crashes it, another process
    traces CPU tensors instead, and the estimates say so. `niceness`: of these processes.
    """

    def __init__(self, target: Target, niceness: int = 0) -> None:
        self.target = target
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self.is_stopped = threading.Lock(), False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the planner
        self._ask: IO[str] | None = None
        self._hear: IO[str] | None = None
        self.method: Method | None = None
        self._last_rank_planner: Planner | None = None

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._log.close()
        if self._last_rank_planner is not None:
            self._last_rank_planner.__exit__(*error)

    def predict(
        self,
        config: RunConfig,
        *,
        all_layers: bool = False,  # trace every layer of a deep model
        timed: bool = False,  # also predict how long a step takes
        rough: bool = False,  # trace less, for a first look (see `predict.predict`): of rank 0 alone
    ) -> MemoryEstimate:
        """Predict the memory of the target's rank, or of the one that takes the most, with the target's limits."""
        answer = self._ask_for(
            config, {"all_layers": all_layers, "timed": timed, "rough": rough, "evaluates": not rough}
        )
        estimate = self._limited(answer)
        if rough or answer["alike"] or self.target.rank is not None:
            return estimate
        with self._lock:
            if self._last_rank_planner is None:
                target = replace(self.target, rank=self.target.world_size - 1)
                self._last_rank_planner = Planner(target, self._niceness)
                self._last_rank_planner.is_stopped = self.is_stopped
        last_estimate = self._last_rank_planner.predict(config, all_layers=all_layers, timed=timed)
        return max(estimate, last_estimate, key=lambda candidate: candidate.needed)

    def first_look(self, config: RunConfig) -> MemoryEstimate | None:
        """Predict from a few layers, before a slow `predict`; `None` where this is no faster, far off, or fails."""
        try:
            return self.rough(config, look="good")
        except ShardkitError:
            return None  # `predict` raises what is wrong with the config itself

    def rough(self, config: RunConfig, look: Look = "any") -> MemoryEstimate | None:
        """Predict from traces of a few layers; `None` where an exact prediction is as fast, or `look` asks for more.

        `look`: "any" also where the buckets of ZeRO span layers: such predictions are comparable only to each other.
        """
        answer = self._ask_for(config, {"rough": True, "evaluates": look == "good"}, look)
        return None if answer["estimate"] is None else self._limited(answer)

    def _limited(self, answer: dict[str, Any]) -> MemoryEstimate:
        estimate = MemoryEstimate.from_json(answer["estimate"])
        return estimate.limited(self.target.device_memory, self.target.host_memory)

    def _ask_for(self, config: RunConfig, how: Mapping[str, bool], look: Look | None = None) -> dict[str, Any]:
        """The worker's answer to a config; an error there is raised here."""
        if self._process is None:
            self._start()
        request = {"config": config.model_dump(mode="json"), "how": dict(how), "look": look or ""}
        answer = self._talk(json.dumps(request))
        if "error" in answer:
            name, cause, fix = answer["error"]
            kind = getattr(errors, name, ShardkitError)
            if answer["over"]:
                self._end()
            raise kind(cause, fix) from RuntimeError(answer["trace"])
        return answer

    @contextmanager
    def stopping_after(self, seconds: float) -> Iterator[None]:
        """Stop for good, as `stop` does, if the block takes longer."""
        timer = threading.Timer(seconds, self.stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def stop(self) -> None:
        """Kill the process for good, from another thread: a `predict` in progress raises a ShardkitError."""
        with self._lock:
            self.is_stopped = True
            if self._process is not None:
                self._process.kill()
            if self._last_rank_planner is not None:
                self._last_rank_planner.stop()

    def _start(self) -> None:
        for fakes in ("cuda", "cpu") if self.target.gpu is not None else ("cpu",):
            self._spawn(fakes)
            reply = self._talk(json.dumps(self.target.to_json()), may_die=fakes == "cuda")
            if "ready" in reply:
                self.method = reply["ready"]
                return
            self._end()
            if "error" in reply and fakes == "cpu":
                raise NameGone(*reply["error"][1:])

    def _spawn(self, fakes: str) -> None:
        ask_read, ask_write = os.pipe()
        hear_read, hear_write = os.pipe()
        with self._lock:
            self._process = subprocess.Popen(
                [*module_command("shardkit.plan.worker"), str(ask_read), str(hear_write), fakes],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(ask_read, hear_write),
                env=_environment(),
            )
            if self._niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, self._niceness)
            if self.is_stopped:
                self._process.kill()
        os.close(ask_read)
        os.close(hear_write)
        self._ask = os.fdopen(ask_write, "w", encoding="utf-8")
        self._hear = os.fdopen(hear_read, encoding="utf-8")

    def _talk(self, line: str, may_die: bool = False) -> dict[str, Any]:
        """Send a line and read the answer; empty if the process died and `may_die` allows it."""
        assert self._ask is not None and self._hear is not None
        try:
            self._ask.write(line + "\n")
            self._ask.flush()
        except BrokenPipeError:
            pass  # The process is dead: the read below finds no answer, and raises its last words.
        if answer := self._hear.readline():
            return json.loads(answer)  # type: ignore[no-any-return]
        code = self._process.wait() if self._process else 0
        if may_die and code != -signal.SIGKILL:  # the fake device never causes a SIGKILL
            return {}
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        self._end()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise ShardkitError(
            f"this step cannot be traced: the planning process {how}",
            ("see whether memory ran out here (dmesg)" if code == -signal.SIGKILL else "change what crashes it")
            + "; SHARDKIT_DEBUG=1 shows its last words",
        ) from RuntimeError("\n".join(words[-40:]))

    def _end(self) -> None:
        for pipe in (self._ask, self._hear):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # The process has ended before it read all that was written: nobody waits for it any more.
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
        self._ask = self._hear = None


def _environment() -> dict[str, str]:
    """The planner's environment, without the rank variables of a job that this process may belong to."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith("TORCHELASTIC")}
    # Libraries' compiled functions (8-bit optimizers) run eagerly: the compiler does not support dispatch modes.
    # A plan reads files of this machine. A path that is missing here may look like a model's name on a hub.
    offline = {"HF_HUB_OFFLINE": "1"}
    return {**inherited, **offline, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}


def plan(config: RunConfig, target: Target) -> MemoryEstimate:
    with Planner(target) as planner:
        return planner.predict(config)
