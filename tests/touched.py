"""What a change touches: `--touched-since REF` runs only the selected tests that cover a file changed since REF.

A test covers its own file and the paths of its marks `covers`; one that needs a card covers CARD or EMULATION.
`--budget-s` bounds the time: CI runs what the change touches for as long as its hour lasts. `python -m tests.touched`
prints the commit that a change is compared with; with `card`, it says by its exit code whether tests on emulated cards
are touched, before their large environment is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
VERSIONS = ("constraints.txt", "pyproject.toml")
"""Every test depends on them."""
EMULATION = ("tests/emulated_cuda", "shardkit/rehearse")
CARD = (
    *EMULATION, "tests/cuda", "shardkit/activation", "shardkit/checkpoint", "shardkit/hardware", "shardkit/memory",
    "shardkit/oom", "shardkit/parallel", "shardkit/run/profiler.py", "shardkit/strategies",
)  # fmt: skip
DAY_S = 24 * 3600


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--touched-since", metavar="REF", help="only tests that cover a file changed since this commit")
    parser.addoption(
        "--budget-s", type=float, metavar="S", help="skip the tests that have not begun after this number of seconds"
    )


def base() -> str:
    """The commit to compare with: $CI_BASE, where the branch left origin/main, or main as it was a day before.

    The last is for a push to main itself, of which git does not know where it began.
    """
    head = _git("rev-parse", "HEAD").strip()
    for candidate in (os.environ.get("CI_BASE", ""), _git("merge-base", "HEAD", "origin/main", check=False).strip()):
        if candidate and candidate != head:
            return candidate
    day_before = int(_git("log", "-1", "--format=%ct")) - DAY_S
    commit = _git("rev-list", "-1", f"--before={day_before}", "HEAD").strip()
    return commit or _git("hash-object", "-t", "tree", os.devnull).strip()  # a young project: every file is new


def changed_files(ref: str) -> set[str]:
    """Paths, from the repository's root, that differ between `ref` and the working tree."""
    return set(_git("diff", "--name-only", "--no-renames", ref, "--").splitlines())


def touches(changed: set[str], covers: set[str]) -> bool:
    """Whether one of the changed files is covered, by itself or by its folder."""
    return any(file == path or file.startswith(path + "/") for file in changed for path in covers)


def keep_touched(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that cover none of the changed files."""
    if (ref := config.option.touched_since) is None:
        return
    changed = changed_files(ref)
    untouched = [item for item in items if not touches(changed, _covered(item))]
    config.hook.pytest_deselected(items=untouched)
    items[:] = [item for item in items if item not in untouched]


class Budget:
    """Skips the tests that begin after `seconds`; the time runs from when the session begins."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._deadline:
            pytest.skip(f"the {self._seconds:.0f} s of --budget-s are over")


def _covered(item: pytest.Item) -> set[str]:
    path = item.path.relative_to(REPO).as_posix()
    paths = {path, *VERSIONS, *(path for mark in item.iter_markers("covers") for path in mark.args)}
    if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu"):
        paths.update(EMULATION if touches({path}, set(EMULATION)) else CARD)
    return paths


def _git(*words: str, check: bool = True) -> str:
    return subprocess.run(["git", *words], cwd=REPO, check=check, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["card"]:
        sys.exit(not touches(changed_files(base()), {*VERSIONS, *CARD}))
    print(base())
