"""Run `python -m MODULE …` as a user does, without waiting for torch to be imported anew.

The process is forked from the server of `tests.ranks`, which has imported torch, DeepSpeed and shardkit: seconds of CPU
less for each. What depends on a fresh interpreter (`sitecustomize`, a library that is missing, time to start) needs
`subprocess` itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from . import ranks as rank_processes
from .ranks import LEAKS, REPO, _context, _die_with_parent, _end, _wait


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's, without what tells of a launcher; one thread a rank."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith((*LEAKS, "RANK", "WORLD_SIZE", "LOCAL_"))}
    return {**clean, "OMP_NUM_THREADS": "1", **(extra or {})}


class Done(subprocess.CompletedProcess[str]):
    """How a command ended; `codes` has each rank's exit code, `None` where the rank had to be killed."""

    codes: list[int | None]


def python_m(
    module: str,
    *args: object,
    ranks: int = 0,
    cwd: Path = REPO,
    env: dict[str, str] | None = None,
    timeout: float = 180,
    code: int | None = None,
) -> Done:
    """`python -m module args`, or `ranks` of it with the variables that torchrun sets, in one group.

    A `module` that ends in .py is a script.

    Args:
        env: variables beside those of `environment`.
        timeout: seconds for everything.
        code: the exit code that it must end with; `None` = any.

    Returns:
        As `subprocess.run` does; of several ranks the first exit code that is not 0, and what all of them wrote.

    Raises:
        subprocess.TimeoutExpired: with what was written until then.
    """
    argv = [str(arg) for arg in args]
    with tempfile.TemporaryDirectory(prefix="commands-") as folder, _rendezvous(ranks) as variables:
        processes: list[BaseProcess] = []
        try:
            for rank in range(max(ranks, 1)):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **variables} if ranks else {}
                given = (module, argv, str(cwd), environment({**own, **(env or {})}), f"{folder}/{rank}")
                processes.append(_context(None, False).Process(target=_main, args=given))
                processes[-1].start()
            deadline = time.monotonic() + timeout * rank_processes.patience
            _wait(processes, deadline)
            if any(process.exitcode for process in processes):  # torchrun would end the others; let them say why
                for process in processes:
                    process.join(min(30, max(0.0, deadline - time.monotonic())))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                _end(process)
        out, err = (
            "".join(Path(f"{folder}/{r}.{kind}").read_text() for r in range(len(codes))) for kind in ("out", "err")
        )
    command = [sys.executable, *(["-m"] * (not module.endswith(".py"))), module, *argv]
    if None in codes and not any(codes):
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    done = Done(command, next((code for code in codes if code), 0), out, err)
    done.codes = codes
    assert code is None or done.returncode == code, f"exit code {done.returncode}, not {code}:\n{err}"
    return done


def train_here(argv: list[str]) -> int:
    """`shardkit.train`'s main in this process, which hears SIGUSR2 again after it."""
    from shardkit.train import main

    try:
        return main(argv)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


@contextlib.contextmanager
def _rendezvous(ranks: int) -> Any:
    """The variables of torchrun for `ranks` processes, whose store is this process's, as it is its agent's there."""
    if not ranks:
        yield {}
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def _main(module: str, argv: list[str], cwd: str, env: dict[str, str], files: str) -> NoReturn:
    os.setsid()
    _die_with_parent()
    for descriptor, kind in ((1, "out"), (2, "err")):
        opened = os.open(f"{files}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *argv]
    code: Any = 0
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
