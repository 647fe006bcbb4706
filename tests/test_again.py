"""CI runs what fails once more; only a test that then passes is forgiven, and it is named."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import touched
from tests.commands import environment
from tests.ranks import REPO

FLAKY = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("n", range({flaky}))
def test_flaky(n):
    marker = Path(f"ran{{n}}")
    marker.touch() if (first := not marker.exists()) else None
    assert not first

def test_good():
    assert not Path("good").exists(), "what passed runs once"
    Path("good").touch()
{more}
"""
BROKEN = "def test_broken():\n    assert False\n"
SKIPPED = """
def test_skipped_then():
    if Path("skip").exists():
        pytest.skip("not now")
    Path("skip").touch()
    assert False
"""


def again(folder: Path, *options: str, until: float | None = None) -> subprocess.CompletedProcess[str]:
    variables = environment({"PYTHONPATH": str(REPO)})
    variables.pop("TESTS_AGAIN_UNTIL", None)  # CI's own
    if until is not None:
        variables["TESTS_AGAIN_UNTIL"] = str(until)
    command = [sys.executable, "-m", "tests.again", *options]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def suite(folder: Path, flaky: int = 1, more: str = "") -> Path:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(FLAKY.format(flaky=flaky, more=more))
    return folder


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unstable_test_is_forgiven_and_named(workers: str, tmp_path: Path) -> None:
    done = again(suite(tmp_path), "-q", "-n", workers)
    assert done.returncode == 0, done.stdout
    listed = again(tmp_path, "--list")
    assert listed.returncode == 0 and "test_it.py::test_flaky[0]" in listed.stdout


@pytest.mark.parametrize(
    ("flaky", "more"),
    [(0, BROKEN), (1, BROKEN), (1, SKIPPED), (4, "")],
    ids=["fails again", "one of two", "skipped then", "too many"],
)
def test_what_does_not_pass_the_second_time_fails(flaky: int, more: str, tmp_path: Path) -> None:
    assert again(suite(tmp_path, flaky, more), "-q").returncode == 1
    assert again(tmp_path, "--list").stdout == ""


def test_a_session_that_no_test_failed_keeps_its_exit_code(tmp_path: Path) -> None:
    for options, code in ((["nowhere.py"], 4), (["-k", "nothing"], 5)):
        assert again(suite(tmp_path), "-q", *options).returncode == code


def test_nothing_begins_again_after_the_deadline(tmp_path: Path) -> None:
    (suite(tmp_path) / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    from tests import touched\n    touched.add_options(parser)\n"
        "def pytest_configure(config):\n    from tests import touched\n"
        "    budget = config.option.budget_s\n"
        "    budget is None or config.pluginmanager.register(touched.Budget(budget))\n"
    )
    assert again(tmp_path, "-q", until=time.time() - 5).returncode == 1
    (tmp_path / "ran0").unlink()
    (tmp_path / "good").unlink()
    assert again(tmp_path, "-q", until=time.time() + 60).returncode == 0


def test_more_than_three_unstable_tests_fail(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "build").mkdir()
    (tmp_path / "tests" / "unstable.txt").write_text("# why\ntest_a.py::test_a\ntest_b.py::test_b\n")
    for seen, code in (("test_a.py::test_a\ntest_c.py::test_c\n", 0), ("test_c.py::test_c\ntest_d.py::test_d\n", 1)):
        (tmp_path / "build" / "unstable.txt").write_text(seen)
        assert again(tmp_path, "--list").returncode == code


def test_a_change_touches_the_tests_that_cover_it(request: pytest.FixtureRequest) -> None:
    assert touched.touches({"shardkit/oom/shortage.py"}, {"shardkit/oom"})
    assert touched.touches({"setup.cfg"}, {"setup.cfg"})
    assert not touched.touches({"shardkit/oom_other.py", "docs/oom.md"}, {"shardkit/oom"})
    assert {"tests/test_again.py", "constraints.txt"} <= touched._covered(request.node)
    for path in (*touched.CARD, *touched.VERSIONS):
        assert (touched.REPO / path).exists(), path
