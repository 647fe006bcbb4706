"""pytest for CI, where what fails runs once more by itself: `python -m tests.again [pytest options]`, for `.ci/run`.

A test that fails and then passes alone, without workers, does not fail the run. It is unstable: `python -m tests.again
--list` prints its line for tests/unstable.txt, which a later change has to empty. Nothing else is ever run again: no
test of a run that more than LIMIT tests fail, and no session that ends for another reason than failed tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

LIMIT = 3
LISTED = Path("tests/unstable.txt")
SEEN = Path("build/unstable.txt")
"""The unstable tests of this run of CI; `.ci/run` deletes it first."""
UNTIL = "TESTS_AGAIN_UNTIL"
"""The time (seconds since the epoch) after which no test may begin again."""
_PASSED = "TESTS_AGAIN_PASSED"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what passes: pytest's own cache drops a skipped test from the failed ones too."""
    if _PASSED in os.environ and report.when == "call" and report.passed:
        with open(os.environ[_PASSED], "a") as file:
            file.write(f"{report.nodeid}\n")


def run(options: list[str]) -> int:
    """pytest's exit code, or 0 if every failed test passes the second time."""
    with tempfile.TemporaryDirectory(prefix="again-") as folder:
        options = [*options, "-o", f"cache_dir={folder}/cache"]
        code = _pytest(options)
        if code != pytest.ExitCode.TESTS_FAILED:
            return code
        failed = json.loads(Path(folder, "cache/v/cache/lastfailed").read_text())
        if len(failed) > LIMIT:
            print(f"{len(failed)} tests failed; more than {LIMIT} are not run again", flush=True)
            return code
        print(f"once more: {', '.join(failed)}", flush=True)
        if UNTIL in os.environ:
            options += [f"--budget-s={float(os.environ[UNTIL]) - time.time():.0f}"]
        passed = Path(folder, "passed")
        passed.touch()
        options += ["-n", "0", "-p", "tests.again", "--last-failed", "--last-failed-no-failures=none"]
        if _pytest(options, {_PASSED: str(passed)}) or not set(failed) <= set(passed.read_text().splitlines()):
            return code
        SEEN.parent.mkdir(exist_ok=True)
        with SEEN.open("a") as file:
            file.writelines(f"{name}\n" for name in failed)
        return 0


def _pytest(options: list[str], variables: dict[str, str] | None = None) -> int:
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, env={**os.environ, **(variables or {})}).returncode


def report() -> int:
    """Print the unstable tests, old and new; 1 if they are more than LIMIT."""
    listed, seen = (path.read_text().splitlines() if path.exists() else [] for path in (LISTED, SEEN))
    listed = [line for line in listed if line and not line.startswith("#")]
    for name in listed:
        print(f"unstable: {name} ({LISTED}): find out why, and delete its line")
    for name in sorted({*seen} - {*listed}):
        print(f"unstable: {name}: failed, and passed when it ran once more; add this line to {LISTED}")
    if len({*listed, *seen}) > LIMIT:
        print(f"more than {LIMIT} tests are unstable: mend one first")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(report() if sys.argv[1:] == ["--list"] else run(sys.argv[1:]))
