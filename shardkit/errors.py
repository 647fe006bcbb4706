"""Errors that a user can act on, each with a line of cause and a line of fix; sizes in one notation everywhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class ShardkitError(Exception):
    """Base of every error that the command line reports without a traceback.

    `exit_code`: 2 for errors a user can correct, other values are documented in docs/reference.md.
    """

    exit_code = 2

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause = cause  # what was set and what was found, one line
        self.fix = fix  # what to change, one line; may be empty when there is nothing to advise
        super().__init__(f"{cause}\n  fix: {fix}" if fix else cause)

    def __reduce__(self) -> tuple[type[ShardkitError], tuple[str, str]]:
        return type(self), (self.cause, self.fix)


class ConfigError(ShardkitError):
    """A configuration that cannot work: a key, a value, or a combination."""


class LaunchError(ShardkitError):
    """Ranks cannot find each other: contradicting environment, a port in use, too few GPUs."""


class DataError(ShardkitError):
    """Training data that is missing, empty or too short."""


class BuildError(ShardkitError):
    """A native op that does not compile; the cause is the compiler's first error."""


class CheckpointError(ShardkitError):
    """A checkpoint that cannot be written, found or trusted. Names in it are not trusted: they cannot break a line."""

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(printable(cause), printable(fix))


class SaveError(CheckpointError):
    """The last save of a run failed: the training since the previous checkpoint is lost."""

    exit_code = 5


class SupersededError(ShardkitError):
    """Another start owns the run directory: this one may no longer write there."""

    exit_code = 6


class NotPlannedError(ShardkitError):
    """The files of a job ask for something that changes memory and that no plan models, so there is no verdict."""

    exit_code = 7


class TrainingError(ShardkitError):
    """The run itself went wrong: a loss that is not finite, parameters that do not move."""

    exit_code = 1


class OutOfMemoryError(ShardkitError):
    """A rank ran out of memory. The job is not restarted: with the same settings it would run out again."""

    exit_code = 3


@contextmanager
def system_errors(kind: type[ShardkitError], cause: str, fix: str) -> Iterator[None]:
    """Raise an OSError of the block as an error of this kind, with the system's reason behind the cause."""
    try:
        yield
    except OSError as error:
        raise kind(f"{cause}: {error.strerror or error}", fix) from error


def report(error: ShardkitError) -> int:
    """Print the error's cause and fix on stderr, after its traceback if SHARDKIT_DEBUG=1; returns the exit code."""
    if os.environ.get("SHARDKIT_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    fix = f"\n  fix: {error.fix}" if error.fix else ""
    print(printable_lines(f"error: {error.cause}{fix}"), file=sys.stderr, flush=True)
    return error.exit_code


@contextmanager
def importing(words: str, fix: str, kind: type[ShardkitError] = ConfigError) -> Iterator[None]:
    """Import an optional library inside.

    `words`: what needs it, such as `precision.mode=fp8 needs torchao`.
    """
    try:
        yield
    except ImportError as error:
        raise kind(f"{words}, which does not import: {error}", fix) from error


LONGEST = 1000
"""Characters of a line that `printable` shows."""


def printable(text: object) -> str:
    """One line that is safe on any terminal: control characters, line ends and characters that cannot be encoded are
    escaped, and the middle of a very long text is left out."""
    line = str(text)
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def one_line(text: object, limit: int = 200) -> str:
    """Text fit for one line of an error message: `printable`, without line ends, and cut at `limit` characters."""
    flat = printable(" ".join(str(text).split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def printable_lines(text: str) -> str:
    """The text with each of its lines `printable`: it may hold what another program wrote."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


SHOWN = 4
"""Most names that an error lists; further ones are counted, or left out."""


def listed(names: Sequence[object]) -> str:
    """The first names, and a sign that there are more."""
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")


def gib(n_bytes: float, decimals: int = 2) -> str:
    """Format a byte count in the largest unit that gives at least 0.1; zero is 0.0 MiB."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.{decimals}f} GiB"
    if abs(n_bytes) >= 0.1 * 2**20 or n_bytes == 0:
        return f"{n_bytes / 2**20:.1f} MiB"
    return f"{n_bytes / 2**10:.1f} KiB" if abs(n_bytes) >= 0.1 * 2**10 else f"{n_bytes:.0f} B"


BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# As memory vendors and Slurm write sizes: 80GB is 80·10⁹ bytes, 24G is 24·2³⁰.
ANY_UNIT = {
    **BINARY, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str, units: Mapping[str, int] = BINARY) -> int:
    """`1.5GiB` → 1610612736."""
    match = _SIZE.fullmatch(text)
    n_bytes = round(float(match[1]) * units.get(match[2], 0)) if match else 0
    if n_bytes < 1:
        raise ValueError(f"{text!r} is not a size")
    return n_bytes
