"""Fails a test that leaves something behind: variables, signal handlers, threads, processes, process groups, files,
modes of torch.

What was left is taken away again where that is safe, so that the tests after it are not blamed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
GRACE_S = 30.0
"""For threads and processes that were told to end and have not got there yet: a busy machine may leave one waiting for
many seconds. Nobody waits where nothing is left."""
START_S = 20.0
"""Beyond that for a process that begins a program, which Linux shows without variables until it has: on a busy machine
it may be left waiting there."""
OWN_VARIABLES = ("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
"""How those begin that pytest sets for each test, DeepSpeed when it is imported, and torch's compiler for itself."""
OWN_THREADS = {"tqdm_monitor"}
"""One for the whole process, which a library starts when it first needs it."""
OWN_FILES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
"""What pytest, hypothesis and tools write where they run."""
SHARED = "shardkit.plan.worker"
"""Processes of a module's fixture, which starts them with the first question, and anew after one without an answer."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


MARK = "TESTS_STARTED_BY"
"""The variable, set to the process that runs the tests, by which orphans are known."""
_KERNEL = 2
"""The parent of the kernel's threads, which have no variables."""


@dataclass(frozen=True)
class Seen:
    """What a test finds."""

    variables: dict[str, str]
    handlers: dict[int, object]
    blocked: set[signal.Signals]
    threads: set[threading.Thread]
    processes: set[int]
    group: bool
    modes: tuple[Any, ...]
    folder: str
    files: dict[str, set[str]]


def look() -> Seen:
    """A few file operations: less than a millisecond."""
    folder = os.getcwd()
    return Seen(
        variables={name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)},
        handlers={number: signal.getsignal(number) for number in SIGNALS},
        blocked=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        threads={thread for thread in threading.enumerate() if thread.name not in OWN_THREADS},
        processes=_processes(),
        group=_has_group(),
        modes=_modes(),
        folder=folder,
        files={place: set(os.listdir(place)) - OWN_FILES for place in {folder, str(REPO)}},
    )


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Raises an AssertionError that names all that is there at the end and was not there at the start."""
    before = look()
    yield
    found = list(_left(before))
    assert not found, "this test leaves behind " + "; ".join(found)


def _left(before: Seen) -> Iterator[str]:
    now = look()
    if now.folder != before.folder:
        yield f"the working directory {now.folder}"
        os.chdir(before.folder)
    for place, names in before.files.items():
        if more := set(os.listdir(place)) - OWN_FILES - names:
            yield f"files in {place}: {', '.join(sorted(more))}"
    changed = {
        name
        for name in before.variables.keys() | now.variables.keys()
        if before.variables.get(name) != now.variables.get(name)
    }
    if changed:
        yield f"environment variables: {', '.join(sorted(changed))}"
        for name in changed:
            if name in before.variables:
                os.environ[name] = before.variables[name]
            else:
                del os.environ[name]
    for number, handler in before.handlers.items():
        if now.handlers[number] is not handler:
            yield f"a handler of {signal.Signals(number).name}"
            if handler is not None:  # one that C code set cannot be set from here
                signal.signal(number, handler)
    if now.blocked != before.blocked:
        yield f"blocked signals: {', '.join(one.name for one in now.blocked ^ before.blocked)}"
        signal.pthread_sigmask(signal.SIG_SETMASK, before.blocked)
    if now.modes:
        torch = sys.modules["torch"]
        modes = before.modes or (torch.float32, True, False)
        if now.modes != modes:
            yield f"torch's modes (default type, gradients, autocast on the CPU): {now.modes} instead of {modes}"
            torch.set_default_dtype(modes[0])
            torch.set_grad_enabled(modes[1])
            torch.set_autocast_enabled("cpu", modes[2])
    if now.group and not before.group:
        yield "an initialized process group"
        sys.modules["torch.distributed"].destroy_process_group()
    deadline = time.monotonic() + GRACE_S
    for thread in now.threads - before.threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            yield f"a thread: {thread.name}"
    for pid, words in _wait_for(before.processes, now.processes - before.processes, deadline).items():
        yield f"process {pid}: {words}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _modes() -> tuple[Any, ...]:
    """Empty until torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):
        return ()
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def _has_group() -> bool:
    """Whether torch.distributed is initialized; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if sys.platform == "linux" else set()


def _wait_for(before: set[int], new: set[int], deadline: float) -> dict[int, str]:
    """Command lines of those that a test started and that do not end in time."""
    while True:
        is_tests = {pid: _is_tests(pid, before) for pid in new}
        running = {pid: _command_line(pid) for pid, started_here in is_tests.items() if started_here}
        begins = None in is_tests.values()
        if not (running or begins) or time.monotonic() >= deadline + (START_S if begins else 0.0):
            return running
        time.sleep(0.02)


def _is_tests(pid: int, before: set[int]) -> bool | None:
    """Whether a process runs that a test started: a child, a rank, or an orphan that inherited the mark.

    Not one that a browser or a cluster started, which was there before the test and serves others after it. `None`: a
    process that begins a program is not yet known by its variables.
    """
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:  # it has ended
        return False
    if state == "Z" or pid in servers or int(parent) == _KERNEL:
        return False
    if int(parent) in {os.getpid(), *servers}:
        return SHARED not in _command_line(pid)
    is_marked = _is_marked(pid)
    return is_marked and not (int(parent) in before and _is_marked(int(parent)))


def _is_marked(pid: int) -> bool | None:
    """Whether a process has this one's mark; `None` while it has no variables, as in the middle of `exec`."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return f"{MARK}={os.getpid()}".encode() in variables.split(b"\0") if variables else None


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()[:600]
    return "it has just ended"
