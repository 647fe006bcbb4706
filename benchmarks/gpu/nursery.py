"""Ranks of short runs on emulated cards, forked from one process that has imported what they need.

Most of a short run's processor time is imports. A rank is a process of its own all the same: CUDA, its allocator and
the process group start in it. `python -m benchmarks.gpu.nursery` serves the requests of a `Nursery`, one a line.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.plan.client import Planner
    from shardkit.plan.target import Target

IMPORTED = (
    "torch._dynamo", "deepspeed", "shardkit.train", "shardkit.run.trainer", "shardkit.run.planning",
    "shardkit.strategies.fsdp", "shardkit.strategies.zero.engine", "shardkit.memory.tracing.traced_step",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert", "vit", "swin2sr", "mixtral")),
)  # fmt: skip


class Nursery:
    """Starts ranks with the environment that it was made with; a context manager that ends its process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.nursery"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, **environment, "DS_ACCELERATOR": "cuda"},
        )  # fmt: skip

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # the end of its input is its end

    def train(self, settings: Sequence[str], ranks: int) -> tuple[int, str]:
        """Train on as many emulated cards; returns the exit code and the ranks' stderr.

        The ranks that still run when one has failed are killed.

        Raises:
            RuntimeError: the process that forks them is gone.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps({"settings": list(settings), "ranks": ranks}), file=stdin, flush=True)
        answer = stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks ranks ended with {self._process.wait()}")
        code, output = json.loads(answer)
        return int(code), str(output)


class Helpers:
    """Processes that serve one case after the other; a context manager that ends them."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._nurseries: dict[str, Nursery] = {}
        self._ended = ExitStack()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.close()
        self._end_planner()

    def planner(self, target: Target) -> Planner:
        """The planner of the last request, if it was for the same target."""
        from shardkit.plan.client import Planner

        if self._planner is None or self._planner.target != target:
            self._end_planner()
            self._planner = Planner(target).__enter__()
        return self._planner

    def nursery(self, environment: Mapping[str, str]) -> Nursery:
        key = json.dumps(environment, sort_keys=True)
        if key not in self._nurseries:
            self._nurseries[key] = self._ended.enter_context(Nursery(environment))
        return self._nurseries[key]

    def _end_planner(self) -> None:
        if self._planner is not None:
            self._planner.__exit__(None, None, None)
        self._planner = None


def _serve(requests: IO[str], answers: IO[str]) -> None:
    import torch

    there = torch.cuda.is_available
    torch.cuda.is_available = lambda: False  # torchao asks the card when it is imported: then CUDA would not fork
    for name in IMPORTED:
        importlib.import_module(name)
    torch.cuda.is_available = there
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("an import has initialised CUDA: ranks cannot be forked")
    for line in requests:
        print(json.dumps(_train(**json.loads(line))), file=answers, flush=True)


def _train(settings: Sequence[str], ranks: int) -> tuple[int, str]:
    from shardkit.launch.local.rendezvous import one_node_environment, private_folder

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:  # a lock that another thread holds would stay locked in the ranks
        raise RuntimeError(f"{threads} threads run here: ranks cannot be forked")
    with private_folder() as folder, tempfile.TemporaryFile() as output:
        world = one_node_environment(folder, True, os.environ)
        world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        running = set()
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                place = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                _be_rank(settings, place if ranks > 1 else {}, output.fileno())
            running.add(pid)
        code = 0
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status and not code:
                code = os.waitstatus_to_exitcode(status)
                for other in running:
                    os.kill(other, signal.SIGKILL)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _be_rank(settings: Sequence[str], world: Mapping[str, str], output: int) -> None:
    """Train in this process, and end it; it never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream, target in ((0, null), (1, null), (2, output)):
            os.dup2(target, stream)
        os.environ.update(world)
        from shardkit.run.first_step import FirstUpdate
        from shardkit.train import main

        FirstUpdate.check = _nothing_moves  # type: ignore[assignment, method-assign]
        code = main(list(settings))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _nothing_moves(first_update: Any, lr: float) -> None:
    """Stands for the check that the first step changes a parameter: these cards compute nothing."""
    first_update.is_checked = True


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries talk while they are imported
    _serve(sys.stdin, answers)
