"""Errors a user can act on: one line of cause, one line of fix, sizes written the same way everywhere."""

from __future__ import annotations

import os
import sys


class ShardkitError(Exception):
    """Base of every error that the command line reports without a traceback.

    Attributes:
        cause: what was set and what was found, one line.
        fix: what to change, one line; may be empty when there is nothing to advise.
        exit_code: 2 for errors a user can correct, other values are documented in docs/reference.md.
    """

    exit_code = 2

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause = cause
        self.fix = fix
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
    """A checkpoint that cannot be written, found or trusted."""


class TrainingError(ShardkitError):
    """The run itself went wrong: a loss that is not finite, parameters that do not move."""

    exit_code = 1


class OutOfMemoryError(ShardkitError):
    """A rank asked for memory that is not there. Not started again: with the same settings it would ask again."""

    exit_code = 3


def report(error: ShardkitError) -> int:
    """Print the error's cause and fix on stderr, after its traceback if SHARDKIT_DEBUG=1; returns the exit code."""
    if os.environ.get("SHARDKIT_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    fix = f"\n  fix: {error.fix}" if error.fix else ""
    print(f"error: {error.cause}{fix}", file=sys.stderr, flush=True)
    return error.exit_code


def gib(n_bytes: float, decimals: int = 2) -> str:
    """Bytes as messages and tables write them: in GiB, or in MiB below a tenth of a GiB."""
    if abs(n_bytes) < 0.1 * 2**30:
        return f"{n_bytes / 2**20:.1f} MiB"
    return f"{n_bytes / 2**30:.{decimals}f} GiB"
