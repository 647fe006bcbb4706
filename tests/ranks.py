"""Run a function on several ranks: `run_ranks(2, "tests.memory.test_ledger:body", x=1)` -> one result per rank.

Imports no torch: ranks come from a server that has loaded it (with OMP_NUM_THREADS=1), or load it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import glob
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
LEAKS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "OMPI_", "PMI_", "PMIX_")
"""Prefixes of variables that would tell a rank that it runs under another launcher."""
STACK = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
"""The signal for which a rank writes where it stands."""
STACK_S = 30.0
"""How long a rank that a busy machine leaves waiting has to write it."""
patience = 1.0
"""How much longer than they are given ranks and commands may take: slow tests have more time than they say."""


class RankError(AssertionError):
    """A rank failed or did not end in time; `rank` failed first, `__cause__` is its exception if it pickles."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def run_ranks(
    world: int,
    target: str,
    *,
    timeout: float = 180,
    env: dict[str, str] | None = None,
    init_group: bool = True,
    gpu: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `module:function(**kwargs)` on `world` fresh processes that form a gloo group; results in rank order.

    With `gpu` each rank has the GPU of its number, the group is NCCL's, and DeepSpeed's accelerator is cuda, not cpu.

    Args:
        world: number of ranks; all on this host, so LOCAL_RANK = RANK.
        target: `package.module:function`, importable from the repository root.
        timeout: seconds for everything, process start included.
        env: variables to set in every rank before torch is imported.
        init_group: False leaves `init_process_group` to the function; `RANKS_STORE` names a file for a FileStore.
        gpu: whether the ranks use GPUs; there must be `world` of them.
        kwargs: passed to the function; must pickle.

    Raises:
        RankError: with the first failing rank's traceback, or where each unfinished rank stood at the timeout.
    """
    context, timeout = _context(env, gpu), timeout * patience
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(world, target, timeout, env or {}, init_group, gpu, kwargs, folder)
        ranks: list[BaseProcess] = [context.Process(target=_main, args=(rank, job)) for rank in range(world)]
        started: list[BaseProcess] = []
        try:
            for process in ranks:
                process.start()
                started.append(process)
            _wait(started, time.monotonic() + timeout)
            exits = [process.exitcode for process in started]  # None: still running, and killed below
            if not any(exits):
                _ask_for_stacks([process for process in started if process.exitcode is None], Path(folder))
        finally:
            for process in started:
                _end(process)
        return _collect(Path(folder), exits, timeout)


def _context(env: dict[str, str] | None, gpu: bool) -> Any:
    """How ranks are started: forked from a server that has imported torch and deepspeed, which saves seconds for each.

    Fresh processes where that could show: with variables that libraries read when they are imported, or with a GPU.
    """
    if env or gpu or glob.glob("/dev/nvidia[0-9]*") or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def _wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Return when all ranks ended well, when one failed, or at the deadline.

    The exit code of each rank that ended is known then: the server of ranks may be late to tell one of them, and a rank
    that crashed would be taken for one that still runs. After a failure the others have half a second to end: a rank
    that crashes closes its connections, by which its peers fail, before it has ended.
    """
    has_failed = False
    with contextlib.ExitStack() as opened:
        pending = {_exit_handle(process, opened): process for process in ranks}
        while pending and not has_failed and (left := deadline - time.monotonic()) > 0:
            has_failed = any(_ended(pending, left))
        if has_failed:
            _ended(pending, 0.5)


def _ended(pending: dict[int, BaseProcess], timeout: float) -> list[int | None]:
    """Exit codes of the ranks that end next, which are pending no longer."""
    processes = [pending.pop(handle) for handle in connection.wait(list(pending), timeout=timeout)]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _exit_handle(process: BaseProcess, opened: contextlib.ExitStack) -> int:
    """A descriptor that is readable once the rank has ended.

    `Process.sentinel` is a pipe that forked grandchildren (data-loader workers) hold open too; a pidfd is not.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or a kernel without it
        return process.sentinel
    opened.callback(os.close, handle)
    return handle


def _ask_for_stacks(ranks: list[BaseProcess], folder: Path) -> None:
    """Let ranks that did not end in time write where they stand, and wait until they have."""
    sizes, deadline = [-1], time.monotonic() + STACK_S
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, STACK)
    while ranks and time.monotonic() < deadline:
        time.sleep(0.2)
        before, sizes = sizes, [path.stat().st_size for path in folder.glob("*.stack")]
        if sizes == before and sum(size > 0 for size in sizes) >= len(ranks):
            break


def _end(process: BaseProcess) -> None:
    """Kill the rank's process group (data-loader workers too), whether or not the rank still runs, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _collect(folder: Path, exits: list[int | None], timeout: float) -> list[Any]:
    """Results in rank order; `exits` are the exit codes before stragglers were killed."""
    world = len(exits)
    for rank, code in enumerate(exits):  # a crash comes before the failures it causes in the other ranks
        if code is not None and not any((folder / f"{rank}.{kind}").exists() for kind in ("result", "failed")):
            raise RankError(rank, f"rank {rank} of {world} died without a result, exit code {code}")
    failures = [pickle.loads(path.read_bytes()) for path in folder.glob("*.failed")]
    if failures:
        _, rank, text, pickled = min(failures, key=lambda item: float(item[0]))
        raise RankError(rank, f"rank {rank} of {world} failed:\n{text}") from (
            pickle.loads(pickled) if pickled else None
        )
    running = [rank for rank, code in enumerate(exits) if code is None]
    if running:
        files = {rank: folder / f"{rank}.stack" for rank in running}
        told = {rank: file.read_text() if file.exists() else "not started" for rank, file in files.items()}
        stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in told.items())
        raise RankError(running[0], f"ranks {running} of {world} did not end within {timeout} s\n{stacks}")
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


class _Job(NamedTuple):
    """The arguments of `run_ranks`, and the folder of its files."""

    world: int
    target: str
    timeout: float
    env: dict[str, str]
    init_group: bool
    gpu: bool
    kwargs: dict[str, Any]
    folder: str


def _main(rank: int, job: _Job) -> None:
    folder = job.folder
    os.setsid()
    _die_with_parent()
    with open(f"{folder}/{rank}.stack", "w") as stack:
        faulthandler.register(STACK, file=stack)
        try:
            result = _call(rank, job)
            _write(f"{folder}/{rank}.result", pickle.dumps(result))
        except BaseException as error:
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)
            except Exception:
                pickled = None
            _write(f"{folder}/{rank}.failed", pickle.dumps((time.monotonic(), rank, traceback.format_exc(), pickled)))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no teardown that could wait for the other ranks
        faulthandler.unregister(STACK)


def _call(rank: int, job: _Job) -> Any:
    for name in [name for name in os.environ if name.startswith(LEAKS)]:
        del os.environ[name]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.world),
        OMP_NUM_THREADS="1",
        RANKS_STORE=f"{job.folder}/store",
        DS_ACCELERATOR="cuda" if job.gpu else "cpu",  # else DeepSpeed takes a GPU wherever it sees one
    )
    os.environ.update(job.env)
    if str(REPO) not in sys.path:
        sys.path.insert(0, str(REPO))

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.gpu:
        torch.cuda.set_device(rank)
    if job.init_group:
        dist.init_process_group(
            "nccl" if job.gpu else "gloo",
            init_method=f"file://{job.folder}/store",
            rank=rank,
            world_size=job.world,
            timeout=timedelta(seconds=max(job.timeout, 60)),  # the caller's time is up before
            device_id=torch.device("cuda", rank) if job.gpu else None,
        )
    module, _, function = job.target.partition(":")
    result = getattr(importlib.import_module(module), function)(**job.kwargs)
    if dist.is_initialized():
        gc.collect()  # a model that outlives the group, in a cycle of references, can abort the process at its exit
        dist.destroy_process_group()
    return result


def _write(path: str, data: bytes) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)


def _die_with_parent() -> None:
    """A killed test run takes its ranks with it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
