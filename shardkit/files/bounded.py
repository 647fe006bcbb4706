"""Parse a file of a stranger in a child process, which its parent bounds in memory and time.

Small files can ask for gigabytes and minutes in more ways than checks can list. A parser that stays within the limits
in the child does so in its parent as well.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError, ShardkitError, gib, printable

T = TypeVar("T")
VARIABLE = "SHARDKIT_FILE_LIMITS"
"""The variable with a factor for every limit: 4 allows four times the memory and the time."""


@dataclass(frozen=True)
class Limit:
    """Limits for one kind of file: a fixed part, and a part in proportion to the file's size.

    Attributes:
        n_bytes: memory beside what the process has.
        times: further bytes of memory for each byte of the file.
        seconds: of time.
        bytes_per_s: bytes of the file that get a further second each.
    """

    n_bytes: int
    times: int
    seconds: float
    bytes_per_s: int

    def at(self, size: int) -> tuple[int, float]:
        """(bytes, seconds) for a file of this size."""
        n_bytes, seconds = self.n_bytes + self.times * size, self.seconds + size / self.bytes_per_s
        return int(n_bytes * factor()), seconds * factor()


MIB = 2**20
LIMITS = {
    "checkpoint": Limit(512 * MIB, 1, 15, 100 * MIB),
    "tokenizer": Limit(768 * MIB, 100, 15, MIB),
    "data file": Limit(1024 * MIB, 8, 20, MIB // 32),
    "run directory": Limit(768 * MIB, 100, 20, MIB),
}
"""Kind of file → its limits; SECURITY.md has the same table."""


def factor() -> float:
    """The factor for every limit, from the environment.

    Raises:
        ConfigError: it is not a positive number.
    """
    text = os.environ.get(VARIABLE, "1")
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ConfigError(f"{VARIABLE}={text!r} is not a positive number", f"unset it, or set {VARIABLE}=4")
    return number


parent_reports_end = False
"""True in a child whose parent tells the user why it ended. Only such a process may be killed by `time_limit`."""


def in_child(kind: str, name: str, size: int, function: Callable[[], T], error: type[ShardkitError]) -> T:
    """The result of `function`, computed in a forked child within the limits of `LIMITS[kind]`.

    The child's stderr is closed: libraries write there before they give up. A call inside such a child is direct.

    Args:
        name: the file's name, for messages.
        size: the file's bytes.
        function: returns something that can be pickled; it may raise `ShardkitError`.
        error: raised when a limit is reached, or the child ends without an answer.

    Raises:
        ShardkitError: what `function` raised, or `error`.
    """
    if parent_reports_end:
        return function()
    n_bytes, seconds = LIMITS[kind].at(size)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which the child does not need
        child = os.fork()
    if child == 0:
        _answer(writer, n_bytes, function)
    os.close(writer)
    try:
        content = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if content is None:
        raise beyond(name, kind, f"{seconds:.3g} s", error)
    if not content and status & 127 == signal.SIGPROF:
        raise beyond(name, kind, f"{seconds:.3g} s", error)
    if not content:
        raise error(f"{name} cannot be read: the process that parsed it was ended by signal {status & 127}", _FIX)
    outcome, value = pickle.loads(content)
    if outcome == "memory":
        raise beyond(name, kind, f"{gib(n_bytes)} of memory", error)
    if outcome == "result":
        result: T = value
        return result
    raise value if isinstance(value, ShardkitError) else error(f"{name} cannot be read: {value}", _FIX)


_FIX = "do not trust this file; if it is yours, write it again"


def beyond(name: str, kind: str, amount: str, error: type[ShardkitError]) -> ShardkitError:
    """The error for a file that reached a limit; `amount` says which."""
    return error(
        f"{name} takes more than {amount} to read, the limit for a {kind} of its size",
        f"do not trust this file; if it is yours, set {VARIABLE}=4 for four times the limits",
    )


def _answer(writer: int, n_bytes: int, function: Callable[[], Any]) -> NoReturn:
    """In the child: write the outcome to the pipe, and end without running anything of the parent's."""
    global parent_reports_end
    parent_reports_end = True
    try:
        gc.freeze()  # to collect the parent's objects here would copy their pages
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory(n_bytes)
        try:
            content = pickle.dumps(("result", function()))
        except MemoryError:
            content = pickle.dumps(("memory", None))
        except ShardkitError as error:
            content = pickle.dumps(("error", error))
        except BaseException as error:  # tokenizers' panics are no Exceptions
            content = pickle.dumps(("error", printable(f"{type(error).__name__}: {error}")))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)
    finally:
        os._exit(0)


def _limit_memory(n_bytes: int) -> None:
    """Limit this process's address space; on Linux alone."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@contextmanager
def time_limit(seconds: float, error: ShardkitError) -> Iterator[None]:
    """Raise `error` in this block after `seconds`; the main thread alone may call it.

    Python runs signal handlers between bytecodes, so one long operation in C, such as a comparison of nested lists, is
    not interrupted. A process whose parent reports its end is killed by SIGPROF two seconds of CPU time later.
    An alarm that was set before goes on after the block.
    """

    def stop(*_: Any) -> None:
        raise error

    handler, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    # Repeated each second: jinja2 swallows any exception while it computes a template's constants.
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    if parent_reports_end:
        signal.setitimer(signal.ITIMER_PROF, seconds + 2)
    try:
        yield
    finally:
        if parent_reports_end:
            signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s > 0:
            elapsed_s = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(remaining_s - elapsed_s, 0.001), interval_s)


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[None]:
    """Let the process's private memory grow by at most `n_bytes` in this block; on Linux alone.

    Beyond it, allocations raise MemoryError. The limit holds for all threads, so that others should need little
    meanwhile. A lower limit of the user's stays.
    """
    used = data_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if used is None or (soft != resource.RLIM_INFINITY and soft <= used + n_bytes):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (used + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int | None:
    """The bytes of this process that RLIMIT_DATA counts, or slightly more; None where the system does not tell."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # not `open`: it would take as long as a short template
    except FileNotFoundError:
        return None
    try:
        return int(os.read(file, 256).split()[5]) * resource.getpagesize()
    finally:
        os.close(file)


def _read(reader: int, deadline: float) -> bytes | None:
    """All that the child writes; None if it has not ended at `deadline`."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
