"""Bound what a stranger's file costs: parse it in a child process, which its parent limits in memory and time.

Small files can ask for gigabytes and minutes in more ways than checks can list. A parser that stays within the limits
in the child does so in its parent as well. The limits are those of the kernel, which hold within operations in C.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import pickle
import re
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ..errors import LONGEST, ConfigError, ShardkitError, gib, printable
from .cgroups import n_cpus

T = TypeVar("T")
VARIABLE = "SHARDKIT_FILE_LIMITS"
"""The variable with a factor for every limit: 4 allows four times the memory and the time."""


class Limit(NamedTuple):
    """Limits for one kind of file: a fixed part, and a part in proportion to the file's size.

    Attributes:
        n_bytes: memory beside what the process has.
        times: further bytes of memory for each byte of the file.
        seconds: of CPU time.
        bytes_per_s: bytes of the file that get a further second each.
    """

    n_bytes: int
    times: int
    seconds: float
    bytes_per_s: int

    def at(self, size: int = 0) -> tuple[int, float]:
        """(bytes, seconds) for a file of this size."""
        n_bytes, seconds = self.n_bytes + self.times * size, self.seconds + size / self.bytes_per_s
        return int(n_bytes * factor()), seconds * factor()


MIB = 2**20
LIMITS = {
    "checkpoint": Limit(512 * MIB, 1, 15, 100 * MIB),
    "tokenizer": Limit(768 * MIB, 100, 15, MIB),
    "data file": Limit(1024 * MIB, 8, 20, MIB // 32),
    "run directory": Limit(768 * MIB, 100, 20, MIB),
    "chat template": Limit(1024 * MIB, 0, 20, MIB),
}
"""Kind of file → its limits; SECURITY.md has the same table."""
_WALL = 4
"""A child may take this many times its CPU time on the clock: a busy machine slows it, a file that waits is ended."""
_NO_MEMORY = re.compile(r"bad_alloc|memory allocation|out of memory|allocate.{0,20}memory", re.IGNORECASE)
"""What libraries in other languages say where Python raises MemoryError."""
_FIX = "do not trust this file; if it is yours, write it again"


def factor() -> float:
    """The factor for every limit, from the environment.

    Raises:
        ConfigError: it is not a positive number.
    """
    text = os.environ.get(VARIABLE, "1")
    if not re.fullmatch(r"(?=.*[1-9])[0-9]{1,5}(\.[0-9]+)?", text):
        raise ConfigError(f"{VARIABLE}={text!r} is not a positive number", f"unset it, or set {VARIABLE}=4")
    return float(text)


_is_child = False


def in_child(kind: str, name: str, files: Iterable[Path], function: Callable[[], T], error: type[ShardkitError]) -> T:
    """The result of `function`, computed in a forked child within the limits of `LIMITS[kind]`.

    The child's stderr is not the parent's: libraries write there before they give up. A call inside such a child is
    direct.

    Args:
        name: the name of the files, for messages.
        files: the files that it reads; their size decides the limits.
        function: returns something that can be pickled; it may raise `ShardkitError`.
        error: raised when a limit is reached, or the child ends without an answer.

    Raises:
        ShardkitError: what `function` raised, or `error`.
    """
    if _is_child:
        return function()
    # A file of holes takes no space; in an archive it is as small as a link.
    sizes = [min(path.stat().st_size, 512 * path.stat().st_blocks) for path in files if path.is_file()]
    n_bytes, seconds = LIMITS[kind].at(sum(sizes))
    beyond_memory = beyond(name, kind, f"{gib(n_bytes)} of memory", error)

    def attempt() -> bytes:
        try:
            with memory_limit(n_bytes, beyond_memory, resource.RLIMIT_AS):
                return pickle.dumps((function(), None))
        except ShardkitError as problem:
            return pickle.dumps((None, problem))

    answer, signum, last_words = _forked(attempt, n_bytes, seconds)
    if answer and signum == 0:
        result, problem = pickle.loads(answer)
    elif signum == signal.SIGPROF:
        problem = slow_row(name, error)
    elif signum in (signal.SIGXCPU, signal.SIGALRM):
        problem = beyond(name, kind, f"{seconds:.3g} s", error)
    elif _NO_MEMORY.search(last_words):
        problem = beyond_memory
    else:
        words = printable(last_words.rpartition("\n")[2]) or "the process that parsed it could not say why"
        reason = f"the process that parsed it was ended by signal {signum}" if signum else words
        problem = error(f"{name} cannot be read: {reason}", _FIX)
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def _forked(attempt: Callable[[], bytes], n_bytes: int, seconds: float) -> tuple[bytes, int, str]:
    """The answer of a child, the signal that ended it, and the last of what it wrote to stderr.

    It gets `seconds` of CPU time, `_WALL` times as much on the clock, and `n_bytes` for each file that it writes.
    """
    global _is_child
    reader, writer = os.pipe()
    try:
        stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
    except OSError:  # no disk has room
        stderr = open(os.devnull, "w+b")  # noqa: SIM115
    with stderr:
        with warnings.catch_warnings():  # of forks beside threads, which the child does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                _is_child = True
                gc.freeze()  # to collect the parent's objects here would copy their pages
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                faulthandler.disable()  # the parent says how this process ended
                os.dup2(stderr.fileno(), 2)
                _lower(resource.RLIMIT_CORE, 0)
                _lower(resource.RLIMIT_FSIZE, n_bytes)
                _lower(resource.RLIMIT_CPU, math.ceil(seconds))
                signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(attempt())
            except BaseException as unexpected:  # tokenizers' panics are no Exceptions
                os.write(2, ("\n" + printable(f"{type(unexpected).__name__}: {unexpected}")).encode())
            finally:
                os._exit(0)
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as pipe:
                answer = pipe.read()
        except BaseException:  # Ctrl-C
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            status = os.waitpid(child, 0)[1]
        stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - 4 * LONGEST))
        return answer, os.WTERMSIG(status), stderr.read().decode(errors="replace")


def beyond(name: str, kind: str, amount: str, error: type[ShardkitError]) -> ShardkitError:
    """The error for a file that reached a limit; `amount` says which."""
    return error(
        f"{name} takes more than {amount}, the limit for a {kind}",
        f"do not trust this file; if it is yours, set {VARIABLE}=4 for four times the limits",
    )


def slow_row(name: str, error: type[ShardkitError]) -> ShardkitError:
    """The error for a process that SIGPROF ended, the alarm for a row with a chat template."""
    return beyond(f"a row of {name}", "chat template", f"{LIMITS['chat template'].at()[1]:g} s", error)


@contextmanager
def time_limit(seconds: float, error: ShardkitError) -> Iterator[None]:
    """Raise `error` in this block when the main thread has used `seconds` of CPU time; no other thread may call it.

    Python runs signal handlers between bytecodes, so one long operation in C, such as a comparison of nested lists, is
    not interrupted. The kernel ends the process then. It counts all threads, so it has to wait until they can only have
    used that much if the block took too long: the seconds, times the CPUs.
    """
    began = time.thread_time()

    def stop(*_: Any) -> None:
        if time.thread_time() - began >= seconds:
            raise error

    handler = signal.signal(signal.SIGVTALRM, stop)
    # Repeated each second: jinja2 swallows any exception while it computes a template's constants.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    profiler = signal.setitimer(signal.ITIMER_PROF, (seconds + 2) * n_cpus())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *profiler)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


@contextmanager
def memory_limit(n_bytes: int, error: ShardkitError, limit: int = resource.RLIMIT_DATA) -> Iterator[None]:
    """Raise `error` when the process's private memory grows by more than `n_bytes` in this block; on Linux alone.

    The limit holds for all threads, so that others should need little meanwhile. A lower limit of the user's stays.

    Args:
        limit: RLIMIT_AS counts mapped files, too.
    """
    used = used_bytes(limit)
    soft, hard = resource.getrlimit(limit) if used is None else _lower(limit, used + n_bytes)
    try:
        yield
    except MemoryError:
        raise error from None
    finally:
        resource.setrlimit(limit, (soft, hard))


def _lower(limit: int, most: int) -> tuple[int, int]:
    """Lower a limit of this process to `most`, unless it is lower already; returns what it was."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    return soft, hard


def used_bytes(limit: int = resource.RLIMIT_DATA) -> int | None:
    """The bytes of this process that a limit counts, or slightly more; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            return int(file.read().split()[0 if limit == resource.RLIMIT_AS else 5]) * resource.getpagesize()
    except FileNotFoundError:
        return None
